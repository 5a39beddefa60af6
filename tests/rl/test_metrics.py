"""A step's numbers under the names people look for, worked by hand."""

from itertools import zip_longest

import jax
import numpy as np
import pytest
from scipy.special import softmax  # comes with jax

from covey.rl.metrics import combine_updates, group_metrics, work_metrics
from covey.rl.step_data import table_of, tokens_in_loss
from covey.sampling.logits import SamplingParams, draw
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, FinishReason, Group

NAN = float("nan")


def group(
    rewards: list[float],
    lengths: list[int],
    cut: tuple[int, ...] = (),
    texts: str = "",
    **by_function: list[float],
) -> Group:
    none = np.zeros(0, np.float32)
    completions = tuple(
        Completion(np.zeros(n, np.int32), none, none, FinishReason.LENGTH if i in cut else FinishReason.STOP, text)
        for i, (n, text) in enumerate(zip_longest(lengths, texts.split("|"), fillvalue=""))
    )
    table = {name: np.array(values) for name, values in by_function.items()}
    return Group("p", none, completions, rewards=np.array(rewards), rewards_by_function=table)


@pytest.mark.parametrize("reason", FinishReason)
def test_mask_and_metric_read_whether_a_completion_was_cut_from_one_property(reason: FinishReason) -> None:
    none = np.zeros(2, np.float32)
    completion, other = (Completion(np.zeros(2, np.int32), none, none, reason, text) for text in "ab")
    group = Group("p", np.zeros(1, np.int32), (completion, other), rewards=np.zeros(2))
    assert group_metrics(table_of([group]))["completions/clipped_ratio"] == reason.was_cut
    assert tokens_in_loss(completion, mask_truncated=True).any() != reason.was_cut
    assert tokens_in_loss(completion, mask_truncated=False).all()


def test_every_name_and_value_by_hand() -> None:
    groups = [
        group([1.0, 0.0], [4, 8], cut=(1,), right=[1.0, 0.0], tidy=[0.0, NAN]),
        group([3.0, 3.0], [2, 6], right=[1.0, 1.0], tidy=[2.0, 2.0]),
    ]
    got = group_metrics(table_of(groups))
    want = {
        "reward": 7 / 4,
        "reward_std": (np.sqrt(0.5) + 0.0) / 2,
        "reward_error": np.std([0.5, 3.0], ddof=1) / np.sqrt(2),
        "frac_reward_zero_std": 0.5,
        "frac_reward_all_best": 0.5,
        "frac_reward_all_worst": 0.0,
        "completions/mean_length": 5.0,
        "completions/min_length": 2.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.25,
        "completions/distinct_ratio": 1.0,
        "completions/empty_ratio": 1.0,
        "completions/repetition": (4 / 5 + 2 / 3) / 4,
        "completions/scored_ratio": 1.0,
        "rewards/right/mean": 0.75,
        "rewards/right/std": 0.5,
        "rewards/tidy/mean": 4 / 3,
        "rewards/tidy/std": np.std([0, 2, 2], ddof=1),
    }
    assert got.keys() == want.keys()
    assert got == pytest.approx(want)
    assert all(type(value) is float for value in got.values())


@pytest.mark.slow
def test_the_mass_that_was_kept_is_that_of_the_tokens_left_to_draw_from() -> None:
    """By the sampler's own draws, from 3 of 20 tokens; what a tool put there was not drawn and does not count."""
    logits = np.random.RandomState(0).normal(size=(6, 20)).astype(np.float32)
    keys = np.arange(12, dtype=np.uint32).reshape(6, 2)
    compiled = jax.jit(draw, static_argnums=2)
    tokens, logps, sampler_logps = map(np.asarray, compiled(logits, keys, SamplingParams(0.7, top_k=3)))
    chances = np.sort(softmax(logits / 0.7, axis=-1), axis=-1)[:, -3:].sum(-1)
    drawn = np.array([True, True, False, True, True, True])
    all_drawn, by_tool = (Completion(tokens, logps, sampler_logps, FinishReason.STOP, mask=m) for m in (None, drawn))
    scored = {"rewards": np.zeros(2), "prompt": "p", "prompt_tokens": tokens[:0]}
    got = group_metrics(table_of([Group(completions=(all_drawn, by_tool), **scored)]))
    assert got["sampling/mass_kept"] == pytest.approx(np.concatenate([chances, chances[drawn]]).mean(), rel=1e-5)


TIES = [f"frac_reward_{name}" for name in ("zero_std", "all_best", "all_worst")]
ERROR = np.std([0.5, 2.0], ddof=1) / np.sqrt(2)
CASES = {
    "a completion that is not scored": (
        [group([NAN, 1.0, 0.0], [1, 1, 1]), group([2.0, 2.0, NAN], [1, 1, 1])],
        {"reward": 5 / 4, "frac_reward_zero_std": 0.5, "reward_std": np.sqrt(0.5) / 2, "reward_error": ERROR},
    ),
    "a group that is not scored, whose advantages are 0": (
        [group([NAN, NAN], [1, 1]), group([1.0, 0.0], [1, 1]), group([1.0, 1.0], [1, 1])],
        {"reward": 3 / 4, "frac_reward_zero_std": 1 / 2, "reward_error": np.std([0.5, 1.0], ddof=1) / np.sqrt(2)},
    ),
    "one group": ([group([1.0, 0.0], [3, 3])], {"reward_std": np.sqrt(0.5), "reward_error": NAN}),
    "groups of one score, which has no deviation": (
        [group([1.0, NAN], [3, 3]), group([0.0], [3]), group([1.0, 0.0], [3, 3])],
        {"reward_std": np.sqrt(0.5), "reward_error": np.std([1.0, 0.0, 0.5], ddof=1) / np.sqrt(3)},
    ),
    "no score": ([group([NAN, NAN], [1, 1])] * 2, dict.fromkeys(TIES, NAN) | {"reward_std": NAN, "reward_error": NAN}),
    "no completion": ([], dict.fromkeys(["reward", "completions/min_length", "completions/clipped_ratio", *TIES], NAN)),
    "a function that scored nothing": (
        [group([1.0, 0.0], [3, 3], never=[NAN, NAN])],
        {"rewards/never/mean": NAN, "rewards/never/std": NAN},
    ),
    "completions of equal tokens, which are one": (
        [group([1.0] * 4, [3, 3, 5, 3]), group([1.0] * 4, [1, 1, 1, 1])],
        {"completions/distinct_ratio": (2 / 4 + 1 / 4) / 2},
    ),
    "groups of one, whose best and worst have a reward of their own": (
        [group([float(n)], [1]) for n in range(4)],
        {"frac_reward_all_best": 0.25, "frac_reward_all_worst": 0.25},
    ),
    "texts of white space, which are empty": (
        [group([1.0, 0.0, 0.0], [1] * 3, texts=" |ab|\n")],
        {"completions/empty_ratio": 2 / 3},
    ),
    "ties, whatever rounding does to their mean": (
        [group([0.1] * 3, [1] * 3), group([0.7] * 3, [1] * 3)],
        {"frac_reward_zero_std": 1.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_with_little_to_measure(case: str) -> None:
    groups, want = CASES[case]
    got = group_metrics(table_of(groups))
    assert {name: got[name] for name in want} == pytest.approx(want, nan_ok=True)


def test_work_by_hand() -> None:
    """A step is as long as the clock says: phases of two threads overlap."""
    counts = {"tokens": 30, "slot_steps": 40, "chunks": 3, "prompt_tokens": 10}
    stats = SamplerStats(**counts, seconds=8.0, decode_seconds=6.0)
    got = work_metrics(stats, {"rollout": 2.0, "update": 4.0}, 5.0, 0.125)
    assert got == {
        "num_tokens": 40,
        "waste/rollout": 0.25,
        "waste/slots": 0.4375,
        "waste/rows": 0.125,
        "tokens_per_second": 6.0,
        "step_time": 5.0,
        "time/rollout": 2.0,
        "time/update": 4.0,
    }


def test_updates_without_tokens_are_left_out_of_the_mean_of_a_step() -> None:
    """An update without tokens, and a skipped one, say nothing; where none has any, the step has none."""
    some = {"entropy": 1.5, "importance_ratio/min": 0.5, "kl": NAN}
    none = {"entropy": NAN, "importance_ratio/min": NAN, "kl": NAN}
    want = {"entropy": 1.5, "importance_ratio/min": 0.5, "kl": NAN}
    for updates in ([some, none], [none, some], [none, {}, some]):
        assert combine_updates(updates) == pytest.approx(want, nan_ok=True)
    assert combine_updates([{"entropy": 1.0}, {"entropy": 2.0}])["entropy"] == 1.5
