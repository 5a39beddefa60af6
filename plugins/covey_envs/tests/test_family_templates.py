"""Qwen3.5 and Gemma 4: thinking on and off, tools and calls in their own form, and what is learnt from an answer.

The templates here are short ones of our own. They write what the published ones of early 2026 write for text,
reasoning, tools with plain arguments, calls and results; images, nested types of arguments and older forms of results
are left out.
"""

import json
from typing import Any

import pytest
import tokenizers

from covey.errors import DataError
from covey.text.tokenizer import Tokenizer
from covey_envs.continuation import encode_turn
from covey_envs.tool_calls import FORMATS, choose_format

QWEN3_5 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
  {{- '<|im_start|>system\\n# Tools\\n\\nYou have these functions:\\n\\n<tools>' }}
  {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
  {{- '\\n</tools>\\n\\nTo call one, reply\\n\\n<tool_call>\\n<function=NAME>\\n' }}
  {{- '<parameter=KEY>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
  {{- ('\\n\\n' + system if system else '') + '<|im_end|>\\n' }}
{%- elif system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
  {%- set content = m.content | trim %}
  {%- if m.role == 'assistant' %}
    {%- set thought = '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}
      {%- set content = content.split('</think>')[-1] | trim %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
      {{- ('\\n\\n' if content and loop.first else '' if loop.first else '\\n') }}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' }}
        {{- value if value is string else value | tojson if value is iterable else value | string }}
        {{- '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}"""

GEMMA4 = """{%- macro shown(x) -%}
  {%- if x is string -%}{{ '<|"|>' + x + '<|"|>' }}
  {%- elif x is boolean -%}{{ 'true' if x else 'false' }}
  {%- elif x is mapping -%}{{ '{' }}{{ pairs(x) }}{{ '}' }}
  {%- elif x is iterable -%}[{% for y in x %}{{ shown(y) }}{{ ',' if not loop.last }}{% endfor %}]
  {%- else -%}{{ x }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(x) -%}
  {%- for key, value in x | dictsort -%}{{ key + ':' }}{{ shown(value) }}{{ ',' if not loop.last }}{%- endfor -%}
{%- endmacro -%}
{%- macro visible(text) -%}
  {%- for part in text.split('<channel|>') -%}{{ part.split('<|channel>')[0] }}{%- endfor -%}
{%- endmacro -%}
{{- bos_token }}
{%- set thinks, system = enable_thinking | default(false), messages[0].role == 'system' %}
{%- if thinks or tools or system %}
  {{- '<|turn>system\\n' + ('<|think|>\\n' if thinks else '') + (messages[0].content | trim if system else '') }}
  {%- for tool in tools or [] %}
    {%- set f = tool.function %}
    {{- '<|tool>declaration:' + f.name + '{description:<|"|>' + f.description + '<|"|>,parameters:{properties:{' }}
    {%- for key, value in f.parameters.properties | dictsort %}
      {{- key + ':{description:<|"|>' + value.description + '<|"|>,type:<|"|>' + value.type | upper + '<|"|>}' }}
      {{- ',' if not loop.last }}
    {%- endfor %}
    {{- '},required:' + shown(f.parameters.required) + ',type:<|"|>OBJECT<|"|>}}<tool|>' }}
  {%- endfor %}
  {{- '<turn|>\\n' }}
{%- endif %}
{%- set ns = namespace(before='', open='') %}
{%- for m in messages %}{%- if m.role not in ('system', 'tool') %}
  {%- if not (m.role == 'assistant' and ns.before == 'assistant') %}
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
  {%- endif %}
  {%- set ns.before, ns.open, ns.over = m.role, '', false %}
  {%- for call in m.tool_calls or [] %}
    {{- '<|tool_call>call:' + call.function.name + '{' + pairs(call.function.arguments) + '}<tool_call|>' }}
    {%- set ns.open = 'call' %}
  {%- endfor %}
  {%- for result in messages[loop.index:] if ns.open %}
    {%- if result.role != 'tool' %}{% set ns.over = true %}{% endif %}
    {%- if not ns.over %}
      {{- '<|tool_response>response:' + result.name + '{value:' + shown(result.content) + '}<tool_response|>' }}
      {%- set ns.open = 'results' %}
    {%- endif %}
  {%- endfor %}
  {{- (visible(m.content) if m.role == 'assistant' else m.content) | trim }}
  {%- if ns.open == 'call' %}{{ '<|tool_response>' }}
  {%- elif not ns.open or m.content %}{{ '<turn|>\\n' }}{% endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not ns.open %}
  {{- '<|turn>model\\n' + ('' if thinks else '<|channel>thought\\n<channel|>') }}
{%- endif %}"""


CONTROLS = {
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "gemma": [
        "<bos>", "<turn|>", "<|turn>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
        "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    ],
}  # fmt: skip
USER = {"role": "user", "content": "2 + 3?"}
SYSTEM = {"role": "system", "content": "Be exact."}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "unit": {"type": "string", "description": "Its unit."},
            },
            "required": ["a"],
        },
    },
}
CALLS = {
    "qwen": '<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=unit>\n a"b\n</parameter>\n'
    "</function>\n</tool_call>",
    "gemma": '<|tool_call>call:add{a:2,unit:<|"|> a"b<|"|>}<tool_call|>',
}
TEMPLATES = {"qwen": QWEN3_5, "gemma": GEMMA4}


def tokenizer_of(family: str) -> Tokenizer:
    """A tokenizer of bytes with the control tokens of a family."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({}, []))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner.model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([*CONTROLS[family], "<end>"])
    bos = inner.token_to_id("<bos>")
    return Tokenizer(inner, eos_id=inner.token_to_id("<end>"), bos_id=bos, chat_template=TEMPLATES[family])


@pytest.mark.parametrize(
    ("family", "thinks", "end"),
    [
        ("qwen", None, "<|im_start|>assistant\n<think>\n"),
        ("qwen", True, "<|im_start|>assistant\n<think>\n"),
        ("qwen", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("gemma", None, "<|turn>model\n<|channel>thought\n<channel|>"),
        ("gemma", False, "<|turn>model\n<|channel>thought\n<channel|>"),
        ("gemma", True, "<|turn>model\n"),
    ],
)
def test_thinking_is_a_variable_of_the_template(family: str, thinks: bool | None, end: str) -> None:
    variables = {} if thinks is None else {"enable_thinking": thinks}
    text = tokenizer_of(family).render([SYSTEM, USER], **variables)
    assert text.endswith(end)
    before = text.removesuffix(end)
    think = "<|think|>\n" if family == "gemma" and thinks else ""
    assert (
        before
        == {
            "qwen": "<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n",
            "gemma": f"<bos><|turn>system\n{think}Be exact.<turn|>\n<|turn>user\n2 + 3?<turn|>\n",
        }[family]
    )


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_read_as_the_family_writes_them(family: str) -> None:
    form, tokenizer = choose_format("auto", TEMPLATES[family]), tokenizer_of(family)
    assert form.name == {"qwen": "qwen3_coder", "gemma": "gemma4"}[family]
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 2, "unit": ' a"b'}}}
    turn = {"role": "assistant", "content": "", "tool_calls": json.dumps([call, call])}
    prompt = tokenizer.render([USER], tools=[ADD])
    assert ("<|tool>declaration:add{" in prompt) == (family == "gemma")
    text = tokenizer.render([USER, turn], tools=[ADD], add_generation_prompt=False)
    assert CALLS[family] in text
    calls = form.parse(text.partition("user")[2].partition("3?")[2])
    assert [(c.name, c.arguments["unit"], str(c.arguments["a"]), c.error) for c in calls] == [
        ("add", ' a"b', "2", "")
    ] * 2


@pytest.mark.parametrize("family", TEMPLATES)
def test_results_follow_a_turn_as_the_family_writes_them(family: str) -> None:
    """Gemma 4 goes on in the turn that has called, and opens the result itself."""
    tokenizer, form = tokenizer_of(family), choose_format("auto", TEMPLATES[family])
    last = tokenizer.inner.token_to_id({"qwen": "<|im_end|>", "gemma": "<|tool_response>"}[family])
    assert last in tokenizer.stop_ids
    results = [{"role": "tool", "name": "add", "tool_call_id": str(i), "content": f"{i}"} for i in (5, 6)]
    ids = encode_turn(tokenizer, [USER], results, last, tools=[ADD], turn_has_calls=form.turn_has_calls)
    assert (
        tokenizer.decode(ids, skip_special=False)
        == {
            "qwen": "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "gemma": 'response:add{value:<|"|>5<|"|>}<tool_response|><|tool_response>response:add{value:<|"|>6<|"|>}'
            "<tool_response|>",
        }[family]
    )


def test_what_is_learnt_from_an_answer_begins_where_the_prompt_ends() -> None:
    """Qwen3.5 opens the reasoning in the prompt, and an answer without one closes it at once."""
    tokenizer = tokenizer_of("qwen")
    for answer, learnt in (("5", "\n</think>\n\n5"), ("<think>\nHm\n</think>\n\n5", "Hm\n</think>\n\n5")):
        shown = tokenizer.decode(tokenizer.encode_completion([USER], answer), skip_special=False)
        assert shown == f"{learnt}<|im_end|>"
    gemma = tokenizer_of("gemma")
    assert gemma.decode(gemma.encode_completion([USER], "5"), skip_special=False) == "5<turn|>"
    with pytest.raises(DataError, match=r"the reasoning before <channel\|> in an answer cannot be learnt"):
        gemma.encode_completion([USER], "<|channel>thought\nHm<channel|>5")
    turn = "<|turn>user\n2 + 3?<turn|>\n<|turn>model\n"
    ids = gemma.encode_completion(turn, "<|channel>thought\nHm<channel|>5<turn|>")
    assert gemma.decode(ids, skip_special=False) == "<|channel>thought\nHm<channel|>5<turn|>"
    assert gemma.inner.token_to_id("<channel|>") in ids


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_in_reasoning_are_no_calls(family: str) -> None:
    begin, end = {"qwen": ("<think>\n", "\n</think>\n\n"), "gemma": ("<|channel>thought\n", "<channel|>")}[family]
    parse, call = choose_format("auto", TEMPLATES[family]).parse, CALLS[family]
    assert [len(parse(text)) for text in (begin + call + end, begin + call + end + call, call + end, begin + call)] == [
        0, 1, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|tool_call>call:f{}<tool_call|>", {}),
        ('<|tool_call>call:f{a:[1,<|"|>x,y:z<|"|>],b:{c d:None,<|"|>e<|"|>:true}}<tool_call|>',
         {"a": [1, "x,y:z"], "b": {"c d": None, "e": True}}),
        ('<|tool_call>call:f{a:<|"|><tool_call|><channel|>{"None"}<|"|>}<tool_call|>',
         {"a": '<tool_call|><channel|>{"None"}'}),
        ("<|tool_call>call:f{a:-2.5e3}<|tool_response>", {"a": -2500.0}),
    ],
)  # fmt: skip
def test_arguments_of_gemma_4_are_json_with_its_own_quotes(text: str, found: dict[str, Any]) -> None:
    (call,) = FORMATS["gemma4"].parse("so " + text)
    assert (call.name, call.arguments, call.error) == ("f", found, "")


@pytest.mark.parametrize(
    "body", ["", "f{}", "call:{}", "call:f", "call:f{a:}", "call:f{a:x}", 'call:f{a:<|"|>x}', "call:f{a:1}{}",
             "call:f{" * 9999, "call:f" + "{a:" * 9999],
)  # fmt: skip
def test_what_gemma_4_cannot_mean_is_told(body: str) -> None:
    (call,) = FORMATS["gemma4"].parse(f"<|tool_call>{body}<tool_call|>")
    assert call.error
