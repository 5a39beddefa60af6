"""`python -m benchmarks.peers [options]`: take the same GRPO steps in Covey, google-tunix and TRL, in turn.

Each library runs in a process and an environment of its own (`make bench-peers` makes them), on the same checkpoint. In
every round each takes one step, and every other round they go backwards, so that whatever else the machine does falls
on all; only one computes at a time. The first step, which compiles, is told apart, and so is what later steps compile:
their seconds are without it. A ratio is the median of the rounds' own ratios of seconds per completion token. With
--whole everything counts, from Enter on (see `whole`).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, short, spread_of
from benchmarks.peers.runner import DEFAULT, OURS, PEERS, PYTHONS, PeerError, Runner, prepared, running, show, turns
from benchmarks.peers.whole import Clock, Found, measure, tables
from benchmarks.peers.work import SHAPES, STEPS_OF_DATA, Work


def main(words: Sequence[str] | None = None) -> int:
    """Measure the parts that `words` (the command line by default) name."""
    asked = _parser().parse_args(words)
    work = Work.of(asked.size, asked.mode, asked.lengths)
    pythons = {name: getattr(asked, f"{PEERS[name].python}_python") for name in asked.peers}
    try:
        if asked.whole:
            work, clock = replace(work, steps=max(asked.whole) + 1), _clock(asked)
            found, runners = measure(work, SHAPES[asked.size], pythons, clock)
            several = all(len(runner.steps) > 1 for runner in runners.values())
            tell(figures(runners) if several else {}, work, found)
        else:
            tell(compare(work, SHAPES[asked.size], asked.rounds, pythons), work)
    except PeerError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 1
    return 0


def compare(work: Work, shape: Mapping[str, Any], rounds: int, pythons: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of each peer, by name.

    Args:
        work: what a step is.
        shape: of the model.
        rounds: timed steps of each, after the first.
        pythons: the interpreter for each peer that takes part.
    """
    with prepared(work, shape, pythons) as folder, running(work, folder, pythons) as runners:
        for number, name in turns(dict.fromkeys(pythons, rounds + 1)):
            show(number, name, runners[name].step())
        return figures(runners)


def figures(runners: Mapping[str, Runner]) -> dict[str, Any]:
    """Return the figures of each peer, by name, from at least two steps of each."""
    ours = _per_token(runners[OURS].steps[1:]) if OURS in runners else None
    return {name: _figures(runner, ours) for name, runner in runners.items()}


def _figures(runner: Runner, ours: Sequence[float] | None) -> dict[str, Any]:
    first, *steps = runner.steps
    spent = _per_token(steps)
    plain = [s for s in steps if not s["compiled"]] or steps
    phases = {p: np.median([s["phases"].get(p, 0.0) for s in plain]) for p in ("rollout", "logps")}
    rest = np.median([s["seconds"] - sum(s["phases"].values()) for s in plain])
    return {
        "setup": runner.facts["setup"],
        "first_step": short(first["seconds"]),
        "seconds": spread_of([_net(s) for s in steps]),
        **{name: short(value) for name, value in {**phases, "update": rest}.items()},
        "tokens": spread_of([sum(s["lengths"]) for s in steps]),
        "seconds_per_1000": spread_of([1000 * x for x in spent]),
        "times_covey": None if ours is None else spread_of([x / y for x, y in zip(spent, ours, strict=False)]),
        "peak_gib": max(s["peak_gib"] for s in (runner.facts, *runner.steps)),
        "peak_gib_warm": max(s["peak_gib"] for s in steps),
        "compiled": sum(s["compiled"] for s in steps),
        "compile_seconds": short(sum(s["compile_seconds"] for s in steps)),
        "cpu_seconds": short(np.median([s["cores"] * s["seconds"] for s in steps])),
        "others": short(np.median([s["others"] for s in steps])),
        **{name: runner.facts[name] for name in ("parameters", "trainable", "versions")},
        "steps": runner.steps,
    }


def _per_token(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    return [_net(s) / sum(s["lengths"]) for s in steps]


def _net(step: Mapping[str, Any]) -> float:
    """Return the seconds without those of compiling."""
    return step["seconds"] - step["compile_seconds"]


def tell(results: Mapping[str, Mapping[str, Any]], work: Work, found: Found | None = None) -> None:
    """Print the tables, those of the whole time first, and last the line of JSON."""
    print(
        f"\npeers: {work.size}, {work.mode}, {work.lengths}: {work.prompts} prompts × {work.samples}, prompts of "
        f"{work.prompt_length} tokens, at most {work.max_new_tokens} new ones"
    )
    for title, rows in tables(found).items() if found else ():
        print(f"\n{title}:\n")
        _print(rows)
    if results:
        print("\nThe steps; those after the first without the seconds of compiling:\n")
        rows = [[name] + [_cell(result[key]) for _, key in COLUMNS] for name, result in results.items()]
        _print([[""] + [title for title, _ in COLUMNS], *rows])
    whole = {"whole": found} if found else {}
    told = {"part": "peers", "work": work.json(), **whole, "results": results, "machine": machine()}
    print(json.dumps(told), flush=True)


def _print(rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        print("| " + " | ".join(row) + " |")
        if row is rows[0]:
            print("|" + "---|" * len(row))


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        low, middle, high = (_cell(value[name]) for name in ("low", "median", "high"))
        return middle if low == high else f"{middle} ({low}-{high})"
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--size", default="tiny", choices=list(SHAPES))
    parser.add_argument("--mode", default="lora", choices=["lora", "full"], help="what is trained")
    parser.add_argument("--lengths", default="fixed", choices=["fixed", "ragged"], help="of completions")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="steps of each after the first")
    parser.add_argument("--whole", type=_numbers, metavar="N,N,...", help=f"instead: {WHOLE}, e.g. 1,5,20,100")
    parser.add_argument("--cache", default="both", choices=["cold", "warm", "both"], help="of programs, with --whole")
    parser.add_argument("--cache-folder", type=Path, metavar="PATH", help="keep it here; for warm alone: filled before")
    parser.add_argument("--at-most", type=_limits, default={}, metavar="NAME=N,...", help="steps of a peer")
    parser.add_argument("--warm-steps", type=_number, metavar="N", help="steps from a warm cache, at most")
    parser.add_argument("--peers", type=_names, default=list(DEFAULT), metavar="NAMES", help=",".join(PEERS))
    for name, path in PYTHONS.items():
        parser.add_argument(f"--{name}-python", default=path, metavar="PATH", help="interpreter of its environment")
    return parser


def _clock(asked: argparse.Namespace) -> Clock:
    caches = ("cold", "warm") if asked.cache == "both" else (asked.cache,)
    return Clock(
        asked.whole, caches, asked.cache_folder and asked.cache_folder.resolve(), asked.at_most, asked.warm_steps
    )


def _number(text: str) -> int:
    if not 1 <= int(text) < STEPS_OF_DATA:
        raise argparse.ArgumentTypeError(f"{text} steps: at least 1, and the data last for {STEPS_OF_DATA - 1}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_number(n) for n in text.split(",")}))


def _limits(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    _names(",".join(name for name, _, _ in pairs))
    return {name: _number(n) for name, _, n in pairs}


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"no peer is called {unknown[0]}; there are {', '.join(PEERS)}")
    return names


WHOLE = "whole time of so many steps from Enter, cold and warm"

COLUMNS = (
    ("first step s", "first_step"),
    ("step s", "seconds"),
    ("rollout", "rollout"),
    ("log-probs", "logps"),
    ("update and rest", "update"),
    ("tokens", "tokens"),
    ("s per 1000 tokens", "seconds_per_1000"),
    ("× Covey", "times_covey"),
    ("processor s", "cpu_seconds"),
    ("compiled later", "compiled"),
    ("in s", "compile_seconds"),
    ("peak GiB", "peak_gib"),
    ("cores of others", "others"),
)

if __name__ == "__main__":
    sys.exit(main())
