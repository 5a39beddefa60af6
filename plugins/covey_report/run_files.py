"""The files of reports in a run folder."""

from covey.monitor.run_files import RunFile

TOKENS, REPORT = "tokens.jsonl", "report.html"
FILES = (
    RunFile(TOKENS, "values of the tokens of some completions", optional=True, per_step=True),
    RunFile(REPORT, "curves, the recipe, and prompts with completions, also held-out ones", "unless --no-report"),
)
