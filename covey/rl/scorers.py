"""Inference on given completions: log-probs, values and scores, slice by slice.

`InferenceWorker` hosts the reference, the current critic and the reward model. The same scorers compute the actor's old
log-probs, with the weights of its trainer. The last functions make the reference from the actor, and let it follow the
actor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from covey.config.schema import GRPOConfig
from covey.errors import RecipeError, WeightsError, nearest
from covey.losses.logprobs import token_logps
from covey.losses.value import groups_to_score, row_values
from covey.models.decoder import Decoder
from covey.models.dtypes import operand_type, round_kernels
from covey.models.layer_stack import LayerStacks
from covey.models.lora import adapters_change_base, merge_lora, split_trainable, without_lora
from covey.models.value_model import ValueModel
from covey.packing.rows import Rows, pack, rows_at_a_time, split_micro_batches, unpack
from covey.parallel import processes
from covey.parallel.arrays import reshard, rows_placement
from covey.parallel.shapes import abstract

RoleName = TypeVar("RoleName", bound=str)


class RowScorer:
    """Compute numbers of the scored tokens of rows, slice by slice.

    Args:
        model: the model; weights are passed to each call.
        name: name of the program.
        compute: function (graph, weights, rows) → arrays [R, M].

    Attributes:
        program: the jitted function of weights and rows.
        operand_type: type to which the weights' kernels are rounded before a call.
    """

    def __init__(self, model: Decoder | ValueModel, name: str, compute: Callable[[Any, Any, Rows], Any]):
        self.graph, self.name, self.operand_type = nnx.split(model)[0], name, operand_type(model)
        self.program = processes.here().in_order(name, jax.jit(partial(compute, self.graph)))

    @classmethod
    def of_logps(cls, model: Decoder, temperature: float) -> "RowScorer":
        """Return the scorer of a decoder's log-probs, by the log-softmax of logits / temperature."""
        return cls(model, "score", lambda graph, params, rows: token_logps(graph, params, rows, temperature).logps)

    @classmethod
    def of_token_values(cls, model: Decoder, temperature: float) -> "RowScorer":
        """Return the scorer of a decoder's log-probs and entropies."""
        compute = lambda graph, params, rows: tuple(token_logps(graph, params, rows, temperature))  # noqa: E731
        return cls(model, "token values", compute)

    @classmethod
    def of_values(cls, model: ValueModel) -> "RowScorer":
        """Return the scorer of the values of a value model."""
        return cls(model, "values", row_values)

    def __call__(self, params: Any, rows: Rows, lengths: Sequence[int], size: int) -> list[list[np.ndarray]]:
        """Return for each result of the program one float32 array per completion, `lengths[i]` long; on a mesh over
        several processes with the values of the completions in rows of this process's devices.

        Args:
            params: the weights.
            rows: packed completions.
            lengths: number of tokens of each completion.
            size: number of rows that are computed at a time.
        """
        params, placement = round_kernels(params, self.operand_type), rows_placement(params)
        parts = [
            jax.tree.leaves(self.program(params, processes.here().put_host(p, placement)))
            for p in split_micro_batches(rows, size)
        ]
        results = [np.zeros((size * len(parts), *x.shape[1:]), x.dtype) for x in parts[0]]
        for number, part in enumerate(parts):
            for x, result in zip(part, results, strict=True):
                processes.here().read_own_rows(x, placement, result[number * size : (number + 1) * size])
        return [unpack(rows, result, lengths) for result in results]


class InferenceWorker:
    """Host models that are not trained here, by role: `reference`, `critic` and `reward`, each of which may be absent.

    Args:
        models: role → model on its devices: a `Decoder` as reference, a `ValueModel` as critic and as reward model.
        temperature: the rollout's, used for the reference's log-probs.

    Attributes:
        params: current weights by role.

    Raises:
        RecipeError: an unknown role, or a model of the wrong kind for its role.
    """

    def __init__(self, models: Mapping[RoleName, Decoder | ValueModel], temperature: float = 1.0):
        self.params: dict[str, nnx.State[Any, Any]] = {}
        self._temperature = temperature
        self._scorers: dict[str, RowScorer] = {}
        for role, model in models.items():
            self.host(role, model)

    def host(self, role: str, model: Decoder | ValueModel) -> None:
        """Take `model`, on its devices, in `role`, in place of another.

        Raises:
            RecipeError: an unknown role, or a model of the wrong kind for it.
        """
        _check_kind(role, model)
        self.params[role], temperature = nnx.state(model), self._temperature
        self._scorers[role] = (
            RowScorer.of_values(model) if isinstance(model, ValueModel) else RowScorer.of_logps(model, temperature)
        )

    def release(self, role: str) -> None:
        """Let go of the model in `role`, if there is one."""
        self.params.pop(role, None)
        self._scorers.pop(role, None)

    def model(self, role: str) -> Any:
        """Return the model in `role` with its current weights.

        Raises:
            RecipeError: no model has this role.
        """
        params = self._params_of(role)
        return nnx.merge(self._scorers[role].graph, params)

    def has(self, role: str) -> bool:
        """Return whether a model has this role.

        Raises:
            RecipeError: the role is unknown.
        """
        _check_role(role)
        return role in self.params

    def update_params(self, role: str, params: Any) -> None:
        """Set new weights for the next call: all of them, or some (for example only the adapters).

        Raises:
            RecipeError: no model has this role.
        """
        self.params[role] = nnx.merge_state(self._params_of(role), params)

    def state(self, role: str, convert: Callable[[Any], Any]) -> Any:
        """Return the weights in `role`, converted, as nested dicts for a checkpoint, layer by layer."""
        return nnx.to_pure_dict(LayerStacks(self.model(role)).unstack(convert(self.params[role])))

    def load_state(self, role: str, state: Any) -> None:
        """Restore `state(role)`."""
        stacks = LayerStacks(self.model(role))
        params = stacks.unstack(abstract(self.params[role]))
        nnx.replace_by_pure_dict(params, state)
        self.update_params(role, stacks.stack(params))

    def scores(self, role: str, rows: Rows, lengths: Sequence[int], size: int) -> list[np.ndarray]:
        """Compute the reference's log-probs, or the value of the state before each token: one float32 array per
        completion, `lengths[i]` long; `size` rows at once.

        Raises:
            RecipeError: no model has this role.
        """
        params = self._params_of(role)
        return self._scorers[role](params, rows, lengths, size)[0]

    def rewards(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        row_length: int = 768,
        max_tokens: int = 1024,
        mesh: Mesh | None = None,
    ) -> list[float]:
        """Compute the reward model's score of each completion: its head at the last token, a stop token included.

        Hugging Face takes the last token that is not padding; where a model pads with its stop token, that is the
        token before the stop token. Covey takes the true last token.

        Args:
            prompt_ids: the prompt of each completion.
            completion_ids: one list of tokens per completion.
            row_length: longest row in tokens; a longer sample raises it.
            max_tokens: about how many tokens are computed at a time.
            mesh: mesh of the reward model; one device when not set.

        Raises:
            RecipeError: there is no reward model.
            WeightsError: a token is outside the reward model's vocabulary: it has another tokenizer.
        """
        self._params_of("reward")
        if not len(completion_ids):
            return []
        groups = groups_to_score(prompt_ids, completion_ids)
        self._check_tokens([g.prompt_tokens for g in groups] + [c.tokens for g in groups for c in g.completions])
        fixed_shapes = self.model("reward").decoder.fixed_shapes
        rows = pack(groups, row_length, max_tokens=max_tokens, compile_cost=math.inf if fixed_shapes else 0.0)
        lengths = [len(c) + 1 for c in completion_ids]
        scores = self.scores("reward", rows, lengths, rows_at_a_time(rows, mesh, max_tokens, fixed_shapes))
        return [float(score[-1]) for score in scores]

    def _params_of(self, role: str) -> nnx.State[Any, Any]:
        if role not in self.params:
            _check_role(role)
            raise RecipeError(f"no {role} is loaded", fix=f"RLCluster({role}=...)", where="InferenceWorker")
        return self.params[role]

    def _check_tokens(self, tokens: Sequence[np.ndarray]) -> None:
        largest, vocab_size = max(int(t.max(initial=0)) for t in tokens), self.model("reward").decoder.config.vocab_size
        if largest >= vocab_size:
            raise WeightsError(
                f"token {largest} is unknown to the reward model, which embeds {vocab_size}",
                want="one tokenizer for all roles",
                fix="a reward model of the actor's own family",
                where="RLCluster.reward",
            )


def _check_kind(role: str, model: Decoder | ValueModel) -> None:
    _check_role(role)
    if not isinstance(model, KINDS[role]):
        raise RecipeError(
            f"the {role} is a {type(model).__name__}",
            want=f"a {KINDS[role].__name__}",
            fix=FIXES[role],
            where=f"RLCluster.{role}",
        )


def _check_role(role: str) -> None:
    if role not in KINDS:
        raise RecipeError(
            f"the inference worker hosts no {str(role)!r}",
            want="one of: " + ", ".join(KINDS),
            fix=OTHER_ROLES.get(role) or nearest(role, KINDS),
            where="InferenceWorker",
        )


KINDS: dict[str, type[Decoder] | type[ValueModel]] = {"reference": Decoder, "critic": ValueModel, "reward": ValueModel}
"""Legal roles, and the class of model of each."""

FIXES = {
    "reference": "models.loading.weights.load(source).model",
    "critic": "models.value_model.make_value_model(model), or models.loading.weights.load_critic(source).model",
    "reward": "models.loading.weights.load_value_model(source).model",
}

OTHER_ROLES = {
    "actor": "the actor is trained: RLCluster.update_actor and get_old_per_token_logps",
    "rollout": "the rollout samples: RLCluster.generate",
}


def make_reference(actor: Decoder, config: GRPOConfig) -> Decoder:
    """Return the actor, or its base where `config` asks for it or where new adapters change nothing yet."""
    return without_lora(actor) if config.reference == "base" or not adapters_change_base(actor) else actor


def copy_donated_arrays(reference: Decoder, actor: Decoder, moves: bool) -> Decoder:
    """Return `reference` with its own copy of the arrays that training `actor` will overwrite. A reference that `moves`
    has a copy of all arrays, and its adapters are merged.
    """
    graph, params = nnx.split(merge_lora(reference) if moves else reference)
    overwritten = set().union(*map(_buffers, jax.tree.leaves(split_trainable(actor)[1])))
    leaves, structure = jax.tree.flatten(params)
    indices = [i for i, x in enumerate(leaves) if moves or _buffers(x) & overwritten]
    copies = dict(zip(indices, _copy_all([leaves[i] for i in indices]) if indices else (), strict=True))
    return nnx.merge(graph, jax.tree.unflatten(structure, [copies.get(i, x) for i, x in enumerate(leaves)]))


def polyak_update(reference: Any, actor: Decoder, mixing: float) -> Any:
    """Return α·actor + (1 − α)·reference, adapters merged (Gorbatovski et al., 2024, TR-DPO, eq. 5).

    Args:
        reference: state of the reference; the result has its dtypes and lies on its devices.
        actor: the actor with its current weights.
        mixing: α.
    """
    _, params = nnx.split(merge_lora(actor))
    return _mix(reference, reshard(params, jax.tree.map(lambda x: x.sharding, reference), copy=True), mixing)


def _buffers(x: jax.Array) -> set[int]:
    """Return the memory addresses of the shards of `x`: two arrays may share them without being one object."""
    return {piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards}


@jax.jit
def _copy_all(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


@jax.jit
def _mix(reference: Any, actor: Any, mixing: float) -> Any:
    """Compute α·actor + (1 − α)·reference in float32, rounded to the dtype of `reference`."""
    mix = lambda r, a: (mixing * a.astype(jnp.float32) + (1 - mixing) * r.astype(jnp.float32)).astype(r.dtype)  # noqa: E731
    return jax.tree.map(mix, reference, actor)
