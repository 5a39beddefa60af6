"""`python -m benchmarks.peers [options]`: take the same GRPO steps in Covey, google-tunix and TRL, in turn.

Each library runs in a process and an environment of its own (`make bench-peers` makes them), on the same checkpoint. In
every round each takes one step, and every other round they go backwards, so that whatever else the machine does falls
on all; only one computes at a time. The first step, which compiles, is told apart, and so is what later steps compile:
their seconds are without it. A ratio is the median of the rounds' own ratios of seconds per completion token.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import machine, short, spread_of
from benchmarks.peers.runner import DEFAULT, OURS, PEERS, PYTHONS, PeerError, Runner, check, running
from benchmarks.peers.work import SHAPES, Work


def main(words: Sequence[str] | None = None) -> int:
    """Measure the parts that `words` (the command line by default) name."""
    asked = _parser().parse_args(words)
    work = Work.of(asked.size, asked.mode, asked.lengths)
    pythons = {name: getattr(asked, f"{PEERS[name].python}_python") for name in asked.peers}
    try:
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
    for name, python in pythons.items():
        check(name, python)
    with running(work, shape, pythons) as runners:
        for number in range(-1, rounds):
            for runner in runners[:: 1 if number % 2 else -1]:
                _show(number, runner.name, runner.step())
        return {runner.name: _figures(runner, runners) for runner in runners}


def _show(number: int, name: str, step: Mapping[str, Any]) -> None:
    kind = f"round {number + 1}" if number >= 0 else "first step"
    tokens, others = sum(step["lengths"]), step["others"]
    print(
        f"{kind}: {name} {step['seconds']:.2f} s, {tokens} tokens, others use {others:.1f} cores",
        file=sys.stderr,
        flush=True,
    )


def _figures(runner: Runner, runners: Sequence[Runner]) -> dict[str, Any]:
    first, *steps = runner.steps
    spent, ours = _per_token(steps), next((_per_token(r.steps[1:]) for r in runners if r.name == OURS), None)
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
        "times_covey": None if ours is None else spread_of([x / y for x, y in zip(spent, ours, strict=True)]),
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


def tell(results: Mapping[str, Mapping[str, Any]], work: Work) -> None:
    """Print the table, and last the line of JSON."""
    print(
        f"\npeers: {work.size}, {work.mode}, {work.lengths}: {work.prompts} prompts × {work.samples}, prompts of "
        f"{work.prompt_length} tokens, at most {work.max_new_tokens} new ones"
    )
    rows = [[""] + [title for title, _ in COLUMNS]]
    rows += [[name] + [_cell(result[key]) for _, key in COLUMNS] for name, result in results.items()]
    for row in rows:
        print("| " + " | ".join(row) + " |")
        if row is rows[0]:
            print("|" + "---|" * len(row))
    print(json.dumps({"part": "peers", "work": work.json(), "results": results, "machine": machine()}), flush=True)


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
    parser.add_argument("--peers", type=_names, default=list(DEFAULT), metavar="NAMES", help=",".join(PEERS))
    for name, path in PYTHONS.items():
        parser.add_argument(f"--{name}-python", default=path, metavar="PATH", help="interpreter of its environment")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"no peer is called {unknown[0]}; there are {', '.join(PEERS)}")
    return names


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
