"""Valid range of each number in a recipe."""

from collections.abc import Iterator
from operator import attrgetter

from covey.config import strict_yaml

Problem = tuple[str, str, str]
"""Dotted name of a setting, description of its problem, and values that would be valid."""


def out_of_range(tree: object) -> Iterator[Problem]:
    """Yield a problem for each out-of-range number of `tree`: a recipe, or a dataclass with some of its parts."""
    for key in (k for k in strict_yaml.leaves(type(tree)) if k in RANGES):
        yield from misplaced(key, attrgetter(key)(tree))


def misplaced(key: str, value: float | None) -> Iterator[Problem]:
    """Yield a problem if `value` is out of the range of the setting `key`."""
    if key in RANGES and value is not None and not _inside(value, RANGES[key]):
        yield key, f"{key} is {value}", _in_words(RANGES[key])


def _inside(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _in_words(interval: str) -> str:
    low, high = interval[1:-1].split(", ")
    lower = f"at least {low}" if interval[0] == "[" else f"more than {low}"
    upper = f" and at most {high}" if interval[-1] == "]" else f" and less than {high}"
    return lower + ("" if high == "inf" else upper)


_OPTIMIZER = {
    "learning_rate": "[0, inf)",
    "embedding_learning_rate": "[0, inf)",
    "unembedding_learning_rate": "[0, inf)",
    "vector_learning_rate": "[0, inf)",
    "initial_fraction": "(0, 1]",
    "b1": "[0, 1)",
    "b2": "[0, 1)",
    "eps": "(0, inf)",
    "momentum": "[0, 1)",
    "weight_decay": "[0, inf)",
    "warmup_ratio": "[0, 1)",
    "max_grad_norm": "[0, inf)",
}
RANGES = {
    **{f"training.{one}optimizer.{k}": v for one in ("", "actor_", "critic_") for k, v in _OPTIMIZER.items()},
    "seed": "[0, 2147483647]",
    "model.lora.rank": "[0, inf)",
    "model.lora.alpha": "(0, inf)",
    "model.mesh.data": "[1, inf)",
    "model.mesh.fsdp": "[1, inf)",
    "model.mesh.tp": "[1, inf)",
    "model.lora.dropout": "[0, 1)",
    "model.quantize_block": "[2, inf)",
    "data.train_fraction": "(0, 1]",
    "data.seed": "[0, 2147483647]",
    "rollout.max_prompt_length": "[1, inf)",
    "rollout.max_new_tokens": "[1, inf)",
    "rollout.temperature": "[0, inf)",
    "rollout.top_p": "(0, 1]",
    "rollout.top_k": "[0, inf)",
    "rollout.slots": "[1, inf)",
    "rollout.decode_chunk": "[1, inf)",
    "grpo.num_generations": "[1, inf)",
    "grpo.num_iterations": "[1, inf)",
    "grpo.epsilon": "(0, 1]",
    "grpo.epsilon_high": "(0, inf)",
    "grpo.delta": "(1, inf)",
    "grpo.dual_clip": "(1, inf)",
    "grpo.cap": "(0, inf)",
    "grpo.sapo_positive": "(0, inf)",
    "grpo.sapo_negative": "(0, inf)",
    "grpo.beta": "[0, inf)",
    "grpo.kl_target": "(0, inf)",
    "grpo.kl_horizon": "[1, inf)",
    "grpo.entropy_bonus": "[0, inf)",
    "grpo.correction_cap": "(0, inf)",
    "grpo.overlong_buffer": "[0, inf)",
    "grpo.overlong_penalty": "[0, inf)",
    "grpo.max_sampling_rounds": "[1, inf)",
    "grpo.gamma": "[0, 1]",
    "grpo.gae_lambda": "[0, 1]",
    "grpo.value_clip": "[0, inf)",
    "grpo.reference_every_n_updates": "[0, inf)",
    "grpo.reference_mixing": "(0, 1]",
    "reward_safety.workers": "[0, inf)",
    "reward_safety.timeout": "[0, inf)",
    "reward_safety.value": "(-inf, inf)",
    "reward_safety.budget": "[0, inf)",
    "training.max_steps": "[1, inf)",
    "training.num_epochs": "[1, inf)",
    "training.prompts_per_step": "[1, inf)",
    "training.batch_size": "[1, inf)",
    "training.max_length": "[2, inf)",
    "training.rollout_micro_batch_size": "[1, inf)",
    "training.ref_logps_micro_batch_size": "[1, inf)",
    "training.old_logps_micro_batch_size": "[1, inf)",
    "training.train_micro_batch_size": "[1, inf)",
    "training.eval_every_n_steps": "[0, inf)",
    "training.checkpoint_every_n_steps": "[0, inf)",
    "training.max_to_keep": "[1, inf)",
    "training.skip_nonfinite": "[0, inf)",
    "training.watchdog_seconds": "[0, inf)",
    "training.row_length": "[1, inf)",
    "training.max_tokens_per_micro_batch": "[1, inf)",
    "evaluation.prompts": "[0, inf)",
    "evaluation.during_prompts": "[0, inf)",
    "evaluation.samples": "[1, inf)",
    "evaluation.pass_k": "[0, inf)",
    "evaluation.answers": "[0, inf)",
    "evaluation.temperature": "[0, inf)",
    "evaluation.top_p": "(0, 1]",
    "evaluation.top_k": "[0, inf)",
}
"""Interval of valid values for each dotted name."""
