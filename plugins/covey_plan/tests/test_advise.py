"""Meshes are compared by the seconds of a token, those that do not fit come last, and settings are those of a run."""

from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from covey.config import recipe
from covey.config.schema import MeshConfig
from covey.errors import CoveyError
from covey.parallel.mesh import make_mesh
from covey_plan import advise, plan
from covey_plan.compiled import CompiledProgram
from covey_plan.lengths import Lengths
from covey_plan.machines import MACHINES, parse_target
from covey_plan.memory import DeviceArrays, RunArrays
from covey_plan.roofline import PhaseTime
from covey_plan.topologies import Places
from covey_plan.work import Phase

LENGTHS = Lengths(100, (400,))
SETTINGS = ["training.row_length=1024", "grpo.num_generations=2", "training.prompts_per_step=4", "model.mesh.tp=4"]


def load(more: Sequence[str]) -> recipe.Recipe:
    return recipe.load("quickstart", [*SETTINGS, "training.max_tokens_per_micro_batch=2048", *more])


def made(ready: recipe.Recipe) -> plan.Plan:
    """Return a plan whose seconds are the parts of a product, and whose arrays are the copies."""
    mesh, machine = ready.model.mesh, MACHINES["v5e"]
    time = PhaseTime(Phase("update", 1, 1, {}, positions=10), 0, 1, 1, 1, None, float(mesh.tp), {})
    peak = 10e9 if mesh.data < 4 else 20e9
    program = CompiledProgram("gradients", 1.0)
    arrays = RunArrays(DeviceArrays({"weights": int(peak)}))
    return plan.Plan("quickstart", parse_target("v5e:2x2"), {}, {}, machine, LENGTHS, arrays, 0, [program], [time])


def test_meshes_are_compared_and_the_fastest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "place_on", lambda *_: Places(make_mesh()))
    monkeypatch.setattr(advise, "programs_of", lambda ready, places: ready)
    floor: Any = lambda ready: RunArrays(DeviceArrays({"weights": int(18e9 if ready.model.mesh.data == 2 else 1e9)}))  # noqa: E731
    monkeypatch.setattr(advise, "arrays_of", floor)
    monkeypatch.setattr(advise, "plan_programs", lambda ready, *_: made(ready))
    told: list[str] = []
    found = advise.advise(load, parse_target("v5e:2x2"), told.append, LENGTHS)
    order = [(one.mesh.data, one.mesh.fsdp, one.mesh.tp) for one in found]
    assert order[:3] == [(1, 4, 1), (1, 2, 2), (1, 1, 4)]  # then one whose peak, and two whose arrays do not fit
    assert set(order[3:]) == {(4, 1, 1), (2, 2, 1), (2, 1, 2)}
    assert (found[0].tokens, found[0].seconds) == (4 * (100 + 2 * 400), 1.0)
    assert found[0].update_seconds == 0.1
    assert advise.as_json(found)[-1]["seconds_per_token"] is None
    advise.show(found, Console(width=120))
    out = capsys.readouterr().out
    assert "1 × 1 × 4" in out
    assert "the arrays alone do not fit" in out
    assert "fastest: --mesh.data 1 --mesh.fsdp 4 --mesh.tp 1 --training.max-tokens-per-micro-batch 4096" in out


def test_tokens_of_a_micro_batch_follow_the_parts_of_the_rows() -> None:
    """A part of the rows keeps its 2,048 tokens, but a step of four rows has no more than one for each of four."""
    small = advise.settings_for(load([]), MeshConfig(data=4), LENGTHS)
    large = advise.settings_for(load(["training.prompts_per_step=64"]), MeshConfig(data=4), LENGTHS)
    assert small[-2:] == ("--training.max-tokens-per-micro-batch", "4096")
    assert large[-2:] == ("--training.max-tokens-per-micro-batch", "8192")
    assert advise.settings_for(load([]), MeshConfig(tp=4), LENGTHS)[-2:] == ("--mesh.tp", "4")


@pytest.mark.parametrize(
    ("more", "on", "words"),
    [([], "cpu", "share its processor"), (["role_to_mesh.rollout.data=2"], "v5e:2x2", "devices of its own")],
)
def test_what_cannot_be_compared_is_refused(more: list[str], on: str, words: str) -> None:
    with pytest.raises(CoveyError, match=words):
        advise.advise(lambda settings: load([*more, *settings]), parse_target(on), lambda text: None, LENGTHS)
