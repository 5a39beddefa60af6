"""Qwen3.5 against transformers: five small configs with random weights, whole texts, padded on the left, greedy."""

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec

from covey.config.schema import LoRAConfig, RolloutConfig
from covey.errors import WeightsError
from covey.models import families
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.layer_stack import stack_layers, unstack_layers
from covey.models.layers import LoRA
from covey.models.loading.hf_config import text_config, text_name
from covey.models.loading.weights import FolderCheckpoint, fill_parameters, make_put
from covey.models.lora import with_lora
from covey.parallel import flatten, make_mesh
from covey.parallel.arrays import build_for_devices, place_model
from covey.sampling.engine import Engine, Request, generate
from covey.train.optimizers import param_group
from covey_families.qwen3_5 import TEXT_PART
from covey_formats.hf import _named_tensors
from covey_quantised.kernels import QuantisationFormat

HERE = Path(__file__).parent
MODELS = json.loads((HERE / "golden.json").read_text())
GOLDEN = np.load(HERE / "golden.npz")
TOKENS = np.random.RandomState(1).randint(0, 61, (1, 80))
weights_of = runpy.run_path(str(HERE / "make_golden.py"))["weights_of"]


class WithoutTokenizer(FolderCheckpoint):
    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._read_config(str(folder / "config.json"))


def save(folder: Path, number: int, config: dict[str, Any] | None = None, prefix: str = "") -> WithoutTokenizer:
    model = MODELS[number]
    (folder / "config.json").write_text(json.dumps(config or model["config"]))
    tensors = weights_of(model["shapes"])
    tensors = {name.replace("model.", prefix, 1) if prefix else name: x for name, x in tensors.items()}
    if prefix:
        tensors |= {name: np.zeros((2, 2), np.float32) for name in ("model.visual.patch_embed.weight", "mtp.fc.weight")}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return WithoutTokenizer(folder)


@cache
def load(number: int) -> Decoder:
    config = families.read_config(MODELS[number]["config"])
    named, tensors = families.tensor_names(config), weights_of(MODELS[number]["shapes"])
    rows = families.match_tensors(config, named, MODELS[number]["shapes"], lambda name: False, "")
    parts = {path: tensors[name][rows[path] or slice(None)] for path, name in named.items()}
    abstract = abstract_decoder(config)
    converted = ((path, families.convert_layout(path, x)) for path, x in parts.items())
    return fill_parameters(abstract, converted, make_put(abstract, None))


def groups_of(model: Decoder) -> Any:
    """The group of each parameter in an optimizer, which stacks of layers do not change."""
    return jax.tree_util.tree_map_with_path(param_group, nnx.state(model))


def logits(model: Decoder, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    positions = np.maximum(np.cumsum(valid, 1) - 1, 0)
    run = jax.jit(lambda t, v, p: model.logits(model(t, p, causal_attention(v, p))[0]))
    return np.asarray(run(tokens, valid, positions))[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_logits_and_greedy_text_are_those_of_transformers(number: int) -> None:
    """Logits of transformers in float64. Over the whole texts ours in float32 are 3.3e-5 away at most, and 0.8e-6 to
    3.2e-6 in the root mean square of a config; those of transformers in float32 6.4e-5 at most, and 0.9e-6 to 4.3e-6,
    in each config more than ours.
    """
    model, valid = load(number), np.ones((1, 80), bool)
    assert GOLDEN[f"{number}/logits"].std() > 0.5
    np.testing.assert_allclose(logits(model, TOKENS, valid), GOLDEN[f"{number}/logits"], atol=5e-5)
    valid = np.arange(24)[None] >= 9
    np.testing.assert_allclose(logits(model, TOKENS[:, :24], valid)[9:], GOLDEN[f"{number}/padded"], atol=5e-5)
    config = RolloutConfig(max_new_tokens=20, decode_chunk=6, slots=2, temperature=0.0)
    ((one,),) = generate(Engine(model, (), config), [Request(TOKENS[0, :20].astype(np.int32))])
    assert one.tokens.tolist() == GOLDEN[f"{number}/greedy"].tolist()


@pytest.mark.parametrize("number", range(5))
def test_a_config_is_read_as_it_was_written_and_names_every_tensor(number: int) -> None:
    config = families.read_config(MODELS[number]["config"])
    assert families.read_config(families.write_config(config)) == config
    assert set(families.tensor_names(config).values()) == set(MODELS[number]["shapes"])


def test_the_whole_model_loads_as_its_text_part_without_images_and_mtp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = MODELS[1]["config"]
    whole = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text, "vision_config": {}}
    assert text_config(whole, "")["model_type"] == "qwen3_5_text"
    assert text_name("mtp.fc.weight", TEXT_PART.others) is None
    checkpoint = save(tmp_path, 1, whole, "model.language_model.")
    loaded = dict(checkpoint.tensors())
    assert "2 tensors are not of the text model, and are left out" in caplog.text
    assert loaded.keys() == set(families.parameter_paths(checkpoint.config))
    name = "layers.0.delta.k_proj.kernel"
    np.testing.assert_array_equal(loaded[name], flatten(nnx.state(load(1)))[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5"),
        ({"linear_key_head_dim": -1}, "linear_key_head_dim is -1"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim is '4'"),
        ({"layer_types": ["mamba"] * 4}, "mamba"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, "partial_rotary_factor is 0.01"),
    ],
)
def test_what_no_model_can_have_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        save(tmp_path, 0, MODELS[0]["config"] | change)


def test_the_kind_of_layer_is_refused_for_other_families(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="layer_types is"):
        save(tmp_path, 0, MODELS[0]["config"] | {"model_type": "qwen3"})


def test_an_unknown_family_is_told_the_names_that_files_have() -> None:
    """Published files name the whole model, `gemma4`; text models by themselves have names of their own."""
    with pytest.raises(WeightsError) as error:
        families.read_config({"model_type": "gpt_oss"})
    listed = error.value.want.removeprefix("one of: ").split(", ")
    whole = ["gemma3", "gemma4", "gemma4_unified", "qwen3_5"]
    assert {*whole, *(f"{name}_text" for name in whole), "llama"} <= set(listed)
    assert listed == sorted(listed)


@pytest.mark.slow
def test_adapters_and_stacks_and_quantised_bases_have_the_projections_of_both_kinds() -> None:
    model = with_lora(load(0), LoRAConfig(rank=2))
    names = {path.split(".", 2)[2] for path in flatten(nnx.state(model)) if path.endswith("lora.a")}
    assert {f"delta.{name}_proj.lora.a" for name in "qkvzbao"} | {"attn.q_proj.lora.a"} <= names
    stacked = stack_layers(build_for_devices(nnx.merge(*nnx.split(load(0))), "tpu"))
    assert stacked.stacked == (3, 1)
    groups = [jax.tree.leaves_with_path(groups_of(x)) for x in (stacked, load(0))]
    assert len(groups[1]) > len(groups[0])
    assert {(str(path[-2:]), group) for path, group in groups[0]} == {(str(p[-2:]), group) for p, group in groups[1]}
    for one, other in zip(*(jax.tree.leaves(nnx.state(x)) for x in (unstack_layers(stacked), load(0))), strict=True):
        np.testing.assert_array_equal(one, other)
    config, fmt = families.read_config(MODELS[0]["config"]), QuantisationFormat("int8", 64)
    abstract = abstract_decoder(config, fmt)
    tensors = ((path, np.asarray(x)) for path, x in flatten(nnx.state(load(0))).items())
    base = fill_parameters(abstract, fmt.tensors(tensors), make_put(abstract, None))
    got, want = (logits(x, TOKENS[:, :24], np.ones((1, 24), bool)) for x in (base, load(0)))
    assert 0 < np.abs(got - want).mean() < 0.2 * want.std()
    assert jnp.isfinite(got).all()


@pytest.mark.slow
def test_an_export_has_the_tensors_of_the_checkpoint_and_an_adapter_comes_back(tmp_path: Path) -> None:
    """q, k and v of a delta net are one tensor there, and one adapted module, as in PEFT."""
    pytest.importorskip("covey_formats")
    from covey_formats.peft import write_peft

    written, want = dict(_named_tensors(load(0), "float32")), weights_of(MODELS[0]["shapes"])
    assert written.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(written[name], x)
    rng, model = np.random.default_rng(0), with_lora(load(0), LoRAConfig(rank=2))
    for path, lora in ((path, x) for path, x in nnx.iter_graph(model) if isinstance(x, LoRA)):
        assert path
        lora.b[...] = jnp.asarray(rng.normal(size=lora.b.shape, scale=0.1), jnp.float32)
    difference = write_peft(model, 61, tmp_path / "out", base="base")
    assert difference.max_difference < 1e-3
    held = safetensors.numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_A.weight" in held


@pytest.mark.slow
def test_on_a_mesh_the_sampler_draws_the_same_tokens() -> None:
    config = RolloutConfig(max_new_tokens=12, decode_chunk=6, slots=4, temperature=0.0)
    request = Request(TOKENS[0, :20].astype(np.int32), 4)
    models = [load(0), place_model(load(0), make_mesh((2, 2)))]
    assert flatten(nnx.state(models[1]))["layers.0.delta.z_proj.kernel"].sharding.spec == PartitionSpec("fsdp", "tp")
    one, other = ([c.tokens.tolist() for c in generate(Engine(m, (), config), [request])[0]] for m in models)
    assert one == other


def test_the_plan_counts_states_and_no_keys_of_layers_that_have_none() -> None:
    """3 layers of 4: for each of 4 slots 3 tokens of 64 channels, and 4 heads of 8 · 8 numbers, in float32."""
    estimate = pytest.importorskip("covey_plan.estimate")
    config = families.read_config(MODELS[0]["config"])
    assert estimate._state_bytes(config, 4) == 3 * 4 * (3 * 64 + 4 * 8 * 8) * 4
