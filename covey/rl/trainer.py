"""The RL trainer: the supervised trainer with GRPO's loss on rows."""

from functools import partial
from typing import Any, NamedTuple

import optax
from jaxtyping import Array

from covey.configs import GRPOConfig
from covey.models.decoder import Decoder
from covey.rl.logprobs import row_scores
from covey.rl.losses import LossInputs, grpo_loss
from covey.rl.rows import Rows
from covey.train.trainer import Trainer


class MicroBatch(NamedTuple):
    """Rows and what the loss needs beside them."""

    rows: Rows
    inputs: LossInputs


class RLTrainer(Trainer):
    """Trains an actor on rows.

    Args:
        model: the actor.
        optimizer: any optax transformation.
        config: β and the clip range.
        temperature: the rollout's: log-probs are those of the distribution that was sampled.
    """

    def __init__(self, model: Decoder, optimizer: optax.GradientTransformation, config: GRPOConfig, temperature: float):
        super().__init__(model, optimizer, partial(_loss, config, temperature))


def _loss(config: GRPOConfig, temperature: float, graph: Any, params: Any, batch: MicroBatch) -> tuple[Array, Any]:
    scores = row_scores(graph, params, batch.rows, temperature)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return grpo_loss(
        scores.logps, scores.entropy, batch.inputs, beta=config.beta, epsilon_low=config.epsilon, epsilon_high=high
    )
