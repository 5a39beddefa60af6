"""What a tokenizer's own rules make of a text is bounded before the text is given to them."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, reject
from hypothesis import strategies as st

from covey.errors import WeightsError
from covey.text.tokenizer import Tokenizer
from covey.text.tokenizers_library import MAX_BYTES, Growth, growth_of, library_errors

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def saved_with(folder: Path, **parts: Any) -> Path:
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    saved = json.loads((folder / "tokenizer.json").read_text()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


def sequence(kind: str, *rules: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(rules)}


def test_a_text_that_grows_tenfold_again_and_again_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(saved_with(tmp_path, normalizer=sequence("normalizers", *[TENFOLD] * 7)))
    with pytest.raises(
        WeightsError, match=r"rules may turn a text of 1,000 bytes into 10,000,000,000\n.*at most 134,217,728"
    ):
        tokenizer.encode("a" * 1000)
    with pytest.raises(WeightsError, match="the tokenizer's rules may turn"):
        tokenizer.encode_prompt([{"role": "user", "content": "a" * 1000}])


def test_added_tokens_are_not_made_longer_while_the_file_is_read(tmp_path: Path) -> None:
    added = json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]
    added += [dict(added[0], id=9999, content="a" * 50, normalized=True, special=False)]
    rules = sequence("normalizers", *[TENFOLD] * 9)
    with pytest.raises(WeightsError, match=r"tokenizer\.json: the tokenizer's rules may turn a text of"):
        Tokenizer.from_folder(saved_with(tmp_path, normalizer=rules, added_tokens=added))


def test_an_empty_text_does_not_grow_either(tmp_path: Path) -> None:
    rules = sequence("normalizers", {"type": "Prepend", "prepend": "aaaa"}, *[TENFOLD] * 9)
    with pytest.raises(WeightsError, match="may turn a text of 0 bytes into"):
        Tokenizer.from_folder(saved_with(tmp_path, normalizer=rules, added_tokens=[]))


def test_decoded_tokens_do_not_grow_without_a_bound(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(saved_with(tmp_path, decoder=sequence("decoders", *[TENFOLD] * 9)))
    assert tokenizer.decode([]) == ""
    with pytest.raises(WeightsError, match="the tokenizer's rules may turn"):
        tokenizer.decode(tokenizer.encode("banana"))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, Growth()),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, Growth(3)),
        ({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, Growth(1)),
        ({"type": "Replace", "pattern": {"String": "``"}, "content": "'''"}, Growth(2)),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, Growth(2, 1)),
        ({"type": "Prepend", "prepend": "▁"}, Growth(1, 3)),
        ({"type": "NFKC"}, Growth(11)),
        ({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\2\0\0\0xxabc\0d\0").decode()}, Growth(3)),
        (sequence("normalizers", {"type": "Prepend", "prepend": "aa"}, TENFOLD, TENFOLD), Growth(100, 200)),
        (sequence("decoders", TENFOLD, {"type": "Fuse"}), Growth(10)),
        ({"type": "Sequence", "normalizers": 3}, Growth()),
        ({"type": "Replace", "pattern": 3, "content": 4}, Growth()),
    ],
)
def test_each_rule_has_its_growth(rule: Any, expected: Growth) -> None:
    assert growth_of(rule) == expected


RULES = st.one_of(
    st.sampled_from(["NFC", "NFD", "NFKC", "NFKD", "Lowercase"]).map(lambda kind: {"type": kind}),
    st.text("aé▁ﷺ", max_size=4).map(lambda text: {"type": "Prepend", "prepend": text}),
    st.builds(
        lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content},
        st.one_of(
            st.text("aé▁ ", min_size=1, max_size=2).map(lambda text: {"String": text}),
            st.sampled_from(["a+", ".", "[aé]", " {2,}"]).map(lambda text: {"Regex": text}),
        ),
        st.text("aé▁ ", max_size=4),
    ),
)


@given(st.lists(RULES, max_size=4), st.text("aé▁ ﷺİ雪", max_size=8))
def test_no_text_is_longer_than_the_bound(rules: list[Any], text: str) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    saved = json.loads(tokenizer.to_str()) | {"normalizer": sequence("normalizers", *rules)}
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(saved)).normalizer
    bound = growth_of(json.loads(normalizer.__getstate__())).of(len(text.encode()))
    try:
        with library_errors("panic"):
            normalised = normalizer.normalize_str(text)
    except WeightsError:  # the library panics where rules leave nothing of a text
        reject()
    assert len(normalised.encode()) <= bound


def test_usual_tokenizers_take_long_texts() -> None:
    """SentencePiece in the style of Llama, and BPE: a book of 10 MB is encoded as before."""
    llama = sequence(
        "normalizers",
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    )
    assert growth_of(llama).of(40_000_000) < MAX_BYTES
    assert growth_of({"type": "NFC"}).of(40_000_000) < MAX_BYTES
    Growth().require_room("a" * (MAX_BYTES + 1))
