"""The gated delta net: a mixer whose state has one size, whatever the length of the text (three layers of four of
Qwen3.5).

Queries, keys and values pass a short causal convolution; queries and keys have length 1. The delta rule gives the
output, which a norm with a gate and a projection take (Yang et al., 2024, section 3).
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.config import ModelConfig
from covey.models.layers import Linear, RMSNorm, apply_joint
from covey.models.recurrence import Order
from covey.models.spans import Spans
from covey_families import delta_rule
from covey_families.settings import DeltaSettings
from covey_families.trees import PIECE, TreeTables, check_branches, tree_tables


class State(NamedTuple):
    """State after a token: inputs of the convolution at the last tokens, by head of keys, and the state of each head of
    values.
    """

    tail: Float[Array, "B Hk width-1 n"]
    heads: Float[Array, "B H K V"]


class Inputs(NamedTuple):
    """Inputs of each token: queries, keys and values before the convolution, by head of keys; log-decays; write gates
    after the sigmoid.
    """

    mixed: Float[Array, "B T Hk n"]
    log_decay: Float[Array, "B T H"]
    gate: Float[Array, "B T H"]


class Convolution(nnx.Module):
    """Weights of a causal convolution of each channel, [channels, 1, width]; the last is of the token itself."""

    def __init__(self, channels: int, width: int, param_dtype: DTypeLike, rngs: Any):
        start = jax.random.normal(rngs.params(), (channels, 1, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(start.astype(param_dtype))


class DeltaNet(nnx.Module):
    """A gated delta net; `config.kind_settings` has its sizes, `joint` the names of the projections of its input."""

    joint = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: Any):
        s: DeltaSettings = config.kind_settings
        linear = partial(Linear, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        hidden, (keys, values) = config.hidden_size, s.widths
        self.q_proj, self.k_proj, self.v_proj = linear(hidden, keys), linear(hidden, keys), linear(hidden, values)
        self.z_proj, self.o_proj = linear(hidden, values), linear(values, hidden)
        self.b_proj, self.a_proj = linear(hidden, s.value_heads), linear(hidden, s.value_heads)
        convolution = partial(Convolution, width=s.conv_width, param_dtype=param_dtype, rngs=rngs)
        self.q_conv, self.k_conv, self.v_conv = convolution(keys), convolution(keys), convolution(values)
        a_log, dt_bias = _first_decays(s.value_heads, rngs)
        self.a_log, self.dt_bias = nnx.Param(a_log.astype(param_dtype)), nnx.Param(dt_bias.astype(param_dtype))
        self.norm = RMSNorm(replace(config, norm_offset=0.0, norm_scales=True), s.value_dim, param_dtype)
        self.settings = s

    def __call__(self, x: Float[Array, "B T D"], rope: Any, attend: Any, cache: Any, window: Any) -> tuple[Array, Any]:
        """Return the mixed tokens, and the state after them where there is a cache. Positions play no role."""
        *qkv, z, write, rate = apply_joint(self, x)
        rate = jax.nn.softplus(rate.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        log_decay = -jnp.exp(self.a_log[...].astype(jnp.float32)) * rate
        inputs = Inputs(self._by_head(*qkv), log_decay, jax.nn.sigmoid(write.astype(jnp.float32)))
        out, cache = attend.recur(self, inputs, cache)
        out = self.norm(out.astype(jnp.float32)) * jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)
        return self.o_proj(out.reshape(*x.shape[:-1], -1).astype(x.dtype)), cache

    def scan(self, inputs: Inputs, state: State | None, order: Order) -> tuple[Array, State | None]:
        """Return the outputs [B, T, H, V] of tokens in their order, and the state after a sequence of them.

        Args:
            state: state before the first token; None for zeros.
        """
        if order.tables is not None:
            return self._over_trees(inputs, order.tables), None
        inputs = _without_padding(inputs, order.valid)
        state = self.state(self.settings, len(order.valid)) if state is None else State(*state)
        extended = jnp.concatenate([state.tail.swapaxes(1, 2).astype(jnp.float32), inputs.mixed], axis=1)
        count, width = order.valid.sum(axis=1), self.settings.conv_width
        time, weights = order.valid.shape[1], self._weights()
        mixed = jnp.stack([extended[:, i : i + time] * weights[..., i] for i in range(width)]).sum(axis=0)
        out, heads = self._rule(mixed, inputs, state.heads)
        tail = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, width - 1))(extended, count)
        return out, State(tail.swapaxes(1, 2), heads)

    @staticmethod
    def state(settings: DeltaSettings, slots: int) -> State:
        """Return the state before the first token of a text, for some slots."""
        s, (keys, values) = settings, settings.widths
        channels = (2 * keys + values) // s.key_heads
        tail = jnp.zeros((slots, s.key_heads, s.conv_width - 1, channels), jnp.float32)
        return State(tail, jnp.zeros((slots, s.value_heads, s.key_dim, s.value_dim), jnp.float32))

    @staticmethod
    def tables(settings: DeltaSettings, spans: Spans, positions: Int[Array, "B T"], has_branches: bool) -> TreeTables:
        """Return the order of the tokens of rows of trees, for all layers of this kind."""
        return tree_tables(spans, positions, settings.conv_width, has_branches)

    @staticmethod
    def check_branches(_: DeltaSettings, groups: Int[np.ndarray, "R T"], positions: Int[np.ndarray, "R T"]) -> None:
        """Refuse rows with branches for which `tables` have no room; see `recurrence.check_branches`."""
        check_branches(groups, positions)

    def _by_head(self, q: Array, k: Array, v: Array) -> Float[Array, "... Hk n"]:
        """Return channels of queries, keys and values by head of keys, in float32."""
        parts = [x.reshape(*x.shape[:-1], self.settings.key_heads, -1) for x in (q, k, v)]
        return jnp.concatenate(parts, axis=-1).astype(jnp.float32)

    def _weights(self) -> Float[Array, "Hk n width"]:
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        return jnp.moveaxis(self._by_head(*(jnp.moveaxis(x.weight[...][:, 0], 0, -1) for x in convolutions)), 0, -1)

    def _heads(self, mixed: Float[Array, "... Hk n"]) -> tuple[Array, Array, Array]:
        """Return the queries, keys and values of each head of values, after the convolution."""
        s, mixed = self.settings, jax.nn.silu(mixed)
        q, k, v = jnp.split(mixed, (s.key_dim, 2 * s.key_dim), axis=-1)
        q, k = delta_rule.normalise(q) * s.key_dim**-0.5, delta_rule.normalise(k)
        q, k = (jnp.repeat(x, s.value_heads // s.key_heads, axis=-2) for x in (q, k))
        return q, k, v.reshape(*v.shape[:-2], s.value_heads, s.value_dim)

    def _rule(self, mixed: Array, inputs: Inputs, heads: Array) -> tuple[Array, Array]:
        """Return the outputs of tokens that follow one another, and the state after them."""
        arrays, time = (*self._heads(mixed), inputs.log_decay, inputs.gate), mixed.shape[1]
        if time == 1:
            q, k, v, log_decay, gate = (x[:, 0] for x in arrays)
            out, heads = delta_rule.step(q, k, v, log_decay, gate, heads)
            return out[:, None], heads
        size = min(PIECE, 1 << (time - 1).bit_length())
        count = -(-time // size)
        whole = [jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]
        tokens = delta_rule.Tokens(*(x.reshape(len(x), count, size, *x.shape[2:]).swapaxes(2, 3) for x in whole))
        before = jnp.broadcast_to(jnp.arange(-1, count - 1), (len(mixed), count))
        below = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(mixed), count, size, size))
        pieces = delta_rule.Pieces(below, before, jnp.full_like(before, size - 1))
        out, heads = delta_rule.over_pieces(tokens, pieces, heads)
        return out.swapaxes(2, 3).reshape(len(out), count * size, *out.shape[2::2])[:, :time], heads

    def _over_trees(self, inputs: Inputs, tables: TreeTables) -> Float[Array, "B T H V"]:
        weights = self._weights()
        mixed = inputs.mixed * weights[..., -1]
        for distance, index in enumerate(tables.before, start=1):
            mixed = mixed + _take(inputs.mixed, index) * weights[..., -1 - distance]
        arrays = (mixed, inputs.log_decay, inputs.gate)
        mixed, *gates = (_take(x, tables.tokens) for x in arrays)
        tokens = delta_rule.Tokens(*(x.swapaxes(2, 3) for x in (*self._heads(mixed), *gates)))
        start = self.state(self.settings, len(mixed)).heads
        out = delta_rule.over_pieces(tokens, tables.pieces, start)[0].swapaxes(2, 3)
        out = out.reshape(len(out), -1, *out.shape[3:]) * tables.fits[:, None, None, None]
        return jnp.take_along_axis(out, tables.places[:, :, None, None], axis=1)


def _first_decays(heads: int, rngs: Any) -> tuple[Float[Array, "H"], Float[Array, "H"]]:
    """Return the logarithm of A and the bias of the step Δ of new heads, whose decay of a token is e^(−A·softplus(Δ)).

    A is uniform to 16, and softplus(bias) log-uniform from 0.001 to 0.1, as in Mamba-2 (Dao & Gu, 2024): half of the
    heads remember a token for more than 16 others. With the bias 1 of transformers most heads remember none.
    """
    rates = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)
    steps = jnp.exp(jax.random.uniform(rngs.params(), (heads,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
    return jnp.log(rates), steps + jnp.log(-jnp.expm1(-steps))


def _without_padding(inputs: Inputs, valid: Array) -> Inputs:
    """Return inputs with zeros at padding, which leaves a state as it is."""
    masked = (jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0.0) for x in inputs)
    return Inputs(*masked)


def _take(x: Float[Array, "B T ..."], index: Int[Array, "B ..."]) -> Array:
    """Return the tokens of each row at `index`; zeros at T."""
    padded = jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
    taken: Array = jax.vmap(lambda row, at: row[at])(padded, index)
    return taken
