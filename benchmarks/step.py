"""Benchmark of a whole GRPO step through `RLCluster` and `GRPOLearner`, phase by phase, and the same with everything
padded.

Padded means the padded rollout of `benchmarks.rollout` and one sample a row; all else is the same code. The model is
random and words are numbers, so the reward (a share of even tokens) means nothing; only time does. Each repetition is
step 0 again: same prompts, same noise, and weights that the optimizer hardly moves.
"""

from functools import partial
from typing import Any

import numpy as np
import tokenizers

from benchmarks.common import STILL, Result, Settings, interleaved, short, spread_of
from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.monitor.record import StepRecord
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig
from covey.text.tokenizer import Tokenizer

PHASES = ("rollout", "reward", "logps", "update", "sync")


def measure(settings: Settings) -> Result:
    """Take the same step with both variants."""
    words, whole = prompts(settings), {"decode_chunk": settings.shape.max_new_tokens}
    ways = {"padded, dense": Way(settings, whole, {"packing": "dense"}), "refilled, groups": Way(settings)}
    runs = {name: partial(way.step, words) for name, way in ways.items()}
    first = [run() for run in runs.values()]
    for way in ways.values():
        way.records.clear()
    seconds = interleaved(runs, settings.repeat)
    facts = {name: way.phases() for name, way in ways.items()}
    tokens = sum(len(c.tokens) for group in first[0].groups for c in group.completions)
    names = ("reward", "grad_norm", "kl")
    checks = {f"{name}_difference": short(abs(first[0].metrics[name] - first[1].metrics[name])) for name in names}
    return Result(seconds, tokens, facts, checks)


def prompts(settings: Settings) -> list[dict[str, str]]:
    """Return the prompts as data: words are numbers."""
    return [{"prompt": " ".join(map(str, prompt))} for prompt in settings.prompts()]


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the fraction of even token ids."""
    return [float(np.mean([token % 2 == 0 for token in ids])) for ids in completion_ids]


def number_words(size: int, stop_ids: tuple[int, ...]) -> Tokenizer:
    """Return a tokenizer whose word for token n is the number n, with one word more than a model of `size` tokens."""
    vocab = {str(n): n for n in range(size + 1)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, eos_id=stop_ids[0], stop_ids=stop_ids)


class FirstStep:
    """Learner that can take the first step repeatedly."""

    def __init__(self, cluster: RLCluster, grpo: GRPOConfig):
        self.records = list[StepRecord]()
        self.learner = GRPOLearner(
            rl_cluster=cluster, reward_fns=even, grpo_config=grpo, observers=[self.records.append]
        )

    def step(self, words: list[dict[str, str]]) -> StepRecord:
        """Take step 0 on these prompts in this order; without a new loader each call would go on in the data."""
        self.learner.step = 0
        self.learner.train(PromptLoader(words, len(words), shuffle=False))
        return self.records[-1]

    def phases(self) -> dict[str, Any]:
        """Return the seconds of each phase of the steps in `records`."""
        return {p: spread_of([float(r.metrics[f"time/{p}"]) for r in self.records]) for p in PHASES}


class Way(FirstStep):
    """Cluster and learner of the random model.

    Args:
        settings: model and work.
        rollout, training: settings of the two that differ from what `settings` say.
    """

    def __init__(self, settings: Settings, rollout: Any = None, training: Any = None):
        shape = settings.shape
        sampling = {
            "max_prompt_length": shape.prompt_length,
            "max_new_tokens": shape.max_new_tokens,
            "slots": shape.slots,
            "decode_chunk": shape.decode_chunk,
        }
        work = {
            "max_steps": 1,
            "prompts_per_step": shape.prompts,
            "actor_optimizer": STILL,
            "row_length": shape.row_length,
            "max_tokens_per_micro_batch": shape.micro_batch,
        }
        config = ClusterConfig(
            training_config=RLTrainingConfig(**work | (training or {})),
            rollout_config=RolloutConfig(**sampling | (rollout or {})),
        )
        tokenizer = number_words(shape.model.vocab_size, settings.stop_ids)
        cluster = RLCluster(actor=settings.model(), tokenizer=tokenizer, cluster_config=config)
        super().__init__(cluster, GRPOConfig(num_generations=shape.samples))
