"""The stream of batches: complete, repeatable, and resumable at any batch and only into the same stream."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.data import PromptLoader
from covey.errors import DataError, ResumeError

few = settings(max_examples=15)


def rows(n):
    return [{"prompt": f"p{i}", "answer": i} for i in range(n)]


def take(loader, n):
    return [[row["answer"] for row in next(loader)] for _ in range(n)]


SIZES = st.integers(1, 20)


@pytest.mark.slow
@few
@given(SIZES, st.integers(1, 9), st.integers(0, 2**31 - 1), st.integers(0, 6), st.integers(1, 3), st.booleans())
def test_k_batches_and_a_restore_equal_going_straight_on(n, p, seed, k, more, shuffle):
    straight = PromptLoader(rows(n), p, seed=seed, shuffle=shuffle)
    first = take(straight, k)
    state = json.loads(json.dumps(straight.state()))
    rest = take(straight, more)
    resumed = PromptLoader(rows(n), p, seed=seed, shuffle=shuffle)
    resumed.restore(state)
    assert take(resumed, more) == rest
    assert take(PromptLoader(rows(n), p, seed=seed, shuffle=shuffle), k + more) == first + rest


@pytest.mark.slow
@few
@given(SIZES, st.integers(1, 30), st.integers(0, 2**31 - 1))
def test_batches_are_full_and_each_epoch_has_every_row_once(n, p, seed):
    epochs = 2
    stream = take(PromptLoader(rows(n), p, seed=seed), -(-n * epochs // p))
    assert {len(batch) for batch in stream} == {p}
    flat = list(itertools.chain(*stream))
    for epoch in range(epochs):
        assert Counter(flat[epoch * n : (epoch + 1) * n]) == Counter(range(n))


@few
@given(SIZES, st.integers(1, 30), st.integers(1, 3))
def test_limited_epochs_end_with_the_rest_and_drop_nothing(n, p, epochs):
    batches = [[row["answer"] for row in batch] for batch in PromptLoader(rows(n), p, num_epochs=epochs)]
    assert Counter(itertools.chain(*batches)) == Counter(list(range(n)) * epochs)
    assert all(len(batch) == p for batch in batches[:-1])


def test_each_epoch_has_its_own_order_and_the_seed_fixes_all():
    stream = take(PromptLoader(rows(20), 20, seed=5), 3)
    assert stream[0] != stream[1] != stream[2]
    assert take(PromptLoader(rows(20), 20, seed=5), 3) == stream
    assert take(PromptLoader(rows(20), 20, seed=6), 1)[0] != stream[0]


def test_without_shuffling_the_order_is_the_datas():
    assert take(PromptLoader(rows(3), 2, shuffle=False), 3) == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**32, 2**40, -1])
def test_any_integer_is_a_seed(seed):
    assert len(take(PromptLoader(rows(5), 2, seed=seed), 1)[0]) == 2


@pytest.mark.parametrize(("n", "p", "batches"), [(10, 5, 2), (10, 4, 3), (3, 8, 1)])
def test_the_length_is_the_batches_of_one_epoch(n, p, batches):
    assert len(PromptLoader(rows(n), p)) == batches


def test_the_position_counts_rows_over_all_epochs():
    loader = PromptLoader(rows(3), 2)
    take(loader, 4)
    assert loader.position == loader.state()["position"] == 8


def test_a_state_is_small_and_stays_what_it_was():
    loader = PromptLoader(rows(5000), 8)
    state = loader.state()
    text = json.dumps(state)
    take(loader, 2)
    assert json.dumps(state) == text
    assert len(text) < 500


# What a state must not be restored into. Grain itself takes any of these without a word.

CHANGED = {
    "content": (lambda: PromptLoader([*rows(19), {"prompt": "p19", "answer": -1}], 4, seed=3), "content was"),
    "the same rows in another order": (lambda: PromptLoader(rows(20)[::-1], 4, seed=3), "content was"),
    "rows": (lambda: PromptLoader(rows(21), 4, seed=3), "rows was 20, is 21"),
    "seed": (lambda: PromptLoader(rows(20), 4, seed=4), "seed was 3, is 4"),
    "batch": (lambda: PromptLoader(rows(20), 5, seed=3), "stopped: prompts_per_step was 4, is 5\n"),
    "shuffle": (lambda: PromptLoader(rows(20), 4, seed=3, shuffle=False), "shuffle was True, is False"),
}


@pytest.mark.parametrize(("make", "message"), CHANGED.values(), ids=CHANGED)
def test_another_stream_is_refused_by_what_differs(make, message):
    loader = PromptLoader(rows(20), 4, seed=3)
    take(loader, 2)
    other = make()
    with pytest.raises(ResumeError, match=message):
        other.restore(loader.state())
    assert other.position == 0


def test_another_way_of_shuffling_is_refused():
    """As after an update of the library that shuffles."""
    state = PromptLoader(rows(20), 4).state()
    state["fingerprint"]["order"] = "0" * 16
    with pytest.raises(ResumeError, match="order was"):
        PromptLoader(rows(20), 4).restore(state)


@pytest.mark.parametrize(
    "state", [{}, {"position": 3}, {"position": "3", "fingerprint": {}}, {"position": -1, "fingerprint": {}}]
)
def test_a_malformed_state_is_refused(state):
    with pytest.raises(ResumeError, match="cannot be read"):
        PromptLoader(rows(3), 2).restore(state)


def test_training_longer_is_the_same_stream():
    loader = PromptLoader(rows(5), 2, num_epochs=1)
    take(loader, 2)
    longer = PromptLoader(rows(5), 2, num_epochs=4)
    longer.restore(loader.state())
    assert longer.position == 4


def test_the_fingerprint_does_not_hang_on_addresses_or_containers():
    class Thing:
        pass

    def loader(wrap):
        return PromptLoader(wrap([{"prompt": "a", "thing": Thing(), "raw": b"\xff"}, {"prompt": "b", 1: {2: (3,)}}]), 1)

    assert loader(list).fingerprint == loader(tuple).fingerprint == loader(list).fingerprint


def test_a_loader_takes_what_as_rows_takes():
    loader = PromptLoader({"prompts": np.array(["a", "b"]), "answer": np.array([1, 2])}, 2, shuffle=False)
    assert next(loader) == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_row(size):
    with pytest.raises(DataError, match="prompts_per_step"):
        PromptLoader(rows(3), size)
