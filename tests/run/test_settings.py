"""Settings of a run that is gone on with: what makes another run of it, what merely changes its course, and what an
older version of Covey did not know.
"""

from pathlib import Path
from typing import Any

import pytest

from covey.config import recipe
from covey.config.base import OnResume, leaves, on_resume
from covey.config.recipe import Recipe, SFTRecipe
from covey.display import show_log
from covey.errors import ResumeError
from covey.run.settings import check_same_settings, settings_of

RL = recipe.load("quickstart", ["seed=7", "model.lora.rank=4"])
SFT = recipe.load("sft-arithmetic", ["seed=7"], SFTRecipe)
BOTH = pytest.mark.parametrize("ready", [RL, SFT], ids=["rl", "sft"])


def told(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    said: list[str] = []
    with show_log(info=said.append, warning=said.append):
        check_same_settings(then, now, Path("run"))
    return said


def defaults(ready: Recipe | SFTRecipe) -> set[str]:
    """The settings of `ready` that have their defaults, and may be newer than a run that was made with it."""
    plain = settings_of(type(ready)(seed=ready.seed))
    return {name for name, value in settings_of(ready).items() if plain[name] == value} - {"seed"}


@BOTH
def test_a_setting_that_is_newer_than_the_run_had_its_default(ready: Recipe | SFTRecipe) -> None:
    """In whichever section, those that make another run of it among them; nothing is told or refused."""
    now = settings_of(ready)
    assert {"model.quantize", "data.train_fraction", "rollout.seed"} <= (newer := defaults(ready))
    assert told({name: value for name, value in now.items() if name not in newer}, now) == []


def test_what_was_changed_from_that_default_is_told_with_it() -> None:
    now = settings_of(RL)
    then = {name: value for name, value in now.items() if name not in ("rollout.top_k", "data.train_fraction")}
    assert told(then, now | {"rollout.top_k": 5}) == ["changed since the run was saved: rollout.top_k was 0, is 5"]
    with pytest.raises(ResumeError, match=rf"data\.train_fraction was {now['data.train_fraction']}, is 0.5"):
        told(then, now | {"data.train_fraction": 0.5})


@BOTH
@pytest.mark.parametrize("name", ["rollout.gone", "data.gone", "model.lora.gone"])
def test_a_setting_that_is_there_no_more_is_told_and_refuses_nothing(ready: Recipe | SFTRecipe, name: str) -> None:
    now = settings_of(ready)
    assert told(now | {name: 5}, now) == [f"changed since the run was saved: {name} was 5, and is no setting any more"]


def test_what_makes_another_run_is_still_refused() -> None:
    now = settings_of(RL)
    with pytest.raises(ResumeError, match=r"seed was 7, is 8; model\.lora\.rank was 4, is 8"):
        told(now, now | {"seed": 8, "model.lora.rank": 8})


@pytest.mark.parametrize("cls", [Recipe, SFTRecipe])
def test_every_setting_says_what_a_change_of_it_does_to_a_resumed_run(cls: type[Recipe | SFTRecipe]) -> None:
    """Beside its type, or beside that of its section: `Decisive`, `Reported` or `Ignored`."""
    treatments = on_resume(cls)
    assert [name for name in leaves(cls) if treatments[name] is None] == []


def test_the_treatment_beside_a_setting_comes_before_that_of_its_section() -> None:
    treatments = on_resume(Recipe)
    assert treatments["data.train_fraction"] == treatments["model.lora.alpha"] == OnResume.DECISIVE
    assert treatments["data.path"] == treatments["evaluation.temperature"] == OnResume.IGNORED
    assert treatments["rollout.temperature"] == treatments["training.actor_optimizer.b1"] == OnResume.REPORTED
    assert "data.path" not in settings_of(RL)
