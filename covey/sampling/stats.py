"""Cost of sampling, in tokens and steps."""

from dataclasses import dataclass, fields


@dataclass
class SamplerStats:
    """Cost of a call, or the sum over several calls.

    Attributes:
        tokens: tokens that the model drew and that were kept; `first_tokens` of them at prefill, not in a decode step.
        slot_steps: decode steps × slots, used or not.
        chunks: calls of the decode program.
        prompt_tokens: prompt tokens prefilled; `prefill_cells` includes their padding.
        appended_tokens: tokens of tools and environments in the completions; `append_cells` includes their padding.
    """

    tokens: int = 0
    first_tokens: int = 0
    slot_steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    prefill_cells: int = 0
    appended_tokens: int = 0
    append_cells: int = 0

    def __add__(self, other: "SamplerStats") -> "SamplerStats":
        return SamplerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def waste(self) -> float:
        """Fraction of the decode work that produced no token."""
        return 1.0 - (self.tokens - self.first_tokens) / self.slot_steps if self.slot_steps else 0.0
