"""GGUF files written here in the way of llama.cpp, from checkpoints whose logits and tokens are known."""

import json
import math
import re
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import pre_tokenizers

from covey.errors import WeightsError
from covey.models.config import RopeScaling
from covey.models.loading import weights
from covey.registry import install_command
from covey.text.tokenizer import Tokenizer
from covey_formats import gguf as gguf_file
from covey_formats.gguf import GGUFCheckpoint
from covey_formats.gguf_reader import open_reader
from covey_formats.gguf_tokenizer import PRE_TOKENIZERS

GOLDEN = Path(__file__).parents[3] / "tests" / "parity" / "golden"
TINY = GOLDEN / "tiny-llama"
TEXTS = [case["text"] for case in json.loads((GOLDEN / "smollm2.json").read_text())["strings"]]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@cache
def their_name(name: str, arch: str) -> str:
    """The name by the table of llama.cpp's converter; Llama's for an architecture that is not read."""
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text in gguf_file.ARCHITECTURES}
    stem, _, kind = name.rpartition(".")
    found = gguf.get_tensor_name_map(kinds.get(arch, gguf.MODEL_ARCH.LLAMA), 4).get_name(stem)
    assert found, name
    return f"{found}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows, by index: row i of the first half, then row i of the second."""
    width = len(rows) // heads
    order = [h * width + half * width // 2 + i for h in range(heads) for i in range(width // 2) for half in (0, 1)]
    return rows[order]


def write(
    path: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    meta: dict | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
    without: tuple[str, ...] = (),
    extra: str = "",
) -> Path:
    """A GGUF file of a Hugging Face checkpoint; `meta` overrides metadata, `without` leaves keys or tensors out, and
    `extra` names one more tensor.
    """
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    ropes = config.get("rope_parameters") or config
    theta = ropes.get("full_attention", ropes)["rope_theta"]
    fields = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv,
        f"{arch}.rope.freq_base": float(theta),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        **tokenizer_fields(),
        **({f"{arch}.attention.key_length": config["head_dim"]} if config.get("head_dim") else {}),
        **(meta or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if key not in without:
            add(writer, key, value)
    for name, tensor in tensors.items():
        stored = tensor
        if arch in ("llama", "smollm3") and (".q_proj" in name or ".k_proj" in name):
            stored = interleave(tensor, heads if "q_proj" in name else kv)
        if arch.startswith("gemma") and "norm" in name:
            stored = tensor + 1
        if their_name(name, arch) not in without:
            kind = quantise if quantise is not None and stored.ndim == 2 else None
            data = np.ascontiguousarray(stored)
            writer.add_tensor(
                their_name(name, arch), data if kind is None else gguf.quants.quantize(data, kind), raw_dtype=kind
            )
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def tokenizer_fields() -> dict:
    saved = json.loads((TINY / "tokenizer.json").read_text())
    control = {token["id"] for token in saved["added_tokens"] if token["special"]}
    vocab = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [CONTROL if i in control else NORMAL for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (TINY / "chat_template.jinja").read_text(),
    }


def tiny() -> tuple[dict, dict[str, np.ndarray]]:
    tensors = [safetensors.numpy.load_file(file) for file in TINY.glob("*.safetensors")]
    return json.loads((TINY / "config.json").read_text()), {k: v for part in tensors for k, v in part.items()}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny Llama, with changes, and returns the file."""
    return lambda **changes: write(tmp_path / "tiny.gguf", *tiny(), **changes)


# --- numbers


def test_logits_are_those_of_transformers(make, logits):
    """Wrong permutation of queries and keys, a constant RoPE base, a transposed kernel: each would show here."""
    golden = np.load(TINY / "logits.npz")
    loaded = weights.load(make())
    assert loaded.config == weights.open_checkpoint(TINY).config
    np.testing.assert_allclose(logits(loaded.model, golden["tokens"]), golden["logits"], atol=1e-4)


PLAIN_INSTALL = """
import re, sys, tomllib
from importlib import metadata
wanted = tomllib.loads(open(sys.argv[2]).read())["project"]["dependencies"]
plain, modules = set(), metadata.packages_distributions()
while wanted:
    name = re.split(r"[^\\w.-]", wanted.pop())[0].lower().replace("_", "-")
    if name not in plain:
        plain.add(name)
        try:
            wanted += [line for line in metadata.requires(name) or () if "extra ==" not in line]
        except metadata.PackageNotFoundError:  # for another machine or Python
            pass

class Absent:
    def find_spec(self, name, path=None, target=None):
        owners = {one.lower().replace("_", "-") for one in modules.get(name.partition(".")[0], ())} - {"covey"}
        if owners and not owners & plain:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from covey.models.loading import weights
print(weights.load(sys.argv[1]).model.config.num_layers)
"""
"""Loads a model where nothing but the dependencies is installed."""


@pytest.mark.slow
def test_a_plain_install_reads_the_default_models_kind_of_file(make):
    project = Path(__file__).parents[3] / "pyproject.toml"
    done = subprocess.run([sys.executable, "-c", PLAIN_INSTALL, make(), project], capture_output=True, text=True)
    assert (done.stderr[-500:], done.stdout) == ("", "2\n")


GEMMA2 = {
    "gemma2.attention.sliding_window": 5,
    "gemma2.attn_logit_softcapping": 5.0,
    "gemma2.final_logit_softcapping": 8.0,
}
GEMMA3 = {"gemma3.attention.sliding_window": 5, "gemma3.attention.sliding_window_pattern": 2}


@pytest.mark.parametrize(
    ("name", "arch", "meta"),
    [
        ("llama", "llama", {}),
        ("linear-rope", "llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("mistral-wide", "llama", {}),
        ("phi3", "phi3", {"phi3.attention.sliding_window": 5}),
        ("phi3-wide", "phi3", {"phi3.attention.sliding_window": 0}),
        ("olmo2", "olmo2", {}),
        ("smollm3", "smollm3", {}),
        ("gemma2", "gemma2", GEMMA2),
        ("gemma3_text", "gemma3", GEMMA3),
        ("gemma3-linear", "gemma3", GEMMA3 | {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}),
    ],
)
def test_other_architectures_are_those_of_their_folders(name: str, arch: str, meta: dict, tmp_path: Path):
    """Every weight and the config, bit for bit; tests/models/test_families.py compares folders with transformers."""
    described = json.loads((GOLDEN / "families.json").read_text())[name]
    config = {key: value for key, value in described["config"].items() if key != "no_rope_layers"} | {"vocab_size": 300}
    if arch.startswith("gemma"):  # GGUF has no key for another scale of queries or a scaled local RoPE
        config["query_pre_attn_scalar"] = config["head_dim"]
        config["rope_parameters"].get("sliding_attention", {})["rope_type"] = "default"
    tensors = {key: draw(key, shape) for key, shape in described["shapes"].items()}
    folder = shutil.copytree(TINY, tmp_path / "folder", ignore=shutil.ignore_patterns("*safetensors*"))
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    made = write(tmp_path / "m.gguf", config, tensors, arch=arch, meta=meta)
    from_file, from_folder = GGUFCheckpoint(made), weights.open_checkpoint(folder)
    assert from_file.config == replace(from_folder.config, family="gemma3_text" if arch == "gemma3" else arch)
    found, expected = dict(from_file.tensors()), dict(from_folder.tensors())
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        apart = 2**-23 if arch.startswith("gemma") and path.endswith("norm.scale") else 0  # 1 was added there
        np.testing.assert_allclose(tensor, expected[path], rtol=0, atol=apart, err_msg=path)


@pytest.mark.parametrize(
    ("arch", "changes", "told"),
    [
        ("olmo2", {"meta": {"olmo2.attention.sliding_window": 64}}, "sliding windows are not supported for olmo2"),
        ("phi3", {"extra": "rope_factors_long.weight"}, "RoPE scaling 'longrope' is not supported"),
        ("phi3", {"cut": "self_attn.qkv_proj"}, r"attn_qkv.weight has shape \[60, 32\]\n  wanted: \[64, 32\]"),
        ("gemma3n", {}, "GGUF architecture 'gemma3n' is not supported"),
        ("gemma4", {}, r"GGUF architecture 'gemma4' is not supported(.|\n)*hf:google/gemma-4-E4B-it"),
        ("qwen35", {}, r"GGUF architecture 'qwen35' is not supported(.|\n)*hf:Qwen/Qwen3.5-4B"),
    ],
)
def test_what_newer_families_cannot_have_is_refused(arch: str, changes: dict, told: str, tmp_path: Path):
    described = json.loads((GOLDEN / "families.json").read_text())[arch if arch in ("olmo2", "phi3") else "llama"]
    tensors = {key: draw(key, shape) for key, shape in described["shapes"].items()}
    cut = changes.get("cut", "nothing")
    tensors = {key: value[:60] if cut in key else value for key, value in tensors.items()}
    config, meta = described["config"] | {"vocab_size": 300}, changes.get("meta")
    path = write(tmp_path / "m.gguf", config, tensors, arch=arch, meta=meta, extra=changes.get("extra", ""))
    with pytest.raises(WeightsError, match=told):
        list(GGUFCheckpoint(path).tensors())


def draw(name: str, shape: list[int]) -> np.ndarray:
    """`make_golden.weight`, with the vocabulary padded to 300 rows."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    values = ((1 + 0.3 * values) if "norm" in name else 0.3 * values).astype(np.float32)
    return (
        np.pad(values, ((0, 300 - len(values)), (0, 0)))
        if name in ("model.embed_tokens.weight", "lm_head.weight")
        else values
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_tensors_are_restored(make, kind: str):
    kind = gguf.GGMLQuantizationType[kind]
    _, tensors = tiny()
    restored = dict(GGUFCheckpoint(make(quantise=kind)).tensors())
    kernel = tensors["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(kernel, kind), kind)
    np.testing.assert_array_equal(restored["layers.1.mlp.up_proj.kernel"], expected.T)
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(query, kind), kind)  # rows are quantised one by one
    np.testing.assert_array_equal(restored["layers.1.attn.q_proj.kernel"], expected.T)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_told_from_its_divisors(make, tmp_path: Path, factor: float):
    config, tensors = tiny()
    config["rope_theta"], config["rope_parameters"] = 500_000.0, None
    tensors["rope_freqs.weight"] = llama3_divisors(500_000.0, 16, factor)
    found = GGUFCheckpoint(write(tmp_path / "m.gguf", config, tensors)).config
    assert found.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    tensors["rope_freqs.weight"] = np.linspace(1, factor, 8, dtype=np.float32)
    with pytest.raises(WeightsError, match="not Llama 3's scaling"):
        GGUFCheckpoint(write(tmp_path / "m.gguf", config, tensors))


def llama3_divisors(theta: float, width: int, factor: float) -> np.ndarray:
    """As the converter of llama.cpp computes them: by wavelength, in three pieces."""
    out = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (i / width)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


# --- tokenizer


def test_tokens_and_chats_equal_those_of_the_folder(make):
    ours, theirs = GGUFCheckpoint(make()).tokenizer, Tokenizer.from_folder(TINY)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode(text).tolist(), text
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.render(chat) == theirs.render(chat)
    assert (ours.stop_ids, ours.eos_id, ours.bos_id, ours.add_bos) == (theirs.stop_ids, theirs.eos_id, 0, False)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_words_are_cut_as_the_published_patterns_do(name: str):
    for text, pieces in json.loads((GOLDEN / "splits.json").read_text())[name]:
        cut = pre_tokenizers.Sequence(PRE_TOKENIZERS[name].steps()).pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in cut] == pieces, text


def test_a_padding_token_that_is_none_is_not_used(make):
    """As llama.cpp, which takes its default for such an id."""
    assert GGUFCheckpoint(make(meta={"tokenizer.ggml.padding_token_id": 300})).tokenizer.pad_id < 300


def test_every_stop_token_counts(make):
    fields = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 7}
    tokenizer = GGUFCheckpoint(make(meta=fields)).tokenizer
    assert tokenizer.eos_id == 5
    assert tokenizer.stop_ids == (0, 2, 5, 6, 7)  # 0 and 2 are <|endoftext|> and <|im_end|>


def test_an_end_token_that_is_ordinary_text_does_not_stop(make):
    """A vocabulary may hold the text of an end token as a plain or user-defined token."""
    types = tokenizer_fields()["tokenizer.ggml.token_type"]
    types[0], types[2] = NORMAL, USER_DEFINED
    fields = {"tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 9}
    tokenizer = GGUFCheckpoint(make(meta=fields)).tokenizer
    assert tokenizer.stop_ids == (9,)
    assert tokenizer.encode("<|im_end|>").tolist() == [2]  # user-defined tokens are still matched in text


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos_as_the_file_says_or_its_tokenizer_implies(make, fields: dict, wants: bool):
    tokens = GGUFCheckpoint(make(meta=fields)).tokenizer.encode_prompt("ab")
    assert (tokens[0] == 0) == wants


@pytest.mark.parametrize("order", gguf.GGUFEndian)
def test_a_list_of_texts_is_read_as_the_package_reads_it(tmp_path: Path, order: gguf.GGUFEndian):
    path, words = tmp_path / "words.gguf", ["a", "", "schön", "end"]
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    writer.add_array("words", words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    field, theirs = open_reader(path).fields["words"], gguf.GGUFReader(path).fields["words"]
    assert field.contents() == theirs.contents() == words
    assert field.types == theirs.types
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="claims a string of 3 bytes"):
        open_reader(path)


# --- spoiled files


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_cut_short_is_never_used(make, keep: float):
    path = make()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(WeightsError, match="not a whole GGUF file" if keep else "the file is empty"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' is not supported"),
        (
            {"arch": "qwen22"},
            r"'qwen22' is not supported\n  wanted: one of: llama, qwen2, qwen3, phi3, olmo2, smollm3, gemma2, gemma3$",
        ),
        ({"meta": {"split.count": 3}}, r"one of 3 parts of a model\n.*\n  fix: llama-gguf-split --merge"),
        ({"meta": {"general.type": "adapter"}}, "this GGUF file is of type 'adapter'"),
        ({"meta": {"tokenizer.ggml.pre": "tekken"}}, "pre-tokenizer 'tekken' is unknown"),
        ({"meta": {"tokenizer.ggml.model": "t5"}}, "tokenizer 't5' is not supported"),
        ({"meta": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"meta": {"llama.rope.dimension_count": 8}}, "part of each head"),
        ({"meta": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn'"),
        ({"without": ("llama.block_count",)}, "no 'llama.block_count'"),
        ({"without": ("tokenizer.ggml.merges",)}, "no 'tokenizer.ggml.merges'"),
        ({"without": ("token_embd.weight",)}, r"token_embd\.weight"),
        ({"meta": {"llama.embedding_length": 32}}, "has shape"),
        ({"without": ("blk.1.ffn_up.weight",)}, r"blk\.1\.ffn_up\.weight is missing"),
        ({"meta": {"llama.block_count": 1}}, r"blk\.1\.attn_k\.weight.* unknown to this family"),
    ],
)
def test_what_is_wrong_is_named(make, changes: dict, says: str):
    with pytest.raises(WeightsError, match=says):
        weights.load(make(**changes))


# --- hostile files


def header(tensors: int, fields: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + b"".join(rest)


def entry(key: str, kind: int, *value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + b"".join(value)


TEXT, ARRAY, U8, U64 = 8, 9, 0, 10


def array_of(kind: int, length: int) -> bytes:
    return struct.pack("<IQ", kind, length)


def claimed_tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    "data",
    [
        header(0, 10**6, entry("general.architecture", TEXT, struct.pack("<Q", 5), b"llama")),
        header(10**6, 0),
        header(0, 2**63),
        header(0, 1, entry("a", ARRAY, array_of(U8, 2**60))),
        header(0, 1, entry("a", ARRAY, array_of(U64, 2**61 + 1))),
        header(0, 1, entry("a", ARRAY, array_of(TEXT, 10**9))),
        header(0, 1, entry("a", ARRAY, array_of(ARRAY, 10**9))),
        header(0, 1, entry("a", ARRAY, array_of(ARRAY, 1) * 5000)),
        header(0, 1, entry("a", TEXT, struct.pack("<Q", 2**64 - 1))),
        header(0, 1, struct.pack("<Q", 2**62)),
        header(1, 0, struct.pack("<Q", 1), b"t", struct.pack("<I", 2**31)),
        header(1, 0, claimed_tensor(2**40)),
        header(1, 0, claimed_tensor(2**32, 2**32)),
        header(1, 0, claimed_tensor(4, offset=2**63)),
        header(1, 0, claimed_tensor(4, kind=999)),
    ],
)
def test_a_claimed_length_is_held_against_the_bytes_that_are_left(data: bytes, tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(WeightsError, match="not a whole GGUF file"):
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert time.process_time() - start < 2
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_an_array_of_numbers_costs_what_it_holds(tmp_path: Path):
    data = header(0, 1, entry("a", ARRAY, array_of(U8, 4_000_000)), bytes(4_000_000))
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(WeightsError, match=r"no 'general\.architecture'"):
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**31),
        ("llama.block_count", 2**31 - 1),
        ("llama.block_count", 0),
        ("llama.block_count", "two"),
        ("llama.block_count", [2, 2]),
        ("llama.context_length", 512.5),
        ("llama.embedding_length", "64"),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", [16]),
        ("llama.attention.layer_norm_rms_epsilon", math.nan),
        ("llama.attention.layer_norm_rms_epsilon", "1e-5"),
        ("llama.rope.freq_base", -1.0),
        ("llama.rope.scaling.type", 1),
        ("llama.expert_count", "none"),
        ("tokenizer.ggml.model", 1),
        ("tokenizer.ggml.pre", [1]),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.token_type", ["a"]),
        ("tokenizer.ggml.merges", [1]),
        ("tokenizer.ggml.eos_token_id", "</s>"),
        ("tokenizer.ggml.eos_token_id", 300),
        ("tokenizer.ggml.bos_token_id", True),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("tokenizer.chat_template", 7),
    ],
)
def test_metadata_of_the_wrong_type_or_size_are_named(make, key: str, value: object):
    with pytest.raises(WeightsError, match=re.escape(repr(key))):
        GGUFCheckpoint(make(meta={key: value}))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokenizer.ggml.merges": ["ab"]}, "a merge is not of two tokens"),
        ({"tokenizer.ggml.merges": ["never there"]}, "not a tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "300 tokens have 1 types"),
    ],
)
def test_a_vocabulary_that_does_not_hold_together_is_refused(make, fields: dict, told: str):
    with pytest.raises(WeightsError, match=told):
        GGUFCheckpoint(make(meta=fields))


def test_text_that_is_not_utf8_is_named(make):
    path = make()
    path.write_bytes(path.read_bytes().replace(b"<|im_start|>", b"<|im_\xffta" + b"rt|>"))
    with pytest.raises(WeightsError, match=r"'tokenizer\.(ggml\.tokens|chat_template)' cannot be read"):
        GGUFCheckpoint(path)


def test_divisors_of_another_length_are_refused(tmp_path: Path):
    config, tensors = tiny()
    for divisors in (np.ones(5, np.float32), np.ones((2, 4), np.float32)):
        tensors["rope_freqs.weight"] = divisors
        with pytest.raises(WeightsError, match=r"rope_freqs\.weight has shape"):
            GGUFCheckpoint(write(tmp_path / "m.gguf", config, tensors))


def test_the_missing_package_is_named(make, monkeypatch: pytest.MonkeyPatch):
    path = make()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=f"the package gguf: .*\\n  fix: {re.escape(install_command())}"):
        GGUFCheckpoint(path)
