"""Names of the files in a run folder. This module imports nothing, so that a command can name them at once."""

RECIPE = "recipe.yaml"
METRICS, SAMPLES, SUMMARY = "metrics.jsonl", "samples.jsonl", "summary.json"
TOKENS = "tokens.jsonl"
HEARTBEAT, STACKS = "heartbeat.json", "stacks.txt"
REPORT = "report.html"
CHECKPOINTS, BAD = "checkpoints", "bad"
