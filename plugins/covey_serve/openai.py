"""OpenAI's API: chat, completions, models, and what vLLM adds to them."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from covey_serve.body import post
from covey_serve.chat import Tools, as_messages
from covey_serve.choices import Choice, Places, chat_logprobs, completion_logprobs, token_name, usage
from covey_serve.device import Event, Stream
from covey_serve.errors import ApiError, as_api_error
from covey_serve.forms import ChatForm, CompletionForm, DetokenizeForm, Generation, Offer, TokenizeForm
from covey_serve.service import Ask, Service, next_event

KEEP_ALIVE = 15.0
"""Seconds without news after which a stream gets a comment, so that no proxy takes it for dead."""
ALL = slice(None)


class Answer:
    """An answer of a generating request: what is asked of the engine, and the choices that come of it. This one is that
    of `/v1/completions`.

    Args:
        service: the model.
        form: the request, a form of this API.
        ask: what is sampled.

    Attributes:
        kind, chunk, prefix: types of a whole answer and of an event, and the beginning of their ids.
    """

    kind, chunk, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, service: Service, form: Any, ask: Ask):
        self.service, self.form, self.ask = service, form, ask
        self.name = partial(token_name, service.tokenizer, as_id=bool(form.return_tokens_as_token_ids))
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

    async def whole(self, *, samples: bool = True) -> Response:
        """Return the answer at once; without samples it is that of the prompts alone."""
        for event in await self.service.all_of(self.ask) if samples else ():
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
                    yield self._event(self.opening(choice))
                left = len(self.choices)
                while left:
                    if (event := await _news(stream)) is None:
                        yield ": waiting\n\n"
                        continue
                    choice = self.place(event)
                    for part in await self.parts(choice):
                        yield self._event(part)
                    left -= choice.completion is not None
            if self.form.stream_options and self.form.stream_options.include_usage:
                yield self._event(None, usage=self.usage)
            self.count()
            yield "data: [DONE]\n\n"
        except Exception as error:
            self.service.metrics.refused[as_api_error(error).status] += 1
            yield f"data: {json.dumps(as_api_error(error).body)}\n\n"

    def _event(self, part: dict[str, Any] | None, **extra: Any) -> str:
        body = self.head | {"object": self.chunk, "choices": [part] if part else []} | extra
        return f"data: {json.dumps(body, allow_nan=False)}\n\n"

    def count(self) -> None:
        """Count a finished answer."""
        self.service.metrics.tokens.update(
            prompt=self.usage["prompt_tokens"], completion=self.usage["completion_tokens"]
        )
        self.service.metrics.whole.observe(time.perf_counter() - self.began)

    async def logprobs(self, choice: Choice, chosen: slice = ALL) -> dict[str, Any] | None:
        """Return the log-probs of chosen tokens of a choice. Those with the most likely tokens, or after the prompt,
        are computed anew and are of all tokens.
        """
        if (count := self.form.top) is None:
            return None
        if not count and not self.form.echo:
            return self.listed(Places(choice.tokens[chosen].tolist(), choice.logps[chosen].tolist()), 0)
        prompt = self.prompt_of(choice)
        tokens = np.concatenate([prompt, choice.tokens]).astype(np.int32)
        scores = None if len(tokens) < 2 else await self.service.scores(tokens, self.ask.weights)
        return self.listed(Places.of_text(tokens, scores, 0 if self.form.echo else len(prompt)), count)

    def part(
        self,
        choice: Choice,
        content: dict[str, Any],
        logprobs: Any = None,
        reason: str | None = None,
        chosen: slice = ALL,
    ) -> dict[str, Any]:
        """Return a choice, or a part of one in a stream, with its chosen tokens if they are wanted."""
        ids = {"token_ids": choice.tokens[chosen].tolist()} if self.form.return_token_ids else {}
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason, **ids}

    def opening(self, choice: Choice) -> dict[str, Any]:
        """Return the first part of a choice in a stream."""
        prompt = {"prompt_token_ids": self.prompt_of(choice).tolist()} if self.form.return_token_ids else {}
        return self.part(choice, self.beginning(choice), chosen=slice(0)) | prompt

    async def parts(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the next parts of a choice in a stream, and its last ones once it is finished."""
        text, chosen = choice.advance()
        if choice.completion is None and not (text or self.form.top is not None or self.form.return_token_ids):
            return []
        return self.shaped(choice, text, await self.logprobs(choice, chosen), chosen)

    async def finished(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice, after its prompt if it is to be echoed."""
        text = self.beginning(choice)["text"] + choice.text
        return self.part(choice, {"text": text}, await self.logprobs(choice), choice.finish_reason or "length")

    def beginning(self, choice: Choice) -> dict[str, Any]:
        """Return the content of the first part of a choice in a stream: the prompt, if it is to be echoed."""
        if not self.form.echo:
            return {"text": ""}
        texts = [self.form.prompt] if isinstance(self.form.prompt, str) else self.form.prompt
        given = texts[choice.index // self.ask.samples]
        tokens = self.prompt_of(choice)
        return {"text": given if isinstance(given, str) else self.service.tokenizer.decode(tokens, skip_special=False)}

    def shaped(self, choice: Choice, text: str, logprobs: Any, chosen: slice) -> list[dict[str, Any]]:
        """Return new text of a choice as parts of a stream."""
        return [self.part(choice, {"text": text}, logprobs, choice.finish_reason, chosen)]

    def listed(self, places: Places, count: int) -> dict[str, Any]:
        """Return log-probs in the form of this answer."""
        return completion_logprobs(self.name, places, count)


class ChatAnswer(Answer):
    """An answer of `/v1/chat/completions`.

    Attributes:
        tools: the tools of the request; None without any.
    """

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    tools: Tools | None = None

    async def finished(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": self._read(choice, choice.text), "refusal": None}
        if choice.calls:
            message["tool_calls"] = choice.calls
        return self.part(choice, {"message": message}, await self.logprobs(choice), choice.finish_reason)

    def beginning(self, choice: Choice) -> dict[str, Any]:
        """Say whose turn it is."""
        return {"delta": {"role": "assistant", "content": ""}}

    def shaped(self, choice: Choice, text: str, logprobs: Any, chosen: slice) -> list[dict[str, Any]]:
        """Return new text; at the end the calls, and why it ends."""
        ends = choice.completion is not None
        text = self._read(choice, text) if ends else text
        calls = [{"index": number} | call for number, call in enumerate(choice.calls)]
        deltas: list[dict[str, Any]] = [{"tool_calls": calls}] if calls else []
        return [
            self.part(choice, {"delta": {"content": text}}, logprobs, None, chosen),
            *(self.part(choice, {"delta": delta}, chosen=slice(0)) for delta in deltas),
            *(self.part(choice, {"delta": {}}, None, choice.finish_reason, slice(0)) for _ in range(ends)),
        ]

    def listed(self, places: Places, count: int) -> dict[str, Any]:
        """Return log-probs as a list of tokens."""
        return chat_logprobs(self.name, places, count)

    def _read(self, choice: Choice, text: str) -> str:
        """Return the text of a finished choice before its calls, and find them; with no calls the given text."""
        if self.tools is None:
            return text
        before, choice.calls = self.tools.read(self.service.tokenizer.decode(choice.tokens, skip_special=False))
        return before if choice.calls else text


class OpenAI:
    """Handlers of OpenAI's API.

    Args:
        service: the model.
    """

    def __init__(self, service: Service):
        self.service = service

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        route = partial(post, self.service.limits)
        gets = {
            "/v1/models": self.models, "/v1/models/{name:path}": self.model, "/tokenizer_info": self.tokenizer_info,
            "/v1/completions/tokenizer_info": self.tokenizer_info, "/health": self.health, "/metrics": self.metrics,
        }  # fmt: skip
        return [
            route("/v1/chat/completions", ChatForm, self.chat),
            route("/v1/completions", CompletionForm, self.complete),
            *(route(f"{prefix}/tokenize", TokenizeForm, self.tokenize) for prefix in ("", "/v1/completions")),
            *(route(f"{prefix}/detokenize", DetokenizeForm, self.detokenize) for prefix in ("", "/v1/completions")),
            Route("/v1/responses", self.responses, methods=["POST"]),
            *(Route(path, handler) for path, handler in gets.items()),
        ]

    async def chat(self, form: ChatForm) -> Response:
        """Answer a conversation."""
        self._check_model(form.model)
        tools, tokens = await self._encode_chat(form.messages, form)
        limit = form.max_completion_tokens if form.max_completion_tokens is not None else form.max_tokens
        answer = ChatAnswer(self.service, form, self._ask(form, [tokens], limit, live=not (tools or form.top)))
        answer.tools = tools
        return await self._respond(answer)

    async def complete(self, form: CompletionForm) -> Response:
        """Continue texts."""
        self._check_model(form.model)
        live = not (form.top or (form.echo and form.top is not None))
        if form.max_tokens == 0 and not form.echo:
            raise ApiError("max_tokens is 0, which asks for nothing without echo", param="max_tokens")
        ask = self._ask(form, await self._prompts(form), form.max_tokens or None, live=live)
        answer = Answer(self.service, form, ask)
        if form.max_tokens != 0:
            return await self._respond(answer)
        for tokens in ask.prompts:
            if not 0 < len(tokens) <= self.service.model.config.max_positions:
                raise ApiError(f"the prompt has {len(tokens)} tokens", param="prompt")
        return await answer.whole(samples=False)

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

    async def tokenize(self, form: TokenizeForm) -> dict[str, Any]:
        """Convert a text or a conversation to tokens."""
        if (form.prompt is None) == (form.messages is None):
            raise ApiError("either prompt or messages is wanted", param="prompt")
        if form.messages is not None:
            _, tokens = await self._encode_chat(form.messages, form)
        else:
            tokens = await self._encode(form.prompt or "", form)
        limit, ids = self.service.model.config.max_positions, tokens.tolist()
        extra = (
            {"token_strs": [token_name(self.service.tokenizer, token) for token in ids]}
            if form.return_token_strs
            else {}
        )
        return {"count": len(ids), "max_model_len": limit, "tokens": ids} | extra

    async def detokenize(self, form: DetokenizeForm) -> dict[str, Any]:
        """Convert tokens to text."""
        return {"prompt": self.service.tokenizer.decode(form.tokens, skip_special=False)}

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer, as its configuration file would."""
        tokenizer = self.service.tokenizer
        named = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id, "pad_token": tokenizer.pad_id}
        info = {name: None if token is None else token_name(tokenizer, token) for name, token in named.items()}
        kind = {"add_bos_token": tokenizer.add_bos, "tokenizer_class": "PreTrainedTokenizerFast"}
        return JSONResponse(info | {"chat_template": tokenizer.chat_template} | kind)

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

    async def _encode_chat(self, given: Sequence[dict[str, Any]], form: Offer) -> tuple[Tools | None, np.ndarray]:
        """Return the tools of a conversation, and its tokens."""
        template = self.service.tokenizer.chat_template
        tools, messages = Tools.of(form.offered, template), as_messages(given, template)
        schemas = list(tools.schemas) if tools and tools.in_template else []
        chat = tools.chat(messages) if tools else messages
        begins = form.add_generation_prompt is not False
        return tools, await self.service.encode(chat, add_generation_prompt=begins, tools=schemas)

    async def _prompts(self, form: CompletionForm) -> list[np.ndarray]:
        """Return the tokens of each prompt; ids stay as they are given."""
        given: Any = form.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise ApiError("there is no prompt", param="prompt")
        return [await self._encode(one, form) for one in given]

    async def _encode(self, prompt: str | list[int], form: CompletionForm | TokenizeForm) -> np.ndarray:
        if isinstance(prompt, str):
            as_it_is = form.add_special_tokens is False
            return self.service.tokenizer.encode(prompt) if as_it_is else await self.service.encode(prompt)
        if (largest := max(prompt, default=0)) >= (size := self.service.model.config.vocab_size):
            raise ApiError(f"the prompt has the token {largest}; the model knows {size}", param="prompt")
        return np.array(prompt, np.int32)

    async def _respond(self, answer: Answer) -> Response:
        if not answer.form.stream:
            return await answer.whole()
        return StreamingResponse(answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _news(stream: Stream) -> Event | None:
    """Return the next event; None if there is none for a while."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(next_event(stream), KEEP_ALIVE)
    return None
