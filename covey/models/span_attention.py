"""The one place where an implementation of attention within rows is chosen: blockwise on CPU, kernels on accelerators.

What a layer sees is made once for all layers with the same sliding window.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from covey.models.attention import Attend
from covey.models.blockwise import blockwise_attention
from covey.models.decoder import Decoder
from covey.models.spans import NO_WINDOW, Spans, distinct_windows
from covey.registry import offered

KERNELS = ("tpu", "cuda")
"""Platforms whose attention is a kernel, which a package offers by the entry point `covey.attention` as a function like
`span_attention`; others attend blockwise.
"""


def span_attention(model: Decoder, spans: Spans, positions: Int[Array, "B T"], *, interpret: bool = False) -> Attend:
    """Return the `Attend` that attends within rows as `spans` define.

    Args:
        model: the decoder that will call it, on its platform; its sliding windows are measured in `positions`.
        interpret: run a kernel as an ordinary program, on any platform: for tests.
    """
    if model.platform not in KERNELS:
        return attend_blockwise(model, spans, positions)
    attend: Attend = offered("covey.attention", model.platform)(model, spans, positions, interpret)
    return attend


def attend_blockwise(model: Decoder, spans: Spans, positions: Int[Array, "B T"]) -> Attend:
    """Return attention block by block, as XLA's products."""
    windows = distinct_windows(model.config.windows)
    per_window = stack_windows(limit_spans(spans, positions, windows))

    def attend(
        q: Array,
        k: Array,
        v: Array,
        cache: Any,
        *,
        window: Any = None,
        softcap: float | None = None,
        write: bool = True,
    ) -> tuple[Array, Any]:
        return blockwise_attention(q, k, v, select_window(per_window, windows, window), softcap), cache

    return attend


def limit_spans(spans: Spans, positions: Int[Array, "B T"], windows: list[int]) -> list[Spans]:
    """Return the spans of the layers with each of the `windows`."""
    return [spans if window == NO_WINDOW else spans.limit(positions, window) for window in windows]


def stack_windows(per_window: list[Any]) -> Any:
    """Return the trees of all windows as one, for `select_window`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *per_window)


def select_window(per_window: Any, windows: list[int], window: Any) -> Any:
    """Return the entry of the layer's window, which may be traced: layers run in a loop."""
    if len(windows) == 1:
        return jax.tree.map(lambda x: x[0], per_window)
    index = jnp.argmax(jnp.array(windows) == (NO_WINDOW if window is None else window))
    return jax.tree.map(lambda x: x[index], per_window)
