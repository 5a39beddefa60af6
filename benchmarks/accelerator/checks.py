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

BESIDE, PREPARED, ALONE = "beside", "prepared", "alone"
"""How a check shares the device where the minutes are limited; see `Check.turn`."""


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
        turn: how it shares the device where the minutes are limited: `BESIDE` the others, because it times nothing;
            `PREPARED`, where it compiles beside the others, and then waits until it is `ALONE`.
        seconds: most that it may take then, once it is its turn.
    """

    name: str
    function: str
    does: str
    minutes: float
    arguments: tuple[Any, ...] = ()
    turn: str = ALONE
    seconds: float = 80.0

    @property
    def file_name(self) -> str:
        """Name of its files, without the ending."""
        return self.name.replace(" ", "-")

    @property
    def call(self) -> Callable[[Context], Any]:
        """Function of the context alone."""
        return partial(resolve_name(f"benchmarks.accelerator.{self.function}"), *self.arguments)


STEP = "a step and a decode of random weights in the shape of {}, beside the plan; needs {} GB of memory"
RECIPE = STEP.format("Gemma 2 2B with adapters, as the recipe gsm8k-gemma2 sets it", 12)
PEER = "the step of '2B recipe' by TRL's trainer with generate of transformers; needs torch and TRL"

CHECKS = (
    Check("machine", "machine:measure", "products and memory beside the data sheet", 1),
    Check("attention", "attention:compare", "attention in rows by kernels, against blocks", 3, (), BESIDE),
    Check(
        "decode attention", "attention:compare_decoding", "attention of new tokens by kernels, against blocks", 2,
        (), BESIDE,
    ),
    Check(
        "sampler", "training:compare_sampler", "log-probs and tokens of the sampler against the trainer's", 4,
        (), BESIDE,
    ),
    Check("restart", "restart:compare", "killed and resumed runs against runs left alone, bit for bit", 8, (), BESIDE),
    Check("2B recipe", "training:measure", RECIPE, 4, ("2B recipe",), PREPARED),
    Check("TRL 2B recipe", "peer:measure", PEER, 3, seconds=110.0),
    Check("8B", "training:measure", STEP.format("Llama 3.1 8B with adapters", 26), 8, ("8B",), PREPARED, 110.0),
    Check("2B", "training:measure", STEP.format("Gemma 2 2B with adapters", 12), 6, ("2B",), PREPARED),
    Check("0.5B", "training:measure", STEP.format("Qwen2.5 0.5B, all weights trained", 12), 5, ("0.5B",), PREPARED),
    Check("several devices", "training:compare_meshes", "the step of 2B on all devices, by two meshes", 6),
)  # fmt: skip
"""All checks, in the order of their worth: limited minutes may not suffice for the last. The sum of their minutes is
what a whole call takes.
"""
