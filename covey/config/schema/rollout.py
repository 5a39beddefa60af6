"""Settings of sampling: the section `rollout`, and the section `evaluation`, whose samples have a distribution of their
own.
"""

from collections.abc import Iterable
from typing import Literal

from covey.config.base import (
    Config,
    Fraction,
    GroupSize,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Problem,
    refuse_if,
    setting,
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


class RolloutConfig(SamplingConfig, section="rollout", on_resume="report"):
    """Sampling of completions."""

    max_prompt_length: PositiveInt = 256
    """Largest length of a prompt in tokens; training.too_long says what happens to a longer one."""
    max_new_tokens: PositiveInt = 512
    """Largest number of tokens of a completion, the stop token included."""
    seed: Int = setting(0, on_resume="refuse")
    """Seed of the noise; in a recipe the run's seed."""
    slots: PositiveInt = setting(32, on_resume="ignore")
    """Number of completions decoded side by side."""
    decode_chunk: PositiveInt = 8
    """Number of decode steps between two checks for finished slots."""
    kv_cache_size: Int | None = setting(None, on_resume="ignore")
    """Largest number of tokens in a slot's cache; max_prompt_length + max_new_tokens when not set."""
    tool: Literal["none", "calculator"] = "none"
    """calculator: the text that the model writes between the first two of tool_markers is calculated, and the result is
    inserted after it, between the other two. Inserted tokens count toward max_new_tokens and carry no loss.
    """
    tool_markers: tuple[str, ...] = CALCULATOR_MARKERS
    """Four control tokens of the tokenizer: begin and end of a question, begin and end of its answer."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion as a stop token does. Its text ends before the string; its tokens include the one
    that completes the string.
    """

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for an empty stop string."""
        return refuse_if("" in self.stop, "stop", "rollout.stop has an empty string", "strings of a character or more")

    def with_seed(self, seed: int) -> "RolloutConfig":
        """Return these settings with another seed."""
        return type(self).from_checked(vars(self) | {"seed": seed})


class EvalConfig(Config, section="evaluation", on_resume="ignore"):
    """Evaluation before, during and after training."""

    temperature: NonNegativeFloat | None = None
    """Divides the logits; 0 is greedy. The rollout's when not set."""
    top_p: Fraction | None = None
    """Keep the smallest set of most likely tokens whose probabilities add up to at least this; 1 is off. The rollout's
    when not set.
    """
    top_k: NonNegativeInt | None = None
    """Number of most likely tokens to keep; 0 is off. The rollout's when not set."""
    min_p: Probability | None = None
    """Keep tokens that have at least this fraction of the probability of the most likely one (Nguyen et al., 2024,
    arXiv:2407.01082); 0 is off. The rollout's when not set.
    """
    prompts: NonNegativeInt = 100
    """Number of held-out prompts; 0 means all."""
    during_prompts: NonNegativeInt | None = None
    """covey train: number of held-out prompts of evaluations during training; `prompts` when not set, 0 means all."""
    samples: GroupSize = 1
    """Number of completions sampled for each prompt."""
    accuracy: str = ""
    """Reward function that is 1 or more for a right answer."""
    partial: str = ""
    """Reward function that is 1 or more for a nearly right answer."""
    format: str = ""
    """Reward function that is 1 or more for a well-formed answer."""
    pass_k: NonNegativeInt = 0
    """Largest k of pass@k, at most `samples`: one of k answers is right, by the function of accuracy; 0 is off."""
    preset: Literal["greedy", "standard", "liberal", "all"] | None = None
    """Sampling by name (temperature, top_k, top_p): greedy 1e-4, 1, 1; standard 0.7, 50, 0.95; liberal 0.85, 2000, 1;
    all evaluates under each of them, and during training under the first.
    """

    @property
    def judges(self) -> dict[str, str]:
        """Names of the reward functions that judge completions, by setting."""
        return {name: value for name in ("accuracy", "partial", "format") if (value := getattr(self, name))}

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for settings of pass@k and of sampling that exclude each other."""
        twice = [name for name in SamplingConfig.kinds if self.preset and getattr(self, name) is not None]
        text = f"is set, and evaluation.preset {self.preset} sets it too"
        return [
            *refuse_if(
                self.pass_k > self.samples,
                "pass_k",
                f"evaluation.pass_k is {self.pass_k}, and {self.samples} completions of each prompt are sampled",
                f"at most {self.samples}, or an evaluation.samples of {self.pass_k}",
            ),
            *refuse_if(
                self.pass_k and not self.accuracy,
                "pass_k",
                "evaluation.pass_k is set, and nothing says what is right",
                "0, or the name of a reward function in evaluation.accuracy",
            ),
            *(Problem(name, f"evaluation.{name} {text}", "null for one of the two") for name in twice),
        ]


class SFTEvalConfig(EvalConfig):
    """Evaluation before and after supervised training: the loss on held-out examples, and a few answers."""

    answers: NonNegativeInt = 4
    """Number of held-out prompts that are also answered, judged by accuracy and format where those are named; 0 is
    none. A prompt that leaves no room for rollout.max_new_tokens is passed over.
    """
