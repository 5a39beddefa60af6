"""Environments of verifiers 0.4 and 0.2, really run where they are installed: turns, rewards, and what is refused."""

import asyncio
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from covey import EnvironmentRunner
from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey_envs import verifiers

PAGE = Path(__file__).parents[3] / "docs" / "verifiers.md"
SUMS, OUR_SUMS, THEIRS, OURS = re.findall(
    r'^```python title="(?:verifiers|Covey)"\n(.*?)^```', PAGE.read_text("utf-8"), re.M | re.S
)
"""The script and the game of the page, as for verifiers 0.2 and 0.4, and without that library."""

OLD = """
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
        return [{"role": "user", "content": "No."}]


async def right(completion, answer, **kwargs):
    return 0.5 * any(message["content"] == answer for message in completion)


def load_environment(numbers=9):
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": str(answer)} for answer in range(numbers)]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=5)
"""


def needs(wanted: str) -> pytest.MarkDecorator:
    """Skip a test where verifiers is not installed in a version that begins so."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = "no version"
    return pytest.mark.skipif(not found.startswith(wanted), reason=f"needs verifiers {wanted}*, has {found}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def play(runner: EnvironmentRunner, row: dict[str, Any], *replies: str) -> list[Any]:
    environment: Any = await runner.make(row)
    shown = [await runner.call("reset", environment.reset)]
    shown += [await runner.call("step", environment.step, reply) for reply in replies]
    if hasattr(environment, "close"):
        await environment.close()
    return shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(verifiers, "version", missing)
    with pytest.raises(RecipeError, match=r"need that library(.|\n)*\[verifiers\]"):
        verifiers.factory("guess", EnvsConfig(environment="guess"))


def test_another_version_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "version", lambda name: "0.3.1")
    with pytest.raises(RecipeError, match=r"verifiers 0\.3\.1 is installed(.|\n)*version 0\.4, or 0\.2"):
        verifiers.factory("guess", EnvsConfig(environment="guess"))


@needs("0.2.")
def test_the_script_of_the_page_gives_the_same_rewards_with_verifiers_and_without(here: Path) -> None:
    (here / "vf_sums.py").write_text(SUMS)
    ours: dict[str, Any] = {}
    exec(OUR_SUMS.partition("rows = ")[0] + "rows = [row(a, b) for a, b in SUMS]", ours)
    replies = ["<answer>22</answer>", "<answer> 22 </answer>", "22", "x" * 300 + "<answer>22</answer>", "x" * 300]
    replies += ["<answer>1</answer> <answer>22</answer>", "<answer>22</answer> <answer>1</answer>", ""]
    answers = [ours["rows"][0]["answer"]] * len(replies)
    scores = zip(ours["correct"](replies, answers), ours["brief"](replies), strict=True)
    with EnvironmentRunner(config=EnvsConfig(environment="verifiers:vf_sums", max_turns=3)) as runner:
        for reply, (correct, brief) in zip(replies, scores, strict=True):
            prompt, step = runner.submit(play(runner, {"prompt": "", "task": 0}, reply)).result(60)
            assert prompt == ours["rows"][0]["prompt"]
            assert (step.reward, step.done) == (pytest.approx(correct + 0.2 * brief), True), reply


@needs("0.4.")
def test_the_game_of_the_page_is_the_same_with_verifiers_and_without(here: Path) -> None:
    (here / "vf_page.py").write_text(THEIRS)
    ours: dict[str, Any] = {}
    exec(OURS, ours)
    config = EnvsConfig(environment="verifiers:vf_page", max_turns=3)
    with EnvironmentRunner(config=config) as theirs, EnvironmentRunner(ours["Guess"]) as without:
        for number, replies in ((4, ["7", "5"]), (0, ["1"]), (8, ["1", "2"])):
            found = theirs.submit(play(theirs, {"prompt": "", "task": number}, *replies)).result(60)
            prompt, *steps = without.submit(play(without, ours["rows"][number], *replies)).result(60)
            assert found[0] == prompt
            for one, other in zip(found[1:], steps, strict=True):
                assert (one.reward, one.done) == (other.reward, other.done)
                assert one.done or one.messages == [{"role": "user", "content": other.messages}]
        assert theirs.submit(play(theirs, {"prompt": "", "task": 4}, "1", "2", "3")).result(60)[-1].done  # max_turns

        async def together() -> Any:
            rows = [{"prompt": "", "task": number} for number in (1, 2)]
            return await asyncio.gather(play(theirs, rows[0], "2"), play(theirs, rows[1], "2", "3"))

        assert [episode[-1].reward for episode in theirs.submit(together()).result(60)] == [1.0, 1.0]
        with pytest.raises(EpisodeError, match="has no task 16"):
            theirs.submit(play(theirs, {"prompt": "", "task": 16})).result(60)
    with pytest.raises(RecipeError, match="cannot load 'no_such_taskset'"):
        verifiers.factory("no_such_taskset", EnvsConfig(environment="guess"))


@needs("0.4.")
def test_a_taskset_gets_the_arguments_as_its_settings(here: Path) -> None:
    text = THEIRS.replace("range(1, 17)", "range(1, 1 + self.config.numbers)")
    text = text.replace(
        "class GuessTaskset(", "class Numbers(vf.TasksetConfig):\n    numbers: int = 16\n\n\nclass GuessTaskset("
    )
    text = text.replace("vf.Taskset[Guess, vf.TasksetConfig]", "vf.Taskset[Guess, Numbers]")
    (here / "vf_numbers.py").write_text(text)
    make = verifiers.factory("vf_numbers", EnvsConfig(environment="verifiers:vf_numbers", arguments={"numbers": 3}))
    with pytest.raises(EpisodeError, match=r"has no task 3(.|\n)*below 3"):
        make({"task": 3})
    with pytest.raises(RecipeError, match=r"cannot load 'vf_numbers'(.|\n)*number"):
        verifiers.factory("vf_numbers", EnvsConfig(environment="verifiers:vf_numbers", arguments={"number": 3}))


@needs("0.2.")
def test_a_game_in_the_shape_of_0_2_is_played(here: Path) -> None:
    (here / "vf_old.py").write_text(OLD)
    tools = OLD.replace("max_turns=5)", "max_turns=5, tool_defs=[vf.Tool(name='t', description='', parameters={})])")
    (here / "vf_old_tools.py").write_text(tools)
    with EnvironmentRunner(config=EnvsConfig(environment="verifiers:vf_old", max_turns=3)) as runner:
        prompt, no, right = runner.submit(play(runner, {"prompt": "", "task": 4}, "7", "4")).result(60)
        assert prompt == [{"role": "user", "content": "Guess."}]
        assert (no.messages, no.done) == ([{"role": "user", "content": "No."}], False)
        assert (right.reward, right.done) == (0.5, True)
        last = runner.submit(play(runner, {"prompt": "", "task": 4}, "1", "2", "3")).result(60)[-1]
        assert (last.reward, last.done) == (0.0, True)  # the limit of turns
        with pytest.raises(EpisodeError, match="has no task 9"):
            runner.submit(play(runner, {"prompt": "", "task": 9})).result(60)
    arguments = {"numbers": 3}
    shorter = verifiers.factory("vf_old", EnvsConfig(environment="verifiers:vf_old", arguments=arguments))
    with pytest.raises(EpisodeError, match=r"has no task 3(.|\n)*below 3"):
        shorter({"task": 3})
    with pytest.raises(RecipeError, match=r"unexpected keyword argument 'number'(.|\n)*did you mean 'numbers'"):
        verifiers.factory("vf_old", EnvsConfig(environment="verifiers:vf_old", arguments={"number": 3}))
    for name, what in (("no_such_module", "cannot load 'no_such_module'"), ("vf_old_tools", "has tools")):
        with pytest.raises(RecipeError, match=what):
            verifiers.factory(name, EnvsConfig(environment="guess"))
