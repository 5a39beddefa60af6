"""Settings of the section `data`: where prompts and examples come from."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Final, Literal

from covey.config.base import Config, Fraction, NonNegativeInt, Problem, setting

HUBS = ("hf:", "tfds:")
"""Beginnings of a `data.path` that is no path."""

TaskName = Literal["first-letter", "arithmetic", "sums", "long-sums", "guess", "wordle", "gsm8k", "jsonl", "python"]

FROM_PYTHON: Final = "python"
"""Value of `data.task` of a run whose data a script gave."""

DATA_PATHS = {
    "gsm8k": "--data.path FOLDER with train.jsonl and test.jsonl (or Kaggle's CSV), hf:openai/gsm8k, or tfds:gsm8k",
    "jsonl": "the training file: --data.path FILE.jsonl, or hf:org/name",
}
"""Values of `data.path` by task, for the tasks that read it."""


class DataConfig(Config, section="data", on_resume="refuse"):
    """Source of the prompts."""

    task: TaskName = "first-letter"
    """first-letter, arithmetic, sums, long-sums, guess and wordle are made on the fly; gsm8k and jsonl are read from
    `path`. guess and wordle are for the environments of these names, long-sums for the tool calculator. A run that a
    script made with `train(..., out=)` has python: only the script has its data.
    """
    path: str | None = setting(None, on_resume="ignore")
    """A .jsonl, .json, .csv, .tsv or .parquet file; a folder with train and test of one kind (train.jsonl and
    test.jsonl), or main_train.csv and main_test.csv; hf:org/name, in full hf:org/name/config@revision; or tfds:name.
    """
    test_path: str | None = setting(None, on_resume="ignore")
    """The held-out file beside a file. Without it the last tenth of `path` is held out."""
    prompt_column: str = "prompt"
    """jsonl: the column that holds the prompt (text, or a list of chat messages)."""
    system: str | None = None
    """System message put before each prompt; the task's own when not set."""
    train_fraction: Fraction = 1.0
    """Fraction of the training set that is used, after shuffling."""
    seed: NonNegativeInt = 42
    """Seed of the shuffle and of the tasks made on the fly."""

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each setting that the task does not read."""
        readers = {"path": DATA_PATHS, "test_path": DATA_PATHS}
        readers |= {name: {"jsonl": ""} for name in ("prompt_column", "completion_column")}
        return [
            Problem(
                field.name,
                f"data.{field.name} is {value}, and data.task {self.task} does not read it",
                f"--data.task jsonl, to read rows of your own, or no data.{field.name}",
            )
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
            if self.task not in readers.get(field.name, [self.task])
        ]


class SFTDataConfig(DataConfig):
    """Source of the examples: prompts with the completions to learn."""

    task: TaskName = "jsonl"
    """jsonl: rows with answers, read from `path`, in the forms that covey sft --help lists. arithmetic, sums, long-sums
    and gsm8k bring worked answers, guess and wordle whole games; first-letter has none. A run that a script made with
    `train(..., out=)` has python.
    """
    completion_column: str = "completion"
    """jsonl: the column that holds the completion."""
