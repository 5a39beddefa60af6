"""Cost of sampling, in tokens, steps and seconds."""

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
        seconds: time of the calls; `decode_seconds` of it in decode steps. They follow the clock.
    """

    tokens: int = 0
    first_tokens: int = 0
    slot_steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    prefill_cells: int = 0
    appended_tokens: int = 0
    append_cells: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: "SamplerStats") -> "SamplerStats":
        return SamplerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def waste(self) -> float:
        """Fraction of the decode work that produced no token."""
        return 1.0 - (self.tokens - self.first_tokens) / self.slot_steps if self.slot_steps else 0.0

    @property
    def slot_waste(self) -> float:
        """Fraction of the slots' time in which they drew no token, by the clock: also while all samples wait for a
        response, and while prompts and responses are prefilled.

        >>> SamplerStats(tokens=30, slot_steps=40, seconds=8.0, decode_seconds=6.0).slot_waste  # 3/4 of 3/4 drew
        0.4375
        """
        return 1.0 - (1.0 - self.waste) * self.decode_seconds / self.seconds if self.seconds else 0.0
