"""Build the optimizer of a run: gradient clipping, AdamW or Muon, and the learning rate of every step.

`OptimizerConfig` comes in, an optax transformation goes out. Each parameter is in one of four groups (`param_group`),
and each group may have settings of its own. AdamW or Muon updates the matrices; Muon is optax's, whose momentum
differs from Jordan's and nanochat's only in the first updates, where its bias from starting at zero is corrected.

Differences from a bare `optax.adamw`:

- no update is wasted: the warm-up starts above 0 and the decay reaches 0 just after the last update;
- the learning rate is an argument of the update: a run of another length needs no other program. A skipped update
  counts for the schedule, and not for the moments;
- biases and norm scales are not decayed (as in TRL and Hugging Face; `optax.adamw` and Tunix decay everything).
  Under LoRA only matrices are trained and the two agree;
- the arithmetic is float32 whatever the dtype of the parameters. Narrower parameters have a float32 copy in the
  optimizer's state: a step of 1e-6 is far below the spacing of bfloat16 numbers near 0.02 (1e-4) and would be lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import ArrayLike, Float, PyTree

from covey.config.schema import OptimizerConfig
from covey.errors import RecipeError
from covey.parallel.arrays import dotted_path

LearningRates = Mapping[str, Float[ArrayLike, ""]]
"""Learning rate of each of `PARAM_GROUPS`."""


def make_optimizer(
    config: OptimizerConfig | optax.GradientTransformation, total_steps: int
) -> optax.GradientTransformation:
    """Build the optimizer: clip the global norm, then apply AdamW (Loshchilov & Hutter, 2019, algorithm 2) or Muon with
    the schedule of `learning_rate`.

    Args:
        config: the settings; or an optax transformation, which is returned unchanged.
        total_steps: optimizer updates of the whole run, resumed parts included.

    Raises:
        RecipeError: `total_steps` is not a whole number above 0.
    """
    if isinstance(config, optax.GradientTransformation):
        return config
    clip = _clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    optimizer = ScheduledOptimizer(*_in_float32(optax.chain(clip, _descent(config))))
    optimizer.learning_rates = _learning_rates(config, total_steps)
    optimizer.clips = config.max_grad_norm > 0
    optimizer.transformation = param_group if _separates_groups(config) else _only_one
    return optimizer


class ScheduledOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """Optimizer with an `update` that takes `learning_rates` as an argument, so that no program is compiled for each.

    The update of a parameter follows from the end of its path, its own gradient and state, and the global norm of the
    gradients. An `update` of a part of the parameters takes the global norm as `norm`.

    Attributes:
        learning_rates: jitted function from the number of an update to the learning rate of each of `PARAM_GROUPS`.
        clips: whether `update` uses the global norm.
        transformation: function from a parameter's key path and array to the name of its transformation.
    """

    learning_rates: "Callable[[int], dict[str, jax.Array]]"
    clips: bool
    transformation: "Callable[[tuple[Any, ...], jax.Array], str]"


def _learning_rates(config: OptimizerConfig, total_steps: int) -> "Callable[[int], dict[str, jax.Array]]":
    """Return `ScheduledOptimizer.learning_rates`, jitted: separate operations would round in another way."""
    rates = {group: learning_rate(_for_group(config, group), total_steps) for group in PARAM_GROUPS}

    @jax.jit
    def learning_rates_at(count: jax.Array) -> dict[str, jax.Array]:
        return {group: jnp.float32(rate(count)) for group, rate in rates.items()}

    return learning_rates_at


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to the global norm `max_norm`, as `optax.clip_by_global_norm` does, whose state it has."""

    def update(
        grads: PyTree, state: PyTree, params: PyTree = None, *, norm: Any = None, **_: Any
    ) -> tuple[PyTree, PyTree]:
        norm = optax.tree.norm(grads) if norm is None else norm
        clipped = jax.tree.map(lambda g: jax.lax.select(norm < max_norm, g, (g / norm) * max_norm), grads)
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _descent(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build AdamW for all parameters, or a transformation for each group of parameters. Learning rates are 1."""
    if not _separates_groups(config):
        return _adamw(config)
    each = {group: _adamw(config, group) for group in PARAM_GROUPS} | {MATRIX: OPTIMIZERS[config.kind](config)}
    return optax.partition(each, lambda params: jax.tree_util.tree_map_with_path(param_group, params))


def _separates_groups(config: OptimizerConfig) -> bool:
    """Return whether each group of parameters has a transformation of its own."""
    return config.kind != "adamw" or any(_own_settings(config, group) for group in PARAM_GROUPS)


def _only_one(path: tuple[Any, ...], leaf: jax.Array) -> str:
    return "all"


def _adamw(config: OptimizerConfig, group: str = "matrix") -> optax.GradientTransformation:
    """Return AdamW with the settings of `group`. A weight decay of its own decays all parameters of the group."""
    c, decays_all = _for_group(config, group), "weight_decay" in _own_settings(config, group)
    return optax.adamw(_one, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=None if decays_all else decayed)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.contrib.muon(
        _one,
        beta=config.momentum,
        weight_decay=config.weight_decay,
        # The last two axes of a parameter are a matrix; an axis of stacked layers comes before them.
        muon_weight_dimension_numbers=partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers(-2, -1)),
    )


def _one(count: jax.Array) -> float:
    """Return the learning rate 1, as a schedule."""
    return 1.0


def _own_settings(config: OptimizerConfig, group: str) -> dict[str, Any]:
    """Return the settings that the parameters in `group` have of their own: `embedding_weight_decay` is the
    `weight_decay` of the embeddings.
    """
    named = {name: value for name, value in vars(config).items() if name.startswith(f"{group}_")}
    return {name.removeprefix(f"{group}_"): value for name, value in named.items() if value is not None}


def _for_group(config: OptimizerConfig, group: str) -> OptimizerConfig:
    """Return the settings of the parameters in `group`."""
    return replace(config, **_own_settings(config, group))


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Return the learning rate of the matrices as a function of the update number 0, 1, ..., total_steps − 1. The peak
    is `learning_rate` times `initial_fraction`.

    W = warmup_ratio · total_steps, rounded to the nearest integer. Update n < W gets peak · (n + 1) / (W + 1), update
    W the peak. From there `cosine` and `linear` fall to exactly 0 at n = total_steps, just after the last update. From
    W on optax, Tunix and Hugging Face have equal values. Their warm-up starts at 0: their first update does nothing.

    >>> rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_ratio=0.25, schedule="linear"), 4)
    >>> [round(float(rate(n)), 4) for n in range(5)]
    [0.5, 1.0, 0.6667, 0.3333, 0.0]

    Raises:
        RecipeError: `total_steps` is not a whole number above 0.
    """
    if not isinstance(total_steps, int) or total_steps < 1:
        raise RecipeError(f"total_steps is {total_steps!r}", want="a whole number, at least 1")
    peak = config.learning_rate * config.initial_fraction
    warmup = min(round(config.warmup_ratio * total_steps), total_steps - 1)
    decay = SCHEDULES[config.schedule](peak, total_steps - warmup)
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), decay], [warmup])


def decayed(params: PyTree) -> PyTree:
    """Return True for each parameter with weight decay: matrices and embeddings, not biases and norm scales. The name
    decides as well as the rank: scales of stacked layers are [layers, D].
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: param_group(path, leaf) != VECTOR, params)


def param_group(path: tuple[Any, ...], leaf: jax.Array) -> str:
    """Return the group, one of `PARAM_GROUPS`, of the parameter at a key path; adapters count as matrices."""
    *modules, name = dotted_path(path).split(".")
    if leaf.ndim < 2 or name.rsplit("_", 1)[-1] in ("bias", "scale", "log"):  # dt_bias and a_log of delta nets
        return VECTOR
    if name != "embedding":
        return MATRIX
    return UNEMBEDDING if modules[-1:] == ["head"] else EMBEDDING


class Float32State(NamedTuple):
    """State of an optimizer that computes in float32."""

    inner: optax.OptState
    master: PyTree
    """Float32 copies of the parameters that are stored narrower, None elsewhere."""


def _in_float32(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on float32 gradients and parameters, and multiply its updates by the learning rate of each group.
    Narrow parameters are their float32 copy, rounded.
    """

    def init(params: PyTree) -> Float32State:
        master = jax.tree.map(lambda x: _widen(x) if _is_narrow(x) else None, params)
        return Float32State(inner.init(jax.tree.map(_widen, params)), master)

    def update(
        grads: PyTree, state: Float32State, params: PyTree = None, *, learning_rates: LearningRates, norm: Any = None
    ) -> tuple[PyTree, Float32State]:
        wide = jax.tree.map(lambda p, m: p if m is None else m, params, state.master)
        updates, inner_state = inner.update(jax.tree.map(_widen, grads), state.inner, wide, norm=norm)
        updates = jax.tree_util.tree_map_with_path(lambda path, u: u * learning_rates[param_group(path, u)], updates)
        moved = optax.apply_updates(wide, updates)
        master = jax.tree.map(lambda p, m: m if _is_narrow(p) else None, params, moved)
        updates = jax.tree.map(_update_to, params, moved, updates)
        return updates, Float32State(inner_state, master)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_narrow(x: jax.Array) -> bool:
    return bool(jnp.finfo(x.dtype).bits < 32)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if _is_narrow(x) else x


def _update_to(param: jax.Array, moved: jax.Array, update: jax.Array) -> jax.Array:
    """Return the update with which `optax.apply_updates` turns a narrow `param` into `moved` rounded to its dtype."""
    return moved.astype(param.dtype).astype(moved.dtype) - param if _is_narrow(param) else update


SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "cosine": optax.cosine_decay_schedule,
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "constant": lambda peak, steps: optax.constant_schedule(peak),
}
"""Value of the setting `schedule` → decay after the warm-up, a function of the peak and the number of updates."""
OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {"adamw": _adamw, "muon": _muon}
"""Value of the setting `kind` → optimizer of the matrices."""

MATRIX, EMBEDDING, UNEMBEDDING, VECTOR = PARAM_GROUPS = ("matrix", "embedding", "unembedding", "vector")
"""Groups of parameters. Settings of `OptimizerConfig` that begin with the name of a group are for that group alone."""
