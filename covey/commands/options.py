"""The settings of the commands that sample: trees like a recipe's, with the parts those commands need."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

from covey.configs import RolloutConfig


@dataclass(frozen=True)
class ChatOptions:
    """How `covey chat` answers."""

    seed: int = 0
    """Seed of the samples drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", replace(self.rollout, seed=self.seed))


@dataclass(frozen=True)
class GenerateOptions(ChatOptions):
    """How `covey generate` answers, and how often."""

    n: int = 1
    """Completions of the prompt."""


OptionsT = TypeVar("OptionsT", ChatOptions, GenerateOptions)
