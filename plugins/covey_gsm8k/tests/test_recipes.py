"""The two GSM8K recipes: each number is that of its source (Google's notebook for Tunix, and nanochat), and both run,
made small, on tiny random models of their families. So does the example that shows every step of the first.
"""

import json
import logging
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from covey import recipes
from covey.config import recipe
from covey.config.algorithms import algorithm_of
from covey.models.loading import weights
from covey.parallel import flatten
from covey.rl.evaluate import PRESETS, evaluation_rollout
from covey.rl.roles import Role
from covey.train.checkpoint import Checkpointer
from covey.train.optimizers import learning_rate

pytestmark = pytest.mark.usefixtures("shared_programs")

# --- the numbers


def test_gsm8k_gemma2_has_the_numbers_of_googles_notebook() -> None:
    r = recipe.load("gsm8k-gemma2", ["data.path=hf:openai/gsm8k"])
    assert (r.data.task, r.data.train_fraction, r.data.seed) == ("gsm8k", 1.0, 42)
    lora = r.model.lora
    assert (lora.rank, lora.alpha, len(lora.targets)) == (64, 64.0, 7)
    assert set(lora.targets) == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert (r.model.mesh.data, r.model.mesh.fsdp, r.model.mesh.tp) == (1, 1, 4)
    assert (r.model.dtype, r.model.compute_dtype) == ("bfloat16", "bfloat16")
    o = r.rollout
    assert (o.max_prompt_length, o.max_new_tokens, o.temperature, o.top_p, o.top_k) == (256, 512, 0.9, 1.0, 50)
    a = algorithm_of(r.grpo)
    assert (r.grpo.num_generations, r.grpo.num_iterations, a.beta, a.epsilon, a.high) == (4, 1, 0.08, 0.2, 0.2)
    assert (a.advantage, a.surrogate, a.aggregate, a.kl) == ("group_zscore", "clip", "sequence_mean", "k3")
    t, epochs = r.training, 1
    batches = 3738
    assert t.max_steps == int(batches * r.grpo.num_iterations * r.data.train_fraction * epochs)
    assert (t.prompts_per_step, t.eval_every_n_steps) == (2, 10)
    assert (t.checkpoint_every_n_steps, t.max_to_keep) == (500, 4)
    p = t.actor_optimizer
    assert (p.kind, p.learning_rate, p.b1, p.b2, p.weight_decay) == ("adamw", 3e-6, 0.9, 0.99, 0.1)
    assert (p.warmup_ratio, p.schedule, p.max_grad_norm) == (0.1, "cosine", 0.1)
    assert r.rewards == ("format_exact", "format_approximate", "answer_ratio", "answer_number")
    assert r.grpo.reward_weights is None
    e = r.evaluation
    assert (e.prompts, e.accuracy, e.partial, e.format) == (100 * 2, "answer_number", "answer_close", "format_exact")
    assert (e.preset, list(PRESETS)) == ("all", ["greedy", "standard", "liberal"])
    assert r.tracking == ("wandb",)


def test_gsm8k_nanochat_has_the_numbers_of_nanochat() -> None:
    r = recipe.load("gsm8k-nanochat", ["data.path=hf:openai/gsm8k"])
    a = algorithm_of(r.grpo)
    assert (a.advantage, a.surrogate, a.aggregate, a.beta) == ("centred", "reinforce", "token_mean", 0.0)
    assert (r.grpo.num_generations, r.grpo.num_iterations, r.training.prompts_per_step) == (16, 1, 16)
    assert r.rewards == ("exact_answer",)
    o = r.rollout
    assert (o.slots, o.max_new_tokens, o.temperature, o.top_k, o.top_p) == (8, 256, 1.0, 50, 1.0)
    assert o.tool == "calculator"
    t, p = r.training, r.training.actor_optimizer
    assert t.max_steps == 7473 // 16
    assert (t.eval_every_n_steps, t.checkpoint_every_n_steps) == (60, 60)
    rates = (p.embedding_learning_rate, p.unembedding_learning_rate, p.learning_rate)
    assert (*rates, p.initial_fraction, p.weight_decay, p.kind) == (0.2, 0.004, 0.02, 0.05, 0.0, "muon")
    by_step = [float(learning_rate(p, 467)(n)) for n in (0, 233, 466, 467)]
    np.testing.assert_allclose(by_step, [0.001 * (1 - n / 467) for n in (0, 233, 466, 467)], atol=1e-9)
    e = r.evaluation
    assert (e.prompts, e.samples, e.pass_k, e.accuracy) == (400, 8, 8, "exact_answer")
    assert (evaluation_rollout(e, o).temperature, evaluation_rollout(e, o).top_k) == (1.0, 50)
    assert e.during_prompts is None
    assert r.data.system == ""
    strict = ["rewards=exact_answer_strict", "evaluation.accuracy=exact_answer_strict"]
    assert recipe.load("gsm8k-nanochat", strict).rewards == ("exact_answer_strict",)


@pytest.mark.parametrize("name", ["gsm8k-gemma2", "gsm8k-nanochat"])
def test_the_page_shows_the_recipe_itself(name: str) -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "gsm8k.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    [shown] = re.findall(r'^--8<-- "(.*)"$', section, re.M)
    assert recipe.load(str(root / shown)) == recipe.load(name)


# --- the runs


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


SMALL = [
    "rollout.max_new_tokens=12",
    "training.max_steps=2",
    "training.eval_every_n_steps=1",
    "training.checkpoint_every_n_steps=1",
    "tracking=[]",
]
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
"""As tokens: a random model writes some of them, and so earns rewards that differ."""


@pytest.mark.slow
def test_gsm8k_gemma2_runs_on_a_mesh_of_four(tmp_path: Path, problems: Path, checkpoint: Callable[..., Path]) -> None:
    settings = [
        f"data.path={problems}",
        f"model.source={checkpoint('gemma2', layers=1, words=TAGS)}",
        "rollout.max_prompt_length=400",
        "evaluation.prompts=2",
        "evaluation.during_prompts=1",
    ]
    ready = recipe.load("gsm8k-gemma2", [*SMALL, *settings])
    out = tmp_path / "run"
    summary = recipes.train(ready, out)
    assert {"prompts": 11, "dropped": 1, "truncated": 0}.items() <= summary["data"].items()
    figures = {"accuracy", "partial_accuracy", "format_accuracy"}
    for name in ("before", "after"):
        wanted = figures | {f"{preset}/{what}" for preset in ("standard", "liberal") for what in figures}
        assert wanted <= {what for what, value in summary[name].items() if value is not None}
        assert [len(rows(out, f"{name}{preset}.jsonl")) for preset in ("", "-standard", "-liberal")] == [2, 2, 2]
    metrics = rows(out, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all({f"eval/{what}" for what in figures} <= row.keys() for row in metrics)
    assert [row["eval/samples"] for row in metrics] == [1.0, 1.0]
    assert {"kl", "reward", "rewards/format_exact/mean", "rewards/answer_ratio/mean"} <= metrics[0].keys()
    prompt = rows(out, "samples.jsonl")[0]["prompt"]
    assert "<reasoning>" in prompt
    with Checkpointer(out / "checkpoints", read_only=True) as saves:
        assert saves.steps() == [1, 2]
        state, _ = saves.restore()
    assert all("lora" in name for name in flatten(state["params"]))


EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k_gemma2.py"


def buffers(x: jax.Array) -> list[int]:
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


@pytest.mark.slow
def test_gsm8k_gemma2_goes_through_the_whole_notebook(
    tmp_path: Path,
    problems: Path,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("covey_trackers")
    model, out = checkpoint("gemma2", layers=1, words=TAGS), tmp_path / "out"
    flags = ["--model", model, "--data", problems, "--out", out, "--steps", 3, "--test-batches", 1]
    flags += ["--max-prompt-length", 400, "--max-new-tokens", 12]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, flags)])
    monkeypatch.setattr(logging.getLogger("covey"), "level", logging.NOTSET)  # it sets its own
    left = runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown, cluster = capsys.readouterr().out, left["cluster"]

    assert left["learner"].step == 3
    assert re.findall(r"^step (\d)/3", shown, re.M) == ["1", "2", "3"]
    figures = r"greedy: accuracy \d+\.\d%  within 10 % \d+\.\d%  format \d+\.\d%  reward -?\d+\.\d\d"
    assert re.findall(rf"^(before|after), {figures}$", shown, re.M) == ["before", "after"]
    assert len(re.findall(r"^> \d+\+\d+\?$", shown, re.M)) == 2
    assert "1 are too long" in shown

    # Four devices, each with a quarter of every matrix product; one base for actor and reference.
    actor, frozen = flatten(nnx.state(cluster.actor)), flatten(cluster.inference.params[Role.REFERENCE])
    assert {len(x.sharding.device_set) for x in [*actor.values(), *frozen.values()]} == {4}
    quarter = {
        "q_proj.kernel": (32, 16),
        "o_proj.kernel": (16, 32),
        "up_proj.kernel": (32, 12),
        "q_proj.lora.b": (64, 16),
    }
    for end, share in quarter.items():
        pieces = [x.addressable_shards[0].data.shape for name, x in actor.items() if name.endswith(end)]
        assert pieces == [share], end
    kernels = [name for name in actor if ".lora." not in name]
    assert sorted(name for name, x in frozen.items() if buffers(x) == buffers(actor[name])) == sorted(kernels)
    assert {str(actor[name].dtype) for name in kernels} == {"bfloat16"}

    # The base's checkpoint is the model that was given, and so is the base after training; its adapters have moved.
    given = flatten(nnx.state(weights.load(str(model), param_dtype="bfloat16").model))
    saved, adapters = (restored(out / name) for name in ("base", "policy"))
    assert given.keys() == saved.keys() == set(kernels)
    for name, x in given.items():
        assert np.array_equal(np.asarray(x), np.asarray(actor[name])), name
        assert np.array_equal(np.asarray(x, np.float32), saved[name]), name
    moved = [name for name in actor if name.endswith("lora.b")]
    assert len(moved) == 7
    assert all(np.asarray(actor[name]).any() for name in moved)
    assert all(np.array_equal(adapters[f"params.{name}"], np.asarray(actor[name])) for name in moved)
    assert {path.name for path in (out / "adapter").iterdir()} > {"adapter_config.json", "adapter_model.safetensors"}


def restored(folder: Path) -> dict[str, np.ndarray]:
    with Checkpointer(folder, read_only=True) as saves:
        return {name: np.asarray(x, np.float32) for name, x in flatten(saves.restore()[0]).items() if x.ndim}


class Board:
    """Stands for tensorboardX and its writer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def SummaryWriter(self, logdir: str) -> "Board":  # noqa: N802
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, step))

    def close(self) -> None:
        self.seen.append(("closed", -1))


@pytest.mark.slow
def test_gsm8k_nanochat_runs_and_goes_on(
    tmp_path: Path, problems: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("covey_envs")
    board = Board()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    settings = [
        "tracking=tensorboard",
        "rollout.slots=8",
        f"data.path={problems}",
        f"model.source={checkpoint('nanochat', layers=1)}",
        "model.compute_dtype=float32",
        "training.too_long=drop",
        "training.prompts_per_step=2",
        "grpo.num_generations=4",
        "evaluation.prompts=2",
        "evaluation.samples=3",
        "evaluation.pass_k=3",
    ]
    ready = recipe.load("gsm8k-nanochat", [*SMALL, *settings])
    out = tmp_path / "run"
    summary = recipes.train(ready, out)
    assert {f"pass@{k}{how}" for k in (1, 2, 3) for how in ("", "_any")} <= summary["after"].keys()
    metrics = rows(out, "metrics.jsonl")
    assert [row["learning_rate"] for row in metrics] == pytest.approx([0.001, 0.0005])
    assert all(0 <= row["eval/pass@1"] <= row["eval/pass@3"] <= 1 for row in metrics)
    assert "kl" not in metrics[0]
    assert all(row["sampling/logp_difference/max"] < 1e-5 for row in metrics)  # of float32; see docs/extend-models.md
    assert len(rows(out, "samples.jsonl")) == 2 * 2 * 4
    assert [step for name, step in board.seen if name == "reward"] == [1, 2]
    assert [step for name, step in board.seen if name == "eval/pass@3"] == [0, 1, 2, 2]
    assert board.seen[-1] == ("closed", -1)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as on a machine without it: said, and no more
    assert recipes.resume(out, ["training.max_steps=3"])["steps"] == 3  # Muon's state is found again under its names
