"""The oracle is right, bad adapters are told in the table, and what they say is escaped."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from covey.cli import main as cli
from covey.errors import CoveyError
from covey_conformance import results, trainers
from covey_conformance.bench import SETTINGS, Bench
from covey_conformance.checks import CHECKS
from covey_conformance.oracle import Model, step_gradient
from covey_conformance.results import DIFFERS, FAILED, NOT_APPLICABLE, judge
from covey_conformance.trainers import make_trainer

ALGORITHMS = {
    "grpo": {"beta": 0.5},
    "grpo, k1": {"beta": 0.5, "kl": "k1"},
    "grpo, k2": {"beta": 0.5, "kl": "k2"},
    "dr_grpo": {"algorithm": "dr_grpo", "temperature": 0.7},
    "dapo": {"algorithm": "dapo", "mask_truncated": True},
    "gspo": {"algorithm": "gspo", "epsilon": 0.03},
}
ADAPTER = """
import os, time, numpy as np
VERSION = "<b>2</b>"
REASONS = {{"gradient": "<script>alert(1)</script> \\x1b[31m"}}
def load(folder, settings):
    if settings["algorithm"] == "gspo":
        raise NotImplementedError("no <i>sequences</i>")
    with np.load(folder + "/../weights.npz") as file:
        return dict(file)
def gradient(trainer, rows):
    print("noise")
    {body}
"""
BODIES = {
    "return {**trainer, 'lm_head.weight': trainer['lm_head.weight'].T}": "weight of shape (32, 64), wanted (64, 32)",
    "return {name: w * np.nan for name, w in trainer.items()}": "numbers that are NaN or infinite",
    "return {'a': np.zeros(2)}": "gradient returned other names than the model has: a, lm_head.weight",
    "return None": "gradient returned other names",
    "return object()": "TypeError: a object is no number",
    "raise KeyError('the <row>')": "KeyError: 'the <row>' (bad.py:12)",
    "time.sleep(60)": "the call took longer than 2 s, and its process was killed",
    "os._exit(3)": "the process ended: exit code 3",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("bench"))
    np.savez(bench.folder / "weights.npz", **bench.weights)
    return bench


@pytest.fixture
def trainer(bench, tmp_path):
    """`trainer(body)`: a trainer whose adapter has this body of `gradient`."""
    made = []

    def trainer(body):
        (tmp_path / "bad.py").write_text(ADAPTER.format(body=body))
        made.append(make_trainer(str(tmp_path / "bad.py"), tmp_path))
        made[-1].seconds = 2.0
        return made[-1]

    yield trainer
    for one in made:
        one.close()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_oracle_gradient_is_that_of_finite_differences(bench, name):
    """Along a random direction, for the loss as its formula says it."""
    settings = {**SETTINGS, **ALGORITHMS[name]}
    rng = np.random.default_rng(1)
    direction = {name: rng.normal(size=w.shape) for name, w in bench.weights.items()}
    losses = [
        loss({name: w + step * direction[name] for name, w in bench.weights.items()}, bench.rows, settings)
        for step in (1e-6, -1e-6)
    ]
    gradient = step_gradient(bench.weights, bench.rows, settings)
    slope = sum(float((gradient[name] * d).sum()) for name, d in direction.items())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def loss(weights, rows, s):
    """The loss of a step by its formula."""
    model = Model(weights)
    per_row, counts = [], []
    for row in rows:
        mask = np.ones(len(row["completion"])) * (row["finished"] or not s["mask_truncated"])
        logps = model.logps(row, s["temperature"])[0]
        log_ratio = logps - row["old_logps"]
        if s["algorithm"] == "gspo":
            log_ratio = np.full_like(log_ratio, log_ratio.mean())
        w, a, d = np.exp(log_ratio), row["advantage"], row["ref_logps"] - logps
        kl = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[s["kl"]]
        terms = -np.minimum(w * a, np.clip(w, 1 - s["epsilon"], 1 + s["epsilon_high"]) * a) + s["beta"] * kl
        per_row.append((terms * mask).sum())
        counts.append(mask.sum())
    if s["algorithm"] == "dr_grpo":
        return sum(per_row) / (len(rows) * s["max_tokens"])
    return sum(per_row) / sum(counts) if s["algorithm"] == "dapo" else np.mean(np.divide(per_row, counts))


def test_no_ratio_lies_near_a_bound_of_its_clip(bench):
    """A rounding must not decide whether a token is clipped; and some are on either side."""
    model = Model(bench.weights)
    log_ratios = [model.logps(row)[0] - row["old_logps"] for row in bench.rows]
    ratios = np.exp(np.concatenate(log_ratios))
    assert min(np.abs(ratios - bound).min() for bound in (0.8, 1.2, 1.28)) > 1e-4
    assert 3 < (ratios < 0.8).sum() < len(ratios) / 2
    assert 3 < (ratios > 1.28).sum() < len(ratios) / 2
    of_rows = np.exp([difference.mean() for difference in log_ratios])
    assert min(np.abs(of_rows - bound).min() for bound in (0.97, 1.04)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_what_an_adapter_does_wrong_stands_in_its_cell(bench, trainer, body):
    cell = judge(CHECKS["gradient/grpo"], bench, trainer(body))
    assert cell.verdict == FAILED
    assert BODIES[body] in cell.reason
    assert cell.number is None


@pytest.mark.slow
def test_a_process_that_was_killed_is_started_again(bench, trainer):
    one = trainer("time.sleep(60)")
    assert judge(CHECKS["gradient/grpo"], bench, one).verdict == FAILED
    assert judge(CHECKS["gradient/gspo"], bench, one).reason.startswith("no <i>sequences</i>")


def test_what_an_adapter_lacks_or_cannot_do_does_not_apply(bench, trainer):
    one = trainer("return trainer")
    for check, reason in (("optimizer/adamw", "no function step"), ("gradient/gspo", "no <i>sequences</i>")):
        cell = judge(CHECKS[check], bench, one)
        assert cell.verdict == NOT_APPLICABLE
        assert reason in cell.reason


def test_texts_of_adapters_are_escaped(bench, trainer, tmp_path, capsys):
    one = trainer("return trainer")
    check = CHECKS["gradient/grpo"]
    cell = judge(check, bench, one)
    assert cell.verdict == DIFFERS
    data = results.table_data([check], [one], {check.name: {one.name: cell}})
    size = results.write_page(tmp_path / "page.html", data)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert size == len(page.encode())
    assert "<script" not in page
    assert "<b>2" not in page
    assert "&lt;b&gt;2&lt;/b&gt;" in page
    assert "\x1b" not in page
    assert f"--against {tmp_path}/bad.py --only gradient/grpo" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "trll"], "there is no trainer 'trll'"),
        (["--against", "none.py"], "there is no trainer 'none.py'"),
        (["--python", "nowhere/python"], "--python is 'nowhere/python'"),
        (["--only", "gradient/gpro"], "did you mean 'gradient/grpo'?"),
        (["--html", "nowhere/page.html"], "there is no such folder"),
    ],
)
def test_mistakes_of_the_command(words, message, capsys):
    assert cli.main(["conformance", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_trainer_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "ROOT", tmp_path)
    with pytest.raises(CoveyError, match="trl is not installed") as error:
        make_trainer("trl", tmp_path)
    assert "make conformance" in error.value.fix


def test_another_version_than_the_adapter_was_written_for_is_told():
    assert (
        results.heading({"name": "trl", "version": "1.17.0", "written_for": "1.16.0"}) == "trl 1.17.0 (adapter: 1.16.0)"
    )
    assert results.heading({"name": "trl", "version": "1.16.0", "written_for": "1.16.0"}) == "trl 1.16.0"


def test_the_worker_needs_no_covey():
    """It runs in environments that do not have it."""
    names = {name.partition(".")[0] for name in sys.stdlib_module_names} | {"numpy"}
    source = (trainers.HERE / "worker.py").read_text("utf-8")
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    }
    assert imported <= names


def test_the_page_has_the_table_of_the_results():
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "conformance_table.py"))
    assert tool["text"]() == tool["PAGE"].read_text("utf-8"), "run tools/conformance_table.py"
