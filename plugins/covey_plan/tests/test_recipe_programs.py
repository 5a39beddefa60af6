"""A recipe's programs, without its weights: of the same model that a run of it would load."""

from pathlib import Path

import jax
import pytest
from flax import nnx

from covey import write_peft
from covey.config import recipe
from covey.parallel import flatten
from covey.parallel.arrays import place_model
from covey.parallel.shapes import abstract
from covey.recipes.load_model import abstract_for, load_source
from covey_plan.plan import policy_programs, supervised_programs

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
TOOLS = ["envs.tools=[calculator]"]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.lora.rank=0", "model.dtype=bfloat16", "model.compute_dtype=bfloat16"],
        ["model.lora.rank=4", "model.lora.dropout=0.1", "model.remat=false"],
        ["model.lora.rank=4", "model.quantize=int8"],
    ],
    ids=["all weights", "adapters", "quantised"],
)
def test_the_model_of_shapes_is_the_one_that_a_run_loads(settings: list[str]) -> None:
    ready = recipe.load("quickstart", [f"model.source={TINY}", *settings])
    loaded = place_model(load_source(ready.model, TINY, ready.seed)[0], None)
    device = jax.devices()[0]
    shapes, _ = abstract_for(ready, "cpu")
    (graph, found), (made, arrays) = nnx.split(place_model(shapes, device)), nnx.split(loaded)
    assert graph == made
    assert flatten(found) == flatten(abstract(arrays))


@pytest.mark.slow
def test_an_adapter_is_read_for_its_shapes(tmp_path: Path) -> None:
    ready = recipe.load("quickstart", [f"model.source={TINY}", "model.lora.rank=4"])
    adapted, _, _ = load_source(ready.model, TINY, 1)
    write_peft(adapted, 300, tmp_path / "adapter", base="x")
    settings = [f"model.source={TINY}", "model.lora.rank=0", f"model.adapter={tmp_path / 'adapter'}"]
    ready = recipe.load("quickstart", settings)
    loaded, shapes = load_source(ready.model, TINY, ready.seed)[0], abstract_for(ready, "cpu")[0]
    assert nnx.split(shapes)[0] == nnx.split(loaded)[0]
    of = lambda model: {name: (x.shape, x.dtype) for name, x in flatten(nnx.state(model)).items()}  # noqa: E731
    assert of(shapes) == of(loaded)


def test_episodes_keep_the_size_of_the_batch() -> None:
    alone, acting = (recipe.load("quickstart", [f"model.source={TINY}", *envs]) for envs in ([], TOOLS))
    assert [policy_programs(one, jax.devices()[0], 8).scheduler().resizes for one in (alone, acting)] == [True, False]


def test_supervised_programs_are_those_of_the_recipe() -> None:
    ready = recipe.load("sft-tiny", kind=recipe.SFTRecipe)
    made = supervised_programs(ready, jax.devices()[0], total_steps=8)
    assert [program.name for program in made.largest()] == ["loss", "gradients", "apply"]
    assert made.learner.program_model.config.num_layers == 2
    assert made.largest()[1].args[3].tokens.shape == (8, 128)
