"""The first setting to change where a run does not fit, found by planning its memory again.

Each knob is a setting with smaller values. Its values are tried in order, and the programs that did not fit are
compiled again, until all fit. A knob that does not suffice alone keeps its last value while the next one is tried.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from covey.config.recipe import Recipe, SFTRecipe
from covey.packing.bins import row_length_bucket
from covey.sampling.scheduler import MIN_SLOTS
from covey_plan.memory import SAMPLING, SYNC


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        settings: as on the command line: `--training.row-length 512`.
        peak: most bytes of a device with them.
        fits: whether that is at most the device's memory.
    """

    settings: tuple[str, ...]
    peak: int
    fits: bool


Setting = dict[str, str]
"""Option on the command line → its value."""
Peak = Callable[[Sequence[str]], int]
"""Function from settings, as on the command line, to the most bytes of a device."""


def search(recipe: Recipe | SFTRecipe, above: Sequence[str], limit: float, peak_with: Peak) -> list[Trial]:
    """Return the trials in order; the last one fits, if any does.

    Args:
        recipe: a recipe that does not fit.
        above: names of its programs, or `SYNC`, that do not fit; the one with the highest peak first.
        limit: bytes of a device.
        peak_with: see `Peak`.
    """
    trials: list[Trial] = []
    best: Setting = {}
    lowest = float("inf")
    for knob in knobs(recipe, above):
        turned_before = best
        for setting in knob:
            changed = turned_before | setting
            words = [word for pair in changed.items() for word in pair]
            peak = peak_with(words)
            trials.append(Trial(tuple(words), peak, peak <= limit))
            if peak <= limit:
                return trials
            if peak < lowest:
                lowest, best = peak, changed
    return trials


def knobs(recipe: Recipe | SFTRecipe, above: Sequence[str]) -> Iterator[list[Setting]]:
    """Yield the settings of each knob, from the mildest value to the strongest; the knob of the worst program first.

    Those of rows and slots change nothing for `SYNC`, which holds weights alone: they come last where it is the worst,
    and not at all where it is the only one.
    """
    narrower = [{"--model.dtype": "bfloat16"}] if recipe.model.dtype == "float32" else []
    kinds = {
        "rows": [_micro_batches(recipe), _row_lengths(recipe)],
        "slots": [_slots(recipe)],
        "weights": [_adapters(recipe), narrower, _formats(recipe)],
    }
    arrays = [name for name in above if name != SYNC][:1]
    sizes = ["slots", "rows"] if arrays and arrays[0] in SAMPLING else ["rows", "slots"]
    order = [*sizes, "weights"] if above[0] != SYNC else ["weights", *(sizes if arrays else ())]
    yield from (knob for kind in order for knob in kinds[kind] if knob)


def _micro_batches(recipe: Recipe | SFTRecipe) -> list[Setting]:
    training = recipe.training
    smaller = _halves(training.max_tokens_per_micro_batch, row_length_bucket(training.row_length))
    return [{"--training.max-tokens-per-micro-batch": str(n)} for n in smaller]


def _row_lengths(recipe: Recipe | SFTRecipe) -> list[Setting]:
    if isinstance(recipe, Recipe):
        longest = recipe.rollout.max_prompt_length + recipe.rollout.max_new_tokens
    else:
        longest = recipe.training.max_length
    shorter = _halves(row_length_bucket(recipe.training.row_length), row_length_bucket(longest))
    names = "--training.row-length", "--training.max-tokens-per-micro-batch"
    return [dict.fromkeys(names, str(n)) for n in shorter]


def _slots(recipe: Recipe | SFTRecipe) -> list[Setting]:
    fewer = _halves(recipe.rollout.slots, MIN_SLOTS) if isinstance(recipe, Recipe) else ()
    return [{"--rollout.slots": str(n)} for n in fewer]


def _adapters(recipe: Recipe | SFTRecipe) -> list[Setting]:
    rank = recipe.model.lora.rank
    ranks = [n for n in (rank // 2, 8) if 8 <= n < rank] if rank or recipe.model.adapter else [64, 16]
    return [{"--model.lora.rank": str(n)} for n in ranks]


def _formats(recipe: Recipe | SFTRecipe) -> list[Setting]:
    adapted = recipe.model.lora.rank or recipe.model.adapter
    adapters = {} if adapted else {"--model.lora.rank": "16"}
    formats = ("int8", "nf4") if recipe.model.quantize == "none" else ()
    return [adapters | {"--model.quantize": kind} for kind in formats]


def _halves(number: int, least: int) -> list[int]:
    """Return half of `number`, a quarter, and so on, down to `least`."""
    return [number >> n for n in range(1, number.bit_length()) if number >> n >= least]
