"""Parts of the command line that would make `covey.cli` too long."""
