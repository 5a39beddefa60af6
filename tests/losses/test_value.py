"""The critic on rows, its loss against float64, and answers prepared for scoring."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import DataError
from covey.losses.value import explained_variance, groups_to_score, row_values, value_loss
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder
from covey.models.value_model import ValueModel, make_value_model
from covey.packing.rows import pack, scatter_to_rows, split_micro_batches, unpack
from covey.parallel import flatten
from covey.types import Group, Mean

SHAPES = [(5, [3, 9, 1, 6]), (11, [4, 4]), (2, [20])]
LENGTHS = [n for _, sizes in SHAPES for n in sizes]


@pytest.fixture
def critic(decoder: Callable[..., Decoder]) -> Callable[..., ValueModel]:
    """`critic(lora=0)`: the room's tiny decoder under a random head."""

    def make(lora: int = 0) -> ValueModel:
        model = make_value_model(decoder(lora, remat=False))
        model.score[...] = jnp.asarray(np.random.default_rng(7).normal(size=32), jnp.float32)
        return model

    return make


def alone(model: ValueModel, groups: Sequence[Group]) -> list[np.ndarray]:
    """Values by plain causal forwards, one sample at a time: of the state before each token."""
    graph, params = nnx.split(model)
    width = max(len(g.prompt_tokens) + len(c.tokens) for g in groups for c in g.completions)

    @jax.jit
    def run(tokens: Any) -> jax.Array:
        positions = jnp.arange(width)[None]
        return nnx.merge(graph, params)(tokens, positions, causal_attention(jnp.ones((1, width), bool), positions))[0]

    found = []
    for group in groups:
        for completion in group.completions:
            whole = np.concatenate([group.prompt_tokens, completion.tokens])
            start = len(group.prompt_tokens) - 1
            values = np.asarray(run(np.pad(whole, (0, width - len(whole)))[None]))
            found.append(values[start : start + len(completion.tokens)])
    return found


@pytest.mark.slow
def test_values_are_those_of_a_plain_forward(critic: Callable, groups_of: Callable) -> None:
    groups, model = groups_of(SHAPES), critic()
    graph, params = nnx.split(model)
    wanted, compute = alone(model, groups), jax.jit(lambda params, rows: row_values(graph, params, rows))
    for packing in ("groups", "dense"):
        rows = pack(groups, 64, packing=packing)  # type: ignore[arg-type]
        got = np.asarray(compute(params, rows))
        assert got.dtype == np.float32
        assert not got[~rows.scored].any()
        for ours, theirs in zip(unpack(rows, got, LENGTHS), wanted, strict=True):
            assert np.abs(theirs).max() > 0.1
            # Each of the two is rounded in two layers of sums of up to 64 terms.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * 2 * 64 * 2.0**-24 * np.abs(theirs).max())


@pytest.mark.slow
def test_gradients_do_not_depend_on_packing(critic: Callable, groups_of: Callable) -> None:
    """Of the whole critic's loss: head, trunk and adapters."""
    groups, rng = groups_of(SHAPES), np.random.default_rng(3)
    graph, params = nnx.split(critic(2))
    returns = [rng.normal(size=n) for n in LENGTHS]
    old = [r + rng.normal(size=len(r)) for r in returns]

    def gradient(packing: Any) -> Any:
        rows = pack(groups, 64, packing=packing)
        inputs = (
            scatter_to_rows(rows, old),
            scatter_to_rows(rows, returns),
            scatter_to_rows(rows, list(map(np.ones, LENGTHS))),
        )
        loss = lambda p, rows: value_loss(row_values(graph, p, rows), *inputs, 0.2)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params, rows)

    (one, grads), (other, dense) = gradient("groups"), gradient("dense")
    np.testing.assert_allclose(one, other, rtol=1e-5)
    moved = flatten(grads)
    assert np.asarray(moved["score"]).any()
    assert all(np.asarray(x).any() for name, x in moved.items() if "q_proj" in name)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(dense), strict=True):
        # And back through the two layers.
        atol = 2 * 4 * 64 * 2.0**-24 * max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# --- the loss


def oracle(v: np.ndarray, old: np.ndarray, r: np.ndarray, w: np.ndarray, clip: float) -> tuple[Any, ...]:
    """Loss, gradient and clip ratio in float64, token by token, from the formula."""
    total, gradient, clipped = 0.0, np.zeros(v.shape), 0.0
    for i in np.ndindex(v.shape):
        free = (v[i] - r[i]) ** 2
        held = old[i] + min(max(v[i] - old[i], -clip), clip) if clip else v[i]
        worse = (held - r[i]) ** 2 > free
        total += 0.5 * w[i] * max(free, (held - r[i]) ** 2)
        gradient[i] = 0.0 if worse else w[i] * (v[i] - r[i])
        clipped += w[i] * worse
    return total, gradient, clipped


def check(v: Any, old: Any, r: Any, w: Any, clip: float) -> None:
    arrays = [np.asarray(x, np.float32).reshape(1, -1) for x in (v, old, r, w)]
    loss = lambda v: value_loss(v, *arrays[1:], clip)  # noqa: E731
    (got, metric_sums), gradient = jax.value_and_grad(loss, has_aux=True)(arrays[0])
    total, wanted, clipped = oracle(*(x.astype(np.float64) for x in arrays), clip)
    np.testing.assert_allclose(got, total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)
    weight = arrays[3].sum(dtype=np.float64)
    means = {"value_loss": total, "value_mean": (arrays[3] * arrays[0]).sum(dtype=np.float64)}
    for name, value in (means | {"value_clip_ratio": clipped}).items():
        assert isinstance(metric_sums[name], Mean)
        np.testing.assert_allclose(metric_sums[name].total, value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(metric_sums[name].count, weight, rtol=1e-6)


# Multiples of 1/8 are exact in float32, so that draws fall on the edges of the range, and not beside them.
eighths = st.integers(-24, 24).map(lambda n: n / 8)
tokens = st.lists(st.tuples(eighths, eighths, eighths, st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=8)


@pytest.mark.slow
@given(tokens, st.sampled_from([0.0, 0.125, 0.5, 2.0]))
def test_the_loss_agrees_with_float64_by_value_and_gradient(drawn: list[tuple[float, ...]], clip: float) -> None:
    padded = drawn + [(1.0, 9.0, -9.0, 0.0)] * (8 - len(drawn))
    check(*np.array(padded).T, clip)


def test_at_the_edges_of_the_range() -> None:
    """Values, old values, returns, and the gradient under a clip of 0.5."""
    v, old, r, gradient = np.float32([
        (1.0, 1.0, 3.0, -2.0),  # not moved
        (1.5, 1.0, 3.0, -1.5),  # at the upper edge, still inside
        (1.625, 1.0, 3.0, 0.0),  # beyond it toward the return: enough for this batch
        (0.5, 1.0, 3.0, -2.5),  # the lower edge
        (0.0, 1.0, 3.0, -3.0),  # beyond it, away from the return: the way back is never closed
        (3.0, 1.0, 2.25, 0.75),  # past the return, no nearer than the edge: as far from it on both sides
        (3.0, 1.0, 3.0, 0.0),  # at the return, but farther than it may be
        (0.375, 1.0, -1.0, 0.0),  # beyond the lower edge toward the return
    ]).T[:, None]  # fmt: skip
    found = jax.grad(lambda v: value_loss(v, old, r, np.ones_like(old), 0.5)[0])(v)
    np.testing.assert_array_equal(found, gradient)


def test_without_tokens_the_loss_is_zero() -> None:
    zero = jnp.zeros((1, 4))
    loss, metric_sums = value_loss(zero, zero, zero, zero, 0.2)
    assert float(loss) == 0
    assert all(float(m.total) == float(m.count) == 0 for m in metric_sums.values())


def test_parts_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    whole = (*rng.normal(size=(3, 5, 6)).astype(np.float32), np.ones((5, 6), np.float32))
    loss, metric_sums = value_loss(*whole, 0.2)
    parts = [value_loss(*part, 0.2) for part in split_micro_batches(whole, 2)]
    np.testing.assert_allclose(sum(float(p) for p, _ in parts), loss, rtol=1e-6)
    for name, mean in metric_sums.items():
        np.testing.assert_allclose(np.sum([p[name] for _, p in parts], axis=0), mean, rtol=1e-5)


def test_metrics_have_no_gradient() -> None:
    rest = jnp.full((1, 1), 0.5), jnp.zeros((1, 1)), jnp.ones((1, 1))
    metrics = lambda values: sum(map(jnp.sum, jax.tree.leaves(value_loss(values, *rest, 0.2)[1])))  # noqa: E731
    assert not jax.grad(metrics)(jnp.ones((1, 1))).any()


# --- explained variance


def test_explained_variance() -> None:
    rng = np.random.default_rng(0)
    returns = [rng.normal(size=n) for n in (3, 1, 7)]
    flat = np.concatenate(returns)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([np.full(len(r), 4.0) for r in returns], returns) == pytest.approx(0.0)
    noise = [r + rng.normal(size=len(r)) for r in returns]
    assert explained_variance(noise, returns) == pytest.approx(
        1 - np.var(flat - np.concatenate(noise)) / np.var(flat), rel=1e-12
    )
    assert np.isnan(explained_variance([np.ones(2)], [np.ones(2)]))
    assert np.isnan(explained_variance([], []))


# --- answers to be scored


def test_each_answer_gets_one_token_more_and_neighbours_share_their_prompt() -> None:
    groups = groups_to_score([[1, 2], [1, 2], np.array([3]), [1, 2]], [[7], np.array([8, 9], np.int64), [], [7]])
    assert [g.prompt_tokens.tolist() for g in groups] == [[1, 2], [3], [1, 2]]
    assert [[c.tokens[:-1].tolist() for c in g.completions] for g in groups] == [[[7], [8, 9]], [[]], [[7]]]
    assert all(c.tokens.dtype == np.int32 for g in groups for c in g.completions)
    assert not any(c.logps.size or c.sampler_logps.size for g in groups for c in g.completions), "none were sampled"


def test_the_added_token_is_never_fed() -> None:
    """Its state is that of the answer's last token, or of the prompt's."""
    rows = pack(groups_to_score([[1, 2], [1, 2]], [[7, 8, 9], []]), 64)
    last = [rows.scatter_index[0].tolist().index([0, 3]), rows.scatter_index[0].tolist().index([1, 0])]
    assert rows.tokens[0, rows.gather_index[0, last]].tolist() == [9, 2]
    assert np.count_nonzero(rows.group_ids) == 5


@pytest.mark.parametrize(
    ("prompts", "completions", "words"),
    [
        ([[1]], [[2], [3]], "1 prompts for 2 completions"),
        ([[1], []], [[2], []], "sample 2 has neither"),
    ],
)
def test_what_cannot_be_scored_is_named(prompts: Any, completions: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        groups_to_score(prompts, completions)
