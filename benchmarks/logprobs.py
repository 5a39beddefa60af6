"""Benchmark of log-probs, forward and backward: groups in rows against one sample a row, chunked head against plain
logits.

The plain head is the textbook's: logits of every column at once, [R, M, V], log-softmax, gather. "dense, plain" is
therefore the padded batch that most trainers compute.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from benchmarks.common import Result, Settings, interleaved, megabytes, relative_difference
from benchmarks.sizes import Size
from covey.losses.logprobs import TokenLogps, token_logps
from covey.models.lora import split_trainable
from covey.packing.rows import (
    Rows,
    pack,
    padding_fraction,
    rows_at_a_time,
    shape_of,
    split_micro_batches,
    tree_attention,
    unpack,
)
from covey.types import Group
from covey_plan import work
from covey_plan.roofline import machine_peaks


def measure(settings: Settings) -> Result:
    """Compute the gradient of the sum of all log-probs by micro-batches, in each layout with each head."""
    parts = split_trainable(settings.model())
    groups = settings.groups()
    ways = {
        f"{packing}, {head}": (packing, score)
        for packing in ("dense", "groups")
        for head, score in (("plain", plain_scores), ("chunked", token_logps))
    }
    works = {name: _Work(parts, groups, *ways[name], settings.shape) for name in settings.chosen(ways)}
    results = {name: work() for name, work in works.items()}
    base = next(iter(results.values()))
    checks = {
        "logps_difference": max(relative_difference(logps, base[0]) for logps, _ in results.values()),
        "gradient_difference": max(relative_difference(grads, base[1]) for _, grads in results.values()),
    }
    seconds = interleaved({name: work.grads for name, work in works.items()}, settings.repeat)
    tokens = sum(len(c.tokens) for g in groups for c in g.completions)
    facts = {name: work.facts for name, work in works.items()}
    flops = work.training(settings.shape.model, list(map(shape_of, groups)), settings.lora)
    limit = flops / machine_peaks(settings.dtype).matmul
    return Result(seconds, tokens, facts, checks, dict.fromkeys(works, limit))


def plain_scores(graph: Any, params: Any, rows: Rows, temperature: float) -> TokenLogps:
    """Compute the same numbers as `token_logps` from the whole [R, M, V] array, as its reference."""
    model = nnx.merge(graph, params)
    hidden, _ = model(rows.tokens, rows.positions, tree_attention(model, rows))
    picked = jnp.take_along_axis(hidden, rows.gather_index[..., None], axis=1)
    logps = jax.nn.log_softmax(model.logits(picked) / temperature)
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    chosen = jnp.take_along_axis(logps, rows.target[..., None], axis=-1)[..., 0]
    return TokenLogps(jnp.where(rows.scored, chosen, 0.0), jnp.where(rows.scored, entropy, 0.0))


class _Work:
    """One layout with one head, compiled."""

    def __init__(self, parts: Any, groups: list[Group], packing: Any, score: Callable[..., TokenLogps], size: Size):
        graph, self.trainable, self.frozen = parts
        self.lengths = [len(c.tokens) for g in groups for c in g.completions]
        self.rows = pack(groups, size.row_length, packing=packing, max_tokens=size.micro_batch)
        self.batches = list(split_micro_batches(self.rows, rows_at_a_time(self.rows, None, size.micro_batch)))
        program = jax.jit(partial(_add_grads, graph, score), donate_argnums=(2,))
        lowered = program.lower(self.trainable, self.frozen, self._zeros(), self.batches[0])
        self.program = lowered.compile()
        self.facts = {
            "rows": "x".join(map(str, self.rows.tokens.shape)),
            "padding": round(padding_fraction(self.rows), 3),
            "temp_mb": megabytes(self.program),
        }

    def __call__(self) -> tuple[list[np.ndarray], Any]:
        """Return the log-probs by completion, and the gradients."""
        grads, scores = self._all()
        logps = np.concatenate([np.asarray(s.logps) for s in scores])[: len(self.rows.tokens)]
        return unpack(self.rows, logps, self.lengths), jax.tree.map(np.asarray, grads)

    def grads(self) -> Any:
        return self._all()[0]

    def _all(self) -> tuple[Any, list[TokenLogps]]:
        grads, scores = self._zeros(), []
        for batch in self.batches:
            grads, part = self.program(self.trainable, self.frozen, grads, batch)
            scores.append(part)
        return grads, scores

    def _zeros(self) -> Any:
        return jax.tree.map(jnp.zeros_like, self.trainable)


def _add_grads(
    graph: Any, score: Callable[..., TokenLogps], trainable: Any, frozen: Any, grads: Any, rows: Rows
) -> tuple[Any, TokenLogps]:
    def total(trainable: Any) -> tuple[Array, TokenLogps]:
        scores = score(graph, nnx.merge_state(trainable, frozen), rows, 1.0)
        return scores.logps.sum(), scores

    new, scores = jax.grad(total, has_aux=True)(trainable)
    return jax.tree.map(jnp.add, grads, new), scores
