"""Work that is the same for all peers: the model's shape, prompts, lengths and the settings of a step.

Plain data. Workers read it in environments of their own, so nothing is imported that one of them may lack.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PAD, STOP = 0, 1
"""Special tokens of every vocabulary; the others are words `w2`, `w3`, ..."""

STEPS_OF_DATA = 128
"""Steps for which there are prompts, where a library wants them all at the start."""

SHARE = 0.35
"""Mean length of a ragged completion, as a fraction of the maximum number of new tokens."""


@dataclass(frozen=True)
class Work:
    """One GRPO step, and the model it is taken with.

    Attributes:
        size, mode, lengths: names, as on the command line.
        vocabulary: of the model.
        prompts, samples: P and G.
        prompt_length: of every prompt; `max_prompt_length` is what the libraries are told to expect.
        max_new_tokens: of a completion; with fixed lengths every one has them.
        lora_rank: 0 trains every weight.
        steps: of the whole run, as the libraries are told; nobody waits for its end.
        micro_prompts: prompts (× samples) in a forward-backward of the peers, as many as fit into 16 GiB.
    """

    size: str
    mode: str
    lengths: str
    vocabulary: int
    prompts: int = 8
    samples: int = 4
    prompt_length: int = 64
    max_prompt_length: int = 128
    max_new_tokens: int = 64
    lora_rank: int = 16
    lora_alpha: float = 32.0
    micro_prompts: int = 8
    temperature: float = 1.0
    beta: float = 0.08
    epsilon: float = 0.2
    learning_rate: float = 3e-6
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.1
    max_grad_norm: float = 0.1
    steps: int = 10**6

    @classmethod
    def of(cls, size: str, mode: str, lengths: str) -> "Work":
        """Return the work that the three names describe."""
        return cls(
            size,
            mode,
            lengths,
            SHAPES[size]["vocab_size"],
            max_new_tokens=128 if lengths == "ragged" else 64,
            lora_rank=16 if mode == "lora" else 0,
            micro_prompts=MICRO_PROMPTS[size],
        )

    @property
    def stop_probability(self) -> float:
        """Return the stop token's probability at each step, with which completions have the mean length; 0 if fixed."""
        return stop_probability(SHARE * self.max_new_tokens, self.max_new_tokens) if self.lengths == "ragged" else 0.0

    def batches(self) -> Iterator[list[str]]:
        """Yield the prompts of each step, endlessly: words drawn at random, one token per word."""
        rng = random.Random(1)
        while True:
            yield [" ".join(f"w{n}" for n in self._words(rng)) for _ in range(self.prompts)]

    def _words(self, rng: random.Random) -> list[int]:
        return [rng.randrange(STOP + 1, self.vocabulary) for _ in range(self.prompt_length)]

    def json(self) -> dict[str, Any]:
        """Return the fields; `Work(**fields)` is the same work."""
        return asdict(self)


def stop_probability(mean: float, most: int) -> float:
    """Return p for which min(Geometric(p), most) is `mean` on average: (1 − (1 − p)^most) / p, found by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** most) / p > mean else (low, p)
    return (low + high) / 2


def even_words(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the reward: the fraction of words with an even number. It means nothing and costs nothing."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(n % 2 == 0 for n in each) / max(len(each), 1) for each in numbers]


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 10_000.0,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100_000.0,
    },
}  # fmt: skip
"""Shapes of `benchmarks.sizes`, under the names of a Llama's config.json."""

MICRO_PROMPTS = {"tiny": 8, "smollm2": 2}
