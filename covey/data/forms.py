"""The forms in which a row holds a prompt and the answer to it: one table for the readers, errors, help and docs.

Supervised training learns the answer. Reinforcement learning asks the prompt of a chat form, and has the answer as the
column `completion`.
"""

from collections.abc import Callable, Mapping, Sequence
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
"""Who speaks in ShareGPT's `from` → role."""


class Form(NamedTuple):
    """One way to hold a prompt and its answer.

    Attributes:
        columns: what a row of this form has.
        more: what it may have beside them.
        holds: the meaning of these columns, for help and docs.
        chat: makes a chat of a row, which ends with the answer where there is one; the second argument names the row in
            errors. None where the columns are prompt and completion themselves, or plain text.
    """

    columns: tuple[str, ...]
    holds: str
    more: tuple[str, ...] = ()
    chat: Callable[[Mapping[str, Any], str], Any] | None = None


def form_of(row: Mapping[str, Any]) -> Form | None:
    """The first form whose columns a row has, apart from `PAIR`, whose columns may have other names."""
    return next((form for form in FORMS if form is not PAIR and all(name in row for name in form.columns)), None)


def chat_form_of(row: Mapping[str, Any]) -> Form | None:
    """The chat form of a row whose answer may be missing."""
    return next((form for form in FORMS if form.chat and form.columns[0] in row), None)


def lines() -> str:
    """The forms for a terminal, one a line."""
    width = max(len(", ".join(form.columns)) for form in FORMS)
    return "\n".join(f"{', '.join(form.columns):{width}}  {form.holds}" for form in FORMS)


def _messages(row: Mapping[str, Any], where: str) -> Any:
    return row["messages"]


def _conversations(row: Mapping[str, Any], where: str) -> Any:
    """ShareGPT's turns as messages; what already is a chat message stays one."""
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
    """Alpaca's instruction with its input below it as the user's message."""
    if not isinstance(row["instruction"], str) or not row["instruction"].strip():
        raise DataError(f"the instruction is {row['instruction']!r:.80}", want="text that is not empty", where=where)
    asked = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
    answer = [{"role": "assistant", "content": row["output"]}] if row.get("output") is not None else []
    return [*_system(row), {"role": "user", "content": asked}, *answer]


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


PAIR = Form(("prompt", "completion"), "text, or chat messages; the completion is text or one assistant's message")

FORMS = (
    PAIR,
    Form(("messages",), "chat messages that end with the assistant's", chat=_messages),
    Form(
        ("conversations",),
        "ShareGPT: turns `from` human and gpt with a `value`; a column `system` comes before them",
        ("system",),
        _conversations,
    ),
    Form(
        ("instruction", "output"),
        "Alpaca: the user's message, with a column `input` below it, and the answer",
        ("input", "system"),
        _instruction,
    ),
    Form(("text",), "plain text, all of it learnt"),
)
"""All forms. A row that has the columns of several is of the first."""

LISTED = "; or ".join(" and ".join(form.columns) for form in FORMS)
"""The columns of the forms in one line, for errors."""
