"""Tools without a model: their schemas, the calls of each family, what is refused, and conversations."""

import asyncio
import hashlib
import inspect
import json
import re
import runpy
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import EnvironmentRunner, independent, json_schema
from covey.config import recipe
from covey.config.schema import EnvsConfig
from covey.data.loader import fit_prompts
from covey.errors import DataError, EpisodeError, RecipeError
from covey.recipes.build import prompt_encoder
from covey.sampling.responder import NewBranch, Turn
from covey.sampling.scheduler import Sample
from covey.sampling.sequence import Ending
from covey.text import chat_template
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, Episode, FinishReason
from covey_envs.episodes import Episodes
from covey_envs.protocol import FaultError
from covey_envs.registry import resolve_tool
from covey_envs.tool_calls import FORMATS, choose_format
from covey_envs.tools import MAX_CALLS, CallError, Tool

F = TypeVar("F", bound=Callable[..., Any])
STOPPED = Ending(1, FinishReason.STOP)
PARITY = Path(__file__).parents[3] / "tests" / "parity"
GIVEN = runpy.run_path(str(PARITY / "tool_functions.py"))
PLAIN, NESTED, CHOSEN, *OTHERS = GIVEN["FUNCTIONS"]
GOLDEN = json.loads((PARITY / "golden" / "tool_schemas.json").read_text())
TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
INNER = Tokenizer.from_folder(PARITY / "golden" / "tiny-llama").inner
ASK = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "2 + 3?"}]

QWEN, MISTRAL = (TEMPLATES[name] for name in ("Qwen-Qwen2.5-7B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"))
# These have the lines of their family that concern tools.
LLAMA = """{%- if tools is defined %}{{- 'Respond in the format {"name": function name, "parameters": ...}' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}{%- for message in messages %}
{{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\n' }}
{{- (message.content | tojson if message.role == 'tool' else message.content) + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
SMOLLM = """{%- if messages[0].role != 'system' %}{{- 'named SmolLM' }}{%- endif %}{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def tokenizer_of(template: str | None) -> Tokenizer:
    return Tokenizer(INNER, eos_id=INNER.token_to_id("<|im_end|>"), chat_template=template)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def shout(text: str) -> dict[str, str]:
    """Say it louder.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0)
    return {"said": text.upper()}


class Play:
    """An episode that is played by hand."""

    def __init__(self, template: str = QWEN, tools: Any = (add, shout), prompt: Any = ASK, **settings: Any):
        config = EnvsConfig(tools=("calculator",), **{"timeout": 5.0, **settings})
        self.runner, self.tokenizer = EnvironmentRunner(config=config, tools=tools), tokenizer_of(template)
        self.episodes = Episodes(self.runner, [{"prompt": prompt}], 1, self.tokenizer)
        (self.prompt,) = self.episodes.begin()
        self.tokens = np.zeros(0, np.int32)

    def asked(self) -> str:
        return self.tokenizer.decode(self.episodes.encode_prompt(self.prompt), skip_special=False)

    def says(self, text: str) -> str | None:
        """What is appended to a turn of the model, as text."""
        said = np.append(self.tokenizer.encode(text), self.tokenizer.eos_id).astype(np.int32)
        self.tokens = np.concatenate([self.tokens, said])
        response = self.episodes.answer(Turn(Sample(0, 0), self.tokens, 2000, STOPPED)).result(10)
        if response is None:
            return None
        self.tokens = np.concatenate([self.tokens, response])
        return self.tokenizer.decode(response, skip_special=False)

    def over(self) -> Episode:
        none = np.zeros(len(self.tokens), np.float32)
        found = self.episodes.completion(0, 0, Completion(self.tokens, none, none, FinishReason.STOP)).episode
        assert found is not None
        return found


def described(function: F) -> F:
    """Give a function the docstring that a tool needs."""
    lines = [f"    {name}: It." for name in inspect.signature(function).parameters]
    function.__doc__ = "\n".join(["Do it.", "", "Args:", *lines])
    return function


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_function_has_the_schema_that_transformers_gives_it() -> None:
    # As text: a template prints the keys in their order.
    found = [json.dumps(json_schema(f)) for f in (PLAIN, NESTED, CHOSEN, *OTHERS)]
    assert found == [json.dumps(schema) for schema in GOLDEN["schemas"]]


@pytest.mark.parametrize("name", GOLDEN["digests"])
def test_tools_and_calls_are_rendered_as_by_transformers(name: str) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    values = {"messages": GIVEN["CHAT"], "tools": GOLDEN["schemas"]}
    text = chat_template.render(TEMPLATES[name], variables | values)
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN["digests"][name]


def test_real_templates_say_how_calls_are_written() -> None:
    found = {}
    for name, template in TEMPLATES.items():
        with suppress(RecipeError):
            found[name] = choose_format("auto", template).name
    assert found == {
        "Qwen-Qwen2.5-7B-Instruct": "hermes",
        "Qwen-Qwen3-0.6B": "hermes",
        "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
        "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
        "Qwen3-Coder": "qwen3_coder",
        # These two have no variable `tools`, so a system message lists them.
        "HuggingFaceTB-SmolLM3-3B": "smollm",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "hermes",
    }


def undescribed(a: int) -> int:
    """Do it."""
    return a


@described
def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    return int(a)


@described
def custom(a: Path) -> None: ...


@described
def several(*a: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (undescribed, "'a' that its docstring does not describe"),
        (unhinted, "'a' without a type hint"),
        (custom, "Path'>, which has no JSON Schema"),
        (several, r"\*a: int, which cannot be given by its name"),
        (lambda: 1, "has no docstring"),
    ],
)
def test_a_function_without_a_schema_is_refused(function: Any, what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        Tool.of(function)


def test_arguments_are_checked_and_converted() -> None:
    tool = Tool.of(CHOSEN)
    good = {"drink": "tea", "size": "small", "number": 2, "colour": "red"}
    assert tool.check(good)["colour"].name == "RED"
    assert Tool.of(NESTED).check({"a": [1], "b": [], "c": {"x": [1]}, "d": [1, "x"]})["d"] == (1, "x")
    assert Tool.of(PLAIN).check({"a": 1, "b": 2}) == {"a": 1, "b": 2.0}
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (PLAIN, {}, "needs the argument 'a'"),
        (PLAIN, {"a": "1"}, "argument 'a' of plain is wrong: Input should be a valid integer"),
        (PLAIN, {"a": True}, "'a' of plain is wrong"),
        (PLAIN, {"a": 1, "e": 2}, "has no argument 'e'; it has: a, b, c, d"),
        (PLAIN, {"a": 1, "b": float("inf")}, "'b' of plain is wrong"),
        (PLAIN, {"a": 1, "c": "\ud800"}, "'c' of plain is wrong"),
        (CHOSEN, {**good, "colour": "green"}, "'colour' of chosen is wrong"),
    ]
    for function, arguments, what in refused:
        with pytest.raises(CallError, match=what):
            Tool.of(function).check(arguments)


TWO = [("f", {}), ("g", {})]


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("hermes", 'so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        ("hermes", hermes("f") + "\n" + hermes("g", b="</x>"), [("f", {}), ("g", {"b": "</x>"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
        ("smollm", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', TWO),
        ("llama", ' {"name": "f", "parameters": {"a": 1}}<|eot_id|>', [("f", {"a": 1})]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', TWO),
        ("llama", '{"name": "f", "parameters": {"a": "}; {"}};', [("f", {"a": "}; {"})]),
        ("llama", '{"answer": 5}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh9"}]</s>', [("f", {"a": 1})]),
        ("mistral_args", 'so [TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}</s>', [("f", {"a": "[ARGS]"})]),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]abcdefgh9[ARGS]{}[TOOL_CALLS] g [ARGS] {}", TWO),
        ("mistral_args", 'f[ARGS]{"a": 1}', []),
        (
            "mistral_args",
            '[THINK]or [TOOL_CALLS]g[ARGS]{}[/THINK][TOOL_CALLS]f[ARGS] {"a": "[TOOL_CALLS]g"}[TOOL_CALLS]h[ARGS]{}',
            [("f", {"a": "[TOOL_CALLS]g"}), ("h", {})],
        ),
        ("hermes", f"<think>or {hermes('g')}</think>{hermes('f')}", [("f", {})]),
        ("hermes", f"or {hermes('g')}</think>{hermes('f')}", [("f", {})]),  # the first mark is in the prompt
        ("hermes", f"<think>or {hermes('g')}", []),
        ("qwen3_coder", "so <tool_call>\n<function=f>\n</function>\n</tool_call>", [("f", {})]),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>\n 1\n\n</parameter>"
            "<parameter=b><x></parameter></function></tool_call>"
            "<tool_call>\n<function=g>\n<parameter=c>\n</parameter>\n</parameter>\n</function>",
            [("f", {"a": " 1\n", "b": "<x>"}), ("g", {"c": "</parameter>"})],
        ),
    ],
)
def test_a_family_writes_calls_in_its_own_form(form: str, text: str, found: list[Any]) -> None:
    calls = FORMATS[form].parse(text)
    assert [(call.name, call.arguments) for call in calls] == found
    assert not any(call.error for call in calls)
    assert {call.id for call in calls} <= {"", "abcdefgh9"}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("hermes", f"<tool_call>{text}</tool_call>") for text in (
            "{", "5", '{"name": 5}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"a": NaN}}',
            '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "[" * 100_000, '"f"', "[[]]",
        )),
        *(("mistral_args", f"[TOOL_CALLS]{text}") for text in (
            "", "f", "[ARGS]{}", '[{"name": "f", "arguments": {}}]', "f[ARGS]", "f[ARGS]5", 'f[ARGS]{"a": NaN}',
            'f[ARGS]{"a": ' + "9" * 5000 + "}", "f[ARGS]" + "[" * 100_000, "f[ARGS]{} and",
            'f[ARGS]{"a": "[TOOL_CALLS]"} and [ARGS]{}',
        )),
        *(("qwen3_coder", f"<tool_call>{text}</tool_call>") for text in (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "<function=f></function><function=g></function>",
            "<function=f><parameter=a>1</parameter></function><function=g></function>",
            "", '{"name": "f"}', "<function=></function>", "<function=f>", "<function=f>x</function>",
            "<function=f><parameter=a>1</function>", "<function=f><parameter=a>1</parameter>x</function>",
            "<function=f><parameter=>1</parameter></function>", "<function=f><parameter=a>" * 10_000,
            "<function=f><parameter=a>" + "</parameter>" * 10_000 + "x</function>",
        )),
    ],
)  # fmt: skip
def test_what_is_no_call_becomes_an_error_for_the_model(form: str, text: str) -> None:
    (call,) = FORMATS[form].parse(text)
    assert call.error
    assert ("of its own" in call.error) == (text.count("<function=") > 1)
    assert ("'a' stands there twice" in call.error) == ("<parameter=a>2" in text)


MARKS = (
    "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>",
    "[TOOL_CALLS]", "[ARGS]", "</s>", "<|eot_id|>", "<think>", "</think>", "[THINK]",
    "[/THINK]", "<|python_tag|>", "<function=f>", "</function>", "<parameter=b>", "</parameter>", "}; {", '"', "\\",
    "\n", "{",
)  # fmt: skip
WITH_MARKS = st.lists(st.sampled_from(MARKS) | st.text(max_size=3)).map("".join)
WRITTEN = {
    "hermes": "so <tool_call>\n{}\n</tool_call>",
    "smollm": "<tool_call>[{}]</tool_call>",
    "llama": "{}<|eot_id|>",
    "mistral": "so [TOOL_CALLS][{}]</s>",
    "mistral_args": "so [TOOL_CALLS]f[ARGS]{}</s>",
}
"""Calls of `f` by form; arguments, or the object of the call, stand in the braces."""


def written(form: str, arguments: dict[str, Any], **style: Any) -> str:
    value = arguments if form == "mistral_args" else {"name": "f", "arguments": arguments}
    return WRITTEN[form].replace("{}", json.dumps(value, **style))


@settings(max_examples=60)
@given(st.sampled_from(sorted(WRITTEN)), WITH_MARKS, WITH_MARKS, st.sampled_from((None, 2)), st.booleans(), st.data())
def test_a_mark_in_the_arguments_of_a_call_belongs_to_them(
    form: str, key: str, text: str, indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    arguments = {key: [text], "last": text}
    call = written(form, arguments, indent=indent, ensure_ascii=ascii_only)
    reasoning = data.draw(
        st.sampled_from(("", "<think>" + call + "</think>", "[THINK]a[/THINK]", f"or {call}</think>"))
    )
    if not reasoning.startswith("<think>") or "</think>" not in call:  # the first mark ends what a mark has begun
        (read,) = FORMATS[form].parse(reasoning + call)
        assert (read.name, read.arguments, read.error) == ("f", arguments, "")
    cut = call[: data.draw(st.integers(0, len(call)))]
    assert all(read.error or read.arguments == arguments for read in FORMATS[form].parse(cut))


@pytest.mark.parametrize(
    "text", [*MARKS, "<tool_call></tool_call>", "</parameter>\n</parameter>", "<parameter=b></function>"]
)
@pytest.mark.parametrize("around", ["{}", "a = 1\n{}\nb = 2"])
def test_a_mark_in_a_value_that_is_not_escaped_belongs_to_it(text: str, around: str) -> None:
    value = around.replace("{}", text)
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key in "ac")
    call = f"<tool_call>\n<function=f>\n{values}</function>\n"
    calls = FORMATS["qwen3_coder"].parse(f"so {call}</tool_call>\n{call}")
    assert [(read.arguments, read.error) for read in calls] == [({"a": value, "c": value}, "")] * 2


OPEN = "<tool_call><function=f><parameter=a>"


@pytest.mark.parametrize(
    ("form", "text", "names"),
    [
        # A call that cannot be read hides no other, and a mark in it ends no turn without a word.
        ("hermes", '<tool_call>{"name": "f, "arguments": {}}</tool_call>' + hermes("g"), ["", "g"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\d</think>"}}</tool_call>' + hermes("g"), ["", "g"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</think>', [""]),
        ("hermes", f'<think>or <tool_call>{{"name": "x</think>{hermes("g")}', ["g"]),
        ("hermes", f'or <tool_call>{{"name": "x</think>\n{hermes("g")}', ["g"]),
        ("llama", '<think>a</think>\n{"name": "f"};{"name": "g, "a": 1}', ["f", ""]),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a: 1}\n[TOOL_CALLS]g[ARGS]{}', ["f", "g"]),
        ("qwen3_coder", f"{OPEN}1</function></tool_call><tool_call><function=g></function>", ["f", "g"]),
        ("qwen3_coder", f"{OPEN}{OPEN}1</parameter></function></tool_call>", ["f"]),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_ends_where_its_form_ends(form: str, text: str, names: list[str]) -> None:
    calls = FORMATS[form].parse(text)
    assert [call.name for call in calls] == names
    assert [bool(call.error) for call in calls] == [
        name == "" or (name == "f" and form in ("mistral_args", "qwen3_coder")) for name in names
    ]


HOSTILE = (
    *MARKS, "<tool_call></tool_call>", "[TOOL_CALLS]f[ARGS]", '<tool_call>{"a": "', '"\\"', '\\"', ";{", " ", OPEN,
    "<think></think>", "<tool_call></think>", "<tool_call><function=f>", f"{OPEN}</tool_call>", "</parameter>\n",
    "<parameter=a></parameter>", '[TOOL_CALLS]f[ARGS]{"a":"', '<|"|>', "<|tool_call>call:f{", '{a:<|"|>', "{ ", ",a",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_read_in_linear_time(form: str) -> None:
    heads = ("", '{"name": "f"};', OPEN, '"')
    texts = [head + piece * 2500 for piece in HOSTILE for head in heads]
    for text in (*texts, *(piece * 20_000 for piece in ("<tool_call>", "[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"a":"'))):
        began = time.process_time()
        FORMATS[form].parse(text)
        assert time.process_time() - began < 2, text[:80]


def test_arguments_that_are_texts_are_read_by_their_types() -> None:
    given = {
        "a": "[1, 2]", "b": "[]", "c": '{"x": [1.5]}', "d": '[1, "x"]', "e": "None", "f": "null", "g": "7",
        "h": '["no"', "i": "True", "j": "{}", "k": "2.5",
    }  # fmt: skip
    assert Tool.of(NESTED).check(given, as_text=True) == {
        "a": [1, 2], "b": [], "c": {"x": [1.5]}, "d": (1, "x"), "e": None, "f": None, "g": 7,
        "h": '["no"', "i": True, "j": {}, "k": 2.5,
    }  # fmt: skip
    for text in ("7", "true", '"quoted"', "None", "[1]", "", "NaN", " x\n"):
        assert Tool.of(PLAIN).check({"a": "1", "c": text}, as_text=True) == {"a": 1, "c": text}
    wrong: list[tuple[Any, dict[str, str], str]] = [
        (PLAIN, {"a": "one"}, "argument 'a' of plain is wrong: Input should be a valid integer"),
        (PLAIN, {"a": "__import__('os')"}, "'a' of plain is wrong"),
        (PLAIN, {"a": "1", "b": "1e999"}, "'b' of plain is wrong"),
        (PLAIN, {"a": "[" * 100_000}, "'a' of plain is wrong"),
        (NESTED, {"a": "1, 2", "b": "[]", "c": "{}", "d": '[1, "x"]'}, "'a' of nested is wrong"),
    ]
    for function, arguments, what in wrong:
        with pytest.raises(CallError, match=what):
            Tool.of(function).check(arguments, as_text=True)


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407",
             "mistralai-Ministral-3-14B-Reasoning-2512", "Qwen3-Coder"],
)  # fmt: skip
def test_calls_are_read_as_real_templates_write_them(name: str) -> None:
    arguments = {
        "plain": {"a": 1, "b": -2.5, "c": 'so\n "it" <is> 5', "d": True},
        "nested": {"a": [1, 2], "b": ["x", None], "c": {"é": [0.5]}, "d": [1, "x"], "e": None, "g": "7a"},
    }
    calls = [{"id": "abcdefgh9", "function": {"name": f, "arguments": given}} for f, given in arguments.items()]
    chat = [*ASK, {"role": "assistant", "content": "", "tool_calls": json.dumps(calls)}]
    tokenizer, tools = tokenizer_of(TEMPLATES[name]), {f.__name__: Tool.of(f) for f in (PLAIN, NESTED)}
    prompt, text = (tokenizer.render(messages, tools=[t.schema for t in tools.values()]) for messages in (ASK, chat))
    assert text.startswith(prompt)
    found = choose_format("auto", TEMPLATES[name]).parse(text[len(prompt) :].rpartition("<|im_end|>")[0])
    assert [call.error for call in found] == ["", ""]
    read = {call.name: tools[call.name].check(call.arguments, as_text=call.as_text) for call in found}
    assert read == {f: tools[f].check(given) for f, given in arguments.items()}


def test_the_chat_template_says_how_calls_are_written() -> None:
    assert [choose_format("auto", template).name for template in (LLAMA, SMOLLM)] == ["llama", "smollm"]
    assert choose_format("auto", "{{ messages[0].content }}").name == "hermes"
    assert choose_format("llama", QWEN).name == "llama"
    for template in ("{{ tools }}<tool_call><function=f>", "{{ tools }}", "{{ tools }}<tool_call>f<arg_key>a"):
        with pytest.raises(RecipeError, match="in a form that is not known here"):
            choose_format("auto", template)
    with pytest.raises(RecipeError, match="no chat template"):
        choose_format("auto", None)
    with pytest.raises(RecipeError, match="no place for tools"):
        Play(SMOLLM, tool_format="mistral")


@pytest.mark.parametrize(
    ("piece", "form"), [("tools <tool_call> <function=", None), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes")]
)
def test_a_long_chat_template_is_searched_in_linear_time(piece: str, form: str | None) -> None:
    began = time.process_time()
    with suppress(RecipeError):
        assert choose_format("auto", piece * (100_000 // len(piece))).name == form
    assert time.process_time() - began < 5  # hours if each mark is tried with each of the others


def test_a_conversation_with_calls_ends_with_a_turn_without_one() -> None:
    play = Play()
    assert f"\n{json.dumps(json_schema(add))}\n" in play.asked()
    assert play.says(hermes("add", a=2, b=3) + hermes("shout", text="hi")) == (
        '\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n{"said": "HI"}\n</tool_response>'
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert play.says("It is 5.") is None
    episode = play.over()
    assert [(m["role"], m["content"]) for m in episode.messages[1:]] == [
        ("tool", "5"), ("tool", '{"said": "HI"}'), ("assistant", "It is 5."),
    ]  # fmt: skip
    assert (episode.tool_calls, episode.tool_failures, episode.done, episode.reward) == (2, 0, True, None)


def test_a_family_sees_results_as_its_template_writes_them() -> None:
    llama = Play(LLAMA)
    assert json_schema(shout)["function"]["name"] in llama.asked()
    call = '{"name": "shout", "parameters": {"text": "hi"}}'
    assert llama.says(call) == '<|im_start|>ipython\n"{\\"said\\": \\"HI\\"}"<|im_end|><|im_start|>assistant\n'
    mistral = Play(MISTRAL)
    said = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "abcdefgh9"}]'
    for _ in range(2):  # roles alternate, though turns with calls follow each other
        assert mistral.says(said) == '[TOOL_RESULTS]{"content": 5, "call_id": "abcdefgh9"}[/TOOL_RESULTS]'
    assert "call00003" in str(mistral.says(said.replace('"abcdefgh9"', '"no"')))
    newer = Play(TEMPLATES["mistralai-Ministral-3-14B-Reasoning-2512"])
    assert f"[AVAILABLE_TOOLS]{json.dumps([json_schema(add), json_schema(shout)])}" in newer.asked()
    for _ in range(2):
        assert newer.says('[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}') == "[TOOL_RESULTS]5[/TOOL_RESULTS]"
    coder = Play(TEMPLATES["Qwen3-Coder"])
    assert "<function>\n<name>add</name>\n<description>Add two numbers.</description>" in coder.asked()
    said = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>"
    for call, answer in ((said, "5"), (said.replace("3", "x"), "Error: the argument 'b' of add is wrong")):
        assert str(coder.says(f"{call}\n</tool_call>")).startswith(f"\n<|im_start|>user\n<tool_response>\n{answer}")
    assert coder.says("It is 5.") is None


def test_a_rewritten_history_still_lists_the_tools() -> None:
    play = Play(
        QWEN.replace("message.content + '<|im_end|>", "message.content | trim + '<|im_end|>"), history="template"
    )
    said = np.append(play.tokenizer.encode("  " + hermes("add", a=2, b=3)), play.tokenizer.eos_id).astype(np.int32)
    response = play.episodes.answer(Turn(Sample(0, 0), said, 2000, STOPPED)).result(10)
    assert isinstance(response, NewBranch)
    sequence = np.concatenate([play.episodes.encode_prompt(play.prompt), said])[: response.kept]
    shown = play.tokenizer.decode(np.concatenate([sequence, response.tokens]), skip_special=False)
    assert f"\n{json.dumps(json_schema(add))}\n" in shown
    assert "assistant\n<tool_call>" in shown


def test_calls_in_a_prompt_are_json_text() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": '[{"id": "abcdefgh9", "function": {"name": "f"}}]'}
    shown = tokenizer_of(MISTRAL).render([ASK[1], call])
    assert shown == '[INST]2 + 3?[/INST][TOOL_CALLS][{"name": "f", "id": "abcdefgh9"}]<|im_end|>'
    with pytest.raises(DataError, match=r"tool_calls is 'f\(\)'(.|\n)*JSON text"):
        tokenizer_of(MISTRAL).render([{**call, "tool_calls": "f()"}])


def test_a_template_without_a_place_for_tools_has_them_in_the_system_message() -> None:
    play = Play(SMOLLM)
    assert play.asked().startswith("<|im_start|>system\nBe exact.\n\nYou have access to the following tools:\n<tools>")
    said = '<tool_call>[{"name": "add", "arguments": {"a": 2, "b": 3}}]</tool_call>'
    assert "user\n<tool_response>\n5\n</tool_response><|im_end|>" in str(play.says(said))
    assert Play(SMOLLM, prompt=ASK[1:]).prompt[0]["content"].startswith("You have access")
    with pytest.raises(EpisodeError, match=r"plain text(.|\n)*data\.system"):
        Play(SMOLLM, prompt="2 + 3?")


@pytest.mark.parametrize(("template", "form"), [(TEMPLATES["Qwen-Qwen3-0.6B"], "auto"), (SMOLLM, "smollm")])
def test_the_list_of_tools_counts_toward_the_length_of_a_prompt(template: str, form: Any) -> None:
    config, tokenizer = EnvsConfig(tools=("calculator",), tool_format=form), tokenizer_of(template)
    rows, encode = [{"prompt": ASK}, {"prompt": ASK[1:]}], prompt_encoder(config, tokenizer)
    with EnvironmentRunner(config=config) as runner:
        episodes = Episodes(runner, rows, 1, tokenizer)
        sampled = [episodes.encode_prompt(prompt) for prompt in episodes.begin()]
    for row, tokens in zip(rows, sampled, strict=True):
        assert encode(row["prompt"]).tolist() == tokens.tolist()
        assert len(tokens) > len(tokenizer.encode_prompt(row["prompt"])) + 100
    assert len(sampled[1]) < len(sampled[0])
    assert fit_prompts(rows, encode, len(sampled[1]), "drop") == (rows[1:], 1, 0)
    with pytest.raises(DataError, match=r"plain text(.|\n)*data\.system"):
        encode("2 + 3?")
    assert prompt_encoder(EnvsConfig(), tokenizer)(ASK).tolist() == tokenizer.encode_prompt(ASK).tolist()


def test_what_fails_is_told_to_the_model_and_counted() -> None:
    @described
    def slow(seconds: float) -> str:
        time.sleep(seconds)
        return "x" * 100_000

    @described
    def bad(how: str) -> Any:
        if how == "exit":
            sys.exit(1)
        raise ValueError(how * 1000)

    play = Play(tools=(slow, bad), timeout=0.3, max_characters=2000)
    answers = {
        hermes("slow", seconds=9): "Error: slow took longer than 0.3 s",
        hermes("slow", seconds=0): "x" * 1900 + " … (cut)",
        hermes("bad", how="exit"): "Error: bad raised SystemExit: '1'",
        hermes("bad", how="no"): "Error: ValueError: nono",
        hermes("worse"): "Error: there is no tool 'worse'; there are: slow, bad",
        hermes("slow", seconds="9"): "Error: the argument 'seconds' of slow is wrong",
        "<tool_call>{": "Error: the call is not valid JSON: Expecting property name",
    }
    for number, (said, answer) in enumerate(answers.items(), 1):
        assert f"<tool_response>\n{answer}" in str(play.says(said))[:2100]
        assert play.episodes._states[0][0].record.tool_calls == number
    assert play.over().tool_failures == len(answers) - 1
    assert play.runner.failed == 0


def test_calls_of_a_turn_are_executed_in_order_up_to_a_limit() -> None:
    seen: list[int] = []

    @described
    def note(number: int) -> None:
        seen.append(number)

    play = Play(tools=(note,))
    play.says("".join(hermes("note", number=number) for number in range(20)))
    assert seen == list(range(MAX_CALLS))
    assert play.over().tool_calls == MAX_CALLS


def test_calls_of_independent_tools_run_at_once_and_their_results_keep_the_order() -> None:
    barrier, seen = threading.Barrier(3, timeout=5), []

    @independent
    @described
    def look(at: int) -> str:
        seen.append(barrier.wait() >= 0)
        return f"at {at}"

    @described
    def note(number: int) -> str:
        return f"note {number} behind {len(seen)}"

    play = Play(tools=(look, note))
    calls = [("look", "at"), ("look", "at"), ("nothing", "x"), ("look", "at"), ("note", "number"), ("note", "number")]
    said = play.says("".join(hermes(name, **{key: number}) for number, (name, key) in enumerate(calls)))
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", str(said))
    assert [result[:16] for result in results] == [
        "at 0", "at 1", "Error: there is ", "at 3", "note 4 behind 3", "note 5 behind 3",
    ]  # fmt: skip
    assert play.over().tool_failures == 1


def test_calls_at_once_are_limited_by_the_setting() -> None:
    running, most, lock = [0], [0], threading.Lock()

    @independent
    @described
    async def wait(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return number

    play = Play(tools=(wait,), concurrency=3)
    said = play.says("".join(hermes("wait", number=number) for number in range(8)))
    assert re.findall(r"<tool_response>\n(\d+)\n", str(said)) == [*"01234567"]
    assert most == [3]


def test_a_fault_ends_the_episode_behind_the_calls_beside_it() -> None:
    ended = []

    @independent
    @described
    async def work(number: int) -> None:
        if not number:
            raise FaultError("cannot work")
        await asyncio.sleep(0.01)
        ended.append(number)

    with pytest.raises(EpisodeError, match="cannot work"):
        Play(tools=(work,)).says("".join(hermes("work", number=number) for number in range(3)))
    assert ended == [1, 2]


def test_the_calculator_is_independent() -> None:
    assert Tool.of(resolve_tool("calculator")).independent


def test_tools_are_named_in_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = ["--envs.tools", "[calculator]", "--envs.max-turns", "3"]
    assert recipe.load("arithmetic-smollm2", tools).envs.tools == ("calculator",)
    for others, what in (
        (["--envs.environment", "guess"], r"envs\.tools names 'calculator', and envs\.environment is guess"),
        (["--rollout.tool", "calculator"], r"rollout\.tool is calculator, and there are tools"),
        (["--rewards", "[]"], "rewards is empty"),
        (["--envs.tools", "[]"], r"envs\.max_turns is set"),
        (["--envs.tools", "[a, a]"], "names a tool twice"),
    ):
        given = tools[2:] if "--envs.tools" in others else tools  # lists that are given twice are joined
        with pytest.raises(RecipeError, match=what):
            recipe.load("arithmetic-smollm2", [*given, *others])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adding.py").write_text('def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: It.\n    """\n')
    assert [*EnvironmentRunner(tools=["adding:add", "calculator"])._tools] == ["add", "calculator"]
    with pytest.raises(RecipeError, match=r"no tool 'calculater'(.|\n)*did you mean 'calculator'"):
        EnvironmentRunner(tools=["calculater"])
    with pytest.raises(RecipeError, match="two tools have the same name"):
        EnvironmentRunner(tools=["adding:add", add])


def test_the_calculator_is_a_tool() -> None:
    play = Play(tools=["calculator"])
    assert "<tool_response>\n160\n" in str(play.says(hermes("calculator", expression="(1,250 - 50) / 7.5")))
    refused = str(play.says(hermes("calculator", expression="__import__('os')")))
    assert "Error: ValueError: no value: wanted numbers" in refused
