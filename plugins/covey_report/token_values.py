"""Values of the tokens of a few completions: their log-probs before and after the step's updates, entropy and KL.

A report colours tokens by them. The losses compute log-probs of all tokens but keep only sums, so that the completions
that are shown are scored once more, by one program, before the updates and after them: the difference is the change of
probability by the updates alone, without the small difference between sampler and trainer. Nothing of this reaches the
training: tokens, losses and weights stay the same.

At most `COMPLETIONS` completions of one group are scored, at intervals at which that costs less than 1 % of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.config.algorithms import Algorithm
from covey.config.recipe import Recipe
from covey.config.schema import RLTrainingConfig, RolloutConfig
from covey.losses.policy import KLS
from covey.monitor.record import StepRecord, is_due
from covey.packing.rows import Rows, pack
from covey.parallel import processes
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun
from covey.sampling.scheduler import power_of_two
from covey.types import Completion, FinishReason, Group
from covey_report.run_files import TOKENS as TOKENS_FILE
from covey_report.token_texts import token_texts

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
            self._folder.write_rows(TOKENS_FILE, self._scorer.rows(record.step, record.groups))
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
        self._values: list[dict[str, Any]] = []

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
            kl_values = {} if x.ref_logps is None else {"kl": np.asarray(kl(logps[i], x.ref_logps[at][:count]))}
            sampled = {} if completion.mask is None else {"sampled": completion.mask.astype(int)}
            values = {
                "texts": token_texts(decode, completion.tokens.tolist()),
                "advantage": x.advantages[at][:count].astype(np.float32),
                "sampler_logps": completion.logps,
                "logps": logps[i],
                "change": np.zeros_like(logps[i]),
                "entropy": entropies[i],
            }
            self._values.append({"sample": number, **values, **kl_values, **sampled})

    def score_again(self) -> None:
        """Score the completions with the weights after the updates."""
        if self._shown is not None:
            logps, _ = self._cluster.get_token_values(self._shown.rows, self._shown.lengths)
            for values, new in zip(self._values, logps, strict=True):
                values["change"] = new - values["logps"]

    def rows(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the rows of `tokens.jsonl`; `groups` are those of the whole step.

        A row has step, group and sample, the text of each token, the advantage (one number where all tokens have the
        same), the log-prob that the sampler reported, the log-prob before the updates and its change by them, the
        entropy and, with a reference, the KL in nats before them. Values have four significant digits. `sampled` is
        there only where a tool or an environment inserted tokens.
        """
        if self._shown is None:
            return []
        shown = [number for number, group in enumerate(groups) if group is self._shown.group]
        return [{"step": step, "group": number, **_rounded(values)} for number in shown for values in self._values]


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


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a completion with four significant digits, and one advantage where all are equal."""
    floats = {
        name: [float(f"{value:.4g}") for value in array.tolist()]
        for name, array in values.items()
        if isinstance(array, np.ndarray) and array.dtype.kind == "f"
    }
    same = set(floats["advantage"])
    return {**values, **floats, "advantage": floats["advantage"][0] if len(same) == 1 else floats["advantage"]}
