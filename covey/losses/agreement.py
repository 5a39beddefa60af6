"""Race of a token that was sampled, by the logits of the trainer: would they have drawn it too, under the same noise?

`sampling.logits.race` draws from whole rows of logits. To tell whether a given token wins, less is needed: the mass of
each of its `BLOCKS` blocks, and the largest mass / F in the token's own block. Both are gathered while the log-probs
go over the vocabulary, beside the sums of the softmax.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.losses.vocab_parallel import VocabLayout
from covey.sampling.logits import BLOCKS
from covey.sampling.noise import exponential_at


class Targets(NamedTuple):
    """Tokens that are scored.

    Attributes:
        token: their ids.
        keys: random keys that drew them, those of `noise.token_keys`; None where no race is run.
    """

    token: Int[Array, "R M"]
    keys: UInt32[Array, "R M 2"] | None = None


class TargetRace(NamedTuple):
    """State of the race of each target behind some of the vocabulary; masses are relative to exp(max logit so far).

    Attributes:
        masses: mass of each block of the race.
        best: largest mass / F in the block of the target.
        own: mass / F of the target; 0 before it was met.
    """

    masses: Float[Array, "R M blocks"]
    best: Float[Array, "R M"]
    own: Float[Array, "R M"]

    @classmethod
    def start(cls, targets: Targets) -> "TargetRace | None":
        """Return the race before any of the vocabulary; None where none is run."""
        if targets.keys is None:
            return None
        zeros = jnp.zeros(targets.token.shape, jnp.float32)
        return cls(jnp.zeros((*zeros.shape, BLOCKS), jnp.float32), zeros, zeros)

    def add(
        self, mass: Float[Array, "R M n"], first: Int[Array, ""], rescale: Float[Array, "R M"], targets: Targets
    ) -> "TargetRace":
        """Return the race with the next n tokens of the vocabulary, from id `first` on.

        Args:
            mass: their masses; 0 for those that are not to be counted.
            first: id of the first one.
            rescale: factor of the masses so far, whose maximum was another.
            targets: the targets with their keys.
        """
        assert targets.keys is not None, "a race has keys"
        padded = jnp.pad(mass, ((0, 0), (0, 0), (0, -mass.shape[-1] % BLOCKS)))
        table = padded.reshape(*mass.shape[:2], -1, BLOCKS)  # a column is a block of the race, but for `first`
        masses = jnp.roll(table.sum(-2), first, axis=-1)
        column = (targets.token - first) % BLOCKS
        inner = jnp.take_along_axis(table, column[..., None, None], axis=-1)[..., 0]
        ids = first + column[..., None] + BLOCKS * jnp.arange(inner.shape[-1])
        _, of_place = exponential_at(targets.keys[..., None, :], (ids // BLOCKS).astype(jnp.uint32))
        scores = inner / of_place
        own = jnp.where(ids == targets.token[..., None], scores, 0.0).sum(-1)
        return TargetRace(
            self.masses * rescale[..., None] + masses,
            jnp.maximum(self.best * rescale, scores.max(-1)),
            self.own * rescale + own,
        )

    def won(self, layout: VocabLayout, rescale: Float[Array, "R M"], targets: Targets) -> Bool[Array, "R M"]:
        """Return whether the targets win over all tokens. A tie is won.

        Args:
            layout: parts of the vocabulary that devices have.
            rescale: factor of the masses of this part, for one maximum over all parts.
            targets: the targets with their keys.
        """
        assert targets.keys is not None, "a race has keys"
        masses, own = layout.sum((self.masses * rescale[..., None], self.own * rescale))
        best = layout.max(self.best * rescale)
        of_block, _ = exponential_at(targets.keys[..., None, :], jnp.arange(BLOCKS, dtype=jnp.uint32))
        scores = masses / of_block
        of_target = jnp.take_along_axis(scores, (targets.token % BLOCKS)[..., None], axis=-1)[..., 0]
        won: Array = (of_target >= scores.max(-1)) & (own >= best)
        return won
