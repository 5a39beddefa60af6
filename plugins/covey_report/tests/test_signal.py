"""The learning signal of scored groups: the figures, the verdict and the setting that is named."""

import numpy as np
import pytest

from covey.rewards.scoring import score
from covey.types import Completion, FinishReason, Group
from covey_report.correlation import centre
from covey_report.signal import TOTAL, choose_extremes, measure_signal

NONE = float("nan")


def group(rewards, texts=None, cut=False):
    none, finish = np.zeros(0), FinishReason.LENGTH if cut else FinishReason.STOP
    texts = texts or [f"text {n}" for n in range(len(rewards))]
    completions = tuple(Completion(none, none, none, finish, text) for text in texts)
    scores = np.array(rewards, float)
    return Group("p", none, completions, rewards=scores, rewards_by_function={"f": scores, "zero": 0 * scores})


def test_figures_are_those_of_the_formulas():
    signal = measure_signal([group([0, 1, 1, NONE]), group([1, 1, 1, 1])], {"f": 1})
    f, zero, total = signal.functions
    assert (f.name, zero.name, total.name) == ("f", "zero", TOTAL)
    assert f.mean == pytest.approx(6 / 7)
    assert f.within_std == pytest.approx(np.std([0, 1, 1], ddof=1) / 2)
    assert (f.informative, f.scored, f.failed) == (0.5, 7, 1)
    assert (zero.informative, total.informative) == (0.0, 0.5)
    assert (signal.verdict, signal.setting, signal.groups, signal.completions) == ("yes", "", 2, 8)


@pytest.mark.parametrize(
    ("groups", "setting"),
    [
        ([group([NONE, NONE])] * 2, "rewards"),
        ([group([0, 0], ["same", "same"])] * 2, "rollout.temperature"),
        ([group([0, 0], cut=True)] * 2, "rollout.max_new_tokens"),
        ([group([0, 0]), group([1, 1])], "grpo.num_generations"),
        ([group([0, 0])] * 2, "rewards"),
        ([group([2, 2])] * 2, "data.path"),
    ],
)
def test_without_a_signal_the_setting_is_named(groups, setting):
    signal = measure_signal(groups)
    assert (signal.verdict, signal.setting) == ("no", setting)
    assert signal.sentence == "No signal: the rewards differ in 0 of 2 groups"
    assert signal.advice


def test_few_informative_groups_are_a_weak_signal():
    signal = measure_signal([group([0, 1]), *[group([0, 0])] * 4])
    assert (signal.verdict, signal.setting) == ("weak", "rewards")
    assert "in 1 of 5 groups" in signal.sentence
    assert measure_signal([group([0, 1]), *[group([0, 0])] * 3]).verdict == "yes"


def test_a_critic_compares_all_completions():
    groups = [group([0]), group([1])]
    assert measure_signal(groups).verdict == "no"
    assert measure_signal(groups, critic=True).verdict == "yes"


def test_extremes_are_of_the_groups_with_the_largest_differences():
    tied, small, large = group([0, 0]), group([0, 1]), group([3, NONE, -2])
    assert choose_extremes([tied, small, large], "f", 2) == [("f", large, 0, 2), ("f", small, 1, 0)]
    assert choose_extremes([tied], TOTAL, 2) == [(TOTAL, tied, 0, 0)]


def test_scores_are_counted_by_value_or_by_range():
    few, many = (measure_signal([group(scores)]).functions[0].histogram for scores in ([0, 1, 1, NONE], range(80)))
    assert few == {0: 1, 1: 2}
    assert [*many.values()] == [10] * 8


def test_a_reward_for_empty_answers_or_for_length_is_named():
    """Two broken rewards that a run maximises: neither the mean nor the spread tells."""
    empty = measure_signal([group([1, 0, 0, 0.5], ["", "a", "bb", "c"])] * 4)
    assert empty.warnings == ["empty completions get the best reward, 1: 4 of 16 are empty"]
    assert (empty.verdict, empty.setting, empty.empty) == ("yes", "rewards", 0.25)
    long = measure_signal([group([1, 2, 3, 4], ["x", "xx", "xxx", "xxxx"])] * 4)
    assert long.warnings == ["the reward follows the length of a completion (correlation 1.00)"]
    assert long.functions[0].correlations == {TOTAL: 1.0, "text length": 1.0}
    sound = measure_signal([group([1, 0, 1, 0], ["four", "five", "no", ""])] * 4)
    assert (sound.warnings, sound.setting) == ([], "")
    assert measure_signal([group([0, 0], ["", " "])]).warnings == ["every completion is empty"]


def named(name, values):
    def function(completions):
        return values

    function.__name__ = name
    return function


@pytest.mark.parametrize("name", ["reward", "length", "empty", "overlong", "total reward", "text length", "<lambda>"])
def test_a_function_of_any_name_keeps_its_numbers(name):
    """Names of Covey's own columns are no name of a function."""
    groups = [group([0, 0, 0, 0], ["x", "xx", "xxx", ""])] * 4
    scored = score(groups, [named(name, [1, 0, 0, 1] * 4), named("other", [0, 1, 0, 1] * 4)])
    signal = measure_signal(scored)
    function, other, total = signal.functions
    assert (function.mean, other.mean, total.mean) == (0.5, 0.5, 1.0)
    assert len({function.name, other.name, total.name, *function.correlations, *total.correlations}) == 5
    assert function.correlations["text length"] == pytest.approx(-2 / np.sqrt(5), abs=1e-4)
    assert (function.correlations["other"], other.correlations[function.name]) == (0, 0)
    assert choose_extremes(scored, function.name)[0].best == 0


def test_scores_that_differ_by_rounding_alone_are_no_signal():
    """0.1 + 0.2 is 0.3, also where a function adds; and the tolerance is that of a group, not of the largest one."""
    signal = measure_signal(score([group([0, 0])] * 2, [named("f", [0.1 + 0.2, 0.3] * 2)]))
    assert [function.informative for function in signal.functions] == [0, 0]
    values, labels = np.array([1e12, 2e12, 0.25, 0.75]), np.array([0, 0, 1, 1])
    assert centre(values, labels).tolist() == [-5e11, 5e11, -0.25, 0.25]
    assert not centre(np.full(100_000, 0.1), np.zeros(100_000, int)).any()


def test_a_function_without_a_score_has_no_share_of_groups():
    signal = measure_signal(score([group([0, 0])] * 2, [named("f", [None] * 4), named("g", [0, 1, 1, 1])]))
    f, g, total = signal.functions
    assert (f.mean, f.within_std, f.informative) == (None, None, None)
    assert (g.informative, total.informative) == (0.5, 0.5)
    assert measure_signal([]).verdict == "no"


@pytest.mark.parametrize("reason", FinishReason)
def test_the_signal_reads_whether_a_completion_was_cut_as_mask_and_metric_do(reason):
    none = np.zeros(2, np.float32)
    completions = tuple(Completion(np.zeros(2, np.int32), none, none, reason, text) for text in "ab")
    signal = measure_signal([Group("p", np.zeros(1, np.int32), completions, rewards=np.zeros(2))])
    assert signal.truncated == reason.was_cut
    limits = {FinishReason.LENGTH: "rollout.max_new_tokens", FinishReason.TIME: "envs.timeout"}
    assert (signal.setting in limits.values()) == reason.was_cut
