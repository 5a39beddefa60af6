"""A user's program with types: `make release-check` has mypy read it against the installed wheel, in strict mode.

Without covey's `py.typed` every name below would be Any, and mypy would refuse the lines that state a type.
"""

from collections.abc import Sequence
from typing import Any, assert_type

from covey import (
    ClusterConfig,
    CoveyError,
    GRPOConfig,
    GRPOLearner,
    OptimizerConfig,
    RLCluster,
    RLTrainingConfig,
    RolloutConfig,
)


def brevity(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """Gives 1 to a completion of at most eight words, else 0."""
    return [1.0 if len(text.split()) <= 8 else 0.0 for text in completions]


def cluster_config(steps: int) -> ClusterConfig:
    """Settings of a short run."""
    training = RLTrainingConfig(max_steps=steps, actor_optimizer=OptimizerConfig(learning_rate=1e-5))
    return ClusterConfig(training_config=training, rollout_config=RolloutConfig(max_new_tokens=48))


def train(cluster: RLCluster, rows: Sequence[dict[str, Any]]) -> str:
    """Trains on `rows` and returns what went wrong, or an empty text."""
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=brevity, grpo_config=GRPOConfig(beta=0.0))
    assert_type(learner, GRPOLearner)
    try:
        learner.train(rows)
    except CoveyError as error:
        return str(error)
    return ""


def refused() -> GRPOConfig:
    """A mistake that mypy finds: an unused `type: ignore` is an error in strict mode."""
    return GRPOConfig(num_generations="four")  # type: ignore[arg-type]


def main() -> None:
    """Use what needs no model."""
    config = cluster_config(steps=5)
    assert_type(config.rollout_config, RolloutConfig)
    assert_type(config.rollout_config.max_new_tokens, int)
    assert config.rollout_config.max_new_tokens == 48
    assert brevity(["Say hello."], ["Hello.", "hello " * 9]) == [1.0, 0.0]


if __name__ == "__main__":
    main()
