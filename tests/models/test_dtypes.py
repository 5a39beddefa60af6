"""The type of the products follows the hardware; kernels rounded once for a call have the same bits as rounded in each
product, and nothing is copied that need not be.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, RolloutConfig
from covey.losses.logprobs import token_logps
from covey.models import dtypes
from covey.models.decoder import Decoder
from covey.models.dtypes import operand_type, resolve_compute_dtype, round_kernels, sampling_type
from covey.models.loading import weights
from covey.models.lora import projections, split_trainable, with_lora
from covey.models.value_model import make_value_model
from covey.packing.rows import Rows, pack
from covey.parallel.arrays import flatten
from covey.rl.rollout_worker import RolloutWorker
from covey.rl.scorers import RowScorer
from covey.sampling.engine import Engine, Request, generate
from covey.text.tokenizer import Tokenizer
from covey.train.trainer import MicroBatch, Trainer

BF16 = jnp.dtype("bfloat16")
TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"


@pytest.fixture
def rows(groups_of: Callable[..., Any]) -> Rows:
    """One row of a prompt with two completions."""
    return pack(groups_of([(5, [4, 6])]))


def kernel_types(state: Any) -> set[Any]:
    """The types of the kernels of projections."""
    return {x.dtype for name, x in flatten(state).items() if name.endswith(".kernel")}


@pytest.mark.slow
def test_only_kernels_are_rounded_and_the_rest_is_shared(decoder: Callable[..., Decoder]) -> None:
    frozen = split_trainable(decoder(2, compute_dtype="bfloat16"))[2]
    before, after = flatten(frozen), flatten(round_kernels(frozen, BF16))
    assert before.keys() == after.keys()
    assert kernel_types(round_kernels(frozen, BF16)) == {BF16}
    assert all(x is before[name] for name, x in after.items() if not name.endswith(".kernel"))


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_nothing_is_done_where_nothing_is_gained(decoder: Callable[..., Decoder], held: str) -> None:
    in_float32 = decoder(param_dtype=held)
    assert operand_type(in_float32) is None
    params = nnx.split(in_float32)[1]
    assert round_kernels(params, None) is params
    narrow = nnx.split(decoder(param_dtype="bfloat16", compute_dtype="bfloat16"))[1]
    rounded = round_kernels(narrow, BF16)
    assert all(x is y for x, y in zip(jax.tree.leaves(narrow), jax.tree.leaves(rounded), strict=True))


def test_on_accelerators_only_sampling_gets_rounded_kernels(decoder: Callable[..., Decoder]) -> None:
    model = decoder(compute_dtype="bfloat16")
    assert operand_type(make_value_model(model)) == operand_type(model) == BF16
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module) and hasattr(node, "platform"):
            node.platform = "cuda"
    assert operand_type(model) is None
    assert sampling_type(model) == BF16


@pytest.mark.slow
def test_log_probs_and_gradients_have_the_same_bits(
    decoder: Callable[..., Decoder], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(graph: Any, params: Any, rows: Rows) -> Any:
        seen.append(kernel_types(params))
        return token_logps(graph, params, rows, 1.0).logps.sum(), {}

    def compute() -> list[np.ndarray]:
        model = decoder(2, compute_dtype="bfloat16", remat=False)
        logps = RowScorer.of_logps(model, 1.0)(nnx.split(model)[1], rows, [4, 6], 1)[0]
        grads = Trainer(model, optax.sgd(1.0), loss).gradients([MicroBatch(rows, 10.0)])
        return [*logps, *map(np.asarray, jax.tree.leaves(grads.sums))]

    seen: list[set[Any]] = []
    got = compute()
    for module in ("covey.rl.scorers", "covey.train.programs"):
        monkeypatch.setattr(f"{module}.operand_type", lambda model: None)
    for new, old in zip(got, compute(), strict=True):
        np.testing.assert_array_equal(new, old)
    assert seen == [{BF16}, {jnp.dtype("float32")}]


@pytest.mark.slow
def test_the_sampler_gets_rounded_kernels_and_adapters(
    decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = RolloutConfig(max_new_tokens=2), []
    model = with_lora(decoder(compute_dtype="bfloat16"), LoRAConfig(rank=2))
    for linear in projections(model).values():
        linear.lora.b[...] = jnp.full_like(linear.lora.b[...], 0.3)
    worker = RolloutWorker(model, Tokenizer.from_folder(TINY), config)
    update = worker.engine.update_weights

    def noted(params: Any, version: int) -> None:
        adapters = {x.dtype for name, x in flatten(params).items() if ".lora." in name}
        seen.append((kernel_types(params), adapters, flatten(params)["head.embedding"].dtype))
        update(params, version)

    monkeypatch.setattr(worker.engine, "update_weights", noted)
    rounded = worker.generate(["b"], 2)[0].completions
    plain = Engine(worker.model, worker.engine.stop_ids, config)
    request = Request(np.asarray(worker.tokenizer.encode_prompt("b"), np.int32), 2, 0)
    (unrounded,) = generate(plain, [request])
    for got, want in zip(rounded, unrounded, strict=True):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.logps, want.logps)
    assert seen == [({BF16}, {BF16}, BF16)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`machine(platform, flags)`: a machine whose first device and whose processor's flags are these; None for no
    cpuinfo.
    """

    def make(platform: str, flags: str | None = "") -> None:
        file = tmp_path / "cpuinfo"
        if flags is not None:
            file.write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {flags}\nbugs\t\t: amx_bf16\n")
        monkeypatch.setattr(dtypes, "CPUINFO", file)
        monkeypatch.setattr(dtypes, "platform_of", lambda place: platform)

    return make


@pytest.mark.parametrize(
    ("platform", "flags", "chosen"),
    [
        ("cpu", "avx512f amx_bf16 amx_tile", "bfloat16"),
        ("cpu", "avx512_bf16", "bfloat16"),
        ("cpu", "avx512f avx512_bf16x", "float32"),
        ("cpu", None, "float32"),
        ("tpu", "", "bfloat16"),
        ("cuda", "", "bfloat16"),
        ("gpu", "amx_bf16", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_multiplies_it(
    machine: Any, platform: str, flags: str | None, chosen: str
) -> None:
    machine(platform, flags)
    assert resolve_compute_dtype("auto") == chosen


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_a_type_that_is_named_is_kept(machine: Any, given: str) -> None:
    for flags in ("amx_bf16", ""):
        machine("cpu", flags)
        assert resolve_compute_dtype(given) == given


def test_a_model_is_loaded_with_the_type_chosen(machine: Any) -> None:
    for flags, chosen in (("amx_bf16", "bfloat16"), ("", "float32")):
        machine("cpu", flags)
        assert weights.load(TINY, compute_dtype="auto").model.dtype == chosen
