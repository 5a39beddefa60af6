"""Code that the parts share: sizes, random work, fair timing, and the output of results.

Variants run in turn in one process, round after round and every other round backwards, so that whatever else the
machine does falls on all of them. A speed-up is the median of the rounds' own ratios, not a ratio of medians.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from benchmarks.sizes import Size
from covey.config.schema import LoRAConfig, OptimizerConfig
from covey.errors import CoveyError
from covey.models.decoder import Decoder
from covey.models.lora import with_lora
from covey.types import Completion, FinishReason, Group
from covey_plan.roofline import machine_peaks

Name = TypeVar("Name", bound=Hashable)

ROOT = Path(__file__).parents[1]
STILL = OptimizerConfig(learning_rate=1e-9, schedule="constant", warmup_ratio=0.0)
"""Settings of an optimizer that barely changes the weights, so that every repetition does the same work on the same
tokens.
"""


@dataclass(frozen=True)
class Settings:
    """Settings from the command line.

    Attributes:
        size: a name of `sizes.SIZES`, or a recipe; `shape` is what it stands for.
        overrides: settings put over the recipe.
        dtype: type of the weights, of the cache and of the operands of products.
        picture: where curves are drawn.
        only: part of the names of the variants to take; others are too slow for some sizes.
        folder: where the results of the accelerator's checks are kept.
        minutes: for all of these checks together; 0 does not limit them.
    """

    size: str
    ragged: bool
    lora: int
    repeat: int
    shape: Size
    overrides: tuple[str, ...] = ()
    dtype: str = "float32"
    picture: Path = Path("benchmarks/curves.png")
    only: str = ""
    folder: Path = Path("runs/accelerator")
    minutes: float = 0.0

    @property
    def asked(self) -> dict[str, Any]:
        """Return the entries of this run in the line of JSON."""
        named = {name: getattr(self, name) for name in ("size", "ragged", "lora", "repeat", "dtype")}
        return named | ({"settings": list(self.overrides)} if self.overrides else {})

    def chosen(self, variants: Iterable[str]) -> list[str]:
        """Return the variants that were asked for.

        Raises:
            CoveyError: none of them was.
        """
        names = list(variants)
        found = [name for name in names if self.only in name]
        if not found:
            raise CoveyError(f"no variant has {self.only!r} in its name", want=" | ".join(names))
        return found

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the stop tokens of the random model. Its draws are close to uniform, so lengths come out geometric,
        cut at the most; with `--fixed` the one stop token lies outside the vocabulary and never comes.
        """
        vocab = self.shape.model.vocab_size
        return tuple(range(max(1, vocab // self.shape.mean_length))) if self.ragged else (vocab,)

    def model(self, **switches: Any) -> Decoder:
        """Return the model with the same random weights each time, in new arrays, because a trainer takes them over.
        Put on the device by choice, as a cluster does: else the first update would hand back others in kind, and all be
        compiled anew.
        """
        model = Decoder(
            self.shape.model, rngs=nnx.Rngs(0), param_dtype=self.dtype, compute_dtype=self.dtype, **switches
        )
        graph, params = nnx.split(with_lora(model, LoRAConfig(rank=self.lora)) if self.lora else model)
        return nnx.merge(graph, jax.device_put(params, jax.devices()[0]))

    def prompts(self) -> list[np.ndarray]:
        """Return random prompts of `prompt_length` tokens, or of half of that or more when ragged."""
        rng, longest = np.random.default_rng(1), self.shape.prompt_length
        sizes = rng.integers(max(1, longest // 2) if self.ragged else longest, longest + 1, self.shape.prompts)
        return [self._tokens(rng, size) for size in sizes]

    def groups(self) -> list[Group]:
        """Return random completions with the lengths of the rollout part: geometric and cut, or all maximal."""
        rng, shape = np.random.default_rng(2), self.shape
        sizes = np.full((shape.prompts, shape.samples), shape.max_new_tokens)
        if self.ragged:
            sizes = np.minimum(rng.geometric(1 / shape.mean_length, sizes.shape), sizes)
        return [
            Group("", prompt, tuple(self._completion(rng, size) for size in row))
            for prompt, row in zip(self.prompts(), sizes, strict=True)
        ]

    def _completion(self, rng: np.random.Generator, size: int) -> Completion:
        logps = np.full(size, -np.log(self.shape.model.vocab_size), np.float32)
        return Completion(self._tokens(rng, size), logps, logps, FinishReason.STOP)

    def _tokens(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.integers(0, self.shape.model.vocab_size, size).astype(np.int32)


@dataclass
class Result:
    """Measurements of a part.

    Attributes:
        seconds: for each variant, one number a round; the first variant is what the others are compared with.
        tokens: completion tokens of one repetition, the same for all: padding and prompts count nothing; 0 where none
            are counted.
        facts: further numbers of each variant.
        checks: that the variants computed the same thing.
        limits: seconds that the work would take at this machine's peaks (see `plan.work` and `machine_peaks`).
    """

    seconds: dict[str, list[float]]
    tokens: int
    facts: dict[str, dict[str, Any]]
    checks: dict[str, Any]
    limits: dict[str, float] = field(default_factory=dict)


def interleaved(variants: Mapping[Name, Callable[[], Any]], repeat: int) -> dict[Name, list[float]]:
    """Seconds of each variant in each round, after a first run that compiles the programs."""
    seconds: dict[Name, list[float]] = {name: [] for name in variants}
    for number in range(repeat):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum."""
    return {"median": short(np.median(values)), "low": short(min(values)), "high": short(max(values))}


def megabytes(compiled: Any) -> float:
    """Return the memory that a compiled program reports to need beside its arguments and results."""
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1)


def relative_difference(a: Any, b: Any) -> float:
    """Return the largest difference between two trees of arrays, in units of the largest number in the second."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    largest = max(float(np.abs(y).max()) for _, y in pairs)
    return short(max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs) / largest)


def tell(result: Result, part: str, settings: Settings) -> None:
    """Print the table and, last, the line of JSON."""
    base = next(iter(result.seconds.values()))
    variants = {name: _figures(result, name, base) for name in result.seconds}
    asked, tokens = settings.asked, f"; {result.tokens} completion tokens" if result.tokens else ""
    print(f"\n{part}: " + ", ".join(f"{k} {v}" for k, v in asked.items()) + tokens)
    _print_table(variants)
    rates = vars(machine_peaks(settings.dtype)) if result.limits else {}
    measured = {"peaks": {name: short(rate / 1e9) for name, rate in rates.items()}} if rates else {}
    tell_json(part, settings, {"tokens": result.tokens, "variants": variants, "checks": result.checks, **measured})


def tell_json(part: str, settings: Settings, found: Mapping[str, Any]) -> None:
    """Print the line of JSON: settings, measurements, machine and versions."""
    told = {"part": part, **settings.asked, **found, "machine": machine(), "versions": versions()}
    print(json.dumps(told), flush=True)


def _figures(result: Result, name: str, base: Sequence[float]) -> dict[str, Any]:
    seconds = result.seconds[name]
    rate = {"tokens_per_second": short(result.tokens / np.median(seconds))} if result.tokens else {}
    limit = {"percent_of_peak": short(100 * result.limits[name] / np.median(seconds))} if result.limits else {}
    return {
        "seconds": spread_of(seconds),
        **rate,
        "speedup": spread_of([b / s for b, s in zip(base, seconds, strict=True)]),
        **limit,
        **result.facts.get(name, {}),
    }


def _print_table(variants: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(key for figures in variants.values() for key in figures))
    rows = [["", *names], *([name, *(_cell(key, f.get(key, "")) for key in names)] for name, f in variants.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for first, *rest in rows:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]))


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        spread = f" ({value['low']:.3g}-{value['high']:.3g})" if name in ("seconds", "speedup") else ""
        return f"{value['median']:.3g}{spread}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that finds these benchmarks from any folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def machine() -> dict[str, Any]:
    """Describe the hardware and its load: the load averages of 1 and 5 minutes, this process included."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = [round(x, 1) for x in os.getloadavg()[:2]]
    return {"device": device.device_kind, "devices": jax.device_count(), "cpu": _cpu(), "cores": cores, "load": load}


def versions() -> dict[str, str]:
    """Return the versions of the packages that the figures depend on."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {"python": platform.python_version(), **packages}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def short(value: Any) -> float:
    """Round to four digits, the most that the timing supports."""
    return float(f"{float(value):.4g}")
