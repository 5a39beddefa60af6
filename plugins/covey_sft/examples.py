"""Examples for supervised training: rows with a `prompt` and the `completion` to learn, read from any of `rows.FORMS`.

A completion is kept as text. `Tokenizer.encode_completion` turns it into tokens, including the stop token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.config.schema import SFTDataConfig
from covey.data.loader import PromptLoader
from covey.data.rows import (
    FORMS,
    PAIR,
    Row,
    as_prompt,
    as_turns,
    chat_turns,
    find_form,
    format_columns,
    iter_items,
    message_text,
    parse_chat,
    plain_value,
    split_columns,
)
from covey.data.sources import JSONL, Splits, open_rows
from covey.errors import DataError, nearest
from covey.types import Prompt

NOT_LEARNT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Parts of an assistant's message besides its content: in an answer they would not be learnt."""
FORM_COLUMNS = "; or ".join(" and ".join(form.columns) for form in FORMS)
"""Columns of all forms in one line, for errors."""


def as_examples(data: Any) -> list[Row]:
    """Convert `data` to rows with a prompt and a completion; other columns are kept.

    Args:
        data: a sequence, an iterable or a table of rows in one of the forms, or one dict of columns.

    Raises:
        DataError: a row has none of the forms, a completion is empty, or the data set is empty or endless.

    >>> as_examples([{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}])
    [{'prompt': [{'role': 'user', 'content': '2+2?'}], 'completion': '4'}]
    """
    is_table = isinstance(data, Mapping) and bool(data)
    rows = split_columns(data, next(iter(data)), "the data") if is_table else iter_items(data)
    examples = [as_example(row, f"example {number}") for number, row in enumerate(rows, 1)]
    if not examples:
        raise DataError("the data set is empty", want=f"at least one row with {FORM_COLUMNS}")
    return examples


def as_example(row: Any, where: str, prompt: str = "prompt", completion: str = "completion") -> Row:
    """Convert one row to an example; `prompt` and `completion` name its columns.

    Raises:
        DataError: the row has none of the forms, or a value in it is malformed or empty.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"is a {type(row).__name__}", want=f"a row with {FORM_COLUMNS}", where=where)
    form = PAIR if prompt in row and completion in row else find_form(row)
    if form is PAIR:
        asked, answer = _pair(row[prompt], row[completion], where)
    elif form is None:
        raise _no_form_error(row, (prompt, completion), where)
    elif form.to_chat:
        asked, answer = _chat(chat_turns(form, row, where), where)
    else:
        text = parse_chat(row["text"], where)
        is_chat = isinstance(text, list)
        asked, answer = _chat(as_turns(text, where), where) if is_chat else ("", _check_not_empty(text, where))
    used = {prompt, completion, *form.columns, *form.optional}
    return {**{name: plain_value(row[name]) for name in row if name not in used}, "prompt": asked, "completion": answer}


def read_examples(config: SFTDataConfig) -> Splits:
    """Return the examples of the file or the data set at `config.path`, as `covey.examples` offers it."""
    names = config.prompt_column, config.completion_column
    find = lambda record: PAIR if all(name in record for name in names) else find_form(record)  # noqa: E731
    return open_rows(config, (), JSONL, lambda record, where: as_example(record, where, *names), find=find)


class ExampleLoader(PromptLoader):
    """Iterator over batches of examples: a `PromptLoader` whose rows have completions."""

    unit = "batch_size"
    read = staticmethod(as_examples)


def _pair(prompt: Any, completion: Any, where: str) -> tuple[Prompt, str]:
    """Return prompt and completion of a row; an empty prompt means that the completion is plain text."""
    answer, is_turn = _answer(completion, where)
    if isinstance(prompt, str) and not prompt:
        return "", answer
    asked = as_prompt(prompt, where)
    return ([{"role": "user", "content": asked}] if is_turn and isinstance(asked, str) else asked), answer


def _no_form_error(row: Mapping[str, Any], pair: tuple[str, str], where: str) -> DataError:
    """Return the error for a row of no form; it names the column missing from the closest form."""
    begun = next((names for names in (pair, *(form.columns for form in FORMS)) if names[0] in row), None)
    lacks = begun[-1] if begun else pair[0]
    return DataError(
        f"there is nothing to learn: no column {lacks!r}; its columns are {format_columns(row)}",
        want=FORM_COLUMNS,
        fix="give 'chosen' the name completion, or messages if it is a chat"
        if "chosen" in row
        else nearest(lacks, map(str, row))
        if row
        else "",
        where=where,
    )


def _chat(turns: Prompt, where: str) -> tuple[Prompt, str]:
    if isinstance(turns, str) or len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise DataError(
            "the messages do not end with an answer to learn",
            want="a user's turn or more, and an assistant's at the end",
            where=where,
        )
    return as_prompt(turns[:-1], where), _learnt(turns[-1], where)


def _learnt(turn: Mapping[str, Any], where: str) -> str:
    """Return the text of an answer; refuse what else the message has for the model to say."""
    others = [key for key in NOT_LEARNT if turn.get(key)] + ["weight"] * (turn.get("weight", 1) == 0)
    if others:
        raise DataError(
            f"the answer has {', '.join(others)}, and its content alone is learnt",
            want="the whole answer in its content, as the chat template writes it",
            fix="move it into the content, or leave the row out",
            where=where,
        )
    return _check_not_empty(message_text(turn, where), where)


def _answer(completion: Any, where: str) -> tuple[str, bool]:
    """Return the completion's text, and whether it was a chat message."""
    completion = parse_chat(completion, where)
    turns = [completion] if isinstance(completion, Mapping) else completion
    if isinstance(turns, Sequence) and not isinstance(turns, str) and len(turns) == 1:
        (turn,) = turns
        if isinstance(turn, Mapping) and turn.get("role") == "assistant":
            return _learnt(turn, where), True
    return _check_not_empty(completion, where), False


def _check_not_empty(text: Any, where: str) -> str:
    if isinstance(text, str) and text.strip():
        return text
    raise DataError(
        f"the completion is {text!r:.80}", want="text that is not empty, or one assistant's turn", where=where
    )
