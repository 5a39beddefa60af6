"""What the parts share: sizes, random work, fair timing, and how results are told.

Variants run in turn in one process, round after round and every other round backwards, so that whatever else the
machine does falls on all of them. A speed-up is the median of the rounds' own ratios, not a ratio of medians.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from covey.configs import LoRAConfig, OptimizerConfig
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import with_lora
from covey.types import Completion, FinishReason, Group

STILL = OptimizerConfig(learning_rate=1e-9, schedule="constant", warmup_ratio=0.0)
"""An optimizer that moves next to nothing, so that every repetition does the same work on the same tokens."""

MICRO_BATCH = 1024
"""Tokens in one forward-backward, of every layout alike."""


@dataclass(frozen=True)
class Size:
    """A model's shape and a step's work: P prompts × G samples, lengths in tokens."""

    model: ModelConfig
    prompts: int
    samples: int
    prompt_length: int
    mean_length: int
    max_new_tokens: int
    slots: int


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    size: str
    ragged: bool
    lora: int
    repeat: int

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Stop tokens of the random model. Its draws are close to uniform, so lengths come out geometric, cut at the
        most; with `--fixed` the one stop token lies outside the vocabulary and never comes."""
        vocab = self.shape.model.vocab_size
        return tuple(range(vocab // self.shape.mean_length)) if self.ragged else (vocab,)

    def model(self, **switches: Any) -> Decoder:
        """Always the same random weights, in arrays of their own: a trainer takes them over."""
        model = Decoder(self.shape.model, rngs=nnx.Rngs(0), **switches)
        return with_lora(model, LoRAConfig(rank=self.lora)) if self.lora else model

    def prompts(self) -> list[np.ndarray]:
        """Random prompts, as long as `prompt_length`, or from half of that when ragged."""
        rng, longest = np.random.default_rng(1), self.shape.prompt_length
        sizes = rng.integers(longest // 2 if self.ragged else longest, longest + 1, self.shape.prompts)
        return [self._tokens(rng, size) for size in sizes]

    def groups(self) -> list[Group]:
        """Random completions of the lengths that the rollout part draws: geometric and cut, or all of the greatest."""
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
    """What a part measured.

    Attributes:
        seconds: for each variant, one number a round; the first variant is what the others are compared with.
        tokens: completion tokens of one repetition, the same for all: padding and prompts count nothing.
        facts: further numbers of each variant.
        checks: that the variants computed the same thing.
    """

    seconds: dict[str, list[float]]
    tokens: int
    facts: dict[str, dict[str, Any]]
    checks: dict[str, Any]


def interleaved(variants: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round. They ran once before: their programs are compiled."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeat):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": short(np.median(values)), "low": short(min(values)), "high": short(max(values))}


def megabytes(compiled: Any) -> float:
    """Memory a compiled program needs beside its arguments and results, by its own account."""
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1)


def relative_difference(a: Any, b: Any) -> float:
    """Largest difference between two trees of arrays, in units of the largest number in the second."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    largest = max(float(np.abs(y).max()) for _, y in pairs)
    return short(max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs) / largest)


def tell(result: Result, part: str, settings: Settings) -> None:
    """Prints the table and, last, the line of JSON."""
    base = next(iter(result.seconds.values()))
    variants = {name: _figures(result, name, base) for name in result.seconds}
    asked = asdict(settings)
    print(f"\n{part}: " + ", ".join(f"{k} {v}" for k, v in asked.items()) + f"; {result.tokens} completion tokens")
    _print_table(variants)
    whole = {"part": part, **asked, "tokens": result.tokens, "variants": variants, "checks": result.checks}
    print(json.dumps({**whole, "machine": machine(), "versions": versions()}), flush=True)


def _figures(result: Result, name: str, base: Sequence[float]) -> dict[str, Any]:
    seconds = result.seconds[name]
    return {
        "seconds": spread_of(seconds),
        "tokens_per_second": short(result.tokens / np.median(seconds)),
        "speedup": spread_of([b / s for b, s in zip(base, seconds, strict=True)]),
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


def machine() -> dict[str, Any]:
    """The hardware, and how busy it is: the load average of the last 1 and 5 minutes, this process included."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = [round(x, 1) for x in os.getloadavg()[:2]]
    return {"device": device.device_kind, "devices": jax.device_count(), "cpu": _cpu(), "cores": cores, "load": load}


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {"python": platform.python_version(), **packages}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def short(value: Any) -> float:
    """Four digits: what the timing supports at most."""
    return float(f"{float(value):.4g}")


TINY = ModelConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
    tie_embeddings=True,
)  # fmt: skip
SMOLLM2 = ModelConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    rope_theta=100_000.0, tie_embeddings=True,
)  # fmt: skip

SIZES = {
    "tiny": Size(TINY, prompts=6, samples=8, prompt_length=48, mean_length=24, max_new_tokens=80, slots=16),
    "smollm2": Size(SMOLLM2, prompts=8, samples=8, prompt_length=128, mean_length=48, max_new_tokens=192, slots=32),
}
