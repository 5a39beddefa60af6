"""Training with environments, by a script, on a decoder of random weights: what a run does before and between steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from covey.config.schema import EnvsConfig, GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.envs import EnvironmentRunner, Step
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig
from covey.text.tokenizer import Tokenizer

PLAIN = Tokenizer.from_folder(Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama")
TOKENIZER = Tokenizer(
    PLAIN.inner,
    eos_id=PLAIN.eos_id,
    stop_ids=[PLAIN.eos_id, *range(5, PLAIN.vocab_size, 9)],
    chat_template=PLAIN.chat_template,
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


def trained(factory: Any, steps: int = 2, samples: int = 4, **envs: Any) -> GRPOLearner:
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
            observers=[lambda record: groups.extend(record.groups)],
        )
        learner.phases = []  # type: ignore[attr-defined]
        learner.on_phase = learner.phases.append  # type: ignore[attr-defined]
        learner.train(ROWS)
        learner.sampled = groups  # type: ignore[attr-defined]
        return learner


@pytest.mark.slow
def test_a_rehearsal_changes_no_bit_of_a_run_and_a_run_that_goes_on_has_none() -> None:
    drawn = []
    for rehearsal in (True, False):
        learner: Any = trained(Lengths, rehearsal=rehearsal)
        assert ("rehearsing the environment" in learner.phases) == rehearsal
        drawn.append([c.tokens.tobytes() + c.logps.tobytes() for g in learner.sampled for c in g.completions])
        weights = np.asarray(nnx.state(learner.cluster.rollout.model)["embed"]["embedding"][...])
        drawn[-1].append(weights.tobytes())
        learner.phases.clear()
        learner.train(ROWS)
        assert "rehearsing the environment" not in learner.phases
    assert drawn[0] == drawn[1]
