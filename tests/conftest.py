"""Set before anything imports JAX: the CPU, split into four devices, so that meshes can be tested anywhere. And what
tests of several rooms share: a small GSM8K, and tiny models that can spell.
"""

import gc
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from covey.configs import CALCULATOR_MARKERS

assert "jax" not in sys.modules, "JAX was imported before its flags were set"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", ""
)  # off: what is tested was compiled now; name a folder to save time
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # a program in 32 pieces takes half as long again
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

gc.set_threshold(50_000, 20, 20)
KEPT = 20.0
"""Seconds for which files use what those before them compiled: looking for what is left behind takes a third of one."""
forgotten = [time.monotonic()]


@pytest.fixture(scope="module", autouse=True)
def forgotten_behind_files() -> Iterator[None]:
    """What JAX keeps of their programs. Late in a suite its caches would be full, so that it compiles over and over,
    and the collector would look through all of it again and again: three quarters of the time.
    """
    yield
    if time.monotonic() < forgotten[-1] + KEPT:
        return
    forgotten[:] = [time.monotonic()]
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


# The first example of a test may compile, so no deadline. CI draws the same examples each time.
hypothesis.settings.register_profile("covey", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("covey")

GOLDEN = Path(__file__).parent / "parity" / "golden"
GEMMA_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GSM8K; one question of the training set is far too long."""
    folder = tmp_path_factory.mktemp("gsm8k")
    ask = lambda n: {"question": f"{n}+{n}?", "answer": f"{n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}  # noqa: E731
    long = {"question": "How many? " * 200, "answer": "#### 1"}
    for name, rows in (("train", [*map(ask, range(1, 12)), long]), ("test", list(map(ask, range(20, 26))))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family, layers=2, words=())`: a tiny random model of the family, with a tokenizer that can spell, and
    has each of `words` as a token.
    """

    def write(family: str, layers: int = 2, words: tuple[str, ...] = ()) -> Path:
        described = json.loads((GOLDEN / "families.json").read_text())[family]
        folder = tmp_path / family
        folder.mkdir()
        inner = tokenizers.Tokenizer.from_file(str(GOLDEN / "tiny-llama" / "tokenizer.json"))
        inner.add_special_tokens([*CALCULATOR_MARKERS])
        inner.add_tokens([*words])
        inner.save(str(folder / "tokenizer.json"))
        size = inner.get_vocab_size()
        config = described["config"] | {"vocab_size": size, "max_position_embeddings": 1024, "eos_token_id": 2}
        config |= {"num_hidden_layers": layers, "layer_types": (config.get("layer_types") or [])[:layers] or None}
        (folder / "config.json").write_text(json.dumps(config))
        vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
        left_out = tuple(f"model.layers.{number}." for number in range(layers, 8))
        kept = {k: v for k, v in described["shapes"].items() if not k.startswith(left_out)}
        shapes = {k: (size, v[1]) if k in vocabulary else tuple(v) for k, v in kept.items()}
        draw = lambda name, shape: np.random.RandomState(zlib.crc32(name.encode())).normal(size=shape) * 0.2  # noqa: E731
        tensors = {k: (draw(k, v) + float("norm" in k)).astype(np.float32) for k, v in shapes.items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        chatml = (GOLDEN / "tiny-llama" / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(GEMMA_TEMPLATE if family == "gemma2" else chatml)
        return folder

    return write


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The programs of one run serve the others of the file, as they do on a user's machine."""
    import jax

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
