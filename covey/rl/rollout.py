"""The rollout worker: prompts in, groups of completions out."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from covey.configs import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling.sampler import Request, Sampler, SamplerStats, check_length
from covey.tokenizer import Tokenizer
from covey.types import Completion, Group


class RolloutWorker:
    """Our own sampler ("vanilla") behind a tokenizer.

    Args:
        model: gives the structure and the first weights.
        tokenizer: shared by all roles.
        config: lengths, temperature, truncation, slots, seed.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, config: RolloutConfig):
        graph, self.params = nnx.split(model)
        self.tokenizer, self.config = tokenizer, config
        self.sampler = Sampler(graph, tokenizer.stop_ids, config)

    @property
    def stats(self) -> SamplerStats:
        """What the last call cost."""
        return self.sampler.stats

    def generate(
        self,
        examples: Sequence[Mapping[str, Any]],
        samples: int,
        *,
        step: int = 0,
        config: RolloutConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """Samples each example's prompt `samples` times.

        Args:
            examples: data rows with a prompt (text or chat messages); the other columns travel with the group.
            step: seeds the noise together with each prompt's place in `examples` and the sample's number.
            config: settings for this call in place of the worker's own.
        """
        prompts = [row["prompt"] for row in examples]
        tokens = [self.tokenizer.encode_prompt(prompt) for prompt in prompts]
        requests = [Request(t, samples, index, step) for index, t in enumerate(tokens)]
        drawn = self.sampler.generate(self.params, requests, config=config, progress=progress)
        columns = [{name: value for name, value in row.items() if name != "prompt"} for row in examples]
        return [
            Group(prompt, request.prompt, tuple(self._with_text(c) for c in completions), column)
            for prompt, request, completions, column in zip(prompts, requests, drawn, columns, strict=True)
        ]

    def check_prompts(self, examples: Sequence[Mapping[str, Any]], data: str) -> None:
        """Refuses data with a prompt that cannot be sampled, before anything is spent on the others.

        Errors: DataError that names the row of `data`.
        """
        for number, row in enumerate(examples):
            check_length(len(self.tokenizer.encode_prompt(row["prompt"])), self.config, f"row {number} of the {data}")

    def update_params(self, params: Any) -> None:
        """New weights for the next call."""
        self.params = params

    def _with_text(self, completion: Completion) -> Completion:
        return dataclasses.replace(completion, text=self.tokenizer.decode(completion.tokens))
