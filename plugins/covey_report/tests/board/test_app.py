"""The board answers this machine alone, changes nothing, and leads to no file outside its runs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Serve = Callable[[Path], Any]
CLOSED = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "


@pytest.fixture
def runs(make_run: Any, tmp_path: Path) -> Path:
    """A folder with the runs a and b."""
    for name in ("runs/a", "runs/b"):
        make_run(name, steps=4)
    return tmp_path / "runs"


def test_what_comes_from_elsewhere_is_refused(serve: Serve, runs: Path) -> None:
    board = serve(runs)
    assert board.ask("/runs").status == board.ask("/runs", host="localhost").status == 200
    for host in ("evil.example", "127.0.0.1.evil.example", ""):  # a name that another site lets point here
        assert board.ask("/runs", host=host).status == 400
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert board.ask("/runs", method).status == 405
    (runs.parent / "secret").mkdir()
    (runs / "a").rename(runs.parent / "secret" / "run")
    for name in ("../secret/run", "..%2fsecret%2frun", str(runs.parent / "secret/run"), "b/../../secret/run", "b/"):
        assert board.ask(f"/data?run={name}").status == 404
    for path in ("/../secret/run/recipe.yaml", "/b/recipe.yaml", "/..%2fsecret/run/recipe.yaml", "/board.html"):
        assert board.ask(path).status == 404
    assert board.ask("/data").status == board.ask("/data?" + "&".join(["run=b"] * 9)).status == 400
    assert board.ask("/points?run=b&after=x").status == board.ask("/points?run=b").status == 400


def test_nothing_in_an_answer_is_executed(serve: Serve, runs: Path, made: SimpleNamespace) -> None:
    hostile = [made.sample(9, 0, i, text, prompt=text) for i, text in enumerate(made.hostile)]
    made.write_lines(runs / "a" / "samples.jsonl", hostile)
    board = serve(runs)
    board.ask("/runs")
    for path in ("/", "/board.js", "/board.css", "/runs", "/data?run=a", "/completions?run=a&run=b&step=9"):
        answer = board.ask(path)
        assert answer.status == 200
        assert answer.headers["Content-Security-Policy"].startswith(CLOSED)
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    page = board.ask("/")
    assert " style=" not in page.text
    assert page.text.count("<script") == 2  # data, and one with an address
    shown = board.ask("/completions?run=a&run=b&step=9")
    assert "<" not in shown.text
    first, second = json.loads(shown.text)["runs"]
    assert first["steps"][0][2][0][2][0][0] == made.hostile[0]
    assert second["steps"] == []


def test_completions_are_those_of_a_step_and_are_found_while_they_are_written(
    serve: Serve, runs: Path, made: SimpleNamespace
) -> None:
    board = serve(runs)
    board.ask("/runs")
    newest = json.loads(board.ask("/completions?run=a&run=b").text)
    assert (newest["steps"], newest["step"]) == ([1, 2, 3, 4], 4)
    with (runs / "a" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(made.sample(5, 0, 0, "new")) + "\n" + json.dumps(made.sample(6, 0, 0, "half"))[:40])
    both = json.loads(board.ask("/completions?run=a&run=b").text)
    assert (both["steps"], both["step"]) == ([1, 2, 3, 4, 5], 4)  # the last step of both
    (only,) = json.loads(board.ask("/completions?run=a&step=5").text)["runs"]
    assert only["steps"][0][2][0][2][0][0] == "new"


def test_points_are_those_behind_a_step(serve: Serve, runs: Path) -> None:
    board = serve(runs)
    board.ask("/runs")
    whole = json.loads(board.ask("/data?run=a&run=b").text)
    assert [run["name"] for run in whole["runs"]] == ["a", "b"]
    assert [finding["run"] for finding in whole["findings"]] == sorted(finding["run"] for finding in whole["findings"])
    metrics = runs / "b" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 5, "reward": 0.25, "step_time": 2.0, "num_tokens": 10}\n{"step": 6, "rew')
    first, second = json.loads(board.ask("/points?run=a&after=4&run=b&after=4").text)["runs"]
    assert first["series"]["reward"] == [[], []]
    assert (second["series"]["reward"], second["steps"], second["seconds"]) == ([[5], [0.25]], [5, 5], 8.0)
    assert second["clocks"]["time"] == [[5], [8.0]]
    with metrics.open("a") as file:
        file.write('ard": 0.75}\n')
    (rest,) = json.loads(board.ask("/points?run=b&after=5").text)["runs"]
    assert rest["series"]["reward"] == [[6], [0.75]]


def test_a_run_that_becomes_something_else_is_told(serve: Serve, runs: Path) -> None:
    board = serve(runs)
    board.ask("/runs")
    (runs / "a" / "samples.jsonl").unlink()
    (runs / "a" / "samples.jsonl").symlink_to(runs / "b" / "samples.jsonl")
    answer = board.ask("/completions?run=a")
    assert (answer.status, "no link is followed" in answer.text) == (409, True)
