"""`python -m benchmarks [part] [options]`: measure one part or all; each ends in one line of JSON.

Where the size is a recipe, further words are settings put over it, as for `covey train`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import curves, decode, hosts, logprobs, memory, rollout, startup, step, update
from benchmarks.accelerator import command as accelerator
from benchmarks.common import Result, Settings, tell
from benchmarks.sizes import SIZES, size_of
from covey.errors import CoveyError


def main(words: Sequence[str] | None = None) -> int:
    """Measure the parts that `words` (the command line by default) name."""
    asked, overrides = _parser().parse_known_args(words)
    try:
        shape = size_of(asked.size, overrides)
        lora = shape.lora if asked.lora is None else asked.lora
        settings = Settings(
            asked.size,
            asked.ragged,
            lora,
            asked.repeat,
            shape,
            tuple(overrides),
            asked.dtype,
            asked.picture,
            asked.only,
            asked.folder,
            asked.minutes,
        )
        codes = [PARTS[part](settings) or 0 for part in (USUAL if asked.part == "all" else [asked.part])]
    except CoveyError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return max(codes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("part", nargs="?", default="all", choices=[*PARTS, "all"], help=f"all: {', '.join(USUAL)}")
    what = f"shape of the model and the work: {', '.join(SIZES)}, or a recipe's name or file"
    add("--size", "--recipe", default="tiny", metavar="NAME", help=what)
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--ragged", action="store_true", default=True, help="lengths that differ (the default)")
    lengths.add_argument("--fixed", action="store_false", dest="ragged", help="all of the greatest length")
    add(
        "--lora",
        type=_at_least(0),
        metavar="R",
        help="rank of the adapters; 0: every weight (a recipe has its own)",
    )
    add("--dtype", choices=["float32", "bfloat16"], default=Settings.dtype, help="of weights, cache and products")
    add("--repeat", type=_at_least(1), default=3, metavar="N", help="timed rounds after the warm-up")
    add("--only", default="", metavar="TEXT", help="only variants or checks with this in their names")
    add("--picture", type=Path, default=Settings.picture, metavar="FILE", help="where curves are drawn")
    where = "where the accelerator's results are kept"
    add("--out", "--folder", dest="folder", type=Path, default=Settings.folder, metavar="DIR", help=where)
    limit = "of the accelerator's checks: as many as so many minutes allow, those that time nothing beside each other"
    add("--minutes", type=float, default=0.0, metavar="N", help=limit)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def _telling(part: str, measure: Callable[[Settings], Result], settings: Settings) -> None:
    tell(measure(settings), part, settings)


PARTS: dict[str, Callable[[Settings], int | None]] = {
    "decode": partial(_telling, "decode", decode.measure),
    "rollout": partial(_telling, "rollout", rollout.measure),
    "logprobs": partial(_telling, "logprobs", logprobs.measure),
    "update": partial(_telling, "update", update.measure),
    "step": partial(_telling, "step", step.measure),
    "startup": partial(_telling, "startup", startup.measure),
    "memory": memory.main,
    "hosts": hosts.main,
    "curves": curves.main,
    "accelerator": accelerator.main,
}
"""Part → function that measures it; the number that it may return is the exit code."""

USUAL = ("decode", "rollout", "logprobs", "update", "step")
"""Parts that `all` measures: not those that start processes or draw curves, which take long."""

if __name__ == "__main__":
    sys.exit(main())
