"""Run folders as plain data, whatever is in them."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from covey.config import recipe
from covey.errors import CoveyError, RecipeError
from covey_report.page import build_page
from covey_report.results import settings_table
from covey_report.run_data import Series, built_in_settings, extremes, read_run, reduce_series


def test_a_run_is_read_as_it_was_written(make_run: Any) -> None:
    run = read_run(make_run(steps=3))
    assert (run.name, run.method, run.state, list(run.steps)) == ("run", "rl", "finished", [1, 2, 3])
    assert list(run.seconds) == [1.5, 3.0, 4.5]
    assert run.settings["training.max_steps"] == 3
    assert [list(values) for values in vars(run.series["a/new/metric"]).values()] == [[1, 2, 3], [1.0, 2.0, 3.0]]
    assert len(run.before) == len(run.after) == 6
    assert run.unreadable == {}


def test_a_run_that_has_just_begun_is_read(make_run: Any) -> None:
    folder = make_run(steps=2)
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "before.jsonl", "after.jsonl"):
        (folder / name).unlink()
    (folder / "heartbeat.json").write_text('{"ended": "stopped", "reason": "SIGTERM", "now": 1.0}')
    run = read_run(folder)
    assert (run.state, run.status, list(run.steps), run.series) == ("not started", "stopped", [], {})


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoveyError, match="no run folder"):
        read_run(tmp_path)


def test_lines_of_another_form_are_left_out(make_run: Any) -> None:
    folder = make_run(steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnonsense\n{"step": "one", "reward": 1}\n{"step": 2, "reward": 7}\n' + "[" * 100_000 + "\n")
        file.write('{"step": 4, "reward": NaN, "kl": "high", "loss": 1e999}\n')
        file.write(f'{{"step": 5, "reward": {"9" * 400}}}\n')
    run = read_run(folder)
    assert list(run.series["reward"].steps)[:3] == list(run.steps)[:3] == [1, 2, 3]
    assert not {name for name, one in run.series.items() if len(one.steps) > 3} & {"reward", "kl", "loss"}


def test_an_unfinished_last_line_is_not_counted(make_run: Any) -> None:
    folder = make_run(steps=3)
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + 'x\n{"step": 4, "rew')
    run = read_run(folder)
    assert (len(run.steps), run.unreadable) == (3, {"metrics.jsonl": 1})


def test_reduction_keeps_spikes_ends_and_true_rows() -> None:
    values = [0.0] * 10_000
    values[4321], values[8765] = 5.0, -3.0
    reduced = reduce_series(Series(range(1, 10_001), values), 200)
    points = dict(zip(reduced.steps, reduced.values, strict=True))
    assert (points[4322], points[8766]) == (5.0, -3.0)
    assert {1, 10_000} <= points.keys()
    assert len(points) <= 200
    assert list(reduced.steps) == sorted(reduced.steps)
    assert extremes([2.0], 1) == [0]


def test_settings_are_compared_with_defaults_and_with_each_other(make_run: Any) -> None:
    runs = [read_run(make_run(name, 3, settings=["--seed", seed])) for name, seed in (("a", "0"), ("b", "7"))]
    rows = {row["name"]: row for row in settings_table(runs)}
    assert (rows["seed"]["values"], rows["seed"]["default"]) == (["0", "7"], "0")
    assert rows["training.max_steps"]["changed"]
    assert rows["training.max_steps"]["built_in"] == "16"
    assert {name for name, row in rows.items() if row["edited"]} == {"training.max_steps", "seed"}
    assert not rows["description"]["changed"]
    assert {name for name, row in rows.items() if row["differs"]} == {"seed"}


@pytest.mark.parametrize("name", recipe.names(recipe.AnyRecipe))
def test_settings_of_every_built_in_recipe_can_be_read(name: str) -> None:
    """The trap: one that needs a path of the user's is no recipe that can be loaded alone."""
    values = built_in_settings(name)
    assert values["name"] == name
    with contextlib.suppress(RecipeError):
        assert values == recipe.flatten(asdict(recipe.load_any(name)))


def test_settings_of_another_version_are_shown(make_run: Any) -> None:
    folder = make_run()
    text = (folder / "recipe.yaml").read_text().replace("seed: 0\n", "from_the_future: [1, 2]\n", 1)
    (folder / "recipe.yaml").write_text(text)
    rows = {row["name"]: row for row in settings_table([read_run(folder)])}
    assert (rows["from_the_future"]["values"], rows["from_the_future"]["default"]) == (["[1, 2]"], None)


def test_a_summary_of_another_form_is_left_out(make_run: Any) -> None:
    for text in ("[]", "{", json.dumps({"before": 3, "after": ["x"], "seconds": "long"})):
        folder = make_run(f"run{len(text)}", 2)
        (folder / "summary.json").write_text(text)
        read_run(folder)


FIELDS = ["prompt", "turns", "text", "rewards", "reward", "advantage", "finish", "length", "correct"]
FIELDS += ["step_time", "eval/accuracy", "loss", "messages", "turn_ends", "texts", "change", "sampled"]
WORDS = st.sampled_from([*FIELDS, "accuracy", "before", "after", "seconds", "samples", "error", "user", "user: x"])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=20,
)
SMALL = st.integers(0, 3)
LINES = st.fixed_dictionaries(
    {"step": SMALL | ANY_JSON, "group": SMALL | ANY_JSON}, optional=dict.fromkeys(FIELDS, ANY_JSON)
)


@pytest.mark.slow
@example(lines=[{"step": 0, "group": 1.79765e308}], summary=None)
@given(lines=st.lists(LINES, max_size=6), summary=ANY_JSON)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_report_is_made_of_anything(tmp_path: Path, lines: list[Any], summary: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\ngrpo: [1]\nmodel: null\n")
    for name in ("metrics", "samples", "tokens", "before", "after"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert build_page([read_run(tmp_path)]).startswith(b"<!doctype html>")
