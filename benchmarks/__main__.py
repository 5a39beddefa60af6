"""`python -m benchmarks [part] [options]`: measures one part or all; each ends in one line of JSON."""

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import logprobs, rollout, step, update
from benchmarks.common import SIZES, Result, Settings, tell


def main(words: Sequence[str] | None = None) -> int:
    """Measures what `words` (the command line by default) ask for."""
    asked = _parser().parse_args(words)
    settings = Settings(asked.size, asked.ragged, asked.lora, asked.repeat)
    for part in PARTS if asked.part == "all" else [asked.part]:
        tell(PARTS[part](settings), part, settings)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--size", default="tiny", choices=list(SIZES), help="shape of the model and the work")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--ragged", action="store_true", default=True, help="lengths that differ (the default)")
    lengths.add_argument("--fixed", action="store_false", dest="ragged", help="all of the greatest length")
    parser.add_argument(
        "--lora", type=_at_least(0), default=0, metavar="R", help="train adapters of rank R; 0: every weight"
    )
    parser.add_argument("--repeat", type=_at_least(1), default=3, metavar="N", help="timed rounds after the warm-up")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


PARTS: dict[str, Callable[[Settings], Result]] = {
    "rollout": rollout.measure,
    "logprobs": logprobs.measure,
    "update": update.measure,
    "step": step.measure,
}

if __name__ == "__main__":
    sys.exit(main())
