"""Summary of the data of a recipe before a run: rows as the model gets them, lengths against the limit, duplicates,
malformed rows, and the columns that functions read.

The rows are read one by one, and converted as a run converts them. Of the model the header and the tokenizer are read.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax

from covey.config.recipe import Recipe, SFTRecipe
from covey.data.rows import Row, count_plain
from covey.data.sources import iter_rows, num_held_out
from covey.errors import RewardError
from covey.recipes.build import prompt_encoder
from covey.recipes.load_model import abstract_for
from covey.rewards.call import Reward, of_evaluation
from covey.rewards.registry import resolve
from covey_data.duplicates import Duplicates, count_duplicates, trained_columns
from covey_report.data_findings import find_problems
from covey_report.diagnosis import Finding
from covey_report.lengths import Lengths, Limit, describe_lengths
from covey_report.scan import (
    MAX_PLACES,
    Malformed,
    RowScan,
    find_contradictions,
    is_empty,
    rows_with_answer,
    sorted_columns,
)
from covey_report.segments import Segment, prompt_segments
from covey_report.token_texts import token_texts
from covey_sft.batch import encode_example

LEARNT = "completion"
"""Role of the tokens that supervised training learns."""
SHOWN = 3
"""Number of rows that are shown when no other is given."""


class Column(NamedTuple):
    """A column of the training rows.

    Attributes:
        name: its name.
        filled, lacking: numbers of rows in which it has a value, and in which it is empty, None or not there.
        read_by: functions and environment that get it.
        places: numbers of the first rows in which it has none.
    """

    name: str
    filled: int
    lacking: int
    read_by: list[str]
    places: Sequence[int] = ()


class ShownRow(NamedTuple):
    """One row as the model gets it; the title says which and why."""

    title: str
    segments: list[Segment]


@dataclass(frozen=True)
class DataSummary:
    """Summary of the data of a recipe.

    Attributes:
        recipe, source, model: names of the recipe, its data and its model.
        train, held_out: numbers of rows that are not malformed.
        used: number of training rows that `data.train_fraction` leaves.
        malformed: malformed rows by mistake.
        limit: the longest row that a run takes.
        every: one row in so many was measured.
        lengths: tokens of the training rows; None if there are none.
        plain: number of prompts that are plain text though the model has a chat template, estimated likewise.
        held_out_over: number of held-out rows that are longer than the limit, estimated from the measured rows.
        duplicates: duplicates, one entry for each of `duplicates.KINDS`.
        answered: column of answers → number of rows whose prompt has the answer, of how many rows, and ends of prompts.
        ordered: column by which the rows are sorted, if the last of them are held out → its first and last value.
        contradictions: number of prompts that have several answers, and the numbers of two such rows if there are any.
        columns: columns of the rows.
        missing: errors of the functions that get no column of a name that they require.
        shown: rows as the model gets them.
        seconds: time that the summary took.
    """

    recipe: str
    source: str
    model: str
    train: int
    held_out: int
    used: int
    malformed: Sequence[Malformed]
    limit: Limit
    every: int
    lengths: Lengths | None
    plain: int
    held_out_over: int
    duplicates: Sequence[Duplicates]
    answered: Mapping[str, tuple[int, int, Mapping[int, str]]]
    ordered: Mapping[str, tuple[Any, Any]]
    contradictions: tuple[int, ...]
    columns: Sequence[Column]
    missing: Sequence[RewardError]
    shown: Sequence[ShownRow]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        """Findings that should be known before a run."""
        return find_problems(self)

    @property
    def refused(self) -> bool:
        """Whether a run refuses the data."""
        over = self.held_out_over + (self.lengths.over if self.lengths else 0)
        too_few = not self.train or not self.held_out
        return bool(self.malformed or self.missing or too_few or (over and self.limit.policy == "error"))

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON-serialisable values."""
        values = {name: _plain(value) for name, value in vars(self).items() if name != "missing"}
        return values | {"findings": _plain(self.findings), "refused": self.refused}


class RowEncoder:
    """Encodes rows as a run of `recipe` does."""

    def __init__(self, recipe: Recipe | SFTRecipe):
        model, self.tokenizer = abstract_for(recipe, jax.default_backend())
        self.tokenizer.max_remembered = 0  # each row is encoded once
        self.environment, self.plain = isinstance(recipe, Recipe) and recipe.envs.environment, 0
        self.learns = isinstance(recipe, SFTRecipe)
        if isinstance(recipe, Recipe):
            self.encode_prompt = prompt_encoder(recipe.envs, self.tokenizer)
            tokens, setting = recipe.rollout.max_prompt_length, "rollout.max_prompt_length"
        else:
            self.encode_prompt = self.tokenizer.encode_prompt
            tokens, setting = min(recipe.training.max_length, model.config.max_positions), "training.max_length"
        self.limit = Limit(tokens, setting, recipe.training.too_long)

    def measure(self, row: Row) -> int:
        """Count the tokens that the limit counts: of the prompt, or of prompt and completion."""
        self.plain += count_plain([row], self.tokenizer, self.environment, warn=False)
        if self.learns:
            return sum(map(len, encode_example(row, self.tokenizer, completion_only=True)))
        return len(self.encode_prompt(row["prompt"]))

    def show(self, title: str, row: Row) -> ShownRow:
        """Return a row as the model gets it."""
        prompt = row["prompt"]
        segments = prompt_segments(self.tokenizer, self.encode_prompt, prompt) if prompt else []
        if self.learns:
            tokens = self.tokenizer.encode_completion(prompt, row["completion"])
            decode = partial(self.tokenizer.decode, skip_special=False)
            segments = [*segments, Segment(LEARNT, token_texts(decode, tokens.tolist()))]
        return ShownRow(title, segments)


def summarize(recipe: Recipe | SFTRecipe, show: int = SHOWN) -> DataSummary:
    """Read the data of `recipe` and summarize them; the first `show` training rows are shown.

    Raises:
        CoveyError: the source or the tokenizer is not there or cannot be read, or a reward function does not exist.
    """
    began, encoder = time.monotonic(), RowEncoder(recipe)
    scan = partial(RowScan, trained_columns(recipe), encoder.measure)
    first, second = iter_rows(recipe.data)
    train, test = scan(show).read(first), None if second is None else scan().read(second)
    cut = len(train) if test is not None or len(train) < 2 else len(train) - num_held_out(len(train))
    hashes, held_out = train.hashes(), train.hashes()[cut:] if test is None else test.hashes()
    counts = train.lengths(cut) if test is None else test.lengths()
    duplicates = count_duplicates(hashes[:cut], held_out)
    columns, missing = _columns(recipe, train, test or train)
    # a generated task may have several answers to a prompt
    prompts, *places = find_contradictions(trained_columns(recipe) if recipe.data.path else None, train.hashes())
    chosen = _choose(recipe, train, cut if test is None else None, duplicates)
    return DataSummary(
        recipe=recipe.name,
        source=recipe.data.path or recipe.data.task,
        model=recipe.model.source,
        train=cut,
        held_out=len(held_out),
        used=min(cut, max(1, int(cut * recipe.data.train_fraction))),
        malformed=[rows for part in (train, test) if part is not None for rows in part.malformed.values()],
        limit=encoder.limit,
        every=train.every,
        lengths=describe_lengths(train.lengths(0, cut), encoder.limit.tokens),
        plain=min(encoder.plain * train.every, cut + len(held_out)),
        held_out_over=int((counts > encoder.limit.tokens).sum()) * (test or train).every,
        duplicates=duplicates,
        answered=rows_with_answer(train.sample),
        ordered=sorted_columns(train.sample) if test is None else {},
        contradictions=(prompts, *sorted(map(train.number, places))),
        columns=columns,
        missing=list(missing.values()),
        shown=[encoder.show(title, row) for title, row in chosen],
        seconds=round(time.monotonic() - began, 2),
    )


def _columns(
    recipe: Recipe | SFTRecipe, train: RowScan, held_out: RowScan
) -> tuple[list[Column], dict[str, RewardError]]:
    """Return the columns with their readers, and the errors of functions that lack one, by function.

    The judges of an evaluation get held-out rows alone, and reward functions get both.
    """
    trains = recipe.rewards if isinstance(recipe, Recipe) else ()
    judges = recipe.evaluation.judges if isinstance(recipe, Recipe) or recipe.evaluation.answers else {}
    whole = [f"environment {recipe.envs.environment}"] if isinstance(recipe, Recipe) and recipe.envs.environment else []
    readers, missing = {name: dict.fromkeys(whole) for name in train.present}, dict[str, RewardError]()
    calls = [(name, scan, "") for scan in (train, held_out) for name in trains]
    calls += [(name, held_out, setting) for setting, name in judges.items()]
    for function, scan, setting in calls if train.present else ():
        names = [name for name in scan.present if name != "prompt"]
        try:
            for name in Reward(function, resolve(function)).argument_names(names):
                readers.get(name, {})[function] = None
        except RewardError as error:
            missing.setdefault(function, of_evaluation(error, setting) if setting else error)
    filled = {name: train.present[name] - train.empty[name] for name in readers}
    places = {name: [number for number, row in train.sample if is_empty(row.get(name))] for name in readers}
    columns = [
        Column(name, filled[name], len(train) - filled[name], list(by), places[name][:MAX_PLACES])
        for name, by in readers.items()
    ]
    return columns, missing


def _choose(
    recipe: Recipe | SFTRecipe, train: RowScan, cut: int | None, duplicates: Sequence[Duplicates]
) -> Iterator[tuple[str, Row]]:
    """Yield rows to show with their titles: the first, the longest, the most frequent, and one that is held out too.

    Args:
        recipe: names the data, which are read again up to the rows that were not kept.
        train: what was read.
        cut: index of the first held-out row among the rows of `train`; None if the data have a test set.
        duplicates: duplicates of the rows.
    """
    exact = duplicates[1]
    yield from ((f"training row {train.number(i)}", row) for i, row in enumerate(train.first))
    if train.longest is not None and train.longest[1] not in train.first:
        yield "the longest row" if train.every == 1 else "the longest row that was measured", train.longest[1]
    if exact.most > 1:
        number = train.number(exact.place)
        yield f"the most frequent training row, row {number}: {exact.most:,} times", _row(recipe, 0, number)
    if exact.held_out_place is not None:
        place = exact.held_out_place
        part, number = (1, place + 1) if cut is None else (0, train.number(cut + place))
        yield f"a held-out row that is a training row, row {number}", _row(recipe, part, number)


def _row(recipe: Recipe | SFTRecipe, part: int, number: int) -> Row:
    """Read row `number` of the training rows, part 0, or of the test set, part 1."""
    row: Any = next(islice(iter(iter_rows(recipe.data)[part] or ()), number - 1, None))
    return dict(row)


def _plain(value: Any) -> Any:
    """Convert dataclasses and named tuples inside `value` to dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
