"""Runs on a quantised base (QLoRA): the adapters learn, the base stays, and all that follows a run works on it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.config.schema import ModelOptions
from covey.errors import RecipeError
from covey.models.loading import weights
from covey.models.lora import projections, without_lora
from covey.parallel import flatten
from covey.recipes.load_model import load_source
from covey_formats.files import causal_logits
from covey_quantised.kernels import QuantisedKernel
from tests.one_layer import ONE_LAYER

TESTS = Path(__file__).parents[3] / "tests"
TINY = str(ONE_LAYER)
TOKENS = np.random.RandomState(0).randint(0, 300, (2, 24))
SETTINGS = [
    *(TESTS / "faults" / "small_run.txt").read_text().split(),
    "data.task=jsonl",
    f"data.path={TESTS / 'letters.jsonl'}",
    "rollout.temperature=2",
    "training.actor_optimizer.learning_rate=1e-2",
    "training.checkpoint_every_n_steps=1",
    "grpo.beta=0.04",
    "model.lora.rank=4",
]

pytestmark = pytest.mark.usefixtures("shared_programs")


def ready(*more: str, source: str = TINY) -> recipe.Recipe:
    return recipe.load("quickstart", [f"model.source={source}", *SETTINGS, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on an int8 base."""
    out = tmp_path_factory.mktemp("runs") / "first"
    recipes.train(ready("model.quantize=int8", "training.max_steps=2"), out)
    return out


@pytest.mark.slow
def test_only_the_adapters_learn(trained: Path) -> None:
    model = recipes.open_model(str(trained), ModelOptions())[0]
    start = weights.load(TINY, quantize="int8").model
    held, fresh = (flatten(nnx.state(m)) for m in (without_lora(model), start))
    assert held.keys() == fresh.keys()
    assert all(np.array_equal(held[name], fresh[name]) for name in fresh)
    moved = [np.abs(linear.lora.b[...]).max() for linear in projections(model).values() if linear.lora]
    assert len(moved) == 7
    assert min(moved) > 1e-3
    assert np.abs(causal_logits(model, TOKENS) - causal_logits(start, TOKENS)).max() > 1e-3


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "00000002")
    recipes.resume(tmp_path / "stopped")
    again, straight = (recipes.open_model(str(folder), ModelOptions())[0] for folder in (tmp_path / "stopped", trained))
    for (name, a), b in zip(flatten(nnx.state(again)).items(), flatten(nnx.state(straight)).values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.slow
def test_a_run_is_used_and_exported(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What goes out whole is a float model that computes the same; an adapter's card says what it was trained on."""
    wanted = causal_logits(recipes.open_model(str(trained), ModelOptions())[0], TOKENS)
    for kind in ("hf", "peft", "gguf"):
        assert main(["export", str(trained), "--out", str(tmp_path / kind), "--format", kind]) == 0
    for source in ("hf", "gguf/model.gguf"):
        np.testing.assert_allclose(causal_logits(weights.load(tmp_path / source).model, TOKENS), wanted, atol=1e-4)
    for kind in ("hf", "peft"):
        assert "int8, by qwix; dequantised where it is written out" in (tmp_path / kind / "README.md").read_text()
    assert main(["eval", str(trained), "--evaluation.prompts", "4"]) == 0
    assert main(["generate", str(trained), "a cat", "--max-new-tokens", "4"]) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_the_base_of_the_next(trained: Path) -> None:
    """Its adapters merged, then quantised anew; or in float again."""
    first = causal_logits(recipes.open_model(str(trained), ModelOptions())[0], TOKENS)
    options = ModelOptions(quantize="int8", lora=ready().model.lora)
    for chosen, bound in ((options, 0.05), (ModelOptions(), 1e-5)):
        model = load_source(chosen, str(trained))[0]
        kinds = {type(linear.kernel) for linear in projections(model).values()}
        assert kinds == ({QuantisedKernel} if chosen is options else {nnx.Param})
        assert np.abs(causal_logits(model, TOKENS) - first).mean() < bound * first.std()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.quantize=nf4", "model.lora.rank=0"), "a quantised base cannot be trained"),
        (("model.quantize=int8", "model.quantize_block=32"), "model.quantize_block is 32, and model.quantize is int8"),
        (("model.quantize=nf4", "model.quantize_block=0"), "model.quantize_block is 0"),
        (("model.quantize=int4",), "int4"),
        (
            ("model.quantize=int8", "model.lora.rank=0", "model.adapter=there", "grpo.algorithm=ppo"),
            "the critic would be a copy of the base",
        ),
    ],
)
def test_contradictions_are_answered_before_anything_is_loaded(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ready(*settings)
