"""Benchmark of the update: one optimizer step on a whole batch.

Groups in rows against one sample a row, each with layers recomputed in the backward pass (remat) and not.
"""

from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import STILL, Result, Settings, interleaved, megabytes, short
from benchmarks.sizes import Size
from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.policy import LossInputs, sequence_mean
from covey.packing.rows import (
    Rows,
    pack,
    padding_fraction,
    rows_at_a_time,
    scatter_to_rows,
    shape_of,
    split_micro_batches,
)
from covey.rl.batches import RowBatch, policy_loss_fn
from covey.sampling.logits import SamplingParams
from covey.train.optimizers import make_optimizer
from covey.train.trainer import MicroBatch, Trainer
from covey.types import Group
from covey_plan import work
from covey_plan.roofline import machine_peaks
from covey_plan.update_programs import gradients_program


def measure(settings: Settings) -> Result:
    """Update a trainer with remat and one without on both layouts of the same groups."""
    groups = settings.groups()
    batches = {packing: micro_batched(groups, packing, settings.shape) for packing in ("dense", "groups")}
    trainers = {name: trainer_of(settings, remat) for name, remat in (("remat", True), ("no remat", False))}
    pairs = {f"{packing}, {remat}": (trainers[remat], batches[packing]) for packing in batches for remat in trainers}
    pairs = {name: pairs[name] for name in settings.chosen(pairs)}
    runs = {name: partial(trainer.update, parts) for name, (trainer, parts) in pairs.items()}
    norms = [run()["grad_norm"] for run in runs.values()]
    facts = {name: _facts(trainer, parts) for name, (trainer, parts) in pairs.items()}
    tokens = sum(len(c.tokens) for g in groups for c in g.completions)
    checks = {"grad_norm_difference": short((max(norms) - min(norms)) / min(norms))}
    flops = work.training(settings.shape.model, list(map(shape_of, groups)), settings.lora)
    limit = flops / machine_peaks(settings.dtype).matmul
    return Result(interleaved(runs, settings.repeat), tokens, facts, checks, dict.fromkeys(runs, limit))


def trainer_of(settings: Settings, remat: bool) -> Trainer:
    """Return a trainer of the random model."""
    policy = policy_loss_fn(algorithm_of(GRPOConfig("grpo")), SamplingParams())
    return Trainer(settings.model(remat=remat), make_optimizer(STILL, 1), policy)


def micro_batched(groups: list[Group], packing: Any, size: Size) -> list[MicroBatch]:
    """Return a step's groups as the trainer takes them, with random advantages."""
    rows = pack(groups, size.row_length, packing=packing, max_tokens=size.micro_batch)
    together = rows_at_a_time(rows, None, size.micro_batch)
    pieces = list(split_micro_batches(RowBatch(rows, _inputs(rows, groups)), together))
    samples = sum(len(g.completions) for g in groups)
    return [MicroBatch(piece, samples / len(pieces)) for piece in pieces]


def _inputs(rows: Rows, groups: list[Group]) -> LossInputs:
    completions = [c for g in groups for c in g.completions]
    lengths = np.array([len(c.tokens) for c in completions])
    advantages = np.random.default_rng(4).normal(size=len(lengths))
    weights, _ = sequence_mean(lengths, int(lengths.max()))
    return LossInputs(
        advantage=scatter_to_rows(rows, list(map(np.full, lengths, advantages))),
        weight=scatter_to_rows(rows, list(map(np.full, lengths, weights))),
        rollout_logps=scatter_to_rows(rows, [c.logps for c in completions]),
        beta=np.zeros((len(rows.tokens), 1), np.float32),
    )


def _facts(trainer: Trainer, parts: list[MicroBatch]) -> dict[str, Any]:
    batches = [part.batch for part in parts]
    compiled = (
        gradients_program(trainer.programs, batches[0]).lower().compile()
    )  # its memory is half of what remat saves
    shape = (sum(len(b.rows.tokens) for b in batches), batches[0].rows.tokens.shape[1])
    waste = np.mean([padding_fraction(b.rows) for b in batches])
    return {"rows": "x".join(map(str, shape)), "padding": round(float(waste), 3), "temp_mb": megabytes(compiled)}
