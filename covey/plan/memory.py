"""Memory of a run on one device, by part, and the peak of each of its programs.

Between programs a device holds the weights, the optimizer's state and, while it samples, the KV cache. A program adds
its other arguments, its results and its temporary memory, of which the compiler knows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from covey.parallel.programs import Program
from covey.parallel.reshard import flatten, mesh_of
from covey.plan.compiled import CompiledProgram

SAMPLING = ("prefill", "insert", "admit", "decode")
"""Names of the programs that run while the KV cache exists; an accelerator has `admit` instead of `insert`."""
FURTHER_PROGRAMS = "further programs"
"""Name of the memory of programs that a run compiles and a plan does not."""


@dataclass(frozen=True)
class Residents:
    """Bytes of the arrays on one device.

    Attributes:
        always: by part, those held through the whole run.
        during: program → part → bytes held while it runs, and not always. They are its arguments, or its neighbours'.
    """

    always: Mapping[str, int]
    during: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def peak(self, program: CompiledProgram) -> int:
        """Return the most bytes of one device while `program` is compiled and runs."""
        held = sum(self.always.values()) + sum(self.during.get(program.name, {}).values())
        return max(held + program.results + program.temporary, held + program.compiling, program.refused)

    def with_programs(self, size: int) -> "Residents":
        """Return these with `size` bytes of further programs, which a run has compiled while it samples."""
        more = {FURTHER_PROGRAMS: size} if size else {}
        during = {name: {**held, **more} if name in SAMPLING else held for name, held in self.during.items()}
        return replace(self, during=during)


def residents_of(weights: Any, programs: Sequence[Program], reference: bool, rollout: Any = None) -> Residents:
    """Return the arrays that a device holds.

    Args:
        weights: shapes of the state of the model that is trained, on its devices.
        programs: those of the run.
        reference: whether a frozen copy of the weights is held beside them.
        rollout: shapes of the rollout's weights, on its devices. Where these are not those of `weights`, as in each of
            several processes, they are a copy.
    """
    by_name = {program.name: program for program in programs}
    _, frozen, sums, batch, _ = by_name["gradients"].args
    always = {"weights": nbytes(weights), "optimizer": nbytes(by_name["apply"].args[1])}
    if reference:
        always["reference"] = nbytes(weights)
    if rollout is not None and mesh_of(rollout) != mesh_of(weights):
        always["weights of the rollout"] = nbytes(rollout)
    during = {
        "gradients": {"gradients": nbytes(sums), "rows": nbytes(batch), "rounded weights": _other(frozen, weights)},
        "apply": {"gradients": nbytes(sums)},
    }
    for name in ("score", "token values", "loss"):
        if name in by_name:
            rounded, rows = by_name[name].args
            during[name] = {"rows": nbytes(rows), "rounded weights": _other(rounded, weights)}
    if "decode" in by_name:
        rounded, cache, *_ = by_name["decode"].args
        prefix = nbytes(jax.eval_shape(by_name["prefill"].function, *by_name["prefill"].args), like=cache)
        held = {"KV cache": nbytes(cache), "weights to sample with": _other(rounded, weights)}
        during |= {name: held | ({} if name == "prefill" else {"prompts": prefix}) for name in SAMPLING}
    return Residents(always, {name: {part: n for part, n in held.items() if n} for name, held in during.items()})


def nbytes(tree: Any, like: Any = None) -> int:
    """Return the bytes of arrays or shapes on one device.

    Args:
        like: arrays or shapes of which the first gives the share of a device where `tree` has no shardings.
    """
    share = 1.0
    if like is not None:
        first = jax.tree.leaves(like)[0]
        share = math.prod(_shard_shape(first)) / first.size
    leaves = (x for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
    total: int = sum(math.prod(_shard_shape(x)) * x.dtype.itemsize for x in leaves)
    return round(share * total)


def _shard_shape(x: Any) -> tuple[int, ...]:
    sharding = getattr(x, "sharding", None)
    return tuple(x.shape) if sharding is None else tuple(sharding.shard_shape(x.shape))


def _other(state: Any, weights: Any) -> int:
    """Return the bytes of the arrays of `state` that are not those of `weights`: copies in another type, or of a layer
    out of a stack.
    """
    known = {path: (x.dtype, x.shape) for path, x in flatten(weights).items()}
    return nbytes([x for path, x in flatten(state).items() if known.get(path) != (x.dtype, x.shape)])
