"""Values of the tokens of a few completions: their log-probs before and after the step's updates, entropy and KL.

A report colours tokens by them. The losses compute log-probs of all tokens but keep only sums, so that the completions
that are shown are scored once more, by one program, before the updates and after them: the difference is the change of
probability by the updates alone, without the small difference between sampler and trainer. Nothing of this reaches the
training: tokens, losses and weights are those of a run without it.

At most `COMPLETIONS` completions of one group are scored, at intervals at which that costs less than 1 % of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.recipe import Recipe
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.losses.policy import KLS
from covey.monitor import run_files
from covey.monitor.record import StepRecord, is_due
from covey.packing.rows import Rows, pack
from covey.parallel import processes
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun
from covey.sampling.scheduler import power_of_two
from covey.text.tokenizer import token_texts
from covey.types import Completion, FinishReason, Group

if TYPE_CHECKING:
    from covey.rl.cluster import RLCluster  # whose programs are told how long the rows become
    from covey.rl.step_data import Experience

STEPS = 50
"""Maximum number of steps of a run with token values, where the setting leaves the interval open."""
COST = 100
"""Completions of training for each scored one. Two passes of it, a third of them padding, cost as much as three; a
completion of training costs at least as much as three passes, and 3.4 where that was measured (quickstart, on a CPU).
"""
COMPLETIONS = 8
"""Maximum number of completions of a group that are scored."""
TOKENS = 512
"""Maximum number of tokens of a completion that are scored, from its beginning."""
SMALLEST_ROW = 128
"""Length of the shortest row: lengths are powers of two, so that few programs are compiled."""


@dataclass(frozen=True)
class TokenValues:
    """Values of the tokens of one completion, or of its beginning; arrays are [n].

    Attributes:
        sample: number of the completion in its group.
        texts: text of each token; see `text.tokenizer.token_texts`.
        mask: True for the tokens that the model generated; None when it generated all.
        advantage: advantage of each token, float32.
        sampler_logps: log-prob that the sampler reported, of the full distribution.
        logps: log-prob under the policy before the step's updates.
        change: log-prob after the step's updates minus `logps`.
        entropy: entropy of the policy before the updates, in nats.
        kl: estimate of the KL to the reference before the updates, in nats; None without a reference.
        group: number of its group in the step.
    """

    sample: int
    texts: tuple[str, ...]
    mask: np.ndarray | None
    advantage: np.ndarray
    sampler_logps: np.ndarray
    logps: np.ndarray
    change: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray | None = None
    group: int = 0


def token_values_interval(config: RLTrainingConfig, num_generations: int, total: int) -> int:
    """Return the number of steps from one with token values to the next, in a run of `total` steps; 0 is never."""
    if config.token_values_every_n_steps is not None:
        return config.token_values_every_n_steps
    completions = config.prompts_per_step * num_generations
    return max(-(-COST * min(num_generations, COMPLETIONS) // completions), -(-total // STEPS))


class TokenValuesWriter(Output):
    """Write token values at the steps at which they are due. Only a run of one process does so, because all processes
    must launch the same programs.
    """

    _every = 0

    def begin(self, run: SavedRun, summary: Mapping[str, Any]) -> None:
        self._folder, self._learner, self._total, recipe = run.folder, run.learner, run.total, run.recipe
        if isinstance(recipe, Recipe) and processes.here().count == 1:
            self._every = token_values_interval(recipe.training, recipe.grpo.num_generations, run.total)
            self._scorer = TokenScorer(self._learner.cluster, self._learner.algorithm)

    def before_update(self, experience: "Experience") -> None:
        updates = min(self._learner.config.num_iterations, self._total - self._learner.step)
        if is_due(self._learner.step + updates, updates, self._every):
            self._scorer.score_before(experience)

    def step(self, record: StepRecord) -> None:
        if self._every:
            self._scorer.score_again()
            self._folder.write_rows(
                run_files.TOKENS, (token_row(record.step, one) for one in self._scorer.values(record.groups))
            )
            self._scorer = TokenScorer(self._learner.cluster, self._learner.algorithm)


class TokenScorer:
    """Score completions of one group of a step, before and after the step's updates.

    Args:
        cluster: the models.
        algorithm: gives the estimator of the KL.
    """

    def __init__(self, cluster: "RLCluster", algorithm: Algorithm):
        self._cluster, self._algorithm = cluster, algorithm
        self._shown: Shown | None = None
        self._values: list[TokenValues] = []

    def score_before(self, x: "Experience") -> None:
        """Score completions of the first experience that has groups, with the weights before the update; later ones are
        ignored.
        """
        if self._shown is not None or not x.groups:
            return
        # The first group with advantages that are not 0, or else the first.
        index = next((i for i, g in enumerate(x.groups) if g.advantages is not None and g.advantages.any()), 0)
        longest = self._cluster.config.training_config.row_length
        self._shown = shown = choose(x.groups[index], longest, one_length=self._cluster.row_sizes.fixed_shapes)
        first = sum(len(group.completions) for group in x.groups[:index])
        logps, entropies = self._cluster.get_token_values(shown.rows, shown.lengths)
        decode, kl = partial(self._cluster.tokenizer.decode, skip_special=False), KLS[self._algorithm.kl]
        for i, (number, completion) in enumerate(zip(shown.numbers, shown.scored.completions, strict=True)):
            count, at = len(completion.tokens), first + number
            self._values.append(
                TokenValues(
                    sample=number,
                    texts=tuple(token_texts(decode, completion.tokens.tolist())),
                    mask=completion.mask,
                    advantage=x.advantages[at][:count].astype(np.float32),
                    sampler_logps=completion.logps,
                    logps=logps[i],
                    change=np.zeros_like(logps[i]),
                    entropy=entropies[i],
                    kl=None if x.ref_logps is None else kl(logps[i], x.ref_logps[at][:count]),
                )
            )

    def score_again(self) -> None:
        """Score the completions with the current weights, which are those after the updates."""
        if self._shown is not None:
            logps, _ = self._cluster.get_token_values(self._shown.rows, self._shown.lengths)
            both = zip(self._values, logps, strict=True)
            self._values = [replace(values, change=new - values.logps) for values, new in both]

    def values(self, groups: Sequence[Group]) -> list[TokenValues]:
        """Return the values with the number of their group among `groups`, those of the whole step."""
        if self._shown is None:
            return []
        shown = [number for number, group in enumerate(groups) if group is self._shown.group]
        return [replace(values, group=number) for number in shown for values in self._values]


class Shown(NamedTuple):
    """Completions that are scored.

    Attributes:
        group: the group of which they are, whole.
        numbers: their numbers in the group.
        scored: the group with these completions alone, long ones cut.
        rows: the packed rows of `scored`.
    """

    group: Group
    numbers: list[int]
    scored: Group
    rows: Rows

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(completion.tokens) for completion in self.scored.completions]


def longest_shown(config: RolloutConfig, num_generations: int, row_length: int) -> Rows:
    """Return the rows of the completions that are scored where prompt and completions are as long as they may be."""
    none = np.zeros(0, np.float32)
    completion = Completion(np.zeros(config.max_new_tokens, np.int32), none, none, FinishReason.LENGTH)
    prompt = np.zeros(config.max_prompt_length, np.int32)
    return choose(Group("", prompt, (completion,) * num_generations), row_length).rows


def choose(group: Group, row_length: int, one_length: bool = False) -> Shown:
    """Return the completions with the largest advantages of either sign, in the order of the group, and their rows,
    which are as short as they may be; with `one_length`, of `row_length` tokens.
    """
    size = np.zeros(len(group.completions)) if group.advantages is None else np.abs(group.advantages)
    numbers = sorted(np.argsort(-size, kind="stable")[:COMPLETIONS].tolist())
    scored = replace(group, completions=tuple(_beginning(group.completions[i]) for i in numbers))
    needed = len(group.prompt_tokens) + sum(len(completion.tokens) for completion in scored.completions)
    length = row_length if one_length else min(max(power_of_two(needed), SMALLEST_ROW), row_length)
    return Shown(group, numbers, scored, pack([scored], length, compile_cost=float("inf")))


def _beginning(completion: Completion) -> Completion:
    """Return the first `TOKENS` tokens of a completion with their values, and the branches that begin among them."""
    cut = {name: getattr(completion, name)[:TOKENS] for name in ("tokens", "logps", "sampler_logps")}
    branches = completion.branches and tuple(branch for branch in completion.branches if branch.start < TOKENS)
    return replace(
        completion, **cut, mask=None if completion.mask is None else completion.mask[:TOKENS], branches=branches
    )


def token_row(step: int, values: TokenValues) -> dict[str, Any]:
    """Return the row of a completion in `tokens.jsonl`. Values have four significant digits, and lists one value per
    token; `advantage` is one number where all tokens have the same, and `sampled` is there only where a tool or an
    environment inserted tokens.
    """
    advantages = _rounded(values.advantage)
    return {
        "step": step,
        "group": values.group,
        "sample": values.sample,
        "texts": list(values.texts),
        "advantage": advantages[0] if len(set(advantages)) == 1 else advantages,
        "sampler_logps": _rounded(values.sampler_logps),
        "logps": _rounded(values.logps),
        "change": _rounded(values.change),
        "entropy": _rounded(values.entropy),
        **({} if values.kl is None else {"kl": _rounded(values.kl)}),
        **({} if values.mask is None else {"sampled": values.mask.astype(int)}),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
