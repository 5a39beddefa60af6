"""OpenAI's API, and each trap into which a client was seen to fall."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from covey.rl.rollout_worker import RolloutWorker
from covey.sampling.sequence import SampledTokens
from covey.types import Completion, FinishReason
from covey_serve.app import make_app
from covey_serve.choices import Choice
from covey_serve.device import Event
from covey_serve.service import Service

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def chunks(text: str) -> list[Any]:
    """The events of a stream."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.fixture
def scripted(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`scripted(text)`: the model writes this text."""

    def script(text: str) -> None:
        tokens = service.tokenizer.encode(text)
        none = np.zeros(len(tokens), np.float32)
        ended = Event(0, 0, SampledTokens(tokens, none, none), Completion(tokens, none, none, FinishReason.STOP))

        @asynccontextmanager
        async def sample(ask: Any) -> AsyncIterator[Any]:
            stream = SimpleNamespace(events=asyncio.Queue())
            stream.events.put_nowait(ended)
            yield stream

        monkeypatch.setattr(service, "sample", sample)

    return script


@pytest.mark.slow
def test_greedy_text_is_that_of_the_worker_of_the_commands(client: TestClient, service: Service) -> None:
    worker = RolloutWorker(service.model, service.tokenizer, service.config)
    greedy = worker.generate([CHAT], 1, config=service.config.from_checked(vars(service.config) | {"temperature": 0.0}))
    answer = client.post("/v1/chat/completions", json={"messages": CHAT, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == greedy[0].completions[0].text
    assert answer["usage"]["completion_tokens"] == len(greedy[0].completions[0].tokens)


def test_every_answer_has_its_usage_and_a_text_that_is_not_null(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": CHAT, "max_completion_tokens": 3, "n": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 17, "completion_tokens": 6, "total_tokens": 23}
    for choice in answer["choices"]:
        assert isinstance(choice["message"]["content"], str)
        assert choice["finish_reason"] == "length"


def test_a_stream_gives_the_same_answer_and_ends_with_its_usage(client: TestClient) -> None:
    fields = {"messages": CHAT, "seed": 5, "n": 2, "return_token_ids": True, "max_tokens": 11}
    whole = client.post("/v1/chat/completions", json=fields).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = chunks(client.post("/v1/chat/completions", json=fields | options).text)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert [part["finish_reason"] for part in own][-2:] == [None, choice["finish_reason"]]
    assert len(parts) > 6  # text came while it was drawn


def test_a_stream_that_fails_says_so_and_does_not_seem_complete(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.device.lanes[0].engine, "step", lambda: 1 / 0)
    text = client.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    assert "[DONE]" not in text
    error = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["message"] == "the server failed: ZeroDivisionError"
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    monkeypatch.undo()
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_tool_call_has_all_that_clients_need(client: TestClient, scripted: Callable[[str], None]) -> None:
    scripted(f"I add. {CALL}")
    fields = {"messages": CHAT, "tools": [TOOL], "tool_choice": "auto"}
    choice = client.post("/v1/chat/completions", json=fields).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert isinstance(call["function"]["arguments"], str)
    assert len(call["id"]) == 9
    parts = chunks(client.post("/v1/chat/completions", json=fields | {"stream": True}).text)
    (streamed,) = [p for part in parts for p in part["choices"][0]["delta"].get("tool_calls", ())]
    assert streamed["index"] == 0
    assert streamed["function"] == call["function"]
    assert streamed["id"] != call["id"]  # clients name a call by this alone
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["no call", "<tool_call>\n{broken\n</tool_call>", CALL.replace("add", "other")])
def test_what_is_no_call_of_a_tool_is_text(client: TestClient, scripted: Callable[[str], None], text: str) -> None:
    scripted(text)
    choice = client.post("/v1/chat/completions", json={"messages": CHAT, "tools": [TOOL]}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


def test_a_call_that_a_client_sends_back_is_in_the_prompt(client: TestClient, service: Service) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    tokens = client.post("/tokenize", json={"messages": history}).json()["tokens"]
    text = service.tokenizer.decode(tokens, skip_special=False)
    assert "user\n1+1<|im_end|>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response><|im_end|>" in text


def test_log_likelihoods_are_what_lm_eval_reads(complete: Callable[..., Any], service: Service, logits: Any) -> None:
    prompt = service.tokenizer.encode("hello").tolist()
    fields = {"prompt": [prompt], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    (choice,) = complete(**fields).json()["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(prompt) + 1  # no BOS before, and a token of the model at the end
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    whole = np.array(logits(service.model, np.array([prompt]))[0], np.float64)
    logps = whole - np.log(np.exp(whole).sum(-1, keepdims=True))
    for place, token in enumerate(prompt[1:], start=1):
        assert found["token_logprobs"][place] == pytest.approx(logps[place - 1, token], abs=1e-4)
        largest = max(found["top_logprobs"][place].values())
        assert (found["token_logprobs"][place] == largest) == (token == logps[place - 1].argmax())
    assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())  # it was drawn greedily
    assert found["text_offset"] == np.cumsum([0, *map(len, found["tokens"][:-1])]).tolist()
    only = complete(**fields | {"max_tokens": 0}).json()["choices"][0]
    assert only["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]


def test_a_stop_token_counts_as_a_token(complete: Callable[..., Any], service: Service) -> None:
    drawn = complete(prompt=[[5, 6]], temperature=0, max_tokens=4, return_token_ids=True).json()["choices"][0]
    stop = drawn["token_ids"][2]
    fields = {"prompt": [[5, 6]], "temperature": 0, "max_tokens": 4, "logprobs": 0, "stop_token_ids": [stop]}
    ended = complete(**fields).json()["choices"][0]
    first = drawn["token_ids"].index(stop)
    assert (len(ended["logprobs"]["tokens"]), ended["finish_reason"]) == (first + 1, "stop")


def test_a_stop_string_ends_a_text_and_never_shows(complete: Callable[..., Any]) -> None:
    text = complete(prompt="abc", seed=3, max_tokens=12).json()["choices"][0]["text"]
    stop = text[3:5]
    fields = {"prompt": "abc", "seed": 3, "max_tokens": 12, "stop": ["never there", stop]}
    choice = complete(**fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    streamed = chunks(complete(**fields, stream=True).text)
    assert "".join(part["choices"][0]["text"] for part in streamed) == choice["text"]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_stream_decodes_each_token_a_few_times_and_never_half_a_character(size: int) -> None:
    """Tokens are bytes; each event brings `size` more, as chunks of decode steps do."""
    whole, decoded = "für 10 € \U0001f600 <sto p> " * 12 + "<stop>", 0

    def decode(tokens: np.ndarray) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return bytes(tokens.tolist()).decode(errors="replace")

    tokens = np.frombuffer(whole.encode(), np.uint8).astype(np.int32)
    choice, texts, none = Choice(0, decode, ["<stop>"]), list[str](), np.zeros(len(tokens), np.float32)
    for end in range(size, len(tokens), size):
        choice.take(Event(0, 0, SampledTokens(tokens[:end], none[:end], none[:end])))
        texts.append(choice.advance()[0])
    assert "<stop>" not in "".join(texts)
    assert whole.startswith("".join(texts))
    assert len("".join(texts)) > len(whole) - 20
    assert decoded < 12 * len(tokens)


def test_one_answer_has_all_prompts_and_choices_in_order(complete: Callable[..., Any]) -> None:
    alone = [complete(prompt=p, seed=1, max_tokens=4).json()["choices"][0]["text"] for p in ("ab", "c")]
    answer = complete(prompt=["ab", "c"], temperature=0, max_tokens=4, n=2).json()
    greedy = [choice["text"] for choice in answer["choices"]]
    assert greedy[0] == greedy[1] != greedy[2] == greedy[3]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert complete(prompt=["ab", "d"], seed=1, max_tokens=4).json()["choices"][0]["text"] == alone[0]


def test_a_seed_gives_the_same_answer_whatever_else_runs(complete: Callable[..., Any], service: Service) -> None:
    fields = {"prompt": "abc", "seed": 11, "max_tokens": 9, "logprobs": 0}
    alone = complete(**fields).json()["choices"][0]

    async def crowd() -> Any:
        from covey_serve.service import Ask

        tokens = service.tokenizer.encode("abc")
        long = np.arange(5, 60, dtype=np.int32)
        others = [Ask([long], 3, seed=n) for n in range(3)]
        found = await asyncio.gather(*map(service.all_of, [*others, Ask([tokens], seed=11, limit=9)]))
        return found[-1][0].completion

    among = asyncio.run(crowd())
    assert among.logps.tolist() == alone["logprobs"]["token_logprobs"]
    assert complete(**fields | {"seed": 12}).json()["choices"][0] != alone


def test_a_harness_needs_no_tokenizer_of_its_own(client: TestClient, service: Service) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    fields = {"prompt": "a<|im_end|>b", "add_special_tokens": False, "return_token_strs": True}
    answer = client.post("/tokenize", json=fields).json()
    assert answer["tokens"] == service.tokenizer.encode("a<|im_end|>b").tolist()
    assert answer["token_strs"] == ["a", "<|im_end|>", "b"]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "a<|im_end|>b"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 0.1}, "frequency_penalty"), ({"unheard_of": 1}, "unheard_of"), ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"), ({"logprobs": 21}, "logprobs"), ({"prompt": [99999]}, "prompt"),
        ({"seed": "one"}, "seed"), ({"stop": [""]}, "stop"), ({"prompt": []}, "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_name(complete: Callable[..., Any], fields: Any, param: str) -> None:
    answer = complete(**{"prompt": "a"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)


def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(complete: Callable[..., Any]) -> None:
    fields = {"frequency_penalty": 0, "logit_bias": {}, "user": "u", "best_of": 1, "response_format": {"type": "text"}}
    assert complete(prompt="a", max_tokens=1, top_k=-1, stop=None, **fields).status_code == 200


def test_mistakes_have_their_status(client: TestClient, complete: Callable[..., Any]) -> None:
    assert complete(prompt="a", model="other").status_code == 404
    assert complete(prompt="a", max_tokens=17).status_code == complete(prompt=[[5] * 65]).status_code == 400
    assert complete(prompt="a", n=33).status_code == 400
    assert complete(prompt="a" * 100_001).status_code == 413
    missing = client.post("/v1/responses", json={})
    assert (missing.status_code, "chat completions" in missing.json()["error"]["message"]) == (404, True)
    assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/completions").status_code == 405
    for body in (b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b'{"prompt": ' + b"[" * 30_000):
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, set(answer.json())) == (400, {"error"})
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "image_url" in client.post("/v1/chat/completions", json={"messages": parts}).json()["error"]["message"]


def test_metrics_count_what_was_answered(client: TestClient, complete: Callable[..., Any], service: Service) -> None:
    before = service.metrics.tokens.copy()
    complete(prompt=[[5, 6, 7]], max_tokens=2, seed=1)
    text = client.get("/metrics").text
    assert f"covey:prompt_tokens_total {before['prompt'] + 3}\n" in text
    assert f"covey:generation_tokens_total {before['completion'] + 2}\n" in text
    assert 'covey:request_success_total{finished_reason="length"}' in text
    assert "covey:num_requests_running 0\n" in text
    assert client.get("/health").text == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(service: Service, stream: bool) -> None:
    app, lane = make_app(service), service.device.lanes[0]
    body = json.dumps({"prompt": "abc", "n": 32, "seed": 1, "stream": stream}).encode()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip

    async def leave() -> None:
        begun, sent = asyncio.Event(), list[Any]()

        async def receive() -> Any:
            if not begun.is_set():
                begun.set()
                return {"type": "http.request", "body": body, "more_body": False}
            while not lane.places:  # until it runs
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(leave())
    service.device.run(lambda: None).result()
    assert not lane.places
    assert not lane.engine.unfinished
