"""LoRA on a decoder (Hu et al., 2021): add, remove and merge adapters; apply the dropout of a training step.

The adapters are our own module and not qwix's: qwix intercepts products by patching them while the model is traced,
which fails inside rematerialised layers, and ours are rematerialised. The base under them may be quantised
(`stored_kernel`).

Actor and reference share the base: `with_lora` copies the module, not its arrays.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from covey.config.schema import LoRAConfig
from covey.errors import RecipeError, nearest
from covey.models import families
from covey.models.decoder import Decoder
from covey.models.layer_stack import stack_layers, unstack_layers
from covey.models.layers import Linear, LoRA, project
from covey.models.stored_kernel import FrozenParam, KernelFormat, StoredKernel
from covey.models.value_model import HeadParam, ValueModel

Model = TypeVar("Model", Decoder, ValueModel)
AnyModel = TypeVar("AnyModel", bound=nnx.Module)

ALL_LINEAR = "all-linear"


def with_lora(base: Model, config: LoRAConfig, *, seed: int = 0) -> Model:
    """Return a model that shares every array of `base` and has adapters on `config.targets`.

    Args:
        seed: seed of the adapters' initial values and of their dropout.

    Errors: RecipeError for a target that names no projection of this model, or a rank below 1.
    """
    check_rank(config)
    model = nnx.merge(*nnx.split(base))
    rngs, chosen = nnx.Rngs(params=seed), find_targets(model, config.targets)
    for number, linear in enumerate(chosen.values()):
        linear.lora = LoRA(*linear.shape, config.rank, config.alpha, rngs=rngs)
        linear.lora.dropout, linear.lora.noise = config.dropout, (seed, number)
    return model


def check_rank(config: LoRAConfig) -> None:
    """Refuse settings of adapters with rank 0, which has none, with a RecipeError."""
    if config.rank < 1:
        raise RecipeError(f"LoRA rank {config.rank}", want="a rank of 1 or more", where="model.lora.rank")


def find_targets(model: Decoder | ValueModel, wanted: Iterable[str]) -> dict[str, Linear]:
    """Return the projections that `wanted` names, by path and in the order of the model.

    Each entry is `all-linear`; the name of a projection, ours or Hugging Face's (`q_proj`, `fc1`); or a regular
    expression over whole dotted paths, ours or Hugging Face's: `layers\\.[0-3]\\..*`, `.*self_attn.*`.

    Errors: RecipeError for an entry that names none.
    """
    named, every = families.projection_names(decoder_of(model).config), projections(model)
    chosen = {path for entry in wanted for path in _match_projections(entry, named)}
    return {path: linear for path, linear in every.items() if path in chosen}


def _match_projections(entry: str, named: Mapping[str, str]) -> list[str]:
    try:
        pattern = re.compile(r".*" if entry == ALL_LINEAR else rf".*\.{entry}" if entry.isidentifier() else entry)
    except re.error as error:
        raise RecipeError(
            f"LoRA target {entry!r} is no regular expression: {error}", where="model.lora.targets"
        ) from error
    matches = [ours for ours, theirs in named.items() if pattern.fullmatch(ours) or pattern.fullmatch(theirs)]
    if not matches:
        raise RecipeError(
            f"LoRA target {entry!r} names no projection of this model",
            want=f"{ALL_LINEAR}, a name, or a regular expression over whole paths such as {next(iter(named))}",
            fix=nearest(entry, {path.rsplit(".", 1)[-1] for pair in named.items() for path in pair}),
            where="model.lora.targets",
        )
    return matches


def merge_lora(model: Model) -> Model:
    """Return a copy without adapters: each kernel becomes W + scale·A·B, and a quantised one becomes floating-point."""
    if decoder_of(model).stacked:
        return stack_layers(merge_lora(unstack_layers(model)))
    model = nnx.merge(*nnx.split(model))
    for linear in projections(model).values():
        if linear.lora is not None or isinstance(linear.kernel, StoredKernel):
            linear.kernel = nnx.Param(merge_kernel(linear, linear.kernel.dtype))
            linear.lora = None
    return model


def merge_as_base(model: Model, dtype: DTypeLike, fmt: KernelFormat | None = None) -> Model:
    """Return a base for new adapters that computes what `model` does: its own adapters are merged, its weights cast to
    `dtype`, and its projections quantised to the format `fmt`, one projection at a time.

    Errors: RecipeError where the blocks of `fmt` do not divide a kernel's inputs.
    """
    model = nnx.merge(*nnx.split(model))
    for linear in projections(model).values():
        kernel = merge_kernel(linear, dtype if fmt is None else jnp.float32)
        linear.kernel = nnx.Param(kernel) if fmt is None else fmt.store(kernel, dtype)
        linear.lora = None
    parts: tuple[Any, ...] = nnx.split(model, FrozenParam, ...)
    merged: Model = nnx.merge(*parts[:2], jax.tree.map(lambda x: x.astype(dtype), parts[2]))
    return merged


def merge_kernel(linear: Linear, dtype: DTypeLike) -> Float[Array, "n_in n_out"]:
    """Return W + scale·A·B, computed in float32 and rounded once; W itself where there is no adapter."""
    if linear.lora is None:
        return linear.kernel[...].astype(dtype)
    update = project(linear.lora.a[...], linear.lora.b[...], jnp.float32) * linear.lora.scale
    return (linear.kernel[...].astype(jnp.float32) + update).astype(dtype)


def without_lora(model: Model) -> Model:
    """Return the base under the adapters, sharing its arrays."""
    model = nnx.merge(*nnx.split(model))
    for linear in _linears(model):
        linear.lora = None
    return model


def has_lora(model: nnx.Module) -> bool:
    """Return True if any projection has an adapter."""
    return len(nnx.state(model, nnx.LoRAParam)) > 0


def adapters_change_base(model: Decoder | ValueModel) -> bool:
    """Return True if the adapters change the base's output; new ones, whose B is 0, do not."""
    return any(_has_nonzero(x.lora.b[...]) for x in _linears(model) if x.lora is not None)


def _has_nonzero(x: jax.Array | np.ndarray) -> bool:
    """Return True if any entry is not 0. Only an array that other processes have parts of needs a program."""
    shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    return bool(jnp.any(x) if shared else np.asarray(x).any())


def split_trainable(model: AnyModel) -> tuple[nnx.GraphDef[AnyModel], nnx.State[Any, Any], nnx.State[Any, Any]]:
    """Return the model's graph, its trainable state, and the rest.

    A model with adapters trains them and a value head, if it has one; other models train every weight.

    Errors: RecipeError for a quantised model without adapters.
    """
    if not has_lora(model) and nnx.state(model, FrozenParam):
        raise RecipeError(
            "a quantised base cannot be trained",
            want="adapters on it, or a base that is not quantised",
            fix="model.lora.rank above 0, in Python lora.with_lora; or model.quantize none",
            where="model.quantize",
        )
    kind = (nnx.LoRAParam, HeadParam) if has_lora(model) else nnx.Param
    parts: tuple[Any, ...] = nnx.split(model, kind, ...)
    return parts[0], parts[1], parts[2]


def apply_lora_dropout(graph: Any, params: Any, step: Int[Array, ""] | int) -> Any:
    """Return `params` for the forward pass of update `step`, with dropout on the inputs of the adapters that have it.

    An input is zeroed, or divided by the fraction kept, through its row of A. One deviation from Hu et al.: the zeros
    are drawn once per update, from (seed, adapter, step), and shared by all of its tokens. So an update does not depend
    on how its completions are packed and split, and a resumed run draws what an uninterrupted run would have drawn.
    """
    model = nnx.merge(graph, params)
    noisy = _with_dropout(model)
    for lora in noisy:
        seed, number = lora.noise
        draw = partial(_draw_kept, seed, 1 - lora.dropout, lora.a.shape[-2], step)
        kept = jax.vmap(draw)(jnp.array(number)) if isinstance(number, tuple) else draw(number)
        kept = jnp.expand_dims(kept, -3) if lora.a.ndim > kept.ndim else kept  # all parts of the rows drop the same
        lora.a[...] = jnp.where(kept, lora.a[...] / (1 - lora.dropout), 0.0)
    return nnx.split(model)[1] if noisy else params


def join_adapters(model: Model) -> Model:
    """Return `model` with adapters that decode in fewer products, where it is built for an accelerator; else `model`.

    The adapters of a module's projections of one input (`joint`) share one A, in which theirs lie side by side, and
    each has its B between rows of zeros. XLA computes one product with A, and on GPUs one with all B.
    """
    if decoder_of(model).platform == "cpu":
        return model
    model = nnx.merge(*nnx.split(model))
    for _, node in nnx.iter_graph(model):
        linears = (getattr(node, name) for name in getattr(node, "joint", ()))
        adapters = [linear.lora for linear in linears if linear is not None and linear.lora is not None]
        if adapters:
            _join(adapters)
    return model


def _join(adapters: list[LoRA]) -> None:
    joined, start = jnp.concatenate([lora.a[...] for lora in adapters], axis=-1), 0
    for lora in adapters:
        end = start + lora.a.shape[-1]
        b = jnp.pad(lora.b[...], ((start, joined.shape[-1] - end), (0, 0)))
        lora.a, lora.b, start = nnx.LoRAParam(joined), nnx.LoRAParam(b), end


def has_dropout(model: nnx.Module) -> bool:
    """Return True if any adapter has dropout."""
    return bool(_with_dropout(model))


def _with_dropout(model: nnx.Module) -> list[LoRA]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, LoRA) and node.dropout]


def _draw_kept(seed: int, fraction: float, count: int, step: Any, number: Any) -> Bool[Array, "n_in 1"]:
    """Draw the mask of the inputs of adapter `number` that are kept in update `step`."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), number), step)
    return jax.random.bernoulli(key, fraction, (count, 1))


def projections(model: Decoder | ValueModel) -> dict[str, Linear]:
    """Return every projection of the layers by its path in the decoder, `layers.0.attn.q_proj`; the layers must be a
    list.
    """
    decoder: Any = decoder_of(model)
    assert not decoder.stacked, "unstack_layers comes before projections"
    linears = {}
    for path in families.projection_names(decoder.config):
        linears[path] = reduce(_member, path.split("."), decoder)
    return linears


def _member(node: Any, name: str) -> Any:
    return node[int(name)] if name.isdigit() else getattr(node, name)


def _linears(model: nnx.Module) -> list[Linear]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]


def decoder_of(model: Decoder | ValueModel) -> Decoder:
    """Return the decoder under a value head, or the decoder itself."""
    return model.decoder if isinstance(model, ValueModel) else model
