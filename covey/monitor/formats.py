"""Format the numbers and texts of a run in a few characters, for the terminal."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from covey.config.metrics import metric
from covey.display import printable
from covey.types import Completion, Group, Prompt

TEXT_WIDTH = 160
"""Maximum number of characters of a prompt or completion that are shown."""
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def sparkline(values: Sequence[float], width: int = 40, ascii_only: bool = False) -> str:
    """Draw `values` as a row of at most `width` marks, averaged and scaled from their lowest to their highest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    marks, parts = ASCII_SPARKS if ascii_only else SPARKS, min(width, len(finite))
    edges = [round(i * len(finite) / parts) for i in range(parts + 1)]
    means = [statistics.fmean(finite[a:b]) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(marks[round((m - low) / span * (len(marks) - 1)) if span else 0] for m in means)


def in_unit(name: str, value: float) -> str:
    """Format the value of the metric `name` in a few characters, in the unit given by the table of metrics.

    >>> in_unit("completions/clipped_ratio", 0.125), in_unit("time/reward", 0.5), in_unit("kl", 0.01)
    ('12.5%', '0.5s', '0.0100')
    """
    row = metric(name)
    return UNITS.get(row.unit if row else "", brief)(value)


def brief(value: float) -> str:
    """Format a number of any size in a few characters.

    >>> brief(0.01), brief(12.345678), brief(1e-7), brief(123456.0)
    ('0.0100', '12.3457', '1.00e-07', '1.23e+05')
    """
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e4 else f"{value:.2e}"


def excerpt(text: str, width: int = TEXT_WIDTH) -> str:
    """Shorten `text` to about `width` printable characters by cutting the middle: the end of a prompt matters too."""
    text = printable(text.strip())
    return text if len(text) <= width else f"{text[: width // 2]} … {text[-width // 2 :]}"


def duration(seconds: float) -> str:
    """Format a time of any length in its two largest units.

    >>> duration(9.6), duration(125), duration(3725), duration(90000)
    ('10s', '2m05s', '1h02m', '1d01h')
    """
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def size(count: int) -> str:
    """Format a number of bytes.

    >>> size(4_512_000_000), size(310_000_000)
    ('4.5 GB', '310 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def figures(result: Mapping[str, Any]) -> str:
    """Format the metrics of an evaluation in one line.

    >>> figures({"accuracy": 0.5, "reward": 0.25, "samples": 8, "judged": 4})
    'accuracy 50.0%  reward 0.250  (8 samples, 4 judged)'
    """
    names = [*FIGURES, *(name for name in result if re.fullmatch(r"pass@\d+", name))]
    shown = [f"{name} {figure(name, result[name])}" for name in names if result.get(name) is not None]
    counts = [f"{result[name]} {name.replace('_', ' ')}" for name in ("examples", "samples", *JUDGED) if name in result]
    return "  ".join([*shown, *([f"({', '.join(counts)})"] if counts else [])])


def figure(name: str, value: float) -> str:
    """Format the value of the metric `name` of an evaluation."""
    row = metric(f"eval/{name}")
    return f"{100 * value:.1f}%" if row and row.unit == "share" else f"{value:.3f}"


FIGURES = ("loss", "perplexity", "accuracy", "partial_accuracy", "format_accuracy", "reward")
"""Metrics shown for an evaluation, in this order."""
JUDGED = ("judged", "partial_judged", "format_judged", "reward_judged")
"""Numbers of completions that a figure is computed from, where they are not all."""


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as readable text: the text itself, or its chat messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def completion_text(completion: Completion) -> str:
    """Return a completion as readable text: its own, or the turns of its episode with their roles."""
    return prompt_text(completion.episode.messages) if completion.episode else completion.text


@dataclass(frozen=True)
class SampleLine:
    """One completion as a display shows it."""

    prompt: str
    text: str
    reward: float

    @property
    def rank(self) -> float:
        """The reward, or less than any where it is not finite."""
        return self.reward if math.isfinite(self.reward) else -math.inf

    @classmethod
    def of(cls, groups: Iterable[Group]) -> list[Self]:
        """Return the lines of the completions that have rewards."""
        return [
            cls(prompt_text(group.prompt), completion_text(completion), float(reward))
            for group in groups
            if group.rewards is not None
            for completion, reward in zip(group.completions, group.rewards, strict=True)
        ]


UNITS: dict[str, Callable[[float], str]] = {
    "share": lambda value: f"{100 * value:.3g}%",
    "tokens": lambda value: f"{value:.0f}",
    "tokens/s": lambda value: f"{value:.0f}",
    "s": lambda value: f"{value:.3g}s",
}
"""Map from unit to the formatter of its numbers; other units use `brief`."""
