"""Benchmark of a run that samples ahead: seconds of a step by the latency of its reward or environment.

    python -m benchmarks.ahead_run [reward] [environment]

Rollout and actor have a virtual device each, whose programs use one core. A reward function takes 0, 0.2 or 2 s for the
completions of a step, or an environment for the first reply, in all episodes at once. Printed are medians of steps; a
line of JSON has the load of the machine too.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

ONE_CORE = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ONE_CORE}

import jax  # noqa: E402

from benchmarks.common import STILL, machine  # noqa: E402
from covey import (  # noqa: E402  # noqa: E402
    ClusterConfig,
    EnvironmentRunner,
    GRPOConfig,
    GRPOLearner,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
    Step,
    make_mesh,
)
from covey.config.schema import EnvsConfig  # noqa: E402
from covey.monitor.record import StepRecord  # noqa: E402

PLACES, LATENCIES, LEADS, MEASURED = ("reward", "environment"), (0.0, 0.2, 2.0), (0, 1, 4), 9
ROWS = [{"prompt": f"{a}+{b}="} for a in range(10, 40) for b in range(10, 40)]


class Latency:
    """Seconds that a reward or an environment takes. They change after as many steps as are measured and those before,
    whose samples may have been drawn with the latency before.
    """

    now = LATENCIES[0]

    def __init__(self, lead: int):
        self.steps = lead + 2 + MEASURED
        Latency.now = LATENCIES[0]

    def observe(self, record: StepRecord) -> None:
        Latency.now = LATENCIES[min(record.step // self.steps, len(LATENCIES) - 1)]


def reward(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward that waits once for all completions of a step."""
    time.sleep(Latency.now)
    return [float(len(text) % 3) for text in completions]


class Environment:
    """Environment of two turns that waits in the first one."""

    def __init__(self, row: Mapping[str, Any]):
        self.prompt, self.turns = row["prompt"], 0

    def reset(self) -> str:
        return str(self.prompt)

    def step(self, reply: str) -> Step:
        self.turns += 1
        if self.turns == 1:
            time.sleep(Latency.now)
        return Step("1+1=", reward=float(len(reply) % 3), done=self.turns == 2)


def run(where: str, lead: int) -> list[dict[str, Any]]:
    """Train with samples of `lead` steps before; return the figures of each latency of the reward or environment."""
    latency = Latency(lead)
    training = RLTrainingConfig(
        max_steps=len(LATENCIES) * latency.steps, prompts_per_step=4, actor_optimizer=STILL, row_length=64,
        max_tokens_per_micro_batch=256, off_policy_steps=lead, token_values_every_n_steps=0,
    )  # fmt: skip
    rollout = RolloutConfig(max_new_tokens=24, max_prompt_length=8, slots=16, seed=1)
    meshes = {role: make_mesh((1,), ("fsdp",), [device]) for role, device in zip(Role, jax.devices(), strict=False)}
    envs = EnvsConfig(environment="guess", max_turns=2, max_turn_tokens=8, max_live=16)
    with EnvironmentRunner(Environment, envs) as environments:
        cluster = RLCluster.load(
            actor="scratch:arithmetic-tiny@1",
            cluster_config=ClusterConfig(meshes, training, rollout),
            environments=environments if where == "environment" else None,
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            grpo_config=GRPOConfig(num_generations=4, beta=0.0),
            reward_fns=None if where == "environment" else reward,
            observers=[latency.observe],
        )
        learner.train(ROWS)
    stages = [learner.history.rows[n * latency.steps :][: latency.steps] for n in range(len(LATENCIES))]
    return [
        {
            "where": where,
            "lead": lead,
            "latency": seconds,
            "step": statistics.median(r["step_time"] for r in rows[-MEASURED:]),
        }
        for seconds, rows in zip(LATENCIES, stages, strict=True)
    ]


def main() -> None:
    """Print a table, and a line of JSON."""
    found = [row for where in sys.argv[1:] or PLACES for lead in LEADS for row in run(where, lead)]
    print("| latency in | s | k | step s |\n|---|---|---|---|")
    for row in sorted(found, key=lambda row: (row["where"], row["latency"], row["lead"])):
        print(f"| {row['where']} | {row['latency']:g} | {row['lead']} | {row['step']:.2f} |")
    print(json.dumps({"part": "ahead_run", "steps": found, "load": os.getloadavg(), "machine": machine()}))


if __name__ == "__main__":
    main()
