"""Rollout worker, which samples groups of completions for prompts, and the weights that it samples with.

A step of decoding reads all weights once, as fast as memory gives them only from a list of layers with arrays of their
own: from stacks a TPU takes more than twice as long, and a GPU first copies kernels of the MLPs. An update scans over
stacks. Where both share devices there is one copy nevertheless: while a rollout samples, the stacks are taken apart,
one after the other, and made again after it. Each way is a pass over the weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.errors import RecipeError
from covey.models.decoder import Decoder
from covey.models.dtypes import round_for_sampling, sampling_type, with_rounded_head
from covey.models.layer_stack import LayerStacks, buffers, unstack_layers
from covey.packing.rows import pack, rows_at_a_time
from covey.parallel.arrays import mesh_of
from covey.parallel.shapes import abstract, takes_shapes
from covey.registry import offered
from covey.rl.scorers import RowScorer
from covey.sampling.engine import Engine, Request, generate
from covey.sampling.model_runner import SamplerStats
from covey.sampling.responder import ResponderFactory, SamePrompt, TextResponder
from covey.sampling.scheduler import check_length, check_positions
from covey.sampling.sequence import StopCondition
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason, Group, Prompt

State = nnx.State[Any, Any]
MAX_TOKENS = 1024
"""Approximate number of tokens whose log-probs are computed at a time."""


class Rollout(list[Group]):
    """Sampled groups in the order of their prompts; its properties list all completions, unpadded.

    Args:
        groups: the sampled groups.
        pad_id: pads shorter prompts.
    """

    def __init__(self, groups: Iterable[Group], pad_id: int):
        super().__init__(groups)
        self._pad_id = pad_id

    @property
    def text(self) -> list[str]:
        """Text of each completion."""
        return [c.text for group in self for c in group.completions]

    @property
    def tokens(self) -> list[np.ndarray]:
        """Tokens of each completion."""
        return [c.tokens for group in self for c in group.completions]

    @property
    def logps(self) -> list[np.ndarray]:
        """Log-probs of each completion's tokens."""
        return [c.logps for group in self for c in group.completions]

    @property
    def prompt_tokens(self) -> np.ndarray:
        """Prompt of each completion, int32 [B, T], padded on the left."""
        prompts = [group.prompt_tokens for group in self for _ in group.completions]
        out = np.full((len(prompts), max(map(len, prompts), default=0)), self._pad_id, np.int32)
        for row, prompt in zip(out, prompts, strict=True):
            row[len(row) - len(prompt) :] = prompt
        return out


class RolloutWorker:
    """Covey's engine ("vanilla") with a tokenizer. Between calls the engine sleeps: its cache, and the weights in the
    form in which it takes them, are freed, so that an update has their memory.

    Args:
        model: defines the structure and the initial weights.
        tokenizer: shared by all roles.
        config: lengths, temperature, truncation, slots, seed, tool.
        environments: runs the environment in which the model acts, or the tools that it calls, where the text of a
            completion is its last turn; None for completions of one turn.
        fixed_shapes: see `sampling.engine.Engine`.

    Attributes:
        params: current weights; `sampling_params()` returns them as the engine takes them.
        version: number of times that they were set.
        engine: draws the tokens.
        weights: makes `sampling_params` of `params`.
        loan: lends the stacks of a learner on the same devices; None if the learner keeps them.
        tool: the tool that `config` names; None without one.

    Errors: RecipeError when prompt and completion are longer than the model's positions, a tool lacks its markers, or
    there is both a tool and an environment.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        environments: ResponderFactory | None = None,
        fixed_shapes: bool = False,
    ):
        self._graph, self.params = nnx.split(model)
        self.version = 0
        self.tokenizer, self.config, self.environments = tokenizer, config, environments
        self.weights = SamplingWeights(with_rounded_head(model))
        self.loan: StackLoan | None = None
        self.engine = Engine(self.weights.model, tokenizer.stop_ids, config, fixed_shapes)
        self._scorer = RowScorer.of_logps(model, config.temperature)
        self._positions, self._rounds_head = model.config.max_positions, with_rounded_head(model) is not model
        self.tool = self._prepare(config)

    @property
    def stats(self) -> SamplerStats:
        """Statistics of the last call."""
        return self.engine.stats

    @property
    def model(self) -> Decoder:
        """Model with its current weights."""
        return nnx.merge(self._graph, self.params)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a text; `tokenizer.stop_ids` has every token that ends a completion."""
        return self.tokenizer.eos_id

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any] | Prompt],
        samples: int = 1,
        *,
        step: int = 0,
        first: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Rollout":
        """Sample each prompt `samples` times, as one group; as several where its episodes begin with different prompts
        and `envs.different_prompts` allows it.

        Args:
            prompts: text or chat messages, or data rows with a prompt, whose other columns are kept in the group.
            step: seeds the noise, together with each prompt's number in the step and the completion's number.
            first: number of the first example in the step.
            config: settings for this call instead of the worker's; errors as in the constructor.
        """
        tool, config = (self.tool if config is None else self._prepare(config)), config or self.config
        examples = [row if isinstance(row, Mapping) else {"prompt": row} for row in prompts]
        episodes = self.environments and self.environments.episodes(examples, samples, self.tokenizer)
        row_prompts = episodes.begin() if episodes else [row["prompt"] for row in examples]
        encode = episodes.encode_prompt if episodes else self.tokenizer.encode_prompt
        shared = episodes.requests if episodes else [SamePrompt(row, 0, samples) for row in range(len(examples))]
        decode = tool.text if tool else self.tokenizer.decode
        common: dict[str, Any] = {
            "responder": episodes or tool,
            "stop_conditions": stop_conditions(config, decode),
        }
        requests = [
            Request(encode(prompt), one.size, first + one.row, step, one.first, id=number, **common)
            for number, (prompt, one) in enumerate(zip(row_prompts, shared, strict=True))
        ]
        sampled = self._sample(requests, config, progress)
        if episodes:
            chunk_seconds = self.stats.decode_seconds / max(self.stats.chunks, 1)
            episodes.warn_of_waiting(config.slots, self.stats.seconds, chunk_seconds)
            sampled = [[episodes.completion(i, n, c) for n, c in enumerate(group)] for i, group in enumerate(sampled)]
        else:
            sampled = [[c.with_text(decode) for c in group] for group in sampled]
        columns = [{name: value for name, value in examples[one.row].items() if name != "prompt"} for one in shared]
        groups = [
            Group(prompt, request.prompt, tuple(completions), column)
            for prompt, request, completions, column in zip(row_prompts, requests, sampled, columns, strict=True)
        ]
        return Rollout(groups, self.tokenizer.pad_id)

    def _sample(
        self, requests: Sequence[Request], config: RolloutConfig, progress: Callable[[int, int], None] | None
    ) -> list[list[Completion]]:
        """Wake the engine for the current weights and these settings, sample, and let it sleep."""
        self.engine.configure(config)
        try:
            self.engine.update_weights(self._take_weights(), self.version)
            return generate(self.engine, requests, progress)
        finally:
            self._sleep()

    def _sleep(self) -> None:
        """Let the engine sleep, and give the stacks back, also if the engine raises."""
        try:
            self.engine.sleep()
        finally:
            if self.loan is not None:
                self.loan.give_back()

    def check_prompts(self, examples: Sequence[Mapping[str, Any]], data: str) -> None:
        """Refuse data with a prompt that cannot be sampled, before any sampling. The prompt of an environment is known
        when its episode begins, and checked then; a list of tools is counted.

        Errors: DataError that names the row of `data`, or for plain text where there are tools.
        """
        environments, tokenizer = self.environments, self.tokenizer
        encode = environments.prompt_encoder(tokenizer) if environments else tokenizer.encode_prompt
        if encode is None:
            return
        for number, row in enumerate(examples, 1):
            check_length(len(encode(row["prompt"])), self.config, f"row {number} of the {data}")

    def get_per_token_logps(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Compute log-probs of completions at the rollout's temperature: one float32 array per completion.

        Args:
            prompt_ids: the prompt of each completion.
            completion_ids: one list of tokens per completion.
        """
        none = np.zeros(0, np.float32)
        groups = [
            Group("", np.asarray(p, np.int32), (Completion(np.asarray(c, np.int32), none, none, FinishReason.STOP),))
            for p, c in zip(prompt_ids, completion_ids, strict=True)
        ]
        rows = pack(groups, max_tokens=MAX_TOKENS)
        size = rows_at_a_time(rows, mesh_of(self.params), MAX_TOKENS)
        return self._scorer(self.params, rows, [len(c) for c in completion_ids], size)[0]

    def update_params(self, params: Any) -> None:
        """Set new weights for the next call: all of them, or some (for example only the adapters)."""
        self.params, self.version = nnx.merge_state(self.params, params), self.version + 1

    def sampling_params(self) -> Any:
        """Return the current weights as the engine's programs take them; of a model of shapes, their shapes."""
        return self.weights.convert(self._own_params())

    def lendable(self) -> Any:
        """Return the stacks whose layers the engine takes as they are."""
        return self.weights.split_lendable(self._own_params())[0]

    def _take_weights(self) -> Any:
        """Return `sampling_params`; with a loan, the stacks that it lends have no memory any more."""
        if self.loan is None:
            return self.sampling_params()
        lendable, kept = self.weights.split_lendable(self._own_params())
        paths = [path for path, _ in nnx.to_flat_state(lendable)]
        del lendable  # it would keep the memory of the stacks
        return nnx.merge_state(self.loan.take(self, "params", paths), self.weights.convert(kept))

    def _own_params(self) -> Any:
        """Return the current weights, with a head of its own if sampling needs one."""
        return nnx.split(with_rounded_head(self.model))[1] if self._rounds_head else self.params

    def _prepare(self, config: RolloutConfig) -> TextResponder | None:
        """Check that the model has enough positions for `config`, and return its tool."""
        check_positions(config, self._positions)
        tool: TextResponder | None = None
        if config.tool != "none":
            tool = offered("covey.responders", config.tool)(self.tokenizer, config)
        if self.environments:
            self.environments.prepare(self.tokenizer.chat_template)
        if tool and self.environments:
            what = f"rollout.tool is {config.tool}, and there is the environment {self.environments.name!r}"
            raise RecipeError(what, want="one of them", fix="let the environment calculate", where="rollout.tool")
        return tool


def stop_conditions(config: RolloutConfig, decode: Callable[[np.ndarray], str]) -> tuple[StopCondition, ...]:
    """Return the conditions of `config` that end a completion, besides stop ids and limits."""
    if not config.stop:
        return ()
    from covey.sampling.stop_strings import StopStrings  # late: most runs have none

    return (StopStrings(config.stop, decode),)


class SamplingWeights:
    """Conversion of a model's parameters for sampling: kernels and adapters rounded, layers a list.

    Args:
        model: the model, of arrays or of shapes.

    Attributes:
        model: the model that samples, of shapes.
        stacks: conversion between stacks and a list.
    """

    def __init__(self, model: Decoder):
        graph, params = nnx.split(model)
        self.stacks, self._dtype = LayerStacks(model), sampling_type(model)
        self._is_stacked = bool(model.stacked)
        self._programs: dict[Any, Callable[[State], State]] = {}
        shapes = abstract(params)
        graph = nnx.split(unstack_layers(nnx.merge(graph, shapes)))[0]
        self.model: Decoder = nnx.merge(graph, self.convert(shapes))

    def convert(self, params: State) -> State:
        """Return `params`, or a part of them, as the engine takes them; shapes give shapes."""
        if not self._is_stacked:
            return round_for_sampling(params, self._dtype)
        layers, rest = self.stacks.split(params)
        converted: State = nnx.merge_state(self._listed(layers), round_for_sampling(rest, self._dtype))
        return converted

    def split_lendable(self, params: State) -> tuple[State, State]:
        """Return the stacks in `params` that sampling does not round, and the rest of `params`."""
        flat = nnx.to_flat_state(self.stacks.split(params)[0])
        rounded = dict(nnx.to_flat_state(round_for_sampling(abstract(nnx.from_flat_state(dict(flat))), self._dtype)))
        lendable = {path for path, leaf in flat if leaf.dtype == rounded[path].dtype}
        parts = nnx.to_flat_state(params)
        kept = {path: leaf for path, leaf in parts if path not in lendable}
        return nnx.from_flat_state({path: leaf for path, leaf in parts if path in lendable}), nnx.from_flat_state(kept)

    def _listed(self, layers: State) -> State:
        """Return the layers of these stacks, by one program."""
        structure = jax.tree.structure(layers)
        if structure not in self._programs:
            places = jax.tree.map(lambda x: x.sharding, self._take_apart(abstract(layers)))
            program = jax.jit(self._take_apart, out_shardings=places)
            self._programs[structure] = takes_shapes(program, places)
        return self._programs[structure](layers)

    def _take_apart(self, layers: State) -> State:
        return round_for_sampling(self.stacks.unstack(layers), self._dtype)


class StackLoan:
    """Loan of stacks to a rollout. Meanwhile their holders have shapes in their place, so that nothing keeps the
    memory, and whoever uses them before they are given back fails.

    Args:
        stacks: conversion between stacks and a list.
        holders: objects, each with the name of an attribute that holds a state with stacks.
    """

    def __init__(self, stacks: LayerStacks, holders: Sequence[tuple[Any, str]]):
        self._stacks, self._holders = stacks, holders
        self._lent: list[tuple[State, State]] = []

    def take(self, owner: Any, name: str, paths: Sequence[tuple[Any, ...]]) -> State:
        """Take the stacks at `paths` apart, in the state that `owner` has as `name`. Return the layers of all that are
        lent.
        """
        for path in paths:
            leaf = dict(nnx.to_flat_state(getattr(owner, name)))[path]
            stack = nnx.from_flat_state({path: leaf})
            del leaf
            # Without a pause the next stack would be taken apart before this one is free.
            layers = jax.block_until_ready(self._stacks.unstack(stack))
            shape = abstract(stack)
            self._replace(stack, shape)
            self._lent.append((shape, layers))
        return nnx.from_flat_state({path: x for _, layers in self._lent for path, x in nnx.to_flat_state(layers)})

    def give_back(self) -> None:
        """Make the stacks again, of layers that nothing else refers to any more."""
        while self._lent:
            shape, layers = self._lent.pop()
            self._replace(shape, jax.block_until_ready(self._stacks.stack(layers)))

    def _replace(self, old: State, new: State) -> None:
        (before,), (after,) = jax.tree.leaves(old), jax.tree.leaves(new)
        key = buffers(before)
        for owner, name in self._holders:
            held = jax.tree.map(lambda x: after if buffers(x) == key else x, getattr(owner, name))
            setattr(owner, name, held)
