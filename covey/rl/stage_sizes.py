"""Micro-batch sizes of the stages rollout, reference log-probs, old log-probs and training, which a recipe sets.

All sizes count prompts before the ×G repeat: inside a stage that is size × num_generations completions. This module
imports neither JAX nor NumPy.
"""

import math
from dataclasses import dataclass

from covey.config.schema import RLTrainingConfig
from covey.errors import RecipeError, raise_together

STAGES = ("rollout", "ref_logps", "old_logps", "train")
"""Names of the stages; their sizes are the settings `training.<stage>_micro_batch_size`."""
DIVISORS_SHOWN = 6


@dataclass(frozen=True)
class StageSizes:
    """Number of prompts that each stage processes at a time, before the ×G repeat."""

    rollout: int
    ref_logps: int
    old_logps: int
    train: int

    @property
    def rollout_batch_size(self) -> int:
        """Number of prompts that are sampled and scored together: whole training micro-batches, at least as many as the
        least common multiple of the stages before training, so that these work in full slices.

        >>> StageSizes(rollout=4, ref_logps=6, old_logps=2, train=5).rollout_batch_size
        15
        """
        needed = math.lcm(self.rollout, self.ref_logps, self.old_logps)
        return -(-needed // self.train) * self.train


def stage_sizes(training: RLTrainingConfig, num_generations: int) -> StageSizes:
    """Return the stage sizes that `training` sets; None means the whole step, `prompts_per_step` prompts.

    A size that does not divide the step is legal: its last slice is short.

    Raises:
        RecipeError: sizes are below 1 or above the step; one error lists them all, each with its arithmetic.
    """
    step = training.prompts_per_step
    settings = {stage: getattr(training, f"{stage}_micro_batch_size") for stage in STAGES}
    sizes = {stage: step if size is None else size for stage, size in settings.items()}
    bad = {stage: size for stage, size in sizes.items() if not 1 <= size <= step}
    raise_together([_size_error(stage, size, step, num_generations) for stage, size in bad.items()])
    return StageSizes(**sizes)


def _size_error(stage: str, size: int, step: int, num_generations: int) -> RecipeError:
    """Return the error for an invalid stage size, in prompts and in completions, with the valid sizes."""
    name, G = f"{stage}_micro_batch_size", num_generations
    are_samples = G > 1 and size % G == 0 and 1 <= size // G <= step
    return RecipeError(
        f"{name} {size} prompts × num_generations {G} = {size * G} samples, "
        f"and a step has prompts_per_step {step} × {G} = {step * G}",
        want=f"1 to {step} prompts: counted before the ×{G} repeat, × {G} samples inside the stage; "
        f"the nearest that divide the step evenly: {_divisors_near(size, step)}",
        fix=f"{min(max(size, 1), step)}, or null for the whole step"
        + (f"; {size} samples would be {size // G} prompts" if are_samples else ""),
        where=f"training.{name}",
    )


def _divisors_near(size: int, step: int) -> str:
    divisors = [n for n in range(1, step + 1) if step % n == 0]
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - size))[:DIVISORS_SHOWN])))
