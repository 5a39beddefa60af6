"""Forms in which a row holds a prompt and its completion: one table for the readers, errors, help and docs.

Supervised training learns the completion. Reinforcement learning samples from the prompt of a chat form and keeps the
given completion as the column `completion`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from covey.errors import DataError

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
"""Role for each value of ShareGPT's `from`."""


class Form(NamedTuple):
    """One way to hold a prompt and its completion.

    Attributes:
        name: what the form is called.
        columns: names of the required columns.
        description: the meaning of these columns, for help and docs.
        optional: names of the optional columns.
        to_chat: converts a row to a chat, which ends with the completion if the row has one; the second argument names
            the row in errors. None if the columns are prompt and completion themselves, or plain text.
    """

    name: str
    columns: tuple[str, ...]
    description: str
    optional: tuple[str, ...] = ()
    to_chat: Callable[[Mapping[str, Any], str], Any] | None = None

    @property
    def label(self) -> str:
        """Name with the columns, where these say more."""
        columns = ", ".join(self.columns)
        return self.name if columns in (self.name, "prompt, completion") else f"{self.name} ({columns})"


def find_form(row: Mapping[str, Any]) -> Form | None:
    """Return the first form whose columns `row` has; `PAIR` is skipped, since its columns may have other names."""
    return next((form for form in FORMS if form is not PAIR and all(name in row for name in form.columns)), None)


def find_chat_form(row: Mapping[str, Any]) -> Form | None:
    """Return the chat form of a row; its completion may be missing."""
    return next((form for form in FORMS if form.to_chat and form.columns[0] in row), None)


def format_counts(found: Iterable[Form | None]) -> str:
    """Format how many rows have each form, for the log; None is a prompt alone.

    >>> format_counts([FORMS[2], None, FORMS[2]])
    '2 rows as ShareGPT (conversations), 1 as prompt'
    """
    counts = Counter("prompt" if form is None else form.label for form in found)
    return ", ".join(f"{count}{' rows' * (not n)} as {label}" for n, (label, count) in enumerate(counts.items()))


def format_columns(row: Mapping[str, Any]) -> str:
    """Format the columns that a row has, for errors; names in a file may be long and many."""
    names = ", ".join(f"{str(name)[:40]!r}" for name in list(row)[:8])
    return f"{names}, …" if len(row) > 8 else names or "none"


def format_forms() -> str:
    """Format the forms for a terminal, one per line."""
    width = max(len(", ".join(form.columns)) for form in FORMS)
    return "\n".join(f"{', '.join(form.columns):{width}}  {form.description}" for form in FORMS)


def _conversations(row: Mapping[str, Any], where: str) -> Any:
    """Convert ShareGPT's turns to chat messages; turns that already are messages stay as they are."""
    turns = row["conversations"]
    turns = turns.tolist() if hasattr(turns, "tolist") else turns
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        return turns
    return [*_system(row), *(_turn(turn, where) for turn in turns)]


def _turn(turn: Any, where: str) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    if (role := ROLES.get(str(turn["from"]))) is None:
        what = f"a turn of the conversation is from {str(turn['from'])[:40]!r}"
        raise DataError(what, want="one of: " + ", ".join(ROLES), where=where)
    return {"role": role, "content": turn.get("value")}


def _instruction(row: Mapping[str, Any], where: str) -> Any:
    """Convert an Alpaca row to a chat: the instruction, with the input below it, is the user's message."""
    if not isinstance(row["instruction"], str) or not row["instruction"].strip():
        raise DataError(f"the instruction is {row['instruction']!r:.80}", want="text that is not empty", where=where)
    asked = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
    answer = [{"role": "assistant", "content": row["output"]}] if row.get("output") is not None else []
    return [*_system(row), {"role": "user", "content": asked}, *answer]


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


PAIR = Form(
    "prompt and completion",
    ("prompt", "completion"),
    "text, or chat messages; the completion is text or one message of the assistant",
)

FORMS = (
    PAIR,
    Form(
        "chat",
        ("messages",),
        "chat messages, the last of which is the assistant's",
        to_chat=lambda row, _: row["messages"],
    ),
    Form(
        "ShareGPT",
        ("conversations",),
        "ShareGPT: turns `from` human and gpt with a `value`; the text of a column `system` is placed before them",
        ("system",),
        _conversations,
    ),
    Form(
        "Alpaca",
        ("instruction", "output"),
        "Alpaca: the user's message, followed by the text of a column `input`, and the answer",
        ("input", "system"),
        _instruction,
    ),
    Form("text", ("text",), "plain text, all of which is learnt"),
)
"""All forms. A row that has the columns of several is read by the first of them."""

CHAT_COLUMNS = "; or ".join(" and ".join(form.columns) for form in FORMS if form.to_chat)
"""Columns of the forms that are chats, in one line, for errors."""

FORM_COLUMNS = "; or ".join(" and ".join(form.columns) for form in FORMS)
"""Columns of all forms in one line, for errors."""
