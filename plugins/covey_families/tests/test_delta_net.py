"""The gated delta net against an oracle in float64 that goes from token to token, over random trees; and a model with
such layers, packed and alone.
"""

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.errors import EpisodeError
from covey.losses.logprobs import token_logps
from covey.losses.policy import LossInputs, policy_loss
from covey.models.attention import causal_attention
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, abstract_decoder
from covey.models.recurrence import check_branches
from covey.models.spans import Spans
from covey.packing.rows import Rows, pack, scatter_to_rows, split_micro_batches, unpack
from covey.rl.batches import PackedSlice, RowSizes
from covey.rl.roles import ClusterConfig
from covey.rl.step_data import Experience, table_of
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.responder import NewBranch, Turn
from covey.sampling.sequence import Ending
from covey.types import Branch, Completion, FinishReason, Group
from covey_families import delta_rule, trees
from covey_families.settings import DeltaSettings
from covey_families.trees import num_pieces, tree_tables

TIME, HEADS, KEYS, VALUES = 48, 2, 4, 3
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rotary_dim=4, attention_gate=True, qk_norm=True, norm_offset=1.0, mixers=("delta_net", "attention"),
    kind_settings=DeltaSettings(2, 4, 8, 6),
)  # fmt: skip


@st.composite
def random_trees(draw: Any) -> np.ndarray:
    """Index of the token before each token, -1 for none: in depth-first order a token follows one on the last path."""
    forks = draw(st.lists(st.tuples(st.integers(1, TIME - 1), st.floats(0, 1)), max_size=6))
    before, at = [-1], dict(forks)
    for token in range(1, TIME):
        path = [token - 1]
        while path[-1] >= 0:
            path.append(before[path[-1]])
        before.append(path[round(at[token] * (len(path) - 1))] if token in at else token - 1)
    return np.array(before)


def spans_of(before: np.ndarray) -> tuple[Spans, np.ndarray]:
    positions, starts, ends = np.zeros((3, len(before)), np.int64)
    for token, parent in enumerate(before):
        positions[token] = positions[parent] + 1 if parent >= 0 else 0
        starts[token] = starts[parent] if parent >= 0 else token
        ends[token] = token + 1
        while parent >= 0:
            ends[parent], parent = token + 1, before[parent]
    return Spans(jnp.asarray(starts, jnp.int32)[None], jnp.asarray(ends, jnp.int32)[None]), positions.astype(np.int32)


def oracle(before: jax.Array, q: Any, k: Any, v: Any, log_decay: Any, gate: Any) -> jax.Array:
    """The definition of the rule, token by token. The state before the first token is the last row, always zero."""

    def step(states: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = states[before[t]] * jnp.exp(log_decay[t])[:, None, None]
        delta = gate[t][:, None] * (v[t] - (state * k[t][:, :, None]).sum(1))
        state += k[t][:, :, None] * delta[:, None]
        return states.at[t].set(state), (state * q[t][:, :, None]).sum(1)

    return jax.lax.scan(step, jnp.zeros((TIME + 1, HEADS, KEYS, VALUES)), jnp.arange(TIME))[1]


@jax.jit
def oracle_gradient(before: jax.Array, arrays: list[jax.Array]) -> Any:
    """Return the sum of the sines of the oracle's numbers, those numbers, and the gradient."""
    return jax.value_and_grad(lambda arrays: (jnp.sin(out := oracle(before, *arrays)).sum(), out), has_aux=True)(arrays)


def random_tokens() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(TIME, HEADS, n)) for n in (KEYS, KEYS, VALUES))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -np.exp(rng.normal(size=(TIME, HEADS)) * 1.5 - 2)
    return [q, k, v, log_decay, 1 / (1 + np.exp(-rng.normal(size=(TIME, HEADS))))]


@partial(jax.jit, static_argnames="size")
def in_pieces(tables_of: Any, arrays: Any, size: int) -> Any:
    spans, positions = tables_of
    tables = tree_tables(spans, positions, 3, True, size)

    def total(arrays: Any) -> Any:
        rows = [jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))[tables.tokens] for x in arrays]
        tokens = delta_rule.Tokens(*(x.swapaxes(2, 3) for x in rows))
        out, _ = delta_rule.over_pieces(tokens, tables.pieces, jnp.zeros((1, HEADS, KEYS, VALUES)))
        out = out.swapaxes(2, 3).reshape(-1, HEADS, VALUES)[tables.places[0]]
        return jnp.sin(out).sum(), out

    return jax.value_and_grad(total, has_aux=True)(arrays), tables


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(random_trees())
def test_pieces_of_three_sizes_equal_the_oracle_over_any_tree(before: np.ndarray) -> None:
    """Values and gradients; no size divides the number of tokens, and a sequence may fork at any of them."""
    arrays = random_tokens()
    with jax.enable_x64(True):
        (_, want), gradient = oracle_gradient(before, [jnp.asarray(x, jnp.float64) for x in arrays])
        want, gradient = np.asarray(want), [np.asarray(x) for x in gradient]
    spans, positions = spans_of(before)
    assert positions.max() < TIME
    for size in (32, 16, 64):
        ((_, got), found), tables = in_pieces((spans, positions[None]), [jnp.float32(x) for x in arrays], size)
        assert tables.fits.tolist() == [1.0]
        np.testing.assert_allclose(got, want, atol=5e-6)
        for one, other in zip(found, gradient, strict=True):
            np.testing.assert_allclose(one, other, atol=3e-5)
        before_two = [-1 if parent < 0 else before[parent] for parent in before]
        assert np.where(tables.before[1][0] == TIME, -1, tables.before[1][0]).tolist() == before_two


@settings(max_examples=30, deadline=None)
@given(random_trees())
def test_pieces_are_counted_on_the_host_as_the_device_cuts_them(before: np.ndarray) -> None:
    positions = spans_of(before)[1]
    parents = trees._parents([1] * TIME, positions.tolist())
    assert parents == before.tolist()
    starts, end = trees._starts(jnp.where(before < 0, TIME, before)[None], 16, TIME)
    assert end.tolist() == [TIME]
    assert trees._count_pieces(parents, 16) == (starts < TIME).sum()


def short_branches(length: int, of_branch: int) -> Group:
    """A completion of which each branch drops one token more of the first 40."""
    rng, forks = np.random.default_rng(0), range(40, length, of_branch)
    branched = completion(rng, length, tuple(Branch(start, 43 - number) for number, start in enumerate(forks)))
    return Group("", rng.integers(0, 50, 4).astype(np.int32), (branched, completion(rng, 9, ())))


def test_a_step_with_more_branches_than_there_is_room_for_is_refused_before_it_is_computed() -> None:
    actor = abstract_decoder(CONFIG)
    for length, is_refused in ((2, True), (3, False)):
        groups = [short_branches(110, length)]
        x = Experience(groups, table_of(groups))
        sizes = RowSizes(ClusterConfig({}, RLTrainingConfig(), RolloutConfig()), actor)
        with pytest.raises(EpisodeError, match="a row of 128 tokens") if is_refused else nullcontext():
            rows = PackedSlice(x, sizes).rows
            assert rows.tokens.shape == (1, 128)
    with pytest.raises(EpisodeError, match=r"into 2[1-9] pieces, and there is room for 20"):
        check_branches(CONFIG, *(pack([short_branches(110, 2)])[at] for at in (2, 1)))


def test_a_row_with_more_pieces_than_there_is_room_for_is_no_number() -> None:
    """A branch at every second token: nothing is computed wrongly without a word."""
    spans, positions = spans_of(np.array([-1, *[0] * (TIME - 1)]))
    assert tree_tables(spans, jnp.asarray(positions[None]), 3, False, 16).fits.tolist() == [1.0]  # all have one entry
    comb = np.arange(-1, TIME - 1)
    comb[TIME // 2 :] = np.arange(TIME // 2 - 2, -2, -1)[: TIME - TIME // 2]
    spans, positions = spans_of(comb)
    assert num_pieces(TIME, 16, False) == 7
    assert np.isnan(tree_tables(spans, jnp.asarray(positions[None]), 3, False, 16).fits).all()


@pytest.mark.parametrize("size", [1, 2, 32])
def test_the_inverse_is_that_of_float64(size: int) -> None:
    a = np.tril(np.random.default_rng(size).normal(size=(3, size, size)), -1)
    np.testing.assert_allclose(
        delta_rule.inverse(jnp.float32(a)), np.linalg.inv(np.eye(size) + a), rtol=2e-3, atol=2e-4
    )


def completion(rng: Any, length: int, branches: tuple[Branch, ...] | None = None) -> Completion:
    none = np.zeros(0, np.float32)
    tokens = rng.integers(0, 50, length).astype(np.int32)
    return Completion(tokens, none, none, FinishReason.LENGTH, branches=branches)


def groups_of(shapes: list[tuple[int, list[int]]]) -> list[Group]:
    rng = np.random.default_rng(3)
    return [
        Group("", rng.integers(0, 50, p).astype(np.int32), tuple(completion(rng, n) for n in sizes))
        for p, sizes in shapes
    ]


@cache
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@cache
def split() -> tuple[Any, Any]:
    """Return the model's graph and its parameters."""
    return nnx.split(model())


@jax.jit
def score(params: Any, rows: Rows) -> jax.Array:
    return token_logps(split()[0], params, rows, 1.0).logps


@jax.jit
def alone(params: Any, tokens: jax.Array) -> jax.Array:
    positions, decoder = jnp.arange(tokens.shape[1])[None], nnx.merge(split()[0], params)
    hidden, _ = decoder(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))
    return jax.nn.log_softmax(decoder.logits(hidden))[0]


def score_alone(sequence: np.ndarray, first: int) -> np.ndarray:
    padded = np.zeros((1, 192), np.int32)
    padded[0, : len(sequence)] = sequence
    at = np.arange(first, len(sequence))
    return np.asarray(alone(split()[1], padded))[at - 1, sequence[at]]


def test_new_heads_keep_a_fifth_of_their_state_or_more_at_a_token() -> None:
    """A·softplus(Δ) is between 0.00001 and 1.6, and so is different for each head."""
    layer = model().layers[0].delta
    kept = np.exp(-np.exp(layer.a_log[...]) * np.logaddexp(0, layer.dt_bias[...]))
    assert ((kept > 0.2) & (kept < 1)).all()
    assert len(set(kept.tolist())) == len(kept)


@pytest.mark.slow
def test_completions_in_rows_have_the_log_probs_that_they_have_alone() -> None:
    """Groups with one prompt share rows; some are split, some are shorter than the convolution."""
    groups = groups_of([(30, [40, 50, 3, 1, 70]), (5, [9, 9, 2]), (1, [1, 2]), (90, [20, 30])])
    lengths = [len(c.tokens) for group in groups for c in group.completions]
    rows = pack(groups, 128)
    found = np.concatenate(unpack(rows, np.asarray(score(split()[1], rows)), lengths))
    want = [
        score_alone(np.concatenate([g.prompt_tokens, c.tokens]), len(g.prompt_tokens))
        for g in groups
        for c in g.completions
    ]
    np.testing.assert_allclose(found, np.concatenate(want), atol=1e-5)


@pytest.mark.slow
def test_branches_go_on_from_the_state_of_their_fork() -> None:
    """A branch in the middle of a completion, and a branch that drops tokens of the prompt."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 50, 20).astype(np.int32)
    branched = completion(rng, 60, (Branch(25, 33), Branch(40, 12)))
    plain = completion(rng, 30, ())
    rows = pack([Group("", prompt, (branched, plain))], 128)
    found, other = unpack(rows, np.asarray(score(split()[1], rows)), [60, 30])
    t = branched.tokens
    first = np.concatenate([prompt, t[:25]])
    second = np.concatenate([first[:33], t[25:40]])
    third = np.concatenate([second[:12], t[40:]])
    want = np.concatenate([score_alone(first, 20), score_alone(second, 33), score_alone(third, 12)])
    np.testing.assert_allclose(found, want, atol=1e-5)
    np.testing.assert_allclose(other, score_alone(np.concatenate([prompt, plain.tokens]), 20), atol=1e-5)


@pytest.mark.slow
def test_the_gradient_of_a_step_is_the_same_packed_and_dense_and_in_any_micro_batches() -> None:
    groups = groups_of([(20, [15, 25, 2, 20]), (3, [7, 4]), (12, [30, 9])])
    lengths, rng = [len(c.tokens) for group in groups for c in group.completions], np.random.default_rng(1)
    values = [rng.normal(size=n).astype(np.float32) for n in lengths]

    @jax.jit
    def gradient(params: Any, rows: Rows, inputs: LossInputs) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = token_logps(split()[0], params, rows, 1.0)
            return policy_loss(
                algorithm_of(GRPOConfig("grpo")), scores.logps, scores.entropy, rows.segment_ids, inputs
            )[0]

        return jax.grad(loss)(params)

    def run(packing: Any, size: int, order: int) -> Any:
        rows = pack(groups[::order], 64, packing=packing)
        advantage = scatter_to_rows(rows, values if order > 0 else reordered(values))
        ones = [np.ones(n, np.float32) for n in (lengths if order > 0 else reordered(lengths))]
        beta = np.zeros((len(rows.tokens), 1), np.float32)
        inputs = LossInputs(advantage, scatter_to_rows(rows, ones), np.zeros_like(advantage), beta)
        parts = [gradient(split()[1], *part) for part in split_micro_batches((rows, inputs), size)]
        return jax.tree.map(lambda *x: sum(x), *parts)

    def reordered(x: list[Any]) -> list[Any]:
        return [*x[6:], *x[4:6], *x[:4]]

    want = run("dense", 8, 1)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    for case in (("groups", 8, 1), ("groups", 1, 1), ("groups", 2, -1)):
        for one, other in zip(jax.tree.leaves(run(*case)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5 * scale)


@pytest.mark.slow
def test_a_sampler_draws_from_the_distribution_that_training_computes() -> None:
    """Samples of two prompts share slots; a prompt is prefilled once, and its state copied."""
    prompts = [np.arange(1, 30, dtype=np.int32), np.arange(7, 9, dtype=np.int32)]
    config = RolloutConfig(max_new_tokens=40, decode_chunk=7, slots=4, seed=5)
    drawn = generate(
        Engine(model(), (3, 8), config), [Request(prompt, 5, i, step=4) for i, prompt in enumerate(prompts)]
    )
    groups = [Group("", prompt, tuple(each)) for prompt, each in zip(prompts, drawn, strict=True)]
    rows, completions = pack(groups, 128), [c for each in drawn for c in each]
    assert len({len(c.tokens) for c in completions}) > 2
    found = unpack(rows, np.asarray(score(split()[1], rows)), [len(c.tokens) for c in completions])
    for got, want in zip(found, completions, strict=True):
        np.testing.assert_allclose(got, want.logps, atol=1e-5)


class Rewriting:
    """Answers two turns: with a new branch, and with tokens; then ends. The turns end where the host sees it."""

    pause_id = answer_lag = max_num_seqs = turn_limit = None
    is_async = False

    def __init__(self, kept: int):
        self.kept = kept

    def answer(self, turn: Turn) -> Any:
        number = turn.ending.reason == FinishReason.STOP_STRING and len(turn.tokens)
        if number > 40:
            return None
        tokens = np.array([4, 5, 6], np.int32)
        return NewBranch(self.kept, tokens) if number < 20 else tokens


def eleventh(tokens: np.ndarray, _: int) -> Ending | None:
    """A turn ends after 11 tokens, in the middle of a chunk, as at a stop string."""
    return Ending(11, FinishReason.STOP_STRING) if len(tokens) >= 11 else None


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "appended"), [(11, 13 + 28), (23, 2 + 28), (30, 9 + 28)])
def test_a_branch_and_a_turn_go_on_from_the_last_state_before_them(kept: int, appended: int) -> None:
    """A branch drops tokens of the prompt, the whole turn, or a part of it; then two turns end before tokens that their
    slot has taken already, and are appended again. What comes before the last kept state is not.
    """
    prompt = np.arange(1, 24, dtype=np.int32)
    config = RolloutConfig(max_new_tokens=64, decode_chunk=4, slots=2, seed=5)
    request = Request(prompt, 3, 0, step=4, stop_conditions=(eleventh,), responder=Rewriting(kept))
    engine = Engine(model(), (), config)
    (drawn,) = generate(engine, [request])
    assert [len(c.branches or ()) for c in drawn] == [1, 1, 1]
    assert engine.stats.appended_tokens == 3 * appended
    rows = pack([Group("", prompt, tuple(drawn))], 256)
    found = unpack(rows, np.asarray(score(split()[1], rows)), [len(c.tokens) for c in drawn])
    for got, want in zip(found, drawn, strict=True):
        assert want.mask is not None
        assert 0 < want.mask.sum() < len(want.mask)
        np.testing.assert_allclose(got[want.mask], want.logps[want.mask], atol=1e-5)
