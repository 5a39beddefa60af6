"""Execute `covey rewards`: tell whether there is a learning signal before the first update.

The untouched model samples groups for training prompts, or recorded completions are read from a file; the recipe's
reward functions score them. Recorded completions need neither a model nor JAX.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.checks import check_run, checks_of
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.algorithms import algorithm_of
from covey.config.base import MAX_INT
from covey.display import echo
from covey.errors import CoveyError, DataError
from covey.files import number
from covey.monitor.formats import excerpt
from covey.types import Completion, FinishReason, Group

if TYPE_CHECKING:
    from covey.rewards.signal import FunctionSignal, Signal

PROMPTS = 16
"""Number of prompts that are sampled when --prompts is not given."""
WIDTH = 100
"""Largest number of characters of a prompt or completion that are shown."""


def show_signal(line: Line) -> None:
    """Execute `covey rewards NAME_OR_YAML [--samples FILE] [--prompts N] [--json] [settings]`.

    Raises:
        CoveyError: the recipe names no reward function, or the file, the data or the model cannot be read.
    """
    loaded = recipe.load(line.arguments[0], line.settings)
    samples, prompts = line.options.get("--samples"), line.whole_number("--prompts")
    if loaded.envs.environment or loaded.envs.tools:
        by = (
            f"the environment {loaded.envs.environment}"
            if loaded.envs.environment
            else "what the model does with tools"
        )
        what = f"this recipe scores by {by}, in several turns"
        raise CoveyError(what, want="reward functions alone", fix=f"covey rollout {line.arguments[0]} plays episodes")
    if not loaded.rewards:
        also = ", and its reward model is not asked" if loaded.reward_model else ""
        what = f"this recipe names no reward function{also}"
        raise CoveyError(what, want="one or more in rewards", where="rewards")
    groups = read_groups(Path(samples), loaded, prompts) if samples else _sample(loaded, prompts or PROMPTS)

    from covey.rewards.signal import choose_examples, measure_signal  # late: it needs NumPy

    scored, failed = _score(groups, loaded)
    signal = measure_signal(scored, failed, algorithm_of(loaded.grpo).needs_critic)
    examples = [_example(group, index) for group, index in choose_examples(scored)]
    if "--json" in line.options:
        result = {"recipe": loaded.name, "samples": samples or loaded.model.source, **asdict(signal)}
        echo(json.dumps(result | {"examples": examples, "not_included": not_included(loaded)}))
    else:
        _print(signal, examples, not_included(loaded))


def not_included(loaded: recipe.Recipe) -> list[str]:
    """Return the parts of a run's reward that this command leaves out."""
    buffer = algorithm_of(loaded.grpo).overlong_buffer
    model = f"the reward model {loaded.reward_model} (reward_model)" if loaded.reward_model else ""
    penalty = f"the penalty for long completions (grpo.overlong_buffer {buffer:g})" if buffer else ""
    return [part for part in (model, penalty) if part]


def _sample(loaded: recipe.Recipe, prompts: int) -> list[Group]:
    check_run(loaded)
    from covey.run.inference import sample_training_prompts  # late: it needs JAX

    return list(sample_training_prompts(loaded, prompts))


def _score(groups: Sequence[Group], loaded: recipe.Recipe) -> tuple[list[Group], dict[str, int]]:
    """Score groups; failures of reward functions are counted instead of raised."""
    from covey.rewards import RewardRunner, score

    safety = replace(loaded.reward_safety, on_error="none", on_error_of={}, budget=MAX_INT)
    weights, failed = loaded.grpo.reward_weights, dict[str, int]()
    of_functions = weights[: len(loaded.rewards)] if weights else None
    with RewardRunner(safety) as runner:
        return score(groups, loaded.rewards, of_functions, runner, failed), failed


def read_groups(file: Path, loaded: recipe.Recipe, prompts: int | None = None) -> list[Group]:
    """Read recorded completions: JSON lines in the form of a run's `samples.jsonl`.

    The columns that reward functions need are those of the data row with the same prompt, or other entries of the line.

    Args:
        prompts: number of groups that are read; all if it is None.

    Raises:
        DataError: the file cannot be read, or a line has no prompt and text.
    """
    for check in checks_of(loaded):
        if check.subject in ("data", "rewards"):
            check.run()
    grouped: dict[Any, list[Mapping[str, Any]]] = {}
    for line in _read_lines(file):
        grouped.setdefault((line.get("step"), line.get("group"), line["prompt"]), []).append(line)
    columns = _columns_by_prompt(loaded)
    return [_group(rows, columns.get(rows[0]["prompt"])) for rows in list(grouped.values())[:prompts]]


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    from covey.data.readers import read_file

    for row, line in enumerate(read_file(file, ("prompt", "text")), 1):
        if not isinstance(line["prompt"], str) or not isinstance(line["text"], str):
            raise DataError("prompt and text are not both text", where=f"{file}, row {row}")
        yield line


def _columns_by_prompt(loaded: recipe.Recipe) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return prompt and columns of each data row, by the text of the prompt in `samples.jsonl`."""
    from covey.data import sources
    from covey.monitor.writer import prompt_text

    data = sources.load(loaded.data)
    rows = (*data.test, *data.train)
    return {prompt_text(row["prompt"]): (row["prompt"], {k: row[k] for k in row if k != "prompt"}) for row in rows}


def _group(rows: Sequence[Mapping[str, Any]], known: tuple[Any, Mapping[str, Any]] | None) -> Group:
    import numpy as np

    none = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
    completions = tuple(Completion(*none, FinishReason.recorded(row.get("finish")), row["text"]) for row in rows)
    prompt, columns = known or (rows[0]["prompt"], {k: v for k, v in rows[0].items() if k not in RECORDED})
    return Group(prompt, none[0], completions, columns)


RECORDED = (
    "step", "group", "sample", "prompt", "turns", "text", "rewards", "reward", "advantage", "finish", "prompt_length",
    "length", "correct",
)  # fmt: skip
"""Entries of a line of samples.jsonl, which are no columns of the data."""


def _example(group: Group, index: int) -> dict[str, Any]:
    from covey.monitor.writer import prompt_text

    by_function = {name: number(values[index]) for name, values in group.rewards_by_function.items()}
    return {
        "prompt": prompt_text(group.prompt),
        "text": group.completions[index].text,
        "reward": None if group.rewards is None else number(group.rewards[index]),
        "rewards": by_function,
    }


def _print(signal: "Signal", examples: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> None:
    echo(
        f"{signal.completions} completions of {signal.groups} prompts, {signal.truncated:.0%} cut at the limit\n",
        keep="\n",
    )
    width = max(len(function.name) for function in signal.functions)
    echo(f"{'function':<{width}}  {'mean':>8}  {'spread':>8}  {'differ':>6}  {'scored':>6}  {'failed':>6}")
    for function in signal.functions:
        echo(f"{function.name:<{width}}  {_row(function)}")
    if missing:
        echo(f"not included: {', '.join(missing)}; a run adds to the reward what they give")
    echo("\nspread: mean standard deviation within a group; differ: share of groups with different scores\n", keep="\n")
    for example in examples:
        reward = "none" if example["reward"] is None else f"{example['reward']:+.3g}"
        echo(f"{reward:>7}  {excerpt(example['prompt'], WIDTH)}  →  {excerpt(example['text'], WIDTH)}")
    echo(f"\n{signal.sentence}.", keep="\n")
    if signal.setting:
        echo(f"try: {signal.setting}: {signal.advice}")


def _row(function: "FunctionSignal") -> str:
    mean, spread = ("none" if value is None else f"{value:.3f}" for value in (function.mean, function.within_std))
    return f"{mean:>8}  {spread:>8}  {function.informative:>6.0%}  {function.scored:>6}  {function.failed:>6}"
