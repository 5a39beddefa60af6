"""Settings of the section `rollout`, and of the distribution that tokens are drawn from in evaluations too."""

from typing import Literal

from covey.config.base import (
    Config,
    Decisive,
    Fraction,
    Ignored,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    without_check,
)

CALCULATOR_MARKERS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


class SamplingConfig(Config):
    """Temperature and truncation of the next-token distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Fraction = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to at least this; 1 is off."""
    top_k: NonNegativeInt = 0
    """Number of most likely tokens to keep; 0 is off."""
    min_p: Probability = 0.0
    """Keep tokens that have at least this fraction of the probability of the most likely one (Nguyen et al., 2024,
    arXiv:2407.01082); 0 is off.
    """


class RolloutConfig(SamplingConfig, section="rollout"):
    """Sampling of completions."""

    max_prompt_length: PositiveInt = 256
    """Largest length of a prompt in tokens; training.too_long says what happens to a longer one."""
    max_new_tokens: PositiveInt = 512
    """Largest number of tokens of a completion, the stop token included."""
    seed: Decisive[Int] = 0
    """Seed of the noise; in a recipe the run's seed."""
    slots: Ignored[PositiveInt] = 32
    """Number of completions decoded side by side."""
    decode_chunk: PositiveInt = 8
    """Number of decode steps between two checks for finished slots."""
    kv_cache_size: Ignored[Int | None] = None
    """Largest number of tokens in a slot's cache; max_prompt_length + max_new_tokens when not set."""
    tool: Literal["none", "calculator"] = "none"
    """calculator: the text that the model writes between the first two of tool_markers is calculated, and the result is
    inserted after it, between the other two. Inserted tokens count toward max_new_tokens and carry no loss.
    """
    tool_markers: tuple[str, ...] = CALCULATOR_MARKERS
    """Four control tokens of the tokenizer: begin and end of a question, begin and end of its answer."""

    def with_seed(self, seed: int) -> "RolloutConfig":
        """Return these settings with another seed."""
        return without_check(type(self), vars(self) | {"seed": seed})
