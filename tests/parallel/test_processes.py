"""Several processes are one: real ones, on this machine, against a single one. This file is also what they run.

As `test_processes.py MODEL FOLDER` it trains two steps, and writes down what came of it.
"""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from covey import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, Role, RolloutConfig
from covey.configs import EvalConfig
from covey.data.loader import PromptLoader
from covey.evaluate import evaluate
from covey.models import weights
from covey.parallel import distributed, flatten, make_mesh
from covey.parallel.joining import ADDRESS, COUNT, NUMBER
from covey.rl.learner import StepRecord
from covey.train.checkpoint import Checkpointer
from covey.types import Group

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
OWN = ("time/", "step_time", "tokens_per_second", "waste/")
"""Metrics that say how the work was done, not what came of it."""
SETTINGS = [
    "rewards=[first_letter,fragile:fragile]",
    "rollout.max_new_tokens=6",
    "rollout.max_prompt_length=400",
    "rollout.slots=1",
    "training.max_tokens_per_micro_batch=1",
    "training.max_steps=4",
    "training.prompts_per_step=2",
    "training.checkpoint_every_n_steps=2",
    "training.actor_optimizer.learning_rate=1e-3",
    "grpo.num_generations=4",
    "evaluation.prompts=3",
]
FRAGILE = """
import os
calls = 0
def fragile(completions):
    global calls
    calls += 1
    assert calls < int(os.environ.get("BREAKS_AT", 99)) or os.environ["JAX_PROCESS_ID"] != "1", "it broke"
    return [len(set(c)) / 10 for c in completions]
"""

# What the processes do.

PROMPTS = [{"prompt": f"{'why ' * i}{i}", "wanted": i % 3} for i in range(5)]


def even(completion_ids: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[float]:
    return [float(ids[0] % 2 == 0) + 0.25 * (ids[-1] % 4 == w) for ids, w in zip(completion_ids, wanted, strict=True)]


def remembering(rate: float) -> optax.GradientTransformation:
    """Gradient descent whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )


def work(model: str, folder: Path) -> None:
    """A step of four prompts, and one of the last prompt alone: one of two processes gets nothing then. In each process
    gradients are sharded over two devices, and a thread feeds the trainer.
    """
    with distributed.start():
        (folder / f"{distributed.count()}-{distributed.index()}").write_bytes(pickle.dumps(trained(model)))


def trained(model: str) -> dict[str, Any]:
    loaded = weights.load(model)
    training = RLTrainingConfig(
        prompts_per_step=4,
        max_steps=2,
        actor_optimizer=remembering(1e-2),  # type: ignore[arg-type]
        row_length=64,
        max_tokens_per_micro_batch=64,
        train_micro_batch_size=2,
        queueing="async",
    )
    rollout = RolloutConfig(max_prompt_length=32, max_new_tokens=6, slots=1, seed=3)
    placed = ClusterConfig({Role.ACTOR: make_mesh((2, 1))}, training, rollout)
    cluster = RLCluster(actor=loaded.model, tokenizer=loaded.tokenizer, cluster_config=placed)
    found: dict[str, Any] = {"metrics": [], "samples": []}

    def observe(record: StepRecord) -> None:
        found.setdefault("gradient", arrays(cluster.state()["opt_state"]))
        found["metrics"].append(record.metrics)
        found["samples"].append([told(group) for group in record.groups])

    loader = PromptLoader(PROMPTS, 4, seed=1, num_epochs=1)
    grpo = GRPOConfig(num_generations=4)
    GRPOLearner(rl_cluster=cluster, reward_fns=even, grpo_config=grpo, observers=[observe]).train(loader)
    judged = evaluate(cluster, PROMPTS, EvalConfig(samples=2), rollout, [even])
    found["evaluation"] = judged.summary(), [told(group) for group in judged.groups]
    return found | {"weights": arrays(cluster.state()["params"])}


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten(tree).items()}


def told(group: Group) -> Any:
    numbers = [None if x is None else list(x) for x in (group.rewards, group.advantages)]
    return group.prompt, [(c.text, list(c.tokens)) for c in group.completions], *numbers


# Starting them, and looking at what they did.


def launched(words: Sequence[str], processes: int, folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """`python words`, as so many processes, in `folder`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    common = os.environ | {
        # Two devices each; and code that is compiled fast rather than well.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    folder.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env=common
            | ({ADDRESS: address, COUNT: str(processes), NUMBER: str(number)} if processes > 1 else {})
            | environment,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(processes)
    ]


def ended(started: Sequence[subprocess.Popen[str]], codes: Sequence[int], seconds: float = 200) -> list[str]:
    """What each said on its way to these exit codes; those that live longer are killed, and the test fails."""
    until = time.monotonic() + seconds
    try:
        outputs = ["".join(p.communicate(timeout=max(until - time.monotonic(), 1))) for p in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == list(codes), "\n\n".join(output[-3000:] for output in outputs)
    return outputs


def close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float) -> bool:
    largest = max(float(np.abs(x).max()) for x in one.values())
    return one.keys() == other.keys() and all(
        np.allclose(one[name], other[name], rtol=0, atol=tolerance * max(largest, 1.0)) for name in one
    )


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows of metrics, or two summaries, tell the same."""
    assert one.keys() == other.keys()
    same = [name for name in one if not name.startswith(OWN)]
    return all(one[n] == other[n] or np.isclose(one[n], other[n], 1e-4, 1e-5, equal_nan=True) for n in same)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of one layer: little to compile, in each process anew."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.npz"))
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = {name: x for part in GOLDEN.glob("*.safetensors") for name, x in load_file(part).items()}
    save_file({name: x for name, x in tensors.items() if ".layers.1." not in name}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path, model: str) -> None:
    """The first gradient to 1e-5; samples, rewards, advantages and the evaluation exactly; and the two copies of the
    weights bit for bit.
    """
    out = tmp_path / "out"
    alone, both = (launched([__file__, model, str(out)], n, out) for n in (1, 2))
    ended(both, [0, 0])
    ended(alone, [0])
    one, first, second = (pickle.loads((out / name).read_bytes()) for name in ("1-0", "2-0", "2-1"))
    assert [len(groups) for groups in one["samples"]] == [4, 1]
    assert all(np.array_equal(first["weights"][name], second["weights"][name]) for name in one["weights"])
    for found in (first, second):
        assert close(one["gradient"], found["gradient"], 1e-5)
        assert close(one["weights"], found["weights"], 1e-5)
        assert one["samples"] == found["samples"]
        assert one["evaluation"] == found["evaluation"]
        for row, theirs in zip(one["metrics"], found["metrics"], strict=True):
            assert alike(row, theirs), (row, theirs)


@pytest.mark.slow
def test_a_run_of_two_fails_together_and_goes_on_together(tmp_path: Path, model: str) -> None:
    """A reward function that breaks in process 1 ends process 0 too, which says why; the resumed run is that of one
    process that was never stopped.
    """
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "fragile.py").write_text(FRAGILE)
    train = ["-m", "covey", "train", "quickstart", *SETTINGS, "--model.source", model, "--out"]
    alone = launched([*train, str(straight)], 1, tmp_path / "here")
    two = launched([*train, str(broken)], 2, tmp_path / "here", BREAKS_AT="5")
    first, second = ended(two, [2, 2])
    assert "process 1 has failed" in first
    assert "it broke" in first
    assert "the reward function" in second
    ended(alone, [0])
    with Checkpointer(broken / "checkpoints", read_only=True) as saves:
        assert saves.steps() == [2]
    resumed = launched(["-m", "covey", "train", "--resume", str(broken)], 2, tmp_path / "here")
    shown, quiet = ended(resumed, [0, 0])
    assert "step 3/4" in shown
    assert "step 3/4" not in quiet
    assert sorted(p.name for p in broken.iterdir()) == sorted(p.name for p in straight.iterdir())
    for name in ("samples.jsonl", "before.jsonl", "after.jsonl"):
        assert texts(straight / name) == texts(broken / name)
    metrics = [rows(folder / "metrics.jsonl") for folder in (straight, broken)]
    assert [row["step"] for row in metrics[1]] == [1, 2, 3, 4]
    assert all(alike(one, other) for one, other in zip(*metrics, strict=True))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (straight, broken)]
    assert all(alike(summaries[0][when], summaries[1][when]) for when in ("before", "after"))
    assert close(*(held(folder) for folder in (straight, broken)), 1e-4)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def texts(file: Path) -> list[Any]:
    return [(row["prompt"], row["text"], row["rewards"], row["finish"]) for row in rows(file)]


def held(folder: Path) -> dict[str, np.ndarray]:
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        return arrays(saves.restore(4)[0]["params"])


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
