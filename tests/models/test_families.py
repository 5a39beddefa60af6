"""Configs and tensor names of each family, and tiny random models of each against transformers' logits."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from covey.errors import WeightsError
from covey.models import families, weights
from covey.models.config import RopeScaling
from covey.models.decoder import Decoder

Logits = Callable[[Decoder, np.ndarray], np.ndarray]
GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
MODELS = json.loads((GOLDEN / "families.json").read_text())
LLAMA = MODELS["llama"]["config"]


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of `make_golden.weight`, which follow from the tensor's name."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return ((1 + 0.3 * draw) if "norm" in name else 0.3 * draw).astype(np.float32)


def write_folder(folder: Path, name: str) -> Path:
    """The checkpoint of a golden model, with the smallest tokenizer there can be."""
    described = MODELS[name]
    (folder / "config.json").write_text(json.dumps(described["config"]))
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    tensors = {key: weight(key, tuple(shape)) for key, shape in described["shapes"].items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_are_those_of_transformers(name: str, scan: bool, tmp_path: Path, logits: Logits):
    golden = np.load(GOLDEN / "families.npz")
    loaded = weights.load(write_folder(tmp_path, name), scan_layers=scan)
    ours = logits(loaded.model, golden["tokens"])
    assert np.abs(golden[name]).max() > 1  # the model is not one that says nothing
    np.testing.assert_allclose(ours, golden[name], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_place_and_every_place_a_tensor(name: str):
    config = families.read_config(MODELS[name]["config"])
    table = families.names(config)
    assert sorted(table.values()) == sorted(MODELS[name]["shapes"])
    assert sorted(table) == sorted(families.parameters(config))


# --- configs, old and new


def llama(**fields: object) -> dict:
    old = {key: value for key, value in LLAMA.items() if key not in ("rope_parameters", "rope_theta", "head_dim")}
    return {key: value for key, value in (old | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_theta": 123_000.0}, 123_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 456_000.0}}, 456_000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 456_000.0}, "rope_theta": 1.0}, 456_000.0),
        ({"rope_scaling": None, "rope_theta": 1e6}, 1e6),
        ({}, 10_000.0),
    ],
)
def test_the_rotary_base_is_the_checkpoints(fields: dict, theta: float):
    assert families.read_config(llama(**fields)).rope_theta == theta


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({}, None),
    ],
)
def test_rotary_scaling_in_every_spelling(fields: dict, scaling: RopeScaling | None):
    assert families.read_config(llama(**fields)).rope_scaling == scaling


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": "qwen4"}, "did you mean 'qwen"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "on part of each head"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"attention_bias": True}, "attention_bias: True is not supported for llama"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(fields: dict, says: str):
    with pytest.raises(WeightsError, match=says):
        families.read_config(llama(**fields))


def test_defaults_of_older_configs():
    config = families.read_config(llama(num_key_value_heads=None, tie_word_embeddings=None))
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 8, False)


def test_qwen2_windows_start_at_max_window_layers():
    qwen = {k: v for k, v in MODELS["qwen2"]["config"].items() if k != "layer_types"} | {"sliding_window": 9}
    assert families.read_config(qwen | {"use_sliding_window": False}).windows is None
    windowed = qwen | {"use_sliding_window": True, "max_window_layers": 1}
    assert families.read_config(windowed).windows == (None, 9)


def test_gemma_windows_of_configs_without_layer_types():
    for name, windows in (("gemma2", (5, None, 5, None)), ("gemma3_text", (5, 5, 5, 5))):
        config = {key: value for key, value in MODELS[name]["config"].items() if key != "layer_types"}
        assert families.read_config(config).windows == windows


def test_orient_is_its_own_inverse():
    kernel = np.arange(6).reshape(2, 3)
    for path in ("layers.0.mlp.up_proj.kernel", "embed.embedding"):
        np.testing.assert_array_equal(families.orient(path, families.orient(path, kernel)), kernel)
