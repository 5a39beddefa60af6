"""Worker of Covey, as its documentation tells a user to write it, with a recipe's default settings."""

from dataclasses import replace
from itertools import islice
from typing import Any

import jax
from flax import nnx

from benchmarks.peers.work import STEPS_OF_DATA, Work, even_words
from benchmarks.peers.worker import Steps
from covey.config.schema import GRPOConfig, LoRAConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
from covey.models.loading.weights import load
from covey.models.lora import split_trainable, with_lora
from covey.monitor.record import StepRecord
from covey.recipes import use_compilation_cache
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig


def main() -> None:
    """Set up, and train until the driver ends the process."""
    steps = Steps()
    steps.listen(jax.monitoring)
    use_compilation_cache()  # as every run does
    work = steps.work
    loaded = load(steps.folder, **steps.options.get("model", {}))
    lora = LoRAConfig(rank=work.lora_rank, alpha=work.lora_alpha)
    model = with_lora(loaded.model, lora) if work.lora_rank else loaded.model
    _, trainable, frozen = split_trainable(model)
    counts = [sum(x.size for x in jax.tree.leaves(nnx.to_pure_dict(part))) for part in (trainable, frozen)]
    cluster = RLCluster(actor=model, tokenizer=loaded.tokenizer, cluster_config=settings(work, steps.options))

    def over(record: StepRecord) -> None:
        steps.lengths = [len(c.tokens) for group in record.groups for c in group.completions]
        steps.phases = {name: record.metrics[f"time/{name}"] for name in ("rollout", "logps")}
        steps.turn()

    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=even_words,
        grpo_config=GRPOConfig(num_generations=work.samples, beta=work.beta, epsilon=work.epsilon),
        observers=[over],
    )
    rows = [{"prompt": text} for batch in islice(work.batches(), STEPS_OF_DATA) for text in batch]
    steps.ready(sum(counts), counts[0], ("jax", "jaxlib", "flax"))
    steps.turn()
    learner.train(rows)


def settings(work: Work, options: dict[str, Any]) -> ClusterConfig:
    """Return the settings of the work; all others are Covey's defaults, unless a variant's options set them."""
    optimizer = OptimizerConfig(
        learning_rate=work.learning_rate,
        b1=work.b1,
        b2=work.b2,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
        schedule="constant",
        warmup_ratio=0.0,
    )
    training = RLTrainingConfig(max_steps=work.steps, prompts_per_step=work.prompts, actor_optimizer=optimizer)
    rollout = RolloutConfig(
        max_prompt_length=work.max_prompt_length, max_new_tokens=work.max_new_tokens, temperature=work.temperature
    )
    return ClusterConfig(
        training_config=replace(training, **options.get("training", {})),
        rollout_config=replace(rollout, **options.get("rollout", {})),
    )


if __name__ == "__main__":
    main()
