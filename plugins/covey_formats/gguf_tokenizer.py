"""Tokenizer of a GGUF file, read from its metadata and written to them: byte-level BPE (GPT-2) or SentencePiece."""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from covey.errors import WeightsError
from covey.text.tokenizer import Tokenizer
from covey.text.tokenizers_library import library_errors
from covey_formats import sentencepiece
from covey_formats.gguf_reader import Metadata


@dataclass(frozen=True)
class _PreTokenizer:
    """Pre-tokenizer, which splits text into words before byte-pair merging, for one of llama.cpp's names.

    `pattern` None means GPT-2's own; `digits` splits every digit off first; `whole` takes a word that is in the
    vocabulary without merging; `bos` is the default for prepending BOS when the file does not set it.
    """

    pattern: str | None = None
    split_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def steps(self) -> list[Any]:
        cut = [pre_tokenizers.Split(tokenizers.Regex(self.pattern), "isolated")] if self.pattern else []
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.split_digits else []
        return [*digits, *cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)]


def read_tokenizer(fields: Metadata, rows: int) -> Tokenizer:
    """Read the tokenizer of a model that embeds `rows` tokens.

    Raises:
        WeightsError: it is of a kind that is not supported, or its metadata are malformed.
    """
    kind, tokens = fields.text("tokenizer.ggml.model"), fields.strings("tokenizer.ggml.tokens")
    if kind not in BUILDERS:
        raise WeightsError(
            f"GGUF tokenizer {kind!r} is not supported",
            want="gpt2 (byte-level BPE) or llama (SentencePiece)",
            where=fields.where,
        )
    types = fields.ints("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise WeightsError(f"{len(tokens)} tokens have {len(types)} types", want="one each", where=fields.where)
    ids = {
        role: fields.token_id(f"tokenizer.ggml.{role}_token_id", len(tokens)) for role in ("bos", "eos", "eot", "eom")
    }
    if ids["eos"] is None:
        raise WeightsError("the metadata has no 'tokenizer.ggml.eos_token_id'", where=fields.where)
    with library_errors("not a tokenizer", where=fields.where):
        inner, add_bos = BUILDERS[kind](fields, tokens, types)
        _add_tokens(inner, tokens, types)
    template = "tokenizer.chat_template"
    return Tokenizer(
        inner,
        eos_id=ids["eos"],
        stop_ids=[token for role in ("eot", "eom") if (token := ids[role]) is not None],
        bos_id=ids["bos"],
        pad_id=fields.token_id("tokenizer.ggml.padding_token_id", 2**31),  # published files have some without a token
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", add_bos),
        chat_template=fields.text(template) if template in fields else None,
        rows=rows,
    )


def _build_byte_level(fields: Metadata, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether it puts BOS before a text by default."""
    split_name = fields.text("tokenizer.ggml.pre", "default")
    if split_name not in PRE_TOKENIZERS:
        raise WeightsError(
            f"pre-tokenizer {split_name!r} is unknown", want="one of: " + ", ".join(PRE_TOKENIZERS), where=fields.where
        )
    split = PRE_TOKENIZERS[split_name]
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in fields.strings("tokenizer.ggml.merges"))]
    if not all(right for _, right in merges):
        raise WeightsError("a merge is not of two tokens", want="two, a blank between them", where=fields.where)
    vocab = {text: index for index, text in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(split.steps())
    inner.decoder = decoders.ByteLevel()
    if split.nfc:
        inner.normalizer = normalizers.NFC()
    return inner, split.add_bos


def _build_sentencepiece(fields: Metadata, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether it puts BOS before a text by default."""
    if fields.flag("tokenizer.ggml.add_space_prefix", True):
        raise WeightsError(
            "this SentencePiece tokenizer puts a space before a text, which is not supported",
            want="tokenizer.ggml.add_space_prefix false, as in Gemma's files",
            where=fields.where,
        )
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise WeightsError(f"{len(tokens)} tokens have {len(scores)} scores", want="one each", where=fields.where)
    pieces = {tokens[token]: scores[token] for token, kind in enumerate(types) if kind == NORMAL}
    if (longest := max(map(len, pieces), default=0)) > sentencepiece.MAX_PIECE:
        raise WeightsError(
            f"a piece of this SentencePiece tokenizer has {longest} characters",
            want=f"at most {sentencepiece.MAX_PIECE}",
            where=fields.where,
        )
    unknown = fields.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    inner = sentencepiece.build(tokens, sentencepiece.find_merges(pieces), unknown)
    if inner is None:
        raise WeightsError(
            "this SentencePiece tokenizer has no token for some bytes",
            want="all of <0x00> to <0xFF>",
            where=fields.where,
        )
    return inner, True


def _add_tokens(inner: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have control tokens and user-defined tokens recognised in a text before it is cut."""
    control = [text for text, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    written = [text for text, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in control])
    inner.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in written])


# --- writing


def vocabulary_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Return metadata of the vocabulary, one token for each of the model's `rows`, and of its EOS and padding. A token
    that the model does not embed has no place in the file.

    Raises:
        WeightsError: llama.cpp has no name for the way in which the tokenizer cuts text, or none that we know.
    """
    inner = json.loads(tokenizer.inner.to_str())
    described = _describe_sentencepiece if inner["model"].get("byte_fallback") else _describe_byte_level
    fields = described(inner, rows) | {
        "eos_token_id": tokenizer.eos_id,
        "bos_token_id": tokenizer.bos_id,
        "padding_token_id": tokenizer.pad_id,
        "add_bos_token": tokenizer.add_bos,
    }
    fields |= dict(zip(("eot_token_id", "eom_token_id"), set(tokenizer.stop_ids) - {tokenizer.eos_id}, strict=False))
    template = {} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None} | template


def _named_tokens(inner: dict[str, Any]) -> dict[int, tuple[str, int]]:
    """Return {token: its text and its type}."""
    words = inner["model"].get("vocab", {}).items() if inner["model"]["type"] == "BPE" else ()
    named = {token: (text, NORMAL) for text, token in words}
    for added in inner["added_tokens"]:
        named[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    return named


def _describe_byte_level(inner: dict[str, Any], rows: int) -> dict[str, Any]:
    named = _named_tokens(inner)
    texts, kinds = zip(*(named.get(token, (f"[PAD{token}]", UNUSED)) for token in range(rows)), strict=True)
    return {
        "model": "gpt2",
        "pre": _pre_tokenizer_name(inner),
        "tokens": list(texts),
        "token_type": list(kinds),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in inner["model"]["merges"]],
    }


def _describe_sentencepiece(inner: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return metadata whose scores give the order of the tokenizer's merges again."""
    named = _named_tokens(inner)
    for token, (text, kind) in named.items():
        if text in sentencepiece.BYTES:
            named[token] = text, BYTE
        elif kind == USER_DEFINED:  # it is sought in a text as it stands
            named[token] = text.replace(sentencepiece.SPACE, " "), kind
    scores = sentencepiece.rank_pieces([text for text, kind in named.values() if kind == NORMAL], inner)
    if scores is None:
        raise WeightsError(
            "no GGUF file can hold this tokenizer: no scores of its pieces give its merges, or its rules change a text",
            want="a SentencePiece vocabulary as Gemma's",
            fix="--format hf, which transformers reads",
        )
    texts, kinds = zip(*(named.get(token, (f"[PAD{token}]", UNUSED)) for token in range(rows)), strict=True)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": list(texts),
        "token_type": list(kinds),
        "scores": [scores.get(text, NO_SCORE) for text in texts],
        "unknown_token_id": inner["model"]["vocab"].get(inner["model"].get("unk_token")),
        "add_space_prefix": False,
    }


def _pre_tokenizer_name(inner: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of this byte-level BPE.

    Raises:
        WeightsError: llama.cpp has no name for it, or none that we know.
    """
    if inner["model"]["type"] == "BPE":
        steps, whole = _pre_tokenizer_steps(inner["pre_tokenizer"]), bool(inner["model"].get("ignore_merges"))
        nfc = (inner["normalizer"] or {}).get("type") == "NFC"
        for name, split in PRE_TOKENIZERS.items():
            theirs = [json.loads(step.__getstate__()) for step in split.steps()]
            if name != "default" and (steps, whole, nfc) == (_without_offsets(theirs), split.ignore_merges, split.nfc):
                return name
    raise WeightsError(
        "no GGUF file can hold this tokenizer: GGUF has no name that we know for the way in which it cuts text",
        want="byte-level BPE that cuts like " + ", ".join(name for name in PRE_TOKENIZERS if name != "default"),
        fix="--format hf, which transformers and llama.cpp's own converter read",
    )


def _pre_tokenizer_steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    outer = pre_tokenizer or {"type": "none"}
    return _without_offsets(outer["pretokenizers"] if outer["type"] == "Sequence" else [outer])


def _without_offsets(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `steps` without the settings that only concern offsets."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
"""Token types of GGUF."""
NO_SCORE = -1000.0
"""Score of tokens that are not joined of others, as llama.cpp's converter writes it."""

BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
"""llama.cpp's name of a kind of tokenizer → function that builds it."""

# The pattern of Llama 3's tokenizer; Qwen2's is the same with digits taken one by one.
_THREE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_DIGIT = _THREE_DIGITS.replace("{1,3}", "")

PRE_TOKENIZERS = {
    "default": _PreTokenizer(),  # unknown to the converter: use GPT-2's, from which all of these derive
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(split_digits=True),
    "llama-bpe": _PreTokenizer(_THREE_DIGITS, ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(_ONE_DIGIT, nfc=True),
    "dbrx": _PreTokenizer(_THREE_DIGITS),  # OLMo 2 and Phi-4
    "smaug-bpe": _PreTokenizer(_THREE_DIGITS),  # SmolLM3
}
