"""Groups for `covey rewards`: sampled, read from a file or written by hand, and scored by a recipe's functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from covey.cli.checks import check_run, checks_of
from covey.config.base import MAX_INT
from covey.config.recipe import Recipe
from covey.data import readers, sources
from covey.errors import CoveyError, DataError
from covey.files import number
from covey.monitor.formats import completion_text, prompt_text
from covey.rewards.call import RewardFn
from covey.rewards.scoring import RewardRunner, score
from covey.types import Completion, FinishReason, Group
from covey_report.signal import TOTAL, choose_extremes, function_names

EXAMPLES = 3
"""Number of groups of which the best and the worst completion by the total are shown."""


def sample_groups(loaded: Recipe, prompts: int) -> list[Group]:
    """Sample groups for the first training prompts with the model that a run begins with."""
    check_run(loaded)
    from covey_report.first_samples import sample_training_prompts  # late: it needs JAX

    return list(sample_training_prompts(loaded, prompts))


def score_groups(groups: Sequence[Group], loaded: Recipe) -> tuple[list[Group], dict[str, int]]:
    """Score groups; failures of reward functions are counted instead of raised."""
    functions: Sequence[RewardFn | str] = loaded.rewards
    if loaded.envs.environment:
        from covey.recipes.use import scoring_functions  # late: it needs JAX

        functions = scoring_functions(loaded)
    safety = replace(loaded.reward_safety, on_error="none", on_error_of={}, budget=MAX_INT)
    weights, failed = loaded.grpo.reward_weights, dict[str, int]()
    with RewardRunner(safety) as runner:
        return score(groups, functions, weights and weights[: len(functions)], runner, failed), failed


def read_groups(file: Path, loaded: Recipe, prompts: int | None = None) -> list[Group]:
    """Read recorded completions: JSON lines in the form of a run's `samples.jsonl`.

    Reward functions get the columns of the data row with the same prompt, or the other entries of the line.

    Args:
        prompts: number of groups that are read; all if it is None.

    Raises:
        DataError: the file cannot be read, or a line has no prompt and text.
    """
    _check_data_and_rewards(loaded)
    grouped: dict[Any, list[Mapping[str, Any]]] = {}
    for line in _read_lines(file):
        grouped.setdefault((line.get("step"), line.get("group"), line["prompt"]), []).append(line)
    columns = _columns_by_prompt(loaded)
    return [_group(rows, columns.get(rows[0]["prompt"])) for rows in list(grouped.values())[:prompts]]


def _check_data_and_rewards(loaded: Recipe) -> None:
    for check in checks_of(loaded):
        if check.subject in ("data", "rewards"):
            check.run()


def written_group(loaded: Recipe, text: str, number: int) -> Group:
    """Return a completion written by hand to the training row of this number, as `covey data` numbers them."""
    _check_data_and_rewards(loaded)
    row = next(islice(iter(sources.iter_rows(loaded.data)[0]), number - 1, None), None)
    if row is None:
        raise CoveyError(f"there is no training row {number}", fix=f"covey data {loaded.name} shows the first ones")
    known = readers.required(row)
    return _group([{"text": text}], (known["prompt"], {k: known[k] for k in known if k != "prompt"}))


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    for row, line in enumerate(readers.read_file(file, ("prompt", "text")), 1):
        if not isinstance(line["prompt"], str) or not isinstance(line["text"], str):
            raise DataError("prompt and text are not both text", where=f"{file}, row {row}")
        yield line


def _columns_by_prompt(loaded: Recipe) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return prompt and columns of each data row, by the text of the prompt in `samples.jsonl`."""
    data = sources.load_data(loaded.data)
    rows = (*data.test, *data.train)
    return {prompt_text(row["prompt"]): (row["prompt"], {k: row[k] for k in row if k != "prompt"}) for row in rows}


def _group(rows: Sequence[Mapping[str, Any]], known: tuple[Any, Mapping[str, Any]] | None) -> Group:
    none = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
    completions = tuple(Completion(*none, FinishReason.recorded(row.get("finish")), row["text"]) for row in rows)
    prompt, columns = known or (rows[0]["prompt"], {k: v for k, v in rows[0].items() if k not in RECORDED})
    return Group(prompt, none[0], completions, columns)


RECORDED = (
    "step", "group", "sample", "prompt", "turns", "text", "rewards", "reward", "advantage", "finish", "prompt_length",
    "length", "correct",
)  # fmt: skip
"""Entries of a line of samples.jsonl, which are no columns of the data."""


def examples_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the best and the worst completion by each function, and of `EXAMPLES` groups by the total."""
    names = function_names(groups)
    names = [TOTAL] if len(names) == 2 else names  # of one function, whose scores are the total
    chosen = [one for name in names for one in choose_extremes(groups, name, EXAMPLES if name == TOTAL else 1)]
    return [
        {"by": one.function, "best": _example(one.group, one.best), "worst": _example(one.group, one.worst)}
        for one in chosen
    ]


def _example(group: Group, index: int) -> dict[str, Any]:
    by_function = {name: number(values[index]) for name, values in group.rewards_by_function.items()}
    return {
        "prompt": prompt_text(group.prompt),
        "text": completion_text(group.completions[index]),
        "reward": None if group.rewards is None else number(group.rewards[index]),
        "rewards": by_function,
    }
