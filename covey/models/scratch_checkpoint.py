"""Untrained models and their tokenizers, made from the descriptions of `scratch`, without files or JAX."""

from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models

from covey.models import families
from covey.models.scratch import SCRATCH_MODELS, SPECIAL_TOKENS, parse_source
from covey.text.tokenizer import Tokenizer


class ScratchCheckpoint:
    """The untrained model `scratch:NAME[@SEED]`, as a checkpoint that `weights` can read.

    Weights are drawn by NumPy's frozen generator, so that a seed gives the same weights in every version. They have
    the initial distributions of `Decoder`, but the embedding is drawn like the matrices: sums are then learnt sooner.

    Raises:
        WeightsError: there is no such name, or the seed is not valid.
    """

    def __init__(self, source: str):
        name, self.seed = parse_source(source)
        self.config = SCRATCH_MODELS[name].config
        self.tokenizer = character_tokenizer(SCRATCH_MODELS[name].alphabet, SCRATCH_MODELS[name].words)

    def check(self) -> None:
        """Check nothing: there is no file."""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, float32 array in our layout) for each parameter, one in memory at a time."""
        random = np.random.RandomState(self.seed)
        for path in families.parameter_paths(self.config):
            shape = families.parameter_shape(self.config, path)
            if path.endswith(".scale"):
                yield path, np.ones(shape, np.float32)
            else:
                inputs = shape[0] if path.endswith(".kernel") else shape[1]
                yield path, (random.standard_normal(shape) * inputs**-0.5).astype(np.float32)


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
