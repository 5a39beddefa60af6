"""Value heads: what they compute, what they share with the language model, what is trained, and how they are loaded."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.errors import WeightsError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.models.loading.stored_tensor import StoredTensor
from covey.models.loading.weights import load_value_model
from covey.models.lora import has_lora, merge_lora, split_trainable, with_lora, without_lora
from covey.models.value_model import ValueModel, make_value_model
from covey.parallel import flatten, make_mesh
from covey.parallel.arrays import shardings

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 9))
POSITIONS = np.broadcast_to(np.arange(9), (2, 9))
HEAD = np.random.default_rng(1).normal(size=32).astype(np.float32)


@cache
def base(**switches: Any) -> Decoder:
    """An untied decoder."""
    return Decoder(CONFIG, rngs=nnx.Rngs(0), remat=False, **switches)


def critic(**switches: Any) -> ValueModel:
    model = make_value_model(base(**switches))
    model.score[...] = jnp.asarray(HEAD)
    return model


@jax.jit
def _values(graph_state: Any) -> jax.Array:
    return nnx.merge(*graph_state)(TOKENS, POSITIONS, causal_attention(jnp.ones((2, 9), bool), POSITIONS))


def values(model: ValueModel) -> np.ndarray:
    return np.asarray(_values(nnx.split(model)))


def hidden(model: Decoder) -> np.ndarray:
    graph, state = nnx.split(model)
    attend = causal_attention(jnp.ones((2, 9), bool), POSITIONS)
    return np.asarray(jax.jit(lambda s: nnx.merge(graph, s)(TOKENS, POSITIONS, attend)[0])(state))


def arrays(model: Any) -> dict[str, jax.Array]:
    return flatten(model if isinstance(model, nnx.State) else nnx.state(model))


def pointers(model: Any) -> dict[str, int]:
    return {name: x.unsafe_buffer_pointer() for name, x in arrays(model).items()}


# --- what it computes and metric_sums


@pytest.mark.slow
def test_a_new_critic_says_nothing() -> None:
    assert np.array_equal(values(make_value_model(base())), np.zeros((2, 9)))


def test_values_are_hidden_states_times_the_head() -> None:
    got, want = values(critic()), hidden(base()).astype(np.float64) @ HEAD.astype(np.float64)
    assert got.dtype == np.float32
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_head_is_float32_on_a_narrow_trunk() -> None:
    """bfloat16 values would come in steps of 1/256 near 1."""
    model = critic(param_dtype="bfloat16", compute_dtype="bfloat16")
    types = {name: x.dtype for name, x in arrays(model).items()}
    assert {name for name, t in types.items() if t == jnp.float32} == {"score"}
    state = hidden(model.decoder)
    assert state.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(values(model), state.astype(np.float64) @ HEAD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_arrays_are_shared_or_copied_as_asked_and_the_language_head_stays_behind(share: bool) -> None:
    model = base()
    before = pointers(model)
    made = pointers(make_value_model(model, share=share))
    assert {name.removeprefix("decoder.") for name in made} == before.keys() - {"head.embedding"} | {"score"}
    kept = [made[f"decoder.{name}"] == at for name, at in before.items() if name != "head.embedding"]
    assert all(kept) if share else not any(kept)
    assert pointers(model) == before
    assert model.head is not None
    assert not model.config.tie_embeddings


@pytest.mark.slow
def test_adapters_go_on_and_off_as_on_a_decoder() -> None:
    plain = critic()
    adapted = with_lora(plain, LoRAConfig(rank=2))
    for layer in adapted.decoder.layers:
        layer.mlp.up_proj.lora.b[...] = jnp.full(layer.mlp.up_proj.lora.b.shape, 0.3)
    assert (has_lora(plain), has_lora(adapted)) == (False, True)
    assert pointers(without_lora(adapted)) == pointers(plain)
    assert np.abs(values(adapted) - values(plain)).max() > 0.1
    np.testing.assert_allclose(values(merge_lora(adapted)), values(adapted), atol=1e-5)


def test_a_trunk_with_adapters_keeps_them() -> None:
    adapted = with_lora(base(), LoRAConfig(rank=2))
    assert has_lora(make_value_model(adapted))
    assert not set(pointers(make_value_model(adapted)).values()) & set(pointers(adapted).values())


# --- what is trained


def test_everything_is_trained_or_the_head_together_with_adapters() -> None:
    _, trained, rest = split_trainable(critic())
    assert (arrays(trained).keys(), arrays(rest).keys()) == (arrays(critic()).keys(), set())
    _, trained, rest = split_trainable(with_lora(critic(), LoRAConfig(rank=2)))
    assert {name for name in arrays(trained) if ".lora." not in name} == {"score"}
    assert sum(".lora." in name for name in arrays(trained)) == 2 * 2 * 7
    assert arrays(rest).keys() == arrays(critic()).keys() - {"score"}


@pytest.mark.slow
def test_steps_on_a_critic_on_a_shared_base_move_head_and_adapters_and_nothing_else() -> None:
    """From a zero head: the first step moves the head, the second B, the third A."""
    language_model = base()
    model = with_lora(make_value_model(language_model, share=True), LoRAConfig(rank=2))
    graph, trained, rest = split_trainable(model)
    before = {name: np.array(x) for name, x in arrays(trained).items()}
    frozen = {name: np.array(x) for name, x in arrays(language_model).items()}

    @jax.jit
    def step(trained: Any, rest: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            model = nnx.merge(graph, nnx.merge_state(trained, rest))
            predicted = model(TOKENS, POSITIONS, causal_attention(jnp.ones((2, 9), bool), POSITIONS))
            return jnp.mean(jnp.square(predicted - jnp.asarray(TOKENS % 2, jnp.float32)))

        value, gradient = jax.value_and_grad(loss)(trained)
        return jax.tree.map(lambda x, g: x - 0.1 * g, trained, gradient), value

    losses = []
    for _ in range(4):
        trained, value = step(trained, rest)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.01
    assert all(not np.array_equal(x, before[name]) for name, x in arrays(trained).items())
    after = arrays(without_lora(nnx.merge(graph, nnx.merge_state(trained, rest))))
    for name, x in frozen.items():
        np.testing.assert_array_equal(x, arrays(language_model)[name])
        if name != "head.embedding":
            assert after[f"decoder.{name}"] is arrays(language_model)[name]


def test_the_head_is_whole_on_every_device_of_a_mesh() -> None:
    mesh = make_mesh((2, 2), ("fsdp", "tp"), jax.devices()[:4])
    placed = shardings(nnx.state(critic()), mesh)
    assert flatten(placed)["score"].spec == jax.sharding.PartitionSpec(None)
    assert flatten(placed)["decoder.layers.0.mlp.up_proj.kernel"].spec == jax.sharding.PartitionSpec("fsdp", "tp")


# --- loading


def spoiled(folder: Path, fields: dict[str, Any] | None = None, **changes: np.ndarray | None) -> Path:
    """The tiny checkpoint as a classifier of one label with `changes` to its tensors and config, in one file."""
    shutil.copytree(TINY, folder)
    tensors = {k: v for file in TINY.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}
    tensors |= {"lm_head.weight": None, "score.weight": np.arange(64, dtype=np.float32)[None]} | changes
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    config = json.loads((TINY / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config | (fields or {})))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_brings_its_head_and_its_trunk(tmp_path: Path, tied: bool) -> None:
    loaded = load_value_model(spoiled(tmp_path / "m", {"tie_word_embeddings": tied}))
    np.testing.assert_array_equal(loaded.model.score[...], np.arange(64))
    trunk = {f"decoder.{k}": v for k, v in arrays(weights.load(TINY).model).items() if k != "head.embedding"}
    assert arrays(loaded.model).keys() == trunk.keys() | {"score"}
    for name, x in trunk.items():
        np.testing.assert_array_equal(arrays(loaded.model)[name], x, err_msg=name)
    assert loaded.origin == str((tmp_path / "m").resolve())
    assert loaded.tokenizer.vocab_size == 300


def test_a_language_model_becomes_a_critic_with_a_zero_head() -> None:
    critic = load_value_model(TINY, new_head=True).model
    assert not np.asarray(critic.score[...]).any()
    made = make_value_model(weights.load(TINY).model)
    assert arrays(critic).keys() == arrays(made).keys()
    assert all(np.array_equal(x, arrays(made)[name]) for name, x in arrays(critic).items())


def test_a_new_head_is_not_put_on_a_classifier(tmp_path: Path) -> None:
    """A critic that starts from a reward model starts with its head (Ouyang et al., 2022)."""
    loaded = load_value_model(spoiled(tmp_path / "m"), new_head=True)
    np.testing.assert_array_equal(loaded.model.score[...], np.arange(64))


def test_options_and_places_reach_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def place(path: str, tensor: np.ndarray) -> jax.Array:
        seen.append(path)
        return jax.device_put(tensor, jax.devices()[1])

    source = spoiled(tmp_path / "m")
    monkeypatch.setattr(weights, "make_put", lambda model, mesh: place)
    model = load_value_model(source, param_dtype="bfloat16", remat=False).model
    assert sorted(seen) == sorted(arrays(model))
    assert all(x.devices() == {jax.devices()[1]} for x in arrays(model).values())
    assert {name for name, x in arrays(model).items() if x.dtype != jnp.bfloat16} == {"score"}
    assert not model.decoder.remat


def test_for_a_mesh_over_processes_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the small head is read whole; the arrays are those of a model that was."""
    source = spoiled(tmp_path / "m")
    wanted, read, read_whole = arrays(load_value_model(source).model), [], StoredTensor.whole
    monkeypatch.setattr(weights, "spans_processes", lambda mesh: mesh is not None)
    monkeypatch.setattr(StoredTensor, "whole", lambda self: read.append(self.name) or read_whole(self))
    found = arrays(load_value_model(source, mesh=make_mesh((2, 2))).model)
    assert read == ["score.weight"]
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(x, found[name]) for name, x in wanted.items())
    assert not all(x.is_fully_replicated for x in found.values())


@pytest.mark.parametrize("labels", [0, 2])
def test_more_labels_than_one_are_refused_with_their_number(tmp_path: Path, labels: int) -> None:
    source = spoiled(tmp_path / "m", **{"score.weight": np.zeros((labels, 64), np.float32)})
    for new_head in (False, True):
        with pytest.raises(WeightsError, match=rf"num_labels {labels}\n.*num_labels 1"):
            load_value_model(source, new_head=new_head)


def test_a_language_model_cannot_be_a_reward_model() -> None:
    with pytest.raises(WeightsError, match=r"language model.*no score\.weight") as caught:
        load_value_model(TINY)
    assert str(TINY) in str(caught.value)


def test_a_classifier_cannot_be_a_language_model(tmp_path: Path) -> None:
    """It would otherwise be told that its download was cut short."""
    with pytest.raises(WeightsError, match=r"classification head \(score\.weight\) and no language head"):
        weights.load(spoiled(tmp_path / "m"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score.bias": np.zeros(1, np.float32)}, r"score\.bias is unknown"),
        ({"lm_head.weight": np.zeros((300, 64), np.float32)}, r"lm_head\.weight is unknown"),
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing"),
        ({"score.weight": np.zeros((1, 65), np.float32)}, r"score\.weight has shape \[1, 65\]\n  wanted: \[1, 64\]"),
        ({"score.weight": np.zeros(64, np.float32)}, r"score\.weight has shape \[64\]\n  wanted: \[1, 64\]"),
        ({"score.weight": np.zeros((1, 64), np.int8)}, r"score\.weight is stored as I8"),
    ],
)
def test_every_tensor_has_its_place_and_every_place_its_tensor(
    tmp_path: Path, changes: dict[str, np.ndarray | None], words: str
) -> None:
    with pytest.raises(WeightsError, match=words):
        load_value_model(spoiled(tmp_path / "m", **changes))
