"""The files and folders of trackers in a run folder."""

from covey.monitor.run_files import RunFile

TRACKING = "tracking-id"
TENSORBOARD, WANDB = "tensorboard", "wandb"
FILES = (
    RunFile(TRACKING, "identifier of the run for trackers", optional=True),
    RunFile(TENSORBOARD, "metrics for TensorBoard", optional=True, is_folder=True),
    RunFile(WANDB, "metrics for Weights & Biases", optional=True, is_folder=True),
)
