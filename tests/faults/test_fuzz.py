"""Inputs that nobody meant, thrown at everything that reads: it takes them, or refuses them with an error of ours. No
other exception, and no input that takes seconds.

COVEY_FUZZ=20000 throws so many at each of the eight readers, and as many at all rewards together; 100 without it.
"""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from covey.config import recipe
from covey.config.base import leaves
from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import sources
from covey.data.rows import as_rows
from covey.display import printable
from covey.errors import CoveyError
from covey.models.loading import config_fields, weights
from covey.monitor.formats import SampleLine
from covey.monitor.progress import Progress
from covey.monitor.writer import encode_row, sample_rows
from covey.rewards.registry import REGISTRY, resolve
from covey.rewards.scoring import score
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason, Group

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
COUNT = int(os.environ.get("COVEY_FUZZ", "100"))
fuzzed = partial(
    settings,
    max_examples=COUNT,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

pytestmark = pytest.mark.slow

LEAVES = {kind: sorted(leaves(kind)) for kind in (Recipe, SFTRecipe)}
KINDS = st.sampled_from([Recipe, SFTRecipe])
ODD = st.sampled_from(
    ["", "0", "-1", "1e400", "1e-400", ".nan", ".inf", "null", "~", "[", "{}", "[[1]]", "a: b", "9" * 5000]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NUMBERS = st.from_regex(r"[-+$]?[0-9,]{0,30}(\.[0-9]{0,20})?(e[0-9]{1,6})?%?", fullmatch=True)


def taken_or_refused(call: Callable[[], Any]) -> CoveyError | None:
    """The error of ours that it was refused with."""
    try:
        call()
    except CoveyError as error:
        printable(str(error)).encode()
        return error
    return None


# --- recipes and the command line


def set_at(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            return
    tree[last] = value


@st.composite
def recipes(draw: st.DrawFn) -> tuple[type, str]:
    """A kind, and text that begins as a recipe of it: real names, any values, and then some characters changed."""
    kind, tree = draw(KINDS), dict[str, Any]()
    for path in draw(st.lists(st.sampled_from(LEAVES[kind]), max_size=6)):
        set_at(tree, path, draw(JSON))
    text = yaml.safe_dump(tree, allow_unicode=True)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + draw(st.text(max_size=4) | st.sampled_from(["\n", ": ", "\t", "&a ", "*a", "!!int ", "- ", "{"]))
            + text[at + draw(st.integers(0, 3)) :]
        )
    return kind, text


@fuzzed()
@given(recipes() | st.tuples(KINDS, st.text() | ODD))
def test_recipes(drawn: tuple[Any, str]) -> None:
    kind, text = drawn
    taken_or_refused(lambda: recipe.to_yaml(recipe.parse(text, (), "r.yaml", kind)))


@st.composite
def words(draw: st.DrawFn) -> tuple[type, list[str]]:
    kind, found = draw(KINDS), list[str]()
    for path in draw(st.lists(st.sampled_from(LEAVES[kind]) | st.text(max_size=12), max_size=5)):
        name = path.replace("_", "-") if draw(st.booleans()) else path
        name = name.rpartition(".")[2] if draw(st.booleans()) else name
        value = draw(ODD | st.text(max_size=12) | JSON.map(str))
        found += draw(
            st.sampled_from([[f"--{name}", value], [f"--{name}={value}"], [f"{name}={value}"], [value], ["--"]])
        )
    return kind, found


@fuzzed()
@given(words())
def test_overrides(drawn: tuple[Any, list[str]]) -> None:
    kind, tokens = drawn
    base = "rewards: [first_letter]\n" if kind is Recipe else "method: sft\ndata: {task: arithmetic}\n"
    taken_or_refused(lambda: recipe.parse(base, tokens, "r.yaml", kind))


# --- data


def row_of(value: Any) -> bytes:
    return json.dumps(value).encode()


MESSAGES = st.lists(st.fixed_dictionaries({}, optional={"role": SCALARS, "content": JSON, "name": SCALARS}), max_size=3)
ROWS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("prompt", "completion", "messages", "text", "answer", ""), JSON | MESSAGES)
)
LINES = st.lists(ROWS.map(row_of) | JSON.map(row_of) | st.binary(max_size=30) | st.just(b"[" * 100_000), max_size=6)


@fuzzed()
@given(LINES, st.booleans())
def test_rows_of_a_file(tmp_path: Path, lines: list[bytes], supervised: bool) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines))
    if supervised:
        taken_or_refused(lambda: sources.load_data(SFTDataConfig(task="jsonl", path=str(path))))
    else:
        taken_or_refused(
            lambda: as_rows(sources.load_data(DataConfig(task="jsonl", path=str(path), system="Be.")).train)
        )


# --- weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file, which is overwritten again and again."""
    found = tmp_path_factory.mktemp("fuzz") / "model"
    shutil.copytree(TINY, found, ignore=shutil.ignore_patterns("model*", "*.npz"))
    return found


def whole() -> tuple[dict[str, Any], bytes]:
    """Header and data of the tiny checkpoint, as one file would have them."""
    import safetensors.numpy

    tensors = {k: v for f in sorted(TINY.glob("*.safetensors")) for k, v in safetensors.numpy.load_file(f).items()}
    raw = safetensors.numpy.save(tensors)
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


HEADER, DATA = whole()
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F8_E4M3", "BOOL", "X"]) | JSON,
        "shape": st.lists(st.integers(-2, 2**63), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**64), min_size=1, max_size=3) | JSON,
    },
)


@st.composite
def checkpoints(draw: st.DrawFn) -> bytes:
    """A file whose header is wrong in some entries, or in its bytes, or in its length."""
    header = dict(HEADER)
    for name in draw(st.lists(st.sampled_from(sorted(HEADER)) | st.text(max_size=8), max_size=3)):
        base = header.get(name, {})
        header[name] = base | draw(FIELDS) if draw(st.booleans()) and isinstance(base, dict) else draw(FIELDS | JSON)
        if draw(st.booleans()):
            header.pop(name)
    text = bytearray(json.dumps(header).encode())
    for _ in range(draw(st.integers(0, 2))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    size = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    return size.to_bytes(8, "little") + bytes(text) + DATA[: draw(st.just(len(DATA)) | st.integers(0, len(DATA)))]


@fuzzed()
@given(checkpoints() | st.binary(max_size=64))
def test_headers_of_safetensors(folder: Path, file: bytes) -> None:
    (folder / "model.safetensors").write_bytes(file)
    taken_or_refused(lambda: [tensor.shape for _, tensor in weights.FolderCheckpoint(folder).tensors()])


@fuzzed()
@given(st.dictionaries(st.sampled_from(sorted(HEADER)), st.text(max_size=12) | JSON, max_size=4) | JSON)
def test_indices(folder: Path, entries: Any) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": entries}))
    (folder / "model.safetensors").unlink(missing_ok=True)  # it would be read in place of the index
    try:
        taken_or_refused(lambda: list(weights.FolderCheckpoint(folder).tensors()))
    finally:
        index.unlink()


@st.composite
def ggufs(draw: st.DrawFn) -> bytes:
    """A small GGUF file with some bytes overwritten, most of them where lengths stand, and maybe cut short."""
    data = bytearray(small_gguf())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(4, 400) | st.integers(4, len(data) - 8))
        piece = draw(st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")) | st.binary(max_size=8))
        data[at : at + len(piece)] = piece
    return bytes(data[: draw(st.just(len(data)) | st.integers(0, len(data)))])


@cache
def small_gguf() -> bytes:
    """A model of one layer whose widths are 2, and its tokenizer."""
    import gguf

    tokens = [*"abcdef", "ab", "<|im_end|>"]
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "m.gguf", "llama")
        for key in ("block_count", "context_length", "attention.head_count"):
            writer.add_uint32(f"llama.{key}", 1)
        for key in ("embedding_length", "feed_forward_length"):
            writer.add_uint32(f"llama.{key}", 2)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 7 + [3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(7)
        writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), np.float32))
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(f"{name}.weight", np.zeros(2, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.0.{name}.weight", np.zeros((2, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "m.gguf").read_bytes()


@fuzzed()
@given(ggufs() | st.binary(max_size=64).map(lambda rest: b"GGUF\x03\0\0\0" + rest))
def test_ggufs(folder: Path, file: bytes) -> None:
    pytest.importorskip("covey_formats")
    (folder / "m.gguf").write_bytes(file)
    taken_or_refused(lambda: weights.open_checkpoint(folder / "m.gguf").tokenizer.encode("abc"))


CONFIG = json.loads((TINY / "config.json").read_text())
ROPE = st.fixed_dictionaries({}, optional=dict.fromkeys(("rope_type", "factor", "rope_theta", "full_attention"), JSON))
WRONG = JSON | ROPE | st.integers(-1, 2**40) | st.lists(st.sampled_from(["full_attention", "sliding_attention"]))


@fuzzed()
@given(
    st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "nanochat"]),
    st.dictionaries(st.sampled_from(sorted({*config_fields.CHECKS, *CONFIG} - {"model_type"})), WRONG, max_size=3),
)
def test_configs(folder: Path, family: str, fields: dict[str, Any]) -> None:
    described = folder / "config.json"
    described.write_text(json.dumps(CONFIG | {"model_type": family} | fields))
    try:
        taken_or_refused(lambda: weights.FolderCheckpoint(whole_folder(folder)).config)
    finally:
        described.write_text(json.dumps(CONFIG))


def whole_folder(folder: Path) -> Path:
    """The folder with one whole file of weights."""
    header = json.dumps(HEADER).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + DATA)
    return folder


TOKENIZER = json.loads((TINY / "tokenizer.json").read_text())
PARTS = st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding", "model"])
TYPES = ("Precompiled", "Prepend", "FixedLength", "Split", "Metaspace", "TemplateProcessing", "Strip", "BPE", "Unigram")
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES)},
    optional={
        "precompiled_charsmap": st.text("AB/=", max_size=12),
        "length": st.integers(-1, 3),
        "prepend": st.text(max_size=2),
        "replacement": st.text(max_size=2),
        "prepend_scheme": st.sampled_from(["always", "never", "first"]),
        "pattern": st.fixed_dictionaries({"String": st.text(max_size=2)}),
        "behavior": st.sampled_from(["Isolated", "Removed"]),
        "invert": st.booleans(),
        "split": st.booleans(),
        "content": st.text(max_size=2),
        "start": st.integers(0, 5),
        "stop": st.integers(0, 5),
        "vocab": st.dictionaries(st.text("abé", max_size=3), st.integers(0, 5), max_size=5),
        "merges": st.lists(st.text("abé", max_size=2).map(lambda text: [text, "a"]), max_size=2),
        "dropout": st.floats(0, 1),
        "continuing_subword_prefix": st.text("é#", max_size=3),
        "single": st.just([{"SpecialToken": {"id": "x", "type_id": 0}}]),
        "pair": st.just([]),
        "special_tokens": st.just({}),
    },
)


@fuzzed()
@given(st.dictionaries(PARTS, PART | JSON, max_size=2))
def test_tokenizers(folder: Path, parts: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | parts))
    try:
        taken_or_refused(lambda: Tokenizer.from_folder(folder).encode("ab <|im_end|> \u4e16"))
    finally:
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))


# --- completions


PIECES = st.sampled_from(
    ["<answer>", "</answer>", "<reasoning>", "</reasoning>", "####", " ", "\n", "\\boxed{", "}", "<<", ">>", "=",
     "\x1b[2J", "\ud800", "٣", "½", "1,000", "-", "+", "$", "∞", "NaN", "\x00", "[bold]", "<script>", "|"]
)  # fmt: skip
TEXTS = st.lists(PIECES | NUMBERS | st.text(max_size=10), max_size=12).map("".join)
COLUMNS = st.fixed_dictionaries(dict.fromkeys(("answer", "question", "topic", "letter", "solution"), TEXTS | JSON))


def columns_of(name: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """A value for each column that the reward asks for."""
    known = {"prompts", "completions", "prompt_ids", "completion_ids", "columns", "kwargs"}
    return {
        column: drawn.get(column, drawn["answer"])
        for column in signature(REWARDS_BY_NAME[name]).parameters
        if column not in known
    }


REWARDS_BY_NAME = {name: resolve(name) for name in sorted(REGISTRY.names())}
GROUPS = st.lists(TEXTS, min_size=1, max_size=3)


def group_of(asked: str, texts: list[str], columns: dict[str, Any]) -> Group:
    none = np.zeros(1)
    completions = tuple(Completion(none, none, none, FinishReason.STOP, text) for text in texts)
    return Group(asked or "?", np.array([1]), completions, columns)


@pytest.mark.parametrize("name", REWARDS_BY_NAME)
@fuzzed(max_examples=max(20, COUNT // len(REWARDS_BY_NAME)))
@given(GROUPS, COLUMNS)
def test_completions_through_a_reward(name: str, texts: list[str], drawn: Any) -> None:
    def scored() -> None:
        (group,) = score([group_of("?", texts, columns_of(name, drawn))], name)
        assert group.rewards is not None
        assert not np.isinf(group.rewards).any()

    refused = taken_or_refused(scored)
    assert refused is None or " raised " not in refused.what, "an exception inside one of our own reward functions"


@fuzzed(max_examples=max(20, COUNT // len(REWARDS_BY_NAME)))
@given(TEXTS, GROUPS, COLUMNS)
def test_completions_into_reports(asked: str, texts: list[str], drawn: Any) -> None:
    group, out = group_of(asked, texts, drawn), io.StringIO()
    rows = [json.loads(encode_row(row)) for row in sample_rows(1, [group])]
    assert [row["text"] for row in rows] == [completion.text for completion in group.completions]
    with Progress(1, Console(file=out, width=300)) as progress:
        progress.step({"step": 1, "reward": 0.0}, [SampleLine(str(group.prompt), text, 0.0) for text in texts])
        progress.message(group.completions[0].text)
    assert "\x1b" not in out.getvalue()
    assert "\ud800" not in out.getvalue()
