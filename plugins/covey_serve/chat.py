"""Messages and tool calls of OpenAI's chat API, and how a model's template and its form of calls write them."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.types import Message
from covey_envs.tool_calls import Call, CallFormat, choose_format, lists_tools
from covey_serve.errors import ApiError

ROLES = {"developer": "system"}
"""Roles that a template knows under another name."""
NEEDED, OPTIONAL = ("role",), ("name", "tool_call_id", "reasoning_content")
KNOWN = {*NEEDED, *OPTIONAL, "content", "tool_calls", "reasoning", "refusal", "audio", "function_call", "annotations"}
OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Marks before calls in the text of a turn."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and the form in which the model calls them.

    Attributes:
        schemas: JSON Schemas of the tools.
        format: how the model writes calls.
        in_template: whether the chat template lists tools.
    """

    schemas: Sequence[dict[str, Any]]
    format: CallFormat
    in_template: bool

    @classmethod
    def of(cls, schemas: Sequence[dict[str, Any]], template: str | None) -> "Tools | None":
        """Return the tools for a model with this template; None for no tools."""
        if not schemas:
            return None
        form = choose_format("auto", template)
        if not lists_tools(template or "") and form.system is None:
            raise ApiError(f"the model's chat template has no place for tools of the form {form.name}", param="tools")
        return cls(schemas, form, lists_tools(template or ""))

    def chat(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the list of the tools, unless the template lists them."""
        if self.in_template or self.format.system is None:
            return messages
        first, rest = (messages[:1], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
        text = "\n\n".join([*(m["content"] for m in first), self.format.system(self.schemas)])
        return [{"role": "system", "content": text}, *rest]

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a turn before its calls, and its calls as OpenAI has them. A call that cannot be read, or
        names no tool, makes the whole turn a text.
        """
        calls = self.format.parse(text)
        names = {schema["function"]["name"] for schema in self.schemas}
        if not calls or any(call.error or call.name not in names for call in calls):
            return text, []
        starts = [place for mark in OPENINGS if (place := text.find(mark)) >= 0]
        return text[: min(starts, default=0)].strip(), [self._call(call) for call in calls]

    def _call(self, call: Call) -> dict[str, Any]:
        schema = next(s["function"] for s in self.schemas if s["function"]["name"] == call.name)
        values = _typed(call.arguments, schema.get("parameters") or {}) if call.as_text else call.arguments
        arguments = json.dumps(values, ensure_ascii=False)
        # Nine letters and digits, which the templates of Mistral demand.
        identifier = call.id or secrets.token_hex(5)[:9]
        return {"id": identifier, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def as_messages(given: Sequence[Mapping[str, Any]], template: str | None) -> list[Message]:
    """Return the messages of a request as a template takes them: texts alone.

    Raises:
        ApiError: a message has another form.
    """
    writes_calls = lists_tools(template or "")
    return [_as_message(number, message, writes_calls) for number, message in enumerate(given)]


def _as_message(number: int, message: Mapping[str, Any], writes_calls: bool) -> Message:
    where = f"messages.{number}"
    if unknown := sorted(message.keys() - KNOWN):
        raise ApiError(f"{where} has the field {unknown[0]!r:.80}, which is unknown", param=f"{where}.{unknown[0]:.80}")
    if not isinstance(role := message.get("role"), str):
        raise ApiError(f"{where} has no role", param=f"{where}.role")
    text = _text(message.get("content"), f"{where}.content")
    fields = {name: message[name] for name in OPTIONAL if isinstance(message.get(name), str)}
    if isinstance(reasoning := message.get("reasoning"), str):
        fields["reasoning_content"] = reasoning
    given = message.get("tool_calls") or []
    calls = [_read_call(call, f"{where}.tool_calls") for call in (given if isinstance(given, list) else [given])]
    if calls and writes_calls:
        fields["tool_calls"] = json.dumps(calls)
    elif calls:
        written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        text += "".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    elif role == "tool" and not writes_calls:
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return {"role": ROLES.get(role, role), "content": text} | fields


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a string, nothing, or a list of parts of text."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ApiError(f"{where} has a part of the type {kind!r:.40}; this server reads text alone", param=where)
    return "".join(part[part["type"]] for part in parts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call that a client sends back as templates take it: with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where} has a call without a function and its name", param=where)
    arguments = function.get("arguments") or "{}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments  # the model's own words, which are not JSON
    described = {"name": function["name"], "arguments": value}
    return {"id": str(call.get("id") or ""), "type": "function", "function": described}


def _typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a model wrote as texts as values of the types in the schema."""
    properties = schema.get("properties")
    kinds = {name: x.get("type") for name, x in properties.items() if isinstance(x, dict)} if properties else {}
    return {name: text if kinds.get(name) in (None, "string") else _value(text) for name, text in arguments.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
