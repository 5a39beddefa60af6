"""Benchmark of episodes: slots given away while environments respond, against slots that are kept, and lock-step.

    python -m benchmarks.episodes

192 episodes of four turns of 24 tokens, 64 of them live at a time, whose environments take 0 to 200 ms, on 16 slots. In
lock-step environments wait until every live episode has ended its turn. Every variant draws the same tokens.
"""

import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from covey.config.schema import EnvsConfig, RolloutConfig
from covey.envs import EnvironmentRunner, Step
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.rollout import RolloutWorker
from covey.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parents[1] / "tests" / "parity" / "golden" / "tiny-llama"
EPISODES, TURNS, TURN_TOKENS, SLOTS, LIVE = 192, 4, 24, 16, 64
DELAY = 0.2
"""Largest number of seconds that an environment takes."""


VARIANTS = (
    ("warm", LIVE, False),
    ("lock-step", LIVE, True),
    ("kept", SLOTS, False),
    ("given away", LIVE, False),
    ("lock-step", LIVE, True),
    ("given away", LIVE, False),
)
"""Name, live episodes, and whether turns are in lock-step; the first run compiles."""


class Waits:
    """Responds after a random time."""

    lockstep: threading.Barrier | None = None

    def __init__(self, row: Mapping[str, Any]):
        self.prompt, self.turns, self.random = row["prompt"], 0, random.Random(row["number"])

    def reset(self) -> str:
        return str(self.prompt)

    def step(self, reply: str) -> Step:
        if self.lockstep is not None:
            self.lockstep.wait()
        time.sleep(self.random.random() * DELAY)
        self.turns += 1
        return Step(" and then?", done=self.turns == TURNS)


def main() -> None:
    """Print the share of slot-steps and of the slots' time that drew a token, and the seconds, of each variant, and the
    ratio to lock-step.
    """
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
    )
    config = RolloutConfig(max_prompt_length=32, max_new_tokens=160, slots=SLOTS, decode_chunk=2)
    rows = [{"prompt": "Once", "number": number} for number in range(EPISODES)]
    worker = RolloutWorker(Decoder(model, rngs=nnx.Rngs(0)), tokenizer, config)
    tokens, fastest, fewest = None, dict[str, float](), dict[str, int]()
    for name, live, lockstep in VARIANTS:
        settings = EnvsConfig(environment="guess", max_turns=TURNS, max_turn_tokens=TURN_TOKENS, max_live=live)
        Waits.lockstep = threading.Barrier(LIVE) if lockstep else None
        with EnvironmentRunner(Waits, settings) as worker.environments:
            began = time.perf_counter()
            groups = worker.generate(rows, 1)
            seconds = time.perf_counter() - began
        drawn = [c.tokens.tolist() for group in groups for c in group.completions]
        assert tokens in (None, drawn), "the variants drew different tokens"
        tokens, stats = drawn, worker.stats
        fastest[name] = min(seconds, fastest.get(name, seconds))
        fewest[name] = min(stats.slot_steps, fewest.get(name, stats.slot_steps))
        busy = f"{1 - stats.waste:6.1%} of slot-steps, {1 - stats.slot_waste:6.1%} of the slots' time drew a token"
        print(f"{name:12} {busy}  {seconds:6.1f} s  {stats.tokens} tokens")
    for name in ("kept", "given away"):
        time_ratio, step_ratio = fastest["lock-step"] / fastest[name], fewest["lock-step"] / fewest[name]
        print(f"lock-step takes {time_ratio:.2f} times the seconds and {step_ratio:.2f} times the slot-steps of {name}")


if __name__ == "__main__":
    main()
