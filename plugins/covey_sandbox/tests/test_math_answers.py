"""Answers compared as mathematics, by the package itself: what is equal, and that no answer can hold a run up."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from covey.cli.main import main
from covey.config.schema import RewardSafetyConfig
from covey.errors import RecipeError, RewardError
from covey.registry import install_command
from covey.rewards.registry import resolve
from covey.rewards.scoring import RewardRunner, score
from covey.types import Completion, FinishReason, Group
from covey_sandbox import math_answers as module
from covey_sandbox.math_answers import final_answer, math_verify
from covey_sandbox.reward_workers import Worker

pytestmark = pytest.mark.slow

CASES = [
    ("So it is \\boxed{\\frac12}.", "1/2", 1),
    ("So it is \\boxed{0.5}.", "\\frac{1}{2}", 1),
    ("First \\boxed{1}, but no: \\boxed{\\frac{2}{4}}", "0.5", 1),
    ("First \\boxed{1/2}, but no: \\boxed{1}", "0.5", 0),
    ("\\boxed{1 + x^2}", "x^2+1", 1),
    ("\\boxed{1 + x^2}", "x^2+2", 0),
    ("$\\sqrt{12}$", "2\\sqrt{3}", 1),
    ("<reasoning>41 + 1</reasoning><answer>42</answer>", "42", 1),
    ("<answer>$42$</answer> 41", "$42$", 1),
    ("<answer>\\frac{84}{2}</answer>", "42", 1),
    ("6 times 7\n#### 42", "42", 1),
    ("6 times 7\n#### 1,200 dollars", "1200", 0),
    ("6 times 7\n#### $1,200", "1,200.00", 1),
    ("The answer is 1,200.", "1200", 1),
    ("The answer is 1000.", "1e3", 1),
    ("The answer is 43.", "42", 0),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1),
    ("\\boxed{(1, 2]}", "(1, 2]", 1),
    ("\\boxed{(1, 2)}", "(1, 2]", 0),
    ("I do not know.", "42", 0),
    ("", "42", 0),
    ("\\boxed{}", "42", 0),
    ("\\boxed{", "42", 0),
    ("<answer>", "42", 0),
    ("42", None, 0),
    ("None", None, 0),
    ("", "", 0),
    ("\\boxed{__import__('os').getcwd()}", "42", 0),
    ("\\boxed{42}" + " and so on" * 1000, "42", 1),
]


def test_answers_are_compared_as_mathematics() -> None:
    texts, truths, wanted = zip(*CASES, strict=True)
    given = math_verify(["?"] * len(CASES), texts, truths)
    assert [(text, value) for text, value in zip(texts, given, strict=True)] == [*zip(texts, wanted, strict=True)]


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "\\binom{10^9}{5 \\cdot 10^8}", "(" * 3000 + "1" + ")" * 3000])
def test_an_answer_that_takes_too_long_is_wrong(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those around it are not: the process is killed, and another one reads on."""
    monkeypatch.setattr(module, "TIMEOUT", 0.5)  # less than the process takes to import sympy
    start = time.monotonic()
    assert math_verify(["?"] * 3, ["\\boxed{42}", f"\\boxed{{{answer}}}", "\\boxed{42}"], ["42"] * 3) == [1.0, 0.0, 1.0]
    assert time.monotonic() - start < 60


def test_a_checker_that_never_works_is_an_error_and_no_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a broken installation would train on rewards that are all 0."""
    (tmp_path / "broken_checker.py").write_text("import os\ndef equal(answers, truth):\n    os._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "FUNCTION", "broken_checker:equal")
    monkeypatch.setattr(module, "_PROCESS", Worker())
    with pytest.raises(RewardError, match="math-verify does not work"):
        math_verify(["?"], ["\\boxed{42}"], ["42"])


def test_it_works_in_any_thread_and_with_workers() -> None:
    """The package's own limits of time raise outside of the main thread; a function here has its process anyway."""
    completion = Completion(np.ones(1), np.zeros(1), np.zeros(1), FinishReason.STOP, "\\boxed{1/2}")
    group = Group("?", np.ones(1, np.int32), (completion,), {"answer": "0.5"})
    given: list[float] = []

    def run() -> None:
        with RewardRunner(RewardSafetyConfig(workers=1, timeout=60)) as runner:
            given.extend(score([group], ["math_verify"], runner=runner)[0].rewards)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert given == [1.0]


def test_a_missing_package_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(RecipeError, match="needs the package math-verify") as caught:
        resolve("math_verify")
    assert caught.value.fix == install_command("math")
    assert main(["train", "quickstart", "--rewards", "math_verify", "--out", "never"]) == 2
    said = capsys.readouterr()
    assert "needs the package math-verify" in said.err
    assert "loading" not in said.out


def test_the_end_of_a_long_completion_is_read() -> None:
    assert final_answer("\\boxed{1}" + "x" * 30_000) == "x" * module.MAX_CHARACTERS
