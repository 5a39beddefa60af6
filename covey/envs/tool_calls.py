"""Tool calls in the text of a model: how each family writes them, and how it is told which tools there are.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen 2.5 and 3
    smollm        <tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>   SmolLM2
    llama         {"name": "add", "parameters": {"a": 1}}                           Llama 3.1 and 3.2
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]              Mistral 7B v0.3, Nemo
    mistral_args  [TOOL_CALLS]add[ARGS]{"a": 1}                                     Mistral Small 3.2, Ministral 3
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
                                                                                    Qwen3-Coder, Qwen 3.5, Nemotron 3

A chat template that lists the tools says which of them its model knows. For one that has no place for tools the system
message lists them, as the family's own documentation does. The text of a model is not trusted.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.config.schema.envs import ToolFormat
from covey.envs.schemas import Schema
from covey.errors import RecipeError

TOOLS = re.compile(r"\btools\b")
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""Pattern of the text between two tags, or between the first and the end of the turn."""
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks before and behind a model's reasoning. The first may stand in the prompt."""


@dataclass(frozen=True)
class Call:
    """A call that the model wrote.

    Attributes:
        name: name of the tool; empty if it cannot be read.
        arguments: its arguments by name, as they stand in the JSON.
        id: what the result is named by, where the format does that.
        error: why it cannot be executed; empty if it can.
        as_text: whether the arguments are texts, which are read by the types that the tool has for them.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""
    as_text: bool = False


@dataclass(frozen=True)
class CallFormat:
    """Form in which a family of models writes calls.

    Attributes:
        name: value of `envs.tool_format`.
        read: text behind the reasoning of a turn, control tokens included → its calls; none if it has no call.
        system: schemas → text of a system message that lists the tools; None if only a chat template can.
        turn_has_calls: whether the chat template takes a result only behind a turn that is given to it as calls.
    """

    name: str
    read: Callable[[str], list[Call]]
    system: Callable[[Sequence[Schema]], str] | None
    turn_has_calls: bool = False

    def parse(self, text: str) -> list[Call]:
        """Read the calls of a turn from its text, control tokens included. Those in its reasoning do not count."""
        return self.read(without_reasoning(text))


def choose_format(name: ToolFormat, template: str | None) -> CallFormat:
    """Choose the format of a model's calls: the one of this name, or with `auto` that of its chat template.

    Raises:
        RecipeError: the model has no chat template, or it lists tools in a form that is not known here.
    """
    if template is None:
        raise RecipeError(
            "this model has no chat template, so it cannot be told which tools there are",
            fix="use the model's instruction-tuned variant",
            where="envs.tools",
        )
    if name != "auto":
        return FORMATS[name]
    if (form := _find_form(template)) is None:
        raise RecipeError(
            "the model's chat template lists tools in a form that is not known here",
            want=f"one of the forms {', '.join(FORMATS)}",
            fix="name the form in which the model is to write calls: --envs.tool-format",
            where="envs.tool_format",
        )
    return FORMATS[form]


def _find_form(template: str) -> ToolFormat | None:
    """Find the form in which a chat template writes calls, in time linear in its length; None if it is not known."""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template.partition("[TOOL_CALLS]")[2] else "mistral"
    tools = TOOLS.search(template)
    listed = template[tools.end() :] if tools else ""
    if _in_order(listed, "<tool_call>", "<function=", "<parameter="):
        return "qwen3_coder"
    _, called, behind = listed.rpartition("<tool_call>")
    if called and "<function=" not in behind and "<arg_key>" not in behind:
        return "hermes"
    if 'Respond in the format {"name": function name, "parameters": ' in template:
        return "llama"
    if tools:
        return None
    return "smollm" if "named SmolLM" in template else "hermes"


def _in_order(text: str, *marks: str) -> bool:
    """Tell whether a text has these marks, each behind the one before."""
    position = 0
    for mark in marks:
        position = text.find(mark, position) if position >= 0 else position
    return position >= 0


def lists_tools(template: str) -> bool:
    """Tell whether a chat template has a place for tools."""
    return TOOLS.search(template) is not None


def without_reasoning(text: str) -> str:
    """Remove the reasoning of a text: all up to the last mark that closes it, or the whole text if it never ends.

    >>> without_reasoning("<think>a</think>b"), without_reasoning("<think>a"), without_reasoning("a")
    ('b', '', 'a')
    """
    for opening, closing in REASONING:
        text = text.rpartition(closing)[2]
        if text.lstrip().startswith(opening):
            return ""
    return text


def _tagged(text: str) -> list[Call]:
    """Read the JSON between each pair of tags: a call, or a list of calls."""
    return [call for body in TAGGED.findall(text) for call in _read(body)]


def _element(body: str) -> Call:
    """Read `<function=NAME>`, and each `<parameter=KEY>` with its value, which may have lines of its own. It looks like
    XML, but nothing is escaped.
    """
    head, *parameters = body.removesuffix("</function>").split("<parameter=")
    name = re.fullmatch(r"<function=([^<>\s]+)>\s*", head)
    if name is None or not body.endswith("</function>"):
        return Call(error=_one_function(body) or "a call is <function=NAME>, its parameters, and </function>")
    arguments = {}
    for parameter in parameters:
        match = re.fullmatch(r"([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", parameter, re.DOTALL)
        if match is None:
            return Call(
                name[1], error=_one_function(body) or "a parameter is <parameter=KEY>, its value, and </parameter>"
            )
        if match[1] in arguments:
            return Call(name[1], error=f"the parameter {match[1]!r:.80} stands there twice")
        arguments[match[1]] = match[2]
    return Call(name[1], arguments, as_text=True)


def _one_function(body: str) -> str:
    """Return the error for several functions between two tags, "" if there is one."""
    several = body.count("<function=") > 1
    return "each <function=NAME> stands between a <tool_call> and a </tool_call> of its own" if several else ""


def _bare(text: str) -> list[Call]:
    """Read a turn that is a JSON object with a name, or several with semicolons between them."""
    body = text.strip()
    for end in ("<|eot_id|>", "<|eom_id|>"):
        body = body.removesuffix(end)
    marked = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not (marked or re.match(r'\{\s*"name"', body)):
        return []
    *closed, last = re.split(r"\}\s*;\s*(?=\{)", body)
    return [call for part in (*(f"{text}}}" for text in closed), last) for call in _read(part)]


def _listed(text: str) -> list[Call]:
    """Read the list behind `[TOOL_CALLS]`."""
    _, marked, body = text.partition("[TOOL_CALLS]")
    return _read(body.removesuffix("</s>")) if marked else []


def _marked(text: str) -> list[Call]:
    """Read a name, perhaps an id, and the arguments behind each `[TOOL_CALLS]`."""
    body, calls = text.removesuffix("</s>"), []
    at = body.find("[TOOL_CALLS]")
    while at >= 0:
        start = at + len("[TOOL_CALLS]")
        at = body.find("[TOOL_CALLS]", _end_of_arguments(body, start))
        calls.append(_named(body[start : at if at >= 0 else None]))
    return calls


def _end_of_arguments(text: str, start: int) -> int:
    """Find the end of the JSON value behind the next `[ARGS]`, whose texts may hold marks; `start` without a value."""
    following = text.find("[TOOL_CALLS]", start)
    marked = text.find("[ARGS]", start, following if following >= 0 else None)
    value = SPACE.match(text, marked + len("[ARGS]"))
    if marked < 0 or value is None:
        return start
    try:
        return DECODER.raw_decode(text, value.end())[1]
    except (ValueError, RecursionError):
        return start


def _named(text: str) -> Call:
    head, marked, body = text.partition("[ARGS]")
    name, _, identifier = head.strip().partition("[CALL_ID]")
    if not (name and marked):
        return Call(error="a call is [TOOL_CALLS], the name of a tool, [ARGS], and a JSON object")
    try:
        return _call({"name": name, "id": identifier, "arguments": read_json(body)})
    except ValueError as error:
        return Call(name, error=f"the arguments are {error}")


def _read(text: str) -> list[Call]:
    """Read one call, or a list of calls, from JSON."""
    try:
        value = read_json(text)
    except ValueError as error:
        return [Call(error=f"the call is {error}")]
    return [_call(entry) for entry in value] if isinstance(value, list) else [_call(value)]


def read_json(text: str) -> Any:
    """Parse JSON that a model or a server wrote.

    Raises:
        ValueError: it is not valid; the message begins with "not valid JSON".
    """
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError):  # NaN, a number of thousands of digits, brackets a thousand deep
        raise ValueError("not valid JSON") from None


def _raise_on_constant(name: str) -> None:
    raise ValueError(name)


DECODER = json.JSONDecoder(parse_constant=_raise_on_constant)
SPACE = re.compile(r"[ \t\n\r]*")


def _call(value: Any) -> Call:
    """Make a call of a JSON value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call(error='a call is an object with a "name" and "arguments"')
    call_id = value.get("id")
    call_id = call_id if isinstance(call_id, str) and re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) else ""
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(name, id=call_id, error="the arguments are not an object")
    return Call(name, arguments, call_id)


def _lines(schemas: Sequence[Schema]) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def _hermes_system(schemas: Sequence[Schema]) -> str:
    """Return the text that Qwen 2.5's chat template writes behind the system message."""
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function"
        f" signatures within <tools></tools> XML tags:\n<tools>\n{_lines(schemas)}\n</tools>\n\nFor each function call,"
        " return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _smollm_system(schemas: Sequence[Schema]) -> str:
    """Return a short form of the system message in SmolLM2's documentation."""
    return (
        f"You have access to the following tools:\n<tools>\n{_lines(schemas)}\n</tools>\n\nTo call tools, answer with"
        ' <tool_call>[{"name": "func_name", "arguments": {"argument": "value"}}]</tool_call> and no other text. The'
        " result follows; then give the answer."
    )


def _llama_system(schemas: Sequence[Schema]) -> str:
    """Return the text that Llama 3.1's chat template writes before the user's first message."""
    shown = "\n\n".join(json.dumps(schema, indent=4, ensure_ascii=False) for schema in schemas)
    return (
        "Given the following functions, please respond with a JSON for a function call with its proper arguments that"
        ' best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of'
        f" argument name and its value}}. Do not use variables.\n\n{shown}"
    )


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat("hermes", _tagged, _hermes_system),
    "smollm": CallFormat("smollm", _tagged, _smollm_system),
    "llama": CallFormat("llama", _bare, _llama_system),
    "mistral": CallFormat("mistral", _listed, None, turn_has_calls=True),
    "mistral_args": CallFormat("mistral_args", _marked, None, turn_has_calls=True),
    "qwen3_coder": CallFormat(
        "qwen3_coder", lambda text: [_element(body.strip()) for body in TAGGED.findall(text)], None
    ),
}
