"""Chat templates: what Hugging Face templates may use works, and a hostile one gets nowhere."""

import time

import pytest

from covey import templates
from covey.errors import DataError, WeightsError

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, **values: object) -> str:
    return templates.render(templates.parse(source), {"messages": HELLO, **values})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{% endfor %}", "[user]Hello"),
        ("{%- if true %}\n  {% set x = 1 %}\nA\n{%- endif %}\n", "A"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': [1, true]} | tojson }}", '{"b": "<é>", "a": [1, true]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abHelloc"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% if date_string is not defined %}{% set date_string = 'x' %}{% endif %}{{ date_string }}", "x"),
        ("{{ dict(a=1).a }}{{ '=' * 3 }}{{ 2 * 3 }}", "1===6"),
        ("{{ 'a' ~ 1 ~ none }}{{ 7 % 4 }}{{ 'b' + 'c' }}{{ ([1] + [2]) | length }}", "a1None3bc2"),
        (
            "{% for x in 'ab' %}{{ loop.index }}{{ loop.length }}{{ x }}{{ ',' if not loop.last }}{% endfor %}",
            "12a,22b",
        ),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k ~ v }}{% else %}-{% endfor %}", "a1"),
    ],
)
def test_what_templates_use(source: str, text: str):
    assert render(source) == text


def test_a_template_may_refuse():
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('System first!') }}{% endif %}"
    with pytest.raises(DataError, match="System first!"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = 'x' * 99999 %}{% for i in x %}{% for j in x %}{% for k in x %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x' | indent(999999999) }}",
        "{% set x = 'x' * 99999 %}{{ x.replace('', x) }}",
        "{% set x = 'x' * 99999 %}{{ x | replace('x', x) }}",
        "{% set x = 'x' * 99999 %}{{ x.join(x) }}",
        "{{ {'a': [1]} | tojson(indent=999999999) }}",
        "{{ lipsum(n=99999) }}",
        "{{ '{:>999999999}'.format('x') }}",
        "{{ '%999999999d' | format(1) }}",
        "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{{ undefined_thing.field }}",
        "{{ 1 + 'x' }}",
    ],
)
def test_a_hostile_or_broken_template_is_stopped(source: str):
    start = time.perf_counter()
    with pytest.raises(DataError):
        render(source)
    assert time.perf_counter() - start < 2


def test_a_format_string_reaches_nothing():
    assert render("{{ '{0.__class__}'.format(messages) }}") == ""


def test_long_text_with_numbers_goes_through():
    text = "1000000 % * 12345678 " * 2000
    source = "{{ m | trim }}{{ m.strip() }}{{ m.split('%')[-1] }}{{ m | replace('1', '2') }}{{ m ~ m }}{{ m + m }}"
    assert len(render(source, m=text)) > 7 * len(text) - 100


def test_a_chat_of_a_thousand_turns_goes_through():
    source = "{% for m in messages %}{{ m.role.strip() ~ m['content'].split('x')[0].strip() }}{% endfor %}"
    assert render(source, messages=HELLO * 1000) == "userHello" * 1000


def test_a_template_that_does_not_parse_says_where():
    with pytest.raises(WeightsError, match="line 2 of the model's chat template"):
        templates.parse("fine\n{% for %}")


def test_a_template_longer_than_the_cap_is_refused():
    with pytest.raises(WeightsError, match="100002 characters"):
        templates.parse("x" * 100_002)
