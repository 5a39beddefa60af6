"""Checks and conversions of chat messages before they are passed to a chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import DataError
from covey.types import Message

USUAL_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "model")
"""Roles from which a template may build a control token: `'<|' + role + '|>'`."""


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


def turn_with_call(name: str) -> dict[str, str]:
    """Make an assistant's turn that is a call of the tool `name` and nothing else."""
    calls = [{"id": NEUTRAL, "type": "function", "function": {"name": name, "arguments": {}}}]
    return {"role": "assistant", "content": "", "tool_calls": json.dumps(calls)}


def with_calls(message: Mapping[str, str]) -> Mapping[str, Any]:
    """Convert a message to what a template takes: the JSON text in `tool_calls`, if there is one, becomes its value."""
    if "tool_calls" not in message:
        return message
    try:
        return {**message, "tool_calls": json.loads(message["tool_calls"])}
    except (ValueError, RecursionError) as error:
        raise DataError(f"tool_calls is {message['tool_calls']!r:.80}", want="JSON text of a list of calls") from error


NEUTRAL = "neutral00"
"""Word without meaning. It has nine letters and digits, because some templates refuse ids of calls that have not."""
