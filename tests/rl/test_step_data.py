"""From prompts to micro-batches, without a model: what is in the loss, and which groups are replaced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.config.metrics import OVERLONG
from covey.config.schema import GRPOConfig, RewardSafetyConfig, RLTrainingConfig, RolloutConfig
from covey.errors import RecipeError
from covey.packing.rows import Rows, unpack
from covey.parallel import processes
from covey.rewards.scoring import RewardRunner
from covey.rl.batches import RowSizes, TrainBatch
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.metrics import Clock, gather_step_stats
from covey.rl.roles import ClusterConfig
from covey.rl.rollouts import SampledStep, local_step
from covey.rl.step_data import PromptBatch, RolloutBatch, table_of, tokens_in_loss
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, FinishReason, Group

G = 2


def completion(n: int, mask: Sequence[bool] | None = None, cut_off: bool = False) -> Completion:
    finish = FinishReason.LENGTH if cut_off else FinishReason.STOP
    ids, none = np.arange(1, n + 1, dtype=np.int32), np.zeros(n, np.float32)
    return Completion(ids, none, none, finish, mask=None if mask is None else np.array(mask))


class Fake:
    """A cluster whose completions are given with the prompt: `{"prompt": ..., "completions": (...)}`."""

    def __init__(self, prompts_per_step: int) -> None:
        training = RLTrainingConfig(prompts_per_step=prompts_per_step)
        self.config = ClusterConfig({}, training, RolloutConfig(max_new_tokens=10))
        self.rollout = SimpleNamespace(stats=SamplerStats(tokens=1), environments=None)
        self.inference = SimpleNamespace(has=lambda role: False)
        self.row_sizes = RowSizes(self.config)
        self.measures_agreement = False
        self.asked: list[tuple[int, list[str]]] = []

    def generate(self, examples: Sequence[Mapping[str, Any]], samples: int, *, step: int, first: int) -> list[Group]:
        self.asked.append((first, [e["prompt"] for e in examples]))
        return [Group(e["prompt"], np.ones(2, np.int32), e["completions"], {"points": e["points"]}) for e in examples]

    def get_values(self, rows: Rows, lengths: Sequence[int]) -> list[np.ndarray]:
        return unpack(rows, np.sin(rows.target), lengths)


def in_order(completions: Sequence[str], points: Sequence[tuple[float, float]]) -> list[float]:
    """The two completions of a prompt get its two points."""
    return [pair[i % G] for i, pair in enumerate(points)]


def row(prompt: str, points: tuple[float, float], completions: tuple[Completion, ...] | None = None) -> dict[str, Any]:
    return {"prompt": prompt, "points": points, "completions": completions or (completion(3), completion(4))}


@pytest.fixture
def fed(made_by: Callable) -> Callable[..., tuple[list[TrainBatch], Learner]]:
    """`fed(rows, spare=[], **grpo settings)`: the micro-batches of one step, and the learner that made them."""

    def make(rows: list[Any], spare: Sequence[Any] = (), **settings: Any) -> tuple[list[TrainBatch], Learner]:
        others: Any = {"rl_cluster": Fake(len(rows)), "reward_fns": settings.pop("reward_fns", in_order)}
        others["reward_runner"] = settings.pop("runner", None)
        config = GRPOConfig(num_generations=G, **{"beta": 0.0, **settings})
        critic = config.algorithm == "ppo"
        learner = (
            pytest.importorskip("covey_ppo.learner").PPOLearner(ppo_config=config, **others)
            if critic
            else GRPOLearner(grpo_config=config, **others)
        )
        stock = list(spare)

        def take(count: int) -> list[Any]:
            taken, stock[:] = stock[:count], stock[count:]
            return taken

        return made_by(learner, rows, take), learner

    return make


def prompts(batches: Sequence[TrainBatch]) -> list[Any]:
    return [g.prompt for batch in batches for g in batch.groups]


# --- what is in the loss


def test_a_tools_tokens_are_not_in_the_loss_nor_a_truncated_completion_that_is_masked() -> None:
    assert tokens_in_loss(completion(3, [True, False, True]), False).tolist() == [True, False, True]
    assert tokens_in_loss(completion(2, cut_off=True), False).all()
    assert not tokens_in_loss(completion(2, cut_off=True), True).any()
    assert tokens_in_loss(completion(2), True).all()


def test_a_tools_tokens_weigh_nothing_and_are_not_counted(fed: Callable) -> None:
    """Of 4 + 2 tokens 3 were drawn: token_mean divides by 3, sequence_mean weighs each drawn token of 2 by a half."""
    answers = completion(4, [True, False, False, True]), completion(2, [True, False])
    (batch,), _ = fed([row("a", (0.0, 1.0), answers)], aggregate="token_mean")
    assert batch.denominator == 3
    assert batch.inputs.weight.sum() == 3
    (batch,), _ = fed([row("a", (0.0, 1.0), answers)])
    weights = batch.inputs.weight[batch.rows.scatter_index[..., 0] == 0]
    assert weights.tolist() == [0.5, 0, 0, 0.5]
    assert batch.denominator == 2


def test_the_critic_learns_from_sampled_tokens_of_scored_answers(fed: Callable) -> None:
    """A tool's tokens, an answer that nothing scored and one that is masked have no weight, and so no part in the
    critic's loss, its metrics and the variance it explains.
    """
    answers = completion(4, [True, False, False, True]), completion(2)
    cut_off = completion(3, cut_off=True), completion(1)
    runner = RewardRunner(RewardSafetyConfig(on_error="none"))
    rows = [row("a", (1.0, float("nan")), answers), row("b", (0.0, 1.0), cut_off)]
    (batch,), _ = fed(rows, runner=runner, algorithm="ppo", mask_truncated=True)
    weights = unpack(batch.rows, batch.value_inputs.weight, [4, 2, 3, 1])
    assert [w.tolist() for w in weights] == [[1, 0, 0, 1], [0, 0], [0, 0, 0], [1]]
    returns = unpack(batch.rows, batch.value_inputs.returns, [4, 2, 3, 1])
    np.testing.assert_allclose(returns[0][3], 1.0, rtol=1e-6)  # the reward, at the last token


def test_a_step_whose_completions_are_all_masked_weighs_nothing(fed: Callable) -> None:
    cut_off = completion(10, cut_off=True), completion(10, cut_off=True)
    (batch,), _ = fed([row("a", (0.0, 1.0), cut_off)], mask_truncated=True)
    assert not batch.inputs.weight.any()


# --- what fails


def test_what_a_reward_function_fails_for_is_counted_and_left_out(
    fed: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of a step, not of the run; those of several processes are added."""
    runner = RewardRunner(RewardSafetyConfig(on_error="none"))
    for _ in range(2):
        (batch,), learner = fed([row("a", (0.0, float("nan"))), row("b", (0.0, 1.0))], runner=runner)
        assert learner.stats.rollout.failed == {"in_order": 1}
        assert np.isnan(batch.groups[0].rewards[1])
        assert batch.groups[0].advantages[1] == 0
    assert runner.failed == {"in_order": 2}
    other = SamplerStats(tokens=5), {"in_order": 3, "another": 0}, 2, {"reward": 9.0}
    monkeypatch.setattr(processes.ALONE, "all_gather", lambda mine, about: [mine, other])
    stats = gather_step_stats(replace(learner.stats, clock=Clock({"reward": 1.0, "update": 2.0})))
    assert stats.rollout.failed == {"in_order": 4, "another": 0}
    assert stats.rollout.dropped == 2
    assert stats.rollout.stats.tokens == learner.stats.rollout.stats.tokens + 5
    assert stats.clock.seconds == {"reward": 9.0, "update": 2.0}


# --- dynamic sampling


def counted(learner: Learner) -> tuple[int, int, int]:
    """Rounds that replaced prompts, prompts that were replaced, and tied groups that were kept."""
    rollout = learner.stats.rollout
    return rollout.rounds, rollout.replaced, rollout.tied


def test_groups_of_equal_rewards_are_replaced_until_the_batch_is_full(fed: Callable) -> None:
    rows = [row("tied", (1.0, 1.0)), row("good", (0.0, 1.0)), row("tied too", (0.0, 0.0))]
    spare = [row("new", (0.0, 1.0)), row("tied again", (1.0, 1.0)), row("newer", (1.0, 0.0)), row("unused", (1.0, 0.0))]
    batches, learner = fed(rows, spare, max_sampling_rounds=4)
    assert prompts(batches) == ["good", "new", "newer"]
    assert counted(learner) == (2, 3, 0)
    assert [g.prompt for g in learner.stats.rollout.groups] == [
        "tied",
        "good",
        "tied too",
        "new",
        "tied again",
        "newer",
    ]
    assert learner.cluster.asked == [  # type: ignore[attr-defined]
        (0, ["tied", "good", "tied too"]), (3, ["new", "tied again"]), (5, ["newer"])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spare", "rounds", "counts"),
    [(9, 3, (2, 2, 1)), (0, 9, (0, 0, 1)), (9, 1, (0, 0, 0))],
    ids=["the budget is spent", "the data end", "one round"],
)
def test_tied_groups_that_nothing_replaces_fill_the_batch_and_are_counted(
    fed: Callable, spare: int, rounds: int, counts: tuple[int, int, int]
) -> None:
    rows = [row("tied", (1.0, 1.0)), row("good", (0.0, 1.0))]
    (batch,), learner = fed(rows, [row("tied too", (0.5, 0.5))] * spare, max_sampling_rounds=rounds)
    assert prompts([batch]) == (["tied", "good"] if rounds == 1 else ["good", "tied"])
    assert counted(learner) == counts
    (tied,) = [g for g in batch.groups if g.prompt == "tied"]
    assert tied.advantages.tolist() == [0.0, 0.0]


def test_the_experience_of_some_prompts_is_collected_at_once(fed: Callable) -> None:
    """For a debugger or a script: what the micro-batches of the step are made of."""
    rows = [row("tied", (1.0, 1.0)), row("good", (0.0, 1.0))]
    ((batch,), learner) = fed(rows, [row("new", (3.0, 1.0))], max_sampling_rounds=2)
    x = learner.collect(PromptBatch(0, 0, rows, lambda count: [row("new", (3.0, 1.0))]))
    assert [g.prompt for g in x.groups] == prompts([batch]) == ["good", "new"]
    np.testing.assert_array_equal([a[0] for a in x.advantages], np.concatenate([g.advantages for g in batch.groups]))


# --- overlong shaping


def test_the_overlong_penalty_counts_tokens_and_is_listed_beside_the_rewards(fed: Callable) -> None:
    """Limit 10, buffer 4: 3 tokens cost nothing, 8 half, 10 all; characters do not count."""
    answers = completion(8), completion(10)
    (batch,), _ = fed([row("a", (1.0, 1.0), answers)], overlong_buffer=4, overlong_penalty=2.0)
    (group,) = batch.groups
    assert group.rewards.tolist() == [0.0, -1.0]
    assert group.rewards_by_function[OVERLONG].tolist() == [-1.0, -2.0]
    assert group.rewards_by_function["in_order"].tolist() == [1.0, 1.0]


def test_answers_that_differ_in_length_alone_are_replaced(fed: Callable) -> None:
    """The penalty would else pass for a difference in reward, and the group would never be sampled anew."""
    rows = [row("tied", (1.0, 1.0), (completion(3), completion(10)))]
    batches, _ = fed(rows, [row("new", (0.0, 1.0))], max_sampling_rounds=2, overlong_buffer=4)
    assert prompts(batches) == ["new"]


def test_a_function_of_the_name_of_the_penalty_is_a_reward(fed: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length penalty of the user's own, beside Covey's: its differences count, and its values stay."""
    monkeypatch.setattr(in_order, "__name__", "overlong")
    rows = [row("good", (0.0, -1.0), (completion(8), completion(8)))]
    (batch,), learner = fed(rows, [row("new", (0.0, 1.0))], max_sampling_rounds=2, overlong_buffer=4)
    (group,) = batch.groups
    assert (group.prompt, learner.stats.rollout.replaced) == ("good", 0)
    assert group.rewards_by_function["overlong"].tolist() == [0.0, -1.0]
    assert group.rewards_by_function[OVERLONG].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(("points", "penalty"), [(0.0, 0.0), (0.7, 1e6)])
def test_rewards_that_differ_by_rounding_alone_are_replaced(fed: Callable, points: float, penalty: float) -> None:
    """0.1 + 0.2 − 0.3 is 5.6e-17. A reward less a large penalty, and with it again, has lost digits."""
    functions = [lambda completions, x=x: [x, 0.0] * (len(completions) // G) for x in (0.1, 0.2, -0.3)]
    rows = [row("tied", (points, points), (completion(10), completion(7)))]
    spare = [row("new", (0.0, 1.0))]
    penalties: Any = {"overlong_buffer": 4, "overlong_penalty": penalty} if penalty else {}
    batches, _ = fed(rows, spare, reward_fns=[in_order, *functions], max_sampling_rounds=2, **penalties)
    assert prompts(batches) == ["new"]


def test_a_share_of_a_drawn_step_follows_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes drew five groups, the last of them in a second round; of three each has those that it owns."""
    groups = [Group(str(n), np.full(1 + n, n, np.int32), ()) for n in range(5)]
    owner = np.array([0, 0, 1, 1, 0])
    table = replace(table_of(groups), owner=owner)
    parts = [
        SampledStep(7, RolloutBatch([groups[n] for n in np.flatnonzero(owner == mine)], table, dropped=1 + mine))
        for mine in range(2)
    ]
    monkeypatch.setattr(processes.ALONE, "count", 3)
    seen, dropped = list[str](), 0
    for index in range(3):
        monkeypatch.setattr(processes.ALONE, "index", index)
        share = local_step(parts)
        own = [groups[n] for n in share.rollout.table.local_groups]
        assert share.version == 7
        assert [g.prompt for g in share.rollout.groups] == [g.prompt for g in own]
        seen += [g.prompt for g in own]
        dropped += share.rollout.dropped
    assert (seen, dropped) == (list("01234"), 3)


def test_an_advantage_that_reads_groups_cannot_credit_turns() -> None:
    others: Any = {"rl_cluster": Fake(1), "reward_fns": in_order, "advantage_fn": lambda rewards, groups: rewards}
    others["rl_cluster"].rollout.environments = SimpleNamespace(name="guess", scores=False, failed=0)
    with pytest.raises(RecipeError, match="reads whole groups"):
        GRPOLearner(grpo_config=GRPOConfig(num_generations=G, credit="turn"), **others)
