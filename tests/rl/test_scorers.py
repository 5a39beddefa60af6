"""The inference worker: who may live there, and that its log-probs, values and scores are right in any slices."""

import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.errors import DataError, RecipeError, WeightsError
from covey.models.decoder import Decoder
from covey.models.loading.weights import load_value_model
from covey.models.lora import split_trainable, with_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.packing.rows import Rows, pack
from covey.parallel import make_mesh
from covey.parallel.arrays import reshard, shardings
from covey.rl.roles import Role
from covey.rl.scorers import InferenceWorker, RowScorer

pytestmark = pytest.mark.usefixtures("shared_programs")

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
FAMILIES = json.loads((GOLDEN / "heads.json").read_text())
SHAPES = [(5, [3, 9, 1, 6]), (11, [4, 4]), (2, [20])]
LENGTHS = [n for _, sizes in SHAPES for n in sizes]


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """The weights of `make_golden.weight`, which follow from the tensor's name."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return ((1 + 0.3 * draw) if "norm" in name else 0.3 * draw).astype(np.float32)


def golden_model(folder: Path, name: str) -> ValueModel:
    """A golden reward model, loaded from a folder as transformers writes it."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]["config"]))
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    tensors = {key: weight(key, shape) for key, shape in FAMILIES[name]["shapes"].items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return load_value_model(folder, remat=False).model


def golden_pairs() -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    golden = np.load(GOLDEN / "heads.npz")
    names = [n for n in golden.files if n.startswith("completion")]
    prompts = [golden["prompt" + n.removeprefix("completion").split(".")[0]] for n in names]
    return prompts, [golden[n] for n in names], golden


@pytest.fixture
def critic(decoder: Callable[..., Decoder]) -> ValueModel:
    """The room's tiny decoder under a random head."""
    model = make_value_model(decoder(layers=1, remat=False))
    model.score[...] = jnp.asarray(np.random.default_rng(7).normal(size=32), jnp.float32)
    return model


@pytest.fixture
def rows(groups_of: Callable) -> Rows:
    return pack(groups_of(SHAPES), 64)


# --- scores of reward models


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All answers together, the answers of a prompt in one row; there they were computed one at a time."""
    prompts, completions, golden = golden_pairs()
    worker = InferenceWorker({Role.REWARD: golden_model(tmp_path, name)})
    scores = worker.rewards(prompts, completions, row_length=128)
    assert np.std(golden[name]) > 0.5
    np.testing.assert_allclose(scores, golden[name], atol=1e-4)
    assert {type(s) for s in scores} == {float}


@pytest.mark.slow
def test_scores_do_not_depend_on_slices_order_or_devices(tmp_path: Path) -> None:
    prompts, completions, golden = golden_pairs()
    model = golden_model(tmp_path, "llama")
    worker = InferenceWorker({"reward": model})
    for settings in ({"row_length": 64, "max_tokens": 1}, {"row_length": 1, "max_tokens": 10_000}):
        np.testing.assert_allclose(worker.rewards(prompts, completions, **settings), golden["llama"], atol=1e-4)
    order = np.random.default_rng(0).permutation(len(prompts))
    mixed = worker.rewards([prompts[i] for i in order], [completions[i] for i in order])
    np.testing.assert_allclose(mixed, golden["llama"][order], atol=1e-4)
    mesh = make_mesh((2, 2), ("fsdp", "tp"), jax.devices()[:4])
    graph, params = nnx.split(model)
    spread = InferenceWorker({"reward": nnx.merge(graph, reshard(params, shardings(params, mesh)))})
    np.testing.assert_allclose(spread.rewards(prompts, completions, mesh=mesh), golden["llama"], atol=1e-4)


def test_an_answer_without_tokens_is_scored_at_the_end_of_its_prompt(critic: ValueModel) -> None:
    worker = InferenceWorker({"reward": critic})
    empty, last = worker.rewards([[5, 6, 7], [5, 6]], [[], [7]])
    assert empty == pytest.approx(last, abs=1e-5)
    assert worker.rewards([], []) == []


def test_tokens_that_the_reward_model_does_not_have_are_refused(critic: ValueModel) -> None:
    """JAX would return NaN for them, or the last row of the embedding."""
    worker = InferenceWorker({"reward": critic})
    for prompt, completion in (([300], [1]), ([1], [2, 1000])):
        with pytest.raises(WeightsError, match=r"token (300|1000) is unknown to the reward model, which embeds 300"):
            worker.rewards([[1], prompt], [[1], completion])
    with pytest.raises(DataError, match="2 prompts for 1"):
        worker.rewards([[1], [2]], [[1]])


# --- log-probs and values


@pytest.mark.slow
def test_slices_of_any_size_give_the_same(decoder: Callable, critic: ValueModel, rows: Rows) -> None:
    worker = InferenceWorker({Role.REFERENCE: decoder(layers=1, remat=False), Role.CRITIC: critic}, temperature=0.7)
    for compute in (partial(worker.scores, role) for role in (Role.REFERENCE, Role.CRITIC)):
        wanted = compute(rows, LENGTHS, len(rows.tokens))
        assert [len(x) for x in wanted] == LENGTHS
        for size in (1, 2):
            for one, other in zip(compute(rows, LENGTHS, size), wanted, strict=True):
                assert one.dtype == np.float32
                # Each of the two is rounded in one layer of sums of up to 64 terms.
                roundings, size = 2 * 64, max(float(np.abs(x).max()) for x in wanted)
                np.testing.assert_allclose(one, other, rtol=0, atol=roundings * 2.0**-24 * size)


@pytest.mark.slow
def test_log_probs_are_taken_at_the_rollouts_temperature(decoder: Callable, rows: Rows) -> None:
    """Trap: those at 1 compared with those at the rollout's."""
    model = decoder(layers=1, remat=False)
    _, params = nnx.split(model)
    got = InferenceWorker({"reference": model}, 0.5).scores("reference", rows, LENGTHS, 2)
    wanted, cold = (RowScorer.of_logps(model, t)(params, rows, LENGTHS, 2)[0] for t in (0.5, 1.0))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert not np.allclose(got[0], cold[0], atol=1e-2)


@pytest.mark.slow
def test_new_weights_count_from_the_next_call(decoder: Callable, rows: Rows) -> None:
    """All of them, or those alone that training changes."""
    adapted = with_lora(make_value_model(decoder(layers=1, remat=False)), LoRAConfig(rank=2))
    worker = InferenceWorker({Role.CRITIC: adapted})
    assert not np.concatenate(worker.scores("critic", rows, LENGTHS, 2)).any()
    _, trained, _ = split_trainable(adapted)
    worker.update_params(Role.CRITIC, jax.tree.map(lambda x: x + 0.25, trained))
    partly = np.concatenate(worker.scores("critic", rows, LENGTHS, 2))
    assert partly.any()
    worker.update_params("critic", jax.tree.map(lambda x: x * 2, worker.params["critic"]))
    assert np.abs(np.concatenate(worker.scores("critic", rows, LENGTHS, 2)) - partly).max() > 0.1


# --- who may live here


@pytest.mark.parametrize(
    ("role", "fix"),
    [
        (Role.ACTOR, r"RLCluster\.update_actor"),
        ("rollout", r"RLCluster\.generate"),
        ("rewards", "did you mean 'reward'"),
        ("", "one of"),
    ],
)
def test_other_roles_are_refused_with_the_legal_ones(role: str, fix: str, decoder: Callable) -> None:
    words = rf"hosts no '{role}'\n  wanted: one of: reference, critic, reward\n  fix: .*{fix}"
    worker = InferenceWorker({})
    for ask in (
        lambda: InferenceWorker({role: decoder()}),
        lambda: worker.has(role),
        lambda: worker.update_params(role, None),
    ):
        with pytest.raises(RecipeError, match=words):
            ask()


def test_a_role_that_nobody_has_is_answered_with_the_way_to_fill_it(rows: Rows) -> None:
    worker = InferenceWorker({})
    asked: dict[str, Callable[[], Any]] = {
        "reference": lambda: worker.scores("reference", rows, LENGTHS, 1),
        "critic": lambda: worker.scores("critic", rows, LENGTHS, 1),
        "reward": lambda: worker.rewards([], []),
    }
    for role, ask in asked.items():
        assert not worker.has(role)
        for call in (ask, lambda role=role: worker.update_params(role, None)):
            with pytest.raises(RecipeError, match=rf"no {role} is loaded\n  fix: RLCluster\({role}=\.\.\.\)"):
                call()


def test_a_model_of_the_wrong_kind_is_refused(decoder: Callable, critic: ValueModel) -> None:
    cases = [("reference", critic, "Decoder"), ("critic", decoder(), "ValueModel"), ("reward", decoder(), "ValueModel")]
    for role, model, kind in cases:
        with pytest.raises(RecipeError, match=rf"{role} is a \w+\n  wanted: a {kind}\n  fix: models\."):
            InferenceWorker({role: model})
    assert InferenceWorker({Role.REWARD: critic}).has("reward")


@pytest.mark.slow
def test_a_model_is_hosted_later_and_let_go(decoder: Callable[..., Decoder]) -> None:
    worker = InferenceWorker({})
    worker.host(Role.REFERENCE, decoder())
    assert worker.has(Role.REFERENCE)
    assert isinstance(worker.model(Role.REFERENCE), Decoder)
    worker.release(Role.REFERENCE)
    worker.release(Role.REFERENCE)  # as often as anyone asks
    with pytest.raises(RecipeError, match="no reference is loaded"):
        worker.model(Role.REFERENCE)
