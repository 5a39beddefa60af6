"""`make_plan`: compile the programs of a recipe for devices that need not be there, and say what a run of it needs.

Only shapes are used: no weight is read, and no array is made for the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe
from covey.errors import RecipeError
from covey.models.dtypes import resolve_compute_dtype
from covey.models.lora import split_trainable
from covey.parallel.mesh import MESH_AXES
from covey.parallel.programs import Program
from covey.plan.compiled import CompiledProgram, compile_program, resident
from covey.plan.inventory import Entry, has_token_values, inventory
from covey.plan.knobs import Turn, search
from covey.plan.machines import MACHINES, Machine, Target
from covey.plan.memory import FURTHER_PROGRAMS, Residents, RunResidents, nbytes, run_residents
from covey.plan.outline import Outline, make_outline
from covey.plan.roofline import PhaseTime, Rates, peaks, phase_time
from covey.plan.topologies import Places, mesh_size, place_on, rollout_config
from covey.plan.work import Lengths, Sizes, expected_lengths, step_phases
from covey.rl.programs import RLPrograms
from covey.rl.roles import Role
from covey.run.programs import policy_programs, supervised_programs
from covey.sampling.scheduler import MIN_SLOTS, Scheduler, smaller_batch
from covey.sft.learner import SFTPrograms

TOTAL_STEPS = 100
"""Number of steps of the schedule, on which no size depends."""
CPU_SHARE = 0.4
"""Share of the roofline that a phase reaches on CPUs: 39 to 57 per cent in updates, 56 to 74 in decoding (measured)."""

Load = Callable[[Sequence[str]], Recipe | SFTRecipe]
"""Function that loads the recipe with further settings, as on the command line."""
Tell = Callable[[str], None]
"""Function that is told what is being done."""


@dataclass(frozen=True)
class Plan:
    """Needs of a run.

    Attributes:
        recipe: its name.
        target: devices that it is planned for.
        mesh: number of devices along each axis.
        rollout_mesh: the same of the rollout's own devices; empty if it has none.
        machine: one of the devices.
        lengths: expected ones, on which seconds depend.
        residents: arrays of one device by part, for each group of devices.
        process: bytes of the process itself: Python, libraries and compiled programs. 0 on accelerators, whose memory
            holds none of it.
        programs: the largest that the settings provide for, compiled.
        phases: work and seconds of a step.
        inventory: every program that a run compiles on an accelerator.
        turns: settings that were tried because the run does not fit; the last fits, if any does.
        left_out: what is not counted.
    """

    recipe: str
    target: Target
    mesh: Mapping[str, int]
    rollout_mesh: Mapping[str, int]
    machine: Machine
    lengths: Lengths
    residents: RunResidents
    process: int
    programs: Sequence[CompiledProgram]
    phases: Sequence[PhaseTime]
    inventory: Sequence[Entry] = ()
    turns: Sequence[Turn] = ()
    left_out: Sequence[str] = ()

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Most bytes of a device by program, and of the transfer of weights to a rollout with a copy of them."""
        return {name: self.process + peak for name, peak in self.residents.peaks(self.programs).items()}

    @property
    def peak(self) -> int:
        """Most bytes of a device."""
        return max(self.peaks.values())

    def peak_of(self, group: Residents) -> int:
        """Return the most bytes of a device of one group."""
        return max(peak for name, peak in self.peaks.items() if self.residents.of(name) is group)

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the device's memory."""
        return self.peak <= self.machine.memory

    @property
    def compile_seconds(self) -> float:
        """Seconds that all programs took to compile."""
        return sum(program.seconds for program in self.programs)


def make_plan(
    load: Load,
    target: Target,
    tell: Tell,
    lengths: Lengths | None = None,
    show_outline: Callable[[Outline], None] = lambda outline: None,
) -> Plan:
    """Return the plan of a recipe for `target`.

    Args:
        load: gives the recipe.
        target: devices, which need not be there.
        tell: told what is being done.
        lengths: expected lengths; those of `expected_lengths` if not set.
        show_outline: called with what follows from shapes, before the first program is compiled.

    Raises:
        CoveyError: the meshes do not fit the devices, their compiler is not installed or refuses the devices of one of
            two meshes, or the model is not there.
    """
    recipe = load(())
    places = place_on(target, recipe.model.mesh, rollout_config(recipe))
    tell("building the programs")
    made = programs_of(recipe, places)
    largest = _programs_run(recipe, made)
    show_outline(_outline(recipe, made))
    kept: list[Any] = []  # a run keeps its programs, which are part of its process
    compiled = _compile(largest, target, places.several, tell, kept, places.rollout is not None)
    residents = _residents(recipe, made).with_programs(_further_programs(made, compiled))
    process = resident() if target.platform == "cpu" else 0
    kept.clear()
    tell("counting")
    count = mesh_size(recipe.model.mesh) + rollout_config(recipe).size
    machine = _machine_of(target, _compute_dtype(recipe, target), count)
    lengths = lengths or expected_lengths(recipe)
    times = _phase_times(recipe, made, residents, compiled, machine, target, lengths)
    plan = Plan(
        recipe.name,
        target,
        {axis: getattr(recipe.model.mesh, axis) for axis in MESH_AXES},
        {} if places.rollout is None else dict(places.rollout.shape),
        machine,
        lengths,
        residents,
        process,
        compiled,
        times,
        inventory(recipe, made) if isinstance(recipe, Recipe) and isinstance(made, RLPrograms) else (),
        left_out=_left_out(recipe, compiled),
    )
    return plan if plan.fits else replace(plan, turns=_search(plan, recipe, load, places, tell))


def outline_for(recipe: Recipe | SFTRecipe, target: Target) -> Outline:
    """Return what follows from the shapes of a run of `recipe`. No program is compiled.

    Raises:
        CoveyError: as for `make_plan`.
    """
    return _outline(recipe, programs_of(recipe, place_on(target, recipe.model.mesh, rollout_config(recipe))))


def _outline(recipe: Recipe | SFTRecipe, made: RLPrograms | SFTPrograms) -> Outline:
    programs = _programs_run(recipe, made)
    return make_outline(recipe, made.trainer.trainable, programs, _residents(recipe, made), _left_out(recipe, ()))


def programs_of(recipe: Recipe | SFTRecipe, places: Places) -> RLPrograms | SFTPrograms:
    """Return the programs of a recipe on these devices."""
    if isinstance(recipe, SFTRecipe):
        return supervised_programs(recipe, places.actor, TOTAL_STEPS)
    return policy_programs(recipe, places.actor, TOTAL_STEPS, places.rollout)


def _residents(recipe: Recipe | SFTRecipe, made: RLPrograms | SFTPrograms) -> RunResidents:
    rollout = synced = None
    if isinstance(made, RLPrograms) and not made.config.shares_weights:
        rollout, synced = made.cluster.rollout.params, split_trainable(made.cluster.rollout.model)[1]
    return run_residents(made.trainer.params, _programs_run(recipe, made), _has_reference(recipe), rollout, synced)


def _further_programs(made: RLPrograms | SFTPrograms, compiled: Sequence[CompiledProgram]) -> int:
    """Return the bytes of this process that a run's other decode programs keep: each batch size has one, and so has an
    evaluation, which draws otherwise.
    """
    if isinstance(made, SFTPrograms):
        return 0
    return num_batch_sizes(made.scheduler()) * sum(one.kept for one in compiled if one.name == "decode")


def _programs_run(recipe: Recipe | SFTRecipe, made: RLPrograms | SFTPrograms) -> list[Program]:
    """Return the largest programs that a run calls: log-probs only where the algorithm needs them, and token values
    only where they are asked for.
    """
    if isinstance(recipe, SFTRecipe):
        return made.largest()
    algorithm = algorithm_of(recipe.grpo)
    called = {"score": algorithm.needs_old_logps or algorithm.needs_reference, "token values": has_token_values(recipe)}
    return [program for program in made.largest() if called.get(program.name, True)]


def _compile(
    programs: Sequence[Program], target: Target, on_mesh: bool, tell: Tell, kept: list[Any], apart: bool = False
) -> list[CompiledProgram]:
    compiled = []
    for number, program in enumerate(programs, start=1):
        tell(f"compiling {program.name} ({number} of {len(programs)})")
        on_host = target.platform == "cpu"
        try:
            compiled.append(compile_program(program, on_mesh or not on_host, on_host, kept if on_host else None))
        except jax.errors.JaxRuntimeError as error:
            if not apart:
                raise
            raise _refused_devices(program, target, str(error)) from error
    return compiled


def _refused_devices(program: Program, target: Target, reason: str) -> RecipeError:
    """Return the error for a program that the compiler refuses for the devices of one of two meshes."""
    return RecipeError(
        f"the compiler for {target.name} refuses {program.name}: {reason.splitlines()[0][:200]}",
        want="on TPUs, meshes that are each a block of chips: of each host the first ones are the actor's, the others "
        "the rollout's",
        fix="a slice of one host, or no role_to_mesh.rollout",
        where="role_to_mesh",
    )


def _search(plan: Plan, recipe: Recipe | SFTRecipe, load: Load, places: Places, tell: Tell) -> list[Turn]:
    largest_first = sorted(plan.peaks, key=plan.peaks.__getitem__, reverse=True)
    above = [name for name in largest_first if plan.peaks[name] > plan.machine.memory]
    further = plan.residents.of("decode").during.get("decode", {}).get(FURTHER_PROGRAMS, 0)

    def peak_with(settings: Sequence[str]) -> int:
        changed = load(settings)
        made = programs_of(changed, places)
        largest = _programs_run(changed, made)
        residents = _residents(changed, made).with_programs(further)
        tell(f"trying {' '.join(settings)}")
        floor = plan.process + residents.floor
        if floor > plan.machine.memory:  # no program can fit
            return floor
        again = [compile_program(one, read_text=False) for one in largest if one.name in above]
        return plan.process + max(residents.peaks(again).values())

    return search(recipe, above, plan.machine.memory, peak_with)


def _phase_times(
    recipe: Recipe | SFTRecipe,
    made: RLPrograms | SFTPrograms,
    residents: RunResidents,
    compiled: Sequence[CompiledProgram],
    machine: Machine,
    target: Target,
    lengths: Lengths,
) -> list[PhaseTime]:
    count, own, actor = mesh_size(recipe.model.mesh), rollout_config(recipe).size, residents.actor
    trainable = nbytes(made.trainer.trainable)
    # The update reads and writes weights and moments, and reads the gradients.
    moved = 2 * trainable + 2 * actor.always["optimizer"] + actor.during["apply"]["gradients"]
    itemsize = jnp.dtype(recipe.model.dtype).itemsize
    sampled, copies = _sampled_weights(made)
    sizes = Sizes(actor.always["weights"] * count, moved * count, itemsize, sampled, copies)
    shards = math.prod(getattr(recipe.model.mesh, axis) for axis in ("data", "fsdp"))
    compile_cost = 0.0 if target.platform == "cpu" else math.inf  # there every row has the default length
    processes = made.num_processes if isinstance(made, RLPrograms) else 1
    model = made.cluster.program_actor if isinstance(made, RLPrograms) else made.learner.program_model
    phases = step_phases(recipe, model.config, lengths, sizes, shards, compile_cost, processes)
    flops, on_cpu = machine.flops[_compute_dtype(recipe, target)], target.platform == "cpu"

    def rates(phase: str) -> Rates:
        devices = own if own and phase == "rollout" else count
        there = 1 if on_cpu else devices  # virtual devices share one processor
        return Rates(flops * there, machine.bandwidth * there, machine.link, there)

    by_name = {program.name: program for program in compiled}
    return [phase_time(phase, by_name, machine, rates(phase.name)) for phase in phases]


def _sampled_weights(made: RLPrograms | SFTPrograms) -> tuple[float | None, int]:
    """Return the bytes of the weights on the devices with which one process samples, and the number of copies there."""
    if isinstance(made, SFTPrograms):
        return None, 1
    mesh = made.config.mesh(Role.ROLLOUT)
    size, copies = (1, 1) if mesh is None else (mesh.size, mesh.shape.get("data", 1))
    return float(nbytes(made.cluster.rollout.params) * size), copies


def _compute_dtype(recipe: Recipe | SFTRecipe, target: Target) -> str:
    return resolve_compute_dtype(recipe.model.compute_dtype, "cuda" if target.platform == "gpu" else target.platform)


def _machine_of(target: Target, dtype: str, count: int) -> Machine:
    """Return one of the devices. A CPU is this one, measured with operands of type `dtype`, and its memory is divided
    among its `count` virtual devices.
    """
    if target.machine in MACHINES:
        return MACHINES[target.machine]
    found, memory = peaks(dtype), psutil.virtual_memory().total / count
    flops, source = {dtype: found.matmul}, f"this processor: a large {dtype} product and a sum, measured now"
    return Machine("cpu", "cpu", flops, found.bandwidth, memory, math.inf, 0.0, CPU_SHARE, source)


def _has_reference(recipe: Recipe | SFTRecipe) -> bool:
    """Return whether a frozen copy of all weights is held: under adapters the reference shares the base."""
    if isinstance(recipe, SFTRecipe) or recipe.model.lora.rank or recipe.model.adapter:
        return False
    return algorithm_of(recipe.grpo).needs_reference


def _left_out(recipe: Recipe | SFTRecipe, compiled: Sequence[CompiledProgram]) -> list[str]:
    """Return what a run of the recipe has and its plan does not count."""
    text = "collectives of {}, whose text this jaxlib cannot read"
    unread = [text.format(program.name) for program in compiled if program.unread]
    if isinstance(recipe, SFTRecipe):
        return unread + (["answers in evaluations"] if recipe.evaluation.answers else [])
    envs = ["programs that append an environment's responses"] if recipe.envs.environment or recipe.envs.tools else []
    critic = ["the critic"] if algorithm_of(recipe.grpo).needs_critic else []
    overlap = ["the time that sampling takes beside training, on devices of its own"] if _overlaps(recipe) else []
    return unread + envs + critic + overlap + (["the reward model"] if recipe.reward_model else [])


def _overlaps(recipe: Recipe) -> bool:
    """Return whether a run samples a part of its step while it trains on another."""
    return bool(recipe.role_to_mesh.rollout.size) and recipe.training.queueing != "sync"


def num_batch_sizes(scheduler: Scheduler) -> int:
    """Return how many sizes of batch and cache a rollout may decode with: those of a batch that shrinks as samples
    finish, and each doubling of its cache.

    >>> from covey.config.schema import RolloutConfig
    >>> num_batch_sizes(Scheduler([4], [64], RolloutConfig(slots=64, max_new_tokens=16)))  # 64 48 32 24 16 8 4
    7
    """
    if not scheduler.resizes:
        return 1
    sizes, slots = 1, len(scheduler.slots)
    while (slots := smaller_batch(slots)) >= MIN_SLOTS:
        sizes += 1
    doublings = (scheduler.longest_cache // scheduler.cache_length).bit_length() - 1
    return sizes + doublings
