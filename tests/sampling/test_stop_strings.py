"""Stop strings: the first token that completes one ends a completion, whatever is sampled beside it or after it."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from covey.config.schema import RolloutConfig
from covey.errors import CoveyError, RecipeError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.stop_strings import StopStrings
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason

CHARACTERS = "ab\n</é€🙂"
PIECES = ["a", "b", "ab", "ba", "a<", "</", "/a", "\n", "\n\n", "b\n", "é", "€", "🙂", "aé"]
BYTES = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
OTHERS = sorted(set(range(256)) - BYTES)


def shown(piece: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(chr(byte if byte in BYTES else 256 + OTHERS.index(byte)) for byte in piece)


@cache
def a_tokenizer(kind: str) -> Tokenizer:
    """Tokens of some characters or of parts of one; <stop> ends a text, and <other> is not shown."""
    parts = [piece.encode()[i : i + 1] for piece in "é€🙂" for i in range(len(piece.encode()))]
    if kind == "bytes":
        texts = [shown(piece) for piece in [*(piece.encode() for piece in PIECES), *parts]]
        decoder: Any = decoders.ByteLevel()
    else:
        texts = [piece.replace("a", "▁") for piece in PIECES] + [f"<0x{part[0]:02X}>" for part in parts]
        rules = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        decoder = decoders.Sequence(rules)
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(["<stop>", "<other>", *texts]))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<other>"))
    inner.add_special_tokens(["<stop>", "<other>"])
    inner.decoder = decoder
    return Tokenizer(inner, eos_id=0)


def naive_end(strings: list[str], tokens: list[int], tokenizer: Tokenizer) -> tuple[int, str] | None:
    """The first number of tokens with a string in their text, and the text before it; tokens are added singly."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length])
        if places := [text.find(string) for string in strings if string in text]:
            return length, text[: min(places)]
    return None


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@given(data=st.data())
def test_the_end_is_where_the_naive_search_finds_it_in_chunks_of_any_size(kind: str, data: st.DataObject) -> None:
    tokenizer = a_tokenizer(kind)
    tokens = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), min_size=1, max_size=60))
    alphabet = CHARACTERS if kind == "bytes" else CHARACTERS.replace("a", " ")
    strings = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=5), min_size=1, max_size=3))
    condition, want, known = StopStrings(strings, tokenizer.decode), naive_end(strings, tokens, tokenizer), 0
    while known < len(tokens):
        new = data.draw(st.integers(1, len(tokens) - known))
        known += new
        if ending := condition(np.array(tokens[:known], np.int32), new):
            text = tokenizer.decode(tokens[: ending.length])
            assert (ending.length, ending.visible(text)) == want
            assert ending.reason is FinishReason.STOP_STRING
            return
    assert want is None


@pytest.mark.parametrize(
    ("strings", "words", "text", "count"),
    [
        # As transformers describes its `stop_strings`: the string may end within a token, and lie over several.
        (["</"], ["b", "a<", "/a", "b"], "ba", 3),
        (["\n\n"], ["b\n", "\n\n", "a"], "b", 2),
        (["a"], ["ba", "b"], "b", 1),
        (["b", "ab"], ["b\n"], "", 1),
        (["ab", "b"], ["a", "b"], "", 2),  # where two end, the text ends before both
        (["é"], ["a", "é", "b"], "a", 2),
        (["<b"], ["a<", "/a", "b"], "a</ab", None),
    ],
)
def test_ends_known_beforehand(strings: list[str], words: list[str], text: str, count: int | None) -> None:
    tokenizer = a_tokenizer("bytes")
    ids = np.array([tokenizer.inner.token_to_id(shown(word.encode())) for word in words], np.int32)
    ending = StopStrings(strings, tokenizer.decode)(ids, len(ids))
    assert (ending and ending.length) == count
    whole = tokenizer.decode(ids[:count])
    assert (ending.visible(whole) if ending else whole) == text


# --- in an engine

CONFIG = RolloutConfig(max_prompt_length=16, max_new_tokens=9, slots=4, decode_chunk=4, stop=("b\n", "é"))
TOKENIZER = a_tokenizer("bytes")
CONDITION = StopStrings(CONFIG.stop, TOKENIZER.decode)


@cache
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=64,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


@cache
def shared(fixed_shapes: bool) -> Engine:
    return Engine(model(), TOKENIZER.stop_ids, CONFIG, fixed_shapes)


def requests(**settings: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, TOKENIZER.vocab_size, n).astype(np.int32) for n in (3, 9, 1, 14, 6)]
    return [Request(prompt, 3, index, id=index, **settings) for index, prompt in enumerate(prompts)]


def sample(
    wanted: list[Request], *, shapes: bool = False, runs_ahead: bool = False, **settings: Any
) -> list[Completion]:
    engine = shared(shapes)
    engine.runs_ahead = runs_ahead
    engine.configure(replace(CONFIG, **settings))
    drawn = [one for group in generate(engine, wanted) for one in group]
    assert engine.stats.tokens == sum(one.num_sampled for one in drawn)
    assert not engine.runner.slots.active.any()
    return drawn


@pytest.fixture(scope="module")
def ended() -> list[Completion]:
    return sample(requests(stop_conditions=(CONDITION,)))


def test_a_completion_is_the_beginning_of_what_is_drawn_without_stop_strings(ended: list[Completion]) -> None:
    seen = set()
    for one, whole in zip(ended, sample(requests(), stop=()), strict=True):
        end = naive_end([*CONFIG.stop], whole.tokens.tolist(), TOKENIZER)
        length, text = end or (len(whole.tokens), TOKENIZER.decode(whole.tokens))
        assert one.tokens.tolist() == whole.tokens[:length].tolist()
        np.testing.assert_allclose(one.logps, whole.logps[:length], rtol=0, atol=1e-5)
        assert one.finish is (FinishReason.STOP_STRING if end else whole.finish)
        assert one.with_text(TOKENIZER.decode).text == text
        assert one.finish.was_cut == (one.finish is FinishReason.LENGTH)
        seen.add(one.finish)
    assert seen == {FinishReason.STOP, FinishReason.STOP_STRING, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "how",
    [
        {"decode_chunk": 1},
        {"decode_chunk": 16, "slots": 2},
        {"shapes": True},
        {"shapes": True, "runs_ahead": True},
        {"shapes": True, "runs_ahead": True, "decode_chunk": 1, "slots": 3},
    ],
)
def test_it_depends_on_no_chunk_slot_or_order(ended: list[Completion], how: dict[str, Any]) -> None:
    wanted = requests(stop_conditions=(CONDITION,))
    backwards = [[*group] for group in np.array(sample(wanted[::-1], **how), object).reshape(-1, 3)][::-1]
    for one, other in zip(ended, [one for group in backwards for one in group], strict=True):
        assert (one.tokens.tolist(), one.finish, one.hidden) == (other.tokens.tolist(), other.finish, other.hidden)
        np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=1e-5)


def test_an_engine_whose_settings_have_stop_strings_wants_conditions() -> None:
    with pytest.raises(CoveyError, match=r"rollout.stop is \['b\\n', 'é'\](.|\n)*StopStrings"):
        sample(requests())
    shared(False).reset()


# --- in a rollout


@pytest.mark.parametrize("value", ["</a>", ("a", ""), (3,)])
def test_stop_is_a_list_of_strings_that_are_not_empty(value: Any) -> None:
    with pytest.raises(RecipeError, match="stop"):
        RolloutConfig(stop=value)


def test_reward_functions_see_the_text_before_the_string_and_a_prompt_ends_nothing() -> None:
    worker = RolloutWorker(model(), TOKENIZER, CONFIG)
    prompt = "".join(["é"] * 3)
    (group,) = worker.generate([prompt], 32)
    assert len(group.prompt_tokens)
    finishes = {one.finish for one in group.completions}
    assert FinishReason.STOP_STRING in finishes
    for one in group.completions:
        end = naive_end([*CONFIG.stop], one.tokens.tolist(), TOKENIZER)
        assert (one.finish is FinishReason.STOP_STRING) == (end is not None)
        assert one.text == (end[1] if end else TOKENIZER.decode(one.tokens))
        assert one.tokens.size > 1 or one.finish is not FinishReason.LENGTH
