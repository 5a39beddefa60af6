"""Batches and loss of supervised fine-tuning: lay examples out as rows and compute the loss on them.

An example is one completion after its prompt: a group of one. So the rows of `packing.rows` hold several short
examples that do not attend to each other; the completion's stop token is its last scored token; prompt tokens are
inputs and never scored. The loss is the mean negative log-likelihood of all scored tokens of the step, whose number is
known in advance.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from covey.config.schema import SFTConfig
from covey.data.loader import FittedPrompts
from covey.data.rows import Row
from covey.errors import DataError
from covey.losses.logprobs import token_logps
from covey.packing.rows import Rows, pack, rows_at_a_time, split_micro_batches
from covey.parallel import processes
from covey.parallel.arrays import put_rows
from covey.text.tokenizer import Tokenizer
from covey.train.programs import LossFn
from covey.train.trainer import MicroBatch
from covey.types import Completion, FinishReason, Group, Mean, MetricSums


def supervised_loss(graph: Any, params: Any, rows: Rows) -> tuple[Float[Array, ""], MetricSums]:
    """Compute −Σ log p(token | its prefix in the example) over the scored tokens, in nats, and their entropy.

    A `LossFn`: the trainer divides by the number of scored tokens of the whole step.
    """
    scores = token_logps(graph, params, rows, temperature=1.0, entropy_gradient=False)
    count = rows.scored.sum().astype(jnp.float32)
    return -scores.logps.sum(), {"entropy": Mean(jax.lax.stop_gradient(scores.entropy).sum(), count)}


def drop_long_examples(
    examples: Sequence[Row], tokenizer: Tokenizer, config: SFTConfig, longest: int, data: str
) -> FittedPrompts:
    """Return the examples that have at most `config.max_length` tokens or may be truncated to it, and how many were
    dropped or are truncated.

    Args:
        longest: maximum length of the model itself; the smaller limit applies.
        data: name of the data in an error.

    Raises:
        DataError: an example is longer and `config.too_long` is "error", or no example is left.
    """
    limit, fitting, dropped, truncated = min(config.max_length, longest), [], 0, 0
    for number, example in enumerate(examples, 1):
        prompt, completion = encode_example(example, tokenizer, config.completion_only)
        over = len(prompt) + len(completion) > limit
        if over and config.too_long == "error":
            raise _too_long(f"row {number} of the {data}", len(prompt) + len(completion), limit, longest)
        if over and (config.too_long == "drop" or len(prompt) >= limit):
            dropped += 1
            continue
        truncated += over
        fitting.append(example)
    if not fitting:
        raise DataError(f"no row of the {data} has at most {limit} tokens", fix="--training.max-length N")
    return FittedPrompts(fitting, dropped, truncated)


def groups_of(
    examples: Sequence[Row], tokenizer: Tokenizer, config: SFTConfig, longest: int | None = None
) -> list[Group]:
    """Convert each example to a group of one completion, truncated to `config.max_length` tokens or `longest`."""
    limit = min(config.max_length, longest or config.max_length)
    return [_group(*encode_example(example, tokenizer, config.completion_only), limit) for example in examples]


def encode_example(
    example: Mapping[str, Any], tokenizer: Tokenizer, completion_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompt tokens, int32 [n], and the scored tokens, int32 [m], which end in the stop token.

    A scored token needs a token before it. So where the whole example is scored (plain text, or `completion_only`
    off), its first token is the prompt: the model's BOS where it has one.
    """
    prompt, answer = example["prompt"], example["completion"]
    if prompt == "":
        prompt_tokens, completion_tokens = tokenizer.encode_prompt(answer)[:1], tokenizer.encode_completion("", answer)
        return prompt_tokens, completion_tokens[1:] if prompt_tokens[0] == completion_tokens[0] else completion_tokens
    prompt_tokens, completion_tokens = tokenizer.encode_prompt(prompt), tokenizer.encode_completion(prompt, answer)
    if completion_only:
        return prompt_tokens, completion_tokens
    return prompt_tokens[:1], np.concatenate([prompt_tokens[1:], completion_tokens])


def pack_rows(groups: Sequence[Group], config: SFTConfig, compile_cost: float = 0.0) -> Rows:
    """Lay the step's examples out as rows for the device; for `compile_cost` see `packing.bins`."""
    packing: Literal["groups", "dense"] = "groups" if config.packing else "dense"
    return pack(
        groups,
        config.row_length,
        packing=packing,
        max_tokens=config.max_tokens_per_micro_batch,
        compile_cost=compile_cost,
    )


def put_micro_batches(rows: Rows, config: SFTConfig, like: Any, mesh: Mesh | None = None) -> Iterator[MicroBatch]:
    """Split `rows` into micro-batches on the devices that hold `like`, each with its number of scored tokens."""
    for part in split_micro_batches(rows, rows_at_a_time(rows, mesh, config.max_tokens_per_micro_batch)):
        yield MicroBatch(put_rows(part, like), float(part.scored.sum()))


class HeldOutLoss:
    """Loss on held-out examples, computed with the same rows and sums as in training.

    Args:
        graph: the decoder's `nnx.GraphDef`; each call passes the weights.
        loss_fn: the loss function, as in the trainer.

    Attributes:
        program: the jitted function of weights and rows.
    """

    def __init__(self, graph: Any, config: SFTConfig, loss_fn: LossFn = supervised_loss, mesh: Mesh | None = None):
        self.config, self.mesh = config, mesh
        self.program = processes.here().in_order(
            "held-out loss", jax.jit(lambda params, rows: loss_fn(graph, params, rows)[0])
        )

    def __call__(self, params: Any, groups: Sequence[Group]) -> dict[str, float]:
        """Return `loss`, in nats per token, and `perplexity`, its exponential."""
        total = count = 0.0
        for part in put_micro_batches(pack_rows(groups, self.config), self.config, params, self.mesh):
            total, count = total + float(self.program(params, part.batch)), count + part.denominator
        loss = total / (count or math.nan)
        return {"loss": loss, "perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    """Return exp(loss), at most e^700."""
    return math.exp(min(loss, 700.0))


def _group(prompt: np.ndarray, completion: np.ndarray, limit: int) -> Group:
    tokens, none = completion[: max(limit - len(prompt), 0)], np.zeros(0, np.float32)
    return Group("", prompt, (Completion(tokens, none, none, FinishReason.STOP),))


def _too_long(where: str, tokens: int, limit: int, longest: int) -> DataError:
    fix = "--training.too-long drop or truncate"
    return DataError(
        f"{where} has {tokens} tokens",
        want=f"at most {limit}",
        fix=fix if limit == longest else f"--training.max-length {min(tokens, longest)}, or {fix}",
    )
