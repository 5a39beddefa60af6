"""A tiny model that is served in this process, loaded once for each file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from covey.config.schema import RolloutConfig
from covey.recipes.load_model import open_model
from covey_serve.app import make_app
from covey_serve.service import Limits, Service

CONFIG = RolloutConfig(max_prompt_length=64, max_new_tokens=16, slots=4, decode_chunk=4)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Path]) -> Iterator[Service]:
    """A tiny Llama with random weights."""
    model, tokenizer = open_model(str(write_checkpoint(tmp_path_factory.mktemp("model"), "llama", 1)))
    service = Service("tiny", model, tokenizer, CONFIG, Limits(body=100_000, seconds=60.0, samples=32))
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    """A client of the server, which has the address of this machine."""
    with TestClient(make_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def complete(client: TestClient) -> Callable[..., Any]:
    """`complete(**fields)`: the answer of `/v1/completions`."""

    def ask(**fields: Any) -> Any:
        return client.post("/v1/completions", json={"model": "tiny"} | fields)

    return ask
