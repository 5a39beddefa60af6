"""`python -m benchmarks.diagnosis FOLDER`: make broken and sound runs, and tell what the diagnosis says of each.

Tiny models that are made first, and SmolLM2-135M, are trained further in many ways (`cases`): with one thing that
cannot work, and soundly. Every run is made by `covey.run`, as the command makes it. Rules and thresholds were set on
the runs of the first half. Runs that are in FOLDER already are not made again. Told at the end: a table of the runs
with their findings, and precision and recall of each half.
"""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.diagnosis.cases import CASES, NEW, Case
from benchmarks.diagnosis.recipes import BASES, DIGITS, make_data, recipe_of
from benchmarks.diagnosis.verdicts import read_records, record, table

PARTS = ("first", "second", "third", "table")
SOUND_SHARE = 1 / 3
"""Sound runs for each broken one."""


def is_made(out: Path) -> bool:
    """Return whether the run in `out` came to its end."""
    return (out / "summary.json").is_file() and "after" in json.loads((out / "summary.json").read_text())


def make(name: str, words: str, seed: int, folder: Path) -> None:
    """Make the run `name` in `folder`, unless it is there."""
    from covey import recipes

    out = folder / name
    if is_made(out):
        return
    shutil.rmtree(out, ignore_errors=True)
    begun = time.process_time()
    try:
        recipes.train(recipe_of(words, folder, seed), out)
    except Exception:  # one run that fails ends no others
        traceback.print_exc()
    if name not in BASES:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    print(f"{name}: {time.process_time() - begun:.0f} s", file=sys.stderr, flush=True)


def make_all(cases: Sequence[Case], folder: Path) -> None:
    """Make the models that runs start from, and the runs of `cases`."""
    from covey.models import scratch
    from covey.recipes import use_compilation_cache

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder)
    use_compilation_cache()
    scratch.SCRATCH_MODELS["reverse"] = scratch.ScratchSpec(
        f"0{DIGITS}=?", hidden_size=64, num_layers=2, head_dim=16, rope_theta=100.0
    )
    for name, words in BASES.items():
        make(name, words, 0, folder)
    for case in mixed(cases):
        make(case.name, case.words, case.seed, folder)


def mixed(cases: Sequence[Case]) -> list[Case]:
    """Return broken and sound runs in turns, and a run of each cause before a second one, so that a command that is
    interrupted has made runs of all kinds.
    """
    kinds = [[case for case in cases if bool(case.cause) == broken] for broken in (True, False)]
    kinds[0].sort(key=lambda case: (case.name[-1], NEW.index(case.cause) if case.cause in NEW else -1))
    placed = [((i + 0.5) / SOUND_SHARE if not case.cause else i, case) for kind in kinds for i, case in enumerate(kind)]
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the runs are made, or a file of their metrics, to judge these")
    parser.add_argument("--half", choices=PARTS, help="make only the runs of one half")
    parser.add_argument("--only", default="", metavar="TEXT", help="make only runs with this in their names")
    parser.add_argument("--judge", action="store_true", help="make no run, judge those that are there")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write the metrics of the runs, for the tests")
    asked = parser.parse_args(words)
    folder = asked.folder.absolute()
    chosen = [case for case in CASES if asked.half in (None, case.half) and asked.only in case.name]
    if not (asked.judge or folder.is_file()):
        make_all(chosen, folder)
    if folder.is_file():
        runs = read_records(folder)
    else:
        runs = [record(case, folder) for case in CASES if is_made(folder / case.name)]
    print(table(runs))
    if asked.metrics:
        asked.metrics.write_text(
            "".join(json.dumps(run, separators=(",", ":")) + "\n" for run in runs), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
