"""Several processes are one: real ones, on this machine, against a single one. This file is also what they run.

As `test_processes.py MODEL FOLDER WORDS` it trains on meshes over all of them, writes down what came of it, and then
runs the command WORDS, which a mistake in process 1 ends; with WORDS that resume a run it does that alone.
"""

import faulthandler
import io
import itertools
import json
import os
import pickle
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load

import covey
from covey import (
    ClusterConfig,
    EnvsConfig,
    GRPOConfig,
    GRPOLearner,
    OptimizerConfig,
    PPOConfig,
    PPOLearner,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
    SFTConfig,
    SFTLearner,
)
from covey.cli import main as command
from covey.cli.main import main, parse
from covey.config import recipe
from covey.config.metrics import CLOCKS
from covey.config.processes import ADDRESS
from covey.config.schema import EvalConfig, LoRAConfig
from covey.data.loader import PromptLoader
from covey.errors import STOPPED
from covey.models.loading import weights
from covey.models.lora import split_trainable, with_lora
from covey.monitor.record import StepRecord
from covey.parallel import flatten, make_mesh, processes, reshard
from covey.recipes import use
from covey.recipes.load_model import load_source
from covey.rl.evaluate import evaluate
from covey.train.checkpoint import Checkpointer
from covey.types import Group
from covey_hosts.order import OrderError
from covey_sft import run as sft_run
from covey_sft.answers import answer_examples

OWN = (*CLOCKS, "waste/")
"""Metrics that say how the work was done, not what came of it."""
SETTINGS = [
    "rewards=[exact_answer,fragile:fragile]",
    "model.compute_dtype=float32",
    "rollout.max_new_tokens=6",
    "rollout.slots=1",
    "training.too_long=drop",
    "training.max_tokens_per_micro_batch=1",
    "training.max_steps=4",
    "training.prompts_per_step=2",
    "training.checkpoint_every_n_steps=1",
    "grpo.num_generations=4",
    "evaluation.prompts=3",
    "evaluation.samples=2",
    "evaluation.pass_k=2",
]
SUPERVISED = [
    "model.compute_dtype=float32",
    "model.lora.rank=2",
    "model.mesh.fsdp=4",
    "training.row_length=64",
    "training.max_tokens_per_micro_batch=64",
    "evaluation.prompts=3",
    "evaluation.answers=3",
    "rollout.max_new_tokens=4",
    "rollout.temperature=1",
]
EVALUATION = [
    "--recipe=quickstart",
    "--model.compute_dtype=float32",
    "--model.mesh.fsdp=4",
    "--evaluation.prompts=3",
    "--evaluation.samples=2",
    "--evaluation.pass_k=2",
    "--rollout.max_new_tokens=4",
    "--rollout.max_prompt_length=400",
]
FRAGILE = """
import json, os, signal
from pathlib import Path
me, again, calls = os.environ.get("JAX_PROCESS_ID", "alone"), Path("broke").exists(), 0
def fragile(completions, question):
    global calls
    calls += 1
    with open(f"asked-{me}" + "-again" * again, "a") as file:
        print(json.dumps(question), file=file)
    if me == "1" and not again and calls > 2:  # an evaluation and a step
        Path("broke").touch()
        raise ValueError("it broke")
    if me == "1" and again and calls == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return [len(set(c)) / 10 for c in completions]
"""
MOMENTA = {"matrix": 0.95, "embedding": 0.8, "unembedding": 0.8}
"""Kind of parameter → the decay of its first moment in the recipe."""

LAUNCHER = """
import json, sys
from covey.cli.main import main
from covey_hosts import local
local.launch.__defaults__ = (json.loads(sys.argv[1]),)
sys.exit(main(sys.argv[2:]))
"""
"""The command `covey`, which launches another program in place of itself."""

# What the processes do.

PROMPTS = [{"prompt": f"why {i}", "wanted": i % 3} for i in range(3)]


def remembering(rate: float) -> Any:
    """Gradient descent whose state is the last gradient: adaptive ones divide rounding by rounding."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )


def even(completion_ids: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[float]:
    return [float(ids[0] % 2 == 0) + 0.25 * (ids[-1] % 4 == w) for ids, w in zip(completion_ids, wanted, strict=True)]


def work(model: str, folder: Path, words: Sequence[str]) -> int | None:
    """Train as each of `CASES`, in turn, run commands, and write down what came of it; then run the command `words`."""
    command.parse = parse
    with processes.start():
        found = {name: train(model) for name, train in CASES.items()} | {"commands": commands(model)}
        found |= {"refused": refused(model, folder), "listens": listening(), "keeps": keeps_programs()}
        (folder / f"{processes.here().index}").write_bytes(pickle.dumps(found))
        return parse(words)()


def ppo(model: str) -> dict[str, Any]:
    """Two steps of all weights, with a critic, of three prompts, of which one process samples two; in the second the
    rollout samples with the new weights.
    """
    cluster = loaded(model, (2, 2), ("fsdp", "tp"), steps=2)
    return observed(PPOLearner, cluster, ppo_config=PPOConfig(num_generations=2))


def sft(model: str) -> dict[str, Any]:
    """Two steps on copies of halves of the weights, and the loss on held-out examples."""
    config = SFTConfig(batch_size=3, max_steps=2, row_length=64, optimizer=remembering(0.1), eval_every_n_steps=2)
    learner = SFTLearner(model=model, config=config, mesh=make_mesh((2, 2), ("data", "fsdp")), observers=[])
    examples = [{"prompt": row["prompt"], "completion": f" {row['wanted']}"} for row in PROMPTS]
    learner.train(examples, examples[:1])
    assert learner.trainer is not None
    return {"metrics": learner.history.rows, "samples": [], "arrays": arrays(learner.trainer.state())}


def transfers(model: str) -> dict[str, Any]:
    """Arrays from a mesh of half of each process's devices to its other devices, and whole ones onto that mesh."""
    devices, own = jax.devices(), jax.local_devices()
    halves = [d for p in range(jax.process_count()) for d in _first_half([x for x in devices if x.process_index == p])]
    mesh, others = make_mesh((2,), ("fsdp",), halves), own[len(own) // 2 :]
    whole = {name: np.arange(8.0).astype(kind).reshape(4, 2) for name, kind in (("a", "float32"), ("b", "bfloat16"))}
    over = reshard(jax.tree.map(jnp.asarray, whole), NamedSharding(mesh, PartitionSpec("fsdp")))
    moved = reshard(over, NamedSharding(make_mesh((len(others),), ("tp",), others), PartitionSpec(None, "tp")))
    single = reshard(over, SingleDeviceSharding(others[0]))
    assert all(leaf.devices() <= set(others) for leaf in jax.tree.leaves((moved, single)))
    return {"metrics": [], "samples": [], "arrays": arrays({"over": over, "moved": moved, "single": single})}


def _first_half(devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    return devices[: len(devices) // 2]


def _of_roles() -> dict[Role, Mesh]:
    """The first half of each process's devices for the actor, and the others for the rollout."""
    of_process = [[d for d in jax.devices() if d.process_index == p] for p in range(jax.process_count())]
    halves = [list(_first_half(devices)) for devices in of_process]
    others = [devices[len(half) :] for devices, half in zip(of_process, halves, strict=True)]
    actor, rollout = (list(itertools.chain(*parts)) for parts in (halves, others))
    return {
        Role.ACTOR: make_mesh((len(actor), 1), ("fsdp", "tp"), actor),
        Role.ROLLOUT: make_mesh((2, len(rollout) // 2), ("data", "fsdp"), rollout),
    }


def role_meshes(model: str) -> dict[str, Any]:
    """Two steps of adapters, with actor and rollout on devices of their own and a reference; then an evaluation. The
    second half of a step's prompts is scored once the actor has trained on the first; and another thread may not launch
    programs over several processes.
    """
    prompts = [{"prompt": f"why {i}", "wanted": i % 3} for i in range(4)]
    trained, waited = threading.Event(), []

    def patient(completion_ids: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[float]:
        later = cluster.trainer is not None and len(waited) % 2 == 1
        waited.append(trained.wait(200) if later else trained.clear() or True)
        return even(completion_ids, wanted)

    cluster = loaded(model, meshes=_of_roles(), lora=True, steps=2, prompts_per_step=4, **SIZES)
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=patient, grpo_config=GRPOConfig(num_generations=2, beta=0.1))
    learner.prepare(2)
    assert cluster.trainer is not None
    accumulate = cluster.trainer.programs.accumulate

    def seen(*args: Any) -> Any:
        found = accumulate(*args)
        trained.set()
        return found

    cluster.trainer.programs.accumulate = seen  # type: ignore[method-assign]
    found = trained_by(learner, PromptLoader(prompts, 4, seed=1))
    refused: list[str] = []
    thread = threading.Thread(
        target=lambda: refused.append(refusal(lambda: processes.here().phase("thread", 0).__enter__()))
    )
    thread.start()
    thread.join()
    assert waited == [True] * 4, waited
    one = processes.here().count == 1
    assert one or all("launches the programs over several processes" in text for text in refused)
    judged = evaluate(cluster, PROMPTS, EvalConfig(), cluster.config.rollout_config, [even])
    return found | {"evaluation": (judged.summary(), [told(group) for group in judged.groups])}


def ahead(model: str) -> dict[str, Any]:
    """Four steps of a game of one to three turns, on samples of the weights one step before, in which dynamic sampling
    replaces prompts. Each of several processes has a thread that plays its share; one plays and trains in turns.
    """
    folder = ahead_folder(model, processes.here().count)
    with mock.patch.object(ClusterConfig, "runs_ahead", processes.here().count > 1), redirect_stdout(io.StringIO()):
        learner = learner_ahead(model)
        learner.train(AHEAD, AHEAD[:2], out=folder)
    processes.here().all_gather(0, "written")
    written = rows(folder / "metrics.jsonl")
    return {
        "metrics": [{name: x for name, x in row.items() if not name.startswith(OWN)} for row in written],
        "samples": texts(folder / "samples.jsonl"),
        "arrays": arrays(learner.cluster.state()),
    }


AHEAD = [{"prompt": f"why {i}", "wanted": i % 3, "turns": 1 + i % 3} for i in range(24)]


def ahead_folder(model: str, count: int) -> Path:
    return Path(model).with_name(f"ahead-{count}")


class Game:
    """Answers after a random time, with the length of the reply."""

    def __init__(self, row: Mapping[str, Any]):
        self.prompt, self.turns = row["prompt"], row["turns"]

    def reset(self) -> str:
        return self.prompt  # type: ignore[no-any-return]

    def step(self, reply: str) -> Any:
        time.sleep(random.random() / 20)
        self.turns -= 1
        return covey.Step(f"so {len(reply)}", float(len(reply) % 3), self.turns == 0)


def learner_ahead(model: str) -> GRPOLearner:
    """A learner that samples one step ahead, on devices of its own; Adam with a large constant is as good as linear."""
    optimizer = OptimizerConfig(learning_rate=0.1, eps=0.1, schedule="constant")
    every = {"checkpoint_every_n_steps": 1, "eval_every_n_steps": 2, "off_policy_steps": 1}
    game = covey.EnvironmentRunner(Game, EnvsConfig(environment="guess", max_turn_tokens=4, rehearsal=False))
    cluster = loaded(model, meshes=_of_roles(), steps=4, optimizer=optimizer, game=game, **every)
    grpo = GRPOConfig(num_generations=2, beta=0.0, max_sampling_rounds=2)
    return GRPOLearner(rl_cluster=cluster, reward_fns=unsteady, grpo_config=grpo, observers=[])


def unsteady(completion_ids: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[float]:
    time.sleep(random.random() / 20)
    return even(completion_ids, wanted)


SIZES = {f"{stage}_micro_batch_size": 2 for stage in ("rollout", "ref_logps", "old_logps", "train")}


def refusal(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except OrderError as error:
        return str(error)


CASES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "ppo": ppo,
    "sft": sft,
    "role meshes": role_meshes,
    "ahead": ahead,
    "transfers": transfers,
}


def commands(model: str) -> dict[str, Any]:
    """Evaluate the model, and evaluate and export the run beside it: figures, answers, exported files, and what the
    terminal got.
    """
    source, answers, shown = Path(model).with_name("run"), list[Any](), io.StringIO()
    out = source.with_name(f"exported-by-{processes.here().count}")

    def answer(*args: Any) -> Any:
        found = answer_examples(*args)
        answers.extend(told(group) for group in found[1])
        return found

    def exported(name: str, *options: str) -> int:
        return main(["export", str(source), "--out", str(out / name), *options])

    with mock.patch.object(sft_run, "answer_examples", answer), redirect_stdout(shown), redirect_stderr(shown):
        figures = use.evaluate(str(source), recipe.load(source, (), recipe.SFTRecipe))
        with mock.patch("covey_formats.export._mesh_over_processes", return_value=make_mesh((4,), ("fsdp",))):
            codes = [exported("hf"), exported("peft", "--format", "peft")]
        codes.append(main(["eval", model, *EVALUATION]))
        codes.append(
            exported("gguf", "--format", "gguf") if processes.here().count > 1 else exported("from one device")
        )
    files = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    return {"figures": figures, "answers": answers, "codes": codes, "files": files, "shown": shown.getvalue()}


def refused(model: str, folder: Path) -> dict[str, tuple[int, str]]:
    """Train where process 1 has another reward, and where it has the run folder on a disk of its own; return the exit
    code and what the terminal got.
    """
    told, train = {}, ["train", "quickstart", f"--model.source={model}", "--rewards=mine:score"]
    for differs, out in (("module", folder / "module" / "run"), ("folder", "run")):
        here, shown = folder / differs / str(processes.here().index), io.StringIO()
        here.mkdir(parents=True)
        sign = "-" if processes.here().index and differs == "module" else ""
        (here / "mine.py").write_text(f"score = lambda completions: [{sign}float(len(c)) for c in completions]\n")
        with chdir(here), redirect_stdout(shown), redirect_stderr(shown):
            told[differs] = main([*train, f"--out={out}"]), shown
    return {differs: (code, shown.getvalue()) for differs, (code, shown) in told.items()}


def loaded(
    model: str,
    shape: tuple[int, ...] = (),
    axes: tuple[str, ...] = (),
    lora: bool = False,
    steps: int = 1,
    meshes: Mapping[Role, Mesh] | None = None,
    optimizer: Any = None,
    game: Any = None,
    **sizes: int,
) -> RLCluster:
    meshes = meshes or {Role.ACTOR: make_mesh(shape, axes)}
    optimizer = optimizer or remembering(0.1)
    read = weights.load(model, mesh=meshes[Role.ACTOR])
    actor = with_lora(read.model, LoRAConfig(rank=2)) if lora else read.model
    training = RLTrainingConfig(
        **{"prompts_per_step": 3} | sizes,  # type: ignore[arg-type]
        max_steps=steps,
        actor_optimizer=optimizer,
        critic_optimizer=optimizer,
        row_length=64,
    )
    rollout = RolloutConfig(max_prompt_length=32, max_new_tokens=32 if game else 4, slots=4, seed=3)
    config = ClusterConfig(meshes, training, rollout)
    return RLCluster(actor=actor, tokenizer=read.tokenizer, cluster_config=config, environments=game)


def observed(kind: Any, cluster: RLCluster, **config: Any) -> dict[str, Any]:
    return trained_by(kind(rl_cluster=cluster, reward_fns=even, **config), PromptLoader(PROMPTS, 3, seed=1))


def trained_by(learner: Any, loader: PromptLoader) -> dict[str, Any]:
    found: dict[str, Any] = {"metrics": [], "samples": [], "arrays": {}}

    def observe(record: StepRecord) -> None:
        found["metrics"].append(record.metrics)
        parts = processes.here().gather_items(list(zip(record.numbers, record.groups, strict=True)), "seen")
        groups = [group for _, group in sorted(parts, key=lambda part: part[0])]
        found["samples"].append([told(group) for group in groups])
        found["arrays"][f"advantages {record.step}"] = np.array([group.advantages for group in groups])

    learner.observers = [observe]
    learner.train(loader)
    found["arrays"] |= arrays(learner.cluster.state())
    return found


def keeps_programs() -> bool:
    """Return whether this process reads programs from the cache, which the environment names."""
    return bool(jax.config.jax_enable_compilation_cache and os.environ["JAX_COMPILATION_CACHE_DIR"])


def listening() -> list[str]:
    """Hosts of this machine at which the coordinator answers: all of 127.0.0.0/8 is this machine."""
    port = int(os.environ.get(ADDRESS, ":0").rsplit(":", 1)[1])
    return [host for host in ("127.0.0.1", "127.0.0.2", "::1") if port and answers(host, port)]


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: processes.here().to_host(x) for name, x in flatten(tree).items()}


def told(group: Group) -> Any:
    completions = [(c.text, list(c.tokens)) for c in group.completions]
    return group.prompt, completions, None if group.rewards is None else list(group.rewards)


# Starting them, and looking at what they did.


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of one layer: little to compile, in each process anew."""
    from tests.one_layer import ONE_LAYER  # late: the processes that this file starts write none

    return str(shutil.copytree(ONE_LAYER, tmp_path_factory.mktemp("model") / "one"))


@pytest.fixture(scope="module")
def trained(model: str) -> None:
    """A supervised run beside the model, on fsdp 4, with adapters that have moved."""
    folder, data = Path(model).with_name("run"), Path(model).with_name("rows.jsonl")
    rows = [{"prompt": f"why {i}", "completion": f" since {i % 3}"} for i in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.source={model}", f"data.path={data}", *SUPERVISED]
    ready = recipe.load("sft-smollm2", settings, recipe.SFTRecipe)
    read, _, origin = load_source(ready.model, model)
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), split_trainable(read)[1])
    with Checkpointer(folder / "checkpoints") as saves:
        saves.save(1, {"params": nnx.to_pure_dict(moved)}, {"model": origin})
    (folder / "recipe.yaml").write_text(recipe.to_yaml(ready))


@pytest.fixture(scope="module")
def nanochat(
    tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Path], problems: Path
) -> list[str]:
    """Words that train a nanochat of one layer in a folder that is named behind them."""
    source = write_checkpoint(tmp_path_factory.mktemp("nanochat"), "nanochat", layers=1)
    return ["train", "gsm8k-nanochat", *SETTINGS, f"--model.source={source}", f"--data.path={problems}", "--out"]


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory, model: str, trained: None, nanochat: list[str], host: Any
) -> tuple[Path, str]:
    """The folder in which the launcher started two processes of two devices each to `work`, and what it showed. It goes
    on behind the mistake, until process 1 gets a signal.
    """
    out = tmp_path_factory.mktemp("two")
    (out / "fragile.py").write_text(FRAGILE)
    program, words = [sys.executable, __file__, model, str(out)], [*nanochat, str(out / "run")]
    launch = ["launch", "local", "-n", "2", "--max-restarts", "1", "--logs", str(out / "logs"), *words]
    started = host.start(["-c", LAUNCHER, json.dumps(program), *launch], 1, out)
    return out, host.end(started, [STOPPED])[0]


@pytest.fixture(scope="module")
def two(launched: tuple[Path, str]) -> list[dict[str, Any]]:
    """What each process wrote down."""
    return [pickle.loads((launched[0] / str(number)).read_bytes()) for number in (0, 1)]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(two: list[dict[str, Any]], model: str, case: str) -> None:
    """One mesh of four devices, of one process or of two: samples and rewards exactly, advantages, losses and weights
    to 1e-5; and the same in both processes, bit for bit.
    """
    one, (first, second) = CASES[case](model), [found[case] for found in two]
    assert one["samples"] == first["samples"] == second["samples"]
    assert one.get("evaluation") == first.get("evaluation") == second.get("evaluation")
    for row, theirs, others in zip(one["metrics"], first["metrics"], second["metrics"], strict=True):
        assert alike(row, theirs), (row, theirs)
        assert abs(row["loss"] - theirs["loss"]) < 1e-5
        differ = [name for name in theirs if not np.array_equal(theirs[name], others[name], equal_nan=True)]
        assert not [name for name in differ if not name.startswith(OWN)]
    assert close(one["arrays"], first["arrays"], 1e-5)
    assert all(np.array_equal(first["arrays"][name], second["arrays"][name]) for name in one["arrays"])


@pytest.mark.slow
def test_samples_ahead_of_two_processes_are_trained_on_by_one(two: list[dict[str, Any]], model: str) -> None:
    """One process goes on behind the second step with what two have drawn for the third."""
    resumed = shutil.copytree(ahead_folder(model, 2), ahead_folder(model, 2).with_name("ahead-resumed"))
    for step in (3, 4):
        shutil.rmtree(resumed / "checkpoints" / f"{step:08}")
    learner = learner_ahead(model)
    learner.train(AHEAD, AHEAD[:2], out=resumed)
    assert learner.history.rows[2]["sampling/staleness"] == 1
    assert texts(resumed / "samples.jsonl") == two[0]["ahead"]["samples"]
    assert close(arrays(learner.cluster.state()), two[0]["ahead"]["arrays"], 1e-5)


@pytest.mark.slow
def test_evaluation_and_export_are_those_of_one_process(two: list[dict[str, Any]], model: str) -> None:
    """Accuracies, the loss to 1e-6, answers exactly, and all files byte for byte; only adapters that one device has
    merged differ, by one rounding. Process 0 alone tells it.
    """
    one, (first, second) = commands(model), [found["commands"] for found in two]
    shown = [[line for line in found["shown"].splitlines() if line.startswith(f"{model}: ")] for found in (one, first)]
    assert shown[0] == shown[1]
    assert "accuracy" in shown[0][0]
    assert abs(one["figures"]["loss"] - first["figures"]["loss"]) < 1e-6
    assert alike(one["figures"], first["figures"])
    assert first["figures"] == second["figures"]
    assert len(one["answers"]) == 3
    assert one["answers"] == first["answers"] == second["answers"]
    assert (one["codes"], first["codes"], second["codes"]) == ([0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 2])
    joint, alone = (
        {name: file for name, file in found["files"].items() if not name.startswith("from one device")}
        for found in (first, one)
    )
    assert {"hf/model.safetensors", "peft/adapter_model.safetensors"} < set(joint)
    assert joint == alone
    single, merged = (load(one["files"][f"{name}/model.safetensors"]) for name in ("from one device", "hf"))
    differ = {name for name in merged if not np.array_equal(single[name], merged[name])}
    assert all("proj" in name for name in differ)
    assert all(np.abs(single[n] - merged[n]).max() <= 2**-23 * np.abs(merged[n]).max() for n in differ)
    assert "run: loss" in first["shown"]
    assert first["shown"].count("all bytes are equal") == 2
    assert "a GGUF file is written by one process, and there are 2" in first["shown"]
    assert not [line for line in second["shown"].splitlines() if not line.startswith(("a GGUF", "  "))]


@pytest.mark.slow
def test_processes_listen_at_the_given_host_alone_and_read_no_program_that_others_compile(
    two: list[dict[str, Any]],
) -> None:
    """Trap: process 0 alone finds programs in the cache, and the others' collectives may wait for it."""
    assert [found["keeps"] for found in two] == [False] * 2
    assert keeps_programs()
    assert [found["listens"] for found in two] == [["127.0.0.1"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "told"),
    [("module", "mine.py is another file"), ("folder", "is not the folder of that path in process 0")],
)
def test_two_processes_that_are_not_alike_train_nothing(
    launched: tuple[Path, str], two: list[dict[str, Any]], differs: str, told: str
) -> None:
    """Process 1 has another reward, or the run folder on a disk of its own."""
    for code, shown in (found["refused"][differs] for found in two):
        assert code == 2
        assert told in shown
        assert "Traceback" not in shown
    assert list(launched[0].glob("**/metrics.jsonl")) == [launched[0] / "run" / "metrics.jsonl"]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_one_step(launched: tuple[Path, str]) -> None:
    """Process 1, which writes nothing, gets it in the third step: both end that step, it is saved, and both leave with
    75.
    """
    out, shown = launched
    for text in (shown, (out / "logs" / "process-1-restart-1.log").read_text()):
        assert "stopped by SIGTERM; step 3 is saved" in text
    assert [row["step"] for row in rows(out / "run" / "metrics.jsonl")] == [1, 2, 3]
    with Checkpointer(out / "run" / "checkpoints", read_only=True) as saves:
        assert saves.latest() == 3


@pytest.mark.slow
def test_nanochat_trains_in_two_processes_which_fail_together_and_go_on_together(
    tmp_path: Path, launched: tuple[Path, str], nanochat: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has its own questions, and the first gradient is that of one process. A reward function that breaks
    in process 1 ends process 0 too, which says why; the resumed run, which one process with two devices goes on with
    behind the signal, is that of one process that was never stopped.
    """
    (here, shown), straight = launched, tmp_path / "straight"
    broken = shutil.copytree(here / "run", tmp_path / "broken")
    monkeypatch.chdir(here)
    assert main([*nanochat, str(straight)]) == main(["train", "--resume", str(broken), "--mesh.fsdp=2"]) == 0
    assert "process 1 has failed" in shown
    assert "it broke" in shown
    assert "restart 1 of 1" in shown
    logs = [(here / "logs" / name).read_text() for name in ("process-1.log", "process-1-restart-1.log")]
    assert "the reward function" in logs[0]

    wanted, found = (first_gradient(folder) for folder in (straight, broken))
    assert len(wanted) == len(state(straight, 1)["params"])
    norm = rows(straight / "metrics.jsonl")[0]["grad_norm"]
    assert norm > 0.01
    assert np.sqrt(sum(np.sum(np.square(x)) for x in wanted.values())) == pytest.approx(norm, rel=1e-5)
    assert close(wanted, found, 1e-5)
    both = [set(row) for row in rows(here / "asked-alone-again")][1:4]
    own = [[set(row) for row in rows(here / f"asked-{n}")[1:2] + rows(here / f"asked-{n}-again")[:2]] for n in "01"]
    for step, one, other in zip(both, *own, strict=True):
        assert step == one | other
        assert len(one) == len(other) == 1
        assert one != other

    assert [shown.count(f"step {n}/4") for n in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert "step 3/4" not in logs[1]
    assert sorted(p.name for p in broken.iterdir()) == sorted(p.name for p in straight.iterdir())
    for name in ("samples.jsonl", "before.jsonl", "after.jsonl"):
        assert texts(straight / name) == texts(broken / name)
    metrics = [rows(folder / "metrics.jsonl") for folder in (straight, broken)]
    assert [row["step"] for row in metrics[1]] == [1, 2, 3, 4]
    assert all(alike(one, other) for one, other in zip(*metrics, strict=True))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (straight, broken)]
    assert all(alike(summaries[0][when], summaries[1][when]) for when in ("before", "after"))
    assert close(*(state(folder, 4)["params"] for folder in (straight, broken)), 1e-4)


def first_gradient(folder: Path) -> dict[str, np.ndarray]:
    """Each parameter's, from what its first moment was after the first update."""
    return {
        name: x / (1 - decay)
        for kind, decay in MOMENTA.items()
        for name, x in state(folder, 1)["opt_state"].items()
        if f".{kind}." in name and ".mu." in name
    }


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def texts(file: Path) -> list[Any]:
    return [(row["prompt"], row["text"], row["rewards"], row["finish"]) for row in rows(file)]


def state(folder: Path, step: int) -> dict[str, dict[str, np.ndarray]]:
    """What the checkpoint holds, part by part."""
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        return {part: arrays(tree) for part, tree in saves.restore(step)[0].items()}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)
    one_layer, place, *given = sys.argv[1:]
    if "--resume" not in given:
        command.parse = lambda words: partial(work, one_layer, Path(place), words)
    sys.exit(command.main(given))
