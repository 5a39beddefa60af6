"""Tool calls in the text of a model: how each family writes them, and how it is told which tools there are.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen 2.5 and 3
    smollm        <tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>   SmolLM2
    llama         {"name": "add", "parameters": {"a": 1}}                           Llama 3.1 and 3.2
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]              Mistral 7B v0.3, Nemo
    mistral_args  [TOOL_CALLS]add[ARGS]{"a": 1}                                     Mistral Small 3.2, Ministral 3
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
                                                                                    Qwen3-Coder, Qwen 3.5, Nemotron 3
    gemma4        <|tool_call>call:add{a:1,unit:<|"|>foot<|"|>}<tool_call|>         Gemma 4

A chat template that lists the tools says which of them its model knows. For one that has no place for tools the system
message lists them, as the family's own documentation does. The text of a model is not trusted.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from covey.config.schema.envs import ToolFormat
from covey.errors import RecipeError
from covey.text.tokenizer import REASONING
from covey_envs.schemas import Schema

TOOLS = re.compile(r"\btools\b")
BEGIN = re.compile(r"\s*+(<think>|\[THINK\]|<\|channel>)")
TAG = re.compile(r"</think>|\[/THINK\]|(<tool_call>)")
CONTROL = re.compile(r"</think>|\[/THINK\]|(\[TOOL_CALLS\])")
FIRST = re.compile(r"</think>|\[/THINK\]|((?:\A|(?<=</think>)|(?<=\[/THINK\]))(?!<\|eo[tm]_id\|>|</s>))")
GEMMA = re.compile(r"<channel\|>|(<\|tool_call>)")
"""Patterns of the end of reasoning, or of the beginning of calls, which is a group."""
TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*+(?:"\s*+(?:[,:}\]]|\Z)|\Z)|\\.'
    r"|(</tool_call>|\[TOOL_CALLS\]|</s>|<\|eot_id\|>|<\|eom_id\|>|</think>|\[/THINK\]|;)"
)
"""Pattern of a text in JSON, with what follows it there, or of a mark outside such texts, which is a group."""
IN_TAG, IN_TURN = ("</tool_call>", *REASONING.values()), ("</s>", "<|eot_id|>", "<|eom_id|>", *REASONING.values())
"""Marks after calls: in a tag, and elsewhere."""
FUNCTION = re.compile(r"\s*+<function=([^<>\s]++)>\s*+")
PARAMETER = re.compile(r"<parameter=([^<>\s]++)>\n?")
VALUE_END = re.compile(r"\n?</parameter>\s*+(?:(?=<parameter=)|(</function>)\s*+(?:</tool_call>|\Z))")
ELEMENT_END = re.compile(r"\s*+(?:</tool_call>|\Z)")
NEXT_ELEMENT = re.compile(r"<tool_call>\s*+<function=")
QUOTE = '<|"|>'
"""Mark before and after a text in Gemma 4's calls. Nothing in the text is escaped."""
GEMMA_MARK = re.compile(r'<\|"\|>|(<tool_call\|>|<turn\|>|<\|tool_response>|<channel\|>|<eos>)')
"""Pattern of `QUOTE`, or of a mark that ends a call, which is a group."""
GEMMA_WORD = re.compile(r'[^{}\[\],:"]++')
"""Pattern of what stands between the marks of JSON: a key without quotes, a number or a word."""
GEMMA_CALL = re.compile(r"\s*+call:([^\s{}]++)(?=\{)")


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
        parse: text of a turn, control tokens included → its calls, without calls in its reasoning.
        system: schemas → text of a system message that lists the tools; None if only a chat template can.
        turn_has_calls: whether the chat template takes a result only after a turn that it gets as calls.
    """

    name: str
    parse: Callable[[str], list[Call]]
    system: Callable[[Sequence[Schema]], str] | None
    turn_has_calls: bool = False


def choose_format(name: ToolFormat, template: str | None) -> CallFormat:
    """Choose the format of a model's calls by its name, or with `auto` by the chat template.

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
    if "<|tool_call>call:" in template:
        return "gemma4"
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
    """Tell whether a text has these marks in this order."""
    position = 0
    for mark in marks:
        position = text.find(mark, position) if position >= 0 else position
    return position >= 0


def lists_tools(template: str) -> bool:
    """Tell whether a chat template has a place for tools."""
    return TOOLS.search(template) is not None


def _parse(
    text: str, opening: re.Pattern[str], end_of: Callable[[str, int], int], read: Callable[[str], list[Call]]
) -> list[Call]:
    """Read the calls of a turn, in time linear in its length. A mark in the arguments of a call belongs to them.

    Args:
        opening: `TAG`, `CONTROL` or `FIRST`.
        end_of: text, position after an opening → end of the calls.
        read: text between the two → its calls.
    """
    bodies, end = list[str](), _end_of_reasoning(text, 0)
    while end < len(text) and (mark := opening.search(text, end)):
        if mark[1] is None:
            bodies, end = [], _end_of_reasoning(text, mark.end())
        else:
            end = end_of(text, mark.end())
            bodies.append(text[mark.end() : end])
    return [call for body in bodies for call in read(body)]


def _end_of_reasoning(text: str, start: int) -> int:
    """Return the end of the reasoning that begins at a position: that of the text if it never ends; `start` if there is
    none.

    >>> _end_of_reasoning("<think>a</think>b", 0), _end_of_reasoning("<think>a", 0), _end_of_reasoning("a", 0)
    (16, 8, 0)
    """
    while begin := BEGIN.match(text, start):
        end = text.find(REASONING[begin[1]], begin.end())
        start = end + len(REASONING[begin[1]]) if end >= 0 else len(text)
    return start


def _end_of_json(text: str, start: int, marks: Sequence[str]) -> int:
    """Return the position of the first of these marks that is not in a text of JSON; the end of `text` without one.

    >>> _end_of_json('{"a": "</s>"}</s>', 0, ["</s>"])
    13
    """
    return next((token.start() for token in TOKEN.finditer(text, start) if token[1] in marks), len(text))


def _end_of_element(text: str, start: int) -> int:
    """Return the end of the element of a function, if it is the only one in its tag; otherwise the end of the tag."""
    end = _element(text, start)[1]
    return end if end > start and ELEMENT_END.match(text, end) else _end_of_json(text, start, IN_TAG)


def _elements(body: str) -> list[Call]:
    """Read the element between two tags."""
    call, end = _element(body, 0)
    if end == len(body.rstrip()) and not call.error:
        return [call]
    return [Call(call.name, error=SEVERAL if body.count("<function=") > 1 else call.error or ELEMENT)]


def _element(text: str, start: int) -> tuple[Call, int]:
    """Read `<function=NAME>`, and each `<parameter=KEY>` with its value, which may have lines of its own. It looks like
    XML, but nothing is escaped: a value ends before the next parameter or the end of the call, and it holds no call.

    Returns:
        The call and the end of the element; `start` if it cannot be read.
    """
    if (function := FUNCTION.match(text, start)) is None:
        return Call(error=ELEMENT), start
    position, arguments = function.end(), dict[str, Any]()
    following = NEXT_ELEMENT.search(text, position)
    while parameter := PARAMETER.match(text, position):
        end = VALUE_END.search(text, parameter.end(), following.start() if following else len(text))
        if end is None:
            return Call(function[1], error="a parameter is <parameter=KEY>, its value, and </parameter>"), start
        if parameter[1] in arguments:
            return Call(function[1], error=f"the parameter {parameter[1]!r:.80} stands there twice"), start
        arguments[parameter[1]] = text[parameter.end() : end.start()]
        position = end.start(1) if end[1] else end.end()
    if not text.startswith("</function>", position):
        return Call(function[1], error=ELEMENT), start
    return Call(function[1], arguments, as_text=True), position + len("</function>")


def _end_of_gemma(text: str, start: int) -> int:
    """Return the position of the first mark after a call that is not in a text.

    >>> _end_of_gemma('call:f{a:<|"|><tool_call|><|"|>}<tool_call|>', 0)
    32
    """
    first, is_text = len(text), False
    for mark in GEMMA_MARK.finditer(text, start):
        if mark[1] is None:
            first, is_text = len(text), not is_text
        elif not is_text:
            return mark.start()
        else:
            first = min(first, mark.start())
    return first  # of a text without an end


def _gemma(body: str) -> list[Call]:
    """Read `call:NAME{key:value,…}`: JSON but for its keys and its texts."""
    if (call := GEMMA_CALL.match(body)) is None:
        return [Call(error="a call is call:NAME and its arguments, {KEY:VALUE,…}")]
    try:
        return [_call({"name": call[1], "arguments": read_json(_gemma_as_json(body[call.end() :]))})]
    except ValueError as error:
        return [Call(call[1], error=f"the arguments are {error}")]


def _gemma_as_json(text: str) -> str:
    """Convert arguments to JSON: every second part between quotes is a text.

    >>> _gemma_as_json('{a:[1,None],b:<|"|>x<|"|>}')
    '{"a":[1,null],"b":"x"}'
    """
    parts = enumerate(text.split(QUOTE))
    return "".join(json.dumps(part) if number % 2 else GEMMA_WORD.sub(_word, part) for number, part in parts)


def _word(word: re.Match[str]) -> str:
    """Quote a key, and convert Python's word for null."""
    text, is_key = word[0].strip(), word.string.startswith(":", word.end())
    return json.dumps(text) if text and is_key else {"None": "null"}.get(text, word[0])


def _bare(text: str) -> list[Call]:
    """Read a turn that is a JSON object with a name, or several with semicolons between them."""
    body, calls, start = text.strip(), list[Call](), 0
    if not (body.startswith("<|python_tag|>") or re.match(r'\{\s*"name"', body)):
        return []
    body = body.removeprefix("<|python_tag|>").strip()
    while start == 0 or start < len(body):
        end = _end_of_json(body, start, (";",))
        calls += _read(body[start:end])
        start = end + 1
    return calls


def _named(text: str) -> list[Call]:
    """Read a name, perhaps an id, and the arguments after `[ARGS]`."""
    head, marked, body = text.partition("[ARGS]")
    name, _, identifier = head.strip().partition("[CALL_ID]")
    if not (name and marked):
        return [Call(error="a call is [TOOL_CALLS], the name of a tool, [ARGS], and a JSON object")]
    try:
        return [_call({"name": name, "id": identifier, "arguments": read_json(body)})]
    except ValueError as error:
        return [Call(name, error=f"the arguments are {error}")]


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


ELEMENT, SEVERAL = (
    "a call is <function=NAME>, its parameters, and </function>",
    "each <function=NAME> stands between a <tool_call> and a </tool_call> of its own",
)
"""What the model is told about a call that is none, and about several in one."""


def _lines(schemas: Sequence[Schema]) -> str:
    return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)


def _hermes_system(schemas: Sequence[Schema]) -> str:
    """Return the text that Qwen 2.5's chat template writes after the system message."""
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


_tagged = partial(_parse, opening=TAG, end_of=partial(_end_of_json, marks=IN_TAG), read=_read)

FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat("hermes", _tagged, _hermes_system),
    "smollm": CallFormat("smollm", _tagged, _smollm_system),
    "llama": CallFormat(
        "llama", partial(_parse, opening=FIRST, end_of=partial(_end_of_json, marks=IN_TURN), read=_bare), _llama_system
    ),
    "mistral": CallFormat(
        "mistral",
        partial(_parse, opening=CONTROL, end_of=partial(_end_of_json, marks=IN_TURN), read=_read),
        None,
        turn_has_calls=True,
    ),
    "mistral_args": CallFormat(
        "mistral_args",
        partial(_parse, opening=CONTROL, end_of=partial(_end_of_json, marks=("[TOOL_CALLS]", *IN_TURN)), read=_named),
        None,
        turn_has_calls=True,
    ),
    "qwen3_coder": CallFormat(
        "qwen3_coder", partial(_parse, opening=TAG, end_of=_end_of_element, read=_elements), None
    ),
    "gemma4": CallFormat(
        "gemma4", partial(_parse, opening=GEMMA, end_of=_end_of_gemma, read=_gemma), None, turn_has_calls=True
    ),
}
