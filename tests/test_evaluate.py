"""Evaluation: shares, their error, the settings it overrides, and the noise it repeats."""

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.configs import EvalConfig, RolloutConfig
from covey.errors import RecipeError
from covey.evaluate import NOISE, evaluate, sampling
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


@pytest.fixture(autouse=True)
def judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions where a recipe's `module:function` finds them."""
    module = types.ModuleType("judges")
    module.right, module.tidy = right, tidy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "judges", module)


EXAMPLES = [
    {"prompt": "p0", "answer": "Ab", "say": ["Ab", "Ab", "x", "Cd..."]},
    {"prompt": "p1", "answer": "Ab", "say": ["x", "y", "?", "Ab"]},
    {"prompt": "p2", "answer": "zz", "say": ["Q", "Q", "Q", "Q"]},
]
BOTH = EvalConfig(prompts=3, samples=4, accuracy="judges:right", format="judges:tidy")


def test_shares_and_error_by_hand() -> None:
    """Shares by prompt 2/4, 1/4, 0: unscored is not right, 0.5 is not enough. The error is over prompts."""
    found = evaluate(Canned(), EXAMPLES, BOTH, ROLLOUT)
    assert found.accuracy == pytest.approx(1 / 4)
    assert found.error == pytest.approx(np.std([0.5, 0.25, 0], ddof=1) / np.sqrt(3))
    assert found.format == pytest.approx((3 + 1 + 4) / 12)
    assert found.samples == 12
    assert found.clipped_ratio == pytest.approx(1 / 12)
    assert found.mean_length == pytest.approx((2 + 2 + 1 + 5 + 1 + 1 + 1 + 2 + 4) / 12)
    assert found.reward is None
    assert [g.prompt for g in found.groups] == ["p0", "p1", "p2"]


def test_the_training_reward_is_reported_beside() -> None:
    """Weighted, and without the sample that no function scored."""
    alone = evaluate(Canned(), EXAMPLES[1:2], BOTH, ROLLOUT, [right])
    assert alone.reward == pytest.approx((0.5 + 0.5 + 2.0) / 3)
    both = evaluate(Canned(), EXAMPLES[:1], BOTH, ROLLOUT, [right, tidy], [1.0, 10.0])
    assert both.reward == pytest.approx((2 + 2 + 0.5 + 0.5 + 10 + 10 + 0 + 10) / 4)


def test_what_is_not_named_is_not_judged() -> None:
    found = evaluate(Canned(), EXAMPLES, EvalConfig(), ROLLOUT)
    assert (found.accuracy, found.format, found.reward, found.error) == (None, None, None, None)
    assert found.samples == 3
    only_format = evaluate(Canned(), EXAMPLES, EvalConfig(format="judges:tidy"), ROLLOUT)
    assert (only_format.accuracy, only_format.format) == (None, pytest.approx(2 / 3))


def test_one_prompt_has_no_error() -> None:
    assert evaluate(Canned(), EXAMPLES[:1], BOTH, ROLLOUT).error is None


def test_the_summary_is_everything_but_the_completions() -> None:
    summary = evaluate(Canned(), EXAMPLES, BOTH, ROLLOUT).summary()
    assert set(summary) == {"accuracy", "format", "reward", "error", "samples", "mean_length", "clipped_ratio"}
    assert all(value is None or type(value) in (int, float) for value in summary.values())


@pytest.mark.parametrize(("prompts", "asked"), [(2, 2), (3, 3), (100, 3), (0, 3)])
def test_zero_prompts_means_all_of_them(prompts: int, asked: int) -> None:
    model = Canned()
    evaluate(model, EXAMPLES, EvalConfig(prompts=prompts), ROLLOUT)
    assert [e["prompt"] for e in model.asked[0]["examples"]] == ["p0", "p1", "p2"][:asked]


def test_settings_of_the_evaluation_replace_those_of_the_rollout() -> None:
    assert sampling(EvalConfig(), ROLLOUT) == ROLLOUT
    greedy = sampling(EvalConfig(temperature=0.0, top_k=0), ROLLOUT)  # 0 is a setting, not "not set"
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0.0, 0, 0.95)
    assert (greedy.max_new_tokens, greedy.seed) == (7, 3)
    assert sampling(EvalConfig(top_p=0.5), ROLLOUT).top_p == 0.5
    model = Canned()
    evaluate(model, EXAMPLES, EvalConfig(samples=2, temperature=0.0), ROLLOUT)
    assert model.asked[0]["config"].temperature == 0.0
    assert model.asked[0]["samples"] == 2


def test_every_evaluation_asks_for_the_same_noise() -> None:
    model = Canned()
    for _ in range(2):
        evaluate(model, EXAMPLES, BOTH, ROLLOUT)
    assert [asked["step"] for asked in model.asked] == [NOISE, NOISE]
    assert model.asked[0]["config"] == model.asked[1]["config"]
    assert NOISE > 10**9  # no step of a run


def test_an_unknown_judge_is_answered() -> None:
    with pytest.raises(RecipeError, match="starts_with_letter"):
        evaluate(Canned(), EXAMPLES, EvalConfig(accuracy="starts_with_leter"), ROLLOUT)


def test_an_evaluation_in_which_nothing_was_scored_has_a_reward_that_says_so() -> None:
    """Legal, if sad: NaN in the summary, and no warning from inside NumPy."""
    found = evaluate(Canned(), EXAMPLES, EvalConfig(), ROLLOUT, [lambda completions: [None] * len(completions)])
    assert found.reward is None or np.isnan(found.reward)


@pytest.mark.slow
def test_before_and_after_differ_by_the_weights_alone() -> None:
    """Through a real sampler: twice the same completions, and not those of a training step."""
    from flax import nnx

    from covey.models.config import ModelConfig
    from covey.models.decoder import Decoder
    from covey.rl.rollout import RolloutWorker
    from covey.tokenizer import Tokenizer

    config = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    tokenizer = Tokenizer.from_folder(Path(__file__).parent / "parity" / "golden" / "tiny-llama")
    rollout = RolloutConfig(max_new_tokens=7)
    worker = RolloutWorker(Decoder(config, rngs=nnx.Rngs(0)), tokenizer, rollout)
    examples = [{"prompt": "hello"}, {"prompt": "you"}]
    texts = lambda groups: [c.tokens.tolist() for g in groups for c in g.completions]  # noqa: E731
    runs = [texts(evaluate(worker, examples, EvalConfig(samples=3), rollout).groups)]
    training = texts(worker.generate(examples, 3, step=1))
    runs.append(texts(evaluate(worker, examples, EvalConfig(samples=3), rollout).groups))
    assert runs[0] == runs[1]
    assert runs[0] != training
