"""Settings of an optimizer, which several sections have."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import WrapValidator

from covey.config.base import Config, Decay, Fraction, NonNegativeFloat, PositiveFloat, Problem, is_plain


class OptimizerConfig(Config, section="training.optimizer"):
    """AdamW (Loshchilov & Hutter, 2019), or Muon (Jordan et al., 2024) for matrices, with warm-up and decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices of the layers; all other weights always use AdamW."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; of the matrices alone where other weights have their own."""
    embedding_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the embeddings, a tied head included; learning_rate when not set."""
    unembedding_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of an untied head; learning_rate when not set."""
    vector_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of norm scales and biases; learning_rate when not set."""
    initial_fraction: Fraction = 1.0
    """Factor on every learning rate from the first update on."""
    b1: Decay = 0.9
    """AdamW: decay of the first moment."""
    b2: Decay = 0.99
    """AdamW: decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Decay = 0.95
    """muon: decay of the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices and embeddings; biases and norm scales do not decay."""
    warmup_ratio: Decay = 0.1
    """Fraction of the steps in which the learning rate rises linearly; it is above 0 in the first step."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at the last step."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest global norm of the gradient, which is clipped to it; 0 is off."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for a momentum without Muon."""
        if self.kind != "muon" and self.momentum != OptimizerConfig.momentum:
            what = f"momentum is {self.momentum:g}, and the optimizer {self.kind} does not use it"
            want = f"kind muon, or {OptimizerConfig.momentum}, the default; adamw has b1"
            yield Problem("momentum", what, want, unread=True)


Optimizer = Annotated[
    OptimizerConfig, WrapValidator(lambda value, validate: validate(value) if is_plain(value) else value)
]
"""Settings of an optimizer; in Python also an optax transformation."""
