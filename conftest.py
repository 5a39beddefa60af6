"""Set before anything imports JAX: the CPU, split into four devices, so that meshes can be tested anywhere. And what
tests of several rooms share: a small GSM8K, and tiny models that can spell.
"""

import atexit
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
import shutil
import sys
import tempfile
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from covey.config.schema import CALCULATOR_MARKERS

assert "jax" not in sys.modules, "JAX was imported before its flags were set"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # All workers and the processes that tests start share what one has compiled, but for several that join on CPUs, in
    # a folder of this session alone: what is tested was compiled now. Name a folder to keep it for later sessions.
    COMPILED = tempfile.mkdtemp(prefix="covey-tests-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # less than that is hardly used again
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lines of Python, which programs need not hold
OLD_EMITTERS = ["--xla_cpu_use_fusion_emitters=false"] if importlib.metadata.version("jaxlib") < "0.11" else []
"""The compiler of jaxlib 0.10 is quicker without its new emitters for CPUs. Later ones end a process at the flag."""
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    *OLD_EMITTERS,
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # a program in 32 pieces takes half as long again
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

OF_ALL = ("aot", "docs", "test_accelerator", "test_architecture", "test_benchmarks", "test_regular_", "test_release")
"""Tests of the library with its plugins: `make test-core`, which hides the plugins, leaves them out."""
collect_ignore_glob = [] if importlib.util.find_spec("covey_plan") else [f"tests/{name}*" for name in OF_ALL]

gc.set_threshold(50_000, 20, 20)
KEPT = 150.0
"""Seconds for which files use what those before them compiled: looking for what is left behind takes a third of one."""
ALIKE = {
    "small runs": (
        "faults/test_folder_faults", "faults/test_kill_faults", "faults/test_number_faults", "faults/test_run_faults",
        "run/test_load_model", "run/test_run", "../plugins/covey_formats/tests/test_export_run",
        "../plugins/covey_quantised/tests/test_quantised_run", "../plugins/covey_sft/tests/test_run",
    ),
    "learners": (
        "run/test_learners", "run/test_off_policy", "run/test_settings", "../plugins/covey_envs/tests/test_guess",
    ),
    "learning": ("rl/test_learning", "../plugins/covey_plan/tests/test_agreement"),
    "episodes": (
        "../plugins/covey_envs/tests/test_off_policy_episodes", "../plugins/covey_envs/tests/test_training",
    ),
}  # fmt: skip
"""Files whose runs have one model and the same sizes, as those of `faults/small_run.txt` or of `run/test_learners.py`:
one worker runs them all, and they share the programs of `shared_programs`.
"""
TOGETHER = {os.path.normpath(f"tests/{name}.py"): group for group, names in ALIKE.items() for name in names}
forgotten = [time.monotonic()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warn in the summary when the tests with a browser were skipped: a green run says nothing about them."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = {where[2] for where in skipped if isinstance(where, tuple)}
    for reason in sorted(reason for reason in reasons if "no browser for the tests of the report" in reason):
        terminalreporter.section("WARNING: the report was not tested in a browser", yellow=True, bold=True)
        terminalreporter.line(reason, yellow=True)
        terminalreporter.line("Install chromium (Debian: apt-get install chromium) and the dev extra.", yellow=True)


LONG = (
    "small runs", "plugins/covey_hosts/tests/test_processes.py", "tests/e2e/test_tiny.py", "tests/test_benchmarks.py",
    "tests/rl/test_cluster.py", "learning", "tests/rl/test_invariance.py", "learners",
    "tests/docs/test_blocks.py",
)  # fmt: skip
"""Files of more than 30 seconds of processor time."""


def together(file: str) -> str:
    """Return the name of the files that share their programs with this one, or its own."""
    return TOGETHER.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long before all others: one that begins last would leave a core without work."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(together(item.nodeid.partition("::")[0]), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make the scheduler of `--dist loadfile`, which gives files that share programs to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # late: the plugin may be missing

    class TogetherScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    return TogetherScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def forgotten_behind_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """What JAX keeps of their programs. Late in a suite its caches would be full, so that it compiles over and over,
    and the collector would look through all of it again and again: three quarters of the time. Files that share their
    programs keep them.
    """
    yield
    if request.node.nodeid in TOGETHER or time.monotonic() < forgotten[-1] + KEPT:
        return
    forgotten[:] = [time.monotonic()]
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def variables_restored_behind_files() -> Iterator[None]:
    """A plan and a dry run set variables for the rest of their process: behind one of them in a test, no process that a
    test starts would find the programs that others have compiled.
    """
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in (before.keys() | after.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif after.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="module")
def small_scratch() -> Iterator[None]:
    """Models from scratch have a layer of width 32 in this file, which is about other things than what they learn."""
    from covey.models.scratch import SCRATCH_MODELS

    with pytest.MonkeyPatch.context() as patch:
        for name, spec in SCRATCH_MODELS.items():
            patch.setitem(SCRATCH_MODELS, name, dataclasses.replace(spec, hidden_size=32, num_layers=1))
        yield


# --- programs that runs of one file share


class UnlikeAnyError(Exception):
    """A function cannot be compared with others: it closes over arrays or over objects that change."""


def likeness(x: Any) -> Any:
    """Return a value that is equal for functions which compute the same: of their code and of all they close over.

    Raises:
        UnlikeAnyError: there is no such value.
    """
    import jax

    if isinstance(x, jax.Array | jax.core.Tracer | np.ndarray):
        raise UnlikeAnyError
    if isinstance(x, functools.partial):
        return "partial", likeness(x.func), likeness(x.args), likeness(x.keywords)
    if isinstance(x, types.MethodType):
        return "method", likeness(x.__func__), likeness(x.__self__)
    if isinstance(x, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
        return "function", x.__code__, *map(likeness, (cells, x.__defaults__, x.__kwdefaults__))
    if isinstance(x, set):
        return "set", frozenset(map(likeness, x))
    if type(x).__name__ == "PjitFunction":
        return "jitted", x  # those that compute the same are one
    leaves, tree = jax.tree.flatten(x)
    if not leaves or leaves[0] is not x:
        return "tree", tree, *map(likeness, leaves)
    if type(x).__hash__ not in (None, object.__hash__) or isinstance(x, type | types.ModuleType):
        return type(x), x
    if type(x).__module__.startswith("covey."):
        return type(x), likeness(vars(x))
    raise UnlikeAnyError


MADE: dict[str, dict[Any, Any]] = {}
"""Jitted functions by their likeness, by the files that share them."""


@pytest.fixture(scope="module")
def shared_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of this file, and of those `together` with it, share their programs: a function like one before is not
    traced and compiled again, which is most of the time of a short run. Not for files that patch what programs compute,
    or that count what is compiled.
    """
    import jax

    jit, made = jax.jit, MADE.setdefault(together(request.node.nodeid), {})

    def jit_once(*function: Callable[..., Any], **options: Any) -> Any:
        try:
            key = likeness((function, options))
            known = key in made
        except (UnlikeAnyError, TypeError, ValueError, RecursionError):
            return jit(*function, **options)
        if not known:
            made[key] = jit(*function, **options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit_once)
        yield


# The first example of a test may compile, so no deadline. CI draws the same examples each time.
hypothesis.settings.register_profile("covey", max_examples=50, deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("covey")

TESTS = Path(__file__).parent / "tests"
GOLDEN = TESTS / "parity" / "golden"
GEMMA_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def made_by() -> Callable[..., list[Any]]:
    """`made_by(learner, prompts, take, step=0)`: the micro-batches of a step, by the stages of `Learner.steps`."""

    def make(learner: Any, prompts: Sequence[Any], take: Callable[[int], Sequence[Any]], step: int = 0) -> list[Any]:
        from covey.rl.metrics import StepStats
        from covey.rl.step_data import prompt_batches

        learner.step, learner.stats = step, StepStats()
        size = len(prompts) if learner.algorithm.needs_whole_step else learner.sizes.rollout_batch_size
        parts = prompt_batches(prompts, step, size, take)
        return list(learner.make_batches(map(learner.rollout, parts)))

    return make


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GSM8K; one question of the training set is far too long."""
    folder = tmp_path_factory.mktemp("gsm8k")
    ask = lambda n: {"question": f"{n}+{n}?", "answer": f"{n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}  # noqa: E731
    long = {"question": "How many? " * 200, "answer": "#### 1"}
    for name, rows in (("train", [*map(ask, range(1, 12)), long]), ("test", list(map(ask, range(20, 26))))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def need_family(config: dict[str, Any]) -> None:
    """Skip the test where the family of a config is hidden."""
    if config["model_type"] in ("phi3", "olmo2", "smollm3", "nanochat"):
        pytest.importorskip("covey_families")


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """`write_checkpoint(place, family, layers=2, words=())`: a folder in `place` of a tiny random model of the family,
    with a tokenizer that can spell and has each of `words` as a token.
    """

    def write(place: Path, family: str, layers: int = 2, words: tuple[str, ...] = ()) -> Path:
        described = json.loads((GOLDEN / "families.json").read_text())[family]
        need_family(described["config"])
        folder = place / family
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


@pytest.fixture
def checkpoint(tmp_path: Path, write_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`checkpoint(family, layers=2, words=())` in the folder of the test."""
    return functools.partial(write_checkpoint, tmp_path)


# --- golden models


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
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
        need_family(described["config"])
        (folder / "config.json").write_text(json.dumps(described["config"]))
        words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
        tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
        tensors = {key: golden_weight(key, tuple(shape)) for key, shape in described["shapes"].items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def golden_model(golden_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """`golden_model(name)` → that checkpoint as `weights.load` returns it, loaded once: tests do not change it."""
    from covey.models.loading import weights

    return functools.cache(lambda name: weights.load(golden_folder(name)))


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

    @functools.partial(jax.jit, static_argnums=(0, 4))
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


# --- models and groups that tests of losses, packing and rl share


@pytest.fixture
def decoder() -> Callable[..., Any]:
    """`decoder(lora=0, layers=2, **switches)`: always the same random weights; adapters with a B that is not zero."""
    from flax import nnx

    from covey.config.schema import LoRAConfig
    from covey.models.config import ModelConfig
    from covey.models.decoder import Decoder
    from covey.models.lora import with_lora

    config = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        tie_embeddings=True, windows=(None, 6), final_softcap=30.0,
    )  # fmt: skip

    def make(lora: int = 0, layers: int = 2, **switches: Any) -> Decoder:
        cut = dataclasses.replace(config, num_layers=layers, windows=(None, 6)[:layers])
        model = Decoder(cut, rngs=nnx.Rngs(0), **switches)
        if lora:
            model = with_lora(model, LoRAConfig(rank=lora))
            noise = np.random.default_rng(5)
            for layer in model.layers:
                for linear in (layer.attn.q_proj, layer.mlp.down_proj):
                    linear.lora.b[...] = noise.normal(size=linear.lora.b.shape, scale=0.05).astype(np.float32)
        return model

    return make


@pytest.fixture
def groups_of() -> Callable[..., Any]:
    """`groups_of([(prompt length, [completion lengths])], seed=0)`: random tokens."""
    from covey.types import Completion, FinishReason, Group

    def make(shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> list[Group]:
        rng = np.random.default_rng(seed)
        draw = lambda n: rng.integers(0, 300, n).astype(np.int32)  # noqa: E731
        logps = lambda n: -rng.random(n).astype(np.float32)  # noqa: E731
        return [
            Group("p", draw(p), tuple(Completion(draw(n), logps(n), logps(n), FinishReason.STOP) for n in sizes))
            for p, sizes in shapes
        ]

    return make


@pytest.fixture
def inputs_for() -> Callable[..., Any]:
    """`inputs_for(rows, lengths, ref=True)`: random advantages, references and the weights of the sequence mean."""
    from covey.losses.policy import LossInputs, sequence_mean
    from covey.packing.rows import Rows, scatter_to_rows

    def make(rows: Rows, lengths: Sequence[int], ref: bool = True) -> LossInputs:
        rng = np.random.default_rng(1)
        advantages = rng.normal(size=len(lengths))
        sampled = [rng.normal(size=n) - 5 for n in lengths]
        references = [rng.normal(size=n) - 5 for n in lengths]
        weights, _ = sequence_mean(np.array(lengths), max(lengths))
        return LossInputs(
            advantage=scatter_to_rows(rows, list(map(np.full, lengths, advantages))),
            weight=scatter_to_rows(rows, list(map(np.full, lengths, weights))),
            rollout_logps=scatter_to_rows(rows, sampled),
            beta=np.full((len(rows.tokens), 1), 0.04, np.float32),
            ref_logps=scatter_to_rows(rows, references) if ref else None,
        )

    return make


# --- checkpoints


@pytest.fixture(scope="session")
def write_meta() -> Callable[[Path, str], None]:
    """`write_meta(step, text)` replaces the meta.json of a checkpoint, and its digest."""

    def write(step: Path, text: str) -> None:
        (step / "meta.json").write_text(text)
        lines = [line for line in (step / "SHA256SUMS").read_text().splitlines() if not line.endswith("  meta.json")]
        lines.append(f"{hashlib.sha256(text.encode()).hexdigest()}  meta.json")
        (step / "SHA256SUMS").write_text("\n".join(lines))

    return write


# --- a bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A Cloud Storage server on this machine, and the variables by which it is found; `address` is that of a bucket."""
    kind = runpy.run_path(str(TESTS / "fake_gcs.py"))["FakeGcs"]
    with kind() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
