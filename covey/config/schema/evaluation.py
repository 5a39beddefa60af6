"""Settings of the section `evaluation`."""

from collections.abc import Iterable
from typing import Literal

from covey.config.base import GroupSize, NonNegativeInt, Problem, problem_if
from covey.config.schema.rollout import SamplingConfig


class EvalConfig(SamplingConfig, section="evaluation", unset="The rollout's when not set."):
    """Evaluation before, during and after training."""

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
            *problem_if(
                self.pass_k > self.samples,
                "pass_k",
                f"evaluation.pass_k is {self.pass_k}, and {self.samples} completions of each prompt are sampled",
                f"at most {self.samples}, or an evaluation.samples of {self.pass_k}",
            ),
            *problem_if(
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
