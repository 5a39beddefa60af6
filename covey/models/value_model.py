"""A decoder with one number per token instead of logits: the critic (the value of the state after the token) and the
reward model (a Hugging Face *ForSequenceClassification with one label, read at the last token).

Only the trunk of a decoder is kept: an untied language head is dropped. The head is float32 in memory and in
arithmetic, whatever the trunk's type.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from covey.errors import WeightsError
from covey.models.attention import Attend
from covey.models.decoder import Decoder, rngs_for_shapes
from covey.models.loading import weights
from covey.models.loading.stored_tensor import StoredTensor


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
    trunk = _remove_head(base)
    if not share:
        graph, params = nnx.split(trunk)
        trunk = nnx.merge(graph, jax.tree.map(jnp.copy, params))
    return ValueModel(trunk)


def load_value_model(
    source: str | Path,
    *,
    new_head: bool = False,
    mesh: Mesh | None = None,
    put: weights.PutArray | None = None,
    **options: Unpack[weights.DecoderOptions],
) -> weights.LoadedModel[ValueModel]:
    """Load a reward model, or the start of a critic.

    Args:
        source: as for `weights.load`. A *ForSequenceClassification folder with num_labels 1 brings its head.
        new_head: accept a language model too, and give it a zero head, as the start of a critic.
        mesh, put, options: as for `weights.load`.

    Raises:
        WeightsError: the source is unavailable or incomplete, its head has more than one label, or it is a language
            model and `new_head` is not set.
    """
    found, checkpoint = weights.open_source(source)
    labels = weights.num_labels(checkpoint)
    _check_head(labels, new_head, str(found.path))
    config = replace(checkpoint.config, tie_embeddings=True)
    build = lambda: ValueModel(Decoder(config, rngs=rngs_for_shapes(), **options))  # noqa: E731
    given = weights.tensors_for(checkpoint, None if put else mesh)
    tensors = _tensors(given, zero=config.hidden_size if labels is None else 0)
    abstract = nnx.eval_shape(build)
    model = weights.fill_parameters(abstract, tensors, put or weights.make_put(abstract, mesh), where=str(found.path))
    return weights.LoadedModel(model, checkpoint.tokenizer, config, found.origin)


def _remove_head(base: Decoder) -> Decoder:
    """Return `base` with the same arrays, without a language head of its own."""
    trunk = nnx.merge(*nnx.split(base))
    trunk.head, trunk.config = None, replace(base.config, tie_embeddings=True)
    return trunk


def _check_head(labels: int | None, new_head: bool, where: str) -> None:
    wanted = "a *ForSequenceClassification folder with num_labels 1 (score.weight [1, hidden size])"
    if labels not in (None, 1):
        raise WeightsError(
            f"this is a classifier with num_labels {labels}",
            want=wanted,
            fix="a model trained for one score, with num_labels=1",
            where=where,
        )
    if labels is None and not new_head:
        raise WeightsError(
            "this is a language model: it has no score.weight and cannot score",
            want=wanted,
            fix="a reward model; as critic a language model will do",
            where=where,
        )


def _tensors(
    given: Iterable[tuple[str, np.ndarray | StoredTensor]], zero: int
) -> Iterator[tuple[str, np.ndarray | StoredTensor]]:
    """Yield a checkpoint's tensors under the value model's paths; with `zero`, a head of that many zeros."""
    for path, tensor in given:
        if path == "score":
            yield path, (tensor.whole() if isinstance(tensor, StoredTensor) else tensor)[0]
        elif path != "head.embedding":
            yield f"decoder.{path}", tensor
        del tensor  # free it before the next is read
    if zero:
        yield "score", np.zeros(zero, np.float32)
