"""A step and a decode of random weights beside the plan of the same programs; the sampler against the trainer."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.checks import Context
from benchmarks.accelerator.machine import is_cpu, machine_here, memory_limit, memory_peak, places_of, target_here
from benchmarks.accelerator.profile import Profile, profiled
from benchmarks.accelerator.results import NotTriedError, Row, seconds_row
from benchmarks.accelerator.shapes import abstract_model, random_model, recipe_of, shape_here
from benchmarks.accelerator.turn import wait_for_turn
from benchmarks.common import short
from benchmarks.decode import FullSlots
from benchmarks.step import FirstStep, number_words
from covey.config.recipe import Recipe
from covey.models.decoder import Decoder
from covey.packing.rows import pack
from covey.rl.batches import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.train.trainer import Metrics
from covey.types import Group
from covey_plan.lengths import Lengths
from covey_plan.plan import TOTAL_STEPS, Plan, outline_of, plan_programs
from covey_plan.programs import RLPrograms
from covey_plan.topologies import Places
from covey_plan.work import Phase, decoding

REPEAT = 3
"""Number of steps that are measured behind the first, which compiles."""
CHUNKS = 8
"""Number of chunks of decode steps that are measured."""
LOGPS_APART = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest mean distance in nats of the trainer's log-probs from the sampler's, by the type of weights and products."""


class Subject:
    """A model's shape with the recipe of its step, on some devices.

    Args:
        name: of the shape.
        mesh: number of devices along each axis; one device if not set.
        dtype: see `recipe_of`.
        rank: of adapters, in place of the shape's.
    """

    def __init__(
        self, name: str, mesh: Mapping[str, int] | None = None, dtype: str | None = None, rank: int | None = None
    ):
        shape = shape_here(name)
        self.name, self.shape = name, shape if rank is None else replace(shape, rank=rank)
        self.recipe: Recipe = recipe_of(self.shape, mesh, dtype)
        self.places: Places = places_of(self.recipe.model.mesh, jax.devices())
        self.model: Decoder = abstract_model(self.shape, self.recipe, self.places)
        self.dtype = str(jnp.dtype(self.recipe.model.dtype))

    def cluster(self, model: Decoder) -> RLCluster:
        """Return the cluster of the step, with `model` of arrays or of shapes; no completion ever stops."""
        size, mesh = self.shape.config.vocab_size, self.places.actor
        meshes = {Role.ACTOR: mesh} if isinstance(mesh, jax.sharding.Mesh) else {}
        config = ClusterConfig(meshes, self.recipe.training, self.recipe.rollout)
        return RLCluster(actor=model, tokenizer=number_words(size, (size,)), cluster_config=config)

    def plan(self, context: Context) -> Plan:
        """Return the plan of the step's programs on these devices.

        Raises:
            NotTriedError: they do not fit.
        """
        run = RLPrograms(self.cluster(self.model), self.recipe.grpo, total_steps=TOTAL_STEPS)
        (parts,) = outline_of(self.recipe, run).memory.values()
        held = sum(parts.get(name, 0) for name in ("weights", "optimizer", "reference"))
        if (limit := memory_limit()) and held > limit:
            raise NotTriedError(f"does not fit: arrays of {held / 1e9:.1f} GB, and a device has {limit / 1e9:.1f} GB")
        count, machine, work = self.recipe.model.mesh, machine_here(self.dtype), self.shape.work
        target = target_here(count.data * count.fsdp * count.tp)
        lengths = Lengths(work.prompt_length, (work.new_tokens,))
        plan = plan_programs(self.recipe, run, target, self.places, context.tell, lengths, machine)
        if not plan.fits:
            peak, memory = plan.peak / 1e9, plan.machine.memory / 1e9
            raise NotTriedError(f"does not fit: a peak of {peak:.1f} GB, and a device has {memory:.1f} GB")
        return plan

    def learner(self) -> FirstStep:
        """Return a learner of random weights."""
        return FirstStep(self.cluster(random_model(self.model)), self.recipe.grpo)

    def prompts(self) -> list[dict[str, str]]:
        """Return the step's prompts, all of the greatest length."""
        work, draw = self.shape.work, np.random.default_rng(1)
        tokens = draw.integers(0, self.shape.config.vocab_size, (work.prompts, work.prompt_length))
        return [{"prompt": " ".join(map(str, prompt))} for prompt in tokens]


def measure(name: str, context: Context) -> Iterator[Row]:
    """Measure the step and the decode of a shape beside their plan.

    Raises:
        NotTriedError: it does not fit.
    """
    yield from Measurement(Subject(name), context).rows()


class Measurement:
    """Steps of a subject that were taken after its plan was made.

    Attributes:
        first: record of the first step.
        peak: most bytes on a device; 0 if it does not say, or held more before.

    Raises:
        NotTriedError: it does not fit.
    """

    def __init__(self, subject: Subject, context: Context):
        self.subject, self.context, before = subject, context, memory_peak()
        self.plan = subject.plan(context)
        wait_for_turn()
        context.tell("the first step, which compiles")
        self.learner, prompts = subject.learner(), subject.prompts()
        self.first = self.learner.step(prompts)
        self.learner.records.clear()
        for number in range(REPEAT):
            context.tell(f"step {number + 1} of {REPEAT}")
            self.learner.step(prompts)
        peak = memory_peak()
        self.peak = peak if peak > before else 0  # devices do not forget an earlier one

    @property
    def cluster(self) -> RLCluster:
        """The models."""
        return self.learner.learner.cluster

    def rows(self, suffix: str = "") -> Iterator[Row]:
        """Yield the rows, with `suffix` behind the names of the quantities."""
        tokens = self.subject.shape.work.completion_tokens
        seconds = {name: one["median"] for name, one in self.learner.phases().items()}
        for one in self.plan.phases:
            yield seconds_row(f"{one.phase.name}{suffix}", seconds[one.phase.name], one.expected)
            yield from self._shares(one.phase, seconds[one.phase.name], suffix)
        yield Row(f"completion tokens a second of the rollout{suffix}", short(tokens / seconds["rollout"]))
        yield Row(f"completion tokens a second of the step{suffix}", short(tokens / sum(seconds.values())))
        if self.peak:
            yield Row(f"peak memory{suffix}", short(self.peak / 1e9), short(self.plan.peak / 1e9), "GB")
        yield from _sampler_rows(self.first.metrics, self.subject, suffix)
        self.context.tell("decoding with all slots busy")
        decode = _full_slots(self.subject, self.cluster)
        yield seconds_row(f"decode step, beside its bound{suffix}", *_decode_seconds(self.subject, decode, self.plan))
        if not suffix:
            yield from self._profiles(decode)

    def _shares(self, phase: Phase, seconds: float, suffix: str) -> Iterator[Row]:
        """Yield the rates of a phase as shares of what the data sheet promises; of flops only the products of real
        tokens are counted, and of bytes the least that must be read.
        """
        machine, count = self.plan.machine, self.plan.target.count or 1
        flops = machine.flops.get(self.subject.dtype, max(machine.flops.values())) * count
        rates = {"flops": (phase.flops, flops), "bytes": (phase.bytes, machine.bandwidth * count)}
        for name, (amount, rate) in rates.items():
            yield Row(
                f"{phase.name}: share of the peak {name}/s{suffix}", short(100 * amount / seconds / rate), None, "%"
            )

    def _profiles(self, decode: Callable[[int], object]) -> Iterator[Row]:
        """Yield the share of an update and of decode steps in which the device computes, and the number of operations;
        the longest operations go to the file profile.txt.
        """
        self.context.tell("profiles")
        chunk = self.subject.recipe.rollout.decode_chunk
        for what, profile in {
            f"decode, {chunk} steps": profiled(lambda: decode(1)),  # before an update takes its weights
            "update": self._profile_of_update(),
        }.items():
            with (self.context.folder / "profile.txt").open("a", encoding="utf-8") as file:
                file.write(f"{self.subject.name}, {what}: {profile.seconds:.4f} s\n{profile.listing}\n\n")
            yield Row(
                f"{what}: share in which the device computes", short(100 * profile.busy / profile.seconds), None, "%"
            )
            yield Row(f"{what}: operations", profile.operations)

    def _profile_of_update(self) -> Profile:
        learner, profiles = self.learner.learner, list[Profile]()

        def update(batches: Iterable[TrainBatch]) -> Metrics:
            made, metrics = list(batches), list[Metrics]()
            profiles.append(profiled(lambda: metrics.append(GRPOLearner.update(learner, made))))
            return metrics[0]

        with patch.object(learner, "update", update):
            self.learner.step(self.subject.prompts())
        return profiles[0]

    def logps(self, groups: Sequence[Group]) -> np.ndarray:
        """Return the trainer's log-probs of all tokens of these groups."""
        training = self.subject.recipe.training
        rows = pack(groups, training.row_length, max_tokens=training.max_tokens_per_micro_batch)
        lengths = [len(completion.tokens) for group in groups for completion in group.completions]
        return np.concatenate(self.cluster.get_old_per_token_logps(rows, lengths))


def _decode_seconds(subject: Subject, decode: Callable[[int], object], plan: Plan) -> tuple[float, float]:
    """Return the seconds of a decode step in the middle of the completions, and the least that the devices allow."""
    work, chunk, rank = subject.shape.work, subject.recipe.rollout.decode_chunk, subject.recipe.model.lora.rank
    slots, place = work.prompts * work.samples, work.prompt_length + work.new_tokens // 2
    seconds = _seconds(lambda: decode(CHUNKS)) / (CHUNKS * chunk)
    itemsize, mesh = jnp.dtype(subject.dtype).itemsize, subject.recipe.model.mesh
    flops, read = decoding(subject.shape.config, [(place, 1)] * slots, slots / mesh.data, rank, itemsize)
    count = mesh.data * mesh.fsdp * mesh.tp if plan.target.count else 1
    rate = plan.machine.flops.get(subject.dtype, max(plan.machine.flops.values()))
    return seconds, max(read / plan.machine.bandwidth, flops / rate) / count


def _full_slots(subject: Subject, cluster: RLCluster) -> Callable[[int], object]:
    """Return a function that decodes a number of chunks with all slots in the middle of their completions; it has been
    called once.
    """
    work, chunk = subject.shape.work, subject.recipe.rollout.decode_chunk
    slots, place = work.prompts * work.samples, work.prompt_length + work.new_tokens // 2
    params = cluster.rollout.sampling_params()
    decode = FullSlots(cluster.rollout.engine.programs, params, slots, chunk, place)
    decode(slots * chunk)
    return lambda chunks: decode(chunks * slots * chunk)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sampler_rows(metrics: Mapping[str, float], subject: Subject, suffix: str = "") -> Iterator[Row]:
    """Yield the distance of the sampler's log-probs from the trainer's, and the share of tokens that it draws otherwise
    with the same noise, from a step's metrics.
    """
    mean, most = (short(metrics[f"sampling/logp_difference/{which}"]) for which in ("mean", "max"))
    yield Row(f"sampler's log-probs, mean distance{suffix}", mean, LOGPS_APART[subject.dtype], "nats", bound=True)
    yield Row(f"sampler's log-probs, greatest distance{suffix}", most, None, "nats")
    differing = short(1 - metrics["sampling/token_agreement"])
    yield Row(f"tokens that the trainer would not draw{suffix}", differing, _most_differing(mean, subject), bound=True)


def _most_differing(distance: float, subject: Subject) -> float:
    """Return the share of tokens that two distributions may draw otherwise with the same noise, of which log-probs are
    `distance` apart: twice the total variation of the blocks of the vocabulary and twice that of the tokens of a block
    (`sampling.logits.race`), which are at most half of the distance and all of it. Three standard errors come on top.
    """
    tokens = subject.shape.work.completion_tokens
    return short(3 * distance + 3 * (3 * distance / tokens) ** 0.5 + 3 / tokens)


def compare_sampler(context: Context) -> Iterator[Row]:
    """Compare sampler and trainer at equal weights in the shape of 0.5B with adapters, in both types; on a CPU, where
    the steps of the shapes are in float32, in bfloat16 alone.
    """
    rank = shape_here("2B").rank
    for dtype in ("bfloat16",) if is_cpu() else ("float32", "bfloat16"):
        context.tell(f"a step in {dtype}, which compiles")
        subject = Subject("0.5B", dtype=dtype, rank=rank)
        yield from _sampler_rows(subject.learner().step(subject.prompts()).metrics, subject, f", {dtype}")


def compare_meshes(context: Context) -> Iterator[Row]:
    """Measure the step of 2B on all devices, divided by weights and by products, and compare the log-probs that the two
    compute of the same tokens.

    Raises:
        NotTriedError: there is one device, or the step does not fit.
    """
    if (count := jax.device_count()) == 1:
        raise NotTriedError("there is one device")
    groups: Sequence[Group] = ()
    logps, bound = [], 0.0
    for axis in ("fsdp", "tp"):
        measurement = Measurement(Subject("2B", {axis: count}), context)
        yield from measurement.rows(f", {axis} {count}")
        groups = groups or measurement.first.groups
        logps.append(measurement.logps(groups))
        bound = LOGPS_APART[measurement.subject.dtype]
        del measurement  # its arrays would stay beside those of the next mesh
    distance = short(np.abs(logps[0] - logps[1]).mean())
    yield Row("log-probs by the two meshes, mean distance", distance, bound, "nats", bound=True)
