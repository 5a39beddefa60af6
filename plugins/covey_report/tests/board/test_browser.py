"""The board in headless Chromium: 50 runs, two of which go on, are listed, chosen, compared and followed."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.train.storage import take_lock
from plugins.covey_report.tests.conftest import PATIENCE, rl_metrics
from plugins.covey_report.tests.test_browser import DRAWN, chart, violations, wait_for_count

pytestmark = pytest.mark.slow

LIVE = ("run-07", "run-31")
CUT_HINTS = """inputs => inputs.filter((input) => {
  const style = getComputedStyle(input), context = document.createElement('canvas').getContext('2d');
  context.font = style.font;
  const room = input.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return context.measureText(input.placeholder).width > room - 12; // the button that clears it
}).map((input) => input.placeholder)"""
"""Script that returns the placeholders for which their inputs have no room."""


class Growing:
    """A folder of 50 runs, of which two go on: `grow` adds a step to them."""

    def __init__(self, folder: Path, made: SimpleNamespace):
        self.folder, self._made, self._step, self._noise = folder, made, 8, random.Random(0)

    def grow(self) -> int:
        """Add a step with completions, one of which is hostile; return its number."""
        self._step += 1
        texts = ["The same answer", self._made.hostile[1]]
        for name in LIVE:
            with (self.folder / name / "samples.jsonl").open("a") as file:
                samples = [self._made.sample(self._step, 0, i, text) for i, text in enumerate(texts)]
                file.writelines(json.dumps(sample) + "\n" for sample in samples)
            with (self.folder / name / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(rl_metrics(self._step, 20, self._noise)) + "\n")
        return self._step


@pytest.fixture
def growing(make_run: Any, made: SimpleNamespace, tmp_path: Path) -> Iterator[Growing]:
    first = make_run("runs/run-00", steps=8)
    for number in range(1, 50):
        shutil.copytree(first, tmp_path / "runs" / f"run-{number:02}")
    with ExitStack() as locks:
        for name in LIVE:
            (tmp_path / "runs" / name / "summary.json").unlink()
            locks.enter_context(take_lock(tmp_path / "runs" / name / "checkpoints"))
        (tmp_path / "runs" / "run-02" / "heartbeat.json").write_text('{"ended": "failed", "reason": "<b>an error"}')
        yield Growing(tmp_path / "runs", made)


def test_fifty_runs_are_listed_compared_and_followed(
    browser: Any, growing: Growing, serve: Callable[[Path], Any]
) -> None:
    from playwright.sync_api import expect  # late: machines without it skip these tests

    expect.set_options(timeout=PATIENCE)
    board = serve(growing.folder)
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    said: list[str] = []
    asked: list[str] = []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(board.url)
    items = page.locator(".runs > li")

    # The list: those that go on first, with what was found, and a filter.
    wait_for_count(items, 50)
    expect(page.locator(".runs")).not_to_contain_text("reading")
    assert [text.split("\n")[0] for text in items.all_inner_texts()[:3]] == [*LIVE, "run-02"]
    assert "running" in items.first.inner_text()
    assert "failed 8 of 8 steps" in " ".join(items.nth(2).inner_text().split())
    assert "<b>an error" in items.nth(2).inner_text()
    assert "held-out 33.3\u202f% → 83.3\u202f%" in items.nth(3).inner_text()
    page.get_by_label("State").select_option("ended")
    wait_for_count(items, 1)
    page.get_by_label("State").select_option("")
    page.locator("#runs").get_by_label("Find").fill("run-3")
    wait_for_count(items, 10)
    page.locator("#runs").get_by_label("Find").fill("")

    # Two runs that go on, over each other; what they write appears.
    for name in LIVE:
        page.get_by_label(f"Show {name}").check()
    reward = chart(page, "Reward")
    expect(reward.locator(".swatch")).to_have_count(2)
    reward.scroll_into_view_if_needed()
    reward.locator("canvas").wait_for()
    assert reward.evaluate(DRAWN) > 10
    assert reward.evaluate("figure => figure.chart.u.scales.x.max") == 8
    step = growing.grow()
    expect(page.locator(".runs > li").first).to_contain_text(f"running {step} steps")
    expect(page.locator("#overview tbody tr").first.locator("td").nth(-3)).to_have_text(str(step))  # after the charts
    assert reward.evaluate("figure => figure.chart.u.scales.x.max") == step
    page.get_by_label("Along").select_option("tokens")
    assert reward.evaluate("figure => figure.chart.u.scales.x.max") > step

    # Completions of a prompt side by side: texts of models are inert.
    page.get_by_role("button", name="Newest step").click()
    groups = page.locator("#completions .group")
    expect(groups.first).to_contain_text(f"Step {step}, group 0")
    wait_for_count(groups, 2)
    expect(groups.nth(1).locator(".sample").nth(1)).to_contain_text("<img src=x onerror")
    first, second = (groups.nth(i).bounding_box() for i in range(2))
    assert first["y"] == second["y"]
    assert first["x"] < second["x"]
    page.locator("#diagnosis").get_by_role("button", name="Completions of step").first.click()
    expect(groups.first).not_to_contain_text(f"Step {step},")
    page.locator("#completions").get_by_label("Search").fill("no such text")
    expect(page.locator("#completions")).to_contain_text("No completion of this step has this text.")
    assert page.evaluate("window.broken") is None

    # In the dark, on a phone, for everybody; and without a word or a request to elsewhere.
    for scheme, width in (("dark", 1280), ("light", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("input[type=search]").evaluate_all(CUT_HINTS) == []
        assert "\n".join(violations(page)) == ""
    shutil.rmtree(growing.folder / LIVE[0])
    expect(page.get_by_label(f"Show {LIVE[0]}")).to_have_count(0)
    expect(reward.locator(".swatch")).to_have_count(0)  # one run is left, and needs no colour
    assert said == []
    assert {url for url in asked if not url.startswith(board.url)} == set()
    page.context.close()
