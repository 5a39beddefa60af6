"""`python -m benchmarks.board FOLDER [--runs N] [--rows N]`: measure `covey board` in a browser while two runs grow.

Makes a folder of N runs (50) with N rows (2,000) of every metric that reinforcement learning may log. Measured are the
first paint and the time until the list stands there, of a server that has just started and of one that has read
everything; seconds of the processor and memory that reading takes; and seconds until the charts of two runs stand
there. Screenshots, light, dark and of a phone's width, are written to the folder. Needs the extra `dev` and Chromium.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import machine
from covey.config import recipe
from covey.config.metrics import TABLE
from covey.train.storage import take_lock

NAMES = [metric.name for metric in TABLE if "rl" in metric.methods and metric.name != "step" and "<" not in metric.name]
LIVE = 2
"""Number of runs that grow, by a step each second."""
LISTED = """new MutationObserver((_, observer) => {
  if (!document.querySelector('.runs > li')) return;
  window.listed = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });"""
"""Script that notes when the list stands there, in milliseconds since the page was asked for."""
SCREENS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True},
}


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs, measure, and print the results as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.board", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--runs", type=int, default=50, metavar="N")
    parser.add_argument("--rows", type=int, default=2000, metavar="N")
    asked = parser.parse_args(words)
    asked.folder.mkdir()
    make_runs(asked.folder / "runs", asked.runs, asked.rows)
    with growing(asked.folder / "runs", asked.rows), served(asked.folder / "runs") as (url, server):
        figures = measure(url, server, asked.folder)
    print(json.dumps({"part": "board", "runs": asked.runs, "rows": asked.rows, **figures, "machine": machine()}))
    return 0


def make_runs(folder: Path, runs: int, rows: int) -> None:
    """Write finished runs; the first `LIVE` ones have half of their rows and go on."""
    first = folder / "run-000"
    first.mkdir(parents=True)
    (first / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart", ["--max-steps", str(rows)])))
    lines = [metrics_line(step) for step in range(1, rows + 1)]
    (first / "metrics.jsonl").write_text("".join(lines))
    (first / "summary.json").write_text(json.dumps({"before": {"accuracy": 0.3}, "after": {"accuracy": 0.5}}))
    for number in range(1, runs):
        shutil.copytree(first, folder / f"run-{number:03}")
    for number in range(LIVE):
        (folder / f"run-{number:03}" / "summary.json").unlink()
        (folder / f"run-{number:03}" / "metrics.jsonl").write_text("".join(lines[: rows // 2]))


def metrics_line(step: int) -> str:
    """Return a row of `metrics.jsonl`."""
    values = np.random.default_rng(step).normal(0.5, 0.1, len(NAMES)).tolist()
    return json.dumps({"step": step, **dict(zip(NAMES, values, strict=True)), "step_time": 1.5}) + "\n"


def sample_lines(step: int) -> str:
    """Return the completions of a group."""
    group = {"step": step, "group": 0, "prompt": f"Question {step}?", "rewards": {"right": 1.0}, "advantage": 0.0}
    return "".join(json.dumps(group | {"sample": i, "text": f"{step} {i}", "reward": 1.0}) + "\n" for i in range(4))


@contextmanager
def growing(folder: Path, rows: int) -> Iterator[None]:
    """Hold the locks of the runs that go on, and add a step to them each second."""
    ended, live = threading.Event(), [folder / f"run-{number:03}" for number in range(LIVE)]

    def grow() -> None:
        for step in range(rows // 2 + 1, 10**9):
            for run in live:
                with (run / "samples.jsonl").open("a") as file:
                    file.write(sample_lines(step))
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(metrics_line(step))
            if ended.wait(1):
                return

    with ExitStack() as locks:
        for run in live:
            locks.enter_context(take_lock(run / "checkpoints"))
        thread = threading.Thread(target=grow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the runs from a process; yield the address and the process."""
    command = [sys.executable, "-m", "covey", "board", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "it is a pipe"
        try:
            yield re.findall(r"http://\S+", server.stdout.readline())[0], psutil.Process(server.pid)
        finally:
            server.terminate()


def measure(url: str, server: psutil.Process, out: Path) -> dict[str, Any]:
    """Look at the board in a browser; return the figures."""
    from playwright.sync_api import expect, sync_playwright  # late: --help needs no browser

    expect.set_options(timeout=600_000)
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    requests: list[str] = []
    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox)

        def opened(address: str, **options: Any) -> Any:
            page = browser.new_context(**(SCREENS["light"] | options)).new_page()
            page.add_init_script(LISTED)
            page.set_default_timeout(600_000)
            page.on("console", lambda message: said.append(message.text))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(address)
            page.locator(".runs > li").first.wait_for()
            return page

        memory, used = server.memory_info().rss, sum(server.cpu_times()[:2])
        page = opened(url)
        figures = {"started": painted(page)}
        expect(page.locator(".runs")).not_to_contain_text("reading")
        figures["reading"] = {
            "cpu_seconds": round(sum(server.cpu_times()[:2]) - used, 1),
            "memory_mb": round((server.memory_info().rss - memory) / 1e6),
        }
        figures["read"] = painted(opened(url))
        for number in range(LIVE):
            page.get_by_label(f"Show run-{number:03}").check()
        start = time.perf_counter()
        expect(page.locator("figure.chart .swatch").first).to_be_visible()
        figures["charts_seconds"] = round(time.perf_counter() - start, 2)
        for name, options in SCREENS.items():
            page = opened(f"{url}#{'&'.join(f'run=run-{number:03}' for number in range(LIVE))}", **options)
            page.locator(".beside .group").first.wait_for()
            page.locator("#curves > .body > .grid figure.chart").last.scroll_into_view_if_needed()
            page.screenshot(path=out / f"{name}.png", full_page=True)
        elsewhere = [request for request in requests if not request.startswith(url)]
        return figures | {"requests": len(requests), "elsewhere": elsewhere, "console": said}


def painted(page: Any) -> dict[str, int]:
    """Return the milliseconds from the request of the page to its first paint and to the list."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return {"first_paint_ms": round(page.evaluate(paint)), "list_ms": round(page.evaluate("window.listed"))}


if __name__ == "__main__":
    sys.exit(main())
