"""`covey plan --advise`: a recipe planned on every mesh of the devices, the fastest first.

A mesh is compared by the seconds of a whole step for each of its tokens. The tokens of a micro-batch follow the mesh:
each part of the rows keeps as many as in the recipe, but no more than the step has rows for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from covey.config.recipe import Recipe, SFTRecipe
from covey.config.schema import MeshConfig
from covey.errors import CoveyError, RecipeError, first_line
from covey.packing.bins import row_length_bucket
from covey.parallel.mesh import MESH_AXES
from covey_plan.lengths import Lengths
from covey_plan.machines import MACHINES, Target, machine_for_jax
from covey_plan.plan import Load, Plan, Tell, arrays_of, plan_programs, programs_of
from covey_plan.table import make_table
from covey_plan.topologies import place_on, rollout_config
from covey_plan.work import num_rows, step_groups

MOST_TP = 8
"""Most parts of a product that are tried: more lie on no host of a TPU or GPU."""


@dataclass(frozen=True)
class Advice:
    """One mesh.

    Attributes:
        mesh: number of devices along each axis.
        settings: settings of the run, as on the command line.
        plan: its plan; None where it was not compiled.
        floor: bytes of the arrays that a device holds through the run.
        reason: why there is no plan.
        tokens: number of tokens of a step.
    """

    mesh: MeshConfig
    settings: tuple[str, ...]
    plan: Plan | None
    floor: int
    reason: str
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether the run fits the devices."""
        return self.plan is not None and self.plan.fits

    @property
    def seconds(self) -> float:
        """Expected seconds of a step; infinite where it does not fit."""
        return self.plan.step_seconds if self.plan is not None and self.fits else math.inf

    @property
    def update_seconds(self) -> float:
        """Expected seconds of an update for each position of its rows, which are full in a large step."""
        update = self.plan.phases[-1] if self.plan else None
        return update.expected / update.phase.positions if update and self.fits else math.inf


def advise(load: Load, target: Target, tell: Tell, lengths: Lengths) -> list[Advice]:
    """Return the meshes of `target` by expected seconds of a token; meshes that fit come first.

    Args:
        load: gives the recipe.

    Raises:
        RecipeError: the recipe gives the rollout devices of its own.
        CoveyError: `target` is a CPU, or the model is not there.
    """
    recipe = load(())
    _check(recipe, target)
    assert target.count is not None, "accelerators are counted"
    candidates = list(meshes(target.count))
    advice = []
    for number, mesh in enumerate(candidates, start=1):
        prefix = f"mesh {number} of {len(candidates)} ({', '.join(f'{a} {getattr(mesh, a)}' for a in MESH_AXES)}): "
        settings = settings_for(recipe, mesh, lengths)
        advice.append(_advice(load(settings), settings, target, _prefixed(tell, prefix), lengths))
    return sorted(advice, key=lambda one: (one.seconds, one.plan is None, one.floor))


def _prefixed(tell: Tell, prefix: str) -> Tell:
    return lambda text: tell(prefix + text)


def _check(recipe: Recipe | SFTRecipe, target: Target) -> None:
    if target.machine not in MACHINES:
        want = "--on with an accelerator: the virtual devices of a CPU share its processor"
        raise CoveyError(f"--advise compares meshes, and --on is {target.name}", want=want, fix="--on v5e:2x2")
    if rollout_config(recipe).size:
        raise RecipeError(
            "--advise compares meshes of all devices, and the recipe gives the rollout devices of its own",
            fix="leave role_to_mesh out, or compare by hand with covey plan",
            where="role_to_mesh.rollout",
        )


def meshes(count: int) -> Iterator[MeshConfig]:
    """Yield the meshes of `count` devices, with at most `MOST_TP` parts of a product.

    >>> [(mesh.data, mesh.fsdp, mesh.tp) for mesh in meshes(4)]
    [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    """
    for tp in (n for n in range(1, min(count, MOST_TP) + 1) if not count % n):
        rest = count // tp
        yield from (MeshConfig(rest // fsdp, fsdp, tp) for fsdp in range(1, rest + 1) if not rest % fsdp)


def settings_for(recipe: Recipe | SFTRecipe, mesh: MeshConfig, lengths: Lengths) -> tuple[str, ...]:
    """Return the settings of a mesh, as on the command line."""
    words = tuple(word for axis in MESH_AXES for word in (f"--mesh.{axis}", str(getattr(mesh, axis))))
    training, before = recipe.training, recipe.model.mesh
    length, shards = row_length_bucket(training.row_length), mesh.data * mesh.fsdp
    each = max(training.max_tokens_per_micro_batch // (before.data * before.fsdp), length)
    of_step = math.ceil(num_rows(recipe, lengths) / shards) * length
    if (tokens := shards * min(each, of_step)) == training.max_tokens_per_micro_batch:
        return words
    return (*words, "--training.max-tokens-per-micro-batch", str(tokens))


def _advice(
    recipe: Recipe | SFTRecipe, settings: tuple[str, ...], target: Target, tell: Tell, lengths: Lengths
) -> Advice:
    """Return the plan of one mesh, unless its arrays alone do not fit, or the compiler refuses it."""
    mesh, machine = recipe.model.mesh, machine_for_jax(target.machine)
    tokens = sum(group.prompt + sum(group.lengths) for group in step_groups(recipe, lengths))
    places = place_on(target, mesh)
    run = programs_of(recipe, places)
    if (floor := arrays_of(run).floor) > machine.memory:
        return Advice(mesh, settings, None, floor, "the arrays alone do not fit", tokens)
    try:
        plan = plan_programs(recipe, run, target, places, tell, lengths)
    except Exception as error:  # whatever the compiler raises, it makes no program for this mesh
        return Advice(mesh, settings, None, floor, f"refused by the compiler: {first_line(error):.80}", tokens)
    return Advice(mesh, settings, plan, floor, "", tokens)


def show(advice: Sequence[Advice], console: Console) -> None:
    """Print the meshes as a table, and the settings of the fastest."""
    rows = [_row(one) for one in advice]
    titles = ["data × fsdp × tp", "peak GB", "left GB", "step s", "us a token", "update, us a position", ""]
    console.print(make_table(titles, rows))
    lengths = next((one.plan.lengths for one in advice if one.plan), None)
    if lengths:
        console.print(
            f"Assumed: prompts of {lengths.prompt} tokens, completions of {lengths.completion} in the mean and "
            f"{max(lengths.completions)} at most ({lengths.origin}). A position is a token or padding of a full "
            "micro-batch: larger steps come to it.",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
    best = advice[0]
    text = f"fastest: {' '.join(best.settings)}" if best.fits else "no mesh fits: more devices are needed"
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _row(one: Advice) -> tuple[str, ...]:
    name = " × ".join(str(getattr(one.mesh, axis)) for axis in MESH_AXES)
    if one.plan is None:
        return name, f"{one.floor / 1e9:.2f}", "", "", "", "", one.reason
    peak, left = one.plan.peak, one.plan.machine.memory - one.plan.peak
    memory = f"{peak / 1e9:.2f}", f"{left / 1e9:.2f}"
    if not one.fits:
        return name, *memory, "", "", "", "does not fit"
    times = f"{one.seconds:.3g}", f"{one.seconds / one.tokens * 1e6:.3g}", f"{one.update_seconds * 1e6:.3g}"
    return name, *memory, *times, ""


def as_json(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Return the meshes in JSON's types, the fastest first."""
    return [
        {
            "mesh": {axis: getattr(one.mesh, axis) for axis in MESH_AXES},
            "settings": list(one.settings),
            "fits": one.fits,
            "peak": one.plan.peak if one.plan else None,
            "arrays": one.floor,
            "left_out": one.reason,
            "step_seconds": one.seconds if one.fits else None,
            "seconds_per_token": one.seconds / one.tokens if one.fits else None,
            "update_seconds_per_position": one.update_seconds if one.fits else None,
            "phases": {t.phase.name: dict(t.parts) for t in one.plan.phases} if one.plan else {},
        }
        for one in advice
    ]
