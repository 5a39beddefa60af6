"""Expected lengths of prompts and completions: given, read from the samples of a run, or assumed.

Completions have a distribution and not a mean alone, because the longest of a rollout decides when it ends.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from covey.config.recipe import Recipe, SFTRecipe
from covey.errors import CoveyError, DataError
from covey.files import is_count, parse_line
from covey.monitor.run_files import SAMPLES

COMPLETION_SHARE = 0.35
"""Assumed mean length of a completion, as a fraction of the longest, as in the benchmarks' recipes."""
QUANTILES = 64
"""Number of lengths that stand for a distribution."""
MOST_SAMPLES = 8192
"""Number of samples of a run that are read, the last ones."""


@dataclass(frozen=True)
class Lengths:
    """Expected lengths in tokens.

    Attributes:
        prompt: length of a prompt.
        completions: lengths of completions, each as frequent as the others, in ascending order.
        origin: where they come from, in words.
    """

    prompt: int
    completions: tuple[int, ...]
    origin: str = "given"

    @property
    def completion(self) -> int:
        """Mean length of a completion."""
        return round(sum(self.completions) / len(self.completions))

    def of(self, count: int) -> Int[np.ndarray, "count"]:
        """Return the lengths of `count` completions of a step, in a mixed order that is always the same."""
        places = (np.arange(count) + 0.5) / max(count, 1) * len(self.completions)
        ascending = np.array(self.completions)[places.astype(int)]
        return np.random.default_rng(0).permutation(ascending)


def expected_lengths(
    recipe: Recipe | SFTRecipe,
    prompt: int | None = None,
    completions: Sequence[int] = (),
    samples: Path | None = None,
) -> Lengths:
    """Return the lengths that a plan expects.

    Args:
        prompt: length of a prompt; if None, from the samples, or the longest that is allowed.
        completions: lengths of completions; a single one is the mean of the distribution of `cut_geometric`, and
            without any the mean is `COMPLETION_SHARE` of the longest that is allowed.
        samples: a run, or a file of samples, whose lengths are taken.

    Raises:
        CoveyError: a completion is longer than the recipe allows.
        DataError: there are no samples.
    """
    prompts, sampled = _sampled(samples) if samples else ((), ())
    prompt = prompt or (round(sum(prompts) / len(prompts)) if prompts else recipe.rollout.max_prompt_length)
    most = _most(recipe, prompt)
    if samples and not completions:
        origin = f"of the last {len(sampled):,} in {samples}"
        return Lengths(prompt, _quantiles([min(n, most) for n in sampled]), origin)
    if completions and (longest := max(completions)) > most:
        raise CoveyError(f"--completion-tokens has {longest}", want=f"at most {most}, as the recipe allows")
    if len(completions) > 1:
        return Lengths(prompt, tuple(sorted(completions)))
    assumed = min(max(1, round(COMPLETION_SHARE * recipe.rollout.max_new_tokens)), most)
    mean = completions[0] if completions else assumed
    origin = "any token may be the last with the same probability" if mean < most else "all of the longest"
    return Lengths(prompt, cut_geometric(mean, most), origin)


def cut_geometric(mean: int, most: int) -> tuple[int, ...]:
    """Return the lengths of completions that end at each token with the same probability, or at the latest with `most`
    tokens, in ascending order.

    >>> cut_geometric(8, 8), round(np.mean(cut_geometric(300, 1024))), max(cut_geometric(300, 1024))
    ((8,), 300, 1024)
    """
    if mean >= most:
        return (most,)
    low, high = 0.0, 1.0  # probability that a token is not the last
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - middle**most) / (1 - middle) < mean else (low, middle)
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    drawn = np.floor(np.log1p(-places) / math.log(high)) + 1
    return tuple(int(n) for n in np.minimum(drawn, most))


def _most(recipe: Recipe | SFTRecipe, prompt: int) -> int:
    """Return the most tokens that a completion may have."""
    return recipe.rollout.max_new_tokens if isinstance(recipe, Recipe) else max(recipe.training.max_length - prompt, 1)


def _quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
    ascending = np.sort(lengths)
    if len(ascending) <= QUANTILES:
        return tuple(map(int, ascending))
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES * len(ascending)
    return tuple(int(n) for n in ascending[places.astype(int)])


def _sampled(source: Path) -> tuple[Sequence[int], Sequence[int]]:
    """Return the lengths of prompts and completions of the last samples of a run, or in a file of samples."""
    file = source / SAMPLES if source.is_dir() else source
    pairs = deque(_read(file), maxlen=MOST_SAMPLES)
    if not pairs:
        raise DataError(
            "there are no samples with their lengths", want=f"a run folder, or its {SAMPLES}", where=str(file)
        )
    prompts, completions = zip(*pairs, strict=True)
    return prompts, completions


def _read(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the lengths of prompt and completion of each sample; lines without them are passed over."""
    try:
        with file.open("rb") as lines:
            for row in filter(None, map(parse_line, lines)):
                lengths = row.get("prompt_length"), row.get("length")
                if all(is_count(n) and n for n in lengths):
                    yield lengths  # type: ignore[misc]
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}", want="a run folder, or samples.jsonl", where=str(file)
        ) from error
