"""Benchmark of episodes: slots given away while environments respond, against slots that are kept, and answers that are
taken as they come, against those of a fixed number of chunks behind their turns.

    python -m benchmarks.episodes [SECONDS ...]

48 episodes of four turns of 1 to 96 tokens, on 16 slots, whose environments take so many seconds in the mean, from none
to twice as many: 0, 0.2 and 2 by default. Every variant draws the same tokens.
"""

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from covey import EnvironmentRunner, Step
from covey.config.schema import EnvsConfig, RolloutConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.rl.rollout_worker import RolloutWorker
from covey.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parents[1] / "tests" / "parity" / "golden" / "tiny-llama"
EPISODES, TURNS, TURN_TOKENS, SLOTS, LIVE = 48, 4, 96, 16, 48
STOPS_EVERY = 24
"""One token of so many ends a turn, which therefore has about as many tokens in the mean."""
DELAYS = ("0", "0.2", "2")
LAGS = (None, 0, 1, 8, 32)
"""Chunks behind its turn at which an answer is taken; None as soon as it is there."""


class Waits:
    """Responds after a random time, of `delay` seconds in the mean."""

    delay = 0.0

    def __init__(self, row: Mapping[str, Any]):
        self.prompt, self.turns, self.random = row["prompt"], 0, random.Random(row["number"])

    def reset(self) -> str:
        return str(self.prompt)

    def step(self, reply: str) -> Step:
        time.sleep(2 * self.random.random() * self.delay)
        self.turns += 1
        return Step(" and then?", done=self.turns == TURNS)


def make_worker() -> RolloutWorker:
    """Make the sampler of a decoder with random weights."""
    plain = Tokenizer.from_folder(TOKENIZER)
    tokenizer = Tokenizer(plain.inner, eos_id=plain.eos_id, stop_ids=range(9, plain.vocab_size, STOPS_EVERY))
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
    )
    new_tokens = TURNS * (TURN_TOKENS + 16)
    config = RolloutConfig(max_prompt_length=32, max_new_tokens=new_tokens, slots=SLOTS, decode_chunk=8)
    return RolloutWorker(Decoder(model, rngs=nnx.Rngs(0)), tokenizer, config)


def play(worker: RolloutWorker, live: int, lag: int | None) -> tuple[float, list[list[int]]]:
    """Play all episodes; return the seconds, and the tokens of each."""
    rows = [{"prompt": "Once", "number": number} for number in range(EPISODES)]
    settings = EnvsConfig(
        environment="guess", max_turns=TURNS, max_turn_tokens=TURN_TOKENS, max_live=live, answer_lag=lag
    )
    with EnvironmentRunner(Waits, settings) as worker.environments:
        began = time.perf_counter()
        groups = worker.generate(rows, 1)
        seconds = time.perf_counter() - began
    return seconds, [c.tokens.tolist() for group in groups for c in group.completions]


def main() -> None:
    """Print the seconds of each variant, the share of slot-steps and of the slots' time that drew a token, and the
    seconds of a chunk.
    """
    worker = make_worker()
    _, tokens = play(worker, LIVE, None)  # compiles
    for Waits.delay in map(float, sys.argv[1:] or DELAYS):
        for live in (SLOTS, LIVE):
            for lag in LAGS:
                seconds, drawn = play(worker, live, lag)
                assert drawn == tokens, "the variants drew different tokens"
                stats = worker.stats
                busy = f"{1 - stats.waste:6.1%} of slot-steps, {1 - stats.slot_waste:6.1%} of the slots' time"
                order = "as they come" if lag is None else f"lag {lag}"
                chunk = f"a chunk {stats.decode_seconds / stats.chunks:.3f} s"
                print(f"{Waits.delay:g} s a turn, {live} live, {order:12} {seconds:6.1f} s  {busy}  {chunk}")


if __name__ == "__main__":
    main()
