"""Execute `covey rewards`: tell whether there is a learning signal before the first update.

The untouched model samples groups for training prompts, or recorded completions are read from a file; the recipe's
reward functions score them. Recorded completions need neither a model nor JAX.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.checks import check_run, checks_of
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.algorithms import algorithm_of
from covey.config.base import MAX_INT
from covey.display import echo, make_console
from covey.errors import CoveyError, DataError
from covey.files import number
from covey.monitor.formats import excerpt, sparkline
from covey.types import Completion, FinishReason, Group

if TYPE_CHECKING:
    from covey_report.signal import FunctionSignal, Signal

PROMPTS = 16
"""Number of prompts that are sampled when --prompts is not given."""
EXAMPLES = 3
"""Number of groups of which the best and the worst completion by the total are shown."""
CORRELATION = "correlation with"
"""Heading of the table of correlations."""
WIDTH = 100
"""Largest number of characters of a prompt or completion that are shown."""
NOT_INCLUDED = "not included: {}; a run adds to the reward what they give"
"""Line about the parts of a run's reward that this command leaves out."""


def show_signal(line: Line) -> None:
    """Execute `covey rewards NAME_OR_YAML [--samples FILE] [--prompts N] [--completion TEXT] [--row N] [--json]`.

    Raises:
        CoveyError: the recipe names no reward function, or the file, the data or the model cannot be read.
    """
    loaded = recipe.load(line.arguments[0], line.settings)
    by_hand = _check_options(line, loaded)
    if by_hand is not None:
        groups = [_written(loaded, by_hand, line.whole_number("--row") or 1)]
    elif samples := line.options.get("--samples"):
        groups = read_groups(Path(samples), loaded, line.whole_number("--prompts"))
    else:
        groups = _sample(loaded, line.whole_number("--prompts") or PROMPTS)

    from covey_report.signal import measure_signal  # late: it needs NumPy

    scored, failed = _score(groups, loaded)
    signal, examples = measure_signal(scored, failed, algorithm_of(loaded.grpo).needs_critic), _examples(scored)
    if "--json" in line.options:
        source = line.options.get("--samples") or loaded.model.source
        result = {"recipe": loaded.name, "samples": source, **asdict(signal)}
        echo(json.dumps(result | {"examples": examples, "not_included": not_included(loaded)}))
    elif by_hand is not None:
        _print_scores(examples[-1], failed, not_included(loaded))
    else:
        _print(signal, examples, not_included(loaded))


def _check_options(line: Line, loaded: recipe.Recipe) -> str | None:
    """Return the completion of --completion; refuse options that exclude each other, and what cannot be scored."""
    by_hand = line.options.get("--completion")
    others = [flag for flag in ("--samples", "--prompts") if flag in line.options]
    if by_hand is not None and others:
        raise CoveyError(f"--completion beside {others[0]}", want="one of them", fix="leave one of them out")
    if by_hand is None and "--row" in line.options:
        raise CoveyError("--row without --completion", fix='--completion "TEXT"')
    if (loaded.envs.environment or loaded.envs.tools) and (by_hand is not None or "--samples" in line.options):
        what = "this recipe scores episodes of several turns, and a text is not an episode"
        raise CoveyError(what, want="episodes", fix=f"covey rewards {line.arguments[0]} plays new ones")
    if not loaded.rewards and not loaded.envs.environment:
        also = ", and its reward model is not asked" if loaded.reward_model else ""
        what = f"this recipe names no reward function{also}"
        raise CoveyError(what, want="one or more in rewards", where="rewards")
    return by_hand


def not_included(loaded: recipe.Recipe) -> list[str]:
    """Return the parts of a run's reward that this command leaves out."""
    buffer = algorithm_of(loaded.grpo).overlong_buffer
    model = f"the reward model {loaded.reward_model} (reward_model)" if loaded.reward_model else ""
    penalty = f"the penalty for long completions (grpo.overlong_buffer {buffer:g})" if buffer else ""
    return [part for part in (model, penalty) if part]


def _sample(loaded: recipe.Recipe, prompts: int) -> list[Group]:
    check_run(loaded)
    from covey_report.first_samples import sample_training_prompts  # late: it needs JAX

    return list(sample_training_prompts(loaded, prompts))


def _score(groups: Sequence[Group], loaded: recipe.Recipe) -> tuple[list[Group], dict[str, int]]:
    """Score groups; failures of reward functions are counted instead of raised."""
    from covey.rewards import RewardFn, RewardRunner, score

    functions: Sequence[RewardFn | str] = loaded.rewards
    if loaded.envs.environment:
        from covey.recipes.use import scoring_functions

        functions = scoring_functions(loaded)
    safety = replace(loaded.reward_safety, on_error="none", on_error_of={}, budget=MAX_INT)
    weights, failed = loaded.grpo.reward_weights, dict[str, int]()
    with RewardRunner(safety) as runner:
        return score(groups, functions, weights and weights[: len(functions)], runner, failed), failed


def read_groups(file: Path, loaded: recipe.Recipe, prompts: int | None = None) -> list[Group]:
    """Read recorded completions: JSON lines in the form of a run's `samples.jsonl`.

    The columns that reward functions need are those of the data row with the same prompt, or other entries of the line.

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


def _check_data_and_rewards(loaded: recipe.Recipe) -> None:
    for check in checks_of(loaded):
        if check.subject in ("data", "rewards"):
            check.run()


def _written(loaded: recipe.Recipe, text: str, number: int) -> Group:
    """Return a completion written by hand to the training row of this number, as `covey data` numbers them."""
    from covey.data import readers, sources

    _check_data_and_rewards(loaded)
    row = next(islice(iter(sources.iter_rows(loaded.data)[0]), number - 1, None), None)
    if row is None:
        raise CoveyError(f"there is no training row {number}", fix=f"covey data {loaded.name} shows the first ones")
    known = readers.required(row)
    return _group([{"text": text}], (known["prompt"], {k: known[k] for k in known if k != "prompt"}))


def _read_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    from covey.data.readers import read_file

    for row, line in enumerate(read_file(file, ("prompt", "text")), 1):
        if not isinstance(line["prompt"], str) or not isinstance(line["text"], str):
            raise DataError("prompt and text are not both text", where=f"{file}, row {row}")
        yield line


def _columns_by_prompt(loaded: recipe.Recipe) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return prompt and columns of each data row, by the text of the prompt in `samples.jsonl`."""
    from covey.data import sources
    from covey.monitor.formats import prompt_text

    data = sources.load_data(loaded.data)
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


def _examples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the best and the worst completion by each function, and those of `EXAMPLES` groups by the total."""
    from covey_report.signal import TOTAL, choose_extremes, function_names

    names = function_names(groups)
    names = [TOTAL] if len(names) == 2 else names  # of one function, whose scores are the total
    chosen = [one for name in names for one in choose_extremes(groups, name, EXAMPLES if name == TOTAL else 1)]
    return [
        {"by": one.function, "best": _example(one.group, one.best), "worst": _example(one.group, one.worst)}
        for one in chosen
    ]


def _example(group: Group, index: int) -> dict[str, Any]:
    from covey.monitor.formats import completion_text, prompt_text

    by_function = {name: number(values[index]) for name, values in group.rewards_by_function.items()}
    return {
        "prompt": prompt_text(group.prompt),
        "text": completion_text(group.completions[index]),
        "reward": None if group.rewards is None else number(group.rewards[index]),
        "rewards": by_function,
    }


def _print(signal: "Signal", examples: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> None:
    shares = f"{signal.truncated:.0%} cut at the limit, {signal.empty:.0%} empty"
    echo(f"{signal.completions} completions of {signal.groups} prompts, {shares}\n", keep="\n")
    width = max(len(function.name) for function in signal.functions)
    echo(f"{'function':<{width}}  {'mean':>8}  {'spread':>8}  {'differ':>6}  {'scored':>6}  {'failed':>6}  scores")
    for function in signal.functions:
        echo(f"{function.name:<{width}}  {_row(function)}")
    if missing:
        echo(NOT_INCLUDED.format(", ".join(missing)))
    echo("\nspread: mean standard deviation within a group; differ: share of groups with different scores;", keep="\n")
    echo("scores: each score, or the beginning of a range, with the number of completions")
    _print_correlations(signal, width)
    _print_extremes(examples)
    echo(f"\n{signal.sentence}.", keep="\n")
    for warning in signal.warnings:
        echo(f"But {warning}.")
    if signal.setting:
        echo(f"try: {signal.setting}: {signal.advice}")


def _row(function: "FunctionSignal") -> str:
    mean, spread = ("none" if value is None else f"{value:.3f}" for value in (function.mean, function.within_std))
    differ = f"{'none':>6}" if function.informative is None else f"{function.informative:>6.0%}"
    bars = sparkline([*function.histogram.values()]) if len(function.histogram) > 1 else ""
    scores = ", ".join(f"{score:.3g} × {count}" for score, count in function.histogram.items())
    return f"{mean:>8}  {spread:>8}  {differ}  {function.scored:>6}  {function.failed:>6}  {bars} {scores}".rstrip()


def _print_correlations(signal: "Signal", width: int) -> None:
    """Print the correlations of the functions with each other, the length and the emptiness of a completion."""
    from covey_report.signal import EMPTY, LENGTH

    rows = signal.functions[: 1 if len(signal.functions) == 2 else None]  # the total of one function is its score
    used = {name for row in rows for name in row.correlations}
    names = [name for name in (*(row.name for row in signal.functions[:-1]), LENGTH, EMPTY) if name in used]
    if not names:
        return
    width = max(width, len(CORRELATION))
    echo(f"\n{CORRELATION:<{width}}  " + "  ".join(f"{name:>8}" for name in names), keep="\n")
    for function in rows:
        values = (function.correlations.get(name) for name in names)
        cells = ("-" if value is None else f"{value:+.2f}" for value in values)
        echo(
            f"{function.name:<{width}}  "
            + "  ".join(f"{c:>{max(8, len(n))}}" for c, n in zip(cells, names, strict=True))
        )


def _print_extremes(examples: Sequence[Mapping[str, Any]]) -> None:
    """Print the best and the worst completions side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("by", "prompt", "best", "worst"):
        table.add_column(heading, overflow="fold", ratio=None if heading == "by" else 1)
    for example in examples:
        by, ends = example["by"], (example["best"], example["worst"])
        shown = [f"{_score_of(end, by)}  {shown_text(end['text'])}" for end in ends]
        table.add_row(*map(Text, (by, excerpt(example["best"]["prompt"], WIDTH), *shown)))
    echo("")
    make_console(highlight=False).print(table)


def _score_of(example: Mapping[str, Any], by: str) -> str:
    score = example["rewards"].get(by, example["reward"])
    return "none" if score is None else f"{score:+.3g}"


def shown_text(text: str) -> str:
    """Return a completion in one line, with a mark where there is none."""
    return excerpt(text, WIDTH) or ("(white space)" if text else "(empty)")


def _print_scores(example: Mapping[str, Any], failed: Mapping[str, int], missing: Sequence[str]) -> None:
    """Print the scores of one completion that was written by hand."""
    from covey_report.signal import TOTAL

    completion = example["best"]
    echo(f"prompt      {excerpt(completion['prompt'])}")
    echo(f"completion  {shown_text(completion['text'])}")
    for name, score in {**completion["rewards"], TOTAL: completion["reward"]}.items():
        echo(f"{name:<24} {'failed' if failed.get(name) else 'none' if score is None else f'{score:+.4g}'}")
    if missing:
        echo(NOT_INCLUDED.format(", ".join(missing)))
