"""Texts of tokens that are parts of characters, or whose text depends on their place."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.text.tokenizer import token_texts


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
