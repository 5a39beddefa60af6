"""PEFT adapters read back in: the function that PEFT computes with them, or an error that names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from covey.errors import WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.models.lora import has_lora, projections
from covey.parallel import flatten
from covey_formats.peft_reader import adapter_digest, load_adapter

Logits = Callable[..., np.ndarray]
GOLDEN = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "peft-llama"


@pytest.fixture
def base(golden_model: Callable[[str], weights.LoadedModel[Decoder]]) -> Decoder:
    return golden_model("llama").model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of PEFT's folder, to spoil."""
    return shutil.copytree(GOLDEN, tmp_path / "adapter")


def config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    held = safetensors.numpy.load_file(file)
    change(held)
    safetensors.numpy.save_file(held, file)


@pytest.mark.slow
def test_logits_are_those_of_peft_on_transformers(base: Decoder, logits: Logits) -> None:
    """Rank-stabilised: the scale is alpha / sqrt(rank)."""
    golden = np.load(GOLDEN / "logits.npz")
    adapted = load_adapter(base, GOLDEN)
    np.testing.assert_allclose(logits(adapted, golden["tokens"]), golden["logits"], atol=1e-4)
    assert np.abs(logits(base, golden["tokens"]) - golden["logits"]).max() > 0.1
    assert not has_lora(base)


def test_the_scale_is_alpha_over_rank_unless_rank_stabilised(base: Decoder, folder: Path) -> None:
    scale = lambda: projections(load_adapter(base, folder))["layers.0.attn.q_proj"].lora.scale  # noqa: E731
    assert scale() == pytest.approx(5 / 3**0.5)
    config(folder, use_rslora=False, lora_alpha=7)
    assert scale() == pytest.approx(7 / 3)


def test_only_what_the_tensors_name_is_adapted_and_the_base_is_shared(base: Decoder) -> None:
    adapted = load_adapter(base, GOLDEN)
    found = {path for path, linear in projections(adapted).items() if linear.lora is not None}
    assert found == {f"layers.{i}.{name}" for i in (0, 1) for name in ("attn.q_proj", "mlp.down_proj")}
    ours, theirs = (flatten(weights.nnx.state(model)) for model in (base, adapted))
    assert all(theirs[name].unsafe_buffer_pointer() == x.unsafe_buffer_pointer() for name, x in ours.items())


def test_other_float_types_are_read_as_float32(base: Decoder, folder: Path, logits: Logits) -> None:
    tensors(folder, lambda held: held.update({name: x.astype(np.float16) for name, x in held.items()}))
    adapted = load_adapter(base, folder)
    assert projections(adapted)["layers.0.attn.q_proj"].lora.a.dtype == np.float32
    golden = np.load(GOLDEN / "logits.npz")
    np.testing.assert_allclose(logits(adapted, golden["tokens"]), golden["logits"], atol=0.1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"use_dora": True}, "use_dora: True"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: .*lm_head"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern: .*q_proj"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: "),
        ({"something_of_next_year": {"a": 1}}, "something_of_next_year: "),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(base: Decoder, folder: Path, fields: dict, says: str) -> None:
    config(folder, **fields)
    with pytest.raises(WeightsError, match=says):
        load_adapter(base, folder)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop(f"{FIRST}.lora_B.weight"), r"layers\.0\.attn\.q_proj has no lora_B"),
        (lambda held: held.update({f"{FIRST}.lora_magnitude_vector": held[f"{FIRST}.lora_A.weight"]}), "magnitude"),
        (lambda held: held.update({FIRST.replace("0", "9") + ".lora_A.weight": np.ones(1)}), r"layers\.9.* nothing"),
        (lambda held: held.update({f"{FIRST}.lora_A.weight": np.ones((4, 32), np.float32)}), r"shapes \(4, 32\)"),
        (lambda held: held.update({f"{FIRST}.lora_B.weight": np.ones((3, 32), np.float32)}), r"and \(3, 32\)"),
        (lambda held: held.clear(), "holds no adapter"),
    ],
)
def test_tensors_that_do_not_fit_are_named(base: Decoder, folder: Path, change: Any, says: str) -> None:
    tensors(folder, change)
    with pytest.raises(WeightsError, match=says):
        load_adapter(base, folder)


@pytest.mark.parametrize(
    ("name", "says"), [("adapter_model.safetensors", "save it again with safetensors"), ("adapter_config.json", "read")]
)
def test_a_missing_file_is_named(base: Decoder, folder: Path, name: str, says: str) -> None:
    (folder / name).unlink()
    with pytest.raises(WeightsError, match=says):
        load_adapter(base, folder)


def test_a_file_cut_short_is_never_used(base: Decoder, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        load_adapter(base, folder)


def test_the_digest_is_that_of_both_files(folder: Path) -> None:
    first = adapter_digest(folder)
    assert first == adapter_digest(GOLDEN)
    config(folder, lora_alpha=6)
    assert adapter_digest(folder) != first
