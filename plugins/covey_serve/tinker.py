"""Tinker's training API: requests to a model are done in the order of their numbers, and their results are futures.

Each request that changes something is a record of a journal before it is acknowledged. A server that begins with a
journal does the requests again, in the same order, and so has the same weights, samples and futures. Nothing here
depends on the time: sums are added in the order of `seq_id`, and noise follows from numbers of requests.
"""

import asyncio
import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from covey.config.schema import SamplingConfig
from covey.errors import ResumeError
from covey_serve import tinker_forms as forms
from covey_serve.body import parse, post, validate
from covey_serve.device import Weights
from covey_serve.errors import ApiError, as_api_error
from covey_serve.examples import Example
from covey_serve.journal import Journal, Record
from covey_serve.run_folder import RunFolder
from covey_serve.service import Ask, Service
from covey_serve.states import States
from covey_serve.training import SETTINGS, Trained, Trainer
from covey_serve.wire import Top, array_of, gradients_output, read_request, samples_output, tokens_of

PREFIX = "/api/v1/"
WAIT = 30.0
"""Seconds for which the server holds a request for a result that is not there."""
MAX_RESULTS = 16_384
"""Number of results that are kept; the oldest go first."""
MAX_WEIGHTS = 8
"""Number of snapshots whose weights are kept in memory."""
MAX_FETCHED = 256
"""Number of results that are kept once they were fetched, for clients whose answer was lost."""
MAX_EARLY, MAX_WAITING = 4096, 2**30
"""How many numbers a request may come before its turn, and how many bytes of requests to a model may wait."""
SIZES = ("seed", "slots", "max_prompt_length", "max_new_tokens")
"""Settings on which samples depend, to the last bit."""
NEEDED = {"cross_entropy": ("target_tokens", "weights")}
POLICY = ("target_tokens", "logprobs", "advantages")
FORMS: dict[str, type[forms.Request]] = {
    "create_session": forms.Loose, "create_model": forms.CreateModel, "optim_step": forms.OptimStep,
    "save_weights": forms.Save, "save_weights_for_sampler": forms.Save, "load_weights": forms.Load,
    "create_sampling_session": forms.SamplingSession, "asample": forms.Sample,
}  # fmt: skip
"""Forms of the requests that are written to the journal, besides the message of `forward_backward`."""
CONSTANT: dict[str, Any] = {
    "client/config": {}, "sessions/{name}/finish": {}, "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
}  # fmt: skip
"""Answers to requests that change nothing."""


@dataclass
class Run:
    """A model that a client trains, and the requests to it.

    Attributes:
        id: its name.
        metadata: what the client wrote about it.
        model: its weights; None before they are made. The device thread alone changes them.
        saved: numbers of the requests that saved the state and are done, from the last but one on.
        expected: number of the next request.
        early: requests that wait for earlier ones, by number.
        accepted, begun: bytes of requests that were accepted, and of those that the device thread has begun.
        rows: its run folder, while it is open.
    """

    id: str
    metadata: Any = None
    model: Trained | None = None
    saved: deque[int] = field(default_factory=partial(deque[int], maxlen=2))
    expected: int = 1
    early: dict[int, Callable[[], None]] = field(default_factory=dict)
    accepted: int = 0
    begun: int = 0
    rows: RunFolder | None = None

    @property
    def trained(self) -> Trained:
        """The weights.

        Raises:
            ApiError: they could not be made.
        """
        if self.model is None:
            raise ApiError(f"the model {self.id} could not be made")
        return self.model

    def close(self) -> None:
        """Close the run folder."""
        if self.rows is not None:
            self.rows.close()
        self.rows = None

    def base(self, number: int) -> str:
        """Return the path of the state after a request, which nothing writes a second time."""
        return f"tinker://{self.id}/bases/{number}"


class Tinker:
    """Handlers of the training API.

    Args:
        service: the model, whose adapters are trained.
        states: saved states.
        journal: acknowledged requests; None where they are not kept.
        folder: folder for the run folders of the models; None for none.
    """

    def __init__(
        self,
        service: Service,
        trainer: Trainer,
        states: States,
        journal: Journal | None,
        folder: Path | None = None,
    ):
        self.service, self.trainer, self.states, self.journal = service, trainer, states, journal
        self.folder = folder
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str | None, str | None] = {}
        self.sessions = set[str]()
        self._known: dict[str, bytes] = {}
        self._results: OrderedDict[str, Any] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._weights: OrderedDict[str, Weights] = OrderedDict()
        self._begins: dict[str, Callable[[str, Any, bytes], dict[str, Any]]] = {
            "create_session": self._create_session, "create_sampling_session": self._create_sampling_session,
            "asample": self._sample, "create_model": self._make, "load_weights": self._make,
        }  # fmt: skip
        self._works: dict[str, Callable[[Run, Any], Any]] = {
            "create_model": self._create, "load_weights": self._load, "forward_backward": self._forward_backward,
            "optim_step": self._optim_step, "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
        }  # fmt: skip
        self._fetched, self._old_samples, self._copied = set[str](), set[str](), set[str]()
        self._replaying = False

    def replay(self) -> int:
        """Do the requests of the journal again; return their number. Samples are drawn when they are asked for.

        Raises:
            ResumeError: the journal was begun with another model, or has a record that this version cannot read.
        """
        if self.journal is None:
            return 0
        self._replaying, count = True, 0
        sizes = {name: getattr(self.service.config, name) for name in SIZES}
        for count, (kind, body) in enumerate(self.journal.records(f"{self.service.origin}, {sizes}"), start=1):
            try:
                self._repeat(kind, body)
            except (ApiError, LookupError, TypeError, ValueError) as error:
                what = f"request {count} of the journal, {kind!r:.40}, cannot be done again: {error}"
                raise ResumeError(what, fix="the version of Covey that wrote it, or another --state") from error
        self._replaying = False
        return count

    def _repeat(self, kind: str, body: bytes) -> None:
        """Do a request of the journal again, or what stands there for requests that were left out."""
        if kind == "sampler":
            path, session = json.loads(body)
            self.samplers[session] = path
        elif kind == "restore":
            name, _, metadata, number = json.loads(body)
            run = self.runs[name] = Run(name, metadata, expected=number + 1)
            run.saved.append(number)
            self._accept(name, kind, body, name, 0)
            load = forms.Load(path=run.base(number), optimizer=True)
            self._keep(name, self.service.device.run(partial(self._load, run, load)))
        else:
            self.accept(kind, body)

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        route = partial(post, self.service.limits)
        gets = {
            "get_server_capabilities": self.capabilities, "healthz": self.health,
            "training_runs/{name}": self.training_run, "samplers/{name:path}": self.sampler,
        }  # fmt: skip
        return [
            *(route(PREFIX + kind, None, partial(self.accept, kind)) for kind in (*FORMS, "forward_backward")),
            *(route(PREFIX + path, None, partial(_constant, answer)) for path, answer in CONSTANT.items()),
            route(f"{PREFIX}retrieve_future", forms.Retrieve, self.retrieve),
            route(f"{PREFIX}get_info", forms.Loose, self.info),
            route(f"{PREFIX}weights_info", forms.Loose, self.weights_info),
            route("/v1/load_lora_adapter", forms.LoadAdapter, self.load_adapter),
            route("/v1/unload_lora_adapter", forms.UnloadAdapter, self.unload_adapter),
            *(Route(PREFIX + path, answer) for path, answer in gets.items()),
        ]

    # --- requests of the journal

    def accept(self, kind: str, body: bytes) -> dict[str, Any]:
        """Accept a request of the journal; return what the client gets at once.

        Raises:
            ApiError: it is refused.
        """
        form: Any = read_request(body) if kind == "forward_backward" else parse(FORMS[kind], body)
        is_ordered = kind in self._works and getattr(form, "model_id", None) is not None
        promise = (self._in_order if is_ordered else self._begins[kind])(kind, form, body)
        if kind == "load_weights":
            self._copied.add(form.path.split("/")[2])
        return promise

    def _create_session(self, kind: str, form: forms.Loose, body: bytes) -> dict[str, Any]:
        name = f"session-{len(self.sessions) + 1}"
        self._accept(name, kind, body)
        self.sessions.add(name)
        return {"session_id": name, "type": kind}

    def _create_sampling_session(self, kind: str, form: forms.SamplingSession, body: bytes) -> dict[str, Any]:
        if form.model_path is None:
            self._check_base(form.base_model)
        name = f"{form.session_id}:sample:{form.sampling_session_seq_id}"
        self._accept(name, kind, body)
        self.samplers[name] = form.model_path
        return {"sampling_session_id": name, "type": kind}

    def _make(self, kind: str, form: Any, body: bytes) -> dict[str, Any]:
        """Make a model, whose requests have numbers from 1 on."""
        if form.session_id not in self.sessions:
            raise ApiError(f"there is no session {form.session_id!r:.100}", 404, "session_id")
        if kind == "create_model":
            self._check_base(form.base_model)
        name = f"{form.session_id}:train:{form.model_seq_id or 0}"
        if self._accept(name, kind, body, name, 0):
            run = self.runs[name] = Run(name, form.user_metadata)
            self._keep(name, self.service.device.run(partial(self._works[kind], run, form)))
        return {"request_id": name, "model_id": name}

    def _in_order(self, kind: str, form: Any, body: bytes) -> dict[str, Any]:
        """Do a request after all earlier ones to its model; a repeat of one is not done again."""
        run, result = self._run(form.model_id), Future[Any]()
        number = form.seq_id = form.seq_id or max([run.expected - 1, *run.early]) + 1
        name, rest = f"{run.id}:{number}", None
        if name not in self._known:
            self._check_turn(run, number)
        if kind == "save_weights_for_sampler":
            rest = "sampler", json.dumps(_snapshot_names(form)).encode()
        if self._accept(name, kind, body, run.id, number, rest):
            if rest is not None:
                self._repeat(*rest)
            self._keep(name, result)
            run.accepted += len(body)
            run.early[number] = partial(self._work, kind, run, form, len(body), result)
        while (due := run.early.pop(run.expected, None)) is not None:
            self.service.device.run(due)
            run.expected += 1
        return {"request_id": name, "model_id": run.id}

    def _check_turn(self, run: Run, number: int) -> None:
        """Refuse a number that is not near the next one, or while too much waits: the next one finds room yet where
        later ones do not.
        """
        room = MAX_WAITING if number == run.expected else MAX_WAITING // 2
        if not run.expected <= number <= run.expected + MAX_EARLY:
            raise ApiError(f"the next request to {run.id} is {run.expected}, and not {number}", 409, "seq_id")
        if run.accepted - run.begun > room and not self._replaying:
            raise ApiError(f"{run.accepted - run.begun:,} bytes of requests to {run.id} wait already", 429)

    def _sample(self, kind: str, form: forms.Sample, body: bytes) -> dict[str, Any]:
        """Sample from a snapshot; the noise follows from the numbers of the session and of the request."""
        session, path = form.sampling_session_id, form.model_path
        if session is not None and session not in self.samplers:
            raise ApiError(f"there is no sampling session {session!r:.100}", 404)
        path = path if session is None else self.samplers[session]
        key = hashlib.sha256(body).hexdigest() if session is None else f"{session}:{form.seq_id}"
        name, tokens = f"sample:{key}", np.array([token for chunk in form.prompt.chunks for token in chunk.tokens])
        _check_tokens(tokens, self.service)
        self._accept(name, kind, body, name)
        if name not in self._results:
            draw = partial(self._draw, form, tokens.astype(np.int32), path, key)
            self._keep(name, draw if self._replaying else asyncio.ensure_future(_outcome(draw())))
        return {"request_id": name, "sample_sequence_ids": [f"{key}:{n}" for n in range(form.num_samples)]}

    def _accept(
        self, name: str, kind: str, body: bytes, owner: str = "", number: float = math.inf, rest: Record | None = None
    ) -> bool:
        """Write a request to the journal; return False for a repeat of one that is there. See `journal.Entry`.

        Raises:
            ApiError: another request had its name.
        """
        digest = hashlib.sha256(kind.encode() + body).digest()
        if (known := self._known.get(name)) is not None:
            if known != digest:
                of, _, last = name.rpartition(":")
                raise ApiError(f"another request to {of} had the number {last}", 409, "seq_id")
            return False
        if self.journal is not None:
            self._shorten(self.journal)
            self.journal.write(kind, body, owner, number, rest)
        self._known[name] = digest
        return True

    def _shorten(self, journal: Journal) -> None:
        """Shorten the journal where a model has been saved a second time, unless its states have been loaded: that is
        done again from the states of then.

        It begins with the state before the last one, and samples are left out that were fetched before it. So a client
        whose answer was lost with the server can still ask for all that happened since.
        """
        for run in self.runs.values() if not self._replaying else ():
            if len(run.saved) > 1 and run.id not in self._copied:
                number = run.saved.popleft()
                first = json.dumps([run.id, run.trained.rank, run.metadata, number]).encode()
                journal.shorten(run.id, number, ("restore", first), self._old_samples)
                self.states.forget_before(run.base(number))
                self._old_samples, self._fetched = self._fetched, set()

    # --- their work, in the device thread

    def _work(self, kind: str, run: Run, form: Any, size: int, result: Future[Any]) -> None:
        run.begun += size
        try:
            result.set_result(self._works[kind](run, form))
        except Exception as error:
            result.set_exception(error)

    def _create(self, run: Run, form: forms.CreateModel) -> Any:
        lora = form.lora_config
        seed = form.model_seq_id if lora.seed is None else lora.seed
        run.model = self.trainer.create(lora.rank, seed % 2**32)
        return {"model_id": run.id, "type": "create_model"}

    def _load(self, run: Run, form: forms.Load) -> Any:
        run.close()  # rows go on at the step of the state
        run.model = self.states.load(form.path, moments=form.optimizer)
        base = {"base_model": self.service.name} | _lora(run.model.rank)
        return {"path": form.path, "type": "load_weights", "model_id": run.id} | base

    def _forward_backward(self, run: Run, message: Any) -> bytes:
        settings, examples = _settings(message), _examples(message, self.service)
        logps, total = self.trainer.gradients(
            run.trained, message.loss_fn, examples, settings, not message.forward_only
        )
        return gradients_output(logps, {"loss:sum": total})

    def _optim_step(self, run: Run, form: forms.OptimStep) -> Any:
        # A mistake in the parameters, or in data, is the result of the request: the next number may be under way.
        adam, loss = validate(forms.Adam, form.adam_params), run.trained.loss
        norm, step = self.trainer.step(run.trained, adam.model_dump()), run.trained.steps
        if self.folder is not None and run.rows is None:
            settings = {"name": run.id, "method": "sft", "model": {"source": self.service.origin}}
            run.rows = RunFolder(self.folder / run.id, settings, step - 1)
        if run.rows is not None:
            run.rows.step({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": adam.learning_rate})
        return {"metrics": {"grad_norm:mean": norm}, "type": "optim_step"}

    def _save(self, run: Run, form: forms.Save) -> Any:
        path, number = f"tinker://{run.id}/weights/{form.path or f'step-{form.seq_id}'}", form.seq_id or 0
        self.states.save(path, run.trained, moments=True)
        if self.journal is not None:
            self.states.keep(path, run.base(number))
            run.saved.append(number)
        return {"path": path, "type": "save_weights"}

    def _save_for_sampler(self, run: Run, form: forms.Save) -> Any:
        path, session = _snapshot_names(form)
        self.states.save(path, run.trained, moments=False)
        self._weights.pop(path, None)  # it may have had this name
        own = {"path": path} if form.path else {}
        return own | {"sampling_session_id": session, "type": "save_weights_for_sampler"}

    def _of(self, path: str) -> Weights:
        """Return the weights of a snapshot."""
        if path not in self._weights:
            model = self.states.load(path, moments=False)
            self._weights[path] = Weights(model.rank, model.trainable)
            if len(self._weights) > MAX_WEIGHTS:
                self._weights.popitem(last=False)
        return self._weights[path]

    # --- results

    async def _draw(self, form: forms.Sample, tokens: np.ndarray, path: str | None, key: str) -> bytes:
        """Sample, and compute the log-probs of the prompt that are wanted."""
        weights = None if path is None else await self._on_device(partial(self._of, path))
        params = form.sampling_params
        stop = params.stop if isinstance(params.stop, list) else [params.stop] if params.stop else []
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
        ask = Ask(
            prompts=[tokens],
            samples=form.num_samples,
            sampling_params=SamplingConfig(params.temperature, params.top_p, max(params.top_k, 0)),
            limit=params.max_tokens,
            seed=seed if params.seed is None else params.seed,
            stop=[one for one in stop if isinstance(one, str)],
            stop_ids=[one for one in stop if isinstance(one, int)],
            weights=weights,
        )
        ended = (event.completion for event in await self.service.all_of(ask))
        completions = [one for one in ended if one is not None]
        logps, top, sampled, count = None, None, list[Top](), form.topk_prompt_logprobs
        if (form.prompt_logprobs or count) and len(tokens) > 1:
            scores = await self.service.scores(tokens, weights)
            logps = np.append(np.float32(np.nan), scores.logps)
            top = (scores.ids[:, :count], scores.top[:, :count]) if count else None
        for one in completions if form.topk_sample_logprobs else ():
            scores = await self.service.scores(np.concatenate([tokens, one.tokens]), weights)
            chosen = slice(len(tokens) - 1, None), slice(form.topk_sample_logprobs)
            sampled.append((scores.ids[chosen], scores.top[chosen]))
        return samples_output(completions, sampled, logps, top)

    def _keep(self, name: str, result: Any) -> None:
        self._results[name] = result
        if len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)

    async def retrieve(self, form: forms.Retrieve) -> Any:
        """Return the result of a request, or say that it is not there yet."""
        name = form.request_id
        if (result := self._results.get(name)) is None:
            raise ApiError(f"there is no request {name!r:.100}", 404)
        if not isinstance(result, asyncio.Future):  # it is asked for the first time
            waiting = asyncio.wrap_future(result) if isinstance(result, Future) else result()
            result = self._results[name] = asyncio.ensure_future(_outcome(waiting))
        done, _ = await asyncio.wait({result}, timeout=min(WAIT, self.service.limits.seconds / 2))
        if not done:
            return {"type": "try_again", "request_id": name, "queue_state": "active"}
        if name.startswith("sample:"):
            self._fetched.add(name)
        self._kept[name] = None
        if len(self._kept) > MAX_FETCHED:
            self._results.pop(self._kept.popitem(last=False)[0], None)
        value = result.result()
        return Response(value, media_type="application/x-protobuf") if isinstance(value, bytes) else value

    # --- what there is

    async def capabilities(self, request: Request) -> Response:
        """Describe the base model."""
        limit = self.service.model.config.max_positions
        model = {"model_name": self.service.name, "max_context_length": limit, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def health(self, request: Request) -> Response:
        """Say that the server answers."""
        return JSONResponse({"status": "ok"})

    async def info(self, form: forms.Loose) -> Any:
        """Describe a model that is trained."""
        lora, name = await self._lora_of(form.model_id), self.service.name
        data = {"arch": "decoder", "model_name": name, "tokenizer_id": name}
        return {"type": "get_info", "model_data": data, "model_id": form.model_id} | lora

    def weights_info(self, form: forms.Loose) -> Any:
        """Describe a saved state."""
        return {"base_model": self.service.name} | _lora(self.states.rank(form.tinker_path or ""))

    async def training_run(self, request: Request) -> Response:
        """Describe a model that is trained, as a training run."""
        name = request.path_params["name"]
        lora, run = await self._lora_of(name), self._run(name)
        described = {"training_run_id": run.id, "base_model": self.service.name, "model_owner": "covey"}
        when = {"last_request_time": "1970-01-01T00:00:00Z", "user_metadata": run.metadata}
        return JSONResponse(described | lora | when)

    async def sampler(self, request: Request) -> Response:
        """Describe a sampling session."""
        name = request.path_params["name"]
        if name not in self.samplers:
            raise ApiError(f"there is no sampling session {name!r:.100}", 404)
        path = self.samplers[name]
        return JSONResponse({"sampler_id": name, "base_model": self.service.name, "model_path": path})

    async def load_adapter(self, form: forms.LoadAdapter) -> Response:
        """Let clients of OpenAI's API ask for a saved state by a name."""
        adapters = self.service.adapters
        if form.lora_name == self.service.name or (form.lora_name in adapters and not form.load_inplace):
            raise ApiError(f"there is a model {form.lora_name!r} already", param="lora_name")
        adapters[form.lora_name] = await self._on_device(partial(self._of, form.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{form.lora_name}' added successfully.")

    def unload_adapter(self, form: forms.UnloadAdapter) -> Response:
        """Forget a name of an adapter."""
        if self.service.adapters.pop(form.lora_name, None) is None:
            raise ApiError(f"there is no adapter {form.lora_name!r:.100}", 404, "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{form.lora_name}' removed successfully.")

    def close(self) -> None:
        """Close the run folders."""
        for run in self.runs.values():
            run.close()

    async def _on_device(self, job: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.service.device.run(job))

    async def _lora_of(self, name: str) -> dict[str, Any]:
        """Return what describes the adapters of a model, which may be in the making."""
        run = self._run(name)
        return _lora(await self._on_device(lambda: run.trained.rank))

    def _run(self, name: str) -> Run:
        if name not in self.runs:
            raise ApiError(f"there is no model {name!r:.100}", 404, "model_id")
        return self.runs[name]

    def _check_base(self, name: str | None) -> None:
        if name != self.service.name:
            raise ApiError(f"there is no model {name!r:.100}; this server has {self.service.name!r}", 404, "base_model")


def _constant(answer: Any, _: bytes) -> Any:
    return answer


async def _outcome(work: Awaitable[Any]) -> Any:
    """Return the result of a request; an error is one too."""
    try:
        return await work
    except Exception as error:
        api = as_api_error(error)
        return {"error": api.message, "category": "user" if api.status < 500 else "server"}


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _snapshot_names(form: forms.Save) -> tuple[str, str | None]:
    """Return the path of a snapshot, and its sampling session unless the client gave the snapshot a name."""
    path = f"tinker://{form.model_id}/sampler_weights/{form.path or f'snapshot-{form.seq_id}'}"
    session = f"{form.model_id.partition(':')[0]}:sample:{form.sampling_session_seq_id}"
    return path, None if form.path else session


def _settings(message: Any) -> dict[str, float]:
    """Return the settings of a loss.

    Raises:
        ApiError: the loss, or a setting of it, is not known.
    """
    name = message.loss_fn
    if name == "stable_reinforce":
        raise ApiError("stable_reinforce is not published; pass loss_fn=importance_sampling", param="loss_fn")
    if name not in SETTINGS:
        raise ApiError(f"there is no loss {name!r:.60}; there are {', '.join(SETTINGS)}", param="loss_fn")
    given = {entry.key: entry.value for entry in message.loss_fn_config}
    given |= {entry.key: entry.value.number for entry in message.loss_fn_config_v2}
    if unknown := given.keys() - SETTINGS[name].keys():
        raise ApiError(f"{name} has no setting {min(unknown)!r:.60}", param="loss_fn_config")
    return SETTINGS[name] | given


def _examples(message: Any, service: Service) -> list[Example]:
    """Return the data of a request.

    Raises:
        ApiError: an array is missing, unknown, or not as long as the tokens; or there are too many tokens.
    """
    needed = NEEDED.get(message.loss_fn, POLICY)
    examples = []
    for number, datum in enumerate(message.data):
        tokens = tokens_of(datum.model_input)
        inputs = {entry.key: array_of(entry.value) for entry in datum.loss_fn_inputs}
        if inputs.keys() != set(needed):
            raise ApiError(f"datum {number} has {sorted(inputs)}; {message.loss_fn} takes {sorted(needed)}")
        if any(len(value) != len(tokens) for value in inputs.values()):
            raise ApiError(f"datum {number} has arrays that are not as long as its {len(tokens)} tokens")
        shapes = sorted({value.shape for value in inputs.values()})
        is_empty = 0 in shapes[0][1:]
        if len(shapes) > 1 or is_empty or (message.loss_fn != "cross_entropy" and inputs["target_tokens"].ndim > 1):
            raise ApiError(f"datum {number} has the shapes {shapes}; cross_entropy alone takes [n, k], twice")
        _check_tokens(tokens, service)
        for targets in inputs["target_tokens"].reshape(len(tokens), -1).T:
            _check_tokens(targets, service)
        examples.append(Example(tokens, inputs))
    if not examples:
        raise ApiError("there is no datum", param="data")
    return examples


def _check_tokens(tokens: np.ndarray, service: Service) -> None:
    config, size = service.model.config, len(tokens)
    if not 0 < size <= config.max_positions or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        want = f"wanted: 1 to {config.max_positions} tokens from 0 to {config.vocab_size - 1}"
        raise ApiError(f"a text has {size} tokens, or one that the model does not know; {want}")
