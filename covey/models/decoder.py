"""One decoder for every family, from tokens and positions to hidden states. The head is applied separately
(`losses.logprobs`, the sampler).

Training and sampling run this same forward pass; they differ in the `attend` they pass. Layers are a list, or stacks
(`layer_stack`). Decoding, which has a cache, takes a list and is unrolled layer by layer; layers that are alike are
traced once. Without a cache the layers are a loop, compiled once for all of them; the backward pass rematerialises each
unless `remat` is off.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from types import SimpleNamespace
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.attention import Attend, SharedKeys
from covey.models.config import ModelConfig, RopeScaling
from covey.models.layer_kinds import find_kind
from covey.models.layer_loop import save_all_but_selected, scan_layers
from covey.models.layers import (
    SAVED_PRODUCT,
    Linear,
    LoRA,
    RMSNorm,
    Rope,
    apply_joint,
    apply_softcap,
    look_up,
    rope_frequencies,
    rope_tables,
    rotate,
    save_product,
)
from covey.models.spans import NO_WINDOW
from covey.models.stored_kernel import KernelFormat
from covey.parallel.arrays import num_row_shards, sharding_of


class DecoderOptions(TypedDict, total=False):
    """Storage and compute options of a decoder; see `config.schema.ModelOptions`."""

    param_dtype: str
    compute_dtype: str
    remat: bool
    remat_keeps: str


def rngs_for_shapes() -> Any:
    """Return a stand-in for `nnx.Rngs` under `nnx.eval_shape`: always the same key, since no value is computed. Rngs
    counts the keys that it gives, and each count searches the whole trace so far.
    """
    return SimpleNamespace(params=lambda: jax.random.key(0))


class Embedding(nnx.Module):
    """Embedding table with one row per token, [V, D]; the head is stored in the same shape."""

    def __init__(self, config: ModelConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02).astype(param_dtype))


class Attention(nnx.Module):
    """Attention block: projections, rotation, and the call to `attend`.

    Attributes:
        joint: names of the projections of its input.
    """

    joint = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        c, linear = config, partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        queries = c.num_heads * c.head_dim
        self.q_proj = linear(c.hidden_size, queries * (2 if c.attention_gate else 1), bias=c.attention_bias)
        self.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = linear(queries, c.hidden_size, bias=False)
        heads = (c.num_heads, c.num_kv_heads) if c.qk_norm_whole else (1, 1)
        norms = [RMSNorm(c, number * c.head_dim, param_dtype) if c.qk_norm else None for number in heads]
        self.q_norm, self.k_norm = norms
        self.config = config

    def __call__(self, x: Array, rope: Rope, attend: Attend, cache: Any, window: Any) -> tuple[Array, Any]:
        c = self.config
        q, k, v = apply_joint(self, x, c.head_dim)
        q, gate = _split_gate(q) if c.attention_gate else (q, None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalise(self.q_norm, q), self._normalise(self.k_norm, k)
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        q, k = (rotate(heads, rope, self.q_proj.platform) for heads in (q, k))
        q = q * jnp.asarray(scale, x.dtype)
        mixed, cache = attend(q, k, v, cache, window=window, softcap=c.attn_softcap)
        return self.o_proj.from_heads(mixed if gate is None else mixed * jax.nn.sigmoid(gate)), cache

    def _normalise(self, norm: RMSNorm, heads: Float[Array, "B T N W"]) -> Float[Array, "B T N W"]:
        whole = self.config.qk_norm_whole
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape) if whole else norm(heads)


def _split_gate(q: Float[Array, "B T 2H W"]) -> tuple[Float[Array, "B T H W"], Float[Array, "B T H W"]]:
    """Return queries and gates, which are adjacent in the projection of each head."""
    pairs = q.reshape(*q.shape[:2], -1, 2, q.shape[-1])
    return pairs[..., 0, :], pairs[..., 1, :]


class Layer(nnx.Module):
    """One decoder block: a mixer, such as attention, and a feed-forward part, each with its norms and residual. A kind
    of block may have a third part, which ends it.

    Args:
        number: number of the layer in the model, which has the kinds of its parts; see `layer_kinds`.
    """

    def __init__(self, config: ModelConfig, number: int = 0, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: Any):
        norm = partial(RMSNorm, config, config.hidden_size, param_dtype)
        self.attn_norm: RMSNorm | None = norm() if config.pre_norms else None
        self.mlp_norm: RMSNorm | None = norm() if config.pre_norms else None
        self.post_attn_norm: RMSNorm | None = norm() if config.post_norms else None
        self.post_mlp_norm: RMSNorm | None = norm() if config.post_norms else None
        kinds = [find_kind(name) for name in config.parts(number)]
        for kind in kinds:
            setattr(self, kind.part, kind.load()(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs))
        self.mixer, self.feed_forward, *ends = (kind.part for kind in kinds)
        self.last_part: str | None = ends[0] if ends else None

    def __call__(
        self,
        x: Array,
        rope: Rope,
        attend: Attend,
        cache: Any,
        window: Any,
        gather: Callable[[Array], Array],
        own_input: Any = None,
    ) -> tuple[Array, Any]:
        """`gather` brings the tokens of a row together, which devices may have divided."""
        mix, feed_forward = getattr(self, self.mixer), getattr(self, self.feed_forward)
        mixed, cache = mix(gather(_apply_norm(self.attn_norm, x)), rope, attend, cache, window)
        x = x + _apply_norm(self.post_attn_norm, _with_gradient(gather, mixed))
        out = feed_forward(gather(_apply_norm(self.mlp_norm, x)))
        x = x + _apply_norm(self.post_mlp_norm, _with_gradient(gather, out))
        return (x if self.last_part is None else getattr(self, self.last_part)(x, own_input, gather)), cache


def _apply_norm(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(function: Callable[[Array], Array], x: Array) -> Array:
    """Return `x`, whose gradient becomes `function` of it."""
    return x


_with_gradient.defvjp(lambda _, x: (x, None), lambda function, _, grad: (function(grad),))


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
        config: the architecture.
        rngs: source of the random initial weights.
        param_dtype: type of the weights in memory.
        compute_dtype: type of the operands of products.
        remat: recompute layers in the backward pass.
        remat_keeps: what a rematerialised layer saves; see `config.schema.ModelOptions`.

    Attributes:
        platform: platform of the devices for which programs are built, see `parallel.mesh.platform_of`. Loading and
            placing a model set the platform of its parameters. A new model has "cpu", which is correct everywhere.
        layers: the layers; or stacks of like layers, whose arrays have an axis of layers in front (`layer_stack`).
        stacked: number of layers of each stack; empty where layers are a list.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        remat: bool = True,
        remat_keeps: str = "products",
    ):
        self.config, self.dtype = config, jnp.dtype(compute_dtype)
        self.remat, self.remat_keeps, self.platform = remat, remat_keeps, "cpu"
        table = partial(Embedding, config, param_dtype=param_dtype, rngs=rngs)
        layer = partial(Layer, config, dtype=self.dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = table()
        self.layers = nnx.List([layer(number) for number in range(config.num_layers)])
        self.stacked: tuple[int, ...] = ()
        inputs: Any = (lambda *_, **__: None) if config.layer_inputs is None else find_kind(config.layer_inputs).load()
        self.layer_inputs: Any = inputs(config, dtype=self.dtype, param_dtype=param_dtype, rngs=rngs)
        self.norm = RMSNorm(config, config.hidden_size, param_dtype)
        self.head: Embedding | None = None if config.tie_embeddings else table()

    @property
    def head_weight(self) -> Float[Array, "V D"]:
        """Return the table that maps hidden states to logits: the head's own, or the embedding when they are tied."""
        return (self.embed if self.head is None else self.head).embedding[...]

    @property
    def fixed_shapes(self) -> bool:
        """Whether shapes follow the settings and not the lengths of a step: on accelerators, where a program takes
        minutes to compile and room for what is not there costs little. A CPU's shapes follow the lengths.
        """
        return self.platform != "cpu"

    @property
    def mesh(self) -> AbstractMesh:
        """Return the mesh of the weights; it is empty where they are on one device."""
        mesh: AbstractMesh = jax.typeof(self.embed.embedding[...]).sharding.mesh
        return mesh

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        cache: Sequence[Any] | None = None,
    ) -> tuple[Float[Array, "B T D"], list[Any]]:
        """Return hidden states after the final norm, and each layer's new cache as `attend` returned it.

        Args:
            cache: of each layer, for a model with a list of layers.
        """
        assert cache is None or not self.stacked, "unstack_layers comes before decoding"
        c = self.config
        x, ropes = self._embed_tokens(tokens), self._rope_tables(positions)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, x)
        shared: dict[int | None, SharedKeys] = {}
        if cache is None:
            for number, layers in enumerate(self.layer_runs()):
                x = self._scan_layers(number, layers, x, ropes, attend, _rows_of(inputs, layers), shared)
            return self.norm(x), []
        caches, run = [], self._layer_traced_once(ropes, attend)
        for number, layers in enumerate(self.layer_runs()):
            graph, weights = self._split_run(number, layers)
            for index, own in zip(layers, weights, strict=True):
                held = shared.get(c.kv_link(index), cache[index])
                own_input = None if inputs is None else inputs[index]
                x, new = run(graph, own, x, held, c.window(index), c.rotates_otherwise(index), own_input)
                if isinstance(new, SharedKeys):
                    shared[index], new = new, new.cache
                caches.append(new)
        return self.norm(x), caches

    def layer_runs(self) -> list[range]:
        """Return the numbers of the layers of each loop: runs of adjacent layers that have equal kinds, equal
        `_layer_signature` and the same source of keys and values.
        """
        c, layers = self.config, enumerate([] if self.stacked else self.layers)
        keys = [(c.parts(number), c.kv_link(number), _layer_signature(layer)) for number, layer in layers]
        lengths = self.stacked or [len(list(run)) for _, run in groupby(keys)]
        return [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _split_run(self, number: int, layers: range) -> tuple[Any, Any]:
        """Return the graph of the layers of a run, and the weights of each, or their stacks."""
        if self.stacked:
            return nnx.split(self.layers[number])
        return nnx.split(self.layers[layers[0]])[0], [nnx.split(self.layers[index])[1] for index in layers]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return float32 logits, soft-capped where the family does so. Use it for few positions: it makes [.., V]."""
        return head_logits(self.head_weight, hidden, self.dtype, self.config.final_softcap)

    def _embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # float32 weights keep the residual stream in float32 even when the products run in bfloat16.
        x = look_up(self.platform, self.embed.embedding[...], tokens)
        x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        return self._shard_rows(self.norm(x) if self.config.embed_norm else x)

    def _rope_tables(self, positions: Int[Array, "B T"]) -> list[Rope]:
        """Return the rotary tables of most layers, and of the layers that rotate otherwise."""
        c = self.config
        bases = [(c.rope_theta, c.rope_scaling), (c.local_rope_theta or c.rope_theta, c.local_rope_scaling)]
        widths = [c.rotary_dim or self._head_width(otherwise) for otherwise in (False, True)]
        tables = [self._rope_table(positions, width, *base) for width, base in zip(widths, bases, strict=True)]
        still = rope_tables(positions, jnp.zeros((c.rotary_dim or c.head_dim) // 2))
        return tables if c.rope_layers is None else [tables[0], still]

    def _head_width(self, otherwise: bool) -> int:
        """Return the width of heads of the layers that rotate as most do, or otherwise."""
        c, layers = self.config, range(self.config.num_layers)
        return next((c.heads(layer)[1] for layer in layers if c.rotates_otherwise(layer) == otherwise), c.head_dim)

    def _rope_table(self, positions: Int[Array, "B T"], width: int, theta: float, scaling: RopeScaling | None) -> Rope:
        frequencies = rope_frequencies(width, theta, scaling)
        factor = 1.0 if scaling is None else scaling.attention_factor
        return rope_tables(positions, -frequencies if self.config.rope_backwards else frequencies, factor)

    def _shard_rows(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Constrain `x` to be sharded by rows over the mesh of the weights, if there is one: otherwise the compiler may
        choose to gather the residual stream on every device.

        On accelerators the devices that divide the heads also divide the tokens of a row (sequence parallelism,
        Korthikanti et al., 2022): each norm is computed once, and XLA computes products while it exchanges tokens.
        """
        return self._constrain(x, None if self.platform == "cpu" else "time")

    def _gather_tokens(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Constrain `x` to have whole rows where `_shard_rows` divides their tokens: the compiler may choose to gather
        the projections instead.
        """
        return x if self.platform == "cpu" else self._constrain(x, None)

    def _constrain(self, x: Float[Array, "B T D"], time: str | None) -> Float[Array, "B T D"]:
        if self.mesh.empty or x.shape[0] % num_row_shards(self.mesh):
            return x
        sharded: Array = jax.lax.with_sharding_constraint(x, sharding_of(("rows", time, None), x.shape, self.mesh))
        return sharded

    def _layer_traced_once(self, ropes: list[Rope], attend: Attend) -> Any:
        """Return a layer as a function of its graph, weights, input and cache, of its window, and of whether it rotates
        otherwise. It is traced and lowered once for all layers that are alike; XLA copies it to each call before it
        optimizes the program.
        """

        @partial(jax.jit, static_argnums=(0, 4, 5))
        def run(
            graph: Any, state: Any, x: Array, cache: Any, window: int | None, otherwise: bool, own_input: Any
        ) -> tuple[Array, Any]:
            layer, rope = nnx.merge(graph, state), ropes[otherwise]
            x, new = layer(x, rope, attend, cache, window, self._gather_tokens, own_input)
            return self._shard_rows(x), new

        return run

    def _scan_layers(
        self,
        number: int,
        layers: range,
        x: Array,
        ropes: list[Rope],
        attend: Attend,
        inputs: Any,
        shared: dict[int | None, SharedKeys],
    ) -> Array:
        """Return `x` after the layers of a run. A layer whose keys others use adds them to `shared`."""
        graph, weights = self._split_run(number, layers)
        c, link = self.config, self.config.kv_link(layers[0])
        hands_on = link == layers[0]
        windows = [c.window(i) for i in layers]
        otherwise = jnp.array([c.rotates_otherwise(i) for i in layers])
        window_sizes = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)

        def step(carry: Any, state: Any, numbers: tuple[Array, Array, Any]) -> Any:
            otherwise, window, own_input = numbers
            x = carry[0] if hands_on else carry
            rope = _choose_rope(ropes, otherwise, c.rotates_otherwise(layers[0]))
            layer = nnx.merge(graph, state)
            limit = None if c.windows is None else window
            out, new = layer(save_product(x), rope, attend, shared.get(link), limit, self._gather_tokens, own_input)
            return (self._shard_rows(out), new) if hands_on else self._shard_rows(out)

        policy = REMAT_POLICIES[self.remat_keeps] if self.remat else save_all_but_selected
        run: Any = partial(scan_layers, step, platform=self.platform, policy=policy)
        per_layer = (otherwise, window_sizes, inputs)
        if not hands_on:
            out: Array = run(x, weights, per_layer)
            return out
        nothing = jnp.zeros((*x.shape[:2], *c.heads(layers[0])), x.dtype)
        x, shared[link] = run((x, SharedKeys(nothing, nothing, None)), weights, per_layer)
        return x


def head_logits(
    weight: Float[Array, "V D"], hidden: Float[Array, "... D"], dtype: DTypeLike, softcap: float | None
) -> Float[Array, "... V"]:
    """Compute hidden · weightᵀ, accumulated in float32, then soft-capped if `softcap` is given."""
    precision = jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(
        hidden.astype(dtype), weight.astype(dtype), contract, precision=precision, preferred_element_type=jnp.float32
    )
    return apply_softcap(logits, softcap)


def _rows_of(inputs: Any, layers: range) -> Any:
    return None if inputs is None else inputs[layers.start : layers.stop]


def _choose_rope(ropes: list[Rope], otherwise: Array, first: bool) -> Rope:
    """Return the rotary tables of a layer of a run; of its `first` where heads that rotate otherwise differ in width,
    which are never in one run.
    """
    if ropes[0][0].shape != ropes[1][0].shape:
        return ropes[first]
    chosen: Rope = jax.tree.map(lambda most, other: jnp.where(otherwise, other, most), *ropes)
    return chosen


def _layer_signature(layer: Layer) -> Any:
    """Return the key by which layers are alike: the names, shapes and types of their weights, and the numbers of their
    adapters.
    """
    state = nnx.split(layer)[1]
    scales = [(node.scale, node.dropout) for _, node in nnx.iter_graph(layer) if isinstance(node, LoRA)]
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)], scales


def num_parameters(model: nnx.Module) -> int:
    """Return the number of the model's weights, its adapters' included."""
    return sum(x.size for x in jax.tree.leaves(nnx.split(model)[1]))


def compiler_options(model: nnx.Module) -> dict[str, str]:
    """Return the XLA options for compiling a gradient of `model`. XLA unrolls a loop of one iteration, and on CPU
    unrolled rematerialised layers save memory only in the order of operations requested here.
    """
    decoders = [node for _, node in nnx.iter_graph(model) if isinstance(node, Decoder)]
    iterations = [len(loop) for decoder in decoders for loop in decoder.layer_runs()]
    if any(decoder.platform != "cpu" for decoder in decoders) or iterations.count(1) < 2:
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


REMAT_POLICIES: dict[str, Any] = {
    "nothing": None,
    "products": jax.checkpoint_policies.save_only_these_names(SAVED_PRODUCT),
}
"""Name → checkpoint policy: what a rematerialised layer saves besides its input."""


def abstract_decoder(config: ModelConfig, fmt: KernelFormat | None = None, **switches: Any) -> Decoder:
    """Return a decoder with shapes in place of arrays.

    Args:
        config: the architecture.
        fmt: format of its projections; None for floating point.
        switches: see `Decoder`.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=rngs_for_shapes(), **switches))
    if fmt is not None:
        for linear in [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]:
            linear.kernel = fmt.abstract(linear.shape, linear.kernel.dtype)
    return model
