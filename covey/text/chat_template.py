"""Chat templates: the checkpoint's own jinja2 code, run in a sandbox in a process of its own, and their messages.

A template is untrusted code from the checkpoint, so it gets plain text only and cannot reach Python. Its length, its
output, its CPU time and its memory are limited. A package enforces the last two: by the entry point `templates` of
`covey.isolation` it offers a function that renders in a process which the system kills when it exceeds them. Without
such a package no template is rendered. Names and filters are as templates written for Hugging Face expect, with one
deviation: the date is fixed.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from covey.errors import DataError, WeightsError
from covey.registry import offered
from covey.types import Message

MAX_TEMPLATE_LENGTH = 100_000
"""Largest length of a template, in characters."""
MAX_MEMORY = 1 << 29
"""Limit of the rendering process's memory, in bytes."""
USUAL_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "model")
"""Roles from which a template may build a control token: `'<|' + role + '|>'`."""
NEUTRAL = "neutral00"
"""Word without meaning. It has nine letters and digits, because some templates refuse ids of calls that have not."""


def check(source: str) -> str:
    """Check that the template `source` compiles, and return it.

    Raises:
        WeightsError: the template is too long, or does not compile within the limits.
    """
    if len(source) > MAX_TEMPLATE_LENGTH:
        raise WeightsError(
            f"the model's chat template has {len(source)} characters", want=f"{MAX_TEMPLATE_LENGTH} at most"
        )
    try:
        answer = _isolated()({"source": source, "mark": "", "controls": [], "values": None})
    except ChildProcessError as error:
        raise WeightsError(f"the model's chat template does not compile: it {error}") from error
    if "refused" in answer:
        place = f"line {answer['line']} of the model's" if answer["line"] else "the model's"
        raise WeightsError(f"{place} chat template does not parse: {answer['refused']}")
    return source


def render(source: str, values: Mapping[str, Any], *, mark: str = "", controls: Sequence[str] = ()) -> str:
    """Render a template.

    Args:
        source: jinja2 code that `check` accepts.
        values: variables of the template by name, JSON-serializable.
        mark: text put on both sides of each of `controls` that the template itself contains; text from `values` gets
            no marks, so the two can be told apart.
        controls: control tokens as text.

    Raises:
        DataError: the template refuses the values (often an unexpected role), fails on them or exceeds the limits.
    """
    request = {"source": source, "mark": mark, "controls": list(controls), "values": dict(values)}
    try:
        answer = _isolated()(request)
    except ChildProcessError as error:
        raise DataError(f"the model's chat template {error}", fix=FIX_LENGTH) from error
    if "refused" in answer:
        raise DataError(
            f"the model's chat template refused these messages: {answer['refused']}",
            fix=FIX_LENGTH if answer["limit"] else FIX_ROLES,
        )
    text: str = answer["text"]
    return text


FIX_LENGTH = "use another template, or shorter messages"
FIX_ROLES = "check the roles and their order; many models want user and assistant in turn, some take no system"


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Convert messages to plain dicts of text, so that a template in the sandbox gets nothing else."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(f"message {number} is {message!r:.80}", want='{"role": ..., "content": ...}')
        if not all(isinstance(value, str) for value in message.values()):
            raise DataError(f"message {number} has a field that is not text: {message!r:.80}", want="text only")
    return [{str(key): str(value) for key, value in message.items()} for message in messages]


def fold_system_message(messages: Sequence[Message]) -> list[dict[str, str]] | None:
    """Move the system message to the start of the user's first message; None if the chat begins otherwise."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    system, user, *rest = check_messages(messages)
    return [user | {"content": f"{system['content'].strip()}\n\n{user['content']}"}, *rest]


def unused_mark(messages: Sequence[Message]) -> str:
    """Find a Unicode noncharacter that none of the messages contains."""
    used = set("".join(value for message in check_messages(messages) for value in message.values()))
    free = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in used]
    if not free:
        raise DataError("a message contains every one of Unicode's noncharacters", want="text")
    return free[0]


def neutralise(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Replace texts other than usual roles by a neutral word, so that none can become a control token."""

    def usual(key: str, value: str) -> bool:
        return not value.strip() or (key == "role" and value in USUAL_ROLES)

    return [{k: v if usual(k, v) else NEUTRAL for k, v in message.items()} for message in check_messages(messages)]


def with_calls(message: Mapping[str, str]) -> Mapping[str, Any]:
    """Convert a message to what a template takes: the JSON text in `tool_calls`, if there is one, becomes its value."""
    if "tool_calls" not in message:
        return message
    try:
        return {**message, "tool_calls": json.loads(message["tool_calls"])}
    except (ValueError, RecursionError) as error:
        raise DataError(f"tool_calls is {message['tool_calls']!r:.80}", want="JSON text of a list of calls") from error


@cache
def _isolated() -> Any:
    """Return the function by which a package has its rendering process handle a request, and returns the response.

    If the process ends while it handles one, the function raises ChildProcessError, read on from "template".

    Raises:
        CoveyError: no installed package offers one.
    """
    return offered("covey.isolation", "templates")
