"""Numbers that carry nothing, and prompts that do not fit: whole runs of a tiny model that meet them."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import recipes
from covey.config import recipe
from covey.config.schema import RolloutConfig
from covey.data.loader import fit_prompts, truncate_prompt
from covey.errors import DataError
from covey.models.loading.weights import load
from covey.sampling.scheduler import check_length
from covey.text.tokenizer import Tokenizer
from covey.train.checkpoint import Checkpointer
from tests.one_layer import ONE_LAYER

TINY = ONE_LAYER
SHORT = ("data.task=jsonl", f"data.path={Path(__file__).parents[1] / 'letters.jsonl'}")
LONG = ("rollout.max_prompt_length=400",)
"""Prompts of 330 tokens, behind which no completion of these tests ends by chance."""
SETTINGS = [
    *Path(__file__).with_name("small_run.txt").read_text(encoding="utf-8").split(),
    "rewards=judges:length",
    "training.max_steps=2",
    "training.actor_optimizer.learning_rate=1e-2",
    "training.actor_optimizer.weight_decay=0",
    "evaluation.accuracy=",
    "evaluation.format=",
]
JUDGES = """
from pathlib import Path

def length(completions):
    return [float(i % 2) for i, _ in enumerate(completions)]

def alike(completions):
    return [0.1 + 0.2] * len(completions)

def alike_from_the_second_step(completions):
    trained, step = len(completions) == 8, Path("one step")  # an evaluation has fewer
    different = trained and not step.exists()
    if different:
        step.touch()
    return length(completions) if different else alike(completions)

def long(completion_ids):
    return [float(len(ids) > 2) for ids in completion_ids]

def varied(completion_ids):
    return [float(len(set(ids)) > 10) for ids in completion_ids]
"""

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(out: Path, *more: str, model: Path = TINY, data: tuple[str, ...] = SHORT) -> list[dict[str, Any]]:
    """The metrics of a run; `more` replaces settings."""
    settings = {word.partition("=")[0]: word for word in (f"model.source={model}", *SETTINGS, *data, *more)}
    recipes.train(recipe.load("quickstart", [*settings.values()]), out)
    return rows(out / "metrics.jsonl")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def weights(folder: Path, step: int) -> list[np.ndarray]:
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        return [np.asarray(x) for x in jax.tree.leaves(saves.restore(step)[0]["params"])]


def moments(folder: Path, step: int) -> dict[str, list[np.ndarray]]:
    """Adam's, by name."""
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        leaves = jax.tree_util.tree_leaves_with_path(saves.restore(step)[0]["opt_state"])
    named = [("".join(map(str, path)), np.asarray(x)) for path, x in leaves]
    return {name: [x for path, x in named if f"'{name}'" in path] for name in ("mu", "nu")}


# --- nothing to learn


@slow
def test_groups_of_equal_rewards_have_no_gradient_and_the_run_says_so(place: Path, capsys: Any) -> None:
    """0.1 + 0.2 is no number that a mean of four gives back; its rounding must not become a gradient. From a fresh
    optimizer no weight moves.
    """
    diagnose = pytest.importorskip("covey_report.diagnosis.diagnose")
    steps = diagnose.FIRST_STEPS + diagnose.CERTAIN
    metrics = trained(place / "run", "rewards=judges:alike", f"training.max_steps={steps}")
    assert {row["advantage"] for row in rows(place / "run" / "samples.jsonl")} == {0.0}
    assert all(row["frac_reward_zero_std"] == 1 and row["loss"] == 0 and row["grad_norm"] == 0 for row in metrics)
    for first, last in zip(jax.tree.leaves(nnx.state(load(TINY).model)), weights(place / "run", steps), strict=True):
        np.testing.assert_array_equal(first, last)
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("The reward is the same for every completion") == 2  # when it is certain, and at the end
    assert f"step {steps}: The reward" in told
    assert f"every completion of {steps} steps scored 0.3 ({2 * 4 * steps} completions)" in told
    assert "Change: see in samples.jsonl" in told
    assert "rollout.temperature" not in told
    assert "learning rate" not in told


@slow
def test_one_new_token_is_told_as_that(place: Path, capsys: Any) -> None:
    """Nothing can be right in it, so all is scored 0."""
    pytest.importorskip("covey_report")
    trained(place / "run", "rewards=judges:long", "rollout.max_new_tokens=1", "training.max_steps=5", data=LONG)
    told = " ".join(capsys.readouterr().out.split())
    assert "completions were cut off at 1 token: 100 %" in told
    assert "raise rollout.max_new_tokens" in told
    assert "rollout.temperature" not in told


@slow
def test_a_learning_rate_that_ruins_the_model_is_told_as_that(place: Path, capsys: Any) -> None:
    """It writes varied text until the first updates, and then a few tokens over and over."""
    pytest.importorskip("covey_report")
    optimizer = ("learning_rate=1", "warmup_ratio=0", "schedule=constant")
    wild = [f"training.actor_optimizer.{setting}" for setting in optimizer]
    more = ("rewards=judges:varied", "rollout.max_new_tokens=12", "training.max_steps=10", "seed=3")
    trained(place / "run", *more, *wild, data=LONG)
    told = " ".join(capsys.readouterr().out.split())
    assert "diagnosis: The learning rate is too high. Seen: the mean reward fell" in told
    assert "at a learning rate of 1" in told
    assert not any(
        other in told for other in ("rollout.temperature", "rollout.max_new_tokens", "samples.jsonl whether")
    )


@slow
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_equal_rewards_in_the_middle_of_a_run_have_no_gradient(place: Path, momentum: float) -> None:
    """Adam's moments fade by exactly b1 and b2, so that the gradient added to them was exactly 0. The momentum of the
    step before still moves the weights; without one they stay.
    """
    more = (f"training.actor_optimizer.b1={momentum}", "training.checkpoint_every_n_steps=1")
    first, second = trained(place / "run", "rewards=judges:alike_from_the_second_step", *more)
    assert first["grad_norm"] > 0
    assert (second["frac_reward_zero_std"], second["loss"], second["grad_norm"]) == (1, 0, 0)
    before, after = (moments(place / "run", step) for step in (1, 2))
    assert all(any(x.any() for x in found) for found in (before["nu"], after["nu"]))
    for name, decay in (("mu", momentum), ("nu", 0.99)):
        for x, y in zip(before[name], after[name], strict=True):
            np.testing.assert_array_equal(y, np.float32(decay) * x)
    moved = [np.abs(x - y).max() for x, y in zip(*(weights(place / "run", step) for step in (1, 2)), strict=True)]
    assert (max(moved) > 1e-3) == (max(moved) > 0) == (momentum > 0)


@slow
def test_completions_of_nothing_but_a_stop_token(place: Path) -> None:
    """Every token of the vocabulary ends the answer: each has one token, and that one is learnt."""
    model = place / "model"
    shutil.copytree(TINY, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(300))}))
    metrics = trained(place / "run", model=model)
    assert all(row["completions/max_length"] == 1 and row["completions/clipped_ratio"] == 0 for row in metrics)
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() and row["grad_norm"] > 0 for row in metrics)


@slow
@pytest.mark.parametrize("masked", ["false", "true"])
def test_completions_that_all_ran_out_of_tokens(place: Path, masked: str) -> None:
    """Left out of the loss, all of them leave a loss of exactly 0, and no 0/0."""
    metrics = trained(place / "run", "rollout.max_new_tokens=1", f"grpo.mask_truncated={masked}", data=LONG)
    assert all(row["completions/clipped_ratio"] == 1 for row in metrics)
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in metrics)
    assert all((row["grad_norm"] == 0) == (masked == "true") for row in metrics)


@slow
def test_a_set_smaller_than_a_batch_is_repeated_in_it(place: Path) -> None:
    """Three rows, four a step: epochs end inside of each."""
    (place / "data.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(4)))
    more = ("training.prompts_per_step=4", "training.max_steps=3")
    metrics = trained(place / "run", "data.path=data.jsonl", *more)
    asked = [row["prompt"] for row in rows(place / "run" / "samples.jsonl") if row["sample"] == 0]
    assert len(metrics) == 3
    assert len(asked) == 3 * 4
    assert [len(set(asked[at : at + 3])) for at in (0, 3, 6, 9)] == [3] * 4  # every epoch has each of them once


# --- prompts that are too long


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("system", "user"), contents, strict=True)]


def test_too_long_is_an_error_dropped_or_cut(tokenizer: Tokenizer) -> None:
    data = [{"prompt": "short"}, {"prompt": "far " * 50 + "the end?"}, {"prompt": chat("Be.", "so " * 60 + "why?")}]
    assert fit_prompts(data, tokenizer.encode_prompt, 40, "error") == (data, 0, 0)
    with pytest.raises(DataError, match=r"row 1 has \d+ tokens(.|\n)*--training.too-long drop"):
        check_length(len(tokenizer.encode_prompt(data[1]["prompt"])), RolloutConfig(max_prompt_length=40), "row 1")
    assert fit_prompts(data, tokenizer.encode_prompt, 40, "drop") == (data[:1], 2, 0)
    kept, dropped, truncated = fit_prompts(data, tokenizer.encode_prompt, 60, "truncate")
    assert (kept[0], dropped, truncated) == (data[0], 0, 2)
    assert kept[1]["prompt"].endswith("the end?")
    assert [message["role"] for message in kept[2]["prompt"]] == ["system", "user"]
    assert kept[2]["prompt"][0] == data[2]["prompt"][0]
    assert kept[2]["prompt"][1]["content"].endswith("why?")
    assert all(20 < len(tokenizer.encode_prompt(row["prompt"])) <= 60 for row in kept[1:])


@pytest.mark.parametrize("prompt", ["x" * 50, chat("Be.", "why?")])
def test_a_prompt_of_which_nothing_would_be_left(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(DataError, match="nothing would be left"):
        truncate_prompt(prompt, tokenizer.encode_prompt, 0 if isinstance(prompt, str) else 10)
    with pytest.raises(DataError, match="every prompt has more than"):
        fit_prompts([{"prompt": prompt}], tokenizer.encode_prompt, 0, "drop")


@slow
@pytest.mark.parametrize(("policy", "counts"), [("drop", (2, 0)), ("truncate", (0, 2))])
def test_a_run_counts_what_it_dropped_and_cut(place: Path, policy: str, counts: tuple[int, int], capsys: Any) -> None:
    prompts = [f"Say {n}." for n in range(30)]
    prompts[3] = prompts[29] = "very " * 100 + "last?"  # the second is held out
    (place / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    trained(place / "run", "data.path=data.jsonl", "training.max_steps=1", f"training.too_long={policy}")
    data = json.loads((place / "run" / "summary.json").read_text())["data"]
    assert (data["dropped"], data["truncated"]) == counts
    assert data["prompts"] == 27 - (policy == "drop")
    word = "dropped" if policy == "drop" else "truncated"
    assert f"prompts longer than rollout.max_prompt_length: 2 {word}" in capsys.readouterr().out
