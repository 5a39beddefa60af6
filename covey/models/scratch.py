"""Small models made from scratch: an untrained model and its tokenizer from a name, without files or JAX.

`scratch:NAME@SEED` is a model source like others, and an origin: name and seed determine every weight. The seed
defaults to that of the run, and to 0 where there is no run. The tokenizer has an alphabet, one token per character.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models

from covey.errors import WeightsError, nearest
from covey.models import families
from covey.models.config import ModelConfig
from covey.text.tokenizer import Tokenizer

PREFIX = "scratch:"
SPECIAL_TOKENS = ("<pad>", "<unk>", "<eos>")
"""Control tokens, before the alphabet: padding, a character outside the alphabet, the end of a text."""


@dataclass(frozen=True)
class ScratchSpec:
    """Description of a model: a Llama architecture, except for its vocabulary size, and the vocabulary.

    Attributes:
        alphabet: characters, each a token.
        words: longer texts, each a token too.
    """

    alphabet: str
    hidden_size: int
    num_layers: int
    head_dim: int
    rope_theta: float
    words: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """Return the architecture; the MLP is 8/3 as wide as the model, as in Llama."""
        heads = self.hidden_size // self.head_dim
        return ModelConfig(
            vocab_size=len(SPECIAL_TOKENS) + len(self.alphabet) + len(self.words),
            hidden_size=self.hidden_size,
            intermediate_size=self.hidden_size * 8 // 3 // 32 * 32,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            tie_embeddings=True,
        )


class ScratchCheckpoint:
    """The untrained model `scratch:NAME[@SEED]`, as a checkpoint that `weights` can read.

    Weights are drawn by NumPy's frozen generator, so that a seed gives the same weights in every version. They follow
    the initial distributions of `Decoder`, except that the embedding's spread is that of the matrices, with which sums
    are learnt sooner.

    Raises:
        WeightsError: there is no such name, or the seed is not valid.
    """

    def __init__(self, source: str):
        name, self.seed = parse_source(source)
        self.config = SCRATCH_MODELS[name].config
        self.tokenizer = character_tokenizer(SCRATCH_MODELS[name].alphabet, SCRATCH_MODELS[name].words)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, float32 array in our layout) for each parameter, one in memory at a time."""
        random = np.random.RandomState(self.seed)
        for path in families.parameter_paths(self.config):
            shape = _shape(self.config, path)
            if path.endswith(".scale"):
                yield path, np.ones(shape, np.float32)
            else:
                inputs = shape[0] if path.endswith(".kernel") else shape[1]
                yield path, (random.standard_normal(shape) * inputs**-0.5).astype(np.float32)


def scratch_names() -> list[str]:
    """Return the sources of this kind."""
    return [PREFIX + name for name in SCRATCH_MODELS]


def parse_source(source: str) -> tuple[str, int]:
    """Split `scratch:NAME@SEED` into (NAME, SEED), with seed 0 if not given.

    Raises:
        WeightsError: there is no such name, or the seed is not valid.
    """
    name, at, seed = source.removeprefix(PREFIX).partition("@")
    if name not in SCRATCH_MODELS:
        raise WeightsError(
            f"there is no model {name!r} to be made from scratch", fix=nearest(PREFIX + name, scratch_names())
        )
    if at and not (re.fullmatch("[0-9]{1,10}", seed) and int(seed) < 2**32):
        raise WeightsError(f"{seed!r} is no seed", want=f"{PREFIX}{name}@0, or a whole number below 2^32")
    return name, int(seed or 0)


def with_seed(source: str, seed: int) -> str:
    """Return `source`, with `seed` added if it is a model from scratch without a seed.

    >>> with_seed("scratch:arithmetic-tiny", 7), with_seed("scratch:arithmetic-tiny@1", 7), with_seed("smollm2-135m", 7)
    ('scratch:arithmetic-tiny@7', 'scratch:arithmetic-tiny@1', 'smollm2-135m')
    """
    return f"{source}@{seed}" if source.startswith(PREFIX) and "@" not in source else source


def character_tokenizer(alphabet: str, words: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer: the control tokens, then one token per character of `alphabet`, then one per word; no BOS, no
    chat format.
    """
    tokens = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>", fuse_unk=False))
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    inner.add_tokens(list(words))
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner, eos_id=tokens["<eos>"], pad_id=tokens["<pad>"])


def _shape(c: ModelConfig, path: str) -> tuple[int, ...]:
    """Return the shape of a parameter of the family llama; `weights.fill_parameters` refuses any other."""
    kind = path.split(".")[-2]
    shapes = {"embed": (c.vocab_size, c.hidden_size), **c.projection_shapes()}
    return shapes.get(kind, (c.hidden_size,))


SCRATCH_MODELS: dict[str, ScratchSpec] = {
    "arithmetic-tiny": ScratchSpec("0123456789+-×=. ", hidden_size=320, num_layers=2, head_dim=8, rope_theta=10.0),
    "guess-tiny": ScratchSpec(
        "0123456789-:<>=? ",
        hidden_size=128,
        num_layers=2,
        head_dim=16,
        rope_theta=100.0,
        words=tuple(map(str, range(10, 100))),
    ),
}
"""Name → description of the model."""
