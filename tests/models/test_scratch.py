"""Models made from scratch: name and seed say every weight, and what is made is a Llama that others can read."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import ModelOptions
from covey.errors import WeightsError
from covey.models.decoder import Decoder
from covey.models.loading import sources, weights
from covey.models.scratch import (
    SCRATCH_MODELS,
    SPECIAL_TOKENS,
    parse_source,
    with_seed,
)
from covey.models.scratch_checkpoint import ScratchCheckpoint, character_tokenizer
from covey.parallel import flatten
from covey.recipes.load_model import load_source

NAMES = [f"scratch:{name}" for name in SCRATCH_MODELS]


def digest(source: str) -> str:
    held = hashlib.sha256()
    for path, tensor in ScratchCheckpoint(source).tensors():
        held.update(path.encode() + tensor.tobytes())
    return held.hexdigest()[:16]


def arrays(model: Decoder) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten(nnx.state(model)).items()}


# --- names and seeds


def test_a_seed_means_the_same_weights_for_ever() -> None:
    """Pinned: a run's origin is this name, and another version must be able to go on with it."""
    assert digest("scratch:arithmetic-tiny@3") == "6bf04869956a354b"
    assert (
        digest("scratch:arithmetic-tiny") == digest("scratch:arithmetic-tiny@0") != digest("scratch:arithmetic-tiny@1")
    )


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("scratch:arithmetic-tinny", "did you mean 'scratch:arithmetic-tiny'?"),
        ("scratch:", "did you mean 'scratch:guess-tiny'?"),
        ("scratch:arithmetic-tiny@", "'' is no seed"),
        ("scratch:arithmetic-tiny@-1", "'-1' is no seed"),
        ("scratch:arithmetic-tiny@1.5", "'1.5' is no seed"),
        ("scratch:arithmetic-tiny@4294967296", "'4294967296' is no seed"),
        ("scratch:arithmetic-tiny@٣", "'٣' is no seed"),
    ],
)
def test_a_wrong_name_or_seed_is_refused(source: str, told: str) -> None:
    with pytest.raises(WeightsError) as caught:
        sources.check_source(source)
    assert told in str(caught.value)


def test_the_run_says_the_seed_unless_the_source_does() -> None:
    assert with_seed("scratch:arithmetic-tiny", 7) == "scratch:arithmetic-tiny@7"
    assert with_seed("scratch:arithmetic-tiny@1", 7) == "scratch:arithmetic-tiny@1"
    assert parse_source("scratch:arithmetic-tiny@4294967295") == ("arithmetic-tiny", 4294967295)
    _, _, origin = load_source(ModelOptions(), "scratch:arithmetic-tiny", seed=5)
    assert origin == "scratch:arithmetic-tiny@5"


# --- the model


@pytest.mark.slow
@pytest.mark.parametrize("source", NAMES)
def test_its_weights_are_those_that_a_decoder_begins_with_in_kind(source: str) -> None:
    loaded = weights.load(source)
    ours, theirs = arrays(loaded.model), arrays(Decoder(loaded.config, rngs=nnx.Rngs(0)))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    assert 3e5 < sum(x.size for x in ours.values()) < 5e6
    wider = loaded.config.hidden_size**-0.5 / 0.02  # an embedding as wide as the matrices: it learns sums sooner
    theirs["embed.embedding"] = theirs["embed.embedding"] * wider
    for name, x in ours.items():
        assert x.std() == pytest.approx(theirs[name].std(), rel=0.05), name
        assert x.mean() == pytest.approx(theirs[name].mean(), abs=0.01), name


@pytest.mark.parametrize("source", NAMES)
def test_it_leaves_as_a_llama_and_comes_back(source: str, tmp_path: Path) -> None:
    write_hf, loaded = pytest.importorskip("covey_formats.hf").write_hf, weights.load(source)
    assert write_hf(loaded.model, loaded.tokenizer, tmp_path / "out").max_difference < 1e-4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("llama", SPECIAL_TOKENS.index("<eos>"))
    again = weights.load(tmp_path / "out")
    assert again.config == loaded.config
    ours, theirs = arrays(loaded.model), arrays(again.model)
    assert all(np.array_equal(x, theirs[name]) for name, x in ours.items())
    text = "17+25=42"
    assert again.tokenizer.encode(text).tolist() == loaded.tokenizer.encode(text).tolist()
    assert (again.tokenizer.eos_id, again.tokenizer.pad_id) == (loaded.tokenizer.eos_id, loaded.tokenizer.pad_id)


# --- the tokenizer

ALPHABET = next(iter(SCRATCH_MODELS.values())).alphabet
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET))
def test_a_text_is_its_characters_and_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text).tolist()
    assert tokens == [len(SPECIAL_TOKENS) + ALPHABET.index(c) for c in text]
    assert TOKENIZER.decode(tokens) == text


def test_control_tokens_end_a_text_and_stand_for_what_is_unknown() -> None:
    assert TOKENIZER.vocab_size == len(SPECIAL_TOKENS) + len(ALPHABET)
    assert TOKENIZER.encode_completion("1+1=", "2").tolist() == [len(SPECIAL_TOKENS) + 2, TOKENIZER.eos_id]
    assert TOKENIZER.encode("1?é1").tolist() == [len(SPECIAL_TOKENS) + 1, 1, 1, len(SPECIAL_TOKENS) + 1]
    assert TOKENIZER.bos_id is None
    assert TOKENIZER.chat_template is None
