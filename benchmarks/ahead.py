"""Benchmark of samples drawn ahead: seconds of a step and idle time of each side, by the latency of rewards.

    python -m benchmarks.ahead

The class with which a run samples ahead is driven by sides that sleep instead of computing, as if each had devices of
its own: the times are those of the schedule, whatever else the machine does. A latency is that of each step, or the
mean of an exponential distribution. All cases run at once.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

from covey.data.loader import PromptLoader
from covey.rewards.scoring import RewardRunner
from covey.rl.metrics import StepStats
from covey.rl.rollouts import FailureCounts, Rollouts, SamplingContext
from covey.rl.step_data import PromptBatch, RolloutBatch

STEPS, LEADS, ROLLOUT = 40, (0, 1, 4), 0.5
"""Number of steps, numbers of steps ahead, and seconds in which a step is sampled without rewards."""
SIDES = ((0.5, 0.0, False), (0.5, 0.2, False), (0.5, 2.0, False), (0.5, 2.0, True), (1.0, 0.5, True))
"""Seconds of training, latency, and whether it varies."""


def run(training: float, latency: float, varies: bool, lead: int) -> dict[str, Any]:
    """Make `STEPS` steps with samples of `lead` steps before; return their figures."""
    waits = [random.Random(step).expovariate(1 / latency) if varies else latency for step in range(STEPS)]

    class Sleeps(SimpleNamespace):
        def sample(self, prompts: PromptBatch) -> RolloutBatch:
            time.sleep(ROLLOUT)
            return RolloutBatch([])

        def replace_tied(self, rollout: RolloutBatch, prompts: PromptBatch, context: SamplingContext) -> RolloutBatch:
            time.sleep(waits[prompts.step])
            return rollout

    nothing: Any = lambda *_: None  # noqa: E731
    learner: Any = Sleeps(
        training=SimpleNamespace(off_policy_steps=lead),
        step=0,
        sampled=(),
        algorithm=SimpleNamespace(max_sampling_rounds=1, needs_whole_step=True),
        config=SimpleNamespace(num_iterations=1),
        sizes=None,
        stats=StepStats(),
        failures=FailureCounts(RewardRunner(), None),
        cluster=SimpleNamespace(
            config=SimpleNamespace(runs_ahead=lead > 0),
            rollout=SimpleNamespace(update_params=nothing),
            copy_weights=nothing,
            sync_weights=nothing,
        ),
        on_phase=nothing,
        phase=lambda name: nullcontext(),
        score=lambda rollout: rollout,
    )
    began = time.perf_counter()
    with Rollouts(learner, PromptLoader(["sleep"], 1), STEPS).running() as rollouts:
        for step in range(STEPS):
            list(rollouts.of_step(step))
            time.sleep(training)
            rollouts.new_weights()
    seconds = (time.perf_counter() - began) / STEPS
    sides = {"sampling": ROLLOUT, "scoring": sum(waits) / STEPS, "training": training}
    idle = {f"{side} idle": 1 - busy / seconds for side, busy in sides.items()}
    return {"training": training, "latency": latency, "varies": varies, "lead": lead, "step": seconds, **idle}


def main() -> None:
    """Print a table, and a line of JSON."""
    cases = [(*sides, lead) for sides, lead in product(SIDES, LEADS)]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(run, *zip(*cases, strict=True)))
    print("| training s | latency s | k | step s | sampling, scoring, training idle |\n|---|---|---|---|---|")
    for row in found:
        latency = f"{row['latency']:g}{' in the mean' if row['varies'] else ''}"
        idle = ", ".join(f"{row[f'{side} idle']:.0%}" for side in ("sampling", "scoring", "training"))
        print(f"| {row['training']:g} | {latency} | {row['lead']} | {row['step']:.2f} | {idle} |")
    print(json.dumps({"part": "ahead", "rollout": ROLLOUT, "cases": found}))


if __name__ == "__main__":
    main()
