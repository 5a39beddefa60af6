"""Tensors of requests: their shapes are a client's, and so may be anything."""

import pytest

pytest.importorskip("google.protobuf")

from covey_serve.errors import ApiError
from covey_serve.wire import CLASSES, array_of


@pytest.mark.parametrize("shape", [(-2, -3), (-1,), (2, 2), (2**62, 4), (6, 1, 1)])
def test_a_shape_that_no_array_has_is_refused(shape: tuple[int, ...]) -> None:
    tensor = CLASSES["Tensor"](dtype=1, dense=bytes(24), shape=shape)
    with pytest.raises(ApiError, match="another size than its shape says"):
        array_of(tensor)


@pytest.mark.parametrize("shape", [(2**32, 2**32), (0, -5)])
def test_so_is_that_of_a_tensor_of_nothing(shape: tuple[int, ...]) -> None:
    with pytest.raises(ApiError, match="another size than its shape says"):
        array_of(CLASSES["Tensor"](dtype=1, shape=shape))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_an_array_has_the_shape_of_its_tensor(shape: tuple[int, ...]) -> None:
    assert array_of(CLASSES["Tensor"](dtype=1, dense=bytes(24), shape=shape)).shape == (shape or (6,))
