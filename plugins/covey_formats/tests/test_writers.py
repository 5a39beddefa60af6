"""PEFT adapters and GGUF files: what is written is the model, in formats that our own loaders read; nothing is ever
replaced.

That transformers and PEFT read them too is shown live, by tests/parity/live_round_trip.py.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from covey.errors import CoveyError, WeightsError
from covey.models import families
from covey.models.config import RopeScaling
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.models.loading.hf_config import MODULE
from covey.models.lora import merge_lora, projections
from covey.text.tokenizer import Tokenizer
from covey_formats.gguf_tokenizer import PRE_TOKENIZERS
from covey_formats.gguf_writer import write_gguf
from covey_formats.hf import write_hf
from covey_formats.peft import write_peft
from covey_formats.peft_reader import load_adapter
from plugins.covey_formats.tests.test_hf import GOLDEN, MODELS, TINY, Golden, adapted, arrays, equal, written

TEXTS = json.loads((GOLDEN.parent / "tricky.json").read_text())


@pytest.fixture(scope="module")
def tiny() -> weights.LoadedModel[Decoder]:
    return weights.load(TINY)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place to write to; whatever the test does, nothing half written is left beside it."""
    (tmp_path / "room").mkdir()
    yield tmp_path / "room" / "out"
    assert [path.name for path in (tmp_path / "room").iterdir() if path.name != "out"] == []


def test_what_is_there_stays(tiny: weights.LoadedModel, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(CoveyError, match="something is already here"):
        write_gguf(tiny.model, tiny.tokenizer, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    shutil.rmtree(out)
    out.write_text("a file")
    with pytest.raises(CoveyError, match="something is already here"):
        write_peft(adapted(tiny.model), 300, out, base="x")
    assert out.read_text() == "a file"


# --- PEFT


def test_adapters_are_read_back_as_they_are(tiny: weights.LoadedModel, out: Path) -> None:
    model = adapted(tiny.model, dropout=0.1)
    apart = write_peft(model, 300, out, base="org/name", card="# Adapter\n")
    assert apart.max_difference < 1e-5
    equal(load_adapter(tiny.model, out), model)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["lora_dropout"]) == (3, 5.0, False, 0.1)
    assert config["base_model_name_or_path"] == "org/name"
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == names
    held = written(out)
    a, b = (held[f"base_model.model.model.layers.1.mlp.down_proj.lora_{side}.weight"] for side in "AB")
    assert (a.shape, b.shape) == ((3, 96), (64, 3))
    assert len(held) == 2 * 2 * 7


def test_adapters_on_some_layers_are_named_one_by_one(tiny: weights.LoadedModel, out: Path) -> None:
    model = adapted(tiny.model, targets=(r"layers\.1\..*q_proj", r"layers\.0\..*up_proj"))
    write_peft(model, 300, out, base="x")
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert targets == r"model\.layers\.0\.mlp\.up_proj|model\.layers\.1\.self_attn\.q_proj"
    equal(load_adapter(tiny.model, out), model)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [("qkv_proj", "gate_up_proj"), ("k_proj", "up_proj")])
def test_adapters_of_projections_in_one_module_are_one_adapter(
    golden_model: Golden, out: Path, targets: tuple[str, ...]
) -> None:
    base = golden_model("phi3").model
    model = adapted(base, targets=targets)
    assert write_peft(model, 64, out, base="x").max_difference < 1e-5
    config, held = json.loads((out / "adapter_config.json").read_text()), written(out)
    parts = "qkv_proj" in targets
    module = "model.layers.1.self_attn.qkv_proj"
    assert config.get("rank_pattern", {}).get(module) == (9 if parts else None)
    assert config.get("alpha_pattern", {}).get(module) == (15.0 if parts else None)
    b = held[f"base_model.model.{module}.lora_B.weight"]
    assert b.shape == (64, 9 if parts else 3)
    assert not b[48:].any() or parts  # v has no adapter of its own
    assert config["target_modules"] == ["gate_up_proj", "qkv_proj"]
    again = projections(load_adapter(base, out))["layers.1.attn.k_proj"].lora
    assert again is not None
    assert again.b.shape == (b.shape[1], 16)


@pytest.mark.slow
def test_adapters_of_the_text_part_have_the_names_of_the_whole(golden_model: Golden, out: Path) -> None:
    base = golden_model("gemma3").model
    model = adapted(base)
    write_peft(model, 64, out, base="x", inside=MODULE)
    assert all(name.startswith(f"base_model.model.{MODULE}.layers.") for name in written(out))
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert re.fullmatch(targets, f"{MODULE}.layers.1.self_attn.q_proj")
    assert not re.fullmatch(targets, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    equal(load_adapter(base, out), model)


def test_a_model_without_adapters_has_none_to_export(tiny: weights.LoadedModel, out: Path) -> None:
    with pytest.raises(WeightsError, match=r"no LoRA adapters(?s:.*)--format hf"):
        write_peft(tiny.model, 300, out, base="x")


# --- GGUF


def with_tokenizer(name: str) -> tuple[Decoder, Tokenizer]:
    """A golden model with room for the tiny Llama's tokens, and those, cut as the family cuts them."""
    config, tokenizer = families.read_config(MODELS[name]["config"]), Tokenizer.from_folder(TINY)
    tokenizer.inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(PRE_TOKENIZERS[SPLIT[name]].steps())
    if PRE_TOKENIZERS[SPLIT[name]].nfc:
        tokenizer.inner.normalizer = tokenizers.normalizers.NFC()
    return Decoder(dataclasses.replace(config, vocab_size=310), rngs=nnx.Rngs(3)), tokenizer


SPLIT = {"llama": "gpt-2", "linear-rope": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.slow
def test_a_gguf_file_holds_the_model_and_its_tokens(name: str, out: Path) -> None:
    base, tokenizer = with_tokenizer(name)
    model = adapted(base) if name == "llama" else base
    assert write_gguf(model, tokenizer, out).max_difference < 1e-4
    again = weights.load(out / "model.gguf")
    equal(again.model, merge_lora(model))
    assert again.config == model.config
    assert again.tokenizer.stop_ids == tokenizer.stop_ids
    for text in TEXTS:
        assert again.tokenizer.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.slow
def test_a_token_beyond_the_embedding_has_no_place_in_a_gguf_file(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"image_token": "<image>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = weights.load(folder)
    assert loaded.tokenizer.inner.token_to_id("<image>") == 300 == loaded.config.vocab_size
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "out")
    again = weights.load(tmp_path / "out" / "model.gguf").tokenizer
    assert again.encode("ab <|im_end|>").tolist() == loaded.tokenizer.encode("ab <|im_end|>").tolist()
    assert (again.vocab_size, again.inner.token_to_id("<image>")) == (300, None)
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "hf", source=folder)
    write_hf(loaded.model, loaded.tokenizer, tmp_path / "anew")
    for out in ("hf", "anew"):
        assert Tokenizer.from_folder(tmp_path / out).encode("<image>").tolist() == [300]


def test_llama3_scaling_goes_through_gguf(tiny: weights.LoadedModel, out: Path) -> None:
    scaling = RopeScaling("llama3", 32.0)
    config = dataclasses.replace(tiny.config, rope_theta=500_000.0, rope_scaling=scaling)
    write_gguf(Decoder(config, rngs=nnx.Rngs(0)), tiny.tokenizer, out)
    assert weights.load(out / "model.gguf").config == config


def test_matrices_in_bfloat16_beside_norms_in_float32(tiny: weights.LoadedModel, out: Path) -> None:
    import gguf

    write_gguf(tiny.model, tiny.tokenizer, out, dtype="bfloat16")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"BF16"}
    rounded = {name: x.astype(jnp.bfloat16) if x.ndim > 1 else x for name, x in arrays(tiny.model).items()}
    for name, x in arrays(weights.load(out / "model.gguf").model).items():
        np.testing.assert_array_equal(x, rounded[name].astype(np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"family": "mistral"}, "family 'mistral' are not supported"),
        ({"family": "nanochat"}, "family 'nanochat' are not supported"),
        ({"windows": (5, None)}, "the architecture of this model is not one"),
        ({"qk_norm": True}, "the architecture of this model is not one"),
    ],
)
def test_what_gguf_cannot_say_is_refused(change: dict, says: str, tiny: weights.LoadedModel, out: Path) -> None:
    model = Decoder(dataclasses.replace(tiny.config, **change), rngs=nnx.Rngs(0))
    with pytest.raises(WeightsError, match=says):
        write_gguf(model, tiny.tokenizer, out)
    assert not out.exists()


@pytest.mark.slow
def test_a_tokenizer_that_gguf_has_no_name_for_is_refused(tiny: weights.LoadedModel, out: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    strange = Tokenizer.from_folder(TINY)
    strange.inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for tokenizer in (Tokenizer(words, eos_id=1), strange):
        with pytest.raises(WeightsError, match="no name that we know"):
            write_gguf(tiny.model, tokenizer, out)
