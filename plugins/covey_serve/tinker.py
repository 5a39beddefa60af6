"""Tinker's training API: requests to a model are done in the order of their numbers, and their results are futures.

Each request that changes something is a record of a journal before it is acknowledged. A server that begins with a
journal does the requests again, in the same order, and so has the same weights, samples and futures. Nothing here
depends on the time: sums are added in the order of `seq_id`, and noise follows from numbers of requests.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from covey.config.schema import SamplingConfig
from covey_serve import tinker_forms as forms
from covey_serve.body import FormT, parse, read_bytes, read_json
from covey_serve.device import Weights
from covey_serve.errors import ApiError, as_api_error
from covey_serve.examples import Example
from covey_serve.journal import Journal
from covey_serve.service import Ask, Service
from covey_serve.shorten import Restore, sample_key, shorten, snapshot_names
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
SIZES = ("seed", "slots", "max_prompt_length", "max_new_tokens")
"""Settings on which samples depend, to the last bit."""
NEEDED = {"cross_entropy": ("target_tokens", "weights")}
POLICY = ("target_tokens", "logprobs", "advantages")


@dataclass
class Run:
    """A model that a client trains, and the requests to it.

    Attributes:
        id: its name.
        rank: rank of its adapters.
        metadata: what the client wrote about it.
        model: its weights; None before it is made. The device thread alone reads and changes it.
        saved: numbers of the requests that saved the state and are done, from the last but one on.
        expected: number of the next request.
        early: requests that wait for earlier ones, by number.
        known: digest of each request by number.
    """

    id: str
    rank: int
    metadata: Any = None
    model: Trained | None = None
    saved: deque[int] = field(default_factory=partial(deque[int], maxlen=2))
    expected: int = 1
    early: dict[int, Callable[[], None]] = field(default_factory=dict)
    known: dict[int, str] = field(default_factory=dict)


class Tinker:
    """Handlers of the training API.

    Args:
        service: the model, whose adapters are trained.
        states: saved states.
        journal: acknowledged requests.
    """

    def __init__(self, service: Service, trainer: Trainer, states: States, journal: Journal):
        self.service, self.trainer, self.states, self.journal = service, trainer, states, journal
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, str | None] = {}
        self.sessions = 0
        self._results: OrderedDict[str, Any] = OrderedDict()
        self._weights: OrderedDict[str, Weights] = OrderedDict()
        self._kinds: dict[str, Callable[[bytes], dict[str, Any]]] = {
            "create_session": self._create_session, "create_model": self._create_model, "optim_step": self._optim_step,
            "forward_backward": self._forward_backward, "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler, "load_weights": self._load,
            "create_sampling_session": self._create_sampling_session, "asample": self._sample,
        }  # fmt: skip
        self._shortened: dict[str, Callable[[bytes], Any]] = {"restore": self._restore, "sampler": self._name_sampler}
        self._fetched, self._old_samples, self._copied = set[str](), set[str](), set[str]()
        self._replaying = False

    def replay(self) -> int:
        """Do the requests of the journal again; return their number. Samples are drawn when they are asked for."""
        self._replaying, count = True, 0
        sizes = {name: getattr(self.service.config, name) for name in SIZES}
        for kind, body in self.journal.records(f"{self.service.origin}, {sizes}"):
            (self._kinds | self._shortened)[kind](body)
            count += 1
        self._replaying = False
        return count

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        posts = {kind: self._recorded(kind) for kind in self._kinds} | {
            "client/config": self._empty, "session_heartbeat": self._heartbeat, "retrieve_future": self.retrieve,
            "telemetry": self._telemetry, "get_info": self.info,
            "weights_info": self.weights_info, "sessions/{name}/finish": self._empty,
        }  # fmt: skip
        gets = {
            "get_server_capabilities": self.capabilities, "healthz": self._health,
            "training_runs/{name}": self.training_run, "samplers/{name:path}": self.sampler,
        }  # fmt: skip
        adapters = {"load_lora_adapter": self.load_adapter, "unload_lora_adapter": self.unload_adapter}
        return [
            *(Route(f"/v1/{path}", handler, methods=["POST"]) for path, handler in adapters.items()),
            *(Route(PREFIX + path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(PREFIX + path, handler) for path, handler in gets.items()),
        ]

    def _recorded(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a request that is written to the journal once it is accepted."""

        async def handle(request: Request) -> Response:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise ApiError("the body is compressed; this server takes it as it is", 415)
            body = await read_bytes(request, self.service.limits.body)
            promised = self._kinds[kind](body)
            return JSONResponse(promised)

        return handle

    # --- requests that change something

    def _create_session(self, body: bytes) -> dict[str, Any]:
        self._accept("create_session", body)
        self.sessions += 1
        return {"session_id": f"session-{self.sessions}", "type": "create_session"}

    def _create_model(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.CreateModel, _json(body))
        self._check_base(form.base_model)
        run, lora = self._new_run(form.session_id, form.model_seq_id, form.lora_config.rank), form.lora_config
        if run.id in self.runs:
            return self._promise(run.id, run.id)
        self._accept("create_model", body)
        self.runs[run.id], run.metadata = run, form.user_metadata
        seed = form.model_seq_id if lora.seed is None else lora.seed

        def create() -> Any:
            run.model = self.trainer.create(lora.rank, seed % 2**32)
            return {"model_id": run.id, "type": "create_model"}

        return self._promise(run.id, run.id, self.service.device.run(create))

    def _forward_backward(self, body: bytes) -> dict[str, Any]:
        message = read_request(body)
        run, name = self._run(message.model_id), message.loss_fn

        def compute(model: Trained) -> bytes:  # a mistake in the data is its result: the next number may be under way
            settings, examples = _settings(message), _examples(message, self.service)
            logps, total = self.trainer.gradients(model, name, examples, settings, not message.forward_only)
            return gradients_output(logps, {"loss:sum": total})

        return self._in_order("forward_backward", run, message.seq_id or None, body, compute)

    def _optim_step(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.OptimStep, _json(body))

        def step(model: Trained) -> Any:  # a mistake in the parameters is its result, as above
            norm = self.trainer.step(model, parse(forms.Adam, form.adam_params).model_dump())
            return {"metrics": {"grad_norm:mean": norm}, "type": "optim_step"}

        return self._in_order("optim_step", self._run(form.model_id), form.seq_id, body, step)

    def _save(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.Save, _json(body))
        run = self._run(form.model_id)
        path = f"tinker://{run.id}/weights/{form.path or f'step-{form.seq_id}'}"

        def save(model: Trained) -> Any:
            self.states.save(path, model, moments=True)
            if form.seq_id is not None:
                self.states.keep(path, Restore(run.id, run.rank, None, form.seq_id).path)
                run.saved.append(form.seq_id)
            return {"path": path, "type": "save_weights"}

        return self._in_order("save_weights", run, form.seq_id, body, save)

    def _save_for_sampler(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.Save, _json(body))
        run = self._run(form.model_id)
        path, session = snapshot_names(form.model_dump())
        if session is not None:
            self.samplers[session] = path

        def save(model: Trained) -> Any:
            self.states.save(path, model, moments=False)
            self._weights.pop(path, None)  # it may have had this name
            own = {"path": path} if form.path else {}
            return own | {"sampling_session_id": session, "type": "save_weights_for_sampler"}

        return self._in_order("save_weights_for_sampler", run, form.seq_id, body, save)

    def _load(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.Load, _json(body))
        self.states.file(form.path)  # refuses other paths
        self._copied.add(form.path.split("/")[2])

        def restore(run: Run) -> Any:
            run.model = self.states.load(form.path, moments=form.optimizer)
            base = {"base_model": self.service.name} | _lora(run.model.rank)
            return {"path": form.path, "type": "load_weights", "model_id": run.id} | base

        if form.model_id is not None:
            run = self._run(form.model_id)
            return self._in_order("load_weights", run, form.seq_id, body, lambda _: restore(run))
        # In a journal the state may be a file only after the requests before.
        rank = self.service.device.run(partial(self.states.rank, form.path)) if self._replaying else None
        known = self.states.rank(form.path) if rank is None else rank.result()
        run = self._new_run(form.session_id or "", form.model_seq_id or 0, known)
        if run.id in self.runs:
            return self._promise(run.id, run.id)
        self._accept("load_weights", body)
        self.runs[run.id], run.metadata = run, form.user_metadata
        return self._promise(run.id, run.id, self.service.device.run(lambda: restore(run)))

    def _create_sampling_session(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.SamplingSession, _json(body))
        if form.model_path is None:
            self._check_base(form.base_model)
        else:
            self.states.file(form.model_path)
        self._accept("create_sampling_session", body)
        name = f"{form.session_id}:sample:{form.sampling_session_seq_id}"
        self.samplers[name] = form.model_path
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def _sample(self, body: bytes) -> dict[str, Any]:
        form = parse(forms.Sample, _json(body))
        session, path = form.sampling_session_id, form.model_path
        if session is not None and session not in self.samplers:
            raise ApiError(f"there is no sampling session {session!r:.100}", 404)
        path = path if session is None else self.samplers[session]
        key = sample_key(form.model_dump(), body)
        name, ids = f"sample:{key}", [f"{key}:{n}" for n in range(form.num_samples)]
        if name not in self._results:
            tokens = [token for chunk in form.prompt.chunks for token in chunk.tokens]
            _check_tokens(np.array(tokens), self.service)
            self._accept("asample", body)
            draw = partial(self._draw, form, np.array(tokens, np.int32), path, key)
            self._keep(name, draw if self._replaying else asyncio.ensure_future(draw()))
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _draw(self, form: forms.Sample, tokens: np.ndarray, path: str | None, key: str) -> bytes:
        """Sample, and compute the log-probs of the prompt that are wanted."""
        weights = None if path is None else await asyncio.wrap_future(self.service.device.run(lambda: self._of(path)))
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

    def _of(self, path: str) -> Weights:
        """Return the weights of a snapshot, which the device thread alone asks for."""
        if path not in self._weights:
            model = self.states.load(path, moments=False)
            self._weights[path] = Weights(model.rank, model.trainable)
            if len(self._weights) > MAX_WEIGHTS:
                self._weights.popitem(last=False)
        return self._weights[path]

    def _restore(self, body: bytes) -> None:
        """Go on with a model whose requests before a state are not in the journal any more."""
        kept = Restore(*json.loads(body))
        run = self.runs[kept.id] = Run(kept.id, kept.rank, kept.metadata, expected=kept.number + 1)
        run.saved.append(kept.number)

        def load() -> None:
            run.model = self.states.load(kept.path, moments=True)

        self._promise(run.id, run.id, self.service.device.run(load))

    def _name_sampler(self, body: bytes) -> None:
        path, session = json.loads(body)
        if session is not None:
            self.samplers[session] = path

    # --- order, results

    def _in_order(
        self, kind: str, run: Run, number: int | None, body: bytes, work: Callable[[Trained], Any]
    ) -> dict[str, Any]:
        """Do a request after all earlier ones to its model; a repeat of one is not done again.

        Raises:
            ApiError: another request had this number.
        """
        number = max([run.expected - 1, *run.early]) + 1 if number is None else number
        name, digest = f"{run.id}:{number}", hashlib.sha256(kind.encode() + body).hexdigest()
        if (known := run.known.get(number)) is not None:
            if known != digest:
                raise ApiError(f"another request to {run.id} had the number {number}", 409, "seq_id")
            return self._promise(name, run.id)
        if number < run.expected or number > run.expected + 4096:
            raise ApiError(f"the next request to {run.id} is {run.expected}, and not {number}", 409, "seq_id")
        self._accept(kind, body)
        result: Future[Any] = Future()

        def job() -> None:
            try:
                if run.model is None:
                    raise ApiError(f"the model {run.id} could not be made")
                result.set_result(work(run.model))
            except Exception as error:
                result.set_exception(error)

        run.known[number], run.early[number] = digest, job
        while (due := run.early.pop(run.expected, None)) is not None:
            self.service.device.run(due)
            run.expected += 1
        return self._promise(name, run.id, result)

    def _accept(self, kind: str, body: bytes) -> None:
        if not self._replaying:
            self._shorten()
            self.journal.write(kind, body)

    def _shorten(self) -> None:
        """Shorten the journal where a model has been saved a second time, unless its states have been loaded: that is
        done again from the states of then.
        """
        for run in self.runs.values():
            if len(run.saved) > 1 and run.id not in self._copied:
                kept = Restore(run.id, run.rank, run.metadata, run.saved.popleft())
                self.journal.rewrite(shorten(kept, self._old_samples))
                self.states.forget(f"tinker://{run.id}/bases", kept.number)
                self._old_samples, self._fetched = self._fetched, set()

    def _promise(self, name: str, model: str, result: Any = None) -> dict[str, Any]:
        if result is not None:
            self._keep(name, result)
        return {"request_id": name, "model_id": model}

    def _keep(self, name: str, result: Any) -> None:
        self._results[name] = result
        if len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)

    async def retrieve(self, request: Request) -> Response:
        """Return the result of a request, or say that it is not there yet."""
        form = await self._read(forms.Retrieve, request)
        if form.request_id not in self._results:
            raise ApiError(f"there is no request {form.request_id!r:.100}", 404)
        result = self._results[form.request_id]
        if callable(result):  # samples of a journal
            result = self._results[form.request_id] = asyncio.ensure_future(result())
        future = asyncio.wrap_future(result) if isinstance(result, Future) else result
        done, _ = await asyncio.wait({asyncio.shield(future)}, timeout=WAIT)
        if not done:
            waiting = {"type": "try_again", "request_id": form.request_id, "queue_state": "active"}
            return JSONResponse(waiting)
        if (error := future.exception()) is not None:
            api = as_api_error(error)
            return JSONResponse({"error": api.message, "category": "user" if api.status < 500 else "server"})
        value = future.result()
        self._fetched.add(form.request_id.removeprefix("sample:"))
        return Response(value, media_type="application/x-protobuf") if isinstance(value, bytes) else JSONResponse(value)

    # --- what there is

    async def capabilities(self, request: Request) -> Response:
        """Describe the base model."""
        limit = self.service.model.config.max_positions
        model = {"model_name": self.service.name, "max_context_length": limit, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def info(self, request: Request) -> Response:
        """Describe a model that is trained."""
        form = await self._read(forms.Loose, request)
        run, name = self._run(form.model_id or ""), self.service.name
        data = {"arch": "decoder", "model_name": name, "tokenizer_id": name}
        return JSONResponse({"type": "get_info", "model_data": data, "model_id": run.id} | _lora(run.rank))

    async def weights_info(self, request: Request) -> Response:
        """Describe a saved state."""
        form = await self._read(forms.Loose, request)
        rank = self.states.rank(form.tinker_path or "")
        return JSONResponse({"base_model": self.service.name} | _lora(rank))

    async def training_run(self, request: Request) -> Response:
        """Describe a model that is trained, as a training run."""
        run = self._run(request.path_params["name"])
        described = {"training_run_id": run.id, "base_model": self.service.name, "model_owner": "covey"}
        when = {"last_request_time": "1970-01-01T00:00:00Z", "user_metadata": run.metadata}
        return JSONResponse(described | _lora(run.rank) | when)

    async def sampler(self, request: Request) -> Response:
        """Describe a sampling session."""
        name = request.path_params["name"]
        if name not in self.samplers:
            raise ApiError(f"there is no sampling session {name!r:.100}", 404)
        path = self.samplers[name]
        return JSONResponse({"sampler_id": name, "base_model": self.service.name, "model_path": path})

    async def load_adapter(self, request: Request) -> Response:
        """Let clients of OpenAI's API ask for a saved state by a name."""
        form, adapters = await self._read(forms.LoadAdapter, request), self.service.adapters
        if form.lora_name == self.service.name or (form.lora_name in adapters and not form.load_inplace):
            raise ApiError(f"there is a model {form.lora_name!r} already", param="lora_name")
        self.states.file(form.lora_path)  # refuses other paths
        loaded = self.service.device.run(lambda: self._of(form.lora_path))
        adapters[form.lora_name] = await asyncio.wrap_future(loaded)
        return PlainTextResponse(f"Success: LoRA adapter '{form.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Forget a name of an adapter."""
        form = await self._read(forms.UnloadAdapter, request)
        if self.service.adapters.pop(form.lora_name, None) is None:
            raise ApiError(f"there is no adapter {form.lora_name!r:.100}", 404, "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{form.lora_name}' removed successfully.")

    async def _read(self, form: type[FormT], request: Request) -> FormT:
        return parse(form, await read_json(request, self.service.limits.body))

    async def _empty(self, request: Request) -> Response:
        return JSONResponse({})

    async def _heartbeat(self, request: Request) -> Response:
        return JSONResponse({"type": "session_heartbeat"})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _telemetry(self, request: Request) -> Response:
        return JSONResponse({"status": "accepted"})  # and forgotten

    def _run(self, name: str) -> Run:
        if name not in self.runs:
            raise ApiError(f"there is no model {name!r:.100}", 404, "model_id")
        return self.runs[name]

    def _new_run(self, session: str, number: int, rank: int) -> Run:
        known = [f"session-{n}" for n in range(1, self.sessions + 1)]
        if session not in known:
            raise ApiError(f"there is no session {session!r:.100}", 404, "session_id")
        return Run(f"{session}:train:{number}", rank)

    def _check_base(self, name: str | None) -> None:
        if name != self.service.name:
            raise ApiError(f"there is no model {name!r:.100}; this server has {self.service.name!r}", 404, "base_model")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError("the body is not JSON") from error


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


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
        shapes = {value.shape for value in inputs.values()}
        if len(shapes) > 1 or (message.loss_fn != "cross_entropy" and inputs["target_tokens"].ndim > 1):
            raise ApiError(f"datum {number} has the shapes {sorted(shapes)}; cross_entropy alone takes [n, k], twice")
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
