"""Prompts that fit `rollout.max_prompt_length`, and endless batches of them, in an order that depends on a seed and can
be restored from a checkpoint.

Each epoch is shuffled anew (by grain, from the seed), and epochs are joined before they are cut into batches: no row is
dropped, no batch is short, and data smaller than a batch is repeated inside it. The position in the stream is the whole
state; a fingerprint beside it covers everything that determines the rows at that position.

A prompt that is too long is refused later, dropped, or truncated. A truncated prompt keeps its end, where the question
usually is and where the completion continues. Text loses its beginning. In a chat only the longest message loses its
beginning: the other messages, all roles and the template around them stay whole, so that no turn loses its header.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.data.rows import Row, as_rows
from covey.errors import DataError, ResumeError
from covey.types import Prompt

if TYPE_CHECKING:
    import numpy as np  # late: a command that reads no data needs no NumPy

log = logging.getLogger(__name__)

BESIDE_PROMPT = ("system", "tools", "functions", "history", "images", "chosen", "rejected")
"""Columns that other trainers put into a prompt or learn from; here functions alone get them."""
LoaderState = dict[str, Any]
"""State of a loader, JSON-serializable: `position` in rows, and `fingerprint`."""


class PromptLoader(Iterator[list[Row]]):
    """Iterator over batches of rows.

    Attributes:
        rows: the data.
        prompts_per_step: rows per batch.
        position: rows returned so far, over all epochs: the index of the next row in the stream.
    """

    unit = "prompts_per_step"
    """Name of the batch size in settings and errors."""
    read = staticmethod(as_rows)
    """Function that converts the data to rows."""

    def __init__(
        self, data: Any, prompts_per_step: int, *, seed: int = 0, shuffle: bool = True, num_epochs: int | None = None
    ):
        """Make a loader at the start of its stream.

        Args:
            data: any form that `as_rows` takes.
            prompts_per_step: rows per batch: P.
            seed: seed of the order.
            shuffle: whether each epoch is shuffled; otherwise every epoch has the order of the data.
            num_epochs: epochs after which the loader ends, if need be with a short batch; endless if not set.
        """
        if prompts_per_step < 1:
            raise DataError(f"{self.unit} is {prompts_per_step}", want="at least 1")
        self.rows = self.read(data)
        if beside := [
            name for name in BESIDE_PROMPT if any(row.get(name) not in (None, "", "[]", []) for row in self.rows)
        ]:
            log.warning(f"no prompt has what {' and '.join(map(repr, beside))} hold: write it into the chat")
        self.prompts_per_step = prompts_per_step
        self.position = 0
        self._seed, self._shuffle, self._num_epochs = seed, shuffle, num_epochs

    def __len__(self) -> int:
        """Return the number of batches per epoch, rounded up."""
        return -(-len(self.rows) // self.prompts_per_step)

    def __next__(self) -> list[Row]:
        batch = self.take(self.prompts_per_step)
        if not batch:
            raise StopIteration
        return batch

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows; fewer, or none, at the end of the data."""
        stop = min(self.position + count, len(self._order))
        batch = [self.rows[int(self._order[i])] for i in range(self.position, stop)]
        self.position = stop
        return batch

    def state(self) -> LoaderState:
        """Return the state of the stream, for a checkpoint."""
        return {"position": self.position, "fingerprint": dict(self.fingerprint)}

    def restore(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Continue from `state`. An error also says which settings of the data have been `changed`.

        Raises:
            ResumeError: the state is malformed, or was taken with other data, another order or another batch size.
        """
        position, saved = state.get("position"), state.get("fingerprint")
        if not isinstance(position, int) or position < 0 or not isinstance(saved, Mapping):
            raise ResumeError(f"the data position {dict(state)!r:.200} cannot be read")
        other = {name: saved.get(name) for name, now in self.fingerprint.items() if saved.get(name) != now}
        if other:
            changes = "; ".join([*changed, *(f"{x} was {then}, is {self.fingerprint[x]}" for x, then in other.items())])
            raise ResumeError(
                f"the data does not go on where it stopped: {changes}",
                fix=f"give the run the data, seed and {self.unit} it was started with, or start a new one",
            )
        self.position = position

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Values that determine the stream: the settings, and digests of the rows and the start of the order."""
        order = [int(self._order[i]) for i in range(min(64, len(self.rows)))]
        return {
            "rows": len(self.rows),
            "content": _digest(self.rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            self.unit: self.prompts_per_step,
            "order": _digest(order),
        }

    @cached_property
    def _order(self) -> Any:
        """Row numbers of the whole stream, computed on access."""
        import grain  # imported late, because it imports JAX

        numbers = grain.MapDataset.range(len(self.rows))
        if self._shuffle:
            numbers = numbers.shuffle(seed=self._seed % 2**32)
        return numbers.repeat(self._num_epochs)


def _digest(value: Any) -> str:
    text = json.dumps(value, skipkeys=True, default=stable_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stable_text(value: Any) -> str:
    """Convert a value that JSON cannot represent to text: bytes by their content, others by their type alone."""
    return value.hex() if isinstance(value, bytes) else type(value).__qualname__


Encode = Callable[[Prompt], "np.ndarray"]
"""Function that encodes a row's prompt to the tokens that are sampled after: int32 [n]."""


class FittedPrompts(NamedTuple):
    """Rows that are used, and how many were dropped or truncated."""

    rows: Sequence[Row]
    dropped: int = 0
    truncated: int = 0


def fit_prompts(rows: Sequence[Row], encode: Encode, max_tokens: int, policy: str) -> FittedPrompts:
    """Return `rows` with prompts of at most `max_tokens`; unchanged under the policy `error` (the sampler refuses).

    Raises:
        DataError: every row would be dropped, or a truncated prompt would be empty.
    """
    if policy == "error":
        return FittedPrompts(rows)
    fits = [len(encode(row["prompt"])) <= max_tokens for row in rows]
    if policy == "drop":
        if rows and not any(fits):
            raise DataError(f"every prompt has more than {max_tokens} tokens", fix="a larger rollout.max_prompt_length")
        return FittedPrompts([*compress(rows, fits)], dropped=fits.count(False))
    fitted = [
        row if fit else row | {"prompt": truncate_prompt(row["prompt"], encode, max_tokens)}
        for row, fit in zip(rows, fits, strict=True)
    ]
    return FittedPrompts(fitted, truncated=fits.count(False))


def truncate_prompt(prompt: Prompt, encode: Encode, max_tokens: int) -> Prompt:
    """Truncate the beginning of `prompt` so that it has at most `max_tokens`.

    Raises:
        DataError: the text, or the longest message, would be empty.
    """
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    longest, text = max(enumerate(texts), key=lambda entry: len(entry[1]))

    def keep_last(characters: int) -> Prompt:
        end = text[len(text) - characters :]
        if isinstance(prompt, str):
            return end
        return [*prompt[:longest], {**prompt[longest], "content": end}, *prompt[longest + 1 :]]

    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        short = len(encode(keep_last(middle))) <= max_tokens
        fits, too_long = (middle, too_long) if short else (fits, middle)
    if not text[len(text) - fits :].strip():
        raise DataError(
            f"nothing would be left of a prompt cut to {max_tokens} tokens: {str(prompt)[:60]!r}",
            fix="a larger rollout.max_prompt_length, or training.too_long drop",
        )
    return keep_last(fits)
