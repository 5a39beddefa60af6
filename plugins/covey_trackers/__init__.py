"""Experiment trackers: TensorBoard, Weights & Biases, trackio."""
