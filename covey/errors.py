"""User errors. Each states what was given, what was expected, and how to fix it; the command prints no traceback.

Any other exception that escapes is a bug in Covey and keeps its traceback.
"""

import difflib
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

MAX_LISTED = 20
"""Largest number of problems that one error describes."""
STOPPED = 75
"""Exit code of a run that was stopped by a signal and can be resumed: EX_TEMPFAIL of sysexits.h, try again later."""


class CoveyError(ValueError):
    """A mistake in the user's input: recipe, path, data, reward function or checkpoint.

    Args:
        what: what is wrong, in one sentence, with the offending value.
        want: what would be valid.
        fix: how to fix it.
        where: `file`, `file:line` or a dotted recipe key.

    Attributes:
        problems: the errors that this one reports together; empty if it reports one problem.
        exit_code: exit code of a command that ends by it.
    """

    problems: Sequence["CoveyError"] = ()
    exit_code = 2

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
    """A reward function that raised, or did not return one finite float (or None) per completion."""


class EpisodeError(CoveyError):
    """An environment that raised, took too long, or gave something else than messages and a finite reward."""


class WeightsError(CoveyError):
    """A checkpoint that cannot be found, is incomplete, or does not fit the model."""


class ResumeError(CoveyError):
    """A run that cannot be resumed from its folder as requested."""


class NumbersError(CoveyError):
    """A loss or a gradient that is not finite."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal requested a run to stop and it has stopped cleanly.

    Args:
        name: name of the signal.
        step: the last saved step; None when no step was saved.
    """

    def __init__(self, name: str, step: int | None = None):
        self.signal, self.step = name, step
        super().__init__(name)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: `STOPPED`, or that of a process killed by the signal if nothing is saved."""
        return STOPPED if self.step is not None else 128 + signal.Signals[self.signal]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; "" if it has none.

    >>> first_line(OSError("no route\\nto the host")), first_line(TimeoutError())
    ('no route', '')
    """
    return next(iter(str(error).splitlines()), "")


def reason_of(error: BaseException) -> str:
    """Return the text of an error, after its type if it is not one of Covey's.

    >>> reason_of(DataError("no rows")), reason_of(KeyError("text"))
    ('no rows', "KeyError: 'text'")
    """
    return str(error) if isinstance(error, CoveyError) else f"{type(error).__name__}: {error}"


@contextmanager
def foreign_errors(kind: type[CoveyError], what: str, *, fix: str = "", where: str = "") -> Iterator[None]:
    """Turn whatever another package raises into an error of this kind that begins with `what`."""
    try:
        yield
    except CoveyError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {first_line(error):.300}", fix=fix, where=where) from error


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `"did you mean 'x'?"` for the closest of `choices`, or a list of all choices when none is close.

    >>> nearest("num_generation", ["num_generations", "beta"])
    "did you mean 'num_generations'?"
    >>> nearest("gpro", ["gspo", "grpo"])
    "did you mean 'grpo'?"
    """
    names = sorted(choices)
    close = difflib.get_close_matches(word[:100], names, n=3, cutoff=0.6)  # a longer word matches none of them
    swapped = [name for name in close if sorted(name) == sorted(word)]
    return f"did you mean {(swapped or close)[0]!r}?" if close else "one of: " + ", ".join(names)


def raise_together(problems: Sequence[RecipeError]) -> None:
    """Raise the only problem, or the first `MAX_LISTED` of them as one error; do nothing if there are none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        many = len(problems) > MAX_LISTED
        count = f"more than {MAX_LISTED} problems; the first of them:" if many else f"{len(problems)} problems"
        together = RecipeError("\n".join([count, *map(str, problems[:MAX_LISTED])]))
        together.problems = problems[:MAX_LISTED]
        raise together
