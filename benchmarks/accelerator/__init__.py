"""`python -m benchmarks accelerator`: checks and measurements for a machine with GPUs or TPUs, without a network."""
