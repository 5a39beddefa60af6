"""Whole runs on a tiny random model: what the folder holds, that a resumed run is the run that was never stopped, what
uses a finished one.
"""

import functools
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.config.metrics import CLOCKS, RL, is_logged
from covey.config.schema import LoRAConfig
from covey.errors import DataError, NumbersError
from covey.models.loading import weights
from covey.models.lora import projections, with_lora
from covey.monitor.writer import MetricsWriter
from covey.run.settings import settings_of
from covey.train.checkpoint import Checkpointer
from tests.one_layer import ONE_LAYER

TESTS = Path(__file__).parents[1]
TINY = str(ONE_LAYER)
SETTINGS = [
    *(TESTS / "faults" / "small_run.txt").read_text().split(),
    "training.max_steps=6",
    "training.checkpoint_every_n_steps=3",
    "training.max_to_keep=9",
    "data.task=jsonl",
    f"data.path={TESTS / 'letters.jsonl'}",
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


def ready(*more: str) -> recipe.Recipe:
    return recipe.load("quickstart", [f"model.source={TINY}", *SETTINGS, *more])


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in found]


def weights_of(folder: Path, step: int = 6) -> list[np.ndarray]:
    with Checkpointer(folder / "checkpoints", read_only=True) as saves:
        state, _ = saves.restore(step)
    return [np.asarray(x) for x in jax.tree.leaves(state)]


class DiedError(Exception):
    pass


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and summary of the run of six steps that nobody stops; tests only read it."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return out, recipes.train(ready(), out)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stopping(step)`: the process dies when it is about to write that step's metrics."""
    write = MetricsWriter.step

    def arm(at: int) -> None:
        def step(self: MetricsWriter, row: dict[str, Any]) -> None:
            if row["step"] == at:
                raise DiedError
            write(self, row)

        monkeypatch.setattr(MetricsWriter, "step", step)

    return arm


def test_a_run_says_which_type_of_products_auto_chose_and_keeps_it_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_a_machine_with(flags: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}")
        monkeypatch.setattr("covey.models.dtypes.CPUINFO", tmp_path / "cpuinfo")

    folder, auto = tmp_path / "run", "model.compute_dtype=auto"
    on_a_machine_with("amx_bf16")
    recipes.train(ready(auto, "training.max_steps=1", "training.actor_optimizer.schedule=constant"), folder)
    assert "model.compute_dtype auto: this run computes in bfloat16" in capsys.readouterr().out
    on_a_machine_with("sse2")
    recipes.resume(folder, [auto, "training.max_steps=2"])
    assert "this run computes in bfloat16" in capsys.readouterr().out
    assert recipe.load(folder).model.compute_dtype == "bfloat16"
    assert len(rows(folder, "metrics.jsonl")) == 2


def assert_same(straight: Path, resumed: Path, step: int) -> None:
    """Parameters after this step, completions and metrics are the same, bit for bit."""
    assert rows(straight, "metrics.jsonl") == rows(resumed, "metrics.jsonl")
    assert (straight / "samples.jsonl").read_bytes() == (resumed / "samples.jsonl").read_bytes()
    for one, other in zip(weights_of(straight, step), weights_of(resumed, step), strict=True):
        assert np.array_equal(one, other)


def test_a_resumed_run_is_the_run_that_was_never_stopped(
    tmp_path: Path, straight: Any, stopping: Callable[[int], None]
) -> None:
    """6 steps straight = 3, death in step 5, and the rest. So a seed repeats too: the first 4 steps are those of two
    runs.
    """
    (unbroken, whole), broken = straight, tmp_path / "broken"
    stopping(5)
    with pytest.raises(DiedError):
        recipes.train(ready(), broken)
    stopping(0)
    assert [row["step"] for row in rows(broken, "metrics.jsonl")] == [1, 2, 3, 4]
    resumed = recipes.resume(broken)
    assert_same(unbroken, broken, 6)
    early, late = weights_of(unbroken, 3), weights_of(unbroken)
    assert not all(np.array_equal(one, other) for one, other in zip(early, late, strict=True))  # something was learnt
    assert (whole["before"], whole["after"]) == (resumed["before"], resumed["after"])


def on_an_adapter(folder: Path, *more: str) -> recipe.Recipe:
    """Two steps, each saved, on a new adapter in `folder` that changes what the base computes; with a KL."""
    adapter = with_lora(weights.load(TINY).model, LoRAConfig(rank=4))  # as another test, whose programs it uses
    for linear in projections(adapter).values():
        assert linear.lora is not None
        linear.lora.b[...] = np.random.RandomState(0).normal(size=linear.lora.b.shape, scale=0.05)
    write_peft = pytest.importorskip("covey_formats.peft").write_peft
    write_peft(adapter, 300, folder / "adapter", base="x")
    short = ("training.max_steps=2", "training.checkpoint_every_n_steps=1", "evaluation.prompts=2")
    loaded = (f"model.adapter={folder / 'adapter'}", "model.lora.rank=0")
    return ready(*loaded, "grpo.beta=0.1", "grpo.num_iterations=1", *short, *more)


def test_the_reference_of_a_run_on_an_adapter_is_that_adapter(tmp_path: Path, stopping: Callable[[int], None]) -> None:
    """The KL begins at 0, and a resumed run has the same reference: that of its beginning, not of its checkpoint. So it
    is the run that was never stopped, bit for bit.
    """
    settings = on_an_adapter(tmp_path)
    recipes.train(settings, tmp_path / "straight")
    stopping(2)
    with pytest.raises(DiedError):
        recipes.train(settings, tmp_path / "broken")
    stopping(0)
    recipes.resume(tmp_path / "broken")
    assert_same(tmp_path / "straight", tmp_path / "broken", 2)
    first, second = rows(tmp_path / "straight", "metrics.jsonl")
    assert abs(first["kl"]) < 1e-6 < second["kl"]


def test_the_folder_tells_the_run(straight: Any) -> None:
    out, summary = straight
    assert recipe.load(out) == ready()
    assert json.loads((out / "summary.json").read_text()) == summary
    assert {"accuracy", "format_accuracy", "samples"} <= summary["before"].keys() & summary["after"].keys()
    assert summary["steps"] == 6
    assert "sync" not in summary.get("programs", ())  # schedule and metrics are computed on the host
    metrics, samples = rows(out, "metrics.jsonl"), rows(out, "samples.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    names = {name for line in (out / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert [name for name in names if not is_logged(name, RL, ready().rewards)] == []
    assert len(samples) == 6 * 2 * 4
    first = [s for s in samples if s["step"] == 1]
    assert metrics[0]["reward"] == pytest.approx(np.mean([s["reward"] for s in first]))
    wanted = {"prompt", "turns", "text", "rewards", "advantage", "finish", "prompt_length", "length"}
    assert all(wanted <= s.keys() for s in samples)
    right = [row["correct"]["accuracy"] for row in rows(out, "after.jsonl")]
    assert np.mean(right) == summary["after"]["accuracy"]
    assert summary["environment"]["jax"] == jax.__version__
    assert len(summary["data_digest"]) == 16
    assert not find_spec("covey_report") or '"wrong"' in (out / "report.html").read_text(encoding="utf-8")
    # The sampler's log-probs are the trainer's, so that the ratio of the first update is 1 in truth too.
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in metrics)
    assert all(row["clip_ratio/region_mean"] == 0 for row in metrics)


def test_a_run_that_diverges_is_stopped_before_the_update_and_leaves_no_bad_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    wild = ("training.actor_optimizer.learning_rate=1e30", "training.actor_optimizer.max_grad_norm=0")
    with pytest.raises(NumbersError, match="not finite"):
        recipes.train(ready(*wild, "training.checkpoint_every_n_steps=1"), out)
    with Checkpointer(out / "checkpoints", read_only=True) as saves:
        last = saves.latest()
    assert last == len(rows(out, "metrics.jsonl"))
    assert all(np.isfinite(row["loss"]) for row in rows(out, "metrics.jsonl"))


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    """So that the corrected command can have the name. The trap: a prompt too long, found in the middle of a run."""
    out = tmp_path / "run"
    with pytest.raises(DataError, match="row 1 of the training data has"):
        recipes.train(ready("rollout.max_prompt_length=4"), out)
    assert not out.exists()


def test_checkpoints_come_when_several_updates_share_a_batch(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipes.train(ready("grpo.num_iterations=2", "training.max_steps=7"), out)
    with Checkpointer(out / "checkpoints", read_only=True) as saves:
        assert saves.steps() == [4, 6, 7]
    assert [row["step"] for row in rows(out, "metrics.jsonl")] == [2, 4, 6, 7]
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows(out, "metrics.jsonl"))


def test_another_seed_gives_another_run(tmp_path: Path, straight: Any) -> None:
    """Already in the first step, before any update."""
    recipes.train(ready("training.max_steps=1", "seed=1"), tmp_path / "run")
    texts = [
        [row["text"] for row in rows(folder, "samples.jsonl") if row["step"] == 1]
        for folder in (tmp_path / "run", straight[0])
    ]
    assert len(texts[0]) == len(texts[1])
    assert texts[0] != texts[1]


def test_a_run_of_an_older_schema_is_gone_on_with(
    tmp_path: Path, straight: Any, capsys: pytest.CaptureFixture[str], write_meta: Any
) -> None:
    """Its version knew only the settings that its recipe sets; each of the others is newer than the run."""
    out = shutil.copytree(straight[0], tmp_path / "run")
    saved = json.loads((out / "checkpoints" / "00000003" / "meta.json").read_text())["extra"]["settings"]
    newer = {name for name, value in settings_of(recipe.Recipe()).items() if saved[name] == value} - {"method"}
    assert {"data.train_fraction", "model.lora.alpha", "grpo.num_iterations"} <= newer
    make_older(out, newer, write_meta)
    capsys.readouterr()
    assert recipes.resume(out)["steps"] == 6
    assert "was saved" not in capsys.readouterr().out


def make_older(out: Path, newer: set[str], write_meta: Any) -> None:
    """Makes a run of two checkpoints one that stopped at the first, in a version that did not know these settings."""
    saved, last = sorted(out.glob("checkpoints/0*"))
    shutil.rmtree(last)
    meta = json.loads((saved / "meta.json").read_text())
    for name in newer:
        del meta["extra"]["settings"][name]
    write_meta(saved, json.dumps(meta))
    (out / "recipe.yaml").write_text(without(newer, (out / "recipe.yaml").read_text()))


def without(names: set[str], text: str) -> str:
    """A recipe without these settings."""
    tree = yaml.safe_load(text)
    for name in names:
        *sections, last = name.split(".")
        section = functools.reduce(lambda at, key: at[key], sections, tree)
        section.pop(last, None)
    return recipe.strict_yaml.dump(tree)


def test_a_finished_run_completes_a_prompt(straight: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("covey_shell")
    assert main(["generate", str(straight[0]), "2+3?", "--n", "2"]) == 0
    assert "--- 2 of 2" in capsys.readouterr().out


def test_the_commands_use_a_finished_run(straight: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(straight[0])
    assert main(["eval", out]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["train", "--resume", out]) == 0
