"""Growth of the cost: seconds per real token of rollout, log-probs and update while one quantity doubles.

Real tokens are each prompt once and every completion; padding is none. The log-probs are the forward pass alone, as the
reference is asked for them. A second table takes the whole step through the learner while the maximum lengths in the
settings double and the tokens stay: they may cost nothing. Drawn as a picture.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import step
from benchmarks.common import Settings, interleaved, short, spread_of, tell_json
from benchmarks.rollout import sample, ways
from benchmarks.sizes import Size
from benchmarks.update import micro_batched, trainer_of
from covey.errors import CoveyError
from covey.losses.logprobs import token_logps
from covey.models.config import ModelConfig
from covey.parallel.shapes import abstract
from covey.registry import install_command
from covey.sampling.engine import Engine, Request

FACTORS = (0.5, 1, 2)
"""Factors of the size along each axis."""
MAXIMA = (1, 2, 4)
"""Multiples of the longest prompt and completion."""
PLENTY = 16
"""Maximum length as a multiple of the mean: e^-16 of the completions would be longer."""
PARTS = ("rollout", "logprobs", "update")

Curve = list[dict[str, Any]]
"""Points of one axis: `at`, and for each part microseconds per real token; or for the maxima `step`, in seconds."""


def main(settings: Settings) -> None:
    """Measure, draw and print.

    Raises:
        CoveyError: there is no matplotlib to draw with; nothing was measured then.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CoveyError("curves are drawn with matplotlib, which is not installed", fix=install_command("bench"))
    found, maxima = measure(settings), longer_maxima(settings)
    draw({**found, "maximum lengths ×": maxima}, settings.picture)
    tell(found, maxima, settings)


def measure(settings: Settings) -> dict[str, Curve]:
    """Measure the curve of each axis; all points take turns. The base is one point, and in every curve."""
    points = {(axis, factor): _scaled(settings, axis, factor) for axis in AXES for factor in FACTORS}
    models: dict[ModelConfig, _Model] = {}
    works: dict[Size, _Point] = {}
    for (axis, _), point in points.items():
        if point.shape not in works:
            if point.shape.model not in models:
                models[point.shape.model] = _Model(point)
            _note(f"{axis} {AXES[axis][0](point.shape)}: first run")
            works[point.shape] = _Point(point, models[point.shape.model])
    _note("measuring")
    runs = {(shape, part): run for shape, work in works.items() for part, run in work.runs.items()}
    seconds = interleaved(runs, settings.repeat)
    curves: dict[str, Curve] = {axis: [] for axis in AXES}
    for (axis, _), point in points.items():
        costs = {part: _microseconds(seconds[point.shape, part], works[point.shape].tokens[part]) for part in PARTS}
        curves[axis].append({"at": AXES[axis][0](point.shape), **costs})
    return curves


def longer_maxima(settings: Settings) -> Curve:
    """Measure the whole step at maxima that just suffice, and at multiples of them; `same` says that the tokens were
    the same.

    Always ragged: what never stops would make use of a higher maximum.
    """
    settings = replace(settings, ragged=True)
    words, most = step.prompts(settings), PLENTY * settings.shape.mean_length
    _note("maximum lengths: first runs, then measuring")
    drawn = _lengths(step.Way(settings, {"max_new_tokens": most}).step(words))
    longest = {"max_prompt_length": max(map(len, settings.prompts())), "max_new_tokens": max(drawn)}
    by_factor = {n: step.Way(settings, {name: n * value for name, value in longest.items()}) for n in MAXIMA}
    runs = {n: partial(way.step, words) for n, way in by_factor.items()}
    same = {n: _lengths(run()) == drawn for n, run in runs.items()}
    seconds = interleaved(runs, settings.repeat)
    base = seconds[MAXIMA[0]]
    return [
        {
            "at": n,
            "step": spread_of(seconds[n]),
            "times": spread_of([s / b for s, b in zip(seconds[n], base, strict=True)]),
            "same": same[n],
        }
        for n in MAXIMA
    ]


class _Model:
    """Trainer of a model and the users of its weights: programs are shared by all points that have the same shapes."""

    def __init__(self, settings: Settings):
        self.trainer = trainer_of(settings, remat=True)
        graph = self.trainer.graph
        self.score = jax.jit(lambda params, rows: token_logps(graph, params, rows, 1.0).logps)
        self.engines: dict[tuple[int, ...], Engine] = {}

    def engine(self, settings: Settings) -> Engine:
        if settings.stop_ids not in self.engines:
            model = nnx.merge(self.trainer.graph, abstract(self.trainer.params))
            self.engines[settings.stop_ids] = Engine(model, settings.stop_ids, ways(settings.shape)["refilled"])
        return self.engines[settings.stop_ids]


class _Point:
    """Work of one size, each part run once: `runs` repeat it, for `tokens` real tokens each."""

    def __init__(self, settings: Settings, model: _Model):
        self.settings, self.model, groups = settings, model, settings.groups()
        batches = micro_batched(groups, "groups", settings.shape)
        self.rows = [part.batch.rows for part in batches]
        update = partial(model.trainer.update, batches)
        self.runs: dict[str, Callable[[], Any]] = {"rollout": self._sample, "logprobs": self._score, "update": update}
        prompts = sum(map(len, settings.prompts()))
        held = prompts + sum(len(c.tokens) for group in groups for c in group.completions)
        drawn = prompts + sum(len(c.tokens) for group in self._sample() for c in group)
        self.tokens = {"rollout": drawn, "logprobs": held, "update": held}
        jax.block_until_ready([self.runs["logprobs"](), self.runs["update"]()])

    def _sample(self) -> Any:
        shape = self.settings.shape
        requests = [Request(prompt, shape.samples, index) for index, prompt in enumerate(self.settings.prompts())]
        engine = self.model.engine(self.settings)
        engine.update_weights(self.model.trainer.params)  # an update has donated the last ones
        return sample(engine, requests, ways(shape)["refilled"])

    def _score(self) -> Any:
        return [self.model.score(self.model.trainer.params, rows) for rows in self.rows]


def _scaled(settings: Settings, axis: str, factor: float) -> Settings:
    return replace(settings, shape=AXES[axis][1](settings.shape, factor))


def _microseconds(seconds: Sequence[float], tokens: int) -> dict[str, float]:
    return spread_of([1e6 * s / tokens for s in seconds])


def _note(text: str) -> None:
    """Print the progress to standard error, because everything takes minutes."""
    print(f"curves: {text}", file=sys.stderr, flush=True)


def _lengths(record: Any) -> list[int]:
    return [len(c.tokens) for group in record.groups for c in group.completions]


def tell(curves: Mapping[str, Curve], maxima: Curve, settings: Settings) -> None:
    """Print the tables and, last, the line of JSON."""
    print("\ncurves: microseconds per real token, median (least-greatest)")
    for axis, points in curves.items():
        print(f"{axis:20}" + "".join(f"{part:>28}" for part in PARTS))
        for point in points:
            print(f"{point['at']:>20}" + "".join(f"{_cell(point[part]):>28}" for part in PARTS))
    print("maximum lengths ×   " + f"{'seconds of a step':>28}{'times the first':>28}")
    for point in maxima:
        print(f"{point['at']:>20}{_cell(point['step']):>28}{_cell(point['times']):>28}")
    flat = short(max(abs(point["times"]["median"] - 1) for point in maxima))
    same = all(point["same"] for point in maxima)
    checks = {"maxima_change_the_step_by": flat, "maxima_same_tokens": same}
    tell_json("curves", settings, {"curves": curves, "maxima": maxima, "checks": checks})


def _cell(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g}-{spread['high']:.3g})"


def draw(curves: Mapping[str, Curve], file: Path) -> None:
    """Draw a panel for each axis, with the spread as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, -(-len(curves) // 2), figsize=(11, 6), layout="constrained")
    for panel, (axis, points) in zip(np.ravel(panels), curves.items(), strict=False):
        places = [point["at"] for point in points]
        for part in [name for name in (*PARTS, "step") if name in points[0]]:
            middle = [point[part]["median"] for point in points]
            spread = [[abs(p[part][end] - p[part]["median"]) for p in points] for end in ("low", "high")]
            panel.errorbar(places, middle, spread, marker="o", capsize=3, label=part)
        panel.set(xscale="log", xlabel=axis, xticks=places, xticklabels=places)
        panel.set_ylabel("s of a step" if "step" in points[0] else "µs per real token")
        panel.set_ylim(bottom=0)
        panel.minorticks_off()
    figure.legend(*np.ravel(panels)[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PARTS))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _times(value: int, factor: float) -> int:
    return max(1, round(value * factor))


def _longer(size: Size, factor: float) -> Size:
    mean, most = (_times(length, factor) for length in (size.mean_length, size.max_new_tokens))
    return replace(size, mean_length=mean, max_new_tokens=most)


def _wider(size: Size, factor: float) -> Size:
    return replace(size, model=replace(size.model, vocab_size=_times(size.model.vocab_size, factor)))


AXES: dict[str, tuple[Callable[[Size], int], Callable[[Size, float], Size]]] = {
    "prompt length": (
        lambda s: s.prompt_length,
        lambda s, n: replace(s, prompt_length=_times(s.prompt_length, n)),
    ),
    "completion length": (lambda s: s.max_new_tokens, _longer),
    "samples per prompt": (lambda s: s.samples, lambda s, n: replace(s, samples=_times(s.samples, n))),
    "vocabulary": (lambda s: s.model.vocab_size, _wider),
    "prompts per step": (lambda s: s.prompts, lambda s, n: replace(s, prompts=_times(s.prompts, n))),
}
"""Axes by name: the current value, and the function that returns the size with that value times a factor."""
