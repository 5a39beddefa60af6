"""Programs of a model: `sandbox` executes them in one of two child processes."""
