"""Classes in the shape of TRL's `environment_factory`."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey import EnvironmentRunner
from covey.config.schema import EnvsConfig
from covey.errors import RecipeError

CLASSES = '''
class Counter:
    def reset(self, **row):
        self.count, self.goal = 0, row["goal"]
        return " (start)"

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: how much to add
        """
        self.count += amount
        return f"now {self.count}"

    async def undo(self) -> None:
        """Set the counter to 0."""
        self.count = 0

    def _hidden(self): ...

    async def get_reward(self):
        return 1.0 if self.count == self.goal else 0.25


class Needs:
    def __init__(self, row): ...


class NoTools:
    def reset(self): ...
'''
ROW = {"prompt": [{"role": "user", "content": "Count to 3"}], "goal": 3}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}<tool_call>"


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trl_counter.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))


def played(*replies: str, **settings: Any) -> list[Any]:
    config = EnvsConfig(environment="trl:trl_counter:Counter", tool_format="hermes", **settings)
    with EnvironmentRunner(config=config) as runner:
        assert (runner.name, runner.scores) == ("counter", True)
        runner.prepare(TEMPLATE)
        assert runner.tools is not None
        assert list(runner.tools.tools) == ["add", "undo"]

        async def play() -> list[Any]:
            environment: Any = await runner.make(ROW)
            steps = [await environment.reset(), *[await environment.step(reply) for reply in replies]]
            return [*steps, await environment.get_reward()]

        return runner.submit(play()).result(20)


@pytest.mark.usefixtures("classes")
def test_public_methods_are_tools_and_get_reward_is_the_reward() -> None:
    prompt, added, undone, again, done, reward = played(
        call_of("add", amount=2), call_of("undo"), call_of("add", amount="x") + call_of("add", amount=3), "done"
    )
    assert prompt[-1] == {"role": "user", "content": "Count to 3 (start)"}
    assert "now 2" in added.messages[0]["content"]
    assert (added.reward, added.done) == (None, False)
    assert "null" in undone.messages[0]["content"]
    assert again.info == {"tool_calls": 2, "tool_failures": 1}
    assert (done.reward, done.done, reward) == (None, True, 1.0)
    assert played(call_of("add", amount=1))[-1] == 0.25


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("trl_counter:Needs", "cannot be made: missing a required argument"),
        ("trl_counter:NoTools", "has no tool"),
        ("trl_counter:No", "trl_counter has no class 'No'"),
        ("trl_counter", r"no environment 'trl_counter'(.|\n)*package\.module:Class"),
    ],
)
def test_what_is_no_environment_factory_is_refused(name: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        EnvironmentRunner(config=EnvsConfig(environment=f"trl:{name}"))
