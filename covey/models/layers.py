"""The parts of a decoder block: products, norms, rotary positions, the MLP.

Products accumulate in float32 whatever their operands' type, in the forward and in both backward products; written any
other way, CPU upcasts whole bfloat16 weights. Norms and rotations run in float32.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.config import ModelConfig, RopeScaling
from covey.models.stored_kernel import StoredKernel

Axes = tuple[int, ...]
"""Sizes of some axes of an array."""

SAVED_PRODUCT = "product"
"""Checkpoint name of the values that `save_product` marks, for `decoder.REMAT_POLICIES`."""
TOKENS_AT_ONCE = 512
"""Number of tokens whose gradients of an embedding are summed by one product."""


def save_product(x: Array) -> Array:
    """Return `x`, marked to be saved where a layer is rematerialised.

    16-bit floats are saved as integers: a loop saves into one array for all of its iterations, and on a CPU, where XLA
    has no such floats, it would convert the whole array to float32 and back in each iteration.
    """
    return _save_16_bit(x) if _has_16_bits(x) else mark_product(x)


def mark_product(x: Array) -> Array:
    """Return `x`, marked as by `save_product`, without a derivative: for the forward rules of other derivatives, where
    a policy would see the call of `save_product` as a whole, and not the name in it.
    """
    stored = jax.lax.bitcast_convert_type(x, jnp.uint16) if _has_16_bits(x) else x
    marked: Array = checkpoint_name(stored, SAVED_PRODUCT)
    return jax.lax.bitcast_convert_type(marked, x.dtype) if _has_16_bits(x) else marked


def _has_16_bits(x: Array) -> bool:
    return jnp.dtype(x.dtype).itemsize == 2


_save_16_bit = jax.custom_vjp(mark_product)
_save_16_bit.defvjp(lambda x: (mark_product(x), None), lambda _, grad: (grad,))


def dot(
    a: Array,
    b: Array,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DTypeLike,
    sum_dtype: DTypeLike = jnp.float32,
) -> Array:
    """Return the product over the axes `contract` of both operands, cast to `dtype`, in `sum_dtype`."""
    # A float32 product stays float32: accelerators would otherwise round its operands to TF32 or bfloat16.
    precision = jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), (contract, ((), ())), precision=precision, preferred_element_type=sum_dtype
    )


def sum_dtype_of(x_dtype: DTypeLike, platform: str) -> DTypeLike:
    """Return the type in which the devices of a mesh add their parts of a product of `x`: float32, but on accelerators
    the type of `x`, to which the sum is rounded anyway; in float32 twice as much would move. Each device accumulates
    its part in float32 either way.
    """
    return jnp.float32 if platform == "cpu" else x_dtype


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def project(
    x: Float[Array, "... n_in"],
    kernel: Float[Array, "n_in *n_out"],
    dtype: DTypeLike,
    axes: int = 1,
    sum_dtype: DTypeLike = jnp.float32,
) -> Array:
    """Compute `x @ kernel` with operands in `dtype`, accumulated in float32, returned in the type of `x`. Both may
    have several axes for `n_in`, of which `axes` is the number. `sum_dtype`: see `sum_dtype_of`.
    """
    contract = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    return dot(x, kernel, contract, dtype, sum_dtype).astype(x.dtype)


def _project_backward(
    dtype: DTypeLike, axes: int, sum_dtype: DTypeLike, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    grad_x, grad_kernel = _project_grads(dtype, axes, *saved, grad, sum_dtype)
    return grad_x.astype(saved[0].dtype), grad_kernel


def _project_grads(
    dtype: DTypeLike, axes: int, x: Array, kernel: Array, grad: Array, sum_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Return the gradients of x, in `sum_dtype`, and of the kernel."""
    leading = tuple(range(x.ndim - axes))
    contract = tuple(range(len(leading), grad.ndim)), tuple(range(axes, kernel.ndim))
    grad_x = dot(grad, kernel, contract, dtype, sum_dtype)
    # XLA copies the first operand into another order, so the narrower one of an adapter's two comes first. (On CPU, XLA
    # has no such product with a transposed result for bfloat16.)
    swap = x.shape[-1] > grad.shape[-1] and jnp.dtype(dtype) == jnp.float32 and kernel.ndim == 2
    grad_kernel = dot(grad, x, (leading, leading), dtype).T if swap else dot(x, grad, (leading, leading), dtype)
    return grad_x, grad_kernel.astype(kernel.dtype)


project.defvjp(lambda x, kernel, *options: (project(x, kernel, *options), (x, kernel)), _project_backward)


def project_by_part(
    x: Float[Array, "B ..."], kernel: Array, dtype: DTypeLike, axes: int, sum_dtype: DTypeLike, parts: Axes
) -> Array:
    """Compute `project`; where `kernel` has an axis of parts in front, the rows of each part with their own kernel. If
    the devices of a mesh have a part each, so have they a gradient each, and add nothing up.
    """
    if not parts:
        return project(x, kernel, dtype, axes, sum_dtype)
    rows = x.reshape(*parts, -1, *x.shape[1:])
    out = jax.vmap(lambda x, kernel: project(x, kernel, dtype, axes, sum_dtype))(rows, kernel)
    return out.reshape(x.shape[0], *out.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project_shared(
    x: Float[Array, "... n_in"], kernels: tuple[Array, ...], dtype: DTypeLike, sum_dtype: DTypeLike
) -> tuple[Array, ...]:
    """Compute `project` of the same `x` with each kernel [n_in, *n_out]. The gradients of x are summed in `sum_dtype`
    before they get the type of `x`: on a mesh that splits n_out, XLA then sums them over devices together, and not one
    by one.
    """
    return tuple(project(x, kernel, dtype, 1, sum_dtype) for kernel in kernels)


def _project_shared_backward(
    dtype: DTypeLike, sum_dtype: DTypeLike, saved: Any, grads: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    x, kernels = saved
    pairs = [_project_grads(dtype, 1, x, k, grad, sum_dtype) for k, grad in zip(kernels, grads, strict=True)]
    total = sum((grad_x for grad_x, _ in pairs[1:]), pairs[0][0])
    return total.astype(x.dtype), tuple(grad_kernel for _, grad_kernel in pairs)


project_shared.defvjp(
    lambda x, kernels, *options: (project_shared(x, kernels, *options), (x, kernels)), _project_shared_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(platform: str, table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the rows of `tokens`. `platform`: see `Decoder`.

    The gradient is summed in float32, in a fixed order, and rounded once. That which JAX derives adds the rows of equal
    tokens in the type of the table, and on a GPU by atomic operations, in any order.
    """
    return jnp.take(table, tokens, axis=0)


def _look_up_backward(platform: str, saved: tuple[Array, Array], grad: Float[Array, "B T D"]) -> tuple[Array, None]:
    (table, tokens), add = saved, _add_in_turn if platform == "cpu" else _add_sorted
    return add(table, jnp.asarray(tokens), grad), None


look_up.defvjp(lambda platform, *saved: (look_up(platform, *saved), saved), _look_up_backward)


def _add_in_turn(table: Float[Array, "V D"], tokens: Int[Array, "B T"], grad: Float[Array, "B T D"]) -> Array:
    """Add the rows one after the other. This is quick on a CPU, in any order on a GPU."""
    full = jax.ShapeDtypeStruct(table.shape, jnp.promote_types(table.dtype, jnp.float32))
    (total,) = jax.linear_transpose(partial(jnp.take, indices=tokens, axis=0), full)(grad.astype(full.dtype))
    return jnp.astype(total, table.dtype)


def _add_sorted(table: Float[Array, "V D"], tokens: Int[Array, "B T"], grad: Float[Array, "B T D"]) -> Array:
    """Sort the tokens, sum the rows of equal ones block by block, and write each sum to its own place."""
    vocabulary, width = table.shape
    padding, at = -tokens.size % TOKENS_AT_ONCE, jnp.argsort(tokens.reshape(-1))
    ids = jnp.pad(tokens.reshape(-1)[at], (0, padding), constant_values=vocabulary)
    rows = jnp.pad(grad.reshape(-1, width)[at], ((0, padding), (0, 0)))

    def block(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (last, total), (ids, rows) = carry, inputs
        sums = dot(ids[:, None] == ids, rows, ((1,), (0,)), rows.dtype)
        sums = sums + jnp.where((ids == last)[:, None], total, 0.0)
        return (ids[-1], sums[-1]), sums.astype(table.dtype)

    start = -jnp.ones_like(ids[0]), jnp.zeros(width, jnp.float32)
    _, sums = jax.lax.scan(block, start, (ids.reshape(-1, TOKENS_AT_ONCE), rows.reshape(-1, TOKENS_AT_ONCE, width)))
    # The last of equal tokens has the whole sum. The others are written nowhere: behind the table, each elsewhere.
    is_last = ids != jnp.append(ids[1:], vocabulary)
    places = jnp.where(is_last, ids, vocabulary + jnp.arange(len(ids)))
    return jnp.zeros_like(table).at[places].set(sums.reshape(-1, width), mode="drop", unique_indices=True)


class LoRA(nnx.Module):
    """Low-rank addition to one projection: `scale · x A B` (Hu et al., 2021), with B zero at first.

    A is initialised uniformly in ±1/sqrt(n_in), the Hugging Face PEFT default.

    Attributes:
        scale: alpha / rank.
        dropout: fraction of the inputs that an update drops; 0 means none. See `lora.apply_lora_dropout`.
        noise: seeds of the dropout: the run's seed, and the adapter's number in the model; in a stack a number for each
            layer.
    """

    def __init__(self, n_in: int, n_out: int, rank: int, alpha: float, *, rngs: nnx.Rngs):
        bound = n_in**-0.5
        self.a = nnx.LoRAParam(jax.random.uniform(rngs.params(), (n_in, rank), jnp.float32, -bound, bound))
        self.b = nnx.LoRAParam(jnp.zeros((rank, n_out), jnp.float32))
        self.scale = alpha / rank
        self.dropout = 0.0
        self.noise: tuple[int, int | tuple[int, ...]] = (0, 0)

    def __call__(self, x: Array, dtype: DTypeLike, n_in: Axes, n_out: Axes, sum_dtype: DTypeLike) -> Array:
        a = self.a[...].reshape(*self.parts, *n_in, -1)
        return self.widen(project_by_part(x, a, dtype, len(n_in), sum_dtype, self.parts), dtype, n_out, sum_dtype)

    @property
    def parts(self) -> Axes:
        """Number of parts of the rows, where each has A and B of its own, [parts, ...]; see `project_by_part`."""
        return self.a.shape[:-2]

    def widen(self, narrow: Float[Array, "... rank"], dtype: DTypeLike, n_out: Axes, sum_dtype: DTypeLike) -> Array:
        """Return the addition whose product with A is `narrow`."""
        narrow = narrow * jnp.asarray(self.scale, narrow.dtype)  # scaled where the array is smallest
        b = self.b[...].reshape(*self.parts, -1, *n_out)
        return project_by_part(narrow, b, dtype, 1, sum_dtype, self.parts)


class Linear(nnx.Module):
    """Linear projection `x W (+ b) (+ LoRA)`, with the kernel stored as [n_in, n_out] or as a `StoredKernel`.

    Attributes:
        platform: platform of the devices for which programs are built; see `Decoder`.
        shape: n_in and n_out.
    """

    def __init__(self, n_in: int, n_out: int, *, bias: bool, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (n_in, n_out), jnp.float32) * n_in**-0.5
        self.kernel: nnx.Param[Array] | StoredKernel = nnx.Param(kernel.astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((n_out,), param_dtype)) if bias else None
        self.lora: LoRA | None = nnx.data(None)
        self.dtype, self.platform, self.shape = dtype, "cpu", (n_in, n_out)

    def __call__(self, x: Float[Array, "... n_in"]) -> Float[Array, "... n_out"]:
        return self._apply(x, self.shape[:1], self.shape[1:])

    def to_heads(self, x: Float[Array, "... n_in"], width: int) -> Float[Array, "... H width"]:
        """Return the result as heads."""
        return self._apply(x, self.shape[:1], self.head_axes(x, width)).reshape(*x.shape[:-1], -1, width)

    def head_axes(self, x: Float[Array, "... n_in"], width: int) -> Axes:
        """Return the axes of the product with `x`, of which heads are made."""
        return (self.shape[1] // width, width) if self._writes_heads(x.shape[-2]) else self.shape[1:]

    def from_heads(self, x: Float[Array, "... H W"]) -> Float[Array, "... n_out"]:
        """Return the projection of heads."""
        if not self._writes_heads(x.shape[-3]):
            return self(x.reshape(*x.shape[:-2], -1))
        return self._apply(x, x.shape[-2:], self.shape[1:])

    def _writes_heads(self, time: int) -> bool:
        """Whether heads are axes of a product of `time` tokens. TPUs keep time and width of each head in tiles; made
        one axis, the heads would be copied into other tiles before and after attention. The kernel is, to be divided
        into heads, which costs more where each row has a single token.
        """
        return self.platform == "tpu" and time > 1 and not isinstance(self.kernel, StoredKernel)

    def _apply(self, x: Array, n_in: Axes, n_out: Axes) -> Array:
        out, sum_dtype = self._product(x, n_in, n_out), sum_dtype_of(x.dtype, self.platform)
        adapted = None if self.lora is None else self.lora(x, self.dtype, n_in, n_out, sum_dtype)
        return self._finish(out, n_out, adapted)

    def _product(self, x: Array, n_in: Axes, n_out: Axes) -> Array:
        """Return the product with the kernel."""
        kernel = self.kernel
        if isinstance(kernel, StoredKernel):
            return kernel.project(x, self.dtype, self.platform)
        sum_dtype = sum_dtype_of(x.dtype, self.platform)
        return project(x, kernel[...].reshape(*n_in, *n_out), self.dtype, len(n_in), sum_dtype)

    def _finish(self, out: Array, n_out: Axes, adapted: Array | None) -> Array:
        """Add the bias, and the addition of the adapter, to the product with the kernel."""
        if self.bias is not None:
            out = out + self.bias[...].astype(out.dtype).reshape(n_out)
        return save_product(out if adapted is None else out + adapted)


def apply_together(
    linears: Sequence[Linear], x: Float[Array, "... n_in"], width: int | None = None
) -> list[Float[Array, "..."]]:
    """Return the projection of `x` by each of `linears`, as heads if their `width` is given; see `project_shared` and
    `_apply_adapters`.

    Heads of one token are divided behind a barrier: on a TPU the compiler would divide the kernel instead, and copy it
    into another order.
    """
    platform, is_decoding = linears[0].platform, x.shape[-2] == 1
    stored = any(isinstance(linear.kernel, StoredKernel) for linear in linears)
    if platform == "cpu" or (stored and is_decoding):
        return [linear(x) if width is None else linear.to_heads(x, width) for linear in linears]
    axes: list[Axes] = [linear.shape[1:] if width is None else linear.head_axes(x, width) for linear in linears]
    products = _apply_kernels(linears, x, axes, stored)
    parts = zip(linears, products, axes, _apply_adapters(linears, x, axes), strict=True)
    outs = [linear._finish(out, n_out, adapted) for linear, out, n_out, adapted in parts]
    if width is None:
        return outs
    if is_decoding and platform == "tpu":
        outs = list(jax.lax.optimization_barrier(tuple(outs)))
    return [out.reshape(*x.shape[:-1], -1, width) for out in outs]


def apply_joint(module: Any, x: Float[Array, "... n_in"], width: int | None = None) -> list[Float[Array, "..."]]:
    """Return the projections of `x` that a module names in `joint`, in this order; see `apply_together`."""
    return apply_together([getattr(module, name) for name in module.joint], x, width)


def _apply_kernels(linears: Sequence[Linear], x: Array, axes: Sequence[Axes], stored: bool) -> Sequence[Array]:
    """Return the product of `x` with the kernel of each of `linears`, with these axes for n_out."""
    if stored:
        return [linear._product(x, linear.shape[:1], n_out) for linear, n_out in zip(linears, axes, strict=True)]
    shapes = [(linear.shape[0], *n_out) for linear, n_out in zip(linears, axes, strict=True)]
    kernels = tuple(linear.kernel[...].reshape(shape) for linear, shape in zip(linears, shapes, strict=True))
    return project_shared(x, kernels, linears[0].dtype, sum_dtype_of(x.dtype, linears[0].platform))


def _apply_adapters(linears: Sequence[Linear], x: Array, axes: Sequence[Axes]) -> list[Array | None]:
    """Compute the addition of the adapter of each of `linears`, with these axes for n_out; None where there is none.

    Their A lie side by side in one product, forward and backward: a rank is narrower than the unit for products. To
    decode they are not copied together in each step; `lora.join_adapters` does so once for a chunk of steps.
    """
    dtype, sum_dtype = linears[0].dtype, sum_dtype_of(x.dtype, linears[0].platform)
    adapters = [linear.lora for linear in linears if linear.lora is not None]
    if x.shape[-2] == 1 or len(adapters) < len(linears):
        pairs = [(linear.lora, n_out) for linear, n_out in zip(linears, axes, strict=True)]
        return [None if lora is None else lora(x, dtype, x.shape[-1:], n_out, sum_dtype) for lora, n_out in pairs]
    joined_a = jnp.concatenate([lora.a[...] for lora in adapters], axis=-1)
    joined = project_by_part(x, joined_a, dtype, 1, sum_dtype, adapters[0].parts)
    narrow = jnp.split(joined, list(accumulate(lora.a.shape[-1] for lora in adapters))[:-1], axis=-1)
    parts = zip(adapters, narrow, axes, strict=True)
    return [lora.widen(part, dtype, n_out, sum_dtype) for lora, part, n_out in parts]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich, 2019): x / rms(x) · (scale + offset), in float32; x / rms(x) where the
    family's norms have no scales.
    """

    def __init__(self, config: ModelConfig, width: int, param_dtype: DTypeLike):
        self.eps, self.offset = config.norm_eps, config.norm_offset
        start = jnp.full((width,), 1.0 - self.offset, param_dtype)
        self.scale = nnx.Param(start) if config.norm_scales else None

    def __call__(self, x: Float[Array, "... width"]) -> Array:
        full = x.astype(jnp.float32)
        full = full * jax.lax.rsqrt(jnp.mean(jnp.square(full), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            full = full * (self.scale[...].astype(jnp.float32) + self.offset)
        return full.astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, "half"]:
    """Return radians per position for each pair of a head's numbers (Su et al., 2021), scaled by `scaling`."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "proportional":
        rotated = jnp.arange(len(frequency)) < int(scaling.fraction * head_dim // 2)
        return jnp.where(rotated, frequency / scaling.factor, 0.0)
    if scaling.kind == "yarn":
        kept = _yarn_kept(head_dim, theta, scaling)
        return frequency * (kept + (1 - kept) / scaling.factor)
    turns = scaling.original_max_positions * frequency / (2 * jnp.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequency * (blend + (1 - blend) / scaling.factor)


def _yarn_kept(head_dim: int, theta: float, scaling: RopeScaling) -> Float[Array, "half"]:
    """Return the fraction of each pair's frequency that YaRN keeps: 1 up to one pair, 0 from another on."""

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, head_dim - 1.0)
    line = (jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / (last - first or 0.001)
    return 1 - jnp.clip(line, 0.0, 1.0)


Rope = tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]
"""Cosines and sines of every position, broadcast over heads."""


def rope_tables(positions: Int[Array, "B T"], frequencies: Float[Array, "half"], factor: float = 1.0) -> Rope:
    """Return cosine and sine of position × frequency, both multiplied by `factor`."""
    angle = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotate(x: Float[Array, "B T N W"], rope: Rope, platform: str = "cpu") -> Array:
    """Rotate the pairs (i, i + W/2) of each head: the half-split convention of the Hugging Face checkpoints. Where the
    tables have fewer pairs, W is the number of elements that are rotated, the first ones of a head.

    On TPUs halves of a head would be arrays of half-empty tiles, so that splitting and joining them would take longer
    than the projection. There a product with a permutation exchanges them, exactly.
    """
    cos, sin = rope
    if (width := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], rope, platform), x[..., width:]], axis=-1)
    if platform == "tpu":
        turned = project(x, _quarter_turn(x.shape[-1], x.dtype), x.dtype).astype(jnp.float32)
        cos, sin = (jnp.concatenate([table, table], axis=-1) for table in rope)
        return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _quarter_turn(width: int, dtype: DTypeLike) -> Float[Array, "W W"]:
    """Return the matrix that maps the halves (a, b) of a row to (-b, a)."""
    zeros, eye = jnp.zeros((width // 2, width // 2), dtype), jnp.eye(width // 2, dtype=dtype)
    return jnp.block([[zeros, eye], [-eye, zeros]])


def apply_softcap(x: Array, softcap: float | None) -> Array:
    """Return softcap · tanh(x / softcap) (Bello et al., 2016; Gemma 2), or `x` if `softcap` is None."""
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


class MLP(nnx.Module):
    """Feed-forward layer: down(act(gate(x)) · up(x)) (Shazeer, 2020), or down(act(up(x))) without a gate.

    Attributes:
        joint: names of the projections of its input.
    """

    joint = ("up_proj", "gate_proj")

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(Linear, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj: Linear | None = (
            linear(config.hidden_size, config.intermediate_size) if config.gated_mlp else None
        )
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Array:
        act = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(act(self.up_proj(x)))
        up, gate = apply_joint(self, x)
        return self.down_proj(act(gate) * up)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
