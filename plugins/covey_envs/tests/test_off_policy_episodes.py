"""`training.off_policy_steps` with environments and tools: samples and weights do not follow the time at which answers
come.
"""

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import (
    EnvironmentRunner,
    EnvsConfig,
    GRPOConfig,
    GRPOLearner,
    OptimizerConfig,
    RLCluster,
    RLTrainingConfig,
    RolloutConfig,
    Step,
)
from covey.models.decoder import Decoder
from covey.monitor.run_files import CHECKPOINTS, SAMPLES
from covey.rl.learner import SAMPLED
from covey.train.checkpoint import Checkpointer
from covey_envs.tool_calls import FORMATS, Call, CallFormat
from plugins.covey_envs.tests.test_training import MODEL, TOKENIZER
from tests.run.test_off_policy import How, InTurn, KilledError, Thread, digest_of, kill_at

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]

STEPS, FAILED = 4, "env_failed"
ROWS = [{"prompt": [{"role": "user", "content": "play " * (1 + n % 3)}], "turns": 1 + n % 4} for n in range(10)]


def answer(text: str, seconds: float) -> str:
    time.sleep(random.random() * seconds)
    return f"so: {len(text)}"


def game(seconds: float) -> EnvironmentRunner:
    """Episodes of one to four turns, whose answers take up to so many seconds, and some of which fail."""

    class Game:
        def __init__(self, row: Mapping[str, Any]):
            self.prompt, self.turns = row["prompt"], row["turns"]

        def reset(self) -> Any:
            return self.prompt

        def step(self, reply: str) -> Step:
            self.turns -= 1
            if len(reply) % 5 == 4:
                raise ValueError("lost")
            return Step(answer(reply, seconds), float(len(reply) % 3), self.turns == 0)

    config = EnvsConfig(environment="guess", max_turn_tokens=7, rehearsal=False, on_error="none")
    return EnvironmentRunner(Game, config)


def tools(seconds: float) -> EnvironmentRunner:
    """A tool, of which three replies in four are a call."""

    def size(text: str) -> str:
        """Count the characters of a text.

        Args:
            text: The text.
        """
        return answer(text, seconds)

    return EnvironmentRunner(
        tools=[size], config=EnvsConfig(tools=("calculator",), tool_format="hermes", max_turn_tokens=7, max_turns=4)
    )


@pytest.fixture(autouse=True)
def most_replies_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(text: str) -> list[Call]:
        return [Call("size", {"text": text})] if len(text) % 4 else []

    monkeypatch.setitem(FORMATS, "hermes", CallFormat("hermes", calls, lambda schemas: "T"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def run_of(
    make: Callable[[float], EnvironmentRunner], lead: int, how: How, seconds: float, out: Path, *observers: Any
) -> str:
    """Train into `out`, as far as nothing stops it; return the digest of the last weights."""
    training = RLTrainingConfig(
        max_steps=STEPS, prompts_per_step=2, actor_optimizer=OptimizerConfig(learning_rate=3e-3), row_length=256,
        max_tokens_per_micro_batch=512, off_policy_steps=lead, checkpoint_every_n_steps=1,
        token_values_every_n_steps=0,
    )  # fmt: skip
    rollout = RolloutConfig(max_new_tokens=60, max_prompt_length=100, slots=4, decode_chunk=2, seed=3)
    with make(seconds) as environments:
        cluster = RLCluster(
            actor=Decoder(MODEL, rngs=nnx.Rngs(0)),
            tokenizer=TOKENIZER,
            cluster_config=how(training_config=training, rollout_config=rollout),
            environments=environments,
        )
        assert environments.answer_lag == (1 if lead else None)
        grpo = GRPOConfig(num_generations=3, beta=0.0)
        learner = GRPOLearner(rl_cluster=cluster, grpo_config=grpo, reward_fns=length, observers=list(observers))
        learner.train(ROWS, out=out)
    return digest_of(learner)


@pytest.mark.parametrize(("make", "lead"), [(game, 3), (tools, 1)])
def test_the_time_of_answers_changes_no_bit(make: Any, lead: int, tmp_path: Path) -> None:
    """In turns without delays; in a thread with random ones; and in a thread, with others, killed and gone on with."""
    expected = run_of(make, lead, InTurn, 0.0, tmp_path / "straight")
    assert run_of(make, lead, Thread, 0.02, tmp_path / "thread") == expected
    with pytest.raises(KilledError):
        run_of(make, lead, Thread, 0.01, tmp_path / "killed", kill_at(2))
    assert run_of(make, lead, Thread, 0.03, tmp_path / "killed") == expected
    kept = bytes_of(tmp_path / "straight")
    assert any(SAMPLED in name for name in kept)
    assert (kept[FAILED] != b"0") == (make is game)
    for name in ("thread", "killed"):
        assert bytes_of(tmp_path / name) == kept


def bytes_of(out: Path) -> dict[str, bytes]:
    """Samples of a run, and of its last checkpoint but one the arrays, among them drawn steps, and the number of
    failures of its environment.
    """
    with Checkpointer(out / CHECKPOINTS, read_only=True) as saves:
        arrays, extra = saves.restore(STEPS - 1)
    arrays = {jax.tree_util.keystr(name): leaf for name, leaf in jax.tree_util.tree_leaves_with_path(arrays)}
    failed = str(extra["learner"][FAILED]).encode()
    return {SAMPLES: (out / SAMPLES).read_bytes(), FAILED: failed} | {
        name: np.asarray(leaf).tobytes() for name, leaf in arrays.items()
    }
