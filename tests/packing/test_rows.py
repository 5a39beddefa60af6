"""Rows: every sample as if it were alone, whatever it shares its row with."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.logprobs import token_logps
from covey.losses.policy import policy_loss
from covey.models.attention import causal_attention
from covey.models.spans import span_mask
from covey.packing.bins import compile_cost, rows_per_micro_batch
from covey.packing.rows import (
    Rows,
    attention_spans,
    pack,
    padding_fraction,
    scatter_to_rows,
    split_micro_batches,
    unpack,
)
from covey.types import Branch, Completion, FinishReason, Group

SHAPES = [(5, [1, 3, 9, 20]), (17, [4, 4, 1, 1]), (40, [30, 50, 2, 20]), (3, [7]), (1, [1, 1, 1, 1, 1, 1])]
LENGTHS = [n for _, sizes in SHAPES for n in sizes]

shapes = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=5)), min_size=1, max_size=5
)
BRANCHES = [
    (),
    (Branch(4, 7),),
    (Branch(3, 6), Branch(6, 8), Branch(9, 5)),
    (Branch(2, 5), Branch(3, 2), Branch(8, 3)),  # the last two drop tokens of the prompt, which has 5
    (Branch(1, 0),),
]


def random_groups(shape: list[tuple[int, list[int]]]) -> list[Group]:
    counter = iter(range(10**6))
    draw = lambda n: np.array([next(counter) for _ in range(n)], np.int32)  # noqa: E731
    none = np.zeros(0, np.float32)
    return [
        Group("", draw(p), tuple(Completion(draw(n), none, none, FinishReason.STOP) for n in sizes))
        for p, sizes in shape
    ]


def visible(rows: Rows, row: int, at: int) -> list[int]:
    """The tokens an input position may attend to, in order, by the definition in `tree_attention`."""
    group, sample = rows.group_ids[row], rows.input_segment_ids[row]
    return [
        int(rows.tokens[row, j])
        for j in range(at + 1)
        if group[j] == group[at] and (sample[j] == 0 or sample[j] == sample[at])
    ]


@settings(max_examples=60)
@given(shapes, st.sampled_from([64, 128, 512]), st.sampled_from(["groups", "dense"]), st.sampled_from([1, 256, 1024]))
def test_each_scored_token_sees_its_prompt_and_its_own_past(
    shape: list[tuple[int, list[int]]], row_length: int, packing: str, micro_batch: int
) -> None:
    groups = random_groups(shape)
    rows = pack(groups, row_length, packing=packing, max_tokens=micro_batch)  # type: ignore[arg-type]
    samples = [(g.prompt_tokens, c.tokens) for g in groups for c in g.completions]
    found = [0] * len(samples)
    for row, at in zip(*np.nonzero(rows.scored), strict=True):
        number, place = rows.scatter_index[row, at]
        prompt, tokens = samples[number]
        source = int(rows.gather_index[row, at])
        assert rows.target[row, at] == tokens[place]
        assert visible(rows, row, source) == [*prompt, *tokens[:place]]
        assert rows.positions[row, source] == len(prompt) + place - 1
        found[number] += 1
    assert found == [len(tokens) for _, tokens in samples]
    assert (rows.scatter_index[~rows.scored] == -1).all()
    assert rows.scatter_index.shape == (*rows.segment_ids.shape, 2)


def test_groups_and_completions_are_counted_from_one_in_each_row() -> None:
    """0 is padding, and in `input_segment_ids` a prompt."""
    rows = pack(random_groups([(10, [6, 6])] * 4), 64)
    group, sample, segment_ids = (part.tolist() for part in (rows.group_ids, rows.input_segment_ids, rows.segment_ids))
    prompt, answers = [0] * 10, lambda first, n: [first] * n + [first + 1] * n
    assert group[0] == [1] * 20 + [2] * 20 + [3] * 20 + [0] * 4
    assert sample[0] == [*prompt, *answers(1, 5), *prompt, *answers(3, 5), *prompt, *answers(5, 5)] + [0] * 4
    assert segment_ids[0] == [*answers(1, 6), *answers(3, 6), *answers(5, 6)] + [0] * 28
    assert group[1] == [1] * 20 + [0] * 44
    assert sample[1] == [*prompt, *answers(1, 5)] + [0] * 44
    assert segment_ids[1] == answers(1, 6) + [0] * 52


@pytest.mark.parametrize("packing", ["groups", "dense"])
def test_spans_say_what_is_visible(packing: str) -> None:
    """At every input position, padding among them."""
    rows = pack(random_groups([*SHAPES, (2, [40]), (9, [2, 2])]), 128, packing=packing)  # type: ignore[arg-type]
    count, length = rows.tokens.shape
    allowed = np.asarray(jax.jit(lambda r: span_mask(attention_spans(r)))(rows))
    for row, at in np.ndindex(count, length):
        want = visible(rows, row, at) if rows.group_ids[row, at] else [rows.tokens[row, at]]
        assert rows.tokens[row][allowed[row, at]].tolist() == want


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 7, 30, 500])
def test_spans_under_a_window_end_at_positions(window: int) -> None:
    rows = pack(random_groups([*SHAPES, (2, [40]), (9, [2, 2])]), 128)
    spans, positions = attention_spans(rows), rows.positions
    near = positions[:, :, None] - positions[:, None, :] < window
    np.testing.assert_array_equal(span_mask(spans.limit(jnp.asarray(positions), window)), span_mask(spans) & near)


def test_rows_that_fill_up_a_micro_batch_see_themselves_alone() -> None:
    *_, last = split_micro_batches(pack(random_groups([(3, [4])] * 3), 64, packing="dense"), 2)
    allowed = np.asarray(span_mask(attention_spans(last)))
    assert allowed[0].sum() > 64
    np.testing.assert_array_equal(allowed[1], np.eye(64, dtype=bool))


@pytest.mark.parametrize(
    ("shape", "settings", "rows", "prompt_tokens"),
    [
        ((100, [10] * 8), {}, (1, 192), 100),  # the trap: the prompt repeated for each of its samples
        ((40, [100] * 9), {"row_length": 1024}, (1, 1024), 40),
        ((40, [100] * 9), {}, (3, 384), 120),  # 768 tokens at most unless told otherwise; the prompt in each part
        ((40, [30] * 6), {"row_length": 128}, (2, 128), 80),
        ((128, [64] * 8), {"row_length": 512}, (2, 384), 256),  # split evenly
        ((400, [300, 10]), {"row_length": 128}, (1, 768), 400),  # a sample longer than the row raises it
        ((900, [120] * 8), {"row_length": 2048, "max_tokens": 2048}, (1, 2048), 900),  # beyond the last bucket
    ],
)
def test_a_group_is_in_one_row_or_is_split_with_its_prompt_repeated(
    shape: tuple[int, list[int]], settings: dict[str, int], rows: tuple[int, int], prompt_tokens: int
) -> None:
    packed = pack(random_groups([shape]), **settings)  # type: ignore[arg-type]
    assert packed.tokens.shape == rows
    assert ((packed.group_ids > 0) & (packed.input_segment_ids == 0)).sum() == prompt_tokens


@pytest.mark.parametrize("prompts", [(60, 120), (100, 200)])
def test_what_is_left_of_a_long_group_fills_up_the_rows_of_others(prompts: tuple[int, int]) -> None:
    """The trap: 8 groups of some 800 tokens cut into halves, each in a row of its own: a fifth is padding, and more is
    prompts that stand there twice.
    """
    rng, wastes, positions = np.random.default_rng(3), [], []
    for _ in range(12):
        sizes = np.minimum(rng.geometric(1 / 90, (8, 8)), 256)
        shape = [(int(rng.integers(*prompts)), row.tolist()) for row in sizes]
        rows = pack(random_groups(shape), max_tokens=1024)
        wastes.append(padding_fraction(rows, rows_per_micro_batch(*rows.tokens.shape, 1024)))
        positions.append(rows.tokens.size / sum(prompt + sum(row) for prompt, row in shape))
    assert np.mean(wastes) < 0.1
    assert np.mean(positions) < 1.25


def test_another_row_length_pays_only_in_a_long_run_of_a_model_that_takes_longer_than_the_compiler() -> None:
    groups = random_groups([(60, [65] * 3)] * 4)
    lengths = {
        (parameters, steps, fixed): pack(
            groups, max_tokens=1024, compile_cost=compile_cost(parameters, steps, fixed)
        ).tokens.shape[1]
        for parameters, steps, fixed in [
            (4_000_000, 30, False), (4_000_000, 100_000, False), (10**9, 30, False), (10**9, 10**6, True)
        ]
    }  # fmt: skip
    assert list(lengths.values()) == [768, 256, 256, 768]


def test_short_groups_share_rows_with_little_padding() -> None:
    rng = np.random.default_rng(0)
    groups = random_groups([(int(rng.integers(30, 90)), [int(n) for n in rng.integers(5, 60, 8)]) for _ in range(16)])
    assert padding_fraction(pack(groups, 1024)) < 0.1


def test_few_shapes_occur() -> None:
    """Each is a program to compile, twice: for log-probs and for the update."""
    rng, shapes = np.random.default_rng(1), set()
    for _ in range(40):
        sizes = np.minimum(rng.geometric(1 / 90, (8, 8)), 256)
        rows = pack(random_groups([(int(rng.integers(60, 120)), row.tolist()) for row in sizes]), max_tokens=1024)
        shapes.add((rows.tokens.shape[1], rows_per_micro_batch(*rows.tokens.shape, 1024)))
    assert len(shapes) <= 8


@settings(max_examples=40)
@given(shapes, st.sampled_from(["groups", "dense"]))
def test_values_come_home(shape: list[tuple[int, list[int]]], packing: str) -> None:
    groups = random_groups(shape)
    rows = pack(groups, 64, packing=packing)  # type: ignore[arg-type]
    sizes = [len(c.tokens) for g in groups for c in g.completions]
    values = [np.random.default_rng(i).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)]
    for one, other in zip(unpack(rows, scatter_to_rows(rows, values), sizes), values, strict=True):
        assert np.array_equal(one, other)
    assert not scatter_to_rows(rows, values)[~rows.scored].any()


def test_values_of_empty_answers_lie_nowhere() -> None:
    rows = pack(random_groups([(3, [0, 0])]))
    assert not scatter_to_rows(rows, [np.zeros(0), np.zeros(0)]).any()


def test_micro_batches_are_of_one_shape_and_lose_nothing() -> None:
    rows = pack(random_groups(SHAPES), 64, packing="dense")
    parts = list(split_micro_batches(rows, 4))
    assert [part.tokens.shape[0] for part in parts] == [4] * -(-len(LENGTHS) // 4)
    joined = np.concatenate([part.segment_ids for part in parts])
    assert np.array_equal(joined[: len(rows.segment_ids)], rows.segment_ids)
    assert not joined[len(rows.segment_ids) :].any()


def test_micro_batches_of_a_single_array() -> None:
    assert [part.tolist() for part in split_micro_batches(np.arange(1, 4), 2)] == [[1, 2], [3, 0]]


def test_rows_per_micro_batch_is_a_multiple_of_the_devices() -> None:
    assert [rows_per_micro_batch(24, 256, 1024, ways) for ways in (1, 2, 3, 4, 8)] == [4, 4, 3, 4, 8]


def test_micro_batches_come_out_even_with_few_sizes() -> None:
    """The trap: 8 rows, 3 at a time, compute 9."""
    assert rows_per_micro_batch(8, 320, 1024) == 2
    assert rows_per_micro_batch(3, 64, 1024) == 4
    for most in (1, 2, 3, 4, 8, 16):
        sizes = [rows_per_micro_batch(count, 64, 64 * most) for count in range(1, 100)]
        assert max(sizes) == most
        assert len(set(sizes)) <= 4 + most.bit_length()
        for count, size in enumerate(sizes, start=1):
            assert -(-count // size) * size <= -(-count // most) * most


def test_padding_fraction_by_hand() -> None:
    """10 tokens of a prompt and 5 of an answer in a row of 64."""
    rows = pack(random_groups([(10, [6])]))
    assert padding_fraction(rows) == pytest.approx(1 - 15 / 64)
    assert padding_fraction(rows, rows_at_once=2) == pytest.approx(1 - 15 / 128)
    full = pack(random_groups([(32, [33])] * 3), 64, packing="dense")
    assert padding_fraction(full) == pytest.approx(0, abs=0.01)
    assert padding_fraction(full, rows_at_once=2) == pytest.approx(1 / 4, abs=0.01)


@pytest.mark.slow
def test_log_probs_in_rows_are_those_of_each_sample_alone(decoder: Callable, groups_of: Callable) -> None:
    model, groups = decoder(), groups_of(SHAPES[:3])
    graph, params = nnx.split(model)
    lengths = [len(c.tokens) for g in groups for c in g.completions]
    rows = pack(groups, 128)
    found = unpack(rows, jax.jit(partial(token_logps, graph, temperature=0.7))(params, rows).logps, lengths)

    @jax.jit
    def alone(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(128)[None]
        hidden, _ = model(tokens[None], positions, causal_attention(jnp.ones((1, 128), bool), positions))
        return jax.nn.log_softmax(model.logits(hidden)[0] / 0.7)

    samples = [(g.prompt_tokens, c.tokens) for g in groups for c in g.completions]
    for got, (prompt, tokens) in zip(found, samples, strict=True):
        padded = np.zeros(128, np.int32)
        padded[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        want = np.asarray(alone(padded))[len(prompt) - 1 + np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.slow
def test_loss_and_gradients_equal_the_dense_layout(
    decoder: Callable, groups_of: Callable, inputs_for: Callable
) -> None:
    """Rows of several groups, one of which is split over them, against one sample a row: equal to 1e-5 in float32, for
    adapters and the base under them.
    """
    graph, params = nnx.split(decoder(4, remat=False))
    shapes = [*SHAPES[:2], (20, [15, 25, 2, 20]), (3, [7])]  # rows of 64 are one block of queries
    groups, lengths = groups_of(shapes), [n for _, sizes in shapes for n in sizes]

    def run(packing: str) -> tuple[float, nnx.State]:
        rows = pack(groups, 64, packing=packing)  # type: ignore[arg-type]
        inputs = inputs_for(rows, lengths)

        def loss(params: nnx.State) -> jax.Array:
            scores, algorithm = token_logps(graph, params, rows, 0.9), algorithm_of(GRPOConfig("grpo"))
            total, _ = policy_loss(algorithm, scores.logps, scores.entropy, rows.segment_ids, inputs)
            return total / len(lengths)

        return jax.jit(jax.value_and_grad(loss))(params)

    (dense, dense_grads), (packed, packed_grads) = run("dense"), run("groups")
    assert float(packed) == pytest.approx(float(dense), rel=1e-5, abs=1e-6)  # a sum of terms of both signs, of order 1
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(dense_grads))
    for one, other in zip(jax.tree.leaves(packed_grads), jax.tree.leaves(dense_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=1e-5)


def sequences(prompt: np.ndarray, completion: Completion) -> Iterator[tuple[list[int], range]]:
    """Each branch as a whole sequence of tokens, with the indices of its own tokens in the completion."""
    sequence, branches = prompt.tolist(), [Branch(0, len(prompt)), *(completion.branches or ())]
    for (start, kept), (end, _) in pairwise([*branches, Branch(len(completion.tokens), 0)]):
        sequence = sequence[:kept] + completion.tokens[start:end].tolist()
        yield sequence, range(start, end)


@pytest.mark.parametrize("packing", ["groups", "dense"])
def test_a_token_sees_its_own_sequence_and_is_predicted_from_its_end(packing: Any) -> None:
    number = iter(range(10**6))
    draw = lambda n: np.array([next(number) for _ in range(n)], np.int32)  # noqa: E731
    none = np.zeros(0, np.float32)
    completions = [Completion(draw(12), none, none, "stop", branches=branches) for branches in BRANCHES]  # type: ignore[arg-type]
    groups = [Group("", draw(5), tuple(completions)), Group("", draw(3), (replace(completions[0], tokens=draw(4)),))]
    rows = pack(groups, 64, packing=packing)
    visible = np.asarray(span_mask(attention_spans(rows)))

    before: dict[int, list[int]] = {}
    for group in groups:
        for completion in group.completions:
            for sequence, own in sequences(group.prompt_tokens, completion):
                before |= {int(completion.tokens[i]): sequence[: i - own[-1] - 1] for i in own}
    seen = 0
    for row, column in zip(*np.nonzero(rows.scored), strict=True):
        target, source = int(rows.target[row, column]), int(rows.gather_index[row, column])
        if before[target]:  # nothing precedes the first token of a branch that keeps nothing
            assert rows.tokens[row, visible[row, source]].tolist() == before[target]
            positions = rows.positions[row, visible[row, source]]
            assert positions.tolist() == list(range(len(before[target])))
            seen += 1
    assert seen == 12 * len(BRANCHES) + 4 - 1


def packed(branch: Branch) -> Rows:
    """A row of a prompt of 5 tokens and two completions of 6, the first with a branch."""
    tokens, none = np.arange(6, dtype=np.int32), np.zeros(0, np.float32)
    plain = Completion(tokens, none, none, FinishReason.STOP, branches=())
    return pack([Group("", np.arange(5, dtype=np.int32), (replace(plain, branches=(branch,)), plain))], 64)


@pytest.mark.parametrize(("kept", "prompts"), [(5, 1), (4, 2)])
def test_only_a_branch_that_drops_tokens_of_the_prompt_has_one_for_itself(kept: int, prompts: int) -> None:
    rows = packed(Branch(2, kept))
    assert ((rows.group_ids > 0) & (rows.input_segment_ids == 0)).sum() == prompts * 5


def test_a_token_that_nothing_precedes_is_read_at_its_own_prompt() -> None:
    """Its log-prob is not used, but the place that it is read from has to be one of the same group."""
    rows = packed(Branch(2, 0))
    number, index = rows.scatter_index[0].T
    (source,) = rows.gather_index[0, (number == 0) & (index == 2)]
    (of_first,) = rows.gather_index[0, (number == 0) & (index == 0)]
    assert source == of_first - 4
