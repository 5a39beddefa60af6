"""The training API by the requests of its client: order, repeats, states, samples, and the journal after a kill."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from covey.errors import ResumeError
from covey.monitor.writer import read_rows
from covey_report.board.folder import RunsFolder
from covey_serve import tinker
from covey_serve.app import make_app
from covey_serve.journal import Journal
from covey_serve.service import Service
from covey_serve.states import States
from covey_serve.tinker import Tinker
from covey_serve.training import Trainer
from covey_serve.wire import CLASSES

PROTOBUF = {"content-type": "application/x-protobuf"}
RUN = "session-1:train:0"
ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@pytest.fixture(scope="module")
def trainer(service: Service) -> Trainer:
    return Trainer(service.model)


@pytest.fixture
def serve(service: Service, trainer: Trainer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`serve(folder)`: a client of a server whose states and journal are in this folder of the test."""

    def open_client(folder: str = "a") -> "Client":
        journal = opened.enter_context(closing(Journal(tmp_path / folder / "journal")))
        states, runs = States(tmp_path / folder / "states", trainer), tmp_path / folder / "runs"
        tinker = Tinker(service, trainer, states, journal, runs)
        opened.callback(tinker.close)
        tinker.replay()
        http = opened.enter_context(TestClient(make_app(service, tinker.routes()), base_url="http://127.0.0.1"))
        return Client(http, tinker)

    with ExitStack() as opened:
        yield open_client


class Client:
    """Requests in the forms of the package tinker 0.38."""

    def __init__(self, http: TestClient, tinker: Tinker):
        self.http, self.tinker = http, tinker

    def post(self, endpoint: str, **fields: Any) -> Any:
        return self.http.post(f"/api/v1/{endpoint}", json=fields).json()

    def result(self, promise: Any) -> Any:
        answer = self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        if answer.headers["content-type"] != "application/json":
            return answer.content
        return self.result(promise) if answer.json().get("type") == "try_again" else answer.json()

    def begin(self, rank: int = 2, seed: int = 1) -> None:
        session = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        lora = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True}
        fields = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        made = self.result(self.post("create_model", **fields, optimizer_config={"type": "adamw"}, type="create_model"))
        assert made["model_id"] == f"{session}:train:0"

    def gradients(
        self, number: int, data: list[Any], loss: str = "importance_sampling", run: str = RUN, **more: Any
    ) -> Any:
        message = CLASSES["Request"](model_id=run, seq_id=number, loss_fn=loss, **more)
        for tokens, targets, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
            arrays = {"target_tokens": (targets, "<i8", 2)} | {k: (v, "<f4", 1) for k, v in inputs.items()}
            for name, (values, kind, dtype) in arrays.items():
                dense = np.array(values, kind).tobytes()
                tensor = CLASSES["Tensor"](dense=dense, dtype=dtype, shape=np.shape(values))
                datum.loss_fn_inputs.add(key=name, value=tensor)
        return self.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF).json()

    def step(self, number: int) -> Any:
        return self.post("optim_step", model_id=RUN, seq_id=number, adam_params=ADAM, type="optim_step")

    def save(self, number: int, name: str) -> Any:
        fields = {"model_id": RUN, "seq_id": number, "path": name, "overwrite": False, "type": "save_weights"}
        return self.result(self.post("save_weights", **fields))

    def snapshot(self, number: int, session: int) -> str:
        fields = {"model_id": RUN, "seq_id": number, "sampling_session_seq_id": session}
        saved = self.result(self.post("save_weights_for_sampler", **fields, type="save_weights_for_sampler"))
        return str(saved["sampling_session_id"])

    def sampler(self, number: int, **more: Any) -> str:
        fields = {"session_id": "session-1", "sampling_session_seq_id": number, "type": "create_sampling_session"}
        return str(self.post("create_sampling_session", **fields, **more)["sampling_session_id"])

    def sample(self, session: str, number: int, **more: Any) -> Any:
        prompt = {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]}
        params = {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        fields = {"prompt": prompt, "sampling_params": params, "num_samples": 2} | more
        return self.post("asample", sampling_session_id=session, seq_id=number, type="sample", **fields)

    def state(self, name: str = "end") -> bytes:
        return self.tinker.states.file(f"tinker://{RUN}/weights/{name}").read_bytes()


def datum(seed: int, n: int = 4) -> Any:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 200, n + 1).tolist()
    return tokens[:-1], tokens[1:], {"logprobs": [-5.0] * n, "advantages": rng.normal(size=n).tolist()}


def metrics_of(body: bytes) -> dict[str, float]:
    return {metric.key: metric.value for metric in CLASSES["Output"].FromString(body).metrics}


def logprobs(body: bytes) -> np.ndarray:
    records = CLASSES["Output"].FromString(body).loss_fn_outputs
    return np.concatenate([np.frombuffer(record.fields[0].value.data, "<f4") for record in records])


@pytest.mark.slow
def test_order_of_arrival_and_repeats_change_no_bit(serve: Callable[..., Client]) -> None:
    orders: dict[str, Any] = {"a": [1, 2, 3, 4], "b": [3, 1, 4, 2], "c": [1, 2, 2, 1, 3, 3, 4, 1]}
    states, results = [], []
    for folder, order in orders.items():
        client = serve(folder)
        client.begin()
        promises = {n: client.step(4) if n == 4 else client.gradients(n, [datum(n), datum(9, 2)]) for n in order}
        client.save(5, "end")
        results.append([logprobs(client.result(promises[n])).tolist() for n in (1, 2, 3)])
        states.append(client.state())
    assert states[0] == states[1] == states[2]
    assert results[0] == results[1] == results[2]
    alone = serve("d")
    alone.begin()
    alone.gradients(1, [datum(1), datum(9, 2)])
    alone.result(alone.step(2))
    alone.save(3, "end")
    assert alone.state() != states[0]  # all three requests counted


@pytest.mark.slow
def test_ten_chunks_of_a_step_have_the_same_bits_in_any_order(serve: Callable[..., Client]) -> None:
    """Ten random orders of arrival of ten chunks and the step after them, each with one request twice."""
    rng, found = np.random.default_rng(0), []
    for turn in range(10):
        order = rng.permutation(np.arange(1, 12)).tolist()
        order.insert(int(rng.integers(12)), order[int(rng.integers(11))])
        client = serve(f"order-{turn}")
        client.begin()
        promises = {n: client.step(11) if n == 11 else client.gradients(n, [datum(n)]) for n in order}
        norm = client.result(promises[11])["metrics"]["grad_norm:mean"]
        client.save(12, "end")
        found.append((client.state(), norm, *(client.result(promises[n]) for n in range(1, 11))))
    assert all(one == found[0] for one in found)


@pytest.mark.slow
def test_a_server_that_was_killed_goes_on_with_the_same_bits(serve: Callable[..., Client], tmp_path: Path) -> None:
    def ask(client: Client, start: int) -> Any:
        for number in range(start, 6, 2):
            client.gradients(number, [datum(number)])
            client.result(client.step(number + 1))
        client.save(7, "end")
        return client.result(client.sample(client.snapshot(8, 0), 0))

    whole = serve("whole")
    whole.begin()
    drawn = ask(whole, 1)
    first = serve("killed")
    first.begin()
    promise = first.gradients(1, [datum(1)])
    first.result(first.step(2))
    first.gradients(3, [datum(3)])  # acknowledged, and not part of a step yet
    with (tmp_path / "killed" / "journal").open("ab") as journal:
        journal.write(b"half a record")
    again = first.gradients(3, [datum(3)])
    first.tinker.journal.close()
    second = serve("killed")
    assert second.gradients(3, [datum(3)]) == again  # the client asks again
    assert logprobs(second.result(promise)).tolist() == logprobs(whole.result(promise)).tolist()
    second.result(second.step(4))
    assert ask(second, 5) == drawn
    assert second.state() == whole.state()
    second.tinker.journal.close()
    third = serve("killed")  # samples of the journal are drawn again when they are asked for
    assert third.result({"request_id": "sample:session-1:sample:0:0"}) == drawn
    assert third.state() == whole.state()


@pytest.mark.slow
def test_samples_are_of_their_snapshot_and_depend_on_their_number(
    serve: Callable[..., Client], service: Service
) -> None:
    client = serve()
    client.begin()
    base = client.sampler(0, base_model="tiny")
    save = {"model_id": RUN, "seq_id": 1, "type": "save_weights_for_sampler", "path": "first"}
    path = client.result(client.post("save_weights_for_sampler", **save))["path"]
    first = client.sampler(1, model_path=path)
    promise = client.sample(base, 0)
    assert len(promise["sample_sequence_ids"]) == 2
    new = client.result(promise)
    assert client.result(client.sample(base, 0)) == new
    assert client.result(client.sample(base, 1)) != new
    for number in (2, 4, 6):
        client.gradients(number, [datum(1)])
        client.step(number + 1)
    later = client.snapshot(8, 2)
    same = {"sampling_params": {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 4}}
    same |= {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    found = [client.result(client.sample(name, 5, **same)) for name in (base, first, later)]
    parsed = [CLASSES["Samples"].FromString(body) for body in found]
    tokens = [[one.tokens for one in each.sequences] for each in parsed]
    assert tokens[0] == tokens[1] != tokens[2]  # new adapters change nothing
    prompts = [np.frombuffer(one.prompt_logprobs, "<f4") for one in parsed]
    assert np.isnan(prompts[0][0])
    np.testing.assert_allclose(prompts[0][1:], prompts[1][1:], atol=1e-5)
    assert np.abs(prompts[0][1:] - prompts[2][1:]).max() > 1e-3  # these weights learned something
    top = parsed[0].topk_prompt_logprobs
    assert (top.length, top.k) == (3, 2)
    assert np.frombuffer(top.logprobs, "<f4")[:2].tolist() == [-99999.0] * 2  # nothing comes before the first token
    for one in (one for each in parsed for one in each.sequences):
        drawn, likely = np.frombuffer(one.tokens, "<i4"), one.topk_sampled_logprobs
        assert (likely.length, likely.k) == (len(drawn), 3)
        ids = np.frombuffer(likely.token_ids, "<i4").reshape(-1, 3)
        logps = np.frombuffer(likely.logprobs, "<f4").reshape(-1, 3)
        at = ids == drawn[:, None]
        np.testing.assert_allclose(logps[at], np.frombuffer(one.logprobs, "<f4")[at.any(1)], atol=1e-4)


@pytest.mark.slow
def test_all_weights_are_trained_saved_and_sampled_and_the_base_stays(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin(rank=0)
    assert client.post("get_info", model_id=RUN, type="get_info")["is_lora"] is False
    base = client.sampler(0, base_model="tiny")
    params = {"sampling_params": {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 4}}
    first = client.result(client.sample(base, 0, **params))
    for number in (1, 3):
        client.gradients(number, [datum(1)])
        client.step(number + 1)
    tuned = client.result(client.sample(client.snapshot(5, 1), 0, **params))
    assert tuned != first
    assert client.result(client.sample(base, 1, **params)) == first
    path = client.save(6, "end")["path"]
    load = {"session_id": "session-1", "model_seq_id": 1, "path": path, "optimizer": True}
    assert client.result(client.post("load_weights", **load))["is_lora"] is False


def test_a_saved_state_is_loaded_with_its_moments(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin()
    client.gradients(1, [datum(1)])
    client.step(2)
    path = client.save(3, "mid")["path"]
    client.gradients(4, [datum(2)])
    client.step(5)
    client.save(6, "end")
    end = client.state()
    load = {"model_id": RUN, "seq_id": 7, "path": path, "optimizer": True, "type": "load_weights"}
    assert client.result(client.post("load_weights", **load))["path"] == path
    client.gradients(8, [datum(2)])
    client.step(9)
    client.save(10, "again")
    assert client.state("again") == end
    made = client.result(
        client.post("load_weights", session_id="session-1", model_seq_id=1, path=path, optimizer=False)
    )
    assert (made["model_id"], made["lora_rank"]) == ("session-1:train:1", 2)
    assert client.post("get_info", model_id="session-1:train:1", type="get_info")["lora_rank"] == 2
    assert client.post("weights_info", tinker_path=path)["lora_rank"] == 2


@pytest.mark.slow
def test_a_saved_state_is_a_model_of_the_other_api(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin()
    for number in (1, 3):
        client.gradients(number, [datum(1)])
        client.step(number + 1)
    path = client.save(5, "end")["path"]

    def ask(model: str) -> Any:
        fields = {"model": model, "prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 4, "temperature": 0}
        return client.http.post("/v1/completions", json=fields).json()

    def change(what: str, **fields: str) -> int:
        return client.http.post(f"/v1/{what}_lora_adapter", json=fields).status_code

    base = ask("tiny")
    assert change("load", lora_name="mine", lora_path="../x") == change("load", lora_name="tiny", lora_path=path) == 400
    assert change("load", lora_name="mine", lora_path=path) == 200
    assert [model["id"] for model in client.http.get("/v1/models").json()["data"]] == ["tiny", "mine"]
    mine = ask("mine")
    assert mine["model"] == "mine"
    prompt = [answer["choices"][0]["logprobs"]["token_logprobs"][1:3] for answer in (base, mine)]
    assert prompt[0] != prompt[1]
    samples = {"sampling_params": {"max_tokens": 4, "temperature": 0.0, "top_k": -1, "top_p": 1.0}}
    drawn = CLASSES["Samples"].FromString(client.result(client.sample(client.snapshot(6, 0), 0, **samples)))
    logps = mine["choices"][0]["logprobs"]["token_logprobs"][3:]
    np.testing.assert_allclose(np.frombuffer(drawn.sequences[0].logprobs, "<f4"), logps, atol=1e-4)
    assert (change("unload", lora_name="mine"), change("unload", lora_name="mine")) == (200, 404)
    assert ask("mine")["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["../x", "tinker://a/weights/../../x", "tinker://../weights/x", "tinker://a/other/x", "/etc/passwd"]
)
def test_no_name_leaves_the_folder(serve: Callable[..., Client], path: str) -> None:
    client = serve()
    client.begin()
    answer = client.post("load_weights", session_id="session-1", model_seq_id=1, path=path, optimizer=False)
    assert "is no path of a state" in answer["error"]["message"]
    answer = client.post("save_weights", model_id=RUN, seq_id=1, path=path, type="save_weights")
    assert answer["error"]["param"] == "path"


def test_mistakes_are_refused_by_name_and_block_nobody(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin()
    tokens, targets, inputs = datum(1)
    wrong = [
        ([datum(1)], "stable_reinforce", "importance_sampling"), ([datum(1)], "other", "there is no loss"),
        ([datum(1)], "cross_entropy", "takes ['target_tokens', 'weights']"), ([], "ppo", "there is no datum"),
        ([(tokens, targets[:-1], inputs)], "ppo", "not as long as"),
        ([([99_999] * 4, targets, inputs)], "ppo", "does not know"),
    ]  # fmt: skip
    for number, (data, loss, message) in enumerate(wrong, start=1):
        found = client.result(client.gradients(number, data, loss))
        assert message in found["error"], loss
        assert found["category"] == "user"
    setting = [CLASSES["Number"](key="unheard_of", value=1.0)]
    assert "unheard_of" in client.result(client.gradients(7, [datum(1)], "ppo", loss_fn_config=setting))["error"]
    assert "there are no gradients" in client.result(client.step(8))["error"]
    assert len(logprobs(client.result(client.gradients(9, [datum(1)], forward_only=True)))) == 4
    assert "there are no gradients" in client.result(client.step(10))["error"]
    rate = {"adam_params": {"learning_rate": -1.0}, "type": "optim_step"}
    found = client.result(client.post("optim_step", model_id=RUN, seq_id=11, **rate))
    assert "learning_rate" in found["error"]
    assert len(logprobs(client.result(client.gradients(12, [datum(1)], forward_only=True)))) == 4
    assert "had the number 10" in client.gradients(10, [datum(1)])["error"]["message"]
    without = [(tokens, [[]] * 4, {"weights": [[]] * 4})]
    assert "takes [n, k]" in client.result(client.gradients(13, without, "cross_entropy"))["error"]
    later = CLASSES["Request"](model_id=RUN, seq_id=14).SerializeToString() + b"\xf8\x07\x01"  # field 127
    answer = client.http.post("/api/v1/forward_backward", content=later, headers=PROTOBUF).json()
    assert "field 127" in answer["error"]["message"]
    for body in (b"\xff\xff", b"\x0a\xff"):
        assert client.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF).status_code == 400
    assert "no model" in client.post("get_info", model_id="foreign")["error"]["message"]
    assert "no request" in client.post("retrieve_future", request_id="foreign")["error"]["message"]
    assert client.post(
        "create_model", session_id="session-9", model_seq_id=0, base_model="tiny", lora_config={"rank": 2}
    )["error"]


@pytest.mark.slow
def test_the_board_lists_a_served_run_with_each_step_once(serve: Callable[..., Client], tmp_path: Path) -> None:
    """Also after a kill, from the whole journal and from one that was shortened, and after a state was loaded."""

    def train(client: Client, *numbers: int) -> None:
        for number in numbers:
            client.gradients(number, [datum(number)])
            client.result(client.step(number + 1))

    def kill(client: Client) -> None:
        client.tinker.journal.close()
        client.tinker.runs[RUN].rows._writer.close()
        client.tinker.runs[RUN].rows._lock.close()

    def listed() -> tuple[Any, ...]:
        runs = RunsFolder(tmp_path / "a" / "runs")
        while runs.look():
            pass
        row = runs.runs[RUN].row()
        rows = list(read_rows(tmp_path / "a" / "runs" / RUN / "metrics.jsonl"))
        steps = [one["step"] for one in rows]
        assert steps == list(range(1, len(rows) + 1))
        assert not row["error"]
        return row["state"], row["step"], rows

    client = serve()
    client.begin()
    losses = [metrics_of(client.result(client.gradients(number, [datum(number)])))["loss:sum"] for number in (1, 2)]
    norm = client.result(client.step(3))["metrics"]["grad_norm:mean"]
    train(client, 4, 6)
    state, step, rows = listed()
    assert (state, step) == ("running", 3)
    wanted = {"step": 1, "loss": pytest.approx(sum(losses)), "grad_norm": norm, "learning_rate": 0.02}
    assert rows[0] == wanted
    kill(client)
    assert listed()[0] == "dead"
    again = serve()
    train(again, 8)
    assert listed()[1:] == (4, [*rows, listed()[2][3]])
    again.save(10, "one")
    again.save(11, "two")
    train(again, 12)
    rows = listed()[2]
    kill(again)
    third = serve()  # its journal begins with the state after four steps
    train(third, 14)
    assert listed()[2][:5] == rows
    load = {"model_id": RUN, "seq_id": 16, "path": f"tinker://{RUN}/weights/one", "optimizer": True}
    third.result(third.post("load_weights", **load))
    train(third, 17)
    state, step, after = listed()
    assert (state, step, after[:4]) == ("running", 5, rows[:4])
    third.tinker.close()
    assert listed()[0] == "stopped"


@pytest.mark.parametrize(("kind", "body"), [("of_tomorrow", b"{}"), ("optim_step", b'{"model_id": "a", "new": 1}')])
def test_a_journal_of_another_version_is_refused(
    serve: Callable[..., Client], tmp_path: Path, kind: str, body: bytes
) -> None:
    serve().begin()
    with closing(Journal(tmp_path / "b" / "journal")) as journal:
        for record in serve("a2").tinker.journal.read():
            journal.write(*record)
        journal.write(kind, body)
    with pytest.raises(ResumeError, match=f"request 1 of the journal, '{kind}', cannot be done again"):
        serve("b")


def test_what_waits_and_what_was_fetched_is_bounded(
    serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request whose turn it is finds room where later ones wait, and all are done once it is there."""
    client = serve()
    client.begin()
    promises = {1: client.gradients(1, [datum(1)])}
    logprobs(client.result(promises[1]))
    size = client.tinker.runs[RUN].accepted
    monkeypatch.setattr(tinker, "MAX_WAITING", 5 * size)
    for number in (3, 4, 5):
        promises[number] = client.gradients(number, [datum(number)])
    answer = client.gradients(6, [datum(6)])
    assert "of requests to session-1:train:0 wait already" in answer["error"]["message"]
    assert client.gradients(3, [datum(3)]) == promises[3]  # a repeat waits already
    client.gradients(2, [datum(2)])
    assert len(logprobs(client.result(promises[5]))) == 4
    promises[6] = client.gradients(6, [datum(6)])
    monkeypatch.setattr(tinker, "MAX_FETCHED", 2)
    assert len(logprobs(client.result(promises[6]))) == 4
    assert len(logprobs(client.result(promises[5]))) == 4
    assert "there is no request" in client.result(promises[1])["error"]["message"]


def test_names_with_dots_have_files_of_their_own(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin()
    for number, name in enumerate(("v1.0", "v1.1"), start=1):
        assert client.save(number, name)["path"].endswith(name)
    assert client.tinker.states.file(f"tinker://{RUN}/weights/v1.0").name == "v1.0.safetensors"
    client.tinker.states.load(f"tinker://{RUN}/weights/v1.0", moments=True)


def test_another_body_under_a_number_is_refused(serve: Callable[..., Client]) -> None:
    client = serve()
    client.begin()
    session = client.sampler(0, base_model="tiny")
    promise = client.sample(session, 0)
    assert client.sample(session, 0) == promise
    assert "had the number 0" in client.sample(session, 0, num_samples=1)["error"]["message"]
    fields = {"session_id": "session-1", "sampling_session_seq_id": 0, "model_path": f"tinker://{RUN}/weights/a"}
    assert "had the number 0" in client.post("create_sampling_session", **fields)["error"]["message"]
    lora = {"session_id": "session-1", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 3}}
    assert "had the number 0" in client.post("create_model", **lora)["error"]["message"]


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for body in (b"one", b"", b"three"):
        journal.write("kind", body)
    journal.close()
    read = lambda: list(journal.read())  # noqa: E731
    with closing(Journal(tmp_path / "journal")) as journal:
        assert read() == [("kind", b"one"), ("kind", b""), ("kind", b"three")]
        with pytest.raises(ResumeError, match="another server has this journal"):
            Journal(tmp_path / "journal")
        with pytest.raises(ResumeError, match="was begun with one"):
            list(journal.records("two"))
    data = bytearray((tmp_path / "journal").read_bytes())
    data[14] ^= 1
    (tmp_path / "journal").write_bytes(data)
    with closing(Journal(tmp_path / "journal")) as journal, pytest.raises(ResumeError, match="journal is damaged"):
        read()


@pytest.mark.slow
def test_a_journal_is_shortened_at_a_save_and_a_server_goes_on_from_it(
    serve: Callable[..., Client], tmp_path: Path
) -> None:
    """Ten times two steps and a save under one name; killed before the last one. The other model is saved once."""

    def ask(client: Client, first: int, last: int) -> Any:
        drawn = None
        for turn in range(first, last):
            number = 5 * turn + 1
            for step in (number, number + 2):
                client.gradients(step, [datum(step)])
                client.result(client.step(step + 1))
            client.save(number + 4, "latest")
            if turn % 3 == 0:
                drawn = client.result(client.sample(client.sampler(turn, base_model="tiny"), 0))
        return drawn

    def size(folder: str) -> int:
        return (tmp_path / folder / "journal").stat().st_size

    whole, killed = serve("whole"), serve("killed")
    for client in (whole, killed):
        client.begin()
    ask(whole, 0, 10)
    ask(killed, 0, 3)
    before = size("killed")
    ask(killed, 3, 9)
    assert size("killed") < 1.5 * before  # two turns of requests, whatever came before
    bases = list((tmp_path / "killed" / "states").glob("*/bases/*"))
    assert len(bases) == 3  # the last save shortens the journal at the next request
    killed.gradients(46, [datum(46)])
    killed.result(killed.step(47))
    killed.tinker.journal.close()
    again = serve("killed")
    assert again.tinker.runs[RUN].expected == 48
    again.gradients(48, [datum(48)])
    again.result(again.step(49))
    again.save(50, "latest")
    assert again.state("latest") == whole.state("latest")
    assert "another request" in again.gradients(46, [datum(1)])["error"]["message"]
    drawn = again.result(again.sample(again.sampler(6, base_model="tiny"), 0))
    assert drawn == whole.result(whole.sample("session-1:sample:6", 0))
    path = again.save(51, "end")["path"]
    again.result(again.post("load_weights", session_id="session-1", model_seq_id=1, path=path, optimizer=True))
    again.save(52, "end")
    again.save(53, "end")
    again.tinker.journal.close()
    assert serve("killed").state("end") == again.state("end")  # what was loaded is saved once more before


@pytest.mark.slow
def test_two_clients_with_adapters_of_two_ranks_have_the_bits_that_each_has_alone(
    serve: Callable[..., Client],
) -> None:
    """One rank after the other, and both at once with their requests in turn: log-probs, samples and states."""

    def begin(client: Client, model: int, rank: int) -> None:
        fields = {"session_id": "session-1", "model_seq_id": model, "base_model": "tiny"}
        client.result(client.post("create_model", **fields, lora_config={"rank": rank, "seed": rank}))

    def turn(client: Client, model: int, number: int) -> list[Any]:
        run = f"session-1:train:{model}"
        gradients = client.gradients(number, [datum(number + model)], run=run)
        step = client.post("optim_step", model_id=run, seq_id=number + 1, adam_params=ADAM)
        fields = {"model_id": run, "seq_id": number + 2, "sampling_session_seq_id": 10 * number + model}
        sampler = client.result(client.post("save_weights_for_sampler", **fields))["sampling_session_id"]
        return [gradients, step, client.sample(sampler, 0)]

    def end(client: Client, model: int) -> bytes:
        run = f"session-1:train:{model}"
        saved = client.result(client.post("save_weights", model_id=run, seq_id=10, path="end"))["path"]
        return client.tinker.states.file(saved).read_bytes()

    apart, together = serve("apart"), serve("together")
    wanted: dict[int, list[Any]] = {}
    for client in (apart, together):
        client.post("create_session", tags=[], sdk_version="0.38.0")
        for model, rank in enumerate((4, 16)):
            begin(client, model, rank)
    for model in (0, 1):
        wanted[model] = [apart.result(p) for number in (1, 4, 7) for p in turn(apart, model, number)]
    promises = [(model, turn(together, model, number)) for number in (1, 4, 7) for model in (1, 0)]
    for model in (0, 1):
        assert [together.result(p) for owner, each in promises if owner == model for p in each] == wanted[model]
        assert end(together, model) == end(apart, model)
