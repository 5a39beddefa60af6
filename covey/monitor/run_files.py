"""Table of the files in a run folder; packages add theirs by the entry points `covey.files`. This module needs neither
JAX nor NumPy, so that a command can name the files at once.
"""

from typing import Literal, NamedTuple

from covey.registry import all_offered

RECIPE = "recipe.yaml"
METRICS, SAMPLES, SUMMARY = "metrics.jsonl", "samples.jsonl", "summary.json"
BEFORE, AFTER = "before.jsonl", "after.jsonl"
CHECKPOINTS, BAD, MODEL = "checkpoints", "bad", "model"


class RunFile(NamedTuple):
    """File or folder in a run folder.

    Attributes:
        name: its name.
        content: its content, for the user.
        publish: when `covey push` publishes it.
        optional: whether only some runs have it.
        is_folder: whether it is a folder.
        per_step: whether rows of steps are appended to it. A resumed run cuts them back to its checkpoint.
        group_rows: `module:function` of (step, number of a group in it, the group) that returns the rows of a group, to
            be appended for each group of a step, of all processes; "" where other code appends rows.
    """

    name: str
    content: str
    publish: Literal["always", "unless --no-report", "with --samples", "never"] = "never"
    optional: bool = False
    is_folder: bool = False
    per_step: bool = False
    group_rows: str = ""


RUN_FILES = (
    RunFile(RECIPE, "all settings, with paths of this machine where the recipe names some", "always"),
    RunFile(METRICS, "metrics of each step", "always", per_step=True),
    RunFile(
        SAMPLES,
        "every completion with its prompt and rewards",
        "with --samples",
        optional=True,
        per_step=True,
        group_rows="covey.monitor.writer:group_rows",
    ),
    RunFile(BEFORE, "held-out completions before training", optional=True),
    RunFile("before-standard.jsonl", "the same, sampled by the preset standard", optional=True),
    RunFile("before-liberal.jsonl", "the same, sampled by the preset liberal", optional=True),
    RunFile(AFTER, "held-out completions after training", optional=True),
    RunFile("after-standard.jsonl", "the same, sampled by the preset standard", optional=True),
    RunFile("after-liberal.jsonl", "the same, sampled by the preset liberal", optional=True),
    RunFile(SUMMARY, "results, versions, devices, and where the first weights came from", "always"),
    RunFile(CHECKPOINTS, "state to resume from, and the lock", is_folder=True),
    RunFile(MODEL, "config and tokenizer of the model, whose weights are in checkpoints", is_folder=True),
    RunFile(BAD, "batches of updates that were not finite", optional=True, is_folder=True),
)
"""Covey's own files and folders in a run folder, in the order of documents and commands."""


def run_files() -> list[RunFile]:
    """Return the files of Covey, then those of other packages: each entry point names a sequence of them."""
    return [*RUN_FILES, *(file for load in all_offered("covey.files").values() for file in load())]
