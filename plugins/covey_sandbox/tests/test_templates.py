"""Chat templates in their process: a hostile one gets nowhere, and the next is rendered as if it had not been."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from covey.errors import DataError, WeightsError
from covey.text import chat_template
from covey_sandbox import templates
from covey_sandbox.child import Child

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, **values: object) -> str:
    return chat_template.render(chat_template.check(source), {"messages": HELLO, **values})


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
        "{{ 9 ** (9 ** (9 ** 9)) }}",
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
def test_a_hostile_or_broken_template_is_stopped(source: str, brief: None):
    refused(source)


DOUBLED = "{% set ns = namespace(s=['x'], t=('x',)) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
LONG = "{% set x = '(x- <' * 200000 %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLED + "{{ ns.s }}",
        DOUBLED + "{{ ns.s ~ '' }}",
        DOUBLED + "{{ ns.s | tojson }}",
        DOUBLED + "{{ ns.s | string | length }}",
        DOUBLED + "{{ ns.s | join }}",
        DOUBLED + "{{ '{}'.format(ns.s) }}",
        DOUBLED + "{{ '%s' % ns.s }}",
        DOUBLED + "{{ raise_exception(ns.s) }}",
        DOUBLED + "{{ messages[0][ns.s].x }}",
        DOUBLED + "{% set a = namespace(s=['x']) %}{% for i in range(40) %}{% set a.s = [a.s, a.s] %}{% endfor %}"
        "{{ a.s == ns.s }}",
        DOUBLED.replace("[ns.s, ns.s]", "(ns.s, ns.s)").replace("['x']", "('x',)") + "{{ {ns.s: 1} }}",
        DOUBLED.replace("[ns.s, ns.s]", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s }}",
        LONG + "{{ x | urlize }}",
        LONG + "{{ x | wordwrap(1) }}",
        LONG + "{{ (x | replace('(x-', '!--')) | striptags }}{{ x | replace(' ', '\n') | indent(20000) | length }}",
        LONG + "{% for i in range(99999) %}{% set y = x | upper | lower | title | trim %}{% endfor %}",
        LONG + "{% for i in range(99999) %}{% set y = x | replace('x', 'yy') | replace('y', 'x') %}{% endfor %}",
        LONG + "{% for i in range(99999) %}{% set y = x | list | sort | join %}{% endfor %}",
        LONG + "{% for i in range(99999) %}{% set y = x | batch(2) | list %}{% endfor %}",
        "{{ range(99999) | map('center', 99999) | list | length }}",
        "{{ ('%(a)9999s' * 90000) % {'a': 1} }}",
        "{{ ('{0:9999}' * 90000).format(1) }}",
        "{{ ('\t' * 999999).expandtabs(999999) }}",
        "{{ ('x' * 999999).translate({120: 'y' * 999999}) }}",
        "{% set ns = namespace(n=7) %}{% for i in range(99999) %}{% set ns.n = ns.n + ns.n %}{% endfor %}{{ ns.n }}",
        "{% set ns = namespace(n=7) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ range(99999) | map('string') | map('center', 9999) | map('upper') | list | groupby('x') }}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
        "{{ strftime_now('%c' * 99999999) }}",
    ],
)
def test_what_no_count_of_loops_sees_is_stopped(source: str, brief: None):
    """Values that are small to build and endless to write out, filters that are quadratic, numbers of any length."""
    refused(source)


def refused(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises((DataError, WeightsError)):
        render(source)
    assert time.perf_counter() - start < 10  # of a machine that may be busy; computing time is what counts


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 'x' | center(10**10) }}", "takes more than 512 MiB of memory"),
        ("{{ range(10**9) | list | length }}", "MAX_RANGE"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{% for i in range(1001) %}{{ 'x' * 1000 }}{% endfor %}", "longer than 1000000 characters"),
    ],
)
def test_a_limit_is_told_as_one_and_not_as_a_matter_of_roles(source: str, why: str):
    with pytest.raises(DataError, match=f"{why}[\\s\\S]*fix: use another template, or shorter messages"):
        chat_template.render(chat_template.check(source), {})


@pytest.fixture(scope="module")
def brief_child() -> Iterator[Child]:
    child = Child(templates.HANDLER, cpu_seconds=templates.MAX_SECONDS / 10, memory=chat_template.MAX_MEMORY)
    yield child
    child.end()


@pytest.fixture
def brief(brief_child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the computing time, so that the tests take a tenth of theirs."""
    monkeypatch.setattr(templates, "_child", brief_child)


@pytest.mark.slow
def test_the_limit_is_computing_time_and_the_next_rendering_has_its_own():
    source = (
        "{% for m in messages %}{% if m.role == 'loop' %}" + DOUBLED + "{{ ns.s }}{% endif %}{{ m.role }}{% endfor %}"
    )
    assert render(source) == "user"
    with pytest.raises(DataError, match="more than 1 s of computing time"):
        render(source, messages=[{"role": "loop"}])
    assert render(source) == "user"


def test_a_process_that_died_is_replaced():
    assert render("a") == "a"
    process = templates._child.pid
    assert process is not None
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert render("b") == "b"


def test_threads_get_their_own_answers():
    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: texts.update({i: render("{{ i }}", i=i)})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: str(i) for i in range(8)}


FORKS = """
import os
from covey.text import chat_template
def shown(source):
    return chat_template.render(chat_template.check(source), {})
assert shown("a") == "a"
pid = os.fork()
if pid == 0:
    os._exit(0 if shown("b") == "b" else 1)
assert shown("c") == "c"
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_forked_process_has_its_own():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


NESTED = [f"{{{{ {'(' * 1000}1{')' * 1000} }}}}", f"{{{{ {'[' * 3000}{']' * 3000} }}}}", "{% if 1 %}" * 3000,
          "{% for i in [1] %}" * 25 + "{% endfor %}" * 25, f"{{{{ {'not ' * 20000}1 }}}}",
          f"{{{{ {'-' * 50000}1 }}}}"]  # fmt: skip


@pytest.mark.parametrize("source", NESTED, ids=range(len(NESTED)))
def test_a_template_that_fails_while_it_is_compiled_is_refused(source: str):
    with pytest.raises(WeightsError, match="chat template does not"):
        chat_template.check(source)


def test_a_chat_of_a_thousand_turns_goes_through():
    source = "{% for m in messages %}{{ m.role.strip() ~ m['content'].split('x')[0].strip() }}{% endfor %}"
    assert render(source, messages=HELLO * 1000) == "userHello" * 1000
