"""The learning rate of each step by hand, AdamW and Muon against float64 NumPy, groups of parameters with learning
rates of their own, and small steps on bfloat16 weights.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig, OptimizerConfig
from covey.errors import RecipeError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import split_trainable, with_lora
from covey.models.value_model import make_value_model
from covey.parallel.arrays import flatten, optimizer_shardings, reshard, shardings
from covey.parallel.mesh import make_mesh
from covey.train import optimizers
from covey.train.checkpoint import Checkpointer
from covey.train.optimizers import (
    PARAM_GROUPS,
    ScheduledOptimizer,
    decayed,
    learning_rate,
    make_optimizer,
    param_group,
)
from covey.train.programs import UpdatePrograms
from covey.train.trainer import Trainer

STEADY = OptimizerConfig(learning_rate=0.1, warmup_ratio=0.0, schedule="constant", max_grad_norm=0.0)


def rates(config: OptimizerConfig, steps: int, count: int | None = None) -> list[float]:
    rate = learning_rate(config, steps)
    return [float(rate(n)) for n in range(steps if count is None else count)]


# --- learning rate

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("settings", "steps", "wanted"),
    [
        (
            {"learning_rate": 8.0, "warmup_ratio": 0.3, "schedule": "linear"}, 10,
            dict(enumerate([2.0, 4.0, 6.0, 8.0, *(8 * left / 7 for left in range(6, -1, -1)), 0.0])),
        ),
        (
            {"learning_rate": 1.0, "warmup_ratio": 0.2, "schedule": "cosine"}, 5,
            dict(enumerate([0.5, 1.0, (1 + ROOT) / 2, 0.5, (1 - ROOT) / 2, 0.0])),
        ),
        (
            {"learning_rate": 1.0, "warmup_ratio": 0.5, "schedule": "constant"}, 4,
            dict(enumerate([1 / 3, 2 / 3, 1.0, 1.0])),
        ),
        # 0.1 · 30 is 3.0000000000000004 in binary: rounding up would make it a warm-up of 4.
        ({"learning_rate": 1.0, "warmup_ratio": 0.1, "schedule": "constant"}, 30, {3: 1.0}),
        # Gemma's recipe: a tenth is warm-up; half of the peak half-way down the cosine.
        (
            {"learning_rate": 3e-6, "warmup_ratio": 0.1}, 3738,
            {0: 3e-6 / 375, 373: 3e-6 * 374 / 375, 374: 3e-6, (374 + 3738) // 2: 1.5e-6, 3738: 0.0},
        ),
        # nanochat's: linear to 0 without warm-up is 1 − n/N; all of it at a twentieth.
        (
            {"learning_rate": 0.02, "warmup_ratio": 0.0, "schedule": "linear", "initial_fraction": 0.05}, 467,
            {n: 0.001 * (1 - n / 467) for n in range(467)},
        ),
    ],
    ids=["linear", "cosine", "constant", "rounded", "gemma", "nanochat"],
)  # fmt: skip
def test_rates_by_hand(settings: dict[str, Any], steps: int, wanted: dict[int, float]) -> None:
    rate = learning_rate(OptimizerConfig(**settings), steps)
    found = [float(rate(n)) for n in wanted]
    np.testing.assert_allclose(found, list(wanted.values()), rtol=1e-6, atol=1e-7 * settings["learning_rate"])


def test_a_trainer_tells_the_rate_of_its_last_update() -> None:
    """Also of one that was skipped; a ready transformation hides it."""
    config = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.0, schedule="linear", vector_learning_rate=9.0)
    for optimizer, wanted in ((make_optimizer(config, 4), 0.75), (optax.sgd(0.1), math.nan)):
        trainer = Trainer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optimizer, lambda *_: None)  # type: ignore[arg-type, return-value]
        trainer.skip()
        trainer.skip()
        assert trainer.last_learning_rate == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("more", [{}, {"kind": "muon", "vector_learning_rate": 1e-3}])
def test_a_run_of_another_length_makes_its_updates_by_the_same_program(schedule: Any, more: dict[str, Any]) -> None:
    """The trap: the length as a constant of the program, which each other `max_steps` compiled anew."""
    config = OptimizerConfig(warmup_ratio=0.1, schedule=schedule, **more)
    model = nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    texts = set()
    for steps, peak in ((20, 1e-3), (30, 1e-3), (30, 2e-3)):
        optimizer = make_optimizer(dataclasses.replace(config, learning_rate=peak), steps)
        programs = UpdatePrograms(model, optimizer, lambda *_: None)  # type: ignore[arg-type, return-value]
        weights, rates = programs.trainable, dict.fromkeys(programs.learning_rates(0), 1.0)
        shapes = weights, programs.init(weights), jax.eval_shape(programs.zeros, weights), 1.0, rates
        texts.add(programs.apply.lower(*shapes).as_text())
    assert len(texts) == 1


# --- AdamW


def adamw_in_numpy(
    params: dict[str, np.ndarray], grads: list[dict[str, np.ndarray]], c: OptimizerConfig, rate: list[float]
) -> dict[str, np.ndarray]:
    """Loshchilov & Hutter (2019), algorithm 2, in float64; `kernel` is decayed, the others are not."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    for t, step in enumerate(grads, 1):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in step.values()))
        scale = min(1.0, c.max_grad_norm / norm) if c.max_grad_norm else 1.0
        for name in p:
            g = step[name].astype(np.float64) * scale
            m[name] = c.b1 * m[name] + (1 - c.b1) * g
            v[name] = c.b2 * v[name] + (1 - c.b2) * g * g
            direction = (m[name] / (1 - c.b1**t)) / (np.sqrt(v[name] / (1 - c.b2**t)) + c.eps)
            decay = c.weight_decay * p[name] if name == "kernel" else 0.0
            p[name] = p[name] - rate[t - 1] * (direction + decay)
    return p


def train(optimizer: optax.GradientTransformation, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    return resumed(optimizer, params, optimizer.init(params), 0, grads)


def resumed(
    optimizer: optax.GradientTransformation, params: Any, state: Any, made: int, grads: list[Any]
) -> tuple[Any, Any]:
    """Weights and state behind the updates of `grads`, after `made` others."""

    @jax.jit
    def apply(grads: Any, state: Any, params: Any, rates: dict[str, Any]) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, **rates)
        return optax.apply_updates(params, updates), state

    scheduled = isinstance(optimizer, ScheduledOptimizer)
    for number, step in enumerate(grads, made):
        rates = {"learning_rates": optimizer.learning_rates(number)} if scheduled else {}
        params, state = apply(step, state, params, rates)
    return params, state


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1e6], ids=["off", "clips", "does not clip"])
def test_steps_against_float64(max_grad_norm: float) -> None:
    config = OptimizerConfig(
        learning_rate=1e-2, weight_decay=0.1, warmup_ratio=0.25, schedule="linear", max_grad_norm=max_grad_norm
    )
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 4), "bias": (4,), "scale": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    grads = [{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(8)]
    grads[3]["kernel"] *= 50  # one step stands out: the clip must see all leaves together
    expected = adamw_in_numpy(params, grads, config, rates(config, 8))
    moved, _ = train(make_optimizer(config, 8), jax.tree.map(jnp.asarray, params), grads)
    for name in shapes:
        np.testing.assert_allclose(moved[name], expected[name], rtol=2e-5, atol=1e-7)


def test_decayed_are_matrices_by_rank_and_name() -> None:
    params = {
        "embed": {"embedding": jnp.zeros((5, 2))},
        "layers": [{"norm": {"scale": jnp.zeros(2)}, "q_proj": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}}],
        "stacked": {"norm": {"scale": jnp.zeros((3, 2))}, "q_proj": {"kernel": jnp.zeros((3, 2, 2))}},
        "lora": {"a": jnp.zeros((2, 1)), "b": jnp.zeros((1, 2))},
    }
    chosen = {name for name, yes in flatten(decayed(params)).items() if yes}
    assert chosen == {"embed.embedding", "layers.0.q_proj.kernel", "stacked.q_proj.kernel", "lora.a", "lora.b"}


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "muon")])
def test_state_of_nnx_trains_like_the_plain_dict(dtype: str, kind: Any) -> None:
    model = nnx.Linear(3, 2, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    state = nnx.split(model)[1]
    plain = nnx.to_pure_dict(state)
    grads = jax.tree.map(jnp.ones_like, plain)
    config = dataclasses.replace(STEADY, weight_decay=0.5, kind=kind)
    moved_plain, memory_plain = train(make_optimizer(config, 3), plain, [grads] * 3)
    moved, memory = train(make_optimizer(config, 3), state, [jax.tree.map(jnp.ones_like, state)] * 3)
    assert flatten(moved).keys() == flatten(moved_plain).keys()
    assert flatten(memory).keys() == flatten(memory_plain).keys()
    for name, leaf in flatten(moved).items():
        np.testing.assert_array_equal(leaf, flatten(moved_plain)[name])


def test_names_in_the_state_do_not_change_when_the_clip_is_switched_off() -> None:
    params = {"kernel": jnp.zeros((2, 2), jnp.bfloat16), "bias": jnp.zeros(2)}
    names = [flatten(make_optimizer(dataclasses.replace(STEADY, max_grad_norm=n), 9).init(params)) for n in (0, 1)]
    assert names[0].keys() == names[1].keys()


def test_a_ready_transformation_passes_through() -> None:
    theirs = optax.sgd(0.1)
    assert make_optimizer(theirs, 10) is theirs


# --- kinds of parameters

TINY = ModelConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    attention_bias=True,
)  # fmt: skip
APART = dataclasses.replace(
    STEADY,
    learning_rate=0.02,
    embedding_learning_rate=0.2,
    unembedding_learning_rate=0.004,
    vector_learning_rate=0.01,
    initial_fraction=0.05,
    eps=1e-12,
)
MUON = dataclasses.replace(APART, kind="muon")
SHAPES = {
    "embed": {"embedding": (16, 4)},
    "layers": [{"attn": {"q_proj": {"kernel": (4, 8), "bias": (8,)}}, "attn_norm": {"scale": (4,)}}],
    "head": {"embedding": (16, 4)},
}
OF_KIND = {
    "embed.embedding": "embedding",
    "head.embedding": "unembedding",
    "layers.0.attn.q_proj.kernel": "matrix",
    "layers.0.attn.q_proj.bias": "vector",
    "layers.0.attn_norm.scale": "vector",
}


def tree(seed: int = 0, dtype: str = "float32") -> Any:
    """Random numbers in the form of a model's parameters."""
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), dtype), SHAPES, is_leaf=is_shape)


def kinds(state: Any) -> dict[str, str]:
    return flatten(jax.tree_util.tree_map_with_path(param_group, state))


def test_every_parameter_has_its_kind() -> None:
    def model(lora: int = 0, **switches: Any) -> Any:
        config = dataclasses.replace(TINY, **switches)

        def build() -> Any:
            decoder = Decoder(config, rngs=nnx.Rngs(0))
            return with_lora(decoder, LoRAConfig(rank=lora)) if lora else decoder

        return split_trainable(nnx.eval_shape(build))[1]

    found = kinds(model())
    assert set(found.values()) == set(PARAM_GROUPS)
    assert (found["embed.embedding"], found["head.embedding"]) == ("embedding", "unembedding")
    ends = {"kernel": "matrix", "scale": "vector", "bias": "vector"}
    assert all(kind == ends.get(name.split(".")[-1], kind) for name, kind in found.items())
    assert "unembedding" not in kinds(model(tie_embeddings=True)).values()
    assert set(kinds(model(lora=2)).values()) == {"matrix"}
    critic = nnx.eval_shape(lambda: make_value_model(Decoder(TINY, rngs=nnx.Rngs(0)), share=True))
    assert kinds(split_trainable(critic)[1])["score"] == "vector"
    assert kinds(split_trainable(critic)[1])["decoder.embed.embedding"] == "embedding"


def test_each_kind_moves_at_its_own_rate() -> None:
    """AdamW's first step is the rate times the gradient's sign; a twentieth of each peak."""
    start, grads = tree(), tree(1)
    moved, _ = train(make_optimizer(APART, 10), start, [grads])
    peaks = {"matrix": 0.02, "embedding": 0.2, "unembedding": 0.004, "vector": 0.01}
    steps = flatten(jax.tree.map(lambda a, b, g: (a - b) * jnp.sign(g), start, moved, grads))
    assert kinds(start) == OF_KIND
    for name, kind in OF_KIND.items():
        np.testing.assert_allclose(steps[name], 0.05 * peaks[kind], rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_kind_decays_by_its_own_weight_decay(kind: Any) -> None:
    """An update takes rate times decay times weight, besides the step along the gradient."""
    still = dataclasses.replace(STEADY, kind=kind, learning_rate=0.1)
    decaying = dataclasses.replace(still, weight_decay=0.5, embedding_weight_decay=0.0, unembedding_weight_decay=2.0)
    start = tree()
    plain, moved = (train(make_optimizer(config, 10), start, [tree(1)])[0] for config in (still, decaying))
    decays = {"matrix": 0.5, "embedding": 0.0, "unembedding": 2.0, "vector": 0.0}
    taken = flatten(jax.tree.map(lambda a, b: a - b, plain, moved))
    for name, group in OF_KIND.items():
        np.testing.assert_allclose(taken[name], 0.1 * decays[group] * flatten(start)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group", PARAM_GROUPS)
def test_a_weight_decay_of_its_own_acts_in_any_group(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common one leaves vectors out; a field `vector_weight_decay`, which there is not, would not."""
    still, start = dataclasses.replace(STEADY, learning_rate=0.1), tree()
    plain = train(make_optimizer(dataclasses.replace(still, embedding_learning_rate=0.1), 10), start, [tree(1)])[0]
    monkeypatch.setattr(optimizers, "_own_settings", lambda config, of: {"weight_decay": 2.0} if of == group else {})
    moved = train(make_optimizer(still, 10), start, [tree(1)])[0]
    taken = flatten(jax.tree.map(lambda a, b: a - b, plain, moved))
    for name, own in OF_KIND.items():
        expected = 0.1 * 2.0 * flatten(start)[name] * (own == group)
        np.testing.assert_allclose(taken[name], expected, rtol=1e-4, atol=1e-6)


def test_a_rate_that_is_not_set_is_the_common_one() -> None:
    start, grads = tree(), [tree(seed) for seed in range(1, 4)]
    config = dataclasses.replace(STEADY, learning_rate=0.02, weight_decay=0.1, max_grad_norm=1.0)
    plain, _ = train(make_optimizer(config, 3), start, grads)
    apart, _ = train(make_optimizer(dataclasses.replace(config, embedding_learning_rate=0.02), 3), start, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, apart)


def test_without_kinds_the_optimizer_is_the_one_of_old_checkpoints() -> None:
    """Bit for bit, and under the same names."""
    start, grads = tree(), [tree(seed) for seed in range(1, 4)]
    config = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    bare = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(config, 3), config.b1, config.b2, config.eps, weight_decay=0.1, mask=decayed),
    )
    ours, state = train(make_optimizer(config, 3), start, grads)
    theirs, theirs_state = train(bare, start, grads)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert set(flatten(state)) == {f"inner.{name}" for name in flatten(theirs_state)}


# --- Muon


def muon_in_numpy(start: np.ndarray, grads: list[np.ndarray], c: OptimizerConfig, rate: float) -> np.ndarray:
    """Jordan et al. (2024) in float64: Nesterov's momentum, five Newton-Schulz steps toward the nearest orthogonal
    matrix, √max(1, out/in); the momentum corrected for its start at zero, as optax has it.
    """
    p, m = start.astype(np.float64), np.zeros_like(start, np.float64)
    for t, g in enumerate(grads, 1):
        m = c.momentum * m + (1 - c.momentum) * g
        x = c.momentum * m / (1 - c.momentum ** (t + 1)) + (1 - c.momentum) * g / (1 - c.momentum**t)
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if start.shape[0] > start.shape[1] else x
        p = p - rate * (math.sqrt(max(1, start.shape[1] / start.shape[0])) * x + c.weight_decay * p)
    return p


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)], ids=["square", "wide", "tall"])
def test_muon_against_float64(shape: tuple[int, int]) -> None:
    """Of one matrix, and of each in a stack of layers."""
    config = dataclasses.replace(STEADY, kind="muon", weight_decay=0.1)
    rng = np.random.default_rng(0)
    start, *grads = ({"a": rng.normal(size=shape), "stack": rng.normal(size=(3, *shape))} for _ in range(5))
    as_arrays = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    moved, _ = train(make_optimizer(config, 9), as_arrays(start), [as_arrays(g) for g in grads])
    pairs = [(moved["a"], start["a"], [g["a"] for g in grads])]
    pairs += [(moved["stack"][n], start["stack"][n], [g["stack"][n] for g in grads]) for n in range(3)]
    for got, begun, each in pairs:
        np.testing.assert_allclose(got, muon_in_numpy(begun, each, config, 0.1), rtol=1e-3, atol=1e-4)


def test_muon_moves_matrices_alone() -> None:
    start, grads = tree(), [tree(seed) for seed in (1, 2)]
    muon, _ = train(make_optimizer(MUON, 10), start, grads)
    adamw, _ = train(make_optimizer(APART, 10), start, grads)
    same = jax.tree.map(np.array_equal, muon, adamw)
    assert {name: not alike for name, alike in flatten(same).items()} == {
        name: kind == "matrix" for name, kind in OF_KIND.items()
    }


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_muon_on_a_mesh_is_muon(mesh: tuple[int, int]) -> None:
    """And its momentum lies where the matrices do."""
    start, grads, optimizer = tree(), [tree(seed) for seed in (1, 2)], make_optimizer(MUON, 10)
    one, _ = train(optimizer, start, grads)
    many = reshard(start, shardings(start, make_mesh(mesh)))
    names, where = flatten(many), optimizer_shardings(optimizer, many)
    state = jax.jit(optimizer.init, out_shardings=where)(many)
    update = jax.jit(optimizer.update, out_shardings=(None, where))
    for number, step in enumerate(grads):
        updates, state = update(step, state, many, learning_rates=optimizer.learning_rates(number))
        many = optax.apply_updates(many, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, many)
    momentum = {name.split(".mu.")[1]: leaf for name, leaf in flatten(state).items() if ".mu." in name}
    assert momentum.keys() == names.keys()
    assert all(leaf.sharding == names[name].sharding for name, leaf in momentum.items())
    assert any(not leaf.sharding.is_fully_replicated for leaf in momentum.values())


@pytest.mark.slow
def test_muon_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Bit for bit; the weights are bfloat16, whose float32 copies are saved too."""
    start, optimizer = tree(dtype="bfloat16"), make_optimizer(MUON, 4)
    grads = [tree(seed) for seed in range(1, 5)]
    straight, _ = train(optimizer, start, grads)
    params, state = train(optimizer, start, grads[:2])
    with Checkpointer(tmp_path) as saves:
        saves.save(2, {"params": params, "opt_state": state})
        saved, _ = saves.restore(target={"params": params, "opt_state": state})
    params, _ = resumed(optimizer, saved["params"], saved["opt_state"], 2, grads[2:])
    jax.tree.map(np.testing.assert_array_equal, params, straight)


# --- types


def test_moments_are_float32_whatever_the_parameters() -> None:
    """optax.adamw alone keeps the second moment in the parameters' type: squares of gradients in 8 bits."""
    params = {"narrow": jnp.ones((2, 2), jnp.bfloat16), "half": jnp.ones((2, 2), jnp.float16), "wide": jnp.ones((2, 2))}
    moved, state = train(make_optimizer(STEADY, 2), params, [params, params])
    assert {name: leaf.dtype for name, leaf in moved.items()} == {name: leaf.dtype for name, leaf in params.items()}
    kept = {name: leaf for name, leaf in flatten(state).items() if leaf.ndim}
    assert {leaf.dtype for leaf in kept.values()} == {jnp.dtype("float32")}
    assert [name for name in kept if name.startswith("master")] == ["master.half", "master.narrow"]


def test_small_steps_move_bfloat16_weights() -> None:
    """300 steps of 1e-6 on weights near 0.02, whose neighbours are 1e-4 apart: each alone would be rounded away."""
    config = dataclasses.replace(STEADY, learning_rate=1e-6)
    start = jnp.full((2, 2), 0.02, jnp.bfloat16)
    grads = [jnp.array([[1.0, -1.0], [0.1, -3.0]])] * 300
    moved, _ = train(make_optimizer(config, 300), start, grads)
    wide, _ = train(make_optimizer(config, 300), start.astype(jnp.float32), grads)
    np.testing.assert_array_equal(moved, wide.astype(jnp.bfloat16))
    assert not np.any(np.asarray(moved == start))
    bare, _ = train(optax.adamw(1e-6), start, grads)
    np.testing.assert_array_equal(bare, start)  # the trap is real


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 10.0])
def test_narrow_weights_are_their_float32_copy_rounded(rate: float) -> None:
    config = dataclasses.replace(STEADY, learning_rate=rate, weight_decay=0.1)
    rng = np.random.default_rng(1)
    params = jnp.asarray(rng.normal(size=(64, 64)) * 10.0 ** rng.integers(-6, 4, size=(64, 64)), jnp.bfloat16)
    moved, state = train(make_optimizer(config, 3), params, [rng.normal(size=(64, 64)) for _ in range(3)])
    rounded = state.master.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(moved.astype(jnp.float32), rounded, rtol=1e-6, atol=2e-6 * rate)


# --- mistakes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", value) for value in (-1e-6, math.nan, math.inf, "1e-5")),
        *(("warmup_ratio", value) for value in (1.0, 100)),
        *(("initial_fraction", value) for value in (0.0, 1.5)),
        ("b1", 1.0), ("b2", -0.1), ("eps", 0.0), ("weight_decay", -0.1), ("max_grad_norm", -1.0),
        ("embedding_learning_rate", -1.0), ("momentum", 1.0), ("schedule", "cosin"), ("kind", "mun"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=field) as caught:
        make_optimizer(dataclasses.replace(OptimizerConfig(), **{field: value}), 10)
    assert repr(value) in str(caught.value)
    assert caught.value.want
    assert value != "cosin" or "did you mean 'cosine'" in str(caught.value)


@pytest.mark.parametrize("steps", [0, -3, 2.5])
def test_bad_total_steps(steps: Any) -> None:
    with pytest.raises(RecipeError, match="total_steps"):
        learning_rate(OptimizerConfig(), steps)
