"""Chat templates: what Hugging Face templates may use works."""

import pytest

from covey import registry
from covey.errors import CoveyError, DataError, WeightsError
from covey.text import chat_template

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, **values: object) -> str:
    return chat_template.render(chat_template.check(source), {"messages": HELLO, **values})


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
        ("{{ '{0.__class__}'.format(messages) }}", ""),
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


def test_a_draw_is_the_same_every_time():
    source = "{{ range(1000) | random }}{{ range(1000) | random }}"
    assert render(source) == render(source)


def test_long_text_with_numbers_goes_through():
    text = "1000000 % * 12345678 " * 2000
    source = "{{ m | trim }}{{ m.strip() }}{{ m.split('%')[-1] }}{{ m | replace('1', '2') }}{{ m ~ m }}{{ m + m }}"
    assert len(render(source, m=text)) > 7 * len(text) - 100


def test_a_template_that_does_not_parse_says_where():
    with pytest.raises(WeightsError, match="line 2 of the model's chat template"):
        chat_template.check("fine\n{% for %}")


def test_a_template_longer_than_the_cap_is_refused():
    with pytest.raises(WeightsError, match="100002 characters"):
        chat_template.check("x" * 100_002)


def test_no_template_is_rendered_without_a_package_that_limits_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "entry_points", lambda **_: ())
    monkeypatch.setattr(chat_template, "_isolated", chat_template._isolated.__wrapped__)
    with pytest.raises(CoveyError, match=r"templates needs a package [\s\S]*covey\.isolation"):
        chat_template.check("a")
