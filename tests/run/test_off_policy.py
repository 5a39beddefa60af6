"""`training.off_policy_steps`: samples that are drawn ahead follow from the numbers of steps, never from the clock."""

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from covey import (
    ClusterConfig,
    EvalConfig,
    GRPOConfig,
    GRPOLearner,
    OptimizerConfig,
    RLCluster,
    RLTrainingConfig,
    RolloutConfig,
)
from covey.config import recipe
from covey.errors import RecipeError, ResumeError, Stopped
from covey.monitor.record import StepRecord
from covey.monitor.run_files import METRICS, SAMPLES
from covey.rl.rollouts import Rollouts

pytestmark = pytest.mark.usefixtures("shared_programs", "small_scratch")

ROWS = [{"prompt": f"{a}+{b}="} for a in range(1, 6) for b in range(1, 5)]
STEPS = 6


class InTurn(ClusterConfig):
    """Settings of a cluster that samples and trains in turn."""

    runs_ahead = False  # type: ignore[assignment]


class Thread(ClusterConfig):
    """Settings of a cluster in which threads draw ahead, with k = 0 too."""

    runs_ahead = True  # type: ignore[assignment]


How = type[InTurn] | type[Thread]


def length(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    time.sleep(random.random() / 50)  # so that the threads meet in another order each time
    return [float(len(text) % 3) for text in completions]


def tied(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def slow(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    time.sleep(0.3)
    return length(prompts, completions)


def learner_of(lead: int, how: How = InTurn, grpo: GRPOConfig | None = None, **more: Any) -> GRPOLearner:
    training = RLTrainingConfig(
        max_steps=STEPS, prompts_per_step=2, actor_optimizer=OptimizerConfig(learning_rate=3e-3), row_length=64,
        max_tokens_per_micro_batch=64, off_policy_steps=lead, checkpoint_every_n_steps=1,
        token_values_every_n_steps=0, eval_every_n_steps=more.pop("evaluate", 0),
    )  # fmt: skip
    rollout = RolloutConfig(max_new_tokens=4, max_prompt_length=8, slots=4, seed=3)
    cluster = RLCluster.load(
        actor="scratch:arithmetic-tiny@1",
        cluster_config=how(training_config=training, rollout_config=rollout),
    )
    grpo = grpo or GRPOConfig(num_generations=2, beta=0.0)
    others = {"observers": [], "eval_config": EvalConfig(prompts=2)} | more
    return GRPOLearner(rl_cluster=cluster, grpo_config=grpo, **{"reward_fns": length, **others})


def digest_of(learner: GRPOLearner) -> str:
    leaves = jax.tree.leaves(learner.cluster.state())
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


class Kept:
    """The completions of each step, and the weights after it."""

    def __init__(self, learner: GRPOLearner):
        self.tokens: list[list[list[int]]] = []
        self.weights = [learner.cluster.copy_weights()] if learner.cluster.trainer else []
        self._learner = learner
        learner.observers.append(self)

    def __call__(self, record: StepRecord) -> None:
        self.tokens.append([c.tokens.tolist() for group in record.groups for c in group.completions])
        self.weights.append(self._learner.cluster.copy_weights())


def trained(lead: int, how: How = InTurn, **more: Any) -> tuple[list[list[list[int]]], str, list[float]]:
    """Completions of each step, digest of the last weights, and the rewards of evaluations behind the steps."""
    learner = learner_of(lead, how, **more)
    kept = Kept(learner)
    learner.train(ROWS, ROWS[:2])
    return kept.tokens, digest_of(learner), [*learner.history["eval/reward"], learner.evaluations["after"]["reward"]]


@pytest.mark.slow
@pytest.mark.parametrize("lead", [1, 3])
def test_a_step_is_drawn_by_the_weights_of_k_steps_before(lead: int) -> None:
    learner = learner_of(lead)
    learner.prepare(STEPS)
    kept = Kept(learner)
    learner.train(ROWS)
    assert [row["sampling/staleness"] for row in learner.history.rows] == [min(step, lead) for step in range(STEPS)]
    loader = learner_of(lead).loader(ROWS)
    for step in range(STEPS):
        learner.cluster.rollout.update_params(kept.weights[max(step - lead, 0)])
        groups = learner.cluster.generate(next(loader), 2, step=step)
        assert [c.tokens.tolist() for group in groups for c in group.completions] == kept.tokens[step]


MOVING = {"grpo": GRPOConfig(num_generations=2, beta=0.1, kl_target=0.01, reference_every_n_updates=2)}
REPLACING = {"grpo": GRPOConfig(num_generations=2, beta=0.0, max_sampling_rounds=2)}


@pytest.mark.slow
@pytest.mark.parametrize(("lead", "more"), [(0, {}), (1, MOVING), (3, REPLACING)])
def test_threads_give_the_bits_of_turns(lead: int, more: dict[str, Any]) -> None:
    """With a reward of random duration, evaluations in between, a reference and a β that follow the steps, and prompts
    that replace others once these are scored.
    """
    alone, evaluated = trained(lead, **more), trained(lead, InTurn, evaluate=2, **more)
    assert trained(lead, Thread, evaluate=2, **more) == evaluated
    assert (*evaluated[:2], evaluated[2][-1:]) == alone
    assert (alone == trained(0, **more)) == (lead == 0)


@pytest.mark.slow
def test_weights_that_follow_the_clock_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that take the newest weights, whichever step they draw, give other samples: what replaces prompts that
    were sampled with the weights before is sampled after slow rewards.
    """
    expected = trained(3, **REPLACING)

    def newest(rollouts: Rollouts, weights: Any) -> Any:
        return original(rollouts, rollouts._learner.cluster.copy_weights())

    original = Rollouts._sampling_context
    monkeypatch.setattr(Rollouts, "_sampling_context", newest)
    assert trained(3, Thread, reward_fns=slow, **REPLACING) != expected


class KilledError(Exception):
    """Stands for the end of a process between the lines of a step and its checkpoint."""


def kill_at(step: int) -> Callable[[StepRecord], None]:
    def observe(record: StepRecord) -> None:
        if record.step == step:
            raise KilledError

    return observe


@pytest.mark.slow
@pytest.mark.parametrize(("lead", "how"), [(1, Thread), (3, InTurn), (3, Thread)])
def test_a_run_that_was_killed_goes_on_with_the_same_samples(lead: int, how: How, tmp_path: Path) -> None:
    straight = learner_of(lead)
    straight.train(ROWS, out=tmp_path / "straight")

    for step in (2, 5):
        with pytest.raises(KilledError):
            learner_of(lead, how, observers=[kill_at(step)]).train(ROWS, out=tmp_path / "killed")
    last = learner_of(lead, how)
    last.train(ROWS, out=tmp_path / "killed")
    assert digest_of(last) == digest_of(straight)
    assert (tmp_path / "killed" / SAMPLES).read_bytes() == (tmp_path / "straight" / SAMPLES).read_bytes()
    rows = (tmp_path / "killed" / METRICS).read_text().splitlines()
    ages = [json.loads(row)["sampling/staleness"] for row in rows]
    assert ages == [min(step, lead) for step in range(STEPS)]


@pytest.mark.slow
def test_a_signal_while_the_thread_draws_loses_no_order(tmp_path: Path) -> None:
    draws = iter(range(STEPS))

    def length_and_signal(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
        if next(draws) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return slow(prompts, completions)

    length_and_signal.__name__ = length.__name__
    for name, rewards in (("straight", length), ("stopped", length_and_signal), ("stopped", length)):
        learner = learner_of(2, Thread, reward_fns=rewards)
        with nullcontext() if rewards is length else pytest.raises(Stopped):
            learner.train(ROWS, out=tmp_path / name)
    assert (tmp_path / "stopped" / SAMPLES).read_bytes() == (tmp_path / "straight" / SAMPLES).read_bytes()
    assert len(learner.history["time/wait"]) == STEPS
    assert len(learner.history["time/rollout_wait"]) == STEPS - 2  # a checkpoint has no times of the steps drawn ahead


@pytest.mark.slow
def test_a_checkpoint_with_another_number_of_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        learner_of(1, observers=[kill_at(2)]).train(ROWS, out=tmp_path / "run")
    with pytest.raises(ResumeError, match="off_policy_steps was 1, is 2"):
        learner_of(2).train(ROWS, out=tmp_path / "run")


@pytest.mark.slow
def test_dynamic_sampling_has_prompts_of_its_own_in_each_step() -> None:
    """What a step leaves over is not used by another: its prompts follow from its number."""
    prompts: dict[How, list[list[str]]] = {InTurn: [], Thread: []}
    for how, seen in prompts.items():
        learner = learner_of(1, how, **REPLACING)
        learner.observers.append(lambda record, seen=seen: seen.append([g.prompt for g in record.groups]))
        learner.train(ROWS)
        assert learner.loader(ROWS).position == STEPS * 4
    assert prompts[InTurn] == prompts[Thread]
    stream = learner_of(1).loader(ROWS).take(STEPS * 4)
    for step, used in enumerate(prompts[InTurn]):
        assert used == [row["prompt"] for row in stream[4 * step : 4 * step + len(used)]]


@pytest.mark.slow
def test_steps_that_were_drawn_with_other_settings_are_drawn_again(tmp_path: Path) -> None:
    """With other rounds, a step that is drawn ahead has other prompts: none is left out, and none is used twice."""
    used: list[list[str]] = []

    def run(rounds: int, *observers: Callable[[StepRecord], None]) -> GRPOLearner:
        learner = learner_of(1, grpo=GRPOConfig(num_generations=2, beta=0.0, max_sampling_rounds=rounds),
            reward_fns=tied, observers=[*observers])  # fmt: skip
        learner.train(ROWS, out=tmp_path / "run")
        return learner

    with pytest.raises(KilledError):
        run(3, kill_at(2))
    learner = run(2, lambda record: used.append([group.prompt for group in record.groups]))
    stream = [row["prompt"] for row in learner_of(1).loader(ROWS).take(6 + 4 * (STEPS - 1))]
    assert used == [stream[start : start + 4] for start in range(6, len(stream), 4)]
    assert list(learner.history["sampling/staleness"]) == [0, 0, 1, 1, 1, 1]


def test_old_samples_are_corrected_unless_that_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    assert learner_of(1).algorithm.correction == "token_truncate"
    assert learner_of(0).algorithm.correction == "none"
    assert not caplog.messages
    assert learner_of(1, grpo=GRPOConfig(correction="none")).algorithm.correction == "none"
    assert [message.partition(":")[0] for message in caplog.messages] == ["grpo.correction is none"]


def recipe_with(name: str, *settings: str) -> recipe.AnyRecipe:
    return recipe.load(name, ["--training.off_policy_steps=1", *(f"--{setting}" for setting in settings)])


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: learner_of(1, grpo=GRPOConfig(num_iterations=2)), "num_iterations is 2"),
        (lambda: learner_of(STEPS).train(ROWS), f"the run has {STEPS} steps"),
        (lambda: recipe_with("arithmetic-tiny", "grpo.algorithm=ppo", "grpo.num_generations=1"), "has a critic"),
    ],
)  # fmt: skip
def test_what_cannot_train_on_old_samples_is_refused_by_name(make: Callable[[], Any], part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        make()
