"""Evaluation: shares, their error, the settings it overrides, and the noise it repeats."""

import dataclasses
import itertools
import json
import sys
import types
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.cli.checks import check_run
from covey.config import recipe
from covey.config.schema import EvalConfig, RewardSafetyConfig, RolloutConfig
from covey.errors import RecipeError
from covey.monitor.formats import figures
from covey.monitor.writer import write_answers
from covey.rewards.scoring import RewardRunner
from covey.rl.evaluate import (
    EVALUATION_STEP,
    PRESETS,
    Evaluation,
    during_training,
    evaluate,
    evaluation_rollout,
    pass_at_k,
)
from covey.types import Completion, FinishReason, Group

ROLLOUT = RolloutConfig(temperature=0.9, top_p=0.95, top_k=50, max_new_tokens=7, seed=3)


class Canned:
    """Answers every prompt with the texts in its `say` column; remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, examples: Sequence[Mapping[str, Any]], samples: int, **how: Any) -> list[Group]:
        self.asked.append({"examples": list(examples), "samples": samples, **how})
        none = np.zeros(0, np.float32)

        def completion(text: str) -> Completion:
            finish = FinishReason.LENGTH if text.endswith("...") else FinishReason.STOP
            return Completion(np.zeros(len(text), np.int32), none, none, finish, text)

        said = [tuple(map(completion, e["say"][:samples])) for e in examples]
        prompt = np.zeros(1, np.int32)
        return [Group(e["prompt"], prompt, s, {"answer": e["answer"]}) for e, s in zip(examples, said, strict=True)]


def right(completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    return [None if c == "?" else (2.0 if c == a else 0.5) for c, a in zip(completions, answer, strict=True)]


def tidy(completions: Sequence[str]) -> list[float]:
    return [1.0 if c[0].isupper() else 0.0 for c in completions]


def near(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(c[0].lower() == a[0].lower()) for c, a in zip(completions, answer, strict=True)]


@pytest.fixture(autouse=True)
def judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions where a recipe's `module:function` finds them."""
    module = types.ModuleType("judges")
    module.right, module.tidy, module.near = right, tidy, near  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "judges", module)


EXAMPLES = [
    {"prompt": "p0", "answer": "Ab", "say": ["Ab", "Ab", "x", "Cd..."]},
    {"prompt": "p1", "answer": "Ab", "say": ["x", "y", "?", "Ab"]},
    {"prompt": "p2", "answer": "zz", "say": ["Q", "Q", "Q", "Q"]},
]
BOTH = EvalConfig(prompts=3, samples=4, accuracy="judges:right", format="judges:tidy", partial="judges:near")


def test_shares_and_error_by_hand() -> None:
    """MetricSums by prompt 2/4, 1/3, 0: unscored is not judged, 0.5 is not enough. The error is over prompts."""
    found = evaluate(Canned(), EXAMPLES, BOTH, ROLLOUT)
    assert found.metrics["accuracy"] == pytest.approx(5 / 18)
    assert found.metrics["error"] == pytest.approx(np.std([0.5, 1 / 3, 0], ddof=1) / np.sqrt(3))
    assert found.metrics["judged"] == 11
    assert found.metrics["format_accuracy"] == pytest.approx((3 + 1 + 4) / 12)
    assert found.metrics["partial_accuracy"] == pytest.approx(3 / 12)
    assert found.metrics["samples"] == 12
    assert found.metrics["clipped_ratio"] == pytest.approx(1 / 12)
    assert found.metrics["mean_length"] == pytest.approx((2 + 2 + 1 + 5 + 1 + 1 + 1 + 2 + 4) / 12)
    assert found.metrics["reward"] is None
    assert [g.prompt for g in found.groups] == ["p0", "p1", "p2"]
    assert evaluate(Canned(), EXAMPLES[:1], BOTH, ROLLOUT).metrics["error"] is None  # of one prompt


def test_the_training_reward_is_reported_beside() -> None:
    """Weighted, and without the sample that no function scored."""
    alone = evaluate(Canned(), EXAMPLES[1:2], BOTH, ROLLOUT, [right])
    assert alone.metrics["reward"] == pytest.approx((0.5 + 0.5 + 2.0) / 3)
    both = evaluate(Canned(), EXAMPLES[:1], BOTH, ROLLOUT, [right, tidy], [1.0, 10.0])
    assert both.metrics["reward"] == pytest.approx((2 + 2 + 0.5 + 0.5 + 10 + 10 + 0 + 10) / 4)


def half(completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    """Judges the rows of one answer alone, and finds them right."""
    return [1.0 if a == "Ab" else None for a in answer]


def late(completions: Sequence[str]) -> list[float]:
    raise TimeoutError


def test_what_a_judge_leaves_out_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where it fails, or takes too long, and the policy lets the run continue."""
    module = sys.modules["judges"]
    monkeypatch.setattr(module, "half", half, raising=False)
    monkeypatch.setattr(module, "late", late, raising=False)
    config = EvalConfig(samples=4, pass_k=4, accuracy="judges:half", format="judges:late")
    runner = RewardRunner(RewardSafetyConfig(on_error="none"))
    found = evaluate(Canned(), EXAMPLES[1:], config, ROLLOUT, [half], runner=runner)
    assert (found.metrics["accuracy"], found.metrics["reward"], found.metrics["format_accuracy"]) == (1.0, 1.0, None)
    assert pass_at(found) == pass_at(found, "_any") == [1.0] * 4
    counts = {name: found.metrics[name] for name in ("samples", "judged", "reward_judged", "format_judged")}
    assert counts == {"samples": 8, "judged": 4, "reward_judged": 4, "format_judged": 0}
    write_answers(tmp_path, "after", found.groups, found.correct)
    rows = [json.loads(line)["correct"] for line in (tmp_path / "after.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows] == [True] * 4 + [None] * 4
    assert {row["format_accuracy"] for row in rows} == {None}
    assert "accuracy 100.0%  reward 1.000  pass@1" in (line := figures(found.summary()))
    assert line.endswith("(8 samples, 4 judged, 0 format judged, 4 reward judged)")


def test_what_is_not_named_is_not_judged() -> None:
    found = evaluate(Canned(), EXAMPLES, EvalConfig(), ROLLOUT)
    measured = {name for name, value in found.metrics.items() if value is not None}
    assert measured == {"samples", "mean_length", "clipped_ratio"}
    assert found.metrics["samples"] == 3
    only_format = evaluate(Canned(), EXAMPLES, EvalConfig(format="judges:tidy"), ROLLOUT)
    assert (only_format.metrics["accuracy"], only_format.metrics["format_accuracy"]) == (None, pytest.approx(2 / 3))


SUMMARY = {
    "accuracy", "partial_accuracy", "format_accuracy", "reward", "error", "samples", "mean_length", "clipped_ratio",
}  # fmt: skip


def test_the_summary_is_everything_but_the_completions() -> None:
    summary = evaluate(Canned(), EXAMPLES, BOTH, ROLLOUT).summary()
    assert set(summary) == SUMMARY | {"judged"}
    summary = evaluate(Canned(), EXAMPLES[::2], dataclasses.replace(BOTH, pass_k=2), ROLLOUT).summary()
    assert set(summary) == SUMMARY | {"pass@1", "pass@2", "pass@1_any", "pass@2_any"}
    assert all(value is None or type(value) in (int, float) for value in summary.values())


# --- pass@k


def pass_at(found: Evaluation, suffix: str = "") -> list[float | None]:
    """The values of `pass@1`, `pass@2`, ... or, with a suffix, of `pass@1_any`, ..."""
    names = itertools.takewhile(found.metrics.__contains__, (f"pass@{k}{suffix}" for k in itertools.count(1)))
    return [found.metrics[name] for name in names]


def test_pass_at_k_by_hand() -> None:
    """Right are 2 (the first two) of 4, 1 (the last) of 3 and none of 4. k = 2: 5/6, 2/3, 0 of the pairs hold a right
    one. With k = 4 the prompt of which 3 were judged says nothing.
    """
    found = evaluate(Canned(), EXAMPLES, dataclasses.replace(BOTH, pass_k=4), ROLLOUT)
    assert pass_at(found) == pytest.approx([5 / 18, (5 / 6 + 2 / 3) / 3, 2 / 3, 1 / 2])
    assert pass_at(found, "_any") == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1 / 2])
    assert pass_at(found)[0] == pytest.approx(found.metrics["accuracy"])


OUTCOMES = st.lists(st.booleans(), min_size=1, max_size=9)


@given(OUTCOMES, st.data())
def test_the_unbiased_estimate_is_the_mean_over_all_sets_of_k(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    sets = list(itertools.combinations(outcomes, k))
    mean = Fraction(sum(any(chosen) for chosen in sets), len(sets))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(float(mean), abs=1e-12)


@given(st.permutations([True, True, False, False, False]))
def test_the_order_of_the_samples_moves_the_plain_count_alone(outcomes: list[bool]) -> None:
    """Why both are kept: over all orders the plain count has the unbiased one as its mean."""
    examples = [{"prompt": "p", "answer": "Ab", "say": ["Ab" if right else "x" for right in outcomes]}]
    found = evaluate(Canned(), examples, EvalConfig(samples=5, pass_k=5, accuracy="judges:right"), ROLLOUT)
    assert pass_at(found) == pytest.approx([2 / 5, 7 / 10, 9 / 10, 1, 1])
    assert pass_at(found, "_any") == [float(any(outcomes[:k])) for k in range(1, 6)]


# --- presets


def test_the_presets_are_greedy_standard_and_liberal() -> None:
    named = {name: (p.temperature, p.top_k, p.top_p) for name, p in PRESETS.items()}
    assert named == {"greedy": (1e-4, 1, 1.0), "standard": (0.7, 50, 0.95), "liberal": (0.85, 2000, 1.0)}
    for name, preset in PRESETS.items():
        found = evaluation_rollout(EvalConfig(preset=name), ROLLOUT)  # type: ignore[arg-type]
        assert found == dataclasses.replace(ROLLOUT, **vars(preset))
    rollout = dataclasses.replace(ROLLOUT, min_p=0.1)
    assert evaluation_rollout(EvalConfig(preset="greedy"), rollout).min_p == 0.0
    assert evaluation_rollout(EvalConfig(), rollout).min_p == 0.1
    assert evaluation_rollout(EvalConfig(min_p=0.2), rollout).min_p == 0.2


def test_under_all_presets_the_first_leads_and_the_others_stand_beside() -> None:
    model = Canned()
    found = evaluate(model, EXAMPLES, dataclasses.replace(BOTH, preset="all"), ROLLOUT)
    assert [asked["config"].temperature for asked in model.asked] == [1e-4, 0.7, 0.85]
    assert list(found.others) == ["standard", "liberal"]
    summary = found.summary()
    names = SUMMARY | {"judged"}
    assert set(summary) == names | {f"{name}/{what}" for name in ("standard", "liberal") for what in names}
    assert summary["liberal/accuracy"] == summary["accuracy"] == pytest.approx(5 / 18)


def test_on_the_way_fewer_prompts_and_one_preset() -> None:
    full = EvalConfig(prompts=200, during_prompts=16, preset="all", samples=2)
    assert during_training(full) == EvalConfig(prompts=16, during_prompts=16, preset="greedy", samples=2)
    assert during_training(EvalConfig(prompts=7)).prompts == 7
    assert during_training(EvalConfig(prompts=7, during_prompts=0)).prompts == 0


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["evaluation.pass_k=3", "evaluation.samples=2", "evaluation.accuracy=sentence"], "pass_k is 3, and 2"),
        (["evaluation.pass_k=1"], "nothing says what is right"),
        (["evaluation.preset=greedy", "evaluation.temperature=0.5"], "preset greedy sets it too"),
        (["--preset", "gready"], "did you mean 'greedy'"),
    ],
)
def test_contradictions_in_a_recipe_are_told(settings: list[str], part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        recipe.parse("rewards: [sentence]", settings)
    assert recipe.parse("rewards: [sentence]", ["--preset", "liberal"]).evaluation.preset == "liberal"


@pytest.mark.parametrize(("prompts", "asked"), [(2, 2), (3, 3), (100, 3), (0, 3)])
def test_the_sampler_is_asked_for_prompts_settings_and_the_same_noise(prompts: int, asked: int) -> None:
    """Zero prompts are all of them."""
    model, config = Canned(), EvalConfig(prompts=prompts, samples=2, temperature=0.0)
    for _ in range(2):
        evaluate(model, EXAMPLES, config, ROLLOUT)
    first, second = model.asked
    assert first == second
    assert [e["prompt"] for e in first["examples"]] == ["p0", "p1", "p2"][:asked]
    assert (first["config"].temperature, first["samples"], first["step"]) == (0.0, 2, EVALUATION_STEP)
    assert EVALUATION_STEP > 10**9  # no step of a run


def test_settings_of_the_evaluation_replace_those_of_the_rollout() -> None:
    assert evaluation_rollout(EvalConfig(), ROLLOUT) == ROLLOUT
    greedy = evaluation_rollout(EvalConfig(temperature=0.0, top_k=0), ROLLOUT)  # 0 is a setting, not "not set"
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0.0, 0, 0.95)
    assert (greedy.max_new_tokens, greedy.seed) == (7, 3)
    assert evaluation_rollout(EvalConfig(top_p=0.5), ROLLOUT).top_p == 0.5


def test_an_evaluation_in_which_nothing_was_scored_has_a_reward_that_says_so() -> None:
    """Legal, if sad: NaN in the summary, and no warning from inside NumPy."""
    found = evaluate(Canned(), EXAMPLES, EvalConfig(), ROLLOUT, [lambda completions: [None] * len(completions)])
    assert found.metrics["reward"] is None or np.isnan(found.metrics["reward"])


@pytest.mark.parametrize("what", ["accuracy", "partial", "format"])
def test_a_judge_that_is_not_there_is_told_before_the_run(what: str) -> None:
    with pytest.raises(RecipeError, match="did you mean 'sentence'"):
        check_run(recipe.load("quickstart", [f"evaluation.{what}=sentense"]))
