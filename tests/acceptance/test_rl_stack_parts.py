"""The parts that the RL stack stands on: queue, trainer, numeric helpers, resharding."""

import io
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from covey.config.schema import GRPOConfig, SFTConfig
from covey.errors import CoveyError
from covey.models.attention import masked_attention
from covey.monitor.progress import Progress
from covey.parallel import Transfer, flatten, make_mesh, mesh_of, reshard
from covey.rl import helpers
from covey.rl.run_ahead import Closed, DataQueue, Ended
from covey.sft.learner import SFTLearner
from covey.train.checkpoint import Checkpointer
from covey.train.trainer import MicroBatch, Trainer
from covey.types import Mean

LIMIT = 10.0


def on(*devices: int) -> Any:
    return make_mesh((len(devices),), ("fsdp",), [jax.devices()[i] for i in devices])


# The data queue


def in_a_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """What `call` returns or raises, once it does."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(call())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


def test_the_queue_is_typed_bounded_and_in_order() -> None:
    queue = DataQueue[int](2)
    queue.put(1)
    queue.put(2)
    thread, _ = in_a_thread(lambda: queue.put(3))
    thread.join(0.05)
    assert thread.is_alive()
    assert len(queue) == 2
    assert [queue.get(), queue.get(), queue.get()] == [1, 2, 3]


def test_the_end_marker_comes_behind_what_was_put() -> None:
    queue = DataQueue[int](1)
    queue.put(1)
    queue.end()
    assert list(queue) == [1]
    with pytest.raises(Ended):
        queue.get()


@pytest.mark.parametrize(("held", "call", "outcome"), [(1, "put", Closed), (0, "get", Ended)])
def test_close_empties_the_queue_so_that_nothing_blocks(held: int, call: str, outcome: type) -> None:
    queue = DataQueue[int](1)
    for item in range(held):
        queue.put(item)
    thread, came = in_a_thread(partial(getattr(queue, call), *[7] * held))
    thread.join(0.05)
    assert thread.is_alive()
    queue.close()
    thread.join(LIMIT)
    assert [type(x) for x in came] == [outcome]
    assert len(queue) == 0


# The trainer


def toy(graph: Any, params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Nothing to do with language, and fast to compile."""
    weight = sum(leaf.ravel()[0] for leaf in jax.tree.leaves(params))
    return weight * jnp.sum(jax.tree.leaves(batch)[0]), {"kl": Mean(weight, 1.0), "odd": Mean(jnp.float32(3), 1.0)}


@pytest.fixture
def trainer(decoder: Callable) -> Callable[..., Trainer]:
    """`trainer(*micro_batches, lora=0)`: after one update on them."""

    def make(*micro_batches: list[float], lora: int = 0) -> Trainer:
        made = Trainer(decoder(lora), optax.sgd(0.1, momentum=0.9), toy)
        made.update(MicroBatch(np.array(batch, np.float32), float(len(batch))) for batch in micro_batches)
        return made

    return make


@pytest.mark.slow
def test_the_trainer_trains_adapters_alone_where_there_are_any(trainer: Callable, decoder: Callable) -> None:
    made, start = trainer([1.0], lora=2), flatten(nnx.state(decoder(2)))
    changed = {name for name, x in flatten(made.params).items() if not np.array_equal(x, start[name])}
    assert changed == {name for name in start if ".lora." in name}


@pytest.mark.slow
def test_the_trainer_accumulates_gradients_and_divides_once(trainer: Callable, decoder: Callable) -> None:
    """(1 + 2 + 6) / 3 from micro-batches of 2 and 1: the mean of their means would be 3.75."""
    made, start = trainer([1.0, 2.0], [6.0]), flatten(nnx.state(decoder()))
    for name, x in flatten(made.params).items():
        assert float(start[name].ravel()[0] - x.ravel()[0]) == pytest.approx(0.1 * 3.0, rel=1e-5)


@pytest.mark.slow
def test_the_trainer_goes_into_a_checkpoint_and_comes_out_of_it(trainer: Callable, tmp_path: Path) -> None:
    made, other = trainer([5.0]), trainer([1.0])
    with Checkpointer(tmp_path) as saves:
        saves.save(1, made.state())
        state, _ = saves.restore(target=other.state())
    other.load_state(state, 1)
    for resumed in (made, other):
        resumed.update([MicroBatch(np.ones(2, np.float32), 2.0)])
    assert jax.tree.all(jax.tree.map(np.array_equal, made.state(), other.state()))
    assert made.step == other.step == 2


@pytest.mark.slow
def test_supervised_training_evaluates_and_logs_and_shows_chosen_values_of_the_loss(
    decoder: Callable, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sgd: Any = optax.sgd(0.1)
    config = SFTConfig(optimizer=sgd, batch_size=2, max_steps=2, row_length=64, eval_every_n_steps=2, show=("odd",))
    made = SFTLearner(model=decoder(), tokenizer=tokenizer, config=config, loss_fn=toy)
    rows = [{"prompt": "a", "completion": f"word {i}"} for i in range(4)]
    made.train(rows, rows)
    first, second = capsys.readouterr().out.splitlines()
    assert "odd 3" in first
    assert "kl" not in first
    assert "eval/loss" not in first
    assert "eval/loss" in second


@pytest.mark.slow
def test_actor_and_critic_are_trained_by_the_supervised_trainer(judged: Any) -> None:
    judged.prepare(GRPOConfig(algorithm="ppo", num_generations=1), 1)
    assert type(judged.trainer) is type(judged.critic_trainer) is Trainer


@pytest.mark.slow
def test_the_rl_trainer_logs_chosen_values_out_of_the_loss(bench: Any) -> None:
    for record in bench.train():
        assert {"loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean"} <= record.metrics.keys()


def test_the_progress_line_shows_the_chosen_ones() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    with Progress(2, console, show=("kl", "entropy")) as progress:
        progress.step({"step": 1, "reward": 0.5, "kl": 0.01, "entropy": 2.0, "loss": 9.0})
    assert console.file.getvalue().split()[2:] == ["reward", "0.500", "kl", "0.0100", "entropy", "2.0000"]


def test_an_rl_run_chooses_what_its_line_shows(played: Callable, capsys: Any) -> None:
    made = played(prompts=2, show=("kl",))
    made.learner(observers=None).train(made.loader(2))
    assert "kl 0" in capsys.readouterr().out


# Numeric helpers


def test_selective_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 7))
    index = np.array([[0, 6, 3], [2, 2, 5]])
    want = np.take_along_axis(np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)), index[..., None], -1)
    np.testing.assert_allclose(helpers.selective_log_softmax(logits, index), want[..., 0], rtol=1e-5)


@pytest.mark.slow
def test_per_token_log_probs_over_the_last_positions(base: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, (2, 9))
    mask = np.ones((2, 9), bool)
    positions, causal = helpers.build_positions_from_mask(mask), helpers.make_causal_attn_mask(mask)

    @jax.jit
    def both() -> tuple[jax.Array, jax.Array]:
        hidden, _ = base(tokens, positions, masked_attention(causal, positions))
        every = jax.nn.log_softmax(base.logits(hidden[:, 4:-1]))
        return helpers.get_per_token_logps(base, tokens, positions, causal, logits_to_keep=4), every

    got, every = both()
    np.testing.assert_allclose(got, np.take_along_axis(every, tokens[:, 5:, None], -1)[..., 0], atol=1e-5)


def test_completion_mask_is_1_up_to_and_including_the_first_eos() -> None:
    EOS = 2
    assert helpers.make_completion_mask(np.array([[42, 17, 9, EOS, 0, 0]]), EOS).tolist() == [[1, 1, 1, 1, 0, 0]]


def test_causal_mask_from_an_input_mask() -> None:
    got = helpers.make_causal_attn_mask(np.array([[0, 1, 1]])).astype(int).tolist()
    assert got == [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]


@pytest.mark.parametrize(
    ("left", "axis", "want"),
    [(False, -1, [[1, 2, 9], [3, 4, 9]]), (True, 1, [[9, 1, 2], [9, 3, 4]]), (True, 0, [[9, 9], [1, 2], [3, 4]])],
)
def test_pad_to_length_left_or_right_along_any_axis(left: bool, axis: int, want: list[list[int]]) -> None:
    assert helpers.pad_to_length(np.array([[1, 2], [3, 4]]), 3, 9, left, axis).tolist() == want


def test_positions_are_the_cumulative_mask_minus_1_floor_0() -> None:
    assert helpers.build_positions_from_mask(np.array([[0, 0, 1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1, 2, 2]]


def test_group_advantage() -> None:
    got = helpers.compute_advantages(np.array([1.0, 3.0, 5.0, 5.0]), num_generations=2)
    np.testing.assert_allclose(got, [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0, 0])


# Resharding


def tree() -> dict[str, Any]:
    return {"a": {"kernel": jnp.arange(32.0).reshape(8, 4)}, "b": [jnp.arange(8, dtype=jnp.bfloat16)]}


def test_resharding_moves_any_tree_to_the_shardings_of_a_target_tree() -> None:
    target = jax.device_put(tree(), NamedSharding(on(2, 3), P("fsdp")))
    moved = reshard(tree(), target)
    assert jax.tree.all(jax.tree.map(lambda x, to: x.sharding == to.sharding, moved, target))
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, tree()))


def test_resharding_may_donate_the_source() -> None:
    source = jax.device_put(tree(), NamedSharding(on(0, 1), P()))
    kept = reshard(source, NamedSharding(on(2, 3), P()))
    assert not any(x.is_deleted() for x in jax.tree.leaves(source))
    moved = reshard(source, NamedSharding(on(2, 3), P()), donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(source))
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, kept))


@pytest.mark.parametrize("fails", [False, True])
def test_resharding_reports_when_done_or_failed_and_how_long_it_took_without_blocking_the_caller(fails: bool) -> None:
    """The report waits for the caller to go on: were it made in the caller's thread, that would be never."""
    went_on, reported, seen = threading.Event(), threading.Event(), list[tuple[Transfer, bool]]()

    def report(transfer: Transfer) -> None:
        seen.append((transfer, went_on.wait(2)))
        reported.set()

    wrong = NamedSharding(on(0, 1), P("fsdp"))
    try:
        reshard({"x": jnp.zeros(3)}, wrong if fails else SingleDeviceSharding(jax.devices()[1]), on_done=report)
    except ValueError:
        assert fails
    went_on.set()
    assert reported.wait(LIMIT)
    ((transfer, caller_was_free),) = seen
    assert (transfer.error is not None) == fails
    assert 0 < transfer.seconds < LIMIT
    assert caller_was_free


@pytest.mark.parametrize("installed", [True, False])
def test_resharding_uses_the_pathways_resharder_when_one_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    calls: list[dict[str, Any]] = []
    top, inner = ModuleType("pathwaysutils"), ModuleType("pathwaysutils.experimental.reshard")
    top.__spec__ = ModuleSpec("pathwaysutils", None)
    top.is_pathways_backend_used = lambda: True  # type: ignore[attr-defined]
    inner.reshard = lambda x, to, **given: calls.append(given) or jax.device_put(x, to)  # type: ignore[attr-defined]
    for module in (top, ModuleType("pathwaysutils.experimental"), inner) if installed else ():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    moved = reshard(tree(), NamedSharding(on(2, 3), P()), donate=True)
    assert mesh_of(moved) == on(2, 3)
    assert calls == ([{"donate": True}] if installed else [])


def test_a_parameter_tree_is_flattened_to_a_dict_by_path() -> None:
    assert list(flatten(tree())) == ["a.kernel", "b.0"]


def test_the_one_mesh_of_a_tree_is_found_and_more_than_one_is_an_error() -> None:
    placed = [jax.device_put(jnp.zeros(4), NamedSharding(mesh, P())) for mesh in (on(0, 1), on(2, 3))]
    assert mesh_of({"x": placed[0], "y": placed[0]}) == on(0, 1)
    with pytest.raises(CoveyError, match="2 meshes"):
        mesh_of(placed)
