"""Values come back from the wire as they were, and nothing that arrives there can run."""

import io
import os
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import CoveyError
from covey.parallel.values import deserialize, serialize
from covey.rl.step_data import RolloutBatch, table_of
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, FinishReason, Group, Mean

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> None:
    """Equal, and of equal types, arrays included."""
    assert type(one) is type(other)
    leaves, structure = jax.tree.flatten(one, is_leaf=lambda x: x is None)
    others, other_structure = jax.tree.flatten(other, is_leaf=lambda x: x is None)
    assert structure == other_structure
    for a, b in zip(leaves, others, strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)
        assert not isinstance(a, np.ndarray | np.generic) or a.dtype == b.dtype


@given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    assert deserialize(serialize(value)) == value


def test_what_processes_send_each_other_comes_back() -> None:
    """Arrays of any type and shape, scalars, NaN, paths, and a rollout with its completions."""
    logps = np.array([-0.5, -1e-9], np.float32)
    done = Completion(np.array([3, 4], np.int32), logps, logps, FinishReason.STOP, text="\x1b é", mask=None)
    group = Group([{"role": "user", "content": "hi"}], np.array([1], np.int32), (done,), {"answer": ["4", None]})
    rollout = RolloutBatch([group], table_of([]), [0], SamplerStats(tokens=2), seconds={"rollout": 0.25})
    back = deserialize(serialize((rollout, Path("runs/x"))))[0]
    assert isinstance(back, RolloutBatch)
    assert (back.stats, back.indices, back.seconds) == (rollout.stats, [0], {"rollout": 0.25})
    found = back.groups[0].completions[0]
    assert (found.text, found.finish, found.mask) == (done.text, FinishReason.STOP, None)
    same(found.logps, logps)
    assert (back.groups[0].columns, back.groups[0].prompt) == (group.columns, group.prompt)
    arrays = {"a": Mean(np.float32(1.5), np.zeros((0, 3), bool)), "b": (np.int64(3), np.array(2.0), [np.nan])}
    same(deserialize(serialize(arrays)), arrays)
    same(deserialize(serialize(jnp.arange(3))), np.arange(3, dtype=np.int32))


class Foreign(StrEnum):
    ONE = "one"


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 1, Foreign.ONE, np.array([object()])])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(CoveyError, match="cannot go to another process"):
        serialize({"column": value})


def test_nothing_that_arrives_runs(tmp_path: Path) -> None:
    """Pickled bytes, and names of functions and of classes that are not ours, make nothing."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "hit"),)

    for name in ("os:mkdir", "covey.errors:nearest", "covey.cli:main", "covey.nowhere:X", "builtins:eval"):
        text = f'{{"class": ["{name}", []]}}'.encode()
        with pytest.raises(CoveyError, match="another process sent"):
            deserialize(len(text).to_bytes(8, "little") + text)
    array = np.empty(1, object)
    array[0] = Evil()
    text, file = b'{"array": ["|O", [1]]}', io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    for numbers in (array.tobytes(), file.getvalue()):
        with pytest.raises(ValueError, match="OBJECT"):
            deserialize(len(text).to_bytes(8, "little") + text + numbers)
    assert not (tmp_path / "hit").exists()
    np.load(io.BytesIO(file.getvalue()), allow_pickle=True)
    assert (tmp_path / "hit").exists()  # it would have
