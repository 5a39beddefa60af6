"""`make_plan`: compile the programs of a recipe for devices that need not be there, and return the needs of a run.

Only shapes are used: no weight is read, and no array is made for the run. The inventory lists every program that a run
of reinforcement learning compiles with fixed shapes. What a critic, a reward model, a moving reference or an
environment adds is not among them, and neither are the small programs of loading, for example of new adapters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh, SingleDeviceSharding

from covey.config.algorithms import algorithm_of
from covey.config.recipe import AnyRecipe, Recipe, SFTRecipe
from covey.errors import RecipeError, first_line
from covey.models.decoder import Decoder
from covey.models.dtypes import resolve_compute_dtype
from covey.models.lora import split_trainable
from covey.parallel.arrays import place_model
from covey.parallel.mesh import MESH_AXES, platform_of
from covey.recipes.load_model import abstract_for
from covey.rl.cluster import RLCluster
from covey.rl.evaluate import evaluation_rollout
from covey.rl.roles import ClusterConfig, Role
from covey.sampling.cache import Block
from covey.sampling.logits import SamplingParams
from covey.sampling.scheduler import MIN_SLOTS, Scheduler, smaller_batch
from covey.text.tokenizer import Tokenizer
from covey_kernels import gpu_decode, tpu_decode
from covey_plan.compiled import CompiledProgram, compile_program, process_memory
from covey_plan.lengths import Lengths, expected_lengths
from covey_plan.machines import MACHINES, Machine, Target, machine_for_jax
from covey_plan.memory import (
    FURTHER_PROGRAMS,
    DeviceArrays,
    Outline,
    RunArrays,
    checkpoint_bytes,
    nbytes,
    num_checkpoints,
    run_arrays,
    tokens_of_step,
)
from covey_plan.overlap import Overlap, overlap_of
from covey_plan.program import Program
from covey_plan.programs import RLPrograms, SFTPrograms
from covey_plan.roofline import CPU_SHARE, PhaseTime, machine_peaks, step_times
from covey_plan.search import Trial, search
from covey_plan.topologies import Places, mesh_size, place_on, rollout_config
from covey_plan.work import Sizes
from covey_sft.learner import SFTLearner

TOTAL_STEPS = 100
"""Number of steps of the schedule, on which no size depends."""

Load = Callable[[Sequence[str]], Recipe | SFTRecipe]
"""Function that loads the recipe with further settings, as on the command line."""
Tell = Callable[[str], None]
"""Function that shows what is being done."""
RunPrograms = RLPrograms | SFTPrograms


class Entry(NamedTuple):
    """A program of a run, and its shape in words."""

    name: str
    shape: str


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
        arrays: arrays of one device by part, for each group of devices.
        process: bytes of the process itself: Python, libraries and compiled programs. 0 on accelerators, whose memory
            holds none of it.
        programs: the largest that the settings provide for, compiled.
        phases: work and seconds of a step.
        overlap: rollout and training of a step, which may run at once; None in supervised training.
        inventory: every program that a run compiles on an accelerator.
        trials: settings that were tried because the run does not fit; the last fits, if any does.
        not_counted: parts of the run that are not counted.
    """

    recipe: str
    target: Target
    mesh: Mapping[str, int]
    rollout_mesh: Mapping[str, int]
    machine: Machine
    lengths: Lengths
    arrays: RunArrays
    process: int
    programs: Sequence[CompiledProgram]
    phases: Sequence[PhaseTime]
    overlap: Overlap | None = None
    inventory: Sequence[Entry] = ()
    trials: Sequence[Trial] = ()
    not_counted: Sequence[str] = ()

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Most bytes of a device by program, and of the transfer of weights to a rollout with a copy of them."""
        return {name: self.process + peak for name, peak in self.arrays.peaks(self.programs).items()}

    @property
    def peak(self) -> int:
        """Most bytes of a device."""
        return max(self.peaks.values())

    def peak_of(self, group: DeviceArrays) -> int:
        """Return the most bytes of a device of one group."""
        return max(peak for name, peak in self.peaks.items() if self.arrays.of(name) is group)

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the device's memory."""
        return self.peak <= self.machine.memory

    @property
    def step_seconds(self) -> float:
        """Expected seconds of a step."""
        return sum(time.expected for time in self.phases) if self.overlap is None else self.overlap.step

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
        tell: shows what is being done.
        lengths: expected lengths; `expected_lengths(recipe)` if not set.
        show_outline: called with the outline, before the first program is compiled.

    Raises:
        CoveyError: the meshes do not fit the devices, their compiler is not installed or refuses the devices of one of
            two meshes, or the model is not there.
    """
    recipe = load(())
    places = place_on(target, recipe.model.mesh, rollout_config(recipe))
    tell("building the programs")
    run = programs_of(recipe, places)
    show_outline(outline_of(recipe, run))
    plan = plan_programs(recipe, run, target, places, tell, lengths or expected_lengths(recipe))
    return plan if plan.fits else replace(plan, trials=_search(plan, recipe, load, places, tell))


def plan_programs(
    recipe: Recipe | SFTRecipe,
    run: RunPrograms,
    target: Target,
    places: Places,
    tell: Tell,
    lengths: Lengths,
    machine: Machine | None = None,
) -> Plan:
    """Return the plan of a run with these programs on these devices, without a search for settings that fit.

    Args:
        run: programs of shapes on `places`.
        machine: one of the devices; from `target` if not set.
    """
    machine = machine or _machine_of(recipe, target)
    executables: list[Any] = []  # a run keeps its programs, which are part of its process
    compiled = _compile(run.called(), target, machine, places, tell, executables)
    arrays = arrays_of(run).with_programs(_further_programs(run, compiled))
    process = process_memory() if machine.platform == "cpu" else 0
    executables.clear()
    tell("counting")
    phases, overlap, listed = _phase_times(recipe, run, arrays, compiled, machine, lengths), None, list[Entry]()
    if isinstance(recipe, Recipe) and isinstance(run, RLPrograms):
        overlap = overlap_of(recipe, phases, arrays, machine)
        listed = inventory(recipe, run)
    return Plan(
        recipe.name,
        target,
        {axis: getattr(recipe.model.mesh, axis) for axis in MESH_AXES},
        {} if places.rollout is None else dict(places.rollout.shape),
        machine,
        lengths,
        arrays,
        process,
        compiled,
        phases,
        overlap,
        listed,
        not_counted=_not_counted(recipe, compiled),
    )


def outline_for(recipe: Recipe | SFTRecipe, target: Target) -> Outline:
    """Return the outline of a run of `recipe`; no program is compiled.

    Raises:
        CoveyError: as for `make_plan`.
    """
    return outline_of(recipe, programs_of(recipe, place_on(target, recipe.model.mesh, rollout_config(recipe))))


def outline_of(recipe: Recipe | SFTRecipe, run: RunPrograms) -> Outline:
    """Return the outline of a run with these programs."""
    memory = {role: held.most() for role, held in arrays_of(run)._asdict().items() if held}
    checkpoint = checkpoint_bytes((run.trainer.trainable, run.trainer.opt_state))
    return Outline(memory, tokens_of_step(recipe), checkpoint, num_checkpoints(recipe), _not_counted(recipe, ()))


def programs_of(recipe: Recipe | SFTRecipe, places: Places) -> RunPrograms:
    """Return the programs of a recipe on these devices."""
    if isinstance(recipe, SFTRecipe):
        return supervised_programs(recipe, places.actor, TOTAL_STEPS)
    return policy_programs(recipe, places.actor, TOTAL_STEPS, places.rollout)


def policy_programs(
    recipe: Recipe, place: Mesh | jax.Device, total_steps: int, rollout: Mesh | None = None
) -> RLPrograms:
    """Return the programs of the policy of `recipe`, for a mesh or a device that need not be there.

    Args:
        total_steps: optimizer updates of the whole run, from which the schedule follows.
        rollout: the rollout's own mesh, if it has one.

    Raises:
        WeightsError: the source is not available, is incomplete, or is not a supported model.
    """
    model, tokenizer = _placed_model(recipe, place)
    meshes = {Role.ACTOR: place if isinstance(place, Mesh) else None, Role.ROLLOUT: rollout}
    own = {role: mesh for role, mesh in meshes.items() if mesh is not None}
    cluster = RLCluster(
        actor=model, tokenizer=tokenizer, cluster_config=ClusterConfig(own, recipe.training, recipe.rollout)
    )
    return RLPrograms(
        cluster, recipe.grpo, total_steps=total_steps, is_async=bool(recipe.envs.environment or recipe.envs.tools)
    )


def supervised_programs(recipe: SFTRecipe, place: Mesh | jax.Device, total_steps: int) -> SFTPrograms:
    """Return the programs of the supervised training of `recipe`; arguments and errors as for `policy_programs`."""
    model, tokenizer = _placed_model(recipe, place)
    learner = SFTLearner(
        model=model, tokenizer=tokenizer, config=recipe.training, mesh=place if isinstance(place, Mesh) else None
    )
    return SFTPrograms(learner, total_steps)


def _placed_model(recipe: AnyRecipe, place: Mesh | jax.Device) -> tuple[Decoder, Tokenizer]:
    platform = platform_of(place if isinstance(place, Mesh) else SingleDeviceSharding(place))
    model, tokenizer = abstract_for(recipe, platform)
    return place_model(model, place), tokenizer


def arrays_of(run: RunPrograms) -> RunArrays:
    """Return the arrays of the devices of a run with these programs."""
    reference, rollout, synced, lent = False, None, None, 0
    if isinstance(run, RLPrograms):
        reference = run.has_reference
        lent = nbytes(run.cluster.rollout.lendable()) if run.cluster.lends_stacks else 0
        if not run.config.shares_weights:
            rollout, synced = run.cluster.rollout.params, split_trainable(run.cluster.rollout.model)[1]
    trainer = run.trainer
    return run_arrays(trainer.params, trainer.opt_state, run.called(), reference, rollout, synced, lent)


def _further_programs(run: RunPrograms, compiled: Sequence[CompiledProgram]) -> int:
    """Return the bytes of this process that a run's other decode programs keep: each batch size has one, and so has an
    evaluation, which draws otherwise.
    """
    decode = sum(one.host_bytes for one in compiled if one.name == "decode")
    return num_batch_sizes(run.scheduler()) * decode if isinstance(run, RLPrograms) else 0


def _compile(
    programs: Sequence[Program],
    target: Target,
    machine: Machine,
    places: Places,
    tell: Tell,
    executables: list[Any],
) -> list[CompiledProgram]:
    compiled, on_host = [], machine.platform == "cpu"
    read_text = places.several or not on_host
    for number, program in enumerate(programs, start=1):
        tell(f"compiling {program.name} ({number} of {len(programs)})")
        try:
            compiled.append(compile_program(program, read_text, machine.platform, executables if on_host else None))
        except jax.errors.JaxRuntimeError as error:
            if places.rollout is None:
                raise
            raise _refused_devices(program, target, first_line(error)) from error
    return compiled


def _refused_devices(program: Program, target: Target, reason: str) -> RecipeError:
    """Return the error for a program that the compiler refuses for the devices of one of two meshes."""
    return RecipeError(
        f"the compiler for {target.name} refuses {program.name}: {reason:.200}",
        want="on TPUs, meshes that are each a block of chips: of each host the first ones are the actor's, the others "
        "the rollout's",
        fix="a slice of one host, or no role_to_mesh.rollout",
        where="role_to_mesh",
    )


def _search(plan: Plan, recipe: Recipe | SFTRecipe, load: Load, places: Places, tell: Tell) -> list[Trial]:
    largest_first = sorted(plan.peaks, key=plan.peaks.__getitem__, reverse=True)
    above = [name for name in largest_first if plan.peaks[name] > plan.machine.memory]
    further = plan.arrays.of("decode").during.get("decode", {}).get(FURTHER_PROGRAMS, 0)

    def peak_with(settings: Sequence[str]) -> int:
        run = programs_of(load(settings), places)
        arrays = arrays_of(run).with_programs(further)
        tell(f"trying {' '.join(settings)}")
        floor = plan.process + arrays.floor
        if floor > plan.machine.memory:  # no program can fit
            return floor
        compiled = [compile_program(program, read_text=False) for program in run.called() if program.name in above]
        return plan.process + max(arrays.peaks(compiled).values())

    return search(recipe, above, plan.machine.memory, peak_with)


def _phase_times(
    recipe: Recipe | SFTRecipe,
    run: RunPrograms,
    arrays: RunArrays,
    compiled: Sequence[CompiledProgram],
    machine: Machine,
    lengths: Lengths,
) -> list[PhaseTime]:
    count, actor, platform = mesh_size(recipe.model.mesh), arrays.actor, machine.platform
    # The update reads and writes weights and moments, and reads the gradients.
    moved = 2 * nbytes(run.trainer.trainable) + 2 * actor.always["optimizer"] + actor.during["apply"]["gradients"]
    sampling = _sampling_sizes(run, platform) if isinstance(run, RLPrograms) else {}
    held = actor.always["weights"] * count, moved * count, jnp.dtype(recipe.model.dtype).itemsize
    processes = run.num_processes if isinstance(run, RLPrograms) else 1
    rates = machine, machine.flops[_compute_dtype(recipe, platform)]
    return step_times(
        recipe, run.model.config, lengths, Sizes(*held, **sampling), *rates, compiled, platform != "cpu", processes
    )


def _sampling_sizes(run: RLPrograms, platform: str) -> dict[str, Any]:
    """Return the sizes of the weights and of the cache on the devices with which one process samples."""
    mesh = run.config.mesh(Role.ROLLOUT)
    count, copies = (1, 1) if mesh is None else (mesh.size, mesh.shape.get("data", 1))
    cache = next(program for program in run.called() if program.name == "decode").args[1]
    block = next(block for blocks in cache for block in blocks if isinstance(block, Block))  # a layer may have a state
    held: tuple[int, ...] = block.keys.sharding.shard_shape(block.keys.shape) if mesh else block.keys.shape
    return {
        "sampled": float(nbytes(run.cluster.rollout.params) * count),
        "copies": copies,
        "cache_copies": math.prod(held) * count / block.keys.size,
        **_kernel_blocks(platform, block.length, held[1]),
    }


def _kernel_blocks(platform: str, time: int, kv_heads: int) -> dict[str, int]:
    """Return the numbers of positions and of heads that the kernel of decoding reads at a time; none on a CPU."""
    if platform == "gpu":
        return {"block": gpu_decode.BLOCK_SIZE}
    if platform == "tpu":
        return {"block": tpu_decode.block_size(time), "block_heads": tpu_decode.block_heads(kv_heads)}
    return {}


def _compute_dtype(recipe: Recipe | SFTRecipe, platform: str) -> str:
    return resolve_compute_dtype(recipe.model.compute_dtype, "cuda" if platform == "gpu" else platform)


def _machine_of(recipe: Recipe | SFTRecipe, target: Target) -> Machine:
    """Return one of the devices. A CPU is this one, measured with operands of the run's type, and its memory is divided
    among its virtual devices.
    """
    if target.machine in MACHINES:
        return machine_for_jax(target.machine)
    dtype, count = _compute_dtype(recipe, target.platform), mesh_size(recipe.model.mesh) + rollout_config(recipe).size
    rates, memory = machine_peaks(dtype), psutil.virtual_memory().total / count
    rest = 0.0, CPU_SHARE, CPU_SHARE, 0.0, 0.0, f"this processor: a large {dtype} product and a sum, measured now"
    return Machine("cpu", "cpu", {dtype: rates.matmul}, rates.bandwidth, memory, math.inf, *rest)


def _not_counted(recipe: Recipe | SFTRecipe, compiled: Sequence[CompiledProgram]) -> list[str]:
    """Return the parts of a run of the recipe that its plan does not count."""
    text = "collectives of {}, whose text this jaxlib cannot read"
    unread = [text.format(program.name) for program in compiled if program.unread]
    parts: dict[str, Any]
    if isinstance(recipe, SFTRecipe):
        parts = {"answers in evaluations": recipe.evaluation.answers}
    else:
        episodes = recipe.envs.environment or recipe.envs.tools
        in_order = recipe.training.off_policy_steps or recipe.envs.answer_lag is not None
        order = " in a fixed order (envs.answer_lag)" if in_order else ""
        parts = {
            "programs that append an environment's responses": episodes,
            f"waiting for its responses{order}": episodes,
            "the critic": algorithm_of(recipe.grpo).needs_critic,
            "the reward model": recipe.reward_model,
        }
    return unread + [name for name, there in parts.items() if there]


def inventory(recipe: Recipe, run: RLPrograms) -> list[Entry]:
    """Return the programs of a run of `recipe`; none where shapes follow the lengths, as on a CPU."""
    return (
        [*_training_programs(recipe, run), *_sampling_programs(recipe, run)]
        if run.cluster.row_sizes.fixed_shapes
        else []
    )


def _training_programs(recipe: Recipe, run: RLPrograms) -> Iterator[Entry]:
    rows = [f"{count} rows of {length}" for count, length in run.row_sizes()]
    algorithm = algorithm_of(recipe.grpo)
    yield Entry("optimizer state", "")
    yield Entry("zero gradients", "")
    yield from (Entry("gradients", shape) for shape in rows)
    if run.trainer.programs.layout.parts > 1:
        yield Entry("reduce", "")
        yield Entry("norm", "")
    yield Entry("apply", "")
    if algorithm.needs_reference:
        yield from (Entry("score of the reference", shape) for shape in rows)
        if recipe.model.adapter or run.has_reference:
            yield Entry("copy for the reference", "")
    if algorithm.needs_old_logps:
        yield from (Entry("score", shape) for shape in rows)
    if run.has_token_values:
        yield Entry("token values", "{} rows of {}".format(*run.token_value_size()))


def _sampling_programs(recipe: Recipe, run: RLPrograms) -> Iterator[Entry]:
    scheduler, evaluation = run.scheduler(), recipe.evaluation
    slots = f"{len(scheduler.slots)} slots of {scheduler.cache_length}"
    yield Entry("weights to sample with", "")
    yield Entry("prefill", "{} prompts of {}".format(*scheduler.prefill_shape))
    yield from (Entry(name, slots) for name in ("empty cache", "admit", "decode"))
    # A program has the settings of the distribution that are used as arguments; evaluations may use others.
    evaluated, trained = evaluation_rollout(evaluation, recipe.rollout), recipe.rollout
    used = [[x is None for x in SamplingParams.from_config(each).of_rows(1)] for each in (evaluated, trained)]
    if evaluation.preset == "all" or used[0] != used[1]:
        yield Entry("decode with other settings", slots)


def num_batch_sizes(scheduler: Scheduler) -> int:
    """Return the number of sizes of batch and cache that a rollout may decode with: those of a batch that shrinks as
    samples finish, and each doubling of its cache.

    >>> from covey.config.schema import RolloutConfig
    >>> from covey_plan.schedule import fitted
    >>> num_batch_sizes(fitted([4], [64], RolloutConfig(slots=64, max_new_tokens=16)))  # 64 48 32 24 16 8 4
    7
    """
    if not scheduler.resizes:
        return 1
    sizes, slots = 1, len(scheduler.slots)
    while (slots := smaller_batch(slots)) >= MIN_SLOTS:
        sizes += 1
    doublings = (scheduler.longest_cache // scheduler.cache_length).bit_length() - 1
    return sizes + doublings
