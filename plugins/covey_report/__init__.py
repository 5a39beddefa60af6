"""Pages of runs and data, their diagnosis, and the commands that show them: an add-on of Covey."""
