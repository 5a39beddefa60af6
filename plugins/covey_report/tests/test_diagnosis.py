"""The rules of the diagnosis: each is met just above its threshold and not just below, and none raises."""

import json
import math
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config import recipe
from covey.config.base import leaves
from covey.config.metrics import metric
from covey.config.schema import PPOConfig
from covey_report.diagnosis import NOTE, PROBLEM, RULES, WITHDRAWN, Finding, LiveDiagnosis, Rule, RunHistory, diagnose
from covey_report.diagnosis.diagnose import CERTAIN, FIRST_STEPS
from covey_report.diagnosis.features import JUMPS
from covey_report.diagnosis.rule import FIELD
from covey_report.run_data import read_run

ROOT = Path(__file__).parents[3]
N = 40
SETTINGS = {
    "grpo.algorithm": "grpo", "grpo.num_generations": 8, "training.prompts_per_step": 8, "rollout.temperature": 1.0,
}  # fmt: skip
NAN = float("nan")
RATE = "training.actor_optimizer.learning_rate"
Values = float | Sequence[float]


def wobble(size: float, n: int = N) -> np.ndarray:
    """Alternating noise, so that errors are known."""
    return size * np.where(np.arange(n) % 2 == 0, 1.0, -1.0)


def ramp(first: float, last: float, n: int = N, noise: float = 0.01) -> np.ndarray:
    return np.linspace(first, last, n) + wobble(noise, n)


def step(first: float, last: float, at: int = N // 2, n: int = N, noise: float = 0.0) -> np.ndarray:
    return np.where(np.arange(n) < at, first, last) + wobble(noise, n)


def history(
    n: int = N, method: str = "rl", settings: Mapping[str, Any] | None = None, /, **columns: Values
) -> RunHistory:
    """A run that learns, with other values in some columns; `a__b` stands for the metric a/b."""
    usual: dict[str, Values] = {
        "reward": ramp(0.2, 0.8, n), "reward_error": 0.05, "reward_std": 0.4, "frac_reward_zero_std": 0.1,
        "completions__mean_length": 20.0, "completions__max_length": 40.0, "completions__clipped_ratio": 0.02,
        "completions__distinct_ratio": 0.9, "entropy": ramp(1.0, 0.7, n, 0.001), "grad_norm": 1.0,
        "learning_rate": 1e-5,
        "sampling__token_agreement": 1.0,
        "sampling__logp_difference__mean": 1e-6, "sampling__mass_kept": 1.0, "clip_ratio__region_mean": 0.0,
    }  # fmt: skip
    if method == "sft":
        usual = {"loss": ramp(2.0, 1.0, n), "grad_norm": 1.0, "learning_rate": 1e-5, "entropy": ramp(2.0, 1.0, n)}
    table = {
        name.replace("__", "/"): np.broadcast_to(np.asarray(values, float), n)
        for name, values in (usual | columns).items()
    }
    rows = [{"step": i + 1, **{name: float(values[i]) for name, values in table.items()}} for i in range(n)]
    return RunHistory.from_rows(rows, method, SETTINGS | dict(settings or {}))


SCALED = re.compile("reward|reward_std|reward_error|rewards/.*/(mean|std)")
"""Metrics with the unit of a reward."""
SPREADS: dict[str, Values] = {"rewards__a__std": 0.4, "rewards__b__std": 0.4}
FLAT: dict[str, Values] = {"reward": 0.5 + wobble(0.02)}
"""A reward that neither rises nor falls."""


def settings_of(rule: Rule) -> list[str]:
    return [match[1] for match in FIELD.finditer(rule.advice)]


def names(found: RunHistory) -> list[str]:
    return [one.rule for one in diagnose(found) if one.level == PROBLEM]


def notes(found: RunHistory) -> list[str]:
    return [one.rule or one.title for one in diagnose(found) if one.level == NOTE]


# --- every rule, just above its threshold and just below


def data(held_out_in_training: int, distinct: int = 500, method: str = "rl") -> RunHistory:
    rows: dict[str, float] = {
        "rows": 600.0,
        "distinct": distinct,
        "held_out": 100,
        "held_out_in_training": held_out_in_training,
    }
    return replace(history(N, method), data=rows)


def fitted(method: str = "rl", **counts: int) -> RunHistory:
    return replace(history(N, method), data={"prompts" if method == "rl" else "examples": 600} | counts)


def edge(
    metric: str, above: Values, below: Values, settings: Mapping[str, Any] | None = None, method: str = "rl", /,
    before: Mapping[str, float] = MappingProxyType({}), data: Mapping[str, float] = MappingProxyType({}),
    **columns: Values,
) -> tuple[RunHistory, RunHistory]:  # fmt: skip
    """Two histories that differ in one metric."""
    runs = (history(N, method, settings, **(columns | {metric: values})) for values in (above, below))
    first, second = (replace(run, before=before, data=data) for run in runs)
    return first, second


NOTHING: dict[str, Values] = {"reward": 0.0, "reward_error": 0.0, "reward_std": 0.0}
BEFORE = {"reward": 0.5, "samples": 400.0}
HELD_OUT = np.arange(N) % 10 == 9
EDGES: dict[str, tuple[RunHistory, RunHistory]] = {
    "updates not finite": edge("skipped", step(0, 1, N - 1), 0.0),
    "sampler and trainer disagree": edge("sampling__logp_difference__mean", 0.051, 0.049),
    "one training row": (data(0, 1), data(0, 101)),
    "few distinct rows": (data(0, 100), data(0, 101)),
    "prompts cut": (fitted(truncated=31), fitted(truncated=30)),
    "held-out rows trained on": (data(6), data(5)),
    "held-out rows of another kind": edge("reward", 1.01, 0.99, before=BEFORE),
    "episodes fail": edge("env__failed", 3.3, 3.1),
    "reward fails": edge("rewards__a__failed", 3.3, 3.1),
    "few completions scored": edge("completions__scored_ratio", 0.49, 0.51),
    "noisy reward": edge("reward_noise", 1.0, 0.84, **FLAT),
    "prompts without template": edge(
        "completions__empty_ratio", step(0.31, 0.0, 4), step(0.29, 0.0, 4), data={"plain": 600.0, "prompts": 600.0}
    ),
    "reward ignores completions": edge("frac_reward_zero_std", 1.0, 0.99, **FLAT),
    "learning rate next to 0": edge("learning_rate", 0.0, step(0.0, 1e-5, N - 1), **FLAT),
    "weight decay too large": edge(
        "learning_rate", 1.01e-5, 0.99e-5, {"training.actor_optimizer.weight_decay": 200.0}, **FLAT
    ),
    "beta too large": (
        history(N, "rl", {"grpo.beta": 1.0}, **FLAT),
        history(N, "rl", {"grpo.beta": 0.9}, **FLAT),
    ),
    "gradient clipped away": edge(
        "grad_norm", 1.01e-4, 0.99e-4, {"training.actor_optimizer.max_grad_norm": 1e-8}, **FLAT
    ),
    "tools never called": edge("env__tool_calls", 0.0, 0.01, {"envs.tools": ["calculator"]}, **FLAT),
    "prompts too easy": edge(
        "frac_reward_zero_std", 0.91, 0.79, frac_reward_all_best=0.86, frac_reward_all_worst=0.05, **FLAT
    ),
    "empty completions": edge("completions__empty_ratio", step(0.0, 0.96), step(0.0, 0.94)),
    "no completion scored": edge("reward", NAN, step(NAN, 0.5, 1), reward_error=NAN, reward_std=NAN),
    "constant reward": edge("reward_std", 0.0, step(0.0, 0.1, N - 1), reward=0.3, reward_error=0.0),
    "temperature too high": edge("reward", 0.19, 0.26, {"rollout.temperature": 1.5}, before=BEFORE),
    "entropy bonus too large": edge("entropy", ramp(1.0, 1.9), ramp(1.0, 1.5), {"grpo.entropy_bonus": 0.1}, **FLAT),
    "learning rate too high": edge(
        "reward", step(0.6, 0.43, noise=0.02), step(0.6, 0.5, noise=0.02), reward_error=0.02
    ),
    "answers cut off": edge("completions__clipped_ratio", 0.31, 0.29, **FLAT),
    "samples too similar": edge("completions__distinct_ratio", 1.24 / 8, 1.26 / 8, **FLAT),
    "reward never reached": (
        history(**NOTHING),
        history(**NOTHING | {"reward": step(0.0, 0.01, N - 1), "reward_std": step(0.0, 0.01, N - 1)}),
    ),
    "KL runaway": edge("kl", step(0.4, 1.01), step(0.4, 0.99)),
    "entropy collapse": edge(
        "entropy", step(1.0, 0.19), step(1.0, 0.21), frac_reward_zero_std=step(0.1, 0.81), reward_error=0.17, **FLAT
    ),
    "groups too small": edge("frac_reward_zero_std", 0.81, 0.79, reward=0.1 + wobble(0.02)),
    "possible reward hacking": edge(
        "rewards__a__mean", ramp(0.9, 0.4), ramp(0.9, 0.8), rewards__b__mean=ramp(0.1, 0.9), **SPREADS
    ),
    "overfitting": edge("eval__accuracy", step(0.6, 0.43), step(0.6, 0.44), eval__error=0.04),
    "length without reward": edge("completions__mean_length", step(20, 30.5), step(20, 29.5), **FLAT),
    "updates beyond the clip range": edge("clip_ratio__region_mean", 0.21, 0.19),
    "learning rate too low": edge("entropy", 1.0 + wobble(0.001), ramp(1.0, 0.9, noise=0.001), **FLAT),
}
SUPERVISED: dict[str, tuple[RunHistory, RunHistory]] = {
    "learning rate too high": edge("loss", step(1.0, 1.12, noise=0.001), step(1.0, 1.08, noise=0.001), {}, "sft"),
    "learning rate too low": edge("loss", step(2.0, 1.97), step(2.0, 1.95), {}, "sft"),
    "overfitting": edge(
        "eval__loss", np.where(HELD_OUT, step(1.0, 1.06), NAN), np.where(HELD_OUT, step(1.0, 1.04), NAN), {}, "sft"
    ),
    "updates not finite": edge("skipped", step(0, 1, 5), 0.0, {}, "sft"),
    "one training row": (data(0, 1, "sft"), data(0, 101, "sft")),
    "few distinct rows": (data(0, 100, "sft"), data(0, 101, "sft")),
    "prompts cut": (fitted("sft", dropped=601), fitted("sft", dropped=600)),
    "learning rate next to 0": edge("learning_rate", 0.0, step(0.0, 1e-5, N - 1), {}, "sft"),
    "weight decay too large": edge(
        "learning_rate",
        1.01e-5,
        0.99e-5,
        {"training.optimizer.weight_decay": 200.0},
        "sft",
        loss=ramp(1.0, 1.04, noise=0.001),
    ),
    "gradient clipped away": edge(
        "loss", step(2.0, 1.97), ramp(2.0, 1.0), {"training.optimizer.max_grad_norm": 1e-9}, "sft"
    ),
    "wrong answers learnt": edge(
        "eval__accuracy", step(0.6, 0.43), step(0.6, 0.44), {}, "sft", before=BEFORE, eval__error=0.04
    ),
    "held-out rows trained on": (data(6, method="sft"), data(5, method="sft")),
}
NOTED: dict[str, tuple[RunHistory, RunHistory]] = {
    "critic predicts nothing": edge("critic__explained_variance", -0.01, 0.01, {"grpo.algorithm": "ppo"}, **FLAT),
    "part of the reward never reached": edge(
        "rewards__a__mean", 0.0, step(0.0, 0.1, N - 1), rewards__a__std=0.0, rewards__b__mean=0.5, rewards__b__std=0.4
    ),
    "probability removed by truncation": edge("sampling__mass_kept", 0.69, 0.71),
}
TABLES = {"rl": EDGES, "sft": SUPERVISED, "note": NOTED}


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, table in TABLES.items() for rule in table])
def test_a_rule_is_met_above_its_threshold_and_not_below(kind: str, rule: str) -> None:
    """A problem is the first finding; a note comes with no problem."""
    above, below = TABLES[kind][rule]
    judged = notes if kind == "note" else names
    assert rule in judged(above)
    assert rule not in judged(below)
    assert names(above)[:1] == ([] if kind == "note" else [rule])
    assert kind == "rl" or names(below) == []


@pytest.mark.parametrize(("size", "wanted"), [(2, True), (3, True), (4, False)])
def test_small_groups_need_fewer_equal_rewards(size: int, wanted: bool) -> None:
    found = history(N, "rl", {"grpo.num_generations": size}, frac_reward_zero_std=0.61, reward=0.1 + wobble(0.02))
    assert ("groups too small" in names(found)) is wanted


EXACT = {"model.dtype": "float32", "model.compute_dtype": "float32"}


@pytest.mark.parametrize(
    ("agreement", "settings", "wanted"),
    [(0.9985, EXACT, True), (0.9995, EXACT, False), (0.96, {}, False), (0.94, {}, True),
     (0.96, EXACT | {"model.dtype": "bfloat16"}, False), (step(1.0, 0.9), EXACT, False),
     (0.94, {"training.off_policy_steps": 1}, False)],
)  # fmt: skip
def test_few_tokens_that_the_trainer_draws_too_are_a_problem(
    agreement: Values, settings: Mapping[str, Any], wanted: bool
) -> None:
    """From where rounding does not explain them, at the beginning and at the end."""
    found = history(N, "rl", settings, sampling__token_agreement=agreement)
    assert names(found) == ["sampler and trainer disagree"] * wanted
    if wanted:
        assert "% of the tokens otherwise in steps 31 to 40" in diagnose(found)[0].evidence


def test_every_rule_has_an_edge() -> None:
    of = {method: {rule.name for rule in RULES if method in rule.methods} for method in ("rl", "sft")}
    assert of == {"rl": EDGES.keys() | NOTED.keys(), "sft": SUPERVISED.keys()}


@pytest.mark.parametrize("n", [8, 16, 40, 500])
def test_a_run_that_learns_has_no_problem(n: int) -> None:
    (note,) = diagnose(history(n))
    assert (note.title, note.level) == ("Nothing wrong was found", NOTE)
    assert names(history(n, "sft")) == []


def test_rules_are_for_their_method() -> None:
    """A reward in a supervised run, or the loss of reinforcement learning, which is 0 by construction, says nothing."""
    assert names(history(N, "sft", reward=0.3, reward_error=0.0, reward_std=0.0)) == []
    assert names(history(loss=step(0.0, 1e-8, noise=1e-8))) == []


# --- which cause comes first


def test_what_a_high_rate_did_is_told_with_it_and_not_as_causes_of_its_own() -> None:
    spoiled = history(
        reward=step(0.6, 0.0, 3), reward_std=step(0.4, 0.0, 3), reward_error=step(0.05, 0.0, 3),
        frac_reward_zero_std=step(0.1, 1.0, 3), completions__clipped_ratio=step(0.0, 1.0, 3),
        entropy=step(1.0, 0.01, 3),
        completions__mean_length=step(20, 40, 3), kl=step(0.0, 30.0, 3),
    )  # fmt: skip
    (finding,) = diagnose(spoiled)
    assert finding.rule == "learning rate too high"
    assert "training.actor_optimizer.learning_rate" in finding.setting
    assert "the mean reward fell 0.6 (step 1) → 0 (steps 31 to 40)" in finding.evidence
    for consequence in ("Answers are cut off", "entropy 1 (step 1) → 0.01", "KL 30 nats"):
        assert consequence in finding.evidence


def test_a_reward_of_0_is_explained_by_answers_that_were_all_cut() -> None:
    nothing = NOTHING | {"frac_reward_zero_std": 1.0}
    assert names(history(completions__clipped_ratio=1.0, **nothing)) == ["answers cut off"]
    assert names(history(completions__clipped_ratio=0.4, **nothing)) == ["reward never reached"]


@pytest.mark.parametrize(("cut", "wanted"), [(0.81, ["answers cut off"]), (0.79, [])])
def test_nearly_all_answers_cut_off_is_a_problem_though_the_reward_rises(cut: float, wanted: list[str]) -> None:
    assert names(history(completions__clipped_ratio=cut)) == wanted


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("overlong-penalty", {}, ["reward never reached"]),
        ("overlong", {"grpo.algorithm": "dapo"}, ["reward never reached"]),  # of a run of an older version
        ("overlong", {"grpo.overlong_buffer": 0.2}, ["reward never reached"]),
        ("overlong", {}, []),  # a function of the user's
    ],
)
def test_a_penalty_for_long_answers_is_no_reward(name: str, settings: dict[str, Any], wanted: list[str]) -> None:
    nothing: dict[str, Values] = {"rewards__a__mean": 0.0, "rewards__a__std": 0.0}
    shorter: dict[str, Values] = {"reward": ramp(-1.0, 0.0), f"rewards__{name}__mean": ramp(-1.0, 0.0)}
    assert names(history(N, "rl", settings, **nothing, **shorter)) == wanted


def test_a_correlation_with_a_function_called_failed_is_no_failure() -> None:
    assert names(history(rewards__a__correlation__failed=100.0)) == []


def test_a_high_rate_is_seen_where_there_was_no_reward_to_lose() -> None:
    wild = {"entropy": step(1.0, 0.1, 2), "completions__clipped_ratio": step(0.0, 1.0, 2), "frac_reward_zero_std": 1.0}
    assert names(history(**NOTHING | wild)) == ["learning rate too high"]


def test_a_run_that_ends_with_nothing_but_right_answers_is_sound() -> None:
    solved = history(
        reward=ramp(0.3, 1.0, noise=0.0), reward_std=ramp(0.45, 0.0, noise=0), reward_error=ramp(0.1, 0.0, noise=0),
        frac_reward_zero_std=ramp(0.1, 1.0, noise=0), entropy=ramp(1.0, 0.01, noise=0),
        completions__distinct_ratio=ramp(0.9, 0.125, noise=0),
    )  # fmt: skip
    assert names(solved) == []


def test_with_a_critic_equal_rewards_in_a_group_are_no_problem() -> None:
    single = {"grpo.algorithm": "ppo", "grpo.num_generations": 1}
    assert names(history(N, "rl", single, frac_reward_zero_std=1.0, reward_std=0.0, entropy=ramp(1.0, 0.1))) == []


def test_hacking_comes_with_samples_to_read(tmp_path: Path) -> None:
    found = EDGES["possible reward hacking"][0]
    rows = [
        {"step": s, "group": g, "sample": i, "prompt": f"{g}+2=", "text": f"{i}\x1b",
         "rewards": {"a": i / 8, "b": g / 9}}
        for s in (1, 39, 40)
        for g in range(4)
        for i in range(8)
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "[]\nnothing\n")
    (finding, *_) = diagnose(replace(found, samples=tmp_path / "samples.jsonl"))
    assert len(finding.samples) == 5
    assert finding.samples[0] == "step 39, group 3, sample 0 (a 0, b 0.333): 3+2= → 0\\x1b"
    assert finding.samples[1].startswith("step 40, group 3, sample 0")
    assert diagnose(replace(found, samples=tmp_path / "none"))[0].samples == ()


def test_an_accuracy_that_falls_while_the_reward_rises_everywhere_is_hacking() -> None:
    found = history(eval__accuracy=step(0.6, 0.3), eval__error=0.04, eval__reward=ramp(0.3, 0.9))
    assert names(found) == ["possible reward hacking"]


# --- runs that are short, incomplete, resumed or strange


@pytest.mark.parametrize("n", [0, 1, 4, 5, 7])
def test_a_run_of_few_steps_is_judged_by_rules_without_a_trend_alone(n: int) -> None:
    constant = diagnose(history(n, reward=0.3, reward_error=0.0, reward_std=0.0))[0]
    falling = diagnose(history(n, reward=step(0.9, 0.1, 2, n)))[0]
    assert falling.title == "The run is too short to judge"
    assert falling.evidence.startswith(f"{n} step")
    assert (constant.rule == "constant reward") is (n >= 2)  # 64 completions a step


def test_a_reward_that_stays_flat_for_no_known_reason_is_not_called_sound() -> None:
    (note,) = diagnose(history(entropy=ramp(1.0, 0.6), **FLAT))
    assert note.title == "The reward did not improve, and no rule says why"


@pytest.mark.parametrize("rule", EDGES)
def test_the_length_of_a_run_and_gaps_change_nothing(rule: str) -> None:
    """Ten times as many steps with the same course have the same first cause; a tenth of the values may be missing."""
    above, below = EDGES[rule]
    for found, wanted in ((above, True), (below, False)):
        columns = {name: np.repeat(values, 10) for name, values in found.columns.items()}
        assert (rule in names(replace(found, steps=np.arange(1, 10 * N + 1), columns=columns))) is wanted
    columns = {name: np.where(np.arange(N) % 10 == 4, NAN, values) for name, values in above.columns.items()}
    assert names(replace(above, columns=columns))[0] == rule


def test_a_run_without_any_metric_is_no_error() -> None:
    rows = [{"step": i} for i in range(20)]
    assert names(RunHistory.from_rows(rows)) == ["no completion scored"]
    for method in ("sft", "other"):
        assert [one.level for one in diagnose(RunHistory.from_rows(rows, method))] == [NOTE]


def test_rows_whose_steps_do_not_ascend_are_left_out() -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "reward": 1.0}, {"step": 1, "reward": 2.0}, {"step": "x"}, {"step": 3}]
    assert RunHistory.from_rows(rows).steps.tolist() == [1, 3]


COLUMNS = sorted(
    {name for above, _ in (*EDGES.values(), *SUPERVISED.values(), *NOTED.values()) for name in above.columns}
)
STRANGE = (0.0, 1.0, -1.0, 0.5, 1e300, -1e300, 1e-300, NAN, None, "x", [], True, 10**400)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40), st.sampled_from(["rl", "sft"]))
def test_no_history_raises(seed: int, n: int, method: str) -> None:
    """Columns of strange numbers, settings of any kind, evaluations of any size."""
    draw = np.random.default_rng(seed)
    values = lambda: draw.choice([-1e300, -1.0, 0.0, 1e-300, 0.3, 1.0, 50.0, 1e300, NAN], n)  # noqa: E731
    picked = draw.choice(COLUMNS, draw.integers(0, 9), replace=False)
    chosen = {name: STRANGE[draw.integers(len(STRANGE))] for rule in RULES for name in settings_of(rule)}
    figures = dict(zip(("reward", "samples", "accuracy", "error", "loss"), draw.normal(size=5) * 1e200, strict=True))
    usual = history(n, method, chosen)
    found = diagnose(replace(usual, columns=usual.columns | {str(name): values() for name in picked}, before=figures))
    assert found
    assert all(one.title and one.evidence for one in found)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(EDGES)), st.booleans(), st.floats(1e-6, 1e6))
def test_the_scale_of_a_reward_changes_nothing(rule: str, above: bool, scale: float) -> None:
    found = EDGES[rule][0 if above else 1]
    scaled = {name: values * scale if SCALED.fullmatch(name) else values for name, values in found.columns.items()}
    before = found.before | ({"reward": found.before["reward"] * scale} if "reward" in found.before else {})
    assert names(replace(found, columns=scaled, before=before)) == names(found)


# --- while the run trains


def rows_of(found: RunHistory) -> list[dict[str, Any]]:
    return [
        {"step": int(number), **{name: float(values[i]) for name, values in found.columns.items()}}
        for i, number in enumerate(found.steps)
    ]


def told(found: RunHistory, live: LiveDiagnosis | None = None) -> list[tuple[int, Finding]]:
    live = live or LiveDiagnosis(found.method, found.settings)
    return [(row["step"], one) for row in rows_of(found) for one in live.step(row)]


def test_a_problem_is_told_once_when_it_is_certain() -> None:
    ((step, finding),) = told(EDGES["KL runaway"][0])
    assert finding.rule == "KL runaway"
    assert step >= FIRST_STEPS + CERTAIN


def test_a_reward_that_falls_is_told_soon_after_with_its_cause_alone() -> None:
    found = history(reward=step(0.6, 0.0, 12, noise=0.02), completions__clipped_ratio=step(0.0, 1.0, 12))
    ((step_told, finding),) = told(found)
    assert finding.rule == "learning rate too high"
    assert 12 < step_told <= 24


def test_what_only_the_end_shows_and_a_dip_of_a_few_steps_are_not_told() -> None:
    dip = np.where((np.arange(N) >= 20) & (np.arange(N) < 23), 0.0, ramp(0.2, 0.8))
    for found in (history(reward=dip), history(), EDGES["learning rate too low"][0]):
        assert told(found) == []


def test_a_resumed_run_continues_its_history() -> None:
    found = EDGES["constant reward"][0]
    live = LiveDiagnosis(found.method, found.settings, rows=rows_of(found)[:20])
    ((number, _),) = told(replace(found, steps=np.arange(21, 21 + N)), live)
    assert number == 21


def test_judging_a_long_run_takes_a_time_proportional_to_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    monkeypatch.setattr(
        sys.modules["covey_report.diagnosis.diagnose"], "_matches", lambda found: judged.append(len(found)) or []
    )
    told(history(600))
    assert 50 < len(judged) < 50 + math.log(600 / 50) / math.log(1.02) + 1


# --- runs that were judged wrong


def rate_too_high(n: int = 24) -> RunHistory:
    """LoRA of rank 1 at a learning rate of 1e-2: a trough, and held-out results that are lower than before."""
    reward = np.concatenate([np.full(5, 0.48), np.full(7, 0.17), np.linspace(0.25, 0.48, 12)])[:n] + wobble(0.01, n)
    held_out = np.where(np.arange(n) == 11, 0.39, np.where(np.arange(n) == 23, 0.53, NAN))
    columns = {
        "reward": reward,
        "eval__accuracy": held_out,
        "eval__error": 0.019,
        "entropy": 0.6,
        "learning_rate": 0.01,
    }
    found = history(n, "rl", {RATE: 0.01}, reward_error=0.02, **columns)
    return replace(found, before={"accuracy": 0.67, "error": 0.018})


def pays_for_empty(n: int = 20) -> RunHistory:
    """Few completions are empty at first, and soon all; `evaluation.accuracy` is the same function."""
    empty = np.minimum(1.0, 0.01 * 3.0 ** np.arange(n))
    rewarded = np.where(empty < 1, 1.0, NAN)
    columns = {"completions__empty_ratio": empty, "completions__rewarded_empty_ratio": rewarded, "reward": empty}
    return history(n, "rl", {"training.prompts_per_step": 64}, reward_std=empty * (1 - empty), **columns)


def reward_for(name: str, n: int = 20, correlation: Values = 1.0) -> RunHistory:
    """The completions grow until nearly all are cut off, and then all have the reward of the longest."""
    cut, tied = ramp(0.1, 1.0, n, 0), ramp(0.0, 1.0, n, 0)
    columns = {"completions__clipped_ratio": cut, "frac_reward_zero_std": tied, "frac_reward_all_best": tied}
    columns |= {
        "frac_reward_all_worst": 0.0,
        "completions__mean_length": ramp(2.0, 3.0, n),
        "reward": ramp(1.0, 3.0, n),
    }
    return history(n, **columns | {f"reward_correlation__{name}": correlation})


def test_a_trough_and_a_held_out_fall_refute_a_rate_that_is_too_low() -> None:
    found = rate_too_high()
    (finding,) = diagnose(found)
    assert finding.rule == "learning rate too high"
    assert "the mean reward fell 0.48" in finding.evidence
    assert f"lower {RATE} (0.01 today; try 0.002)" in finding.setting
    first, *_ = told(found)
    assert (first[0], first[1].rule) == (12, "learning rate too high")
    held_out = replace(found, columns=found.columns | {"reward": 0.48 + wobble(0.01, 24)})
    assert names(held_out) == ["learning rate too high"]
    (low,) = (rule for rule in RULES if rule.name == "learning rate too low" and "rl" in rule.methods)
    for one, words in ((found, "the reward fell by 3"), (held_out, "the held-out accuracy fell by 3")):
        match = low.match(one)
        assert match
        assert match.refutation.startswith(words)


def test_a_first_step_with_rewards_refutes_a_temperature_that_is_too_high() -> None:
    """The reward was lost in the steps after it, at the same temperature."""
    columns: dict[str, Values] = {"reward": step(0.53, 0.0, 2, 20), "reward_error": 0.02}
    found = replace(history(20, "rl", {"rollout.temperature": 1.5}, **columns), before=BEFORE)
    assert names(found) == ["learning rate too high"]


def test_a_reward_for_empty_completions_is_told_from_the_first_step_with_some() -> None:
    found = pays_for_empty()
    assert names(found) == ["possible reward hacking"]
    ((step_told, finding),) = told(found)
    assert step_told == 1
    assert finding.title.startswith("All rewarded completions are empty")
    assert names(replace(found, columns=found.columns | {"completions/rewarded_empty_ratio": np.zeros(20)})) == [
        "empty completions"
    ]


@pytest.mark.parametrize("name", ["length", "repetition"])
def test_a_reward_that_length_explains_refutes_that_answers_are_cut_off(name: str) -> None:
    found = reward_for(name)
    (finding,) = diagnose(found)
    assert finding.title.startswith(f"The reward is explained by the {name}")
    assert "max_new_tokens" not in finding.setting
    assert [(at, one.title) for at, one in told(found)] == [(2, finding.title)]
    other = reward_for(name, correlation=0.6)
    assert "possible reward hacking" not in names(other)


def test_shorter_is_better_only_where_none_is_cut_off() -> None:
    columns: dict[str, Values] = {"reward_correlation__length": -0.99}
    assert names(history(**columns, completions__clipped_ratio=0.01)) == ["possible reward hacking"]
    assert names(history(**columns)) == []


def test_a_format_that_falls_while_the_reward_rises_is_hacking() -> None:
    for last, wanted in ((0.3, ["possible reward hacking"]), (0.55, [])):
        columns: dict[str, Values] = {"eval__samples": 100, "eval__reward": ramp(0, 1)}
        assert names(history(**columns | {"eval__format_accuracy": step(0.7, last)})) == wanted


def test_one_row_that_is_also_held_out_is_told_at_the_first_step() -> None:
    live = LiveDiagnosis("rl", SETTINGS, data=data(100, 1).data)
    one, held_out = live.step({"step": 1, "reward": 0.5})
    assert (one.evidence, held_out.evidence) == (
        "600 training rows, 1 distinct",
        "100 of 100 held-out rows are training rows",
    )


def test_a_problem_that_is_refuted_is_withdrawn_aloud() -> None:
    """No reward in the first steps is said at once, and taken back when there is one."""
    found = history(reward=step(0.0, 0.5, 9), reward_std=step(0.0, 0.4, 9), reward_error=step(0.0, 0.05, 9))
    (first, withdrawn) = told(found)
    assert (first[0], first[1].rule, first[1].level) == (7, "reward never reached", PROBLEM)
    assert (withdrawn[0], withdrawn[1].level) == (9 + CERTAIN, WITHDRAWN)
    assert withdrawn[1].title == "Withdrawn: The reward was never reached"
    live = LiveDiagnosis(found.method, found.settings)
    told(history(7, reward=0.0, reward_std=0.0, reward_error=0.0), live)
    assert [one.title for one in live.end(found)] == ["Withdrawn: The reward was never reached"]


def test_ties_at_the_best_and_at_the_worst_are_two_findings() -> None:
    ties: dict[str, Values] = {"frac_reward_zero_std": 0.9, **FLAT}
    for best, worst, wanted in ((0.8, 0.1, ["prompts too easy"]), (0.1, 0.8, ["groups too small"])):
        found = diagnose(history(frac_reward_all_best=best, frac_reward_all_worst=worst, **ties))
        assert [one.rule for one in found if one.rule] == wanted


# --- what the held-out results say of a training reward, in both directions


def evaluated(accuracy: Values, error: float = 0.04, method: str = "rl", /, **columns: Values) -> RunHistory:
    """A run with evaluations after steps 20 and 40; the first accuracy is that before training."""
    before, middle, last = accuracy if isinstance(accuracy, Sequence) else (accuracy,) * 3
    held_out = np.full(N, NAN)
    held_out[[19, 39]] = middle, last
    found = history(N, method, eval__accuracy=held_out, eval__error=error, **columns)
    return replace(found, before={"accuracy": before, "error": error})


HARDER: dict[str, Values] = {"reward": ramp(0.78, 0.4), "reward_error": 0.02}


def test_a_held_out_accuracy_that_stays_refutes_a_rate_that_is_too_high() -> None:
    """The training prompts became harder; only a fall of the held-out accuracy too makes it the model's."""
    harder = evaluated((0.78, 0.78, 0.79), **HARDER)
    (note,) = diagnose(harder)
    assert (note.level, note.title.partition(":")[0]) == (
        NOTE,
        "The reward fell in training and not on held-out prompts",
    )
    assert "the held-out accuracy 78 % (step 0) → 79 % (step 40)" in note.evidence
    (finding,) = diagnose(evaluated((0.78, 0.6, 0.4), **HARDER))
    assert finding.rule == "learning rate too high"
    assert "the held-out accuracy 78 % (step 0) → 40 % (step 40)" in finding.evidence
    assert "the held-out accuracy has not fallen" in finding.refuted_by
    assert names(evaluated((0.78, 0.78, 0.79), 0.3, **HARDER)) == [
        "learning rate too high"
    ]  # too few prompts to say so
    assert names(evaluated((0.78, 0.5, 0.77), **HARDER)) == ["learning rate too high"]  # it fell on the way


@pytest.mark.parametrize("rule", ["learning rate too low", "groups too small", "beta too large"])
def test_a_held_out_accuracy_that_rises_refutes_that_nothing_was_learnt(rule: str) -> None:
    found, _ = EDGES[rule]
    for last, wanted in ((0.55, True), (0.8, False)):
        columns = evaluated((0.5, 0.5, last)).columns
        held_out = {name: columns[name] for name in ("eval/accuracy", "eval/error")}
        one = replace(found, columns={**found.columns, **held_out}, before={"accuracy": 0.5, "error": 0.04})
        assert (rule in names(one)) is wanted
        assert wanted or diagnose(one)[0].title == "Nothing wrong was found"


def test_a_held_out_loss_at_its_lowest_refutes_a_supervised_rate_that_is_too_high() -> None:
    rising = {"loss": step(1.0, 1.3, noise=0.001)}
    for last, wanted in ((0.9, []), (1.2, ["learning rate too high"])):
        held_out = np.where(HELD_OUT, ramp(1.0, last, noise=0), NAN)
        assert names(history(N, "sft", eval__loss=held_out, **rising)) == wanted
    low, _ = SUPERVISED["learning rate too low"]
    learnt = {"eval/loss": np.where(HELD_OUT, ramp(1.0, 0.9, noise=0), NAN)}
    assert names(replace(low, columns={**low.columns, **learnt})) == []


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_a_held_out_accuracy_that_fell_by_four_errors_is_told_of_a_short_run(method: str) -> None:
    """27 ± 7 points in 4 steps."""
    found = replace(
        history(4, method), before={"accuracy": 0.62, "error": 0.05}, after={"accuracy": 0.35, "error": 0.05}
    )
    (finding,) = diagnose(found)
    assert finding.level == PROBLEM
    assert "62 % after step 0, 35 % after step 4" in finding.evidence
    assert diagnose(replace(found, after={"accuracy": 0.5, "error": 0.05}))[0].title == "The run is too short to judge"


def test_the_change_of_the_accuracy_has_the_error_of_the_differences_of_each_prompt() -> None:
    figures = {"before": {"accuracy": 0.62, "error": 0.05}, "after": {"accuracy": 0.45, "error": 0.05}}
    found = replace(history(4), **figures)
    assert names(found) == []
    assert names(replace(found, change_errors={"accuracy": 0.05})) == ["learning rate too high"]


# --- figures, advice and hysteresis


def test_figures_count_the_completions_that_have_a_reward() -> None:
    """30 % of 64 completions of each step have none."""
    (finding,) = diagnose(history(reward=0.5, reward_error=0.0, reward_std=0.0, completions__scored_ratio=0.703125))
    assert finding.evidence == (
        "every judged completion of 40 steps scored 0.5 (1,800 completions); 760 more have no reward"
    )
    (finding,) = diagnose(history(**NOTHING, completions__scored_ratio=0.703125))
    assert (
        "none of 1,800 judged completions in 40 steps had a reward other than 0; 760 more have no" in finding.evidence
    )
    assert "below 0.167 %" in finding.evidence
    ((at, _),) = told(history(reward=0.5, reward_error=0.0, reward_std=0.0, completions__scored_ratio=0.703125))
    assert at == 3  # 64 · 0.7 · 3 are 100 or more
    rounds: dict[str, Values] = {"rewards__a__failed": 4.0, "dynamic_sampling__rounds": 2.0}  # 4 of 128
    assert names(history(**rounds)) == []


def test_advice_follows_the_rate_in_force_and_names_no_setting_that_is_beyond_it() -> None:
    """A warm-up over 90 % of the steps, of which half were made."""
    rates = np.linspace(1e-4, 2e-3, N)
    columns: dict[str, Values] = {"reward": step(0.6, 0.1, noise=0.02), "reward_error": 0.02, "learning_rate": rates}
    warm_up = {RATE: 5e-3, "training.actor_optimizer.warmup_ratio": 0.9, "grpo.beta": 0.1}
    (finding,) = diagnose(history(N, "rl", warm_up, **columns))
    assert f"lower {RATE} (0.005 today, at most 0.002 in force; try 0.0004)" in finding.setting
    assert "warmup" not in finding.setting
    assert "beta" not in finding.setting
    assert "at a learning rate of 0.002 at most, 0.00105 on average" in finding.evidence
    low, _ = EDGES["learning rate too low"]
    (finding,) = diagnose(replace(low, settings=low.settings | warm_up))
    assert "or less training.actor_optimizer.warmup_ratio (0.9 today; try 0.1)" in finding.setting
    assert "beta" not in finding.setting


def test_a_clipped_gradient_is_no_cause_where_the_optimizer_divides_by_its_size() -> None:
    """What Adam does not see is a gradient below its eps."""
    for eps, wanted in ((1e-8, []), (1e-3, ["gradient clipped away"])):
        limits = {"training.actor_optimizer.max_grad_norm": 1e-4, "training.actor_optimizer.eps": eps}
        assert names(history(N, "rl", limits, grad_norm=10.0, entropy=ramp(1.0, 0.9), **FLAT)) == wanted


SOUND: dict[str, dict[str, Values]] = {
    "93 % at the start": {
        "reward": ramp(0.93, 0.95), "reward_std": 0.1, "reward_error": 0.05, "frac_reward_zero_std": 0.9,
        "frac_reward_all_best": 0.88, "frac_reward_all_worst": 0.02, "completions__distinct_ratio": 0.15,
    },
    "a reward with noise": {
        "reward": ramp(0.93, 0.96), "reward_std": 0.47, "reward_error": 0.06, "reward_noise": 0.75 + wobble(0.15),
        "frac_reward_zero_std": 0.0, "entropy": 0.5 + wobble(0.004),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_near_its_best_has_no_problem(name: str) -> None:
    found = evaluated((0.93, 0.94, 0.95), 0.026, **SOUND[name])
    assert names(found) == []
    assert told(found, LiveDiagnosis("rl", found.settings, found.before)) == []


def test_a_problem_is_not_told_withdrawn_and_told_again() -> None:
    """Completions that are cut in seven steps of fourteen, and a KL that is high in 25 of 50. From ten times the length
    of the withdrawal on it may be told again.
    """
    cut = np.where(np.arange(60) // 7 % 2 == 0, 0.6, 0.1)
    levels = [one.level for _, one in told(history(60, completions__clipped_ratio=cut, reward=0.5 + wobble(0.02, 60)))]
    assert levels in ([PROBLEM], [PROBLEM, WITHDRAWN])
    found = history(700, kl=np.where(np.arange(700) // 25 % 2 == 1, 2.0, 0.1))
    told_at, withdrawn_at, *again = [at for at, one in told(found) if one.title.endswith("away from the reference")]
    assert 25 < told_at < withdrawn_at < 75
    assert all(at >= 500 for at in again)


def test_a_refutation_of_one_step_withdraws_nothing() -> None:
    found = evaluated((0.78, 0.5, 0.4), reward=step(0.6, 0.1, 12, noise=0.02), reward_error=0.02)
    kept = np.where(np.arange(N) == 15, 0.8, found.columns["eval/accuracy"])
    found = replace(found, columns={**found.columns, "eval/accuracy": kept})
    messages = told(found, LiveDiagnosis("rl", found.settings, found.before))
    assert [one.level for _, one in messages] == [PROBLEM]


def test_empty_completions_of_the_first_steps_name_a_chat_model_that_gets_plain_text() -> None:
    """62 to 78 % of the completions of steps 1 to 4; later there are none, and the reward rises."""
    empty = np.where(np.arange(N) < 4, [0.62, 0.78, 0.7, 0.66] * (N // 4), 0.02)
    found = replace(history(completions__empty_ratio=empty), data={"plain": 200.0, "prompts": 200.0})
    (finding,) = diagnose(found)
    assert finding.title == "The model has a chat template, and the prompts are plain text"
    assert "62 % of the completions are empty in step 1" in finding.evidence
    live = LiveDiagnosis("rl", SETTINGS, data=found.data)
    assert [(at, one.rule) for at, one in told(found, live)] == [(2, "prompts without template")]
    assert names(replace(found, data={})) == ["empty completions"]


# --- the table


def test_the_settings_to_change_exist_and_are_named() -> None:
    known = {
        "rl": leaves(recipe.Recipe).keys() | {f"grpo.{name}" for name in PPOConfig.kinds},
        "sft": leaves(recipe.SFTRecipe).keys() | {name for name in leaves(recipe.Recipe) if ".actor_optimizer" in name},
    }
    for rule in RULES:
        assert all(set(settings_of(rule)) <= known[method] for method in rule.methods), rule.name
        assert rule.advice_for({}) == re.sub(FIELD, r"\1", rule.advice).replace("|", "")


def test_features_of_the_rules_exist() -> None:
    """Each is known in one of the histories above: a name that is no feature would never be."""
    histories = [above for above, _ in (*EDGES.values(), *SUPERVISED.values(), *NOTED.values())]
    histories.append(history(eval__reward=step(0.3, 0.9), eval__format_accuracy=step(1.0, 0.5)))
    histories += [reward_for("length"), reward_for("repetition"), pays_for_empty()]
    cases = [*JUMPS, *(case for rule in RULES for case in rule.cases)]
    refutations = [condition for rule in RULES for condition in rule.refuted_by]
    assert all(condition.words for condition in refutations)
    conditions = [*refutations, *(condition for case in cases for condition in case.when)]
    paths = {path for condition in conditions for path in (condition.feature, condition.unit) if path}
    paths |= {name for case in cases for _, name, _, _ in Formatter().parse(case.words) if name}
    assert {path for path in paths if all(one.feature(path) is None for one in histories)} == set()


def test_metrics_of_the_rules_are_logged() -> None:
    assert [name for name in COLUMNS if metric(name) is None] == []


def test_consequences_are_later_rules() -> None:
    order = [rule.name for rule in RULES]
    for place, rule in enumerate(RULES):
        assert all(name in order[place + 1 :] for name in rule.explains), rule.name


def test_a_folder_gives_the_history_of_its_rows(tmp_path: Path) -> None:
    rows = rows_of(history())
    rows[3]["entropy"] = None
    (tmp_path / "recipe.yaml").write_text("method: rl\ngrpo: {num_generations: 8}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text('{"before": {"accuracy": 0.5, "x": null}, "after": {"accuracy": 0.6}}')
    found, wanted = RunHistory.of(read_run(tmp_path)), RunHistory.from_rows(rows)
    assert found.columns.keys() == wanted.columns.keys()
    for name, values in wanted.columns.items():
        np.testing.assert_array_equal(found.column(name), values)
    assert [(level.first, level.mean) for level in found.evaluations("accuracy")] == [(0, 0.5), (N, 0.6)]
    assert (found.feature("group_size"), found.num_samples()) == (8, None)


def test_the_table_of_the_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "diagnosis_table.py"))
    assert tool["FILE"].read_text() == tool["text"](), "make schema writes it again"
