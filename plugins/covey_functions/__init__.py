"""Low-level functions for custom scripts and losses; `covey` hands their names on."""
