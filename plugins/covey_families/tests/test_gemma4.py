"""Gemma 4 against transformers on tiny random models: plain, padded, packed in rows, sampled with a cache."""

import json
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

from covey.config.schema import LoRAConfig, RolloutConfig
from covey.errors import WeightsError
from covey.losses.logprobs import token_logps
from covey.models import families
from covey.models.attention import causal_attention
from covey.models.config import RopeScaling
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.layer_stack import stack_layers, unstack_layers
from covey.models.loading import weights
from covey.models.loading.hf_config import text_name, text_part
from covey.models.loading.weights import fill_parameters, make_put
from covey.models.lora import projections, split_trainable, with_lora
from covey.packing.rows import Rows, pack, split_micro_batches, unpack
from covey.parallel import flatten, make_mesh, shardings
from covey.parallel.arrays import place_model, put_rows
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.model_runner import Programs
from covey.types import Completion, FinishReason, Group
from covey_formats.hf import write_hf

Logits = Callable[..., np.ndarray]
HERE = Path(__file__).parent
MODELS = json.loads((HERE / "golden" / "gemma4.json").read_text())
INPUTS = json.loads((HERE.parents[2] / "tests" / "parity" / "golden" / "inputs.json").read_text())
LOCAL, GLOBAL = "sliding_attention", "full_attention"
TIME = 40


def weight(name: str, draw: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of `weight_of` in make_gemma4_golden.py."""
    drawn = 0.3 * np.random.RandomState(zlib.crc32(f"{name}#{draw}".encode())).standard_normal(shape)
    return (1 + drawn if "norm" in name or name.endswith("layer_scalar") else drawn).astype(np.float32)


@cache
def golden(name: str) -> Decoder:
    config = families.read_config(MODELS[name]["config"])
    drawn = {key: weight(key, MODELS[name]["draw"], shape) for key, shape in MODELS[name]["shapes"].items()}
    names = families.tensor_names(config)
    tensors = {path: families.convert_layout(path, drawn[theirs]) for path, theirs in names.items()}
    model = abstract_decoder(config)
    return fill_parameters(model, tensors.items(), make_put(model, None))


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(HERE / "golden" / "gemma4.npz") as file:
        return dict(file)


@pytest.mark.slow
@pytest.mark.parametrize("looped", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, looped: bool, logits: Logits) -> None:
    """Whole texts and texts padded on the left are one batch; training loops over layers, decoding does not."""
    wanted = arrays()
    tokens, valid = np.zeros((5, TIME), np.int32), np.ones((5, TIME), bool)
    tokens[:2], tokens[2:, -24:] = wanted["tokens"], INPUTS["padded"]
    for row, length in enumerate(INPUTS["lengths"], start=2):
        valid[row, : TIME - length] = False
    ours = logits(golden(name), tokens, valid, looped=looped)
    assert wanted[name].std() > 0.5
    np.testing.assert_allclose(ours[:2], wanted[name], atol=5e-5)
    np.testing.assert_allclose(ours[2:][valid[2:]], wanted[f"{name}/padded"], atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_samples_packed_in_rows_are_those_of_transformers_alone(name: str) -> None:
    rows, sizes = packed()
    graph, params = nnx.split(golden(name))
    scores = jax.jit(lambda params, rows: token_logps(graph, params, rows, 1.0).logps)(params, rows)
    ours = np.concatenate(unpack(rows, np.asarray(scores), sizes))
    np.testing.assert_allclose(ours, arrays()[f"{name}/samples"], atol=5e-5)


def packed() -> tuple:
    none = np.zeros(0, np.float32)
    groups = [
        Group(
            "",
            np.array(group["prompt"], np.int32),
            tuple(
                Completion(np.array(tokens, np.int32), none, none, FinishReason.LENGTH)
                for tokens in group["completions"]
            ),
        )
        for group in INPUTS["groups"]
    ]
    return pack(groups, row_length=64), [len(c.tokens) for group in groups for c in group.completions]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_samples_are_those_of_transformers(name: str) -> None:
    """With a cache for each layer but those that use the keys of another, which have none."""
    model, prompt = golden(name), np.array(INPUTS["groups"][0]["prompt"], np.int32)
    config = RolloutConfig(max_new_tokens=12, decode_chunk=6, slots=2, seed=5, temperature=0.0)
    engine = Engine(model, (), config)
    (completions,) = generate(engine, [Request(prompt, 2, 3, step=4)])
    assert [completion.tokens.tolist() for completion in completions] == [arrays()[f"{name}/greedy"].tolist()] * 2
    c = model.config
    blocks = engine.programs.empty_cache(engine.runner.params, 2, 0, 128)
    assert [bool(layer) for layer in blocks] == [c.kv_source(layer) is None for layer in range(c.num_layers)]
    shapes = [(layer[0].keys.shape[1], layer[0].keys.shape[2]) for layer in blocks if layer]
    assert shapes == [c.heads(layer) for layer in range(c.num_layers) if c.kv_source(layer) is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e4b", "31b"])
def test_a_mesh_samples_what_one_device_does(name: str) -> None:
    """Two devices divide the heads; the global layers of one model have one key head, which both devices have."""
    config = RolloutConfig(max_new_tokens=12, decode_chunk=6, slots=4, temperature=0.0)
    engine = Engine(place_model(golden(name), make_mesh((2, 2))), (), config)
    (drawn,) = generate(engine, [Request(np.array(INPUTS["groups"][0]["prompt"], np.int32), 4)])
    assert [completion.tokens.tolist() for completion in drawn] == [arrays()[f"{name}/greedy"].tolist()] * 4


@pytest.mark.slow
def test_a_mesh_has_the_log_probs_and_gradients_of_one_device() -> None:
    graph, *parts = split_trainable(golden("31b"))
    _, *placed = split_trainable(place_model(golden("31b"), make_mesh((2, 2))))
    (rows,) = split_micro_batches(packed()[0], 4)

    @jax.jit
    def gradient(trained: nnx.State, rest: nnx.State, rows: Rows) -> tuple:
        def loss(trained: nnx.State) -> tuple[jax.Array, jax.Array]:
            logps = token_logps(graph, nnx.merge_state(trained, rest), rows, 1.0).logps
            return logps.sum(), logps

        return jax.grad(loss, has_aux=True)(trained)

    (wanted, ours), (got, theirs) = (gradient(*model, put_rows(rows, model)) for model in (parts, placed))
    np.testing.assert_allclose(theirs, ours, atol=2e-5)
    found = flatten(got)
    for path, want in flatten(wanted).items():
        np.testing.assert_allclose(found[path], want, atol=2e-5 * max(np.abs(want).max(), 1), err_msg=path)


@pytest.mark.slow
def test_a_mesh_of_accelerators_appends_what_one_cpu_does() -> None:
    """One block for a layer, whose heads and their width differ between layers."""

    def appended(platform: str) -> list[np.ndarray]:
        model = nnx.merge(*nnx.split(golden("31b")))
        model.platform = platform
        graph, params = nnx.split(model)
        params = jax.device_put(params, shardings(params, make_mesh((2, 2)))) if platform == "tpu" else params
        programs, tokens = Programs(graph, ()), np.arange(32, dtype=np.int32).reshape(2, 16)
        kept = programs.empty_cache(params, 4, 0, 128)
        rows = (np.array(x, np.int32) for x in ([3, 1], tokens, [0, 112], [16, 9]))
        kept = programs.append(params, kept, *rows, np.int32(2))
        time_last = [block.map(lambda x, axis: x if axis == 3 else x.swapaxes(2, 3)) for (block,) in kept]
        return [np.asarray(x) for x in jax.tree.leaves(time_last)]

    for got, want in zip(appended("tpu"), appended("cpu"), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert np.unique(np.argwhere(got)[:, 0]).tolist() == [1, 3]


@pytest.mark.slow
def test_gradients_of_shared_keys_are_those_of_layers_spelt_out() -> None:
    """Keys that a layer hands on get a gradient from each layer that uses them; scales of layers get none."""
    model = golden("e2b")
    graph, trained, rest = split_trainable(model)
    assert {path.rsplit(".", 1)[-1] for path in flatten(rest)} == {"scalar"}
    tokens = jax.numpy.asarray(arrays()["tokens"][:, :12])
    positions = jax.numpy.broadcast_to(jax.numpy.arange(12), tokens.shape)

    @jax.jit
    def gradients(trained: nnx.State) -> list[nnx.State]:
        def loss(trained: nnx.State, cache: list | None) -> jax.Array:
            model = nnx.merge(graph, trained, rest)
            attend = causal_attention(jax.numpy.ones(tokens.shape, bool), positions)
            return jax.numpy.square(model(tokens, positions, attend, cache)[0]).mean()

        return [jax.grad(loss)(trained, cache) for cache in (None, [None] * model.config.num_layers)]

    looped, spelt_out = map(flatten, gradients(trained))
    for path, gradient in spelt_out.items():
        assert np.abs(gradient).max() > 0, path
        np.testing.assert_allclose(looped[path], gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=path)


@pytest.mark.slow
def test_stacks_of_layers_compute_what_the_list_does_and_become_it_again() -> None:
    model, other = golden("31b"), nnx.merge(*nnx.split(golden("31b")))
    for _, node in nnx.iter_graph(other):
        if isinstance(node, nnx.Module) and hasattr(node, "platform"):
            node.platform = "cuda"
    stacked = stack_layers(other)
    assert stacked.stacked == (5, 2)
    tokens = jax.numpy.asarray(arrays()["tokens"][:, :12])
    positions = jax.numpy.broadcast_to(jax.numpy.arange(12), tokens.shape)
    attend = causal_attention(jax.numpy.ones(tokens.shape, bool), positions)
    ours, theirs = (one(tokens, positions, attend)[0] for one in (stacked, model))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    equal(unstack_layers(stacked), model)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_place_and_a_written_config_means_what_was_read(name: str) -> None:
    config, shapes = families.read_config(MODELS[name]["config"]), MODELS[name]["shapes"]
    assert set(families.tensor_names(config).values()) == set(shapes)
    families.match_tensors(config, families.tensor_names(config), shapes, lambda _: False, "")
    there = {path: x.shape for path, x in flatten(nnx.state(golden(name))).items()}
    assert {path: families.parameter_shape(config, path) for path in families.parameter_paths(config)} == there
    assert families.read_config(json.loads(json.dumps(families.write_config(config)))) == config


def test_adapters_fit_every_projection_under_its_name_in_transformers() -> None:
    """None lies on keys and values of layers that use those of another."""
    model = with_lora(golden("e2b"), LoRAConfig(rank=2))
    adapted = {path for path, linear in projections(model).items() if linear.lora is not None}
    names = families.projection_names(model.config)
    assert {names[path] for path in adapted} == {
        name.removesuffix(".weight") for name, shape in MODELS["e2b"]["shapes"].items()
        if len(shape) == 2 and "embed_tokens" not in name
    }  # fmt: skip
    assert "model.per_layer_model_projection" in names.values()
    assert "model.layers.6.self_attn.k_proj" not in names.values()


PUBLISHED = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": [LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL] * 7,
        "final_logit_softcapping": 30.0,
        "num_experts": None,
    },
}


def test_the_form_of_published_models_is_read() -> None:
    """Heads of layers without a window have fields of their own, and files have keys that nothing computes with."""
    config = families.read_config(PUBLISHED)
    assert (config.heads(0), config.heads(4)) == ((1, 256), (1, 512))
    assert config.rope_scaling == RopeScaling("proportional", 1.0, fraction=0.25)
    assert config.kv_sources == (None,) * 15 + (13, 13, 13, 13, 14) * 4
    assert [config.parts(layer)[1] for layer in (14, 15)] == ["mlp", "gemma4_wide_mlp"]
    family = families.find_family("gemma4_text")
    assert family is not None
    unused = family.unused(config)
    assert len(unused) == 60
    assert "model.layers.15.self_attn.k_norm.weight" in unused
    part = text_part(PUBLISHED)
    assert part is not None
    named = text_name("model.language_model.layers.0.layer_scalar", part.others)
    assert named == "model.layers.0.layer_scalar"
    assert text_name("model.audio_tower.layers.0.weight", part.others) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"enable_moe_block": True}, r"Gemma 4 with experts \(26B-A4B\) is not supported"),
        ({"num_experts": 128}, r"Gemma 4 with experts \(26B-A4B\) is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported for gemma4_text"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35 of 35 layers"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31 of 35 layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1\n  wanted: a whole number from 0"),
        ({"global_head_dim": 7}, "1 key heads of 7 numbers do not fit 8 heads"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config is not supported"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "heads differ between layers of one kind"),
        ({"hidden_size_per_layer_input": 1.5}, "hidden_size_per_layer_input is 1.5"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
        ({"rope_parameters": {GLOBAL: {"rope_type": "yarn"}}}, "RoPE scaling 'yarn' under full_attention"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(fields: dict, says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        families.read_config(PUBLISHED | {"text_config": PUBLISHED["text_config"] | fields})


def write_folder(folder: Path, name: str, *, whole: bool) -> Path:
    """Write a model as a folder; as a whole one with a part for images, and keys that nothing computes with."""
    described = MODELS[name]
    drawn = {key: weight(key, described["draw"], shape) for key, shape in described["shapes"].items()}
    config = described["config"]
    if whole:
        drawn = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in drawn.items()}
        drawn |= {"model.vision_tower.weight": np.ones(3, np.float32)}
        drawn |= {"model.language_model.layers.9.self_attn.k_proj.weight": np.ones((16, 32), np.float32)}
        config = {"model_type": "gemma4", "text_config": config, "tie_word_embeddings": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    safetensors.numpy.save_file(drawn, folder / "model.safetensors")
    return folder


def test_a_whole_model_loads_as_its_text_part_and_what_is_exported_is_read_back(tmp_path: Path) -> None:
    """Tensors of other parts, and keys of layers that use those of another, are left out."""
    loaded = weights.load(write_folder(tmp_path / "whole", "e2b", whole=True))
    equal(loaded.model, golden("e2b"))
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "out", source=tmp_path / "whole")
    again = weights.load(tmp_path / "out")
    equal(again.model, loaded.model)
    assert again.config == loaded.config
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma4_text", ["Gemma4ForCausalLM"])
    assert not written.keys() & {"rope_scaling", "rope_theta"}  # with them transformers fails or forgets the base


def equal(one: Decoder, other: Decoder) -> None:
    ours, theirs = flatten(nnx.state(one)), flatten(nnx.state(other))
    assert ours.keys() == theirs.keys()
    for path, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[path], err_msg=path)
