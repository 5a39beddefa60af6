"""Memory of a run on one device, by part, and the peak of each of its programs; its outline from shapes alone.

Between programs a device holds the weights, the optimizer's state and, while it samples, the KV cache. A program adds
its other arguments, its results and its temporary memory, of which the compiler knows. A rollout with devices of its
own divides the devices into two groups, each with its own parts and its own programs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import jax
from rich.console import Console

from covey.config.recipe import Recipe, SFTRecipe
from covey.parallel.arrays import flatten
from covey_plan.compiled import CompiledProgram
from covey_plan.program import Program

SAMPLING = ("prefill", "admit", "decode")
"""Names of the programs that run while the KV cache exists."""
SYNC = "sync"
"""Name of the transfer of new weights to the rollout; it is no program."""
Parts = dict[str, int]
"""Part of the memory → its bytes on one device."""
FURTHER_PROGRAMS = "further programs"
"""Name of the memory of programs that a run compiles and a plan does not."""


@dataclass(frozen=True)
class DeviceArrays:
    """Bytes of the arrays on one device.

    Attributes:
        always: by part, arrays held through the whole run.
        during: program, or `SYNC` → part → bytes held while it runs, and not always. They are its arguments, or its
            neighbours'.
    """

    always: Parts
    during: dict[str, Parts] = field(default_factory=dict)

    def peak(self, program: CompiledProgram) -> int:
        """Return the most bytes of one device while `program` is compiled and runs."""
        needed = max(program.results + program.temporary, program.compiling)
        return max(self.held(program.name) + needed, program.refused)

    def held(self, name: str) -> int:
        """Return the bytes of the arrays while the program `name` runs."""
        return sum(self.always.values()) + sum(self.during.get(name, {}).values())

    def most(self) -> Parts:
        """Return the most bytes of each part."""
        parts = dict(self.always)
        for held in self.during.values():
            parts |= {part: max(size, parts.get(part, 0)) for part, size in held.items()}
        return parts


class RunArrays(NamedTuple):
    """Arrays of a device of the actor, and of one of the rollout's own devices if it has some."""

    actor: DeviceArrays
    rollout: DeviceArrays | None = None

    def of(self, program: str) -> DeviceArrays:
        """Return the arrays of a device on which `program`, or `SYNC`, runs."""
        return self.rollout if self.rollout and program in (*SAMPLING, SYNC) else self.actor

    @property
    def floor(self) -> int:
        """Most bytes that a device holds through the whole run."""
        return max(sum(one.always.values()) for one in self if one)

    def peaks(self, programs: Iterable[CompiledProgram]) -> dict[str, int]:
        """Return the most bytes of a device by program, and of the transfer of weights to the rollout."""
        peaks: dict[str, int] = {}
        for program in programs:
            peaks[program.name] = max(self.of(program.name).peak(program), peaks.get(program.name, 0))
        return peaks | ({SYNC: self.of(SYNC).held(SYNC)} if SYNC in self.of(SYNC).during else {})

    def with_programs(self, size: int) -> "RunArrays":
        """Return these with `size` bytes of further programs, which a run has compiled while it samples."""
        more, sampling = {FURTHER_PROGRAMS: size} if size else {}, self.of("decode")
        during = {name: parts | more for name, parts in sampling.during.items() if name in SAMPLING}
        changed = replace(sampling, during=sampling.during | during)
        return self._replace(rollout=changed) if self.rollout else self._replace(actor=changed)


def run_arrays(
    weights: Any,
    optimizer: Any,
    programs: Sequence[Program],
    reference: bool,
    rollout: Any = None,
    synced: Any = None,
    lent: int = 0,
) -> RunArrays:
    """Return the arrays of the devices of a run.

    Args:
        weights, optimizer: shapes of the state of the model that is trained and of its optimizer's, on their devices.
        programs: programs of the run.
        reference: whether a frozen copy of the weights is held too.
        rollout: shapes of the rollout's weights, on its devices, if it has a copy of them.
        synced: shapes of the weights that it gets after each update, while it still holds the old ones.
        lent: bytes of the weights of a device that are taken apart while it samples.
    """
    by_name = {program.name: program for program in programs}
    always, training = _training(weights, optimizer, by_name, reference)
    sampling = _sampling(by_name, weights if rollout is None else rollout, lent)
    if rollout is None:
        return RunArrays(DeviceArrays(always, training | sampling))
    sampling |= {SYNC: {"new weights of the rollout": nbytes(synced)}}
    if _devices(rollout).isdisjoint(_devices(weights)):
        return RunArrays(DeviceArrays(always, training), DeviceArrays({"weights": nbytes(rollout)}, sampling))
    return RunArrays(DeviceArrays(always | {"weights of the rollout": nbytes(rollout)}, training | sampling))


def _devices(state: Any) -> set[jax.Device]:
    return set().union(*(leaf.sharding.device_set for leaf in jax.tree.leaves(state)))


def _training(
    weights: Any, optimizer: Any, by_name: Mapping[str, Program], reference: bool
) -> tuple[Parts, dict[str, Parts]]:
    """Return the bytes of what is held always and of what is held while the programs of training run."""
    _, frozen, sums, batch, _ = by_name["gradients"].args
    always = {"weights": nbytes(weights), "optimizer": nbytes(optimizer)}
    if reference:
        always["reference"] = nbytes(weights)
    during = {
        "gradients": {"gradients": nbytes(sums), "rows": nbytes(batch), "rounded weights": _other(frozen, weights)},
        **{name: {"gradients": nbytes(sums)} for name in ("reduce", "apply")},
    }
    for name in ("score", "token values", "loss"):
        if name in by_name:
            rounded, rows = by_name[name].args
            during[name] = {"rows": nbytes(rows), "rounded weights": _other(rounded, weights)}
    return always, _without_empty(during)


def _sampling(by_name: Mapping[str, Program], weights: Any, lent: int) -> dict[str, Parts]:
    """Return the bytes of what is held while a run samples with `weights`, by program; `lent` of them are held in the
    form in which they are sampled with, and in no other.
    """
    if "decode" not in by_name:
        return {}
    rounded, cache, *_ = by_name["decode"].args
    prefix = nbytes(jax.eval_shape(by_name["prefill"].function, *by_name["prefill"].args), like=cache)
    held = {"KV cache": nbytes(cache), "weights to sample with": _other(rounded, weights) - lent}
    return _without_empty({name: held | ({} if name == "prefill" else {"prompts": prefix}) for name in SAMPLING})


def _without_empty(during: Mapping[str, Parts]) -> dict[str, Parts]:
    return {name: {part: n for part, n in held.items() if n} for name, held in during.items()}


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


@dataclass(frozen=True)
class Outline:
    """Needs of a run that its shapes determine.

    Attributes:
        memory: role → part → most bytes of the arrays on one of its devices. The temporary memory of the programs comes
            on top.
        step: numbers of prompts, completions and tokens of a step, by what they are.
        checkpoint: bytes of a checkpoint: the trained weights and the optimizer's state.
        checkpoints: number of checkpoints that the run folder has at the end, at most.
        not_counted: parts of the run that are not counted.
    """

    memory: Mapping[str, Mapping[str, int]]
    step: Mapping[str, int]
    checkpoint: int
    checkpoints: int
    not_counted: Sequence[str]


def tokens_of_step(recipe: Recipe | SFTRecipe) -> dict[str, int]:
    """Return the numbers of prompts, completions and tokens of a step, by what they are."""
    if isinstance(recipe, SFTRecipe):
        batch = recipe.training.batch_size
        return {"examples": batch, "tokens, at most": batch * recipe.training.max_length}
    prompts, rollout = recipe.training.prompts_per_step, recipe.rollout
    completions = prompts * recipe.grpo.num_generations
    return {
        "prompts": prompts,
        "completions": completions,
        "prompt tokens, at most": prompts * rollout.max_prompt_length,
        "completion tokens, at most": completions * rollout.max_new_tokens,
    }


def num_checkpoints(recipe: Recipe | SFTRecipe) -> int:
    """Return the number of checkpoints that are kept: the latest ones, and the best one if there is one."""
    training = recipe.training
    return training.max_to_keep + bool(training.keep_best) if training.checkpoint_every_n_steps else 1


def checkpoint_bytes(tree: Any) -> int:
    """Return the bytes of a checkpoint of these arrays or shapes, over all devices."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def memory_lines(outline: Outline) -> list[str]:
    """Return the memory in words, a line for each role."""
    lines = []
    for role, held in outline.memory.items():
        parts = ", ".join(f"{name} {size_in_words(size)}" for name, size in held.items())
        device = f"a device of the {role}" if len(outline.memory) > 1 else "a device"
        lines.append(f"{size_in_words(sum(held.values()))} {device} at most: {parts}")
    not_counted = " and ".join(outline.not_counted)
    return [*lines[:-1], f"{lines[-1]}; without {not_counted}" if not_counted else lines[-1]]


def disk_line(outline: Outline) -> str:
    """Return the size of the checkpoints in words."""
    count = "1 checkpoint" if outline.checkpoints == 1 else f"at most {outline.checkpoints} checkpoints"
    return f"{count} of about {size_in_words(outline.checkpoint)}: the trained weights and the optimizer's state"


def show(outline: Outline, console: Console) -> None:
    """Print an outline."""
    step = "; ".join(f"{name} {count:,}" for name, count in outline.step.items())
    rows = [("memory", line) for line in memory_lines(outline)] + [("step", step), ("disk", disk_line(outline))]
    for name, text in rows:
        console.print(f"{name:<8}{text}", soft_wrap=True, highlight=False, markup=False)


def to_json(outline: Outline) -> dict[str, Any]:
    """Return an outline in JSON's types."""
    figures = asdict(outline)
    figures["left_out"] = list(figures.pop("not_counted"))
    return figures


def size_in_words(size: float) -> str:
    """Return a number of bytes in the unit that fits.

    >>> size_in_words(36_864), size_in_words(1_230_000), size_in_words(4_560_000_000)
    ('36.9 kB', '1.2 MB', '4.56 GB')
    """
    if size >= 1e8:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
