"""A run as a model: on the mesh that its recipe names, where the devices are there, and the same model everywhere."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import recipe, run
from covey.configs import LoRAConfig, MeshConfig, ModelOptions, RolloutConfig
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable
from covey.parallel import flatten, make_mesh, mesh_of
from covey.run import use
from covey.run.opening import load_source, mesh_at_hand
from covey.train.checkpoint import Checkpointer
from covey.types import Completion, FinishReason, Group

TINY = str(Path(__file__).parent / "parity" / "golden" / "tiny-llama")


def silent(text: str) -> None:
    """Nobody is told."""


@pytest.fixture(params=[0, 4], ids=["all weights", "adapters"])
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """What a run on the mesh (1, 2) leaves: its recipe, and a checkpoint of weights that have moved."""
    folder = tmp_path / "run"
    settings = [f"model.source={TINY}", f"model.lora.rank={request.param}", "model.mesh.tp=2", "evaluation.prompts=2"]
    ready = recipe.load("quickstart", settings)
    model, _, origin = load_source(ready.model, TINY, silent)
    moved = nnx.to_pure_dict(jax.tree.map(lambda x: x + 0.1, split_trainable(model)[1]))
    with Checkpointer(folder / "checkpoints") as saves:
        saves.save(1, {"params": moved}, {"model": origin})
    (folder / "recipe.yaml").write_text(recipe.to_yaml(ready))
    return str(folder)


def arrays(model: Decoder) -> dict[str, jax.Array]:
    return flatten(nnx.state(model))


@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(lora=LoRAConfig(rank=2))], ids=["plain", "adapters"])
def test_a_run_that_begins_with_a_run_gets_its_model_on_its_mesh(trained: str, options: ModelOptions) -> None:
    mesh = make_mesh((1, 4))
    there, here = (arrays(load_source(options, trained, silent, mesh=where)[0]) for where in (mesh, None))
    assert mesh_of(there) == mesh
    assert there["layers.0.attn.q_proj.kernel"].addressable_shards[0].data.shape == (64, 16)
    assert there.keys() == here.keys()
    assert all(np.allclose(x, here[name], atol=1e-6) for name, x in there.items())


class Said:
    """Stands for the rollout worker: remembers where its model lies, and always says the same."""

    devices: list[int]

    def __init__(self, model: Decoder, tokenizer: Any, rollout: RolloutConfig):
        mesh = mesh_of(nnx.state(model))
        self.devices.append(1 if mesh is None else mesh.size)

    def generate(self, examples: Any, samples: int, **_: Any) -> list[Group]:
        one = Completion(np.zeros(1, np.int32), np.zeros(1), np.zeros(1), FinishReason.STOP, "five")
        return [Group(x["prompt"], np.zeros(1, np.int32), (one,) * samples, {**x}) for x in examples]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over how many devices each model lay that was used."""
    found: list[int] = []
    monkeypatch.setattr(use, "RolloutWorker", type("Said", (Said,), {"devices": found}))
    lines = cycle(["2+3?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    return found


USES: dict[str, Callable[[str], Any]] = {
    "eval": lambda folder: run.evaluate(folder, recipe.load(folder)),
    "generate": lambda folder: run.generate(folder, "2+3?", 1, RolloutConfig()),
    "chat": lambda folder: run.chat(folder, RolloutConfig()),
}


@pytest.mark.parametrize("trained", [4], indirect=True, ids=["adapters"])
@pytest.mark.parametrize("name", USES)
def test_what_uses_a_run_takes_its_mesh_or_says_that_it_cannot(
    trained: str, name: str, devices: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    USES[name](trained)
    assert "model.mesh" not in "".join(capsys.readouterr())
    one = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: one)
    USES[name](trained)
    said = capsys.readouterr()
    told = "model.mesh asks for 2 devices, and there are 1: the model is on one of them"
    assert told in " ".join((said.err if name == "generate" else said.out).split())
    assert name != "generate" or said.out == ""
    assert devices == [2, 1]


@pytest.mark.parametrize("trained", [4], indirect=True, ids=["adapters"])
def test_the_mesh_of_an_evaluation_can_be_changed(trained: str, devices: list[int]) -> None:
    run.evaluate(trained, recipe.load(trained, ["model.mesh.tp=1"]))
    run.evaluate(TINY, recipe.load(trained, ["model.mesh.tp=4"]))
    assert devices == [1, 4]


def test_one_device_needs_no_mesh() -> None:
    assert mesh_at_hand(MeshConfig(), silent) is None
    found = mesh_at_hand(MeshConfig(fsdp=2, tp=2), silent)
    assert found is not None
    assert found.size == 4
