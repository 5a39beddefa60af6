"""The Python tool: `tool` offers it, `sandbox` executes programs in one of two child processes."""
