"""User errors. Each says what we got, what we wanted, and how to fix it; the command prints them without a traceback.

Anything else that escapes is a defect of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class CoveyError(ValueError):
    """A mistake in what the user gave us: recipe, path, data, reward function or checkpoint.

    Args:
        what: what is wrong, in one sentence, with the offending value.
        want: what would have been right.
        fix: what to do now.
        where: `file`, `file:line` or a dotted recipe key.
    """

    def __init__(self, what: str, *, want: str = "", fix: str = "", where: str = ""):
        self.what, self.want, self.fix, self.where = what, want, fix, where
        lines = [f"{where}: {what}" if where else what]
        lines += [f"  wanted: {want}"] if want else []
        lines += [f"  fix: {fix}"] if fix else []
        super().__init__("\n".join(lines))


class RecipeError(CoveyError):
    """A recipe or an override that cannot be run as written."""


class DataError(CoveyError):
    """A data set, a column or a prompt that is missing or malformed."""


class RewardError(CoveyError):
    """A reward function that raised or returned something other than one finite float (or None) a completion."""


class WeightsError(CoveyError):
    """A checkpoint that cannot be found, is incomplete, or does not fit the model."""


class ResumeError(CoveyError):
    """A run that cannot go on from its folder as asked."""


class NumbersError(CoveyError):
    """A loss or a gradient that is no finite number."""


class Stopped(KeyboardInterrupt):
    """A run was asked to end by a signal, and has ended in order.

    Args:
        signal: the signal's name.
        step: the last step that is saved; None when nothing is.
    """

    def __init__(self, signal: str, step: int | None = None):
        self.signal, self.step = signal, step
        super().__init__(signal)


def nearest(word: str, choices: Iterable[str]) -> str:
    """`"did you mean 'x'?"` for the closest of `choices`, or the list of them when nothing is close.

    >>> nearest("num_generation", ["num_generations", "beta"])
    "did you mean 'num_generations'?"
    """
    names = sorted(choices)
    close = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)  # a longer word is near to none of them
    return f"did you mean {close[0]!r}?" if close else "one of: " + ", ".join(names)
