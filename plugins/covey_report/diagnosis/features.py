"""Features of a run: named figures of its metrics, by which the rules of the diagnosis judge it.

In: rows of `metrics.jsonl`, or a run that was read from its folder. Out: features by their paths: an attribute of the
`MetricHistory` of a metric (`kl.last.mean`), or of the `RunHistory` itself (`run.only_reward`). A run that was resumed
has one history: its file continues.

The error of a mean comes from the differences of successive rows, which a slow trend does not enlarge.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from covey.config.metrics import OVERLONG
from covey.files import number
from covey_report.diagnosis.rule import (
    ROUNDING,
    Case,
    Change,
    Level,
    OpposedParts,
    above,
    at_least,
    at_most,
    change_between,
    clearest_fall,
    noise,
    percent,
    stops_before,
)
from covey_report.run_data import Curves, RunData, Series

MIN_WINDOW, MAX_WINDOW, WINDOWS = 3, 50, 4
"""Smallest and largest number of steps that are averaged, and number of windows in a run of usual length."""
LARGEST_COUNT = 10**9
"""Largest number of prompts and of completions that is read from a recipe."""
GAIN_ERRORS, FALL_ERRORS = 3.0, 4.0
"""Number of standard errors from which a rise, and from which a fall counts. A fall needs more: the level that it is
measured from is chosen among many.
"""
MIN_GAIN, MIN_FALL = 0.05, 0.3
"""Smallest rise and fall of the reward that count, in units of the spread of single completions."""
DISAGREEMENT, ROUNDED, EXACT = 0.05, 0.95, 0.999
"""Mean distance of log-probs in nats from which sampler and trainer disagree; and share of the drawn tokens that the
trainer draws too below which they do, for products in bfloat16 and for those in float32. Rounding explains
about 1.6 % of other tokens in bfloat16, 3.7 % with weights of 8 bits, and 3 of a million in float32; weights of one
update before explain 0.4 %.
"""
GROUPS, GROUP_SIZE = "training.prompts_per_step", "grpo.num_generations"
"""Settings with the number of prompts of a step, and of completions of a prompt."""
MOST_TIED, SMALL = 0.8, 3
"""Share of groups with equal rewards from which too few have a signal, and size up to which a group is small."""
EASY_RATIO = 2.0
"""Mean reward in units of its spread from which most groups of equal rewards have the best one."""
SHORT_RUN = 32
"""Number of steps below which a run may be flat because it is short."""


@dataclass(frozen=True)
class RunHistory:
    """Metrics of a run by row.

    Attributes:
        method: "rl" or "sft".
        settings: resolved recipe, by dotted name.
        steps: optimizer step of each row, ascending.
        columns: values of each metric by row; NaN where it was not measured.
        before, after: figures of the evaluations before and after training; empty when there are none.
        samples: file of the completions; None when it cannot be read.
        data: numbers of rows by what they are, as in `summary.json`.
        change_errors: standard errors of the changes from the evaluation before training to that after it, by figure,
            where the completions tell it.
    """

    method: str
    settings: Mapping[str, Any]
    steps: Int[np.ndarray, "n"]
    columns: Mapping[str, Float[np.ndarray, "n"]]
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    samples: Path | None = None
    data: Mapping[str, float] = field(default_factory=dict)
    change_errors: Mapping[str, float] = field(default_factory=dict)
    _metrics: dict[str, "MetricHistory"] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, run: RunData) -> "RunHistory":
        """Return the history of a run that was read from its folder."""
        steps, (before, after, data) = np.array(run.steps, np.int64), map(run.evaluation, ("before", "after", "data"))
        columns = _columns(steps, run.series)
        return cls(run.method, run.settings, steps, columns, before, after, run.samples, data, run.change_errors)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        method: str = "rl",
        settings: Mapping[str, Any] | None = None,
        before: Mapping[str, float] | None = None,
        data: Mapping[str, float] | None = None,
    ) -> "RunHistory":
        """Return the history of rows of `metrics.jsonl`; rows whose step does not ascend are left out."""
        curves = Curves(rows)
        steps = np.array(curves.steps, np.int64)
        return cls(method, settings or {}, steps, _columns(steps, curves.series), before or {}, data=data or {})

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps)

    def feature(self, path: str) -> Any:
        """Return the feature at `path`: an entry of `FEATURES` or a metric, or an attribute of that; None if it is
        unknown.
        """
        name, *attributes = path.split(".")
        value: Any = FEATURES[name](self) if name in FEATURES else self.metric(name)
        return reduce(lambda value, attribute: None if value is None else getattr(value, attribute), attributes, value)

    def metric(self, name: str) -> "MetricHistory":
        """Return the metric `name`, or the derived one of that name."""
        if name not in self._metrics:
            self._metrics[name] = MetricHistory(self, name)
        return self._metrics[name]

    def column(self, name: str) -> Float[np.ndarray, "n"]:
        """Return the values of the metric `name` by row; NaN in all rows if it was never measured."""
        return self.columns[name] if name in self.columns else np.full(len(self), np.nan)

    @property
    def window(self) -> int:
        """Number of rows that are averaged: a quarter of the run, from 3 to 50; of a shorter run at most half."""
        return min(max(MIN_WINDOW, min(MAX_WINDOW, round(len(self) / WINDOWS))), max(1, len(self) // 2))

    def numeric_setting(self, name: str, default: float) -> float:
        """Return the setting `name` as a number; `default` if the recipe has none."""
        value = number(self.settings.get(name))
        return default if value is None else value

    def count(self, name: str) -> int | None:
        """Return the setting `name` as a positive number of prompts or completions; None if it is none."""
        return int(min(max(self.numeric_setting(name, 0), 0), LARGEST_COUNT)) or None

    def num_samples(self, rows: int = 1) -> int | None:
        """Return the number of completions of `rows` steps, at least; None if unknown."""
        return rows * (self.count(GROUPS) or 0) * (self.count(GROUP_SIZE) or 0) or None

    @cached_property
    def scored(self) -> Float[np.ndarray, "n"]:
        """Number of completions with a reward, by row; 0 where the number of completions is unknown."""
        ratios = np.clip(np.nan_to_num(self.column("completions/scored_ratio"), nan=1.0), 0.0, 1.0)
        return np.asarray(np.rint(ratios * self.metric("reward").known * (self.num_samples() or 0)))

    @cached_property
    def only_reward(self) -> float | None:
        """Reward that every completion of the run had; None if they differ."""
        known = self.metric("reward").values[self.metric("reward").known]
        if not known.size or np.ptp(known) > ROUNDING * np.abs(known).max():
            return None
        tiny = ROUNDING * np.abs(known).max()
        alike = all((np.nan_to_num(self.column(name)) <= tiny).all() for name in ("reward_std", "reward_error"))
        return float(known[0]) if alike else None

    @property
    def functions(self) -> list[str]:
        """Names of the reward functions. The penalty of `grpo.overlong_buffer` is none."""
        parts = [name.split("/") for name in self.columns if name.startswith("rewards/") and name.endswith("/mean")]
        shaped = self.settings.get("grpo.algorithm") == "dapo" or self.numeric_setting("grpo.overlong_buffer", 0)
        is_old = shaped and f"rewards/{OVERLONG}/mean" not in self.columns  # of a version that wrote "overlong"
        return [part[1] for part in parts if len(part) == 3 and part[1] != ("overlong" if is_old else OVERLONG)]

    @property
    def unrewarding_functions(self) -> list[str] | None:
        """Names of the reward functions that gave 0 to every completion; None if there are none."""
        metrics = {name: [self.metric(f"rewards/{name}/{part}") for part in ("mean", "std")] for name in self.functions}
        return [
            name
            for name, (mean, std) in metrics.items()
            if mean.count and not (mean.nonzero_count or std.nonzero_count)
        ] or None

    @cached_property
    def opposed_parts(self) -> OpposedParts | None:
        """Reward functions of which one rose while the other fell and the reward did not; the pair that moved most."""
        if self.metric("reward").fall is not None:
            return None
        metrics = {name: self.metric(f"rewards/{name}/mean") for name in self.functions}
        spreads = {name: spread for name, metric in metrics.items() if (spread := metric.spread)}
        rises = {name: rise for name in spreads if (rise := metrics[name].change) and rise.errors >= GAIN_ERRORS}
        rises = {name: rise for name, rise in rises.items() if rise.difference >= MIN_FALL * spreads[name]}
        falls = {name: fall for name in spreads if (fall := metrics[name].fall)}
        size = lambda pair: rises[pair[0]].size / spreads[pair[0]] + falls[pair[1]].size / spreads[pair[1]]  # noqa: E731
        up, down = max(((up, down) for up in rises for down in falls if up != down), key=size, default=("", ""))
        return OpposedParts(up, down, rises[up], falls[down]) if up else None

    def reward_since_evaluation(self, late: Level | None) -> Change | None:
        """Return the change of the reward from the evaluation before training to `late`; None if one is unknown."""
        samples = self.before.get("samples", 0.0)
        if late is None or samples <= 0 or "reward" not in self.before:
            return None
        error = self.before["reward"] / math.sqrt(max(samples, 1.0))
        return Change(Level(self.before["reward"], error, 0, 0), late)

    @property
    def optimizer(self) -> str:
        """Section of the settings of the optimizer of the model."""
        return "training.optimizer" if self.method == "sft" else "training.actor_optimizer"

    def largest_share(self, pattern: str) -> float | None:
        """Return the largest of the metrics whose names match, as a share of the completions; None if there is none."""
        names = [name for name in self.columns if re.fullmatch(pattern, name)]
        levels = [level.mean for name in names if (level := self.metric(name).whole)]
        rounds = level.mean if (level := self.metric("dynamic_sampling/rounds").whole) else 1.0
        return max(levels) / (size * rounds) if levels and (size := self.num_samples()) else None

    def evaluations(self, name: str) -> list[Level]:
        """Return the figure `name` of every evaluation, also before (step 0) and after training."""
        values, errors, samples = (self._evaluated(figure) for figure in (name, "error", "samples"))
        if name != "accuracy":  # a share of completions, whose spread over prompts is not known
            errors = {
                at: math.sqrt(max(x * (1 - x), 0.0) / n) for at, x in values.items() if (n := samples.get(at, 0)) > 0
            }
        if name in self.change_errors:  # the change between the first and the last gets this error
            errors |= dict.fromkeys((0, *self.steps[-1:].tolist()), self.change_errors[name] / math.sqrt(2))
        return [Level(value, errors.get(step, math.nan), step, step) for step, value in sorted(values.items())]

    def _evaluated(self, name: str) -> dict[int, float]:
        values = self.column(f"eval/{name}")
        evaluated = {int(self.steps[i]): float(values[i]) for i in np.flatnonzero(np.isfinite(values))}
        evaluated |= {0: self.before[name]} if name in self.before else {}
        return evaluated | ({int(self.steps[-1]): self.after[name]} if name in self.after and len(self) else {})

    @property
    def loss_since_best(self) -> Change | None:
        """Change of the training loss since the lowest held-out loss, to the last window; None if one is unknown."""
        best, loss = min(self.evaluations("loss"), key=lambda level: level.mean, default=None), self.metric("loss")
        at = int((self.steps <= best.last).sum()) if best else 0
        return loss.since(loss.level(max(0, at - self.window), at))


class MetricHistory:
    """One metric of a run: its values by row, and its levels and changes. One that is unknown is None."""

    def __init__(self, run: RunHistory, name: str):
        self.run, self.name = run, name
        column, scale = DERIVED.get(name, (name, lambda run: 1))
        self.values, self.scale = run.column(column), scale(run)
        self.known = np.isfinite(self.values)

    def level(self, start: int, stop: int) -> Level | None:
        """Return the level in the rows from `start` to before `stop`; None if none of them has the metric."""
        known = self.known[start:stop]
        values, steps = self.values[start:stop][known], self.run.steps[start:stop][known]
        if not values.size:
            return None
        error = max(noise(values), self.noise) / math.sqrt(values.size)
        if self.name == "reward":
            error = max(error, float(np.linalg.norm(self._reward_errors[start:stop][known])) / values.size)
        mean = float(values.sum()) / values.size  # the method `mean` takes three times as long
        return Level(self.scale * mean, self.scale * float(error), int(steps[0]), int(steps[-1]))

    @cached_property
    def _reward_errors(self) -> Float[np.ndarray, "n"]:
        """Standard errors of the mean reward by row, from the spread of the completions. They are at least those of all
        completions as one group: two groups may have equal means by chance.
        """
        within = np.nan_to_num(self.run.column("reward_std")) / np.sqrt(np.maximum(self.run.scored, 1.0))
        errors = np.nan_to_num(self.run.column("reward_error"))
        return np.asarray(np.maximum(errors, within))

    @cached_property
    def noise(self) -> float:
        """Noise of a value in the whole run, as the function `noise` returns it."""
        return noise(self.values[self.known])

    @cached_property
    def start(self) -> Level | None:
        """Level of the first row, which no update has touched."""
        return self.level(0, 1)

    @cached_property
    def first(self) -> Level | None:
        """Level of the first window."""
        return self.level(0, self.run.window)

    @cached_property
    def last(self) -> Level | None:
        """Level of the last window."""
        return self.level(max(0, len(self.run) - self.run.window), len(self.run))

    @cached_property
    def whole(self) -> Level | None:
        """Level of the whole run."""
        return self.level(0, len(self.run))

    @property
    def change(self) -> Change | None:
        """Change from the first window to the last."""
        return self.since(self.first)

    @property
    def since_start(self) -> Change | None:
        """Change from the first row to the last window."""
        return self.since(self.start)

    @property
    def since_middle(self) -> Change | None:
        """Change from the window before the middle of the run to the last."""
        half = len(self.run) // 2
        return self.since(self.level(max(0, half - self.run.window), max(1, half)))

    @cached_property
    def since_lowest(self) -> Change | None:
        """Change from the lowest of the earlier levels to the last window."""
        return self.since(min(self._earlier_levels(), key=lambda level: level.mean, default=None))

    @cached_property
    def trough(self) -> Change | None:
        """Clearest fall between two levels of half a window, whether or not it was made up for since."""
        rows = max(MIN_WINDOW, self.run.window // 2)
        stops = (stop for stop in stops_before(len(self.run)) if stop >= rows)
        return clearest_fall([level for stop in stops if (level := self.level(stop - rows, stop))])

    @property
    def since_peak(self) -> Change | None:
        """Change to the last window from the level from which it fell most clearly."""
        return self.since(self.trough.early) if self.trough else None

    def since(self, early: Level | None) -> Change | None:
        """Return the change from `early` to the last window."""
        return Change(early, self.last) if early and self.last else None

    @cached_property
    def fall(self) -> Change | None:
        """Largest fall from an earlier level to the last window; None if it has not fallen.

        A fall is at least 4 standard errors and 30 % of the spread of completions, from the level that shows it best.
        """
        changes = [change for early in self._earlier_levels() if (change := self.since(early))]
        least = MIN_FALL * self.spread
        falls = [change for change in changes if change.errors <= -FALL_ERRORS and -change.difference >= least]
        if not falls or min(changes, key=lambda change: change.errors) not in falls:
            return None
        return min(falls, key=lambda change: change.difference)

    def _earlier_levels(self) -> list[Level]:
        """Return levels before the last window, each over at most a window."""
        window = self.run.window
        levels = (self.level(max(0, stop - window), stop) for stop in stops_before(len(self.run) - window))
        return [level for level in levels if level]

    @property
    def rose(self) -> bool:
        """Whether it has risen: by at least 3 standard errors, and by 5 % of the spread of completions."""
        change = self.change
        return bool(change and change.errors >= GAIN_ERRORS and change.difference >= MIN_GAIN * self.spread)

    @cached_property
    def spread(self) -> float:
        """Standard deviation over single completions of a reward, or of a reward function's
        `rewards/<function>/mean`: the largest of any window of the run.

        This is the unit in which rises and falls are measured, so that no rule depends on the scale of a reward.
        """
        if self.name == "reward":
            between = np.nan_to_num(self.run.column("reward_error")) ** 2 * (self.run.count(GROUPS) or 1)
            each = np.sqrt(np.nan_to_num(self.run.column("reward_std")) ** 2 + between)
        else:
            each = np.nan_to_num(self.run.column(self.name.removesuffix("/mean") + "/std"))
        size = min(self.run.window, len(each))
        if not size:
            return 0.0
        spread = float(np.convolve(each, np.ones(size) / size, "valid").max())
        return spread or (float(self.values[self.known].std()) if self.count else 0.0)

    @property
    def peak(self) -> Level | None:
        """Highest value, as the level of its row."""
        at = int(np.nanargmax(self.values)) if self.count else 0
        return self.level(at, at + 1)

    @property
    def count(self) -> int:
        """Number of rows that have the metric."""
        return int(self.known.sum())

    @property
    def nonzero_count(self) -> int:
        """Number of rows in which it was measured and is not 0."""
        return int((np.nan_to_num(self.values) != 0).sum())

    @property
    def first_nonzero(self) -> int | None:
        """First step of these; None if there is none."""
        return int(self.run.steps[(np.nan_to_num(self.values) != 0).argmax()]) if self.nonzero_count else None


FEATURES: dict[str, Callable[[RunHistory], Any]] = {
    "run": lambda run: run,
    # upper end of the noise as a share of all variance: random rewards reach 1
    "noise_reach": lambda run: (
        level.mean + GAIN_ERRORS * level.error if (level := run.metric("reward_noise").whole) else None
    ),
    # whether the reward has risen, or the held-out accuracy
    "learnt": lambda run: (
        run.metric("reward").rose or bool((gain := run.feature("held_out_gain")) and gain.errors >= GAIN_ERRORS)
    ),
    "num_steps": lambda run: f"{len(run)} step{'s' if len(run) != 1 else ''}",
    "temperature": lambda run: run.numeric_setting("rollout.temperature", 1.0),
    "entropy_bonus": lambda run: run.numeric_setting("grpo.entropy_bonus", 0.0),
    "beta": lambda run: run.numeric_setting("grpo.beta", 0.0),
    "weight_decay": lambda run: run.numeric_setting(f"{run.optimizer}.weight_decay", 0.0),
    "rate": lambda run: run.numeric_setting(f"{run.optimizer}.learning_rate", 0.0),
    # the sum of the rates of all steps of a short run
    "short_rate_sum": lambda run: (
        len(run) * rate.mean if len(run) < SHORT_RUN and (rate := run.metric("learning_rate").whole) else None
    ),
    # below it a gradient is small for the optimizer, which divides it by its size
    "eps": lambda run: run.numeric_setting(f"{run.optimizer}.eps", 1e-8),
    "max_grad_norm": lambda run: run.numeric_setting(f"{run.optimizer}.max_grad_norm", 0.0),
    # the share of a weight that decay takes at a step
    "decay": lambda run: (
        run.feature("weight_decay") * peak.mean if (peak := run.metric("learning_rate").peak) else None
    ),
    "failing": lambda run: run.largest_share("rewards/[^/]+/failed"),
    "failed_episodes": lambda run: run.largest_share("env/failed"),
    # the advantages come from a critic, which learns from groups of equal rewards too
    "has_critic": lambda run: (
        run.settings.get("grpo.algorithm") == "ppo" or run.settings.get("grpo.advantage") == "gae"
    ),
    # the probability ratio is that of a sequence, so that whole sequences are clipped
    "has_sequence_ratio": lambda run: (
        str(run.settings.get("grpo.algorithm")).startswith("gspo")
        or run.settings.get("grpo.ratio") in ("sequence", "sequence_token")
    ),
    # steps by which samples may be older than the weights that train on them
    "samples_age": lambda run: run.numeric_setting("training.off_policy_steps", 0),
    "samples": lambda run: run.num_samples(len(run)),
    "has_tools": lambda run: bool(run.settings.get("envs.tools")),
    "prompts": lambda run: run.data.get("prompts", run.data.get("examples")),
    "plain_prompts": lambda run: run.data.get("plain"),
    "cut_rows": lambda run: run.data.get("truncated"),
    "dropped_rows": lambda run: run.data.get("dropped"),
    # relative change of the entropy, if it is no chance
    "entropy_shift": lambda run: (
        change.size / change.early.size
        if (change := run.metric("entropy").change) and change.early.mean and abs(change.errors) >= GAIN_ERRORS
        else 0.0
    ),
    # completions without a reward, with those of the evaluation before training if it had none either
    "unrewarded": lambda run: (
        run.feature("scored_count") + (run.before.get("samples", 0) if run.before.get("reward") == 0 else 0)
    ),
    "answers": lambda run: (run.after or run.before).get("samples"),
    "rows": lambda run: run.data.get("rows"),
    "distinct_rows": lambda run: run.data.get("distinct"),
    "held_out_rows": lambda run: run.data.get("held_out"),
    "held_out_in_training": lambda run: run.data.get("held_out_in_training"),
    "empty_completions": lambda run: (
        (run.feature("completions/empty_ratio.whole.mean") or 0) * (run.num_samples(len(run)) or 0)
    ),
    "tied_without_critic": lambda run: (
        None if run.feature("has_critic") else run.feature("frac_reward_zero_std.whole.mean")
    ),
    # in a run of an older version, which lacks these metrics, by the reward: of rewards 0 and 1, 80 % are 1
    # a pair may be tied at the best reward by chance
    "tied_at_best": lambda run: (
        best > (run.feature("frac_reward_all_worst.last.mean") or 0)
        and (best >= MOST_TIED or (run.count(GROUP_SIZE) or 0) > SMALL)
        if (best := run.feature("frac_reward_all_best.last.mean")) is not None
        else (run.feature("reward.last.mean") or 0) >= EASY_RATIO * run.metric("reward").spread
    ),
    "scored_count": lambda run: run.scored.sum(),
    # where some completions have no reward: the word for the others, and how many have none
    "judged": lambda run: "judged " if run.feature("unscored") and run.scored.any() else "",
    "unscored": lambda run: (
        f"{lacking:,.0f} more have no reward"
        if (lacking := (run.num_samples(len(run)) or 0) - run.scored.sum()) > 0
        else None
    ),
    "scored_samples": lambda run: f"{run.scored.sum():,.0f}" if run.scored.any() else None,
    # the upper end of the 95 % confidence interval of a rate of which no success was seen
    "success_bound": lambda run: 3 / n if (n := run.scored.sum()) else None,
    "none_of_all": lambda run: (
        f"none of {n} {run.feature('judged')}completions" if (n := run.feature("scored_samples")) else "no completion"
    ),
    "finished_without_reward": lambda run: (
        None
        if run.only_reward != 0
        else (1 - (cut.mean if (cut := run.metric("completions/clipped_ratio").whole) else 0)) * run.scored.sum()
    ),
    "longest": lambda run: (
        f"{peak.mean:.0f} token{'s' if peak.mean != 1 else ''}"
        if (peak := run.metric("completions/max_length").peak)
        else None
    ),
    # weights and products are float32: sampler and trainer differ in little more than the order of sums
    "least_agreement": lambda run: (
        EXACT if all(run.settings.get(f"model.{name}") == "float32" for name in ("dtype", "compute_dtype")) else ROUNDED
    ),
    "group_size": lambda run: run.count(GROUP_SIZE),
    "drawn_otherwise": lambda run: (
        percent(1 - last.mean) if (last := run.metric("sampling/token_agreement").last) else None
    ),
    "only_reward": lambda run: run.only_reward,
    "has_one_reward": lambda run: run.only_reward is not None,
    "unrewarding": lambda run: run.unrewarding_functions,
    "all_unrewarding": lambda run: 0 < len(run.functions) == len(run.unrewarding_functions or ()),
    "opposed": lambda run: run.opposed_parts,
    # between the first step, which no update has touched, and the last window
    "jumps": lambda run: [text for case in JUMPS if (text := case.evidence(run))] or None,
    "jump_count": lambda run: len(run.feature("jumps") or ()),
    "since_evaluation": lambda run: run.reward_since_evaluation(run.metric("reward").first),
    # its clearest fall from one evaluation to a later one, and its change from the first to the last
    "held_out_trough": lambda run: clearest_fall(run.evaluations("accuracy")),
    "held_out_start": lambda run: next(iter(run.evaluations("accuracy")), None),
    "held_out_gain": lambda run: change_between(lambda levels, key: levels[0], run.evaluations("accuracy")),
    # the accuracy is known not to have fallen: neither on the way, nor from the first evaluation to the last by a
    # standard error or by 30 % of the spread of single answers
    "held_out_kept": lambda run: (
        (change := run.feature("held_out_gain")) is not None
        and run.feature("held_out_trough").errors > -GAIN_ERRORS
        and (mean := change.early.mean) > 2 * change.early.error
        and change.difference >= -change.error
        and change.difference >= change.error - MIN_FALL * math.sqrt(max(mean * (1 - mean), 0.0))
    ),
    # from its best to the last evaluation
    "held_out_accuracy": lambda run: change_between(max, run.evaluations("accuracy")),
    "held_out_format": lambda run: change_between(max, run.evaluations("format_accuracy")),
    "held_out_reward": lambda run: change_between(lambda levels, key: levels[0], run.evaluations("reward")),
    # from the evaluation before training to the first step, which no update has touched
    "held_out_to_training": lambda run: run.reward_since_evaluation(run.metric("reward").start),
    # from the lowest evaluation to the last, to the lower one of the last two, and to the first
    "held_out_loss": lambda run: change_between(min, run.evaluations("loss")),
    "held_out_loss_rise": lambda run: change_between(min, run.evaluations("loss"), lambda levels: min(levels[-2:])),
    "held_out_loss_gain": lambda run: change_between(min, run.evaluations("loss"), itemgetter(0)),
    "loss_since_best": lambda run: run.loss_since_best,
}
"""Features of a run that are none of a single metric."""

DERIVED: dict[str, tuple[str, Callable[[RunHistory], float]]] = {
    "group_spread": ("reward_error", lambda run: math.sqrt(run.count(GROUPS) or 1)),
    "distinct_texts": ("completions/distinct_ratio", lambda run: run.count(GROUP_SIZE) or 0),
}
"""Metrics that are multiples of others: the standard deviation of the mean reward between groups, and the number of
different completions in a group."""

JUMP, KL_HIGH = 0.3, 1.0
"""Rise of the share of completions cut off that counts as a jump, and KL in nats per token that is high."""
LENGTH_JUMP, ENTROPY_LOW, ENTROPY_HIGH, SPIKE = 1.5, 0.3, 2.0, 10.0
"""Factors that count as a jump: of the mean length, of the entropy downwards and upwards, of the gradient norm."""
ENTROPY_FELL, ENTROPY_SOARED = (
    at_most("entropy.since_start.ratio", ENTROPY_LOW),
    at_least("entropy.since_start.ratio", ENTROPY_HIGH),
)

JUMPS: tuple[Case, ...] = (
    Case(
        "completions cut off {completions/clipped_ratio.since_start:share}",
        [at_least("completions/clipped_ratio.since_start.difference", JUMP)],
    ),
    Case(
        "mean length {completions/mean_length.since_start}",
        [
            at_least("completions/mean_length.since_start.ratio", LENGTH_JUMP),
            at_least("completions/mean_length.since_start.errors", FALL_ERRORS),
        ],
    ),
    Case(
        "mean length {completions/mean_length.since_start}",
        [
            at_most("completions/mean_length.since_start.ratio", 1 / LENGTH_JUMP),
            at_most("completions/mean_length.since_start.errors", -FALL_ERRORS),
        ],
    ),
    Case("entropy {entropy.since_start}", [ENTROPY_FELL]),
    Case("entropy {entropy.since_start}", [ENTROPY_SOARED]),
    Case("KL {kl.last.mean:.3g} nats per token in {kl.last.span}", [at_least("kl.last.mean", KL_HIGH)]),
    Case(
        "gradient norm {grad_norm.start.mean:.3g} in the first step, {grad_norm.peak.mean:.3g} in step "
        "{grad_norm.peak.first}",
        [at_least("grad_norm.peak.mean", SPIKE, "grad_norm.start.mean"), above("grad_norm.start.mean", 0)],
    ),
)
"""Figures that jump when updates spoil a model."""


def _columns(steps: Int[np.ndarray, "n"], series: Mapping[str, Series]) -> dict[str, Float[np.ndarray, "n"]]:
    """Return the values of each metric at `steps`; NaN where it was not measured."""
    columns = {name: np.full(len(steps), np.nan) for name in series}
    for name, curve in series.items():
        columns[name][np.searchsorted(steps, np.array(curve.steps, np.int64))] = curve.values
    return columns
