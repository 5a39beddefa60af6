"""Benchmark of rollout: slots refilled while others go on, against a padded batch that waits for its slowest member.

The padded batch is the same sampler with one chunk as long as the longest completion: a slot that is finished then
stands idle until all are, the cache has its full length from the start, and the batch never shrinks. Every variant
draws the same tokens, because the noise hangs on prompt, sample and token alone.
"""

from functools import partial

import numpy as np

from benchmarks.common import Result, Settings, interleaved
from benchmarks.decode import limits
from benchmarks.sizes import Size
from covey.config.schema import RolloutConfig
from covey.sampling.engine import Engine, Request, generate
from covey.types import Completion
from covey_plan import work
from covey_plan.roofline import machine_peaks


def measure(settings: Settings) -> Result:
    """Sample P · G completions with each variant."""
    configs = ways(settings.shape)
    requests = [Request(prompt, settings.shape.samples, index) for index, prompt in enumerate(settings.prompts())]
    engine = Engine(settings.model(), settings.stop_ids, RolloutConfig())
    runs = {n: partial(sample, engine, requests, c) for n, c in configs.items() if n in settings.chosen(configs)}
    drawn: dict[str, list[np.ndarray]] = {}
    facts, least = {}, {}
    for name, run in runs.items():
        completions = run()
        drawn[name] = [completion.tokens for group in completions for completion in group]
        least[name] = limit(settings, [[len(c.tokens) for c in group] for group in completions], configs[name].slots)
        stats = engine.stats
        facts[name] = {"slot_steps": stats.slot_steps, "waste": round(stats.waste, 3)}
    first = next(iter(drawn.values()))
    same = all(np.array_equal(a, b) for other in drawn.values() for a, b in zip(first, other, strict=True))
    tokens = sum(map(len, first))
    return Result(interleaved(runs, settings.repeat), tokens, facts, {"same_tokens": same}, least)


def sample(engine: Engine, requests: list[Request], config: RolloutConfig) -> list[list[Completion]]:
    """Sample with an engine that has these settings from now on."""
    engine.configure(config)
    return generate(engine, requests)


def limit(settings: Settings, lengths: list[list[int]], slots: int) -> float:
    """Return the seconds at this machine's peaks: each prompt fed once, then all slots busy to the last token."""
    c, prompts = settings.shape.model, [len(prompt) for prompt in settings.prompts()]
    fed = [(start, length - 1) for start, group in zip(prompts, lengths, strict=True) for length in group]
    prefill = sum(work.prefill(c, prompts, settings.lora)) / machine_peaks(settings.dtype).matmul
    return prefill + max(limits(settings, fed, slots))


def ways(shape: Size) -> dict[str, RolloutConfig]:
    """Return the settings of each variant, by name."""
    config = partial(RolloutConfig, max_prompt_length=shape.prompt_length, max_new_tokens=shape.max_new_tokens, seed=3)
    everything = shape.prompts * shape.samples
    return {
        "padded": config(slots=shape.slots, decode_chunk=shape.max_new_tokens),
        "padded, all at once": config(slots=everything, decode_chunk=shape.max_new_tokens),
        "refilled": config(slots=shape.slots, decode_chunk=shape.decode_chunk),
        "refilled, all at once": config(slots=everything, decode_chunk=shape.decode_chunk),
    }
