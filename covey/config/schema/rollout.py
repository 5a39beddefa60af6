"""Settings of the section `rollout`: how completions are sampled."""

from typing import Literal

from covey.config.base import Decisive, Ignored, Int, PositiveInt, without_check
from covey.config.schema.sampling import SamplingConfig

CALCULATOR_MARKERS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


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
