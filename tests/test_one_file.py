"""The example in one file computes what the package computes, and runs as it is documented."""

import random
import re
import runpy
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from covey.config.schema import GRPOConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.scratch_checkpoint import character_tokenizer
from covey.monitor.record import StepRecord
from covey.parallel import flatten
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_in_one_file.py"
MODEL = ModelConfig(
    vocab_size=19, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip
TOKENIZER = character_tokenizer("0123456789+-×=. ")
STEPS = 2


def imported() -> Any:
    """The example as a module."""
    spec = util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its types
    spec.loader.exec_module(module)
    return module


one_file = imported()


def mixed(text: str, answer: str) -> float:
    """A reward of several values, so that nearly every group has something to compare."""
    return sum(map(ord, text + answer)) % 5 / 4


def decoder() -> Decoder:
    """A model of random weights, the same at each call."""
    return Decoder(MODEL, rngs=nnx.Rngs(0))


def trained_by_the_package(settings: Any, problems: Sequence[dict[str, str]]) -> tuple[Decoder, list[StepRecord]]:
    """The actor and the records of a learner with the settings of the example, after one epoch of `problems`."""
    own = vars(settings)

    def config(cls: type[Any], **more: Any) -> Any:
        return cls(**{name: own[name] for name in cls.kinds if name in own}, **more)

    optimizer = config(OptimizerConfig, warmup_ratio=0.0, schedule="constant")
    training, rollout = config(RLTrainingConfig, actor_optimizer=optimizer), config(RolloutConfig)
    grpo = config(GRPOConfig)

    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return list(map(mixed, completions, answer))

    records: list[StepRecord] = []
    cluster = RLCluster(actor=decoder(), tokenizer=TOKENIZER, cluster_config=ClusterConfig({}, training, rollout))
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=reward, grpo_config=grpo, observers=[records.append])
    learner.train(PromptLoader(problems, settings.prompts_per_step, shuffle=False, num_epochs=1))
    return cluster.actor, records


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_the_package_computes_the_same_steps(num_iterations: int) -> None:
    """The same completions; losses, KLs, gradients and weights to 1e-5. The example pads one sample a row and makes all
    logits; the package packs groups into rows and makes no array of logits.
    """
    settings = one_file.Settings(
        seed=3, prompts_per_step=4, num_generations=4, num_iterations=num_iterations, max_new_tokens=5, temperature=0.8,
        epsilon=0.02, beta=0.1, learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5,
    )  # fmt: skip
    P = settings.prompts_per_step
    problems = one_file.make_problems(random.Random(1), STEPS * P)
    actor, records = trained_by_the_package(settings, problems)
    run = one_file.begin(decoder(), TOKENIZER, mixed, settings)
    assert [record.step for record in records] == [num_iterations * step for step in (1, 2)]
    for step, record in enumerate(records):
        run, metrics, texts = one_file.grpo_step(run, problems[step * P : (step + 1) * P])
        theirs = record.metrics
        assert texts == [[completion.text for completion in group.completions] for group in record.groups]
        assert metrics["reward"] == pytest.approx(theirs["reward"], abs=1e-12)
        assert metrics["clip_ratio"] == pytest.approx(theirs["clip_ratio/region_mean"], abs=1e-5)
        for name in ("loss", "kl", "grad_norm"):
            assert metrics[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), (name, step)
        # Nothing here is equal because it is nothing: rewards differ, and the clip cuts from the second update on.
        assert theirs["frac_reward_zero_std"] < 0.5
        assert metrics["grad_norm"] > settings.max_grad_norm
        assert (metrics["clip_ratio"] > 0.1) == (num_iterations > 1)
    assert_equal_and_moved(run.params, nnx.state(actor))


def assert_equal_and_moved(ours: Any, theirs: Any) -> None:
    """The weights of both sides are equal to 1e-5, and have left those of the beginning far behind."""
    start, other = flatten(nnx.state(decoder())), flatten(theirs)
    for name, x in flatten(ours).items():
        np.testing.assert_allclose(x, other[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.abs(x - start[name]).max() > 1e-3, name


@pytest.mark.slow
def test_it_runs_as_documented(tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any) -> None:
    """From a model of random weights, a line for each step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps=2", "--prompts-per-step=2", "--num-generations=4"])
    with caplog.at_level("INFO", "covey"):  # which the example sets
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    numbers = "".join(rf"{name} -?\d+\.\d{{4}}  " for name in ("reward", "clip_ratio", "grad_norm", "kl", "loss"))
    shown = capsys.readouterr().out
    assert re.findall(rf"^step (\d)/2  {numbers}\d+: '.*'$", shown, re.M) == ["1", "2"], shown
    assert list(tmp_path.iterdir()) == []


def test_it_stays_readable_on_a_few_pages() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 250
