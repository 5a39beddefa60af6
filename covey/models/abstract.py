"""Models of shapes alone, which are made in a moment, whatever their size: to be filled from a checkpoint, or to build
programs without an array.
"""

from typing import Any

from flax import nnx

from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, rngs_for_shapes
from covey.models.layers import Linear
from covey.models.quantised import QuantisationFormat, abstract_kernel


def abstract_decoder(config: ModelConfig, fmt: QuantisationFormat | None = None, **switches: Any) -> Decoder:
    """Return a decoder with shapes in place of arrays.

    Args:
        config: the architecture.
        fmt: format of its projections; None for floating point.
        switches: see `Decoder`.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=rngs_for_shapes(), **switches))
    return model if fmt is None else _quantise(model, fmt)


def _quantise(model: Decoder, fmt: QuantisationFormat) -> Decoder:
    """Return the abstract `model` with its kernels replaced by abstract quantised ones."""
    for _, linear in nnx.iter_graph(model):
        if isinstance(linear, Linear):
            linear.kernel = abstract_kernel(linear.kernel.shape, fmt, linear.kernel.dtype)
    return model
