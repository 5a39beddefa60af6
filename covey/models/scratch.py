"""Names and descriptions of the small models that are made from scratch (`scratch_checkpoint`), without files.

`scratch:NAME@SEED` is a model source like others, and an origin: name and seed determine every weight. The seed
defaults to the run's seed, and to 0 where there is no run. This module imports neither JAX nor NumPy.
"""

import re
from dataclasses import dataclass

from covey.errors import WeightsError, nearest
from covey.models.config import ModelConfig

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
    "wordle-tiny": ScratchSpec("abcdefgh+~-?", hidden_size=128, num_layers=2, head_dim=16, rope_theta=100.0),
}
"""Name → description of the model."""
