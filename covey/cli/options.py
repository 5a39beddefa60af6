"""Settings of the commands that use a model: trees like a recipe's, with the parts those commands need."""

import re
from dataclasses import field
from typing import Literal, TypeVar

from covey.config.base import Config, GroupSize, NonNegativeInt
from covey.config.schema import RolloutConfig
from covey.errors import CoveyError


class ChatOptions(Config):
    """Settings of `covey chat`."""

    seed: NonNegativeInt = 0
    """Seed of the samples drawn."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout", self.rollout.with_seed(self.seed))


class GenerateOptions(ChatOptions):
    """Settings of `covey generate`."""

    n: GroupSize = 1
    """Number of completions of the prompt."""


OptionsT = TypeVar("OptionsT", ChatOptions, GenerateOptions)


class PushOptions(Config):
    """Settings of `covey push`."""

    format: Literal["hf", "peft", "gguf"] = "hf"
    """hf: a Hugging Face folder, adapters merged. peft: the adapters alone. gguf: one file for llama.cpp, adapters
    merged.
    """
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights written; that of the run when not set."""
    shard_size: str = "5GB"
    """hf: largest size of a file of weights: 500MB, 5GB, or a number of bytes."""

    @property
    def shard_bytes(self) -> int:
        """Return `shard_size` in bytes.

        Raises:
            CoveyError: it is not a size.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", self.shard_size.strip(), re.IGNORECASE)
        size = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
        if size < 1:
            raise CoveyError(f"--shard-size is {self.shard_size!r}", want="bytes, as in 500MB or 5GB")
        return size


class ExportOptions(PushOptions):
    """Settings of `covey export`."""

    out: str | None = None
    """Folder to write: a new or an empty one. No file is ever replaced."""


class ReportOptions(Config):
    """Settings of `covey report`."""

    out: str | None = None
    """File to write; report.html in the folder of a single run, and in the working directory for several runs."""


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
