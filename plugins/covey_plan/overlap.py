"""Seconds of a step whose rollout and training run at once, and whether it pays to sample ahead
(`training.off_policy_steps`).

In the long run a step that is sampled ahead takes as long as the longer side, however many steps ahead; more than one
only evens out sides that vary. Waiting for rewards and environments, which a plan does not know, adds to the rollout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe
from covey.rl.stage_sizes import stage_sizes
from covey_plan.machines import Machine
from covey_plan.memory import SYNC, RunArrays
from covey_plan.roofline import PhaseTime

SETTING = "training.off_policy_steps"


@dataclass(frozen=True)
class Overlap:
    """Expected seconds of the two sides of a step.

    Attributes:
        rollout: seconds of sampling.
        training: seconds of everything else, with `sync`.
        sync: seconds of the transfer of new weights to the rollout's own devices, over one link of each.
        parts: number of parts of a step that are sampled one after the other; while one is, those before are trained
            on, if they are samples of the last weights. 1 where sampling and training take turns.
        shared: what both sides share, so that they cannot run at once; "" if nothing.
        off_policy_steps: number of steps that the recipe samples ahead.
    """

    rollout: float
    training: float
    sync: float
    parts: int
    shared: str
    off_policy_steps: int

    @property
    def on_last_weights(self) -> float:
        """Seconds of a step on samples of the last weights."""
        return self.rollout + self.training - (1 - 1 / self.parts) * min(self.rollout, self.training)

    @property
    def ahead(self) -> float:
        """Seconds of a step that is sampled during the step before it."""
        return self.on_last_weights if self.shared else max(self.rollout, self.training)

    @property
    def step(self) -> float:
        """Seconds of a step of the recipe."""
        return self.ahead if self.off_policy_steps else self.on_last_weights

    @property
    def pays(self) -> bool:
        """Whether steps that are sampled ahead are faster."""
        return self.ahead < self.on_last_weights

    def to_json(self) -> dict[str, Any]:
        """Return the figures in JSON's types."""
        return {
            "off_policy_steps": self.off_policy_steps,
            "pays": self.pays,
            "shared": self.shared,
            "seconds": {"rollout": self.rollout, "training": self.training, "sync": self.sync},
            "step_seconds": {"0": self.on_last_weights, "1": self.ahead},
            "idle": {side: 1 - getattr(self, side) / self.ahead for side in ("rollout", "training")},
        }

    def in_words(self) -> str:
        """Return whether sampling ahead pays as one line.

        >>> Overlap(3.0, 2.0, 0.1, 1, "", 0).in_words()
        'Sampling ahead (training.off_policy_steps 1) pays: 3 s a step in place of 5; rollout 3 s, training 2 s'
        """
        if self.shared:
            return (
                f"Sampling ahead ({SETTING}) does not pay: rollout and training share {self.shared}. It uses only the "
                "time in which rewards or environments are waited for, which is not counted here."
            )
        sides = f"rollout {self.rollout:.3g} s, training {self.training:.3g} s"
        times = f"{self.ahead:.3g} s a step in place of {self.on_last_weights:.3g}; {sides}"
        return f"Sampling ahead ({SETTING} {max(self.off_policy_steps, 1)}) pays: {times}"


def overlap_of(recipe: Recipe, phases: Sequence[PhaseTime], arrays: RunArrays, machine: Machine) -> Overlap:
    """Return the two sides of a step with these phases."""
    sync = sum(arrays.of(SYNC).during.get(SYNC, {}).values()) / machine.link / machine.memory_share
    rollout = sum(time.expected for time in phases if time.phase.name == "rollout")
    training = sum(time.expected for time in phases) - rollout + sync
    at_once = stage_sizes(recipe.training, recipe.grpo.num_generations).rollout_batch_size
    shared = "one processor" if machine.platform == "cpu" else "" if arrays.rollout else "their devices"
    whole = shared or algorithm_of(recipe.grpo).needs_whole_step
    parts = 1 if whole else math.ceil(recipe.training.prompts_per_step / at_once)
    return Overlap(rollout, training, sync, parts, shared, recipe.training.off_policy_steps)
