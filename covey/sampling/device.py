"""State of the sampler on the device, and the programs that change it: prefill, insert, decode, resume, resize.

The programs are pure functions; `Programs` holds those compiled for a decoder, and `DeviceState` the arrays of a call.

The noise of a token depends only on its completion's key and its index in the completion; the key depends only on
(seed, step, prompt index, sample index). A forced token uses up an index, and the noise of that index is not used.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling.cache import (
    NO_TOKEN,
    Prefix,
    Slots,
    decode_attention,
    empty_slots,
    insert_prefix,
    prefill_attention,
    resize,
)
from covey.sampling.logits import SamplingParams, draw
from covey.sampling.scheduler import Admission, Sample
from covey.sampling.stats import SamplerStats
from covey.sampling.tools import MAX_FORCED_TOKENS, Tool


class Draws(NamedTuple):
    """Tokens drawn: their ids (int32) and their log-probs under the full and the truncated distribution (float32)."""

    tokens: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray


class Chunk(NamedTuple):
    """Result of some steps of the decode batch.

    Attributes:
        draws: arrays [S, steps].
        counts: int [S], number of tokens that the slot drew: it was active in so many steps, from the first on.
        active: bool [S], whether the slot is still active after the steps.
    """

    draws: Draws
    counts: np.ndarray
    active: np.ndarray


class Programs:
    """Programs of a decoder, compiled once for each shape and each setting of the sampling distribution.

    Args:
        graph: the decoder's `nnx.GraphDef`.
        stop_ids: tokens that end a completion.
    """

    def __init__(self, graph: nnx.GraphDef[Decoder], stop_ids: tuple[int, ...]):
        self.graph = graph
        self.prefill = jax.jit(partial(prefill, graph))
        self.insert = jax.jit(partial(insert, stop_ids), static_argnames="sampling_params", donate_argnums=0)
        static = ("sampling_params", "steps", "pause_id")
        self.decode = jax.jit(partial(decode, graph, stop_ids), static_argnames=static, donate_argnums=1)


class DeviceState:
    """Decode batch of a call: its slots with their KV cache, and the prompts that were prefilled last.

    Args:
        programs: those of the decoder.
        params: the decoder's state.
        config: settings of the call.
        tool: pauses a slot behind each call.
        slots: number of slots.
        cache_length: number of tokens for which each slot has room.
    """

    def __init__(
        self, programs: Programs, params: Any, config: RolloutConfig, tool: Tool | None, slots: int, cache_length: int
    ):
        self.programs, self.params, self.config = programs, params, config
        self.sampling_params = SamplingParams.from_config(config)
        self.pause_id = None if tool is None else tool.markers.end
        model = nnx.merge(programs.graph, params)
        c, forced = model.config, 0 if tool is None else MAX_FORCED_TOKENS
        shape = (slots, cache_length, c.num_layers, c.num_kv_heads, c.head_dim)
        self.slots = empty_slots(*shape, model.head_weight.dtype, max_forced_tokens=forced)
        self.prefix: Prefix | None = None
        self.stats = SamplerStats()

    def prefill(self, prompts: Sequence[np.ndarray], shape: tuple[int, int]) -> None:
        """Prefill `prompts` (int32 [n] each), padded to a batch of this shape."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.prefix = self.programs.prefill(self.params, tokens, lengths)
        self.stats.prompt_tokens += sum(map(len, prompts))
        self.stats.prefill_cells += tokens.size

    def insert(self, admitted: Sequence[Admission], keys: Mapping[Sample, np.ndarray]) -> Chunk:
        """Insert prefilled prompts into slots, with the random key of each sample; draw the first tokens."""
        size = len(self.slots.token)
        inserted, prompt, slot_keys = np.zeros(size, bool), np.zeros(size, np.int32), np.zeros((size, 2), np.uint32)
        for slot, row, sample in admitted:
            inserted[slot], prompt[slot], slot_keys[slot] = True, row, keys[sample]
        self.slots, draws = self.programs.insert(
            self.slots,
            self.prefix,
            prompt,
            inserted,
            slot_keys,
            np.int32(self.config.max_new_tokens),
            sampling_params=self.sampling_params,
        )
        self.stats.first_tokens += len(admitted)
        return self._chunk(draws, inserted[None])

    def decode(self) -> Chunk:
        """Run a chunk of decode steps."""
        self.slots, draws, valid, steps = self.programs.decode(
            self.params,
            self.slots,
            sampling_params=self.sampling_params,
            steps=self.config.decode_chunk,
            pause_id=self.pause_id,
        )
        self.stats.slot_steps += int(steps) * len(self.slots.token)
        self.stats.chunks += 1
        return self._chunk(draws, np.asarray(valid))

    def resume(self, responses: Mapping[int, np.ndarray]) -> None:
        """Force the response of each of these slots, and decode them on."""
        resumed = np.zeros(len(self.slots.token), bool)
        forced = np.full((len(resumed), MAX_FORCED_TOKENS), NO_TOKEN, np.int32)
        for slot, response in responses.items():
            resumed[slot], forced[slot, : len(response)] = True, response
        active, forced_tokens = resume(self.slots.active, self.slots.forced_tokens, resumed, forced)
        self.slots = self.slots._replace(active=active, forced_tokens=forced_tokens)

    def resize(self, kept: np.ndarray, cache_length: int) -> None:
        """Keep only the slots `kept`, in that order, each with room for `cache_length` tokens."""
        self.slots = resize(self.slots, kept, cache_length)

    def _chunk(self, draws: tuple[Array, ...], valid: np.ndarray) -> Chunk:
        counts = valid.sum(0)
        self.stats.tokens += int(counts.sum())
        # Copies, since the device may use its buffers again.
        host = Draws(*(np.asarray(x).T.copy() for x in draws))
        return Chunk(host, counts, np.asarray(self.slots.active))


def prefill(graph: Any, params: Any, tokens: Int[Array, "P T"], length: Int[Array, "P"]) -> Prefix:
    """Run right-padded prompts through the model; return their caches and the logits after their last tokens."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, cache = model(tokens, positions, prefill_attention(length), [None] * model.config.num_layers)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return Prefix(cache, model.logits(last), length)


def insert(
    stop_ids: tuple[int, ...],
    slots: Slots,
    prefix: Prefix,
    prompt: Int[Array, "S"],
    inserted: Any,
    keys: Array,
    max_tokens: Array,
    *,
    sampling_params: SamplingParams,
) -> tuple[Slots, tuple[Array, ...]]:
    """Insert prompt `prompt[s]` of `prefix` into every slot that is `inserted`, and draw the first token of each."""
    keys = jnp.where(inserted[:, None], keys, slots.key)
    zero = jnp.zeros_like(slots.num_tokens)
    token, logp, sampler_logp = draw(prefix.logits[prompt], uniform_noise(keys, zero), sampling_params)
    unfinished = ~_is_any(token, stop_ids) & (max_tokens > 1)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(inserted, new, old)

    new = Slots(
        cache=insert_prefix(slots, prefix, prompt, inserted),
        length=pick(prefix.length[prompt], slots.length),
        token=pick(token, slots.token),
        num_tokens=pick(zero + 1, slots.num_tokens),
        max_tokens=pick(zero + max_tokens, slots.max_tokens),
        key=keys,
        active=pick(unfinished, slots.active),
        forced_tokens=None
        if slots.forced_tokens is None
        else jnp.where(inserted[:, None], NO_TOKEN, slots.forced_tokens),
    )
    return new, (token[None], logp[None], sampler_logp[None])


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    slots: Slots,
    *,
    sampling_params: SamplingParams,
    steps: int,
    pause_id: int | None = None,
) -> tuple[Slots, tuple[Array, ...], Array, Array]:
    """Run up to `steps` decode steps; return the slots, the draws [steps, S], their validity mask and the steps made.

    A slot halts at a stop token, at its limit and at the token `pause_id`, after which the host may `resume` it.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = nnx.merge(graph, params)
    size = slots.token.shape[0]
    zeros = jnp.zeros((steps, size))
    draws = (jnp.zeros((steps, size), jnp.int32), zeros, zeros)

    def unfinished(carry: Any) -> Array:
        step, slots, _, _ = carry
        more: Array = (step < steps) & slots.active.any()
        return more

    def body(carry: Any) -> Any:
        step, slots, draws, valid = carry
        hidden, cache = model(slots.token[:, None], slots.length[:, None], decode_attention(slots.length), slots.cache)
        forced = None if slots.forced_tokens is None else slots.forced_tokens[:, 0]
        drawn = draw(model.logits(hidden[:, 0]), uniform_noise(slots.key, slots.num_tokens), sampling_params, forced)
        active = slots.active
        count = slots.num_tokens + active
        after = Slots(
            cache=cache,
            length=slots.length + active,
            token=jnp.where(active, drawn[0], slots.token),
            num_tokens=count,
            max_tokens=slots.max_tokens,
            key=slots.key,
            active=active & ~_is_any(drawn[0], halt_ids) & (count < slots.max_tokens),
            forced_tokens=_without_first(slots.forced_tokens),
        )
        draws = tuple(buffer.at[step].set(new) for buffer, new in zip(draws, drawn, strict=True))
        return step + 1, after, draws, valid.at[step].set(active)

    start = (jnp.int32(0), slots, draws, jnp.zeros((steps, size), bool))
    steps_made, slots, draws, valid = jax.lax.while_loop(unfinished, body, start)
    return slots, draws, valid, steps_made


@jax.jit
def resume(
    active: Bool[Array, "S"], forced_tokens: Int[Array, "S F"], resumed: Bool[Array, "S"], new: Int[Array, "S F"]
) -> tuple[Bool[Array, "S"], Int[Array, "S F"]]:
    """Return `active` and `forced_tokens` of the slots after the `resumed` ones receive their `new` forced tokens."""
    return active | resumed, jnp.where(resumed[:, None], new, forced_tokens)


def _without_first(forced: Int[Array, "S F"] | None) -> Int[Array, "S F"] | None:
    """Drop the first forced token of each slot after a step. Those of inactive slots no longer matter."""
    return None if forced is None else jnp.pad(forced[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)


def uniform_noise(keys: Array, index: Int[Array, "S"]) -> Float[Array, "S"]:
    """Draw one number in [0, 1) per slot, from the completion's key and the token's index."""
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(keys, index)


@jax.jit
def sample_keys(seed: int, rows: Int[Array, "n 3"]) -> Array:
    """Return the random key of each (step, prompt index, sample index) under the run's seed."""
    base = jax.random.PRNGKey(seed)
    fold = jax.random.fold_in
    return jax.vmap(lambda row: fold(fold(fold(base, row[0]), row[1]), row[2]))(rows)


def _is_any(token: Int[Array, "S"], ids: tuple[int, ...]) -> Bool[Array, "S"]:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros_like(token, dtype=bool)
