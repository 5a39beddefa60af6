"""Table of the charts of a report: which metrics share one, in which section, and which are shown first.

Names and units come from `covey.config.metrics`. A metric that no chart names gets a chart in the last section.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from covey.config.metrics import metric


class Chart(NamedTuple):
    """One chart.

    Attributes:
        title: title of the chart.
        section: heading under which it stands.
        metrics: names of its metrics, with `<function>` and `<k>` as in the table of metrics.
        error: metric with the standard error of the first one, drawn as a band.
        band: metrics of the lower and the upper end of a band around the first one.
        stacked: whether the metrics of one run are drawn on top of each other, as parts of a sum.
        ahead: whether it is for runs in which a thread samples ahead of training, or for the others; None for all.
    """

    title: str
    section: str
    metrics: tuple[str, ...]
    error: str = ""
    band: tuple[str, ...] = ()
    stacked: bool = False
    ahead: bool | None = None


CHARTS = (
    Chart("Reward", "Reward", ("reward",), error="reward_error"),
    Chart("Loss", "Optimisation", ("loss", "eval/loss")),
    Chart(
        "Held-out results",
        "Held-out prompts",
        ("eval/accuracy", "eval/partial_accuracy", "eval/format_accuracy"),
        error="eval/error",
    ),
    Chart(
        "Completion length",
        "Completions",
        ("completions/mean_length",),
        band=("completions/min_length", "completions/max_length"),
    ),
    Chart("KL to the reference", "Policy", ("kl",)),
    Chart("Entropy", "Policy", ("entropy",)),
    Chart("Reward by function", "Reward", ("rewards/<function>/mean",)),
    Chart("Spread by function", "Reward", ("rewards/<function>/std",)),
    Chart("Spread within groups", "Reward", ("reward_std",)),
    Chart("Noise of the reward", "Reward", ("reward_noise",)),
    Chart(
        "Groups without a signal",
        "Reward",
        ("frac_reward_zero_std", "frac_reward_all_best", "frac_reward_all_worst"),
    ),
    Chart(
        "Correlation of the reward",
        "Reward",
        ("reward_correlation/length", "reward_correlation/empty", "reward_correlation/repetition"),
    ),
    Chart("Correlation of reward functions", "Reward", ("rewards/<function>/correlation/<function>",)),
    Chart("Failed reward calls", "Reward", ("rewards/<function>/failed",)),
    Chart("Held-out pass@k", "Held-out prompts", ("eval/pass@<k>",)),
    Chart("Held-out pass@k, as counted", "Held-out prompts", ("eval/pass@<k>_any",)),
    Chart("Held-out reward", "Held-out prompts", ("eval/reward",)),
    Chart("Held-out length", "Held-out prompts", ("eval/mean_length",)),
    Chart("Held-out completions cut off", "Held-out prompts", ("eval/clipped_ratio",)),
    Chart(
        "Completions judged",
        "Held-out prompts",
        ("eval/samples", "eval/judged", "eval/partial_judged", "eval/format_judged", "eval/reward_judged"),
    ),
    Chart("Perplexity", "Optimisation", ("perplexity", "eval/perplexity")),
    Chart("Gradient norm", "Optimisation", ("grad_norm",)),
    Chart("Learning rate", "Optimisation", ("learning_rate",)),
    Chart("Skipped updates", "Optimisation", ("skipped",)),
    Chart("Epoch", "Optimisation", ("epoch",)),
    Chart("Turns of an episode", "Completions", ("env/turns",)),
    Chart("Branches of an episode", "Completions", ("env/branches",)),
    Chart("Tokens of the environment", "Completions", ("env/tokens",)),
    Chart("Episodes ended by the environment", "Completions", ("env/done",)),
    Chart("Seconds in the environment", "Completions", ("env/seconds",)),
    Chart("Failed episodes", "Completions", ("env/failed",)),
    Chart("Episodes without another of their prompt", "Completions", ("env/dropped",)),
    Chart("Tool calls of an episode", "Completions", ("env/tool_calls",)),
    Chart("Failed tool calls", "Completions", ("env/tool_failures",)),
    Chart("Completions cut off", "Completions", ("completions/clipped_ratio",)),
    Chart("Different completions in a group", "Completions", ("completions/distinct_ratio",)),
    Chart("Completions scored", "Completions", ("completions/scored_ratio",)),
    Chart("Empty completions", "Completions", ("completions/empty_ratio", "completions/rewarded_empty_ratio")),
    Chart("Repetition", "Completions", ("completions/repetition",)),
    Chart(
        "Dynamic sampling",
        "Completions",
        ("dynamic_sampling/rounds", "dynamic_sampling/replaced", "dynamic_sampling/tied"),
    ),
    Chart("Clipped tokens", "Policy", ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean")),
    Chart("Weight of the KL", "Policy", ("beta",)),
    Chart("Tokens that the trainer draws too", "Sampler and trainer", ("sampling/token_agreement",)),
    Chart(
        "Log-probs, trainer against sampler",
        "Sampler and trainer",
        ("sampling/logp_difference/mean", "sampling/logp_difference/max"),
    ),
    Chart(
        "Probability ratio, trainer to sampler",
        "Sampler and trainer",
        ("sampling/importance_ratio/mean",),
        band=("sampling/importance_ratio/min", "sampling/importance_ratio/max"),
    ),
    Chart("Probability kept by truncation", "Sampler and trainer", ("sampling/mass_kept",)),
    Chart("Age of the samples", "Sampler and trainer", ("sampling/staleness",)),
    Chart(
        "Correction weight",
        "Sampler and trainer",
        ("sampling/correction/mean", "sampling/correction/masked", "sampling/correction/effective"),
    ),
    Chart("Loss of the critic", "Critic", ("critic/loss", "critic/value_loss")),
    Chart("Explained variance", "Critic", ("critic/explained_variance",)),
    Chart("Values", "Critic", ("critic/value_mean",)),
    Chart("Gradient norm of the critic", "Critic", ("critic/grad_norm",)),
    Chart("Clipped values", "Critic", ("critic/value_clip_ratio",)),
    Chart("Tokens per second", "Speed", ("tokens_per_second",)),
    Chart("Time of a step", "Speed", ("step_time", "time/compile")),
    Chart(
        "Time by phase",
        "Speed",
        ("time/rollout", "time/reward", "time/wait", "time/logps", "time/update", "time/sync"),
        stacked=True,
        ahead=False,
    ),
    Chart(
        "Time by phase: training",
        "Speed",
        ("time/wait", "time/logps", "time/update", "time/sync"),
        stacked=True,
        ahead=True,
    ),
    Chart(
        "Time by phase: the thread that samples ahead",
        "Speed",
        ("time/rollout_wait", "time/rollout"),
        stacked=True,
        ahead=True,
    ),
    Chart(
        "Time by phase: the thread that scores ahead",
        "Speed",
        ("time/reward_wait", "time/reward"),
        stacked=True,
        ahead=True,
    ),
    Chart("Padding", "Speed", ("waste/rollout", "waste/rows")),
    Chart("Slots without work", "Speed", ("waste/slots",)),
    Chart("Tokens of a step", "Speed", ("num_tokens", "loss_tokens")),
)
"""All charts, in the order of the page; the sections are in the order of their first chart."""

MAIN = {
    "rl": ("Reward", "Held-out results", "Completion length", "KL to the reference", "Entropy", "Gradient norm"),
    "sft": ("Loss", "Held-out results", "Gradient norm", "Learning rate"),
}
"""Titles of the main charts by training method; the first `MAIN_COUNT` that were measured stand at the top."""
MAIN_COUNT = 4
ROUNDING = {"loss": 1e-6, "kl": 1e-6}
"""Differences that are rounding alone, by metric, where its scale is 1 whatever its values are."""
AHEAD = "time/rollout_wait"
"""Metric of the runs in which threads sample and score ahead of training."""
OTHER = "Other metrics"
"""Section of the metrics that no chart names."""


def charts_for(names: Iterable[str], methods: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts of the metrics `names` of runs by `methods`, in the form that the page reads.

    Each has title, section, main (whether it stands at the top), `stacked` if it is, and its series: name, label, unit,
    meaning, the difference that is `rounding` alone, and the names of the ends of its band (`low`, `high`) or of its
    standard error (`error`) where they are measured.
    """
    measured = dict.fromkeys(names)
    charts: list[dict[str, Any]] = []
    for chart in (chart for chart in CHARTS if chart.ahead in (None, AHEAD in measured)):
        pairs = [(pattern, name) for pattern in chart.metrics for name in _matching(pattern, measured)]
        if series := [_series(chart, pattern, name, measured) for pattern, name in pairs]:
            stacked = {"stacked": True} if chart.stacked else {}
            charts.append({"title": chart.title, "section": chart.section, **stacked, "series": series})
    keys = ("name", "low", "high", "error")
    drawn = {series[key] for chart in charts for series in chart["series"] for key in keys if key in series}
    others = [name for name in measured if name not in drawn]
    charts += [{"title": name, "section": OTHER, "series": [_described(name, name)]} for name in others]
    titles = [chart["title"] for chart in charts]
    main = [title for title in MAIN["rl" if "rl" in set(methods) else "sft"] if title in titles][:MAIN_COUNT]
    sections = list(dict.fromkeys(chart["section"] for chart in charts))
    places = {title: place - len(main) for place, title in enumerate(main)}
    charts.sort(key=lambda chart: places.get(chart["title"], sections.index(chart["section"])))
    return [{**chart, "main": chart["title"] in main} for chart in charts]


def _series(chart: Chart, pattern: str, name: str, measured: Mapping[str, None]) -> dict[str, Any]:
    series = _described(name, _label(pattern, name))
    if name == chart.metrics[0]:
        series |= {"error": chart.error} if chart.error in measured else {}
        series |= dict(zip(("low", "high"), chart.band, strict=False)) if measured.keys() >= {*chart.band} else {}
    return series


def _described(name: str, label: str) -> dict[str, Any]:
    row = metric(name)
    described = {"name": name, "label": label, "unit": row.unit if row else "", "meaning": row.meaning if row else ""}
    return described | ({"rounding": ROUNDING[name]} if name in ROUNDING else {})


def _matching(pattern: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that match `pattern`.

    >>> list(_matching("rewards/<function>/mean", ["rewards/a/mean", "rewards/a/std"]))
    ['rewards/a/mean']
    """
    expression = _expression(pattern)
    yield from (name for name in names if expression.fullmatch(name))


def _label(pattern: str, name: str) -> str:
    """Return the text of the legend: what the pattern's placeholder stands for, or the end of the name.

    >>> _label("rewards/<function>/mean", "rewards/spelling/mean"), _label("clip_ratio/low_mean", "clip_ratio/low_mean")
    ('spelling', 'low')
    """
    match = _expression(pattern).fullmatch(name)
    if match and match.groups():
        return f"k = {match[1]}" if "<k>" in pattern else " and ".join(match.groups())
    ends: Sequence[str] = name.rsplit("/", 1)
    return (
        "held-out"
        if ends[0] == "eval" and ends[-1] in ("loss", "perplexity")
        else ends[-1].removesuffix("_mean").replace("_", " ")
    )


def _expression(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern)
    return re.compile(text.replace("<function>", "([^/]+)").replace("<k>", "([1-9][0-9]*)"))
