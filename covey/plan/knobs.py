"""The first setting to change where a run does not fit, found by planning its memory again.

Each knob is a setting with smaller values. Its values are tried in order, and the programs that did not fit are
compiled again, until all fit. A knob that does not suffice alone keeps its last value while the next one is tried.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from covey.config.recipe import Recipe, SFTRecipe
from covey.packing.bins import row_length_bucket
from covey.plan.memory import SAMPLING, SYNC

MIN_SLOTS = 4


@dataclass(frozen=True)
class Turn:
    """Settings that were tried.

    Attributes:
        settings: as on the command line: `--training.row-length 512`.
        peak: most bytes of a device with them.
        fits: whether that is at most the device's memory.
    """

    settings: tuple[str, ...]
    peak: int
    fits: bool


Peak = Callable[[Sequence[str]], int]
"""Function from settings, as on the command line, to the most bytes of a device."""


def search(recipe: Recipe | SFTRecipe, above: Sequence[str], limit: float, peak_with: Peak) -> list[Turn]:
    """Return what was tried, in order; the last fits, if any does.

    Args:
        recipe: a recipe that does not fit.
        above: names of its programs, or `SYNC`, that do not fit; the one with the highest peak first.
        limit: bytes of a device.
        peak_with: see `Peak`.
    """
    turns: list[Turn] = []
    kept: list[str] = []
    lowest = float("inf")
    for knob in knobs(recipe, above):
        best = kept
        for setting in knob:
            tried = _merged(kept, setting)
            peak = peak_with(tried)
            turns.append(Turn(tuple(tried), peak, peak <= limit))
            if peak <= limit:
                return turns
            if peak < lowest:
                lowest, best = peak, tried
        kept = list(best)
    return turns


def _merged(kept: Sequence[str], setting: Sequence[str]) -> list[str]:
    """Return both settings; a flag that both have takes the later value."""
    values = {flag: value for words in (kept, setting) for flag, value in zip(words[::2], words[1::2], strict=True)}
    return [word for pair in values.items() for word in pair]


def knobs(recipe: Recipe | SFTRecipe, above: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield the settings of each knob, from the mildest value to the strongest; the knob of the worst program first.

    Those of rows and slots change nothing for `SYNC`, which holds weights alone: they come last where it is the worst,
    and not at all where it is the only one.
    """
    worst = above[0]
    if worst != SYNC:
        yield from _sizes(recipe, worst)
    yield from _weights(recipe)
    if worst == SYNC and above[1:]:
        yield from _sizes(recipe, above[1])


def _sizes(recipe: Recipe | SFTRecipe, worst: str) -> Iterator[list[list[str]]]:
    rows, slots = _rows(recipe), _slots(recipe)
    first, second = (slots, rows) if worst in SAMPLING else (rows, slots)
    yield from first
    yield from second


def _weights(recipe: Recipe | SFTRecipe) -> Iterator[list[list[str]]]:
    rank, trained_whole = recipe.model.lora.rank, not recipe.model.adapter
    if not rank and trained_whole:
        yield [["--model.lora.rank", "64"], ["--model.lora.rank", "16"]]
    elif rank > 8:
        yield [["--model.lora.rank", str(n)] for n in (rank // 2, 8) if 8 <= n < rank]
    if recipe.model.dtype == "float32":
        yield [["--model.dtype", "bfloat16"]]
    if recipe.model.quantize == "none":
        adapters = [] if rank or recipe.model.adapter else ["--model.lora.rank", "16"]
        yield [[*adapters, "--model.quantize", kind] for kind in ("int8", "nf4")]


def _rows(recipe: Recipe | SFTRecipe) -> Iterator[list[list[str]]]:
    training = recipe.training
    length, tokens = row_length_bucket(training.row_length), training.max_tokens_per_micro_batch
    smaller = [n for n in _halves(tokens) if n >= length]
    if smaller:
        yield [["--training.max-tokens-per-micro-batch", str(n)] for n in smaller]
    shortest = row_length_bucket(_longest_sample(recipe))
    shorter = [n for n in _halves(length) if n >= shortest]
    if shorter:
        both = "--training.max-tokens-per-micro-batch"
        yield [["--training.row-length", str(n), both, str(n)] for n in shorter]


def _slots(recipe: Recipe | SFTRecipe) -> Iterator[list[list[str]]]:
    fewer = [n for n in _halves(recipe.rollout.slots) if n >= MIN_SLOTS]
    if isinstance(recipe, Recipe) and fewer:
        yield [["--rollout.slots", str(n)] for n in fewer]


def _longest_sample(recipe: Recipe | SFTRecipe) -> int:
    if isinstance(recipe, Recipe):
        return recipe.rollout.max_prompt_length + recipe.rollout.max_new_tokens
    return recipe.training.max_length


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number
