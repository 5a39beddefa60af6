"""A decoder with one number per token instead of logits: the critic (the value of the state after the token) and the
reward model (a Hugging Face *ForSequenceClassification with one label, read at the last token).

Only the trunk of a decoder is kept: an untied language head is dropped. The head is float32 in memory and in
arithmetic, whatever the trunk's type.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from covey.models.attention import Attend
from covey.models.decoder import Decoder


class HeadParam(nnx.Param[jax.Array]):
    """Weights of a value head; `lora.split_trainable` trains them together with adapters."""


class ValueModel(nnx.Module):
    """A trunk and a scalar head: hidden · score, without bias (Stiennon et al., 2020, in the layout of Hugging Face).

    Args:
        decoder: the trunk; one without a language head of its own.

    Attributes:
        score: float32 [D], zero at first.
    """

    def __init__(self, decoder: Decoder):
        assert decoder.head is None, "a language head would be trained with the critic and never used"
        self.decoder = decoder
        self.score = HeadParam(jnp.zeros((decoder.config.hidden_size,), jnp.float32))

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend) -> Float[Array, "B T"]:
        """Return the value of each prefix, float32."""
        return self.values(self.decoder(tokens, positions, attend)[0])

    def values(self, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
        """Apply the head to the trunk's hidden states."""
        return jnp.matmul(hidden.astype(jnp.float32), self.score[...], precision=jax.lax.Precision.HIGHEST)


def make_value_model(base: Decoder, *, share: bool = False) -> ValueModel:
    """Make a critic from a language model: its trunk with adapters, and a zero head, so that all initial values are 0.

    Args:
        base: any decoder.
        share: use the arrays of `base` instead of copies. A trainer takes over what it trains, so share only what stays
            frozen: `with_lora(make_value_model(without_lora(actor), share=True), config)` has adapters of its own on a
            shared base.
    """
    trunk = nnx.merge(*nnx.split(base))
    trunk.head, trunk.config = None, replace(base.config, tie_embeddings=True)
    graph, params = nnx.split(trunk)
    return ValueModel(trunk if share else nnx.merge(graph, jax.tree.map(jnp.copy, params)))
