"""Training with environments, by a script, on a decoder of random weights: what a run does before and between steps."""

import random
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from covey import EnvironmentRunner, Step
from covey.config.schema import EnvsConfig, GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.errors import EpisodeError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig
from covey.text.tokenizer import Tokenizer
from covey_envs.trl import TrlFactory

pytestmark = pytest.mark.usefixtures("shared_programs")

PLAIN = Tokenizer.from_folder(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
TOKENIZER = Tokenizer(
    PLAIN.inner,
    eos_id=PLAIN.eos_id,
    stop_ids=[PLAIN.eos_id, *range(5, PLAIN.vocab_size, 9)],
    chat_template="{% if tools %}{% endif %}" + str(PLAIN.chat_template),
)
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, max_positions=256,
)  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": "Play." * (1 + number)}]} for number in range(2)]


class Lengths:
    """Rewards a reply by its length."""

    def __init__(self, row: Mapping[str, Any]):
        self.row = row

    def reset(self) -> Any:
        return self.row["prompt"]

    def step(self, reply: str) -> Step:
        return Step(reward=float(len(reply)), done=True)


def trained(factory: Any, steps: int = 2, samples: int = 4, rows: Any = ROWS, **envs: Any) -> GRPOLearner:
    config = EnvsConfig(environment="guess", max_turn_tokens=4, max_turns=2, **envs)
    training = RLTrainingConfig(prompts_per_step=2, max_steps=steps, row_length=128)
    rollout = RolloutConfig(max_prompt_length=100, max_new_tokens=8, slots=4, decode_chunk=4)
    with EnvironmentRunner(factory, config) as environments:
        cluster = RLCluster(
            actor=Decoder(MODEL, rngs=nnx.Rngs(0)),
            tokenizer=TOKENIZER,
            cluster_config=ClusterConfig({}, training, rollout),
            environments=environments,
        )
        groups: list[Any] = []
        learner = GRPOLearner(
            rl_cluster=cluster,
            grpo_config=GRPOConfig(num_generations=samples, beta=0.0),
            observers=[lambda record: groups.extend((record.step, group) for group in record.groups)],
        )
        learner.phases = []  # type: ignore[attr-defined]
        learner.on_phase = learner.phases.append  # type: ignore[attr-defined]
        learner.train(rows)
        learner.sampled = groups  # type: ignore[attr-defined]
        return learner


@pytest.mark.slow
def test_a_rehearsal_changes_no_bit_of_a_run_and_a_run_that_goes_on_has_none() -> None:
    drawn = []
    for rehearsal in (True, False):
        learner: Any = trained(Lengths, rehearsal=rehearsal)
        assert ("rehearsing the environment" in learner.phases) == rehearsal
        drawn.append([c.tokens.tobytes() + c.logps.tobytes() for _, g in learner.sampled for c in g.completions])
        weights = np.asarray(nnx.state(learner.cluster.rollout.model)["embed"]["embedding"][...])
        drawn[-1].append(weights.tobytes())
        learner.phases.clear()
        learner.train(ROWS)
        assert "rehearsing the environment" not in learner.phases
    assert drawn[0] == drawn[1]


GRIDS = threading.Lock()


class TwoGames:
    """Two games in one class, in the shape of TRL's `environment_factory`: one has a hidden word and one prompt, the
    other draws where a ball falls at random and shows it in its prompt.
    """

    draws = random.Random(0)

    def reset(self, env: str, **row: Any) -> str:
        with GRIDS:
            self.ball = self.draws.randrange(3)
        return "Guess the word." if env == "word" else f"The ball is in column {self.ball}."

    def move(self, column: int) -> str:
        """Move below the ball.

        Args:
            column: The column.
        """
        return "caught" if column == self.ball else "missed"

    def get_reward(self) -> float:
        return float(self.ball)


class Rotates:
    """A server that gives each episode the next of its three tasks, and knows nothing of rows."""

    numbers = count()

    def __init__(self, row: Mapping[str, Any]):
        self.task = next(self.numbers) % 3

    def reset(self) -> str:
        return f"Task {self.task}:"

    def step(self, reply: str) -> Step:
        return Step(reward=float(len(reply)), done=True)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [TrlFactory(TwoGames), Rotates])
def test_samples_with_equal_prompts_are_compared_and_single_ones_are_dropped_and_counted(factory: Any) -> None:
    rows = [{**row, "env": env} for row, env in zip(ROWS, ("word", "ball"), strict=True)]
    form: Any = {} if factory is Rotates else {"tool_format": "hermes"}
    with pytest.raises(EpisodeError, match=r"different prompts(.|\n)*envs\.different_prompts: group"):
        trained(factory, rows=rows, rehearsal=False, **form)
    learner: Any = trained(factory, rows=rows, different_prompts="group", **form)
    for step in (1, 2):
        groups = [group for number, group in learner.sampled if number == step]
        sizes = [len(group.completions) for group in groups]
        assert min(sizes) > 1
        assert sum(sizes) + learner.history.rows[step - 1]["env/dropped"] == 8
        for group in groups:
            assert group.advantages.shape == group.rewards.shape == (len(group.completions),)
            assert abs(group.advantages.sum()) < 1e-5
        if factory is Rotates:  # 4 samples of 3 tasks: one pair in each of two rows
            assert sizes == [2, 2]


@pytest.mark.slow
def test_a_step_without_two_equal_prompts_is_an_error_with_a_fix() -> None:
    class Never(Rotates):
        def reset(self) -> str:
            return f"{random.random()}"

    with pytest.raises(EpisodeError, match=r"all 8 episodes of a step(.|\n)*grpo\.num_generations"):
        trained(Never, different_prompts="group")
