"""Sample completions with continuous batching: slots are refilled while others are still decoding.

    add ─▶ waiting ─▶ schedule ─▶ launch: prefill and insert, or decode a chunk of steps ─▶ collect ─▶ finished

The scheduler decides which slot draws which sample, the model runner runs the programs, and a `Sequence` gathers the
tokens of each sample. A prompt is prefilled once; its keys and values are copied into the slot of each of its samples.

The noise of a token depends only on (seed, step, prompt index, sample index, token index), so the same completion is
drawn in any slot, batch, order or chunk size.

Programs end a completion at stop ids and at its limit. Other stop conditions are asked when the tokens of a chunk are
read; tokens that were drawn after the end are dropped.

On accelerators an engine runs ahead: a step launches a program before it reads the one before, so the device does not
wait for the host. A slot that has ended is seen one program late; a program finds what it needs of a slot on the
device. Where sizes follow the samples, each step reads what it launched.

A sample with a responder (a tool, an environment) gets a response where it halts, and goes on (`covey.turns`).

One thread at a time uses an engine. An exception of a responder comes out of `step` and cancels its request; the others
go on. After any other exception, as an interruption, `reset` the engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig, SamplingConfig
from covey.errors import CoveyError, DataError, WeightsError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layer_kinds import any_state
from covey.parallel.arrays import flatten
from covey.parallel.shapes import abstract, is_abstract
from covey.registry import offered
from covey.sampling import sequence
from covey.sampling.cache import CacheLayout
from covey.sampling.logits import sample_keys
from covey.sampling.model_runner import ModelRunner, Programs, SamplerStats
from covey.sampling.programs import Drawn
from covey.sampling.scheduler import NO_REQUIREMENTS, Sample, Scheduler, check_length
from covey.sampling.sequence import StopCondition, StopIds
from covey.types import Completion

if TYPE_CHECKING:
    from covey.sampling.responder import Responder

MAX_WAITING = 65_536
"""Maximum number of requests that wait, unless an engine has another one."""


@dataclass(frozen=True)
class Request:
    """One prompt with the number of completions to sample.

    Attributes:
        prompt: int32 [n] tokens.
        samples: number of completions.
        index: the prompt's index in the step; with `step` and the sample index it seeds the noise.
        step: the training step (or any other number that distinguishes calls).
        first: number of the first completion among all completions of the prompt's index.
        sampling_params: temperature and truncation; None for the engine's.
        max_new_tokens: maximum number of tokens of a completion; None for the engine's.
        stop_conditions: end a completion, besides stop ids and the limit.
        responder: responds where the model halts; every completion then has a mask.
        id: id of the request; None for a new one.
    """

    prompt: np.ndarray
    samples: int = 1
    index: int = 0
    step: int = 0
    first: int = 0
    sampling_params: SamplingConfig | None = None
    max_new_tokens: int | None = None
    stop_conditions: tuple[StopCondition, ...] = ()
    responder: "Responder | None" = None
    id: int | None = None


def check_request(request: Request, name: str, config: RolloutConfig, model: ModelConfig) -> None:
    """Check that a request, which errors call `name`, can be sampled by an engine with these settings.

    Raises:
        DataError: its prompt has no tokens, too many for the settings or the model, or one that is no token of it.
        CoveyError: its limit of new tokens is not from 1 to the limit of the settings, the noise has no such position,
            or nothing looks for the stop strings of the settings.
    """
    tokens = np.asarray(request.prompt)
    limit = config.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    if not 0 < limit <= config.max_new_tokens:
        want = f"from 1 to rollout.max_new_tokens = {config.max_new_tokens}"
        raise CoveyError(f"{name} has a limit of {limit} new tokens", want=want)
    if min(place := (request.step, request.index, request.first)) < 0 or max(place) + request.samples > 2**32:
        raise CoveyError(f"{name} has the step, index and first sample {place}", want="from 0 to 2**32 each")
    if config.stop and not request.stop_conditions:
        want = "StopStrings(config.stop, tokenizer.decode) among Request.stop_conditions: an engine knows tokens only"
        raise CoveyError(f"{name} has no stop conditions, and rollout.stop is {list(config.stop)}", want=want)
    check_length(len(tokens), config, f"the prompt of {name}", limit)
    if (needed := len(tokens) + limit) > model.max_positions:
        want = f"at most {model.max_positions}, the positions that the model was made for"
        raise DataError(f"the prompt of {name} and its answer may need {needed} tokens", want=want)
    if len(wrong := tokens[(tokens < 0) | (tokens >= model.vocab_size)]):
        want = f"tokens from 0 to {model.vocab_size - 1}, which the model knows"
        raise DataError(f"the prompt of {name} has the token {wrong[0]}", want=want)


class Finished(NamedTuple):
    """A completion that has ended, without its text.

    Attributes:
        request: id of its request.
        number: its number among the samples of the request.
        completion: the completion.
        versions: versions of the weights that drew its first and its last token.
    """

    request: int
    number: int
    completion: Completion
    versions: tuple[int, int]


@dataclass(frozen=True)
class Launched:
    """A program that draws, launched and not read.

    Attributes:
        samples: sample of each slot for which it may draw.
        drawn: what it draws.
        version: version of the weights.
        decodes: whether it is a chunk of decode steps.
        began: time of the launch.
    """

    samples: dict[int, Sample]
    drawn: Drawn
    version: int
    decodes: bool
    began: float

    def drop(self, slots: Iterable[int]) -> None:
        """Forget the samples in these slots."""
        for slot in slots:
            self.samples.pop(slot, None)


class Engine:
    """Sequences of requests, and the steps that finish them.

    Args:
        model: defines the structure and the first weights; one of shapes has no weights until `update_weights`.
        stop_ids: tokens that end a completion; the stop token is kept as its last token.
        config: lengths, temperature, truncation, slots, seed; see `configure`.
        fixed_shapes: whether all sizes follow the settings.
        max_waiting: maximum number of requests that wait.
        runs_ahead: whether a program is launched before the one before is read; by default on accelerators.

    Attributes:
        scheduler: assigns sequences to slots.
        runner: draws their tokens in these slots.
        turns: turns that are not answered yet; None before the first request with a responder.
        sequences: sequences that are not finished, by the id of their request and their number.
        version: version of the weights.
        has_state: whether layers have a state in place of keys and values, which cannot drop tokens.
    """

    def __init__(
        self,
        model: Decoder,
        stop_ids: Sequence[int],
        config: RolloutConfig,
        fixed_shapes: bool = False,
        max_waiting: int = MAX_WAITING,
        runs_ahead: bool | None = None,
    ):
        graph, params = nnx.split(model)
        self.stop_ids, self.max_waiting, self.version = tuple(sorted(stop_ids)), max_waiting, 0
        self.programs = Programs(graph, self.stop_ids)
        self.scheduler = Scheduler(config, may_resize=CacheLayout.of(model).divided, fixed_shapes=fixed_shapes)
        self.runner = ModelRunner(self.programs, None if is_abstract(params) else params)
        self.sequences: dict[int, dict[int, sequence.Sequence]] = {}
        self.has_state = any_state(model.config)
        self._model, self._shapes, self._ids = model.config, flatten(abstract(params)), count()
        self._without_key: list[tuple[sequence.Sequence, tuple[int, int, int]]] = []
        self.runs_ahead = model.platform != "cpu" if runs_ahead is None else runs_ahead
        self._launched, self._read_at, self._stepped_at = deque[Launched](), 0.0, 0.0
        self.turns: Any = None
        self._finished: list[Finished] = []

    @property
    def config(self) -> RolloutConfig:
        """Settings of the engine."""
        return self.scheduler.config

    @property
    def stats(self) -> SamplerStats:
        """Statistics since they were set anew."""
        return self.runner.stats

    @property
    def unfinished(self) -> bool:
        """Whether a sample waits or runs."""
        return bool(self.sequences)

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        return len(self.scheduler.waiting) < self.max_waiting

    def configure(self, config: RolloutConfig) -> None:
        """Change the settings of an engine without requests, and begin new statistics."""
        self._check_idle("an engine without requests, for new settings")
        self.scheduler.config, self.runner.stats = config, SamplerStats()

    def update_weights(self, params: Any, version: int | None = None) -> None:
        """Take new weights, between two steps. Sequences that are not finished keep their cache, and go on under the
        new weights; their completions say so by their `versions`.

        Args:
            params: the decoder's state, all of it.
            version: number of these weights; by default the last number plus 1.

        Raises:
            WeightsError: an array is missing, or has another shape or type than before.
        """
        self._check_weights(params)
        self.runner.params, self.version = params, self.version + 1 if version is None else version
        self.scheduler.prefilled, self.runner.prefix_lengths = [], np.zeros(0, np.int32)
        if not self.unfinished:  # numbers that are not finite would spoil whatever comes into the same slot
            self.runner.release()

    def sleep(self) -> None:
        """Free the weights and the cache of an engine without requests, until `update_weights`."""
        self._check_idle("an engine without requests, to sleep")
        self.runner.release()
        self.runner.params = None

    def reset(self) -> None:
        """Cancel all requests, and free the cache, of which an interrupted program may have left nothing."""
        for request in list(self.sequences):
            self._forget(request)
        self.runner.release()
        self._launched.clear()
        self._finished.clear()

    def add(self, request: Request) -> int:
        """Let the samples of a request wait, also while others run; return its id.

        Raises:
            CoveyError: there is an unfinished request with this id, the queue is full, or `check_request` refuses it.
                The other requests go on.
        """
        number = next(i for i in self._ids if i not in self.sequences) if request.id is None else request.id
        self._check_place(number)
        check_request(request, f"request {number}", self.config, self._model)
        limit = request.max_new_tokens or self.config.max_new_tokens
        sampling_params = request.sampling_params or self.config
        conditions = [*request.stop_conditions, StopIds(self.stop_ids)]
        make: Any = sequence.Sequence
        requirements = NO_REQUIREMENTS
        if request.responder is not None:
            turns = offered("covey.turns", "turns")
            self.turns = self.turns or turns.Turns(self)
            make, requirements = turns.of_responder(request.responder)
        samples = {n: make(request.prompt, limit, sampling_params, conditions) for n in range(request.samples)}
        if samples:
            self.sequences[number] = samples
        self._without_key += [(one, (request.step, request.index, request.first + n)) for n, one in samples.items()]
        self.scheduler.add(number, len(request.prompt), request.samples, requirements)
        return number

    def cancel(self, request: int) -> None:
        """Drop the samples of a request that are not finished, also where they run or wait for a response.

        Raises:
            CoveyError: there is no unfinished request with this id.
        """
        if request not in self.sequences:
            raise CoveyError(f"there is no request {request}", want="the id of a request that is not finished")
        self.runner.halt(self._forget(request))

    def _forget(self, request: int) -> list[int]:
        """Forget a request; return the slots of its samples."""
        if self.turns is not None:
            self.turns.drop(request)
        for launched in self._launched:
            launched.drop([slot for slot, sample in launched.samples.items() if sample.request == request])
        self._remove(request)
        return self.scheduler.cancel(request)

    def _remove(self, request: int) -> None:
        """Remove a request without samples, or with samples that nobody wants."""
        del self.sequences[request]
        if not self.sequences:  # nobody is left to read for, and the next requests may have another batch
            self._launched.clear()

    def step(self) -> list[Finished]:
        """Run one batch: prompts that enter free slots, or else a chunk of decode steps. Return the samples that ended,
        as far as they are read.

        Where nothing can run before a response comes, or one is due, wait for it.
        """
        began = self._stepped_at if self._launched else time.perf_counter()
        self._schedule()
        if self.scheduler.can_admit:
            self._launched.append(self._admit())
        elif self.scheduler.active:
            self._launched.append(self._decode())
        # The host must have read all before it can fit batch and cache to what the slots hold.
        self._read(int(bool(self.runs_ahead and not self.scheduler.resizes and self.scheduler.active)))
        self._stepped_at = time.perf_counter()
        self.stats.seconds += self._stepped_at - began
        finished, self._finished = self._finished, []
        return finished

    def _schedule(self) -> None:
        """Give slots to what can go on, and fit batch and cache to it."""
        self._make_keys()
        if self.scheduler.fit():
            self.runner.allocate(len(self.scheduler.slots), self.scheduler.cache_length)
        if self.turns is not None:
            self.turns.proceed()
        while (slots := self.scheduler.resize()) is not None:
            self.runner.resize(slots, self.scheduler.cache_length)

    def _admit(self) -> Launched:
        """Insert waiting samples into free slots, with their first tokens."""
        began = time.perf_counter()
        if batch := self.scheduler.next_prefill():
            prompts = [next(iter(self.sequences[request].values())).prompt for request in batch]
            self.runner.prefill(prompts, self.scheduler.prefill_shape)
        admitted = self.scheduler.admit()
        samples = {one.slot: one.sample for one in admitted}
        drawn = self.runner.insert(admitted, self._in_slots(samples))
        return Launched(samples, drawn, self.version, decodes=False, began=began)

    def _decode(self) -> Launched:
        """Decode a chunk of steps for the samples in slots."""
        samples = self.scheduler.active
        active = self._in_slots(samples)
        if self.turns is not None:
            self.turns.begin_chunk(active)
        began = time.perf_counter()
        drawn = self.runner.decode(active, self.config.decode_chunk, self.scheduler.requirements.pause_id)
        return Launched(samples, drawn, self.version, decodes=True, began=began)

    def _read(self, num_unread: int) -> None:
        """Read the tokens of the programs launched, but for the last `num_unread`."""
        while len(self._launched) > num_unread:
            self._collect(self._launched.popleft())

    def _collect(self, launched: Launched) -> None:
        """Read the tokens that a program drew, and end the samples that have halted in it."""
        chunk = self.runner.read(launched.drawn)
        self._count_seconds(launched)
        kept, halted = np.zeros_like(chunk.counts), dict[int, Sample]()
        for slot, sample in launched.samples.items():
            if chunk.counts[slot]:
                one = self._sequence(sample)
                kept[slot] = one.extend(chunk.of(slot), launched.version, is_active=bool(chunk.active[slot]))
                if one.ending is not None:
                    halted[slot] = sample
        self.runner.count_tokens(int(kept.sum()), first=not launched.decodes)
        self._stop_drawing([slot for slot in halted if chunk.active[slot]])
        finished = {slot: sample for slot, sample in halted.items() if self._sequence(sample).responder is None}
        self.scheduler.update(kept, finished)
        for sample in finished.values():
            self.finish(sample)
        if self.turns is not None:
            self.turns.submit(sample for slot, sample in halted.items() if slot not in finished)

    def _stop_drawing(self, slots: Sequence[int]) -> None:
        """Halt slots of samples that a stop condition has ended, which programs do not know; forget what they draw in
        programs that are launched.
        """
        self.runner.halt(slots)
        for launched in self._launched:
            launched.drop(slots)

    def _count_seconds(self, launched: Launched) -> None:
        """Count the time that the device took for a chunk: since its launch, or since it was done with what was before,
        if that was later.
        """
        now = time.perf_counter()
        if launched.decodes:
            self.stats.decode_seconds += now - max(launched.began, self._read_at)
        self._read_at = now

    def finish(self, sample: Sample) -> None:
        """Let the next step return the completion of a sample that has ended."""
        samples = self.sequences[sample.request]
        ended = samples.pop(sample.number)
        if not samples:
            self._remove(sample.request)
        self._finished.append(Finished(*sample, ended.completion(), ended.versions))

    def _sequence(self, sample: Sample) -> sequence.Sequence:
        return self.sequences[sample.request][sample.number]

    def _in_slots(self, samples: Mapping[int, Sample]) -> dict[int, sequence.Sequence]:
        return {slot: self._sequence(sample) for slot, sample in samples.items()}

    def _make_keys(self) -> None:
        """Make the random keys of the samples that were added since the last step."""
        if self._without_key:
            rows = np.array([where for _, where in self._without_key], np.uint32)
            for (one, _), key in zip(self._without_key, sample_keys(self.config.seed, rows), strict=True):
                one.key = key
            self._without_key = []

    def _check_place(self, number: int) -> None:
        """Refuse one more request, with this id."""
        if self.runner.params is None:
            raise CoveyError("the engine has no weights", fix="update_weights first; a model of shapes brings none")
        if number in self.sequences:
            raise CoveyError(
                f"there is an unfinished request {number} already", fix="another id; or None, for a new one"
            )
        if not self.has_room:
            want = f"at most max_waiting = {self.max_waiting:,}"
            raise CoveyError(f"{self.max_waiting:,} requests wait already", want=want, fix="add it after some steps")

    def _check_idle(self, what: str) -> None:
        """Check that there is no unfinished request; `what` names the use that needs such an engine."""
        if self.unfinished:
            fix = "step until none is unfinished; or cancel or reset"
            raise CoveyError(f"the engine has {len(self.sequences):,} unfinished requests", want=what, fix=fix)

    def _check_weights(self, params: Any) -> None:
        """Refuse weights that the programs were not made for."""
        new = flatten(params)
        for name in self._shapes.keys() | new.keys():
            want, got = (_describe(arrays.get(name)) for arrays in (self._shapes, new))
            if want != got:
                raise WeightsError(f"new weights have {got} as {name}", want=want, fix="weights of the engine's model")


def _describe(array: Any) -> str:
    return "no array" if array is None else f"{array.dtype}{list(array.shape)}"


def generate(
    engine: Engine, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None
) -> list[list[Completion]]:
    """Sample with an engine that has no other requests; return the completions by request and number. An exception
    resets the engine.

    Args:
        progress: called with (finished, total) completions after each step.
    """
    engine.configure(engine.config)
    left, ids, done = deque(requests), list[int](), dict[tuple[int, int], Completion]()
    try:
        while left or engine.unfinished:
            while left and engine.has_room:
                ids.append(engine.add(left.popleft()))
            done |= {(one.request, one.number): one.completion for one in engine.step()}
            if progress is not None:
                progress(len(done), sum(request.samples for request in requests))
    except BaseException:
        engine.reset()
        raise
    return [[done[number, n] for n in range(r.samples)] for number, r in zip(ids, requests, strict=True)]
