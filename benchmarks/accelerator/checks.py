"""The checks as a table: what each does, the function that does it, and about how long it takes.

A function takes a `Context` and yields rows. Each check runs in a process of its own (`python -m
benchmarks.accelerator`): its peak of memory is its own, and a crash ends it alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Context:
    """Arguments of a check: a folder for its files, and a function that shows what it does."""

    folder: Path
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: as `--only` selects it.
        function: module and function behind `benchmarks.accelerator.`; modules that use JAX are imported where the
            check runs, because a process that has begun JAX may hold the devices alone.
        arguments: further arguments of the function.
        does: what it does and what it needs, in words.
        minutes: about how long it takes on an accelerator.
    """

    name: str
    function: str
    does: str
    minutes: float
    arguments: tuple[Any, ...] = ()

    @property
    def call(self) -> Callable[[Context], Any]:
        """Function of the context alone."""
        return partial(resolve_name(f"benchmarks.accelerator.{self.function}"), *self.arguments)


STEP = "a step and a decode of random weights in the shape of {}, beside the plan; needs {} GB of memory"

CHECKS = (
    Check("machine", "machine:measure", "products and memory beside the data sheet", 1),
    Check("attention", "attention:compare", "attention within rows by kernels, against the blockwise oracle", 3),
    Check("decode attention", "attention:compare_decoding", "attention of new tokens by kernels, against blocks", 2),
    Check("sampler", "training:compare_sampler", "log-probs and tokens of the sampler against the trainer's", 4),
    Check("0.5B", "training:measure", STEP.format("Qwen2.5 0.5B, all weights trained", 12), 5, ("0.5B",)),
    Check("2B", "training:measure", STEP.format("Gemma 2 2B with adapters", 12), 6, ("2B",)),
    Check("8B", "training:measure", STEP.format("Llama 3.1 8B with adapters", 26), 8, ("8B",)),
    Check("restart", "restart:compare", "a killed and resumed run against one left alone, bit for bit", 5),
    Check("several devices", "training:compare_meshes", "the step of 2B on all devices, by two meshes", 6),
)
"""All checks in order; the sum of their minutes is what a whole call takes."""
