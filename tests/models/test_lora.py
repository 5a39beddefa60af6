"""Adapters: on, off, merged; what they share with the base and what they leave alone."""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.schema import LoRAConfig
from covey.errors import RecipeError
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layers import LoRA
from covey.models.lora import (
    adapters_change_base,
    apply_lora_dropout,
    has_lora,
    join_adapters,
    merge_as_base,
    merge_lora,
    projections,
    split_trainable,
    with_lora,
    without_lora,
)
from covey.parallel import flatten
from covey.train.trainer import MicroBatch, Trainer

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 9))
NANOCHAT = replace(CONFIG, family="nanochat", gated_mlp=False, norm_scales=False, qk_norm=True, activation="relu2")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PARTS = tuple(f"{'attn' if name in ATTENTION else 'mlp'}.{name}" for name in EVERY)


@cache
def base(**switches: Any) -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0), **switches)


@partial(jax.jit, static_argnums=(0, 2))
def forward(graph: Any, state: Any, looped: bool = True) -> jax.Array:
    positions, cache = jnp.broadcast_to(jnp.arange(9), (2, 9)), None if looped else [None] * CONFIG.num_layers
    return nnx.merge(graph, state)(TOKENS, positions, causal_attention(jnp.ones((2, 9), bool), positions), cache)[0]


def hidden(model: Decoder, looped: bool = True) -> np.ndarray:
    return np.asarray(forward(*nnx.split(model), looped))


def arrays(model: Decoder) -> dict[str, jax.Array]:
    return flatten(nnx.split(model)[1])


def pointers(model: Decoder) -> dict[str, int]:
    return {name: x.unsafe_buffer_pointer() for name, x in arrays(model).items()}


def stirred(model: Decoder) -> Decoder:
    """`model` with every B away from zero."""
    rng = np.random.default_rng(1)
    for linear in projections(model).values():
        if linear.lora is not None:
            linear.lora.b[...] = rng.normal(size=linear.lora.b.shape, scale=0.3)
    return model


@pytest.mark.slow
def test_fresh_adapters_change_nothing() -> None:
    """B starts at zero, so the function is the base's to the last bit."""
    model = base()
    assert np.array_equal(hidden(with_lora(model, LoRAConfig(rank=4, alpha=6.0))), hidden(model))


@pytest.mark.slow
def test_whether_adapters_change_the_base_needs_no_program() -> None:
    events: list[str] = []
    heard = lambda event, *_, **__: events.append(event)  # noqa: E731
    fresh, changed = with_lora(base(), LoRAConfig(rank=6)), stirred(with_lora(base(), LoRAConfig(rank=6)))
    jax.monitoring.register_event_duration_secs_listener(heard)
    assert not adapters_change_base(fresh)
    assert adapters_change_base(changed)
    jax.monitoring.unregister_event_duration_listener(heard)
    assert not [event for event in events if "compile" in event]


def test_one_adapter_that_is_not_zero_changes_the_base() -> None:
    model = with_lora(base(), LoRAConfig(rank=1))  # the smallest rank there is
    assert not adapters_change_base(model)
    next(iter(projections(model).values())).lora.b[0, 0] = 1e-3
    assert adapters_change_base(model)


def test_adapters_are_trained_and_the_base_only_without_them() -> None:
    _, trained, frozen = split_trainable(base())
    assert (flatten(trained).keys(), flatten(frozen).keys()) == (arrays(base()).keys(), set())
    adapted = with_lora(base(), LoRAConfig(rank=2))
    _, trained, frozen = split_trainable(adapted)
    names = arrays(adapted).keys()
    assert flatten(trained).keys() == {name for name in names if ".lora." in name}
    assert flatten(frozen).keys() == {name for name in names if ".lora." not in name}


def test_adapters_are_merged_into_a_base_of_another_type() -> None:
    adapted = stirred(with_lora(base(), LoRAConfig(rank=2, targets=ATTENTION)))
    merged, wanted = arrays(merge_as_base(adapted, jnp.bfloat16)), arrays(merge_lora(adapted))
    assert merged.keys() == wanted.keys() == arrays(base()).keys()
    for name, x in merged.items():
        np.testing.assert_array_equal(x, wanted[name].astype(jnp.bfloat16), strict=True)


def test_the_base_is_shared_and_not_copied() -> None:
    model = base()
    adapted = with_lora(model, LoRAConfig(rank=4))
    own, theirs = pointers(model), pointers(adapted)
    assert {name: theirs[name] for name in own} == own
    assert {name.rsplit(".", 2)[-2] for name in theirs.keys() - own.keys()} == {"lora"}
    assert pointers(without_lora(adapted)) == own
    assert (has_lora(model), has_lora(adapted), has_lora(without_lora(adapted))) == (False, True, False)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("all-linear",), {f"layers.{i}.{part}" for i in (0, 1) for part in PARTS}),
        ((r"layers\.1\..*",), {f"layers.1.{part}" for part in PARTS}),
        ((r"model\.layers\.0\.self_attn\.[qv]_proj",), {"layers.0.attn.q_proj", "layers.0.attn.v_proj"}),
        ((r".*self_attn.*", "up_proj"), {f"layers.{i}.{p}" for i in (0, 1) for p in (*PARTS[:4], "mlp.up_proj")}),
    ],
)
def test_targets_are_names_patterns_or_all_by_our_paths_or_theirs(targets: tuple[str, ...], found: set[str]) -> None:
    names = arrays(with_lora(base(), LoRAConfig(rank=2, targets=targets))).keys()
    assert {name.removesuffix(".lora.a") for name in names if name.endswith(".lora.a")} == found


def test_a_family_with_other_names_knows_both() -> None:
    pytest.importorskip("covey_families")
    model = Decoder(NANOCHAT, rngs=nnx.Rngs(0))
    by_ours, by_theirs = (with_lora(model, LoRAConfig(rank=2, targets=(name,))) for name in ("up_proj", "fc1"))
    assert arrays(by_ours).keys() == arrays(by_theirs).keys() > arrays(model).keys()
    assert len(arrays(with_lora(model, LoRAConfig(rank=2)))) == len(arrays(model)) + 2 * 2 * 6
    with pytest.raises(RecipeError, match="'gate_proj' names no projection of this model"):
        with_lora(model, LoRAConfig(rank=2, targets=("gate_proj",)))


def test_shapes_are_those_of_the_rank_and_a_is_not_zero() -> None:
    found = arrays(with_lora(base(), LoRAConfig(rank=5)))
    assert found["layers.0.attn.k_proj.lora.a"].shape == (32, 5)
    assert found["layers.1.mlp.down_proj.lora.b"].shape == (5, 32)
    a = np.asarray(found["layers.1.mlp.down_proj.lora.a"])
    assert 0.8 * 48**-0.5 < np.abs(a).max() <= 48**-0.5
    assert not np.asarray(found["layers.1.mlp.down_proj.lora.b"]).any()
    assert not np.array_equal(found["layers.0.attn.q_proj.lora.a"], found["layers.1.attn.q_proj.lora.a"])


def test_the_seed_decides_the_adapters() -> None:
    config = LoRAConfig(rank=2)
    one, same, other = (arrays(with_lora(base(), config, seed=s)) for s in (3, 3, 4))
    name = "layers.0.attn.q_proj.lora.a"
    assert np.array_equal(one[name], same[name])
    assert not np.array_equal(one[name], other[name])


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.slow
def test_merged_is_the_same_function_without_adapters(looped: bool) -> None:
    """Trap: merged by a transpose, which a square matrix would not notice; these are not all square."""
    model = stirred(with_lora(base(), LoRAConfig(rank=4, alpha=6.0)))
    before = pointers(model)
    plain = merge_lora(model)
    want = hidden(model, looped)
    assert np.abs(want - hidden(without_lora(model), looped)).max() > 0.1
    np.testing.assert_allclose(hidden(plain, looped), want, atol=1e-5)
    assert not has_lora(plain)
    assert arrays(plain).keys() == arrays(base()).keys()
    assert pointers(model) == before


def test_merging_by_hand() -> None:
    model = stirred(with_lora(base(), LoRAConfig(rank=4, alpha=6.0, targets=("up_proj",))))
    found, plain = arrays(model), arrays(merge_lora(model))
    path = "layers.1.mlp.up_proj"
    a, b, kernel = (np.asarray(found[f"{path}.{n}"], np.float64) for n in ("lora.a", "lora.b", "kernel"))
    np.testing.assert_allclose(plain[f"{path}.kernel"], kernel + 1.5 * a @ b, atol=1e-6)
    untouched = "layers.1.mlp.gate_proj.kernel"
    assert plain[untouched].unsafe_buffer_pointer() == found[untouched].unsafe_buffer_pointer()


def test_narrow_weights_stay_narrow_and_adapters_wide() -> None:
    model = stirred(with_lora(base(param_dtype="bfloat16"), LoRAConfig(rank=2)))
    types = {name: x.dtype for name, x in arrays(model).items()}
    assert {t for name, t in types.items() if ".lora." in name} == {jnp.dtype("float32")}
    assert {x.dtype for x in arrays(merge_lora(model)).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj", "gate_proj")])
def test_joined_adapters_share_one_a_and_compute_the_same(targets: tuple[str, ...]) -> None:
    model = with_lora(base(), LoRAConfig(rank=3, targets=targets))
    assert join_adapters(model) is model  # built for a CPU
    rng = np.random.default_rng(0)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, LoRA):
            node.b[...] = rng.normal(size=node.b.shape).astype(np.float32)
    model.platform = "cuda"
    joined = projections(join_adapters(model))
    for path, linear in projections(model).items():
        x = jnp.asarray(rng.normal(size=(2, 1, linear.shape[0])), jnp.float32)
        np.testing.assert_array_equal(joined[path](x), linear(x))
    assert {path: linear.lora.a.shape[1] for path, linear in joined.items() if linear.lora and path[7] == "0"} == {
        ("all-linear",): {
            "layers.0.attn.q_proj": 9, "layers.0.attn.k_proj": 9, "layers.0.attn.v_proj": 9, "layers.0.attn.o_proj": 3,
            "layers.0.mlp.gate_proj": 6, "layers.0.mlp.up_proj": 6, "layers.0.mlp.down_proj": 3,
        },
        ("q_proj", "v_proj", "gate_proj"): {
            "layers.0.attn.q_proj": 6, "layers.0.attn.v_proj": 6, "layers.0.mlp.gate_proj": 3
        },
    }[targets]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoRAConfig(rank=2, targets=("q_porj",)), "did you mean 'q_proj'"),
        (LoRAConfig(rank=2, targets=("embed",)), "target 'embed' names no projection of this model"),
        (LoRAConfig(rank=2, targets=("q_proj", r"layers\.2\..*")), r"target 'layers.*' names no projection"),
        (LoRAConfig(rank=2, targets=("layers.0",)), "target 'layers.0' names no projection"),
        (LoRAConfig(rank=2, targets=("layers.(",)), "is no regular expression"),
        (LoRAConfig(rank=0), "rank 0"),
    ],
)
def test_mistakes_are_answered(config: LoRAConfig, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        with_lora(base(), config)


# --- dropout


def noisy(seed: int = 0, rate: float = 0.25) -> Decoder:
    return stirred(with_lora(base(), LoRAConfig(rank=4, alpha=6.0, dropout=rate), seed=seed))


def seen(model: Decoder, step: int) -> dict[str, np.ndarray]:
    """The adapters as the forward of update `step` has them."""
    return {name: np.asarray(x) for name, x in flatten(apply_lora_dropout(*nnx.split(model), step)).items()}


def test_dropout_leaves_out_inputs_of_adapters_and_scales_up_the_rest() -> None:
    model = noisy()
    before, after = arrays(model), seen(model, 3)
    for name, x in before.items():
        if not name.endswith("lora.a"):
            assert np.array_equal(after[name], x), name
            continue
        kept = after[name].any(axis=1)
        np.testing.assert_allclose(after[name][kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)
    rows = np.concatenate([x.any(axis=1) for name, x in after.items() if name.endswith("lora.a")])
    assert abs(rows.mean() - 0.75) < 0.06  # 2 layers × 240 inputs: the standard deviation is 0.02
    masks = [after[f"layers.0.attn.{n}.lora.a"].any(axis=1).tolist() for n in ("q_proj", "k_proj", "v_proj")]
    assert masks[0] != masks[1] != masks[2]


def test_its_noise_follows_from_seed_and_step_alone() -> None:
    name = "layers.1.mlp.up_proj.lora.a"
    assert np.array_equal(seen(noisy(), 5)[name], seen(noisy(), 5)[name])
    assert not np.array_equal(seen(noisy(), 5)[name].any(1), seen(noisy(), 6)[name].any(1))
    assert not np.array_equal(seen(noisy(1), 5)[name].any(1), seen(noisy(2), 5)[name].any(1))


@pytest.mark.slow
def test_each_update_of_the_trainer_draws_zeros_of_its_own() -> None:
    """The trap: a mask that never changes; a run that goes on elsewhere draws the same then too."""
    part = lambda _, params, batch: (batch * sum(x.sum() for x in jax.tree.leaves(params)), {})  # noqa: E731
    trainer = Trainer(noisy(), optax.sgd(0.0), part)
    masks = []
    for _ in range(3):
        gradients = trainer.gradients([MicroBatch(jnp.float32(1.0), 1.0)]).sums
        by_name = flatten(trainer.programs.layout.as_trainable(gradients))
        masks.append(np.concatenate([np.asarray(x[:, 0] > 0) for n, x in by_name.items() if n.endswith("lora.a")]))
        trainer.skip()
    assert all(0 < mask.mean() < 1 for mask in masks)
    assert not any(np.array_equal(one, other) for one, other in combinations(masks, 2))


def test_without_it_nothing_is_touched() -> None:
    graph, state = nnx.split(noisy(rate=0.0))
    assert apply_lora_dropout(graph, state, 1) is state
    assert np.array_equal(hidden(noisy()), hidden(noisy(rate=0.0)))  # a plain forward has none


@pytest.mark.slow
def test_updates_with_dropout_do_not_depend_on_how_they_are_cut_and_go_on_where_they_stopped() -> None:
    def loss(graph: Any, params: Any, tokens: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
        out = nnx.merge(graph, params)(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))[0]
        return jnp.sum(jnp.sin(out)), {}

    config = LoRAConfig(rank=4, targets=("q_proj", "down_proj"), dropout=0.25)
    start = lambda: stirred(with_lora(Decoder(replace(CONFIG, num_layers=1), rngs=nnx.Rngs(0), remat=False), config))  # noqa: E731
    straight, stopped = (Trainer(start(), optax.sgd(0.01), loss) for _ in range(2))
    straight.update([MicroBatch(jnp.asarray(TOKENS), 2.0)])
    stopped.load_state(jax.tree.map(jnp.copy, straight.state()), 1)
    straight.update([MicroBatch(jnp.asarray(TOKENS), 2.0)])
    stopped.update(MicroBatch(jnp.asarray(TOKENS[row : row + 1]), 1.0) for row in (0, 1))
    for name, x in flatten(straight.trainable).items():
        np.testing.assert_allclose(flatten(stopped.trainable)[name], x, atol=1e-5)
