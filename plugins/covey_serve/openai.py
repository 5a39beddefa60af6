"""OpenAI's API: chat, completions, models, and what vLLM adds to them."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from covey_serve.body import parse, read_json
from covey_serve.chat import Tools, as_messages
from covey_serve.choices import Choice, Names, Places, usage
from covey_serve.device import Event, Stream
from covey_serve.errors import ApiError, as_api_error
from covey_serve.forms import ChatForm, CompletionForm, DetokenizeForm, Generation, TokenizeForm
from covey_serve.service import Ask, Service, next_event

KEEP_ALIVE = 15.0
"""Seconds without news after which a stream gets a comment, so that no proxy takes it for dead."""


class Answer:
    """One answer of a generating request: what is asked of the engine, and the choices that come of it.

    Args:
        service: the model.
        form: the request.
        ask: what is sampled.
    """

    kind, chunk, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, service: Service, form: Generation, ask: Ask):
        self.service, self.form, self.ask = service, form, ask
        self.names = Names(service.tokenizer, bool(form.return_tokens_as_token_ids))
        self.choices = [Choice(n, service.decode, ask.stop) for n in range(len(ask.prompts) * ask.samples)]
        self.began, self._first = time.perf_counter(), True
        name = form.model or service.name
        self.head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    @property
    def usage(self) -> Any:
        """Numbers of tokens of the prompts and of all choices."""
        return usage(sum(map(len, self.ask.prompts)), sum(len(choice.tokens) for choice in self.choices))

    def prompt_of(self, choice: Choice) -> np.ndarray:
        """Return the prompt of a choice."""
        return self.ask.prompts[choice.index // self.ask.samples]

    def place(self, event: Event) -> Choice:
        """Return the choice to which an event belongs, with what it brings."""
        choice = self.choices[event.prompt * self.ask.samples + event.number]
        choice.take(event)
        if self._first:
            self.service.metrics.first_token.observe(time.perf_counter() - self.began)
            self._first = False
        if choice.completion is not None:
            self.service.metrics.finished[choice.completion.finish] += 1
        return choice

    async def whole(self) -> Response:
        """Return the answer at once."""
        for event in await self.service.all_of(self.ask):
            self.place(event)
        choices = [await self.finished(choice) for choice in self.choices]
        extra = {"prompt_token_ids": self.ask.prompts[0].tolist()} if self.form.return_token_ids else {}
        self.count()
        return JSONResponse(self.head | {"object": self.kind, "choices": choices, "usage": self.usage} | extra)

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream; a failure is an event, because the headers are sent already."""
        try:
            async with asyncio.timeout(self.service.limits.seconds), self.service.sample(self.ask) as stream:
                for choice in self.choices:
                    yield self._event([self.opening(choice)])
                left = len(self.choices)
                while left:
                    if (event := await _news(stream)) is None:
                        yield ": waiting\n\n"
                        continue
                    choice = self.place(event)
                    if choice.completion is None:
                        new, chosen = choice.advance()
                        if new or self.form.top is not None or self.form.return_token_ids:
                            yield self._event([self.delta(choice, new, chosen)])
                    else:
                        left -= 1
                        for part in await self.last(choice):
                            yield self._event([part])
            if self.form.stream_options and self.form.stream_options.include_usage:
                yield self._event([], {"usage": self.usage})
            self.count()
            yield "data: [DONE]\n\n"
        except Exception as error:
            self.service.metrics.refused[as_api_error(error).status] += 1
            yield f"data: {json.dumps(as_api_error(error).body)}\n\n"

    def count(self) -> None:
        """Count a finished answer."""
        self.service.metrics.tokens.update(
            prompt=self.usage["prompt_tokens"], completion=self.usage["completion_tokens"]
        )
        self.service.metrics.whole.observe(time.perf_counter() - self.began)

    async def scores(self, choice: Choice, start: int = 0) -> Places:
        """Return the places of the prompt and the completion of a choice from token `start` on."""
        tokens = np.concatenate([self.prompt_of(choice), choice.tokens]).astype(np.int32)
        known = None if len(tokens) < 2 else await self.service.scores(tokens, self.ask.weights)
        return Places.of_text(tokens, known, start)

    async def own_places(self, choice: Choice) -> Places:
        """Return the places of a completion, with the most likely tokens if they are wanted."""
        if not self.form.top:
            return Places(choice.tokens.tolist(), choice.logps.tolist())
        return await self.scores(choice, len(self.prompt_of(choice)))

    def ids(self, choice: Choice, chosen: slice = slice(None)) -> dict[str, Any]:
        """Return the entry with the tokens of a choice, if it is wanted."""
        return {"token_ids": choice.tokens[chosen].tolist()} if self.form.return_token_ids else {}

    def opening(self, choice: Choice) -> dict[str, Any]:
        """Return the first part of a choice in a stream."""
        raise NotImplementedError

    def delta(self, choice: Choice, text: str, chosen: slice) -> dict[str, Any]:
        """Return a part of a choice in a stream, with its new text and tokens."""
        raise NotImplementedError

    async def last(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the last parts of a choice in a stream."""
        raise NotImplementedError

    async def finished(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice."""
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> str:
        body = self.head | {"object": self.chunk, "choices": choices} | (extra or {})
        return f"data: {json.dumps(body, allow_nan=False)}\n\n"


class CompletionAnswer(Answer):
    """An answer of `/v1/completions`."""

    form: CompletionForm

    async def finished(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice, after its prompt if it is to be echoed."""
        shown = self._echoed(choice)
        return self._part(choice, shown + choice.text, await self._logprobs(choice), choice.finish_reason or "length")

    def opening(self, choice: Choice) -> dict[str, Any]:
        """Return the first part of a choice: its prompt, if that is to be echoed."""
        extra = {"prompt_token_ids": self.prompt_of(choice).tolist()} if self.form.return_token_ids else {}
        return {"index": choice.index, "text": self._echoed(choice), "logprobs": None, "finish_reason": None} | extra

    def delta(self, choice: Choice, text: str, chosen: slice) -> dict[str, Any]:
        """Return a part of a choice in a stream."""
        logprobs = None
        if self.form.top is not None:
            places = Places(choice.tokens[chosen].tolist(), choice.logps[chosen].tolist())
            logprobs = self.names.completion(places, 0)
        return self._part(choice, text, logprobs, None, chosen)

    async def last(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the last part of a choice in a stream."""
        if self.ask.live:
            part = self.delta(choice, *choice.advance())
            return [part | {"finish_reason": choice.finish_reason}]
        text, chosen = choice.advance()
        return [self._part(choice, text, await self._logprobs(choice), choice.finish_reason, chosen)]

    async def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self.form.top is None:
            return None
        places = await (self.scores(choice) if self.form.echo else self.own_places(choice))
        return self.names.completion(places, self.form.top)

    def _echoed(self, choice: Choice) -> str:
        if not self.form.echo:
            return ""
        texts = [self.form.prompt] if isinstance(self.form.prompt, str) else self.form.prompt
        given = texts[choice.index // self.ask.samples]
        tokens = self.prompt_of(choice)
        return given if isinstance(given, str) else self.service.tokenizer.decode(tokens, skip_special=False)

    def _part(
        self, choice: Choice, text: str, logprobs: Any, reason: str | None, chosen: slice = slice(None)
    ) -> dict[str, Any]:
        part = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return part | self.ids(choice, chosen)


class ChatAnswer(Answer):
    """An answer of `/v1/chat/completions`.

    Attributes:
        tools: the tools of the request; None without any.
    """

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    form: ChatForm
    tools: Tools | None = None

    async def finished(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": self._read(choice), "refusal": None}
        if choice.calls:
            message["tool_calls"] = choice.calls
        return self._part(choice, "message", message, await self._logprobs(choice), choice.finish_reason)

    def opening(self, choice: Choice) -> dict[str, Any]:
        """Return the first part of a choice: whose turn it is."""
        extra = {"prompt_token_ids": self.prompt_of(choice).tolist()} if self.form.return_token_ids else {}
        return self._part(choice, "delta", {"role": "assistant", "content": ""}, None, None, slice(0)) | extra

    def delta(self, choice: Choice, text: str, chosen: slice) -> dict[str, Any]:
        """Return a part of a choice in a stream."""
        logprobs = None
        if self.form.top is not None:
            places = Places(choice.tokens[chosen].tolist(), choice.logps[chosen].tolist())
            logprobs = self.names.chat(places, 0)
        return self._part(choice, "delta", {"content": text}, logprobs, None, chosen)

    async def last(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the last parts of a choice in a stream: the rest of its text, its calls, and why it ends."""
        if self.ask.live:
            parts = [self.delta(choice, *choice.advance())]
        else:
            text = self._read(choice)
            parts = [self._part(choice, "delta", {"content": text}, await self._logprobs(choice), None)]
        if choice.calls:
            calls = [{"index": number} | call for number, call in enumerate(choice.calls)]
            parts.append(self._part(choice, "delta", {"tool_calls": calls}, None, None, slice(0)))
        return [*parts, self._part(choice, "delta", {}, None, choice.finish_reason, slice(0))]

    def _read(self, choice: Choice) -> str:
        """Return the text of a finished choice, and find its calls."""
        if self.tools is None:
            return choice.text
        whole = self.service.tokenizer.decode(choice.tokens, skip_special=False)
        text, choice.calls = self.tools.read(whole)
        return text if choice.calls else choice.text

    async def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return None if self.form.top is None else self.names.chat(await self.own_places(choice), self.form.top)

    def _part(
        self, choice: Choice, name: str, content: Any, logprobs: Any, reason: str | None, chosen: slice = slice(None)
    ) -> dict[str, Any]:
        part = {"index": choice.index, name: content, "logprobs": logprobs, "finish_reason": reason}
        return part | self.ids(choice, chosen)


class OpenAI:
    """Handlers of OpenAI's API.

    Args:
        service: the model.
    """

    def __init__(self, service: Service):
        self.service = service

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        posts = {
            "/v1/chat/completions": self.chat, "/v1/completions": self.complete, "/v1/responses": self.responses,
            "/tokenize": self.tokenize, "/detokenize": self.detokenize, "/v1/completions/tokenize": self.tokenize,
            "/v1/completions/detokenize": self.detokenize,
        }  # fmt: skip
        gets = {
            "/v1/models": self.models, "/v1/models/{name:path}": self.model, "/tokenizer_info": self.tokenizer_info,
            "/v1/completions/tokenizer_info": self.tokenizer_info, "/health": self.health, "/metrics": self.metrics,
        }  # fmt: skip
        return [
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler) for path, handler in gets.items()),
        ]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        form = parse(ChatForm, await read_json(request, self.service.limits.body))
        self._check_model(form.model)
        template = self.service.tokenizer.chat_template
        tools = Tools.of(form.offered, template)
        messages: Any = as_messages(form.messages, template)
        schemas = list(tools.schemas) if tools and tools.in_template else []
        tokens = await self.service.encode(
            tools.chat(messages) if tools else messages,
            add_generation_prompt=form.add_generation_prompt is not False,
            tools=schemas,
        )
        limit = form.max_completion_tokens if form.max_completion_tokens is not None else form.max_tokens
        answer = ChatAnswer(self.service, form, self._ask(form, [tokens], limit, live=not (tools or form.top)))
        answer.tools = tools
        return await self._respond(request, answer)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        form = parse(CompletionForm, await read_json(request, self.service.limits.body))
        self._check_model(form.model)
        live = not (form.top or (form.echo and form.top is not None))
        if form.max_tokens == 0 and not form.echo:
            raise ApiError("max_tokens is 0, which asks for nothing without echo", param="max_tokens")
        ask = self._ask(form, await self._prompts(form), form.max_tokens or None, live=live)
        answer = CompletionAnswer(self.service, form, ask)
        if form.max_tokens == 0:
            return await self._respond_echo(answer)
        return await self._respond(request, answer)

    async def responses(self, request: Request) -> Response:
        """Say what to call instead."""
        raise ApiError(
            "this server does not have the Responses API; set your client to chat completions"
            " (openai-agents: OpenAIChatCompletionsModel)",
            404,
        )

    async def models(self, request: Request) -> Response:
        """List the model, and the adapters that are loaded."""
        names = [self.service.name, *self.service.adapters]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Describe the model, or an adapter."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model(request.path_params["name"]))

    async def tokenize(self, request: Request) -> Response:
        """Convert a text or a conversation to tokens."""
        form = parse(TokenizeForm, await read_json(request, self.service.limits.body))
        if (form.prompt is None) == (form.messages is None):
            raise ApiError("either prompt or messages is wanted", param="prompt")
        template = self.service.tokenizer.chat_template
        if form.messages is not None:
            tools = Tools.of([tool.model_dump(exclude_none=True) for tool in form.tools or ()], template)
            messages: Any = as_messages(form.messages, template)
            schemas = list(tools.schemas) if tools and tools.in_template else []
            chat = tools.chat(messages) if tools else messages
            tokens = await self.service.encode(chat, add_generation_prompt=form.add_generation_prompt, tools=schemas)
        elif form.add_special_tokens:
            tokens = await self.service.encode(form.prompt)
        else:
            tokens = self.service.tokenizer.encode(form.prompt or "")
        names = Names(self.service.tokenizer, as_ids=False)
        limit = self.service.model.config.max_positions
        extra = {"token_strs": [names(token) for token in tokens.tolist()]} if form.return_token_strs else {}
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens.tolist()} | extra)

    async def detokenize(self, request: Request) -> Response:
        """Convert tokens to text."""
        form = parse(DetokenizeForm, await read_json(request, self.service.limits.body))
        return JSONResponse({"prompt": self.service.tokenizer.decode(form.tokens, skip_special=False)})

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer, as its configuration file would."""
        tokenizer = self.service.tokenizer
        names = Names(tokenizer, as_ids=False)
        named = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id, "pad_token": tokenizer.pad_id}
        info: dict[str, Any] = {name: None if token is None else names(token) for name, token in named.items()}
        info["chat_template"] = tokenizer.chat_template
        return JSONResponse(info | {"add_bos_token": tokenizer.add_bos, "tokenizer_class": "PreTrainedTokenizerFast"})

    async def health(self, request: Request) -> Response:
        """Say whether the thread of the device is alive."""
        failure = self.service.device.failure
        return PlainTextResponse("ok") if failure is None else PlainTextResponse(type(failure).__name__, 503)

    async def metrics(self, request: Request) -> Response:
        """Return the counters."""
        text = self.service.metrics.text(*self.service.device.counts())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _model(self, name: str) -> dict[str, Any]:
        limit = self.service.model.config.max_positions
        return {"id": name, "object": "model", "created": 0, "owned_by": "covey", "max_model_len": limit}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.service.name, *self.service.adapters):
            message = f"the model {name!r:.100} does not exist; this server has {self.service.name!r}"
            raise ApiError(message, 404, "model", "model_not_found")

    def _ask(self, form: Generation, prompts: Sequence[np.ndarray], limit: int | None, *, live: bool) -> Ask:
        return Ask(
            prompts=prompts,
            samples=form.n,
            sampling_params=form.sampling_params,
            limit=limit,
            seed=form.seed,
            stop=form.stops,
            stop_ids=form.stop_token_ids or (),
            live=bool(form.stream) and live,
            weights=self.service.adapters.get(form.model or ""),
        )

    async def _prompts(self, form: CompletionForm) -> list[np.ndarray]:
        """Return the tokens of each prompt; ids stay as they are given."""
        given: Any = form.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise ApiError("there is no prompt", param="prompt")
        return [await self._tokens(one, form) for one in given]

    async def _tokens(self, prompt: str | list[int], form: CompletionForm) -> np.ndarray:
        if not isinstance(prompt, str):
            if (largest := max(prompt, default=0)) >= (size := self.service.model.config.vocab_size):
                raise ApiError(f"the prompt has the token {largest}; the model knows {size}", param="prompt")
            return np.array(prompt, np.int32)
        if form.add_special_tokens is False:
            return self.service.tokenizer.encode(prompt)
        return await self.service.encode(prompt)

    async def _respond_echo(self, answer: CompletionAnswer) -> Response:
        """Answer with the prompts alone, and their log-probs."""
        for tokens in answer.ask.prompts:
            if not 0 < len(tokens) <= self.service.model.config.max_positions:
                raise ApiError(f"the prompt has {len(tokens)} tokens", param="prompt")
        answer.ask = replace(answer.ask, live=False)
        choices = [await answer.finished(choice) for choice in answer.choices]
        answer.count()
        body = {"object": answer.kind, "choices": choices, "usage": answer.usage}
        return JSONResponse(answer.head | body)

    async def _respond(self, request: Request, answer: Answer) -> Response:
        if not answer.form.stream:
            return await _while_connected(request, answer.whole, self.service.limits.seconds)
        return StreamingResponse(answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _news(stream: Stream) -> Event | None:
    """Return the next event; None if there is none for a while."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(next_event(stream), KEEP_ALIVE)
    return None


async def _while_connected(request: Request, make: Callable[[], Awaitable[Response]], seconds: float) -> Response:
    """Return an answer, unless the client leaves or it takes too long: then the work on it is cancelled."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def answer() -> Response:
        async with asyncio.timeout(seconds):
            return await make()

    work, gone = asyncio.create_task(answer()), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError("the client has left", 499)
        return work.result()
    finally:
        gone.cancel()
        work.cancel()
