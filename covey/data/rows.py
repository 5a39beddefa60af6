"""Rows: plain dicts with a `prompt` and any other columns, converted from the forms in which users hold their data.

Accepted are rows, texts, chats, a dict of columns, a table (pandas, Arrow, Polars), a data set that iterates over rows,
and batches (dicts of lists or arrays, as other trainers want them), which are split into rows: Covey makes its own
batches. If a row has no prompt but a chat in one of `FORMS`, the chat is the prompt; an assistant's message at its end
becomes the column `completion`.

`FORMS` is one table for the readers, errors, help and docs. Supervised training learns the completion. Reinforcement
learning samples from the prompt of a chat form and keeps the given completion as a column.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from operator import length_hint
from typing import Any, NamedTuple

from covey.errors import DataError, nearest
from covey.types import Message, Prompt

log = logging.getLogger(__name__)
Row = dict[str, Any]
"""One example: `prompt` (text or chat messages) and columns for the reward functions (`answer`, ...)."""

PLAIN = (
    "prompts are plain text, and the model has a chat template",
    "a chat model that gets no template may stop at once, with empty completions; a base model may not",
    "rows with messages, or --data.system TEXT, which makes a chat of each prompt",
)
"""Title, reason and remedy of the finding that prompts lack the model's chat template."""
MAX_ROWS = 10_000_000
"""Largest number of rows; a data set with more is taken to be endless."""

PROMPT_NAMES = ("prompt", "prompts")
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
CHAT_TEXT = re.compile(r"""\s*(?:array\()?\[\s*\{\s*["'](?:role|from|content|value)["']\s*:""")
"""Beginning of a text that is a list of chat messages, as JSON or as Python prints it."""


def as_rows(data: Any) -> list[Row]:
    """Convert `data` to rows: prompts to text or message lists, NumPy scalars and bytes to plain values.

    A column that only some rows have is None in the others, so that every batch has the same columns.

    Args:
        data: a sequence or iterable of rows, of prompts, or of batches; a table; or one dict of columns. The prompt is
            in the column `prompt` or `prompts`, or in that of a chat form.

    Raises:
        DataError: there is no prompt column, columns differ in length, the data set is empty or endless, or a prompt is
                malformed.

    >>> as_rows({"prompts": ["2+2?", "3+3?"], "answer": ["4", "6"]})
    [{'prompt': '2+2?', 'answer': '4'}, {'prompt': '3+3?', 'answer': '6'}]
    """
    if isinstance(data, Mapping):
        rows = _from_columns(data, _prompt_name(data, "the data"), "the data")
    else:
        rows = [row for number, item in enumerate(iter_items(data), 1) for row in _from_item(item, f"item {number}")]
    if not rows:
        raise DataError("the data set is empty", want="at least one row with a prompt")
    columns = dict.fromkeys(name for row in rows for name in row)
    return [row if len(row) == len(columns) else dict.fromkeys(columns) | row for row in rows]


def as_prompt(value: Any, where: str) -> Prompt:
    """Convert a prompt to its plain form: text, or a list of `{"role": ..., "content": ...}`.

    Raises:
        DataError: `value` is neither, is empty, or ends with an assistant's message.
    """
    prompt = as_turns(value, where)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise DataError(
            "the prompt ends with an assistant's message, and the model would be asked after it",
            want="a chat that ends with what is asked",
            fix="leave that message out; if it is the answer, name the column messages",
            where=where,
        )
    return prompt


def as_turns(value: Any, where: str) -> Prompt:
    """Convert text or chat messages to their plain form, as `as_prompt` does; the last message may be an answer.

    Raises:
        DataError: `value` is neither, or is empty.
    """
    value = parse_chat(value, where)
    if isinstance(value, str) and value.strip():
        return value
    turns = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else []
    messages = [_turn(turn, where) for turn in turns]
    contents = [message_text(message, where) for message in messages]
    if contents and None not in contents:
        return [{**message, "content": str(text)} for message, text in zip(messages, contents, strict=True)]
    text = repr(value)
    raise DataError(
        f"the prompt is {text if len(text) < 80 else text[:77] + '...'}",
        want="text, or chat messages with a role and a content, not empty",
        where=where,
    )


def parse_chat(value: Any, where: str) -> Any:
    """Return the messages of a chat that stands in a table as JSON text; any other value as it is.

    Raises:
        DataError: the text is a chat, and not JSON.

    >>> parse_chat('[{"role": "user", "content": "2+2?"}]', "row 1")
    [{'role': 'user', 'content': '2+2?'}]
    """
    value = plain_value(value)
    if not isinstance(value, str) or not CHAT_TEXT.match(value) or not ({"role", "from"} & {*re.split("[\"']", value)}):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):  # a text that begins with a chat
            return value
        raise DataError(
            f"a chat stands here as text that is not JSON: {value[:60]!r}",
            want="messages as JSON: " + '[{"role": "user", "content": "…"}, …]',
            fix="write the column with json.dumps, or the rows as a .jsonl file",
            where=where,
        ) from None


def message_text(message: Any, where: str) -> str | None:
    """Return the text of a chat message, also of one in parts; None if it is no message of text.

    Raises:
        DataError: a part is an image or another thing that is no text.
    """
    turn = message if _is_message(message) else {}
    is_call = turn.get("content") is None and turn.get("tool_calls")
    content: Any = "" if is_call else plain_value(turn.get("content"))
    if isinstance(content, str | bytes) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else None
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"a part of a message is {part!r:.80}",
                want='text, or parts {"type": "text", "text": "…"}: Covey trains on text',
                fix="leave out rows with images, sounds or videos",
                where=where,
            )
    return "".join(part["text"] for part in content)


def as_chat_row(row: Mapping[str, Any], where: str) -> Row:
    """Convert a row of a chat form: the chat becomes `prompt`, an assistant's message at its end `completion`.

    Raises:
        DataError: the chat is malformed, or has only an assistant's message.
    """
    form = find_chat_form(row)
    assert form is not None
    turns = chat_turns(form, row, where)
    used = {*PROMPT_NAMES, *form.columns, *form.optional}
    columns = {name: plain_value(value) for name, value in row.items() if name not in used}
    if turns[-1]["role"] != "assistant":
        return {"prompt": turns, **columns}
    return {"prompt": as_prompt(turns[:-1], where), **columns, "completion": turns[-1]["content"]}


def chat_turns(form: "Form", row: Mapping[str, Any], where: str) -> Sequence[Message]:
    """Return the messages of a row of a chat form, after the text of its column `system`.

    Raises:
        DataError: the chat is malformed or plain text, or begins with another system message.
    """
    assert form.to_chat is not None
    turns, system = as_turns(form.to_chat(row, where), where), plain_value(row.get("system"))
    if isinstance(turns, str):
        raise DataError(
            f"{form.columns[0]} is the text {turns[:60]!r}",
            want="a list of messages, each with a role and a content; or its JSON text",
            where=where,
        )
    if system and turns[0]["role"] == "system" and turns[0]["content"] != system:
        raise DataError(
            f"the column 'system' is {system!r:.60}, and the chat begins with {turns[0]['content']!r:.60}",
            want="one system message",
            fix="leave one of them out; --data.system replaces both",
            where=where,
        )
    first = [] if not system or turns[0]["role"] == "system" else [{"role": "system", "content": system}]
    return [*(first and as_turns(first, where)), *turns]


def chat(*texts: str) -> list[dict[str, str]]:
    """Return chat messages with these texts, of the user and the assistant in turn.

    >>> chat("2+2?", "4")
    [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}]
    """
    return [{"role": role, "content": text} for text, role in zip(texts, cycle(("user", "assistant")), strict=False)]


def iter_items(data: Any) -> Iterator[Any]:
    """Iterate over the items of a data set, or over the rows of a table.

    Raises:
        DataError: `data` is a text, is not iterable, is endless, or yields something other than rows.
    """
    if isinstance(data, (str, bytes)):
        raise DataError(
            f"the data is one text, {data[:80]!r}",
            want="rows, or a list of prompts",
            fix="for a file: covey.load_data(DataConfig(task='jsonl', path=...)).train",
        )
    if length_hint(data) > MAX_ROWS:
        raise _endless_error()
    try:
        table = _table_rows(data)
        parts = iter(data if table is None else table)
    except TypeError:
        raise DataError(
            f"the data is a {type(data).__name__}, which has no rows to go through",
            want="a list of dicts with a prompt",
            fix="of a Dataset pass .train",
        ) from None
    for number, item in enumerate((row for part in parts for row in _table_rows(part) or (part,)), 1):
        if number > MAX_ROWS:
            raise _endless_error()
        _check_no_part_of_table(item, number, data)
        yield item


def _table_rows(data: Any) -> list[Any] | None:
    """Return the rows of an Arrow, Polars or pandas table as dicts; None if `data` is not a table."""
    for to_rows in ("to_pylist", "to_dicts"):
        if hasattr(data, to_rows):
            return list(getattr(data, to_rows)())
    if hasattr(data, "columns") and hasattr(data, "notna"):  # pandas, which has NaN for missing values
        return list(data.astype(object).where(data.notna(), None).to_dict("records"))
    return None


def _check_no_part_of_table(item: Any, number: int, data: Any) -> None:
    """Check that an item is no column name and no row that `iterrows` or `itertuples` of a data frame yields."""
    names = getattr(data, "columns", ())
    parts = item if isinstance(item, tuple) else (item,)
    if isinstance(item, str) and isinstance(names, Iterable) and item in list(names):
        what = f"the data is a {type(data).__name__}, which gives the names of its columns ({item!r}) and not its rows"
    elif hasattr(item, "_fields") or any(hasattr(part, "to_dict") for part in parts):
        what = f"item {number} of the data is a {type(item).__name__} out of a table, which is no row"
    else:
        return
    raise DataError(
        what, want="rows as dicts", fix="pass the table itself (pandas, Arrow, Polars), or its rows as a list of dicts"
    )


def _endless_error() -> DataError:
    return DataError(
        f"the data set has more than {MAX_ROWS} rows, or does not end",
        fix="pass it before repeat(): Covey repeats and shuffles it",
    )


def _from_item(item: Any, where: str) -> list[Row]:
    """Convert an item to one row, or to the rows of a batch."""
    if not isinstance(item, Mapping):
        return [{"prompt": as_prompt(item, where)}]
    name = _prompt_name(item, where)
    return [_row(item, name, where)] if _is_one_prompt(item[name], name) else _from_columns(item, name, where)


def _row(item: Mapping[str, Any], name: str, where: str) -> Row:
    if name not in PROMPT_NAMES:
        return as_chat_row(item, where)
    columns = {key: plain_value(value) for key, value in item.items() if key not in PROMPT_NAMES}
    return {"prompt": as_prompt(item[name], where), **columns}


def _from_columns(columns: Mapping[str, Any], name: str, where: str) -> list[Row]:
    rows = split_columns(columns, name, where)
    return [_row(row, name, f"{where}, prompt {number}") for number, row in enumerate(rows, 1)]


def split_columns(columns: Mapping[str, Any], name: str, where: str) -> list[Row]:
    """Split a dict of columns into as many rows as the column `name` has entries; a single value is in each of them.

    Raises:
        DataError: that column has no entries to count, or another has more or fewer.
    """
    prompts = _as_list(columns[name])
    if prompts is None:
        raise DataError(f"column {name!r} is a {type(columns[name]).__name__}", want="a list of prompts", where=where)
    table = {key: _as_list(value) for key, value in columns.items()}
    for key, values in table.items():
        if values is not None and len(values) != len(prompts):
            raise DataError(
                f"column {key!r} has {len(values)} entries and {name!r} has {len(prompts)}",
                want="one entry a prompt",
                where=where,
            )
    return [
        {key: columns[key] if values is None else values[i] for key, values in table.items()}
        for i in range(len(prompts))
    ]


def _prompt_name(columns: Mapping[str, Any], where: str) -> str:
    for name in PROMPT_NAMES:
        if name in columns:
            return name
    if (form := find_chat_form(columns)) is not None:
        return form.columns[0]
    if "train" in columns:
        raise DataError("these are several splits", want="one data set", fix="pass data['train']", where=where)
    raise DataError(
        f"there is no prompt; the columns are {format_columns(columns)}",
        want=f"a column named prompt or prompts; or {CHAT_COLUMNS}",
        fix=nearest("prompt", map(str, columns)) if columns else "",
        where=where,
    )


def _is_one_prompt(value: Any, name: str) -> bool:
    value = plain_value(value)
    if isinstance(value, str):
        return True
    first = value[0] if isinstance(value, Sequence) and len(value) > 0 else None
    return _is_message(first) if name in PROMPT_NAMES else isinstance(first, Mapping)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _as_list(value: Any) -> list[Any] | None:
    """Return a column's entries; None for a single value, which then applies to every row."""
    if isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) == 0:
        return None
    if hasattr(value, "tolist"):
        entries: list[Any] = value.tolist()
        return entries
    return list(value) if isinstance(value, Sequence) else None


def plain_value(value: Any) -> Any:
    """Convert NumPy scalars and arrays to Python values, and bytes to text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:  # not text: an image or a pickle
            return value
    return value


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


def format_counts(forms: Iterable[Form | None]) -> str:
    """Format the number of rows of each form, for the log; None is a prompt alone.

    >>> format_counts([FORMS[2], None, FORMS[2]])
    '2 rows as ShareGPT (conversations), 1 as prompt'
    """
    counts = Counter("prompt" if form is None else form.label for form in forms)
    return ", ".join(f"{count}{' rows' * (not n)} as {label}" for n, (label, count) in enumerate(counts.items()))


def format_columns(row: Mapping[str, Any]) -> str:
    """Format the columns that a row has, for errors; names in a file may be long and many."""
    names = ", ".join(f"{str(name)[:40]!r}" for name in list(row)[:8])
    return f"{names}, …" if len(row) > 8 else names or "none"


def format_forms() -> str:
    """Format the forms for a terminal, one per line."""
    width = max(len(", ".join(form.columns)) for form in FORMS)
    return "\n".join(f"{', '.join(form.columns):{width}}  {form.description}" for form in FORMS)


def _turn(turn: Any, where: str) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    if (role := ROLES.get(str(turn["from"]))) is None:
        raise DataError(
            f"a turn of the conversation is from {str(turn['from'])[:40]!r}",
            want="one of: " + ", ".join(ROLES),
            where=where,
        )
    return {"role": role, "content": turn.get("value")}


def _instruction(row: Mapping[str, Any], where: str) -> Any:
    """Convert an Alpaca row to a chat: the instruction, with the input below it, is the user's message."""
    instruction, added = row["instruction"], row.get("input")
    if not isinstance(instruction, str) or not instruction.strip() or isinstance(added, list | dict):
        raise DataError(
            f"the instruction is {instruction!r:.80} and the input {added!r:.40}", want="text, not empty", where=where
        )
    asked = "\n\n".join(str(part) for part in (instruction, added) if part)
    answer = [{"role": "assistant", "content": row["output"]}] if row.get("output") is not None else []
    return [*chat(*_history(row, where)), {"role": "user", "content": asked}, *answer]


def _history(row: Mapping[str, Any], where: str) -> list[str]:
    """Return the earlier turns of an Alpaca row, of user and assistant in turn; in a table they are JSON text."""
    history = plain_value(row.get("history")) or []
    try:
        pairs = [plain_value(pair) for pair in (json.loads(history) if isinstance(history, str) else history)]
        kinds = [list(map(type, pair)) for pair in pairs if isinstance(pair, list | tuple)]
        if kinds != [[str, str]] * len(pairs):
            raise ValueError("no pairs of texts")
        return [text for pair in pairs for text in pair]
    except (ValueError, TypeError, RecursionError):
        raise DataError(
            f"the history is {history!r:.80}", want='pairs: [["question", "answer"], …], also as JSON text', where=where
        ) from None


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
        "chat messages, the last of which is the assistant's; the text of a column `system` is placed before them",
        ("system",),
        lambda row, _: row["messages"],
    ),
    Form(
        "ShareGPT",
        ("conversations",),
        "ShareGPT: turns `from` human and gpt with a `value`; the text of a column `system` is placed before them",
        ("system",),
        lambda row, _: row["conversations"],
    ),
    Form(
        "Alpaca",
        ("instruction", "output"),
        "Alpaca: the user's message, followed by the text of a column `input`, and the answer; the text of a column "
        "`system` and the pairs of a column `history` are placed before them",
        ("input", "system", "history"),
        _instruction,
    ),
    Form("text", ("text",), "plain text, all of which is learnt"),
)
"""All forms. A row that has the columns of several is read by the first of them."""

CHAT_COLUMNS = "; or ".join(" and ".join(form.columns) for form in FORMS if form.to_chat)
"""Columns of the forms that are chats, in one line, for errors."""


def count_plain(rows: Iterable[Row], tokenizer: Any, environment: Any = None, warn: bool = True) -> int:
    """Return the number of prompts that are plain text though the model has a chat template; warn if there are some. An
    environment may begin with messages of its own.
    """
    texts = (row["prompt"] for row in rows if tokenizer.chat_template and not environment)
    if (count := sum(isinstance(text, str) and text != "" for text in texts)) and warn:
        log.warning(f"{count:,} {PLAIN[0]}: {PLAIN[1]}. Change: {PLAIN[2]}")
    return count
