"""Input of a layer with a state, besides the tokens: their order, and the state before them.

Training, prefill and decoding pass a `Context` in place of an `Attend`. A mixer with a state calls `Context.recur` with
itself; `recur` decides where the state comes from and where it goes. Such a mixer has

    scan(inputs, state, order) -> (outputs, state after them)     inputs: a tree of arrays [B, T, ...]
    state(settings, slots) -> the state before a text             arrays [slots, ...] of four axes
    tables(settings, spans, positions, has_branches) -> order of the tokens of rows of trees, for all layers of the kind
    check_branches(settings, groups, positions)   for rows in NumPy; raises EpisodeError if their branches do not fit

where `settings` are `ModelConfig.kind_settings`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from covey.models.config import ModelConfig
from covey.models.layer_kinds import find_kind
from covey.models.spans import Spans

if TYPE_CHECKING:
    from covey.models.attention import Attend  # which makes contexts


class Order(NamedTuple):
    """Order of the tokens of a call.

    Attributes:
        valid: whether a token changes the state; padding does not.
        tables: result of the mixer's `tables` for rows of trees; None where each token follows the one before it.
    """

    valid: Bool[Array, "B T"]
    tables: Any = None


Recur = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Function (mixer, inputs, the layer's cache) → (outputs, new cache)."""


@dataclass(frozen=True)
class Context:
    """The ways in which layers see other tokens: attention, and for layers with a state `recur`."""

    attend: "Attend"
    recur: Recur

    def __call__(
        self, q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]:
        """Compute attention."""
        return self.attend(q, k, v, cache, window=window, softcap=softcap, write=write)


def recur_in_order(valid: Bool[Array, "B T"]) -> Recur:
    """Return the recurrence over whole texts, from the state before a text; no state is kept."""

    def recur(mixer: Any, inputs: Any, cache: Any) -> tuple[Any, Any]:
        return mixer.scan(inputs, None, Order(valid))[0], cache

    return recur


def recur_over_trees(
    config: ModelConfig, spans: Spans, positions: Int[Array, "B T"], valid: Bool[Array, "B T"], has_branches: bool
) -> Recur:
    """Return the recurrence over rows of trees: a token follows the token before it in its own sequence."""
    args = config.kind_settings, spans, positions, has_branches
    tables = {mixer: mixer.tables(*args) for mixer in _mixers(config)}

    def recur(mixer: Any, inputs: Any, cache: Any) -> tuple[Any, Any]:
        return mixer.scan(inputs, None, Order(valid, tables[type(mixer)]))[0], cache

    return recur


def check_branches(config: ModelConfig, groups: Int[np.ndarray, "R T"], positions: Int[np.ndarray, "R T"]) -> None:
    """Refuse rows with branches for which layers with a state have no room, before a program is made for the rows.

    Args:
        groups: number of each token's group in its row; 0 is padding.

    Raises:
        EpisodeError: a row has too many short branches.
    """
    for mixer in _mixers(config):
        mixer.check_branches(config.kind_settings, groups, positions)


def _mixers(config: ModelConfig) -> list[Any]:
    kinds = {find_kind(config.parts(layer)[0]) for layer in range(config.num_layers)}
    return [kind.load() for kind in kinds if kind.has_state]
