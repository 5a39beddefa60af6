"""Reports in headless Chromium: quiet, drawn, usable by mouse, key and screen reader, and inert to hostile texts."""

import json
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey_report.data_page import write_data_page
from covey_report.page import write_report

pytestmark = pytest.mark.slow

AXE = (Path(__file__).parent / "axe-core-4.14.1.min.js").read_text(encoding="utf-8")
DRAWN = """figure => {
  const canvas = figure.querySelector('canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) colours.add(data.slice(i, i + 3).join());
  return colours.size;
}"""
"""Number of colours on the canvas of a chart."""
MARKED = """figure => {
  const { bbox: { top, height }, ctx } = figure.chart.u, below = Math.round(top + height) + 4;
  const { data } = ctx.getImageData(0, below, ctx.canvas.width, 14);
  let red = 0;
  for (let i = 0; i < data.length; i += 4) red += data[i] > 150 && data[i + 1] < 80 && data[i + 3] > 200;
  return red;
}"""
"""Number of pixels in the colour of findings under the plot of a chart."""
RANGE = "figure => [figure.chart.u.scales.x.min, figure.chart.u.scales.x.max]"
Open = Callable[..., Any]


def chart(page: Any, title: str) -> Any:
    return page.locator("figure.chart").filter(has=page.locator(".chart-title", has_text=title)).first


def wait_for_count(elements: Any, count: int) -> None:
    """Wait until there are so many elements."""
    from playwright.sync_api import expect  # late: machines without it skip these tests

    expect(elements).to_have_count(count, timeout=90_000)


def wait_for_text(element: Any, text: str | re.Pattern[str]) -> None:
    """Wait until `element` contains `text`, which it gets by an event behind the one that the test has caused."""
    from playwright.sync_api import expect

    expect(element).to_contain_text(text, timeout=90_000)


def violations(page: Any) -> list[str]:
    page.evaluate(AXE)
    found = page.evaluate("axe.run({ resultTypes: ['violations'] }).then(found => found.violations)")
    return [f"{one['id']}: {node['html'][:150]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("mode", ["dark", "phone"])
def test_a_long_run_is_drawn_lazily_and_fits_the_screen(
    opened: Open, browser: Any, long_report: Path, mode: str
) -> None:
    options = browser.phone if mode == "phone" else {"color_scheme": mode}
    page = opened(long_report, **options)
    page.locator("#recipe").scroll_into_view_if_needed()
    main = page.locator("#curves > .body > .grid figure.chart")
    assert main.count() == 4
    for i in range(4):
        main.nth(i).scroll_into_view_if_needed()
        main.nth(i).locator("canvas").wait_for()
        assert main.nth(i).evaluate(DRAWN) > 10  # text, grid, line and band, with their soft edges
    assert page.locator("canvas").count() == 4 < page.locator("figure.chart").count()
    assert page.evaluate("document.querySelectorAll('*').length") < 4000
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 19, 21)") == (mode == "dark")


@pytest.mark.parametrize(
    ("name", "first", "charts"),
    [("quickstart", "Nothing wrong was found", 20), ("ppo", "The reward did not improve", 14)],
)
def test_real_runs_are_drawn_with_every_chart(
    opened: Open, made: SimpleNamespace, tmp_path: Path, name: str, first: str, charts: int
) -> None:
    """A part of a quickstart, and a recorded run of PPO."""
    folder = Path(__file__).parent / "quickstart" if name == "quickstart" else made.recorded_run(tmp_path / name, name)
    write_report(tmp_path / "report.html", [folder])
    page = opened(tmp_path / "report.html")
    assert first in page.locator("#diagnosis .findings > li").first.inner_text()
    verdict = page.locator("#verdicts").inner_text()
    assert verdict == ("Sound" if name == "quickstart" else f"{first}, and no rule says why")
    page.locator("details.charts").evaluate_all("all => all.forEach(one => { one.open = true; })")
    figures = page.locator("figure.chart")
    assert figures.count() >= charts
    page.evaluate("document.querySelectorAll('figure.chart').forEach(one => one.chart.draw())")
    assert min(figures.evaluate_all(f"all => all.map({DRAWN})")) > 5  # text, grid and line
    if name == "quickstart":
        flat = chart(page, "Probability kept by truncation")
        assert flat.locator(".value").inner_text() == "100\u202f%, constant"
        assert flat.evaluate("one => [one.chart.u.scales.y.min, one.chart.u.scales.y.max]") == [0, 2]
        labels = "one => [one.chart.u.axes[1]._size, ...one.chart.u.axes[1]._values.map(text => text.length)]"
        width, *lengths = chart(page, "Probability ratio").evaluate(labels)
        assert width >= 6 * max(lengths) + 12
        parts = """({chart: c}) => c.lines.map((line, i) =>
            [line.values.at(-1), c.u.data[c.columns[i]].at(-1), parseFloat(c.values[i].textContent)])"""
        seconds, tops, shown = map(list, zip(*chart(page, "Time by phase").evaluate(parts), strict=True))
        assert tops == pytest.approx(list(accumulate(seconds)))
        assert shown[3] == pytest.approx(seconds[3], rel=0.01)
        page.locator("#completions").get_by_label("Step", exact=True).select_option("all")
        page.locator("#completions").get_by_label("Search").fill("lions")
        wait_for_count(page.locator("#completions .group"), 1)
    page.get_by_label("Find").fill("grad_norm")
    assert page.locator("figure.chart:visible").count() == 1


def test_charts_zoom_and_show_values_together(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    one, other = chart(page, "Reward"), chart(page, "Entropy")
    page.locator("details.charts", has_text="Policy").locator("summary").first.click()
    other.scroll_into_view_if_needed()
    other.locator("canvas").wait_for()
    whole = one.evaluate(RANGE)
    assert whole == [0, 2000]
    one.scroll_into_view_if_needed()
    box = one.locator(".u-over").bounding_box()
    middle, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    last = other.locator(".value").inner_text()
    page.mouse.move(middle, y)
    shown = page.locator("#position").inner_text()
    assert int(shown.removeprefix("step ").replace(",", "")) == pytest.approx(1000, abs=10)
    at_middle = other.locator(".value").inner_text()
    assert at_middle != last
    page.mouse.down()
    page.mouse.move(middle + box["width"] / 4, y, steps=4)
    page.mouse.up()
    zoomed = one.evaluate(RANGE)
    assert zoomed == other.evaluate(RANGE) == pytest.approx([1000, 1500], abs=10)
    page.mouse.dblclick(middle, y)
    assert one.evaluate(RANGE) == other.evaluate(RANGE) == whole


def test_charts_are_read_by_keys(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    plot = chart(page, "Reward").locator(".plot")
    assert "Line chart of Reward" in plot.get_attribute("aria-label")
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#spoken").inner_text().startswith("step 1,999: ")
    page.keyboard.press("+")
    low, high = chart(page, "Reward").evaluate(RANGE)
    assert (low, high) == (500, 1500)
    page.keyboard.press("0")
    assert chart(page, "Reward").evaluate(RANGE) == [0, 2000]
    numbers = chart(page, "Reward").locator("details.numbers")
    numbers.locator("summary").click()
    wait_for_count(numbers.locator("tbody tr"), 1)
    assert numbers.locator("td").last.inner_text() == "2,000"


def test_smoothing_axis_and_search_change_the_charts(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    value = chart(page, "Reward").locator(".value")
    raw = value.inner_text()
    page.get_by_label("Smoothing").fill("0.9")
    assert value.inner_text() != raw
    page.get_by_label("Along").select_option("time")
    assert chart(page, "Reward").evaluate(RANGE) == [0, 3000]  # seconds
    page.get_by_label("Along").select_option("tokens")
    metrics = long_report.parent / "metrics.jsonl"
    tokens = sum(json.loads(line)["num_tokens"] for line in metrics.read_text().splitlines())
    low, high = chart(page, "Reward").evaluate(RANGE)
    assert low < 0.01 * high
    assert high == pytest.approx(tokens, rel=1e-3)
    page.get_by_label("Find").fill("critic/")
    assert page.locator("figure.chart:visible").count() == 5
    page.get_by_label("Find").fill("")
    assert page.locator("figure.chart:visible").count() > 5


def test_completions_are_found_by_step_text_prompt_and_reward(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    section, groups = page.locator("#completions"), page.locator("#completions .group")
    assert section.get_by_role("heading", name="Step 2,000, group 0").is_visible()
    assert groups.count() == 3
    assert groups.first.locator(".sample").count() == 4
    assert "advantage +0.5" in groups.first.locator(".sample").nth(1).inner_text()
    section.get_by_label("Previous step").click()
    assert "Step 2,000" not in groups.first.inner_text()
    section.get_by_label("Step", exact=True).select_option("all")
    assert groups.count() == 6  # of many: the others wait for the button
    section.get_by_role("button", name="Show 6 more").click()
    assert groups.count() == 12
    section.get_by_label("Search").fill("2000-1-2")
    wait_for_count(page.locator("#completions .group"), 1)
    assert page.locator(".sample.hit mark").inner_text() == "2000-1-2"
    section.get_by_label("Search").fill("question 1-0?")
    wait_for_count(page.locator(".sample.hit"), 4)
    assert groups.first.locator(".turn .role").inner_text() == "user"
    section.get_by_label("Reward from").fill("1")
    wait_for_count(page.locator(".sample.hit"), 2)
    section.get_by_label("to", exact=True).fill("1.2")
    wait_for_count(page.locator("#completions .group"), 0)
    assert "0 groups" in section.get_by_role("status").inner_text()


def test_groups_are_folded_followed_compared_and_addressed(opened: Open, make_run: Any, made: SimpleNamespace) -> None:
    """Equal completions are one card; a prompt has its course; best and worst are a diff; an address opens a group."""
    folder = make_run()
    texts = ["It is 77.", "It is 77.", "It is <b>78</b>, I think.", "It is 77."]
    same = {"prompt": "Held-out 0", "rewards": {}, "turns": None}
    rows = [
        made.sample(step, group, i, text, **same, reward=float("77" in text), advantage=0.5)
        for step in (1, 5)
        for group in range(8)
        for i, text in enumerate(texts)
    ]
    made.write_lines(folder / "samples.jsonl", rows)
    write_report(folder / "report.html", [folder])
    page = opened(folder / "report.html", drawn="figure.chart", address="#step=1&group=7")
    linked = page.locator(".group.linked")
    assert "Step 1, group 7" in linked.inner_text()
    assert linked.evaluate("one => Math.abs(one.getBoundingClientRect().top) < innerHeight / 2")
    cards = [" ".join(one.inner_text().split()) for one in linked.locator(".sample").all()]
    assert cards == ["3 × 1 advantage +0.5 It is 77. 9 tokens", "0 advantage +0.5 It is <b>78</b>, I think. 9 tokens"]
    linked.locator(".compared summary").click()
    difference = linked.locator(".compared .text")
    wait_for_count(difference.locator("ins"), 1)  # the event of opening comes after the click
    assert difference.locator("ins").all_inner_texts() == ["77"]
    assert difference.locator("del").all_inner_texts() == ["<b>78</b>, I think"]
    page.locator("#completions").get_by_label("Prompt").select_option(index=1)
    (course,) = page.get_by_role("region", name="One prompt over the steps").all()
    assert course.locator("tbody tr").count() == 18  # before, sixteen groups, after
    assert course.locator("tbody tr").nth(1).inner_text() == (
        "step 1, group 0\t0.75\t3 × It is 77. · It is <b>78</b>, I think."
    )
    course.get_by_role("link", name="step 5, group 2").click()
    wait_for_text(page.locator(".group.linked"), "Step 5, group 2")


def test_questions_are_chosen_by_change(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    section = page.locator("#evaluation")
    assert section.locator("tbody tr").first.inner_text().split("\t")[1:] == [
        "33.3\u202f% ±\u202f10\u202f%", "83.3\u202f% ±\u202f10\u202f%", "+50.0 ±\u202f34.2 points ≈"
    ]  # fmt: skip
    assert section.locator(".question").count() == 6
    section.get_by_role("button", name="right → wrong").click()
    assert section.locator(".question").count() == 1
    assert "old 0" in section.locator(".question").inner_text()


def test_settings_are_shown_against_defaults_and_the_built_in_recipe(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    rows = page.locator("#recipe tbody tr")
    changed = rows.count()
    page.locator("#recipe select").select_option(label="changed from the built-in recipe quickstart (1)")
    assert rows.all_inner_texts() == ["training.max_steps\t2000\t16"]
    page.locator("#recipe select").select_option("all")
    assert rows.count() > changed > 1
    copy = page.get_by_role("button", name="Copy: covey train --resume")
    copy.click()
    wait_for_text(copy, re.compile("Copied|Selected"))  # selected where the browser does not let the page copy


def test_several_runs_are_compared(opened: Open, compared_report: Path) -> None:
    page = opened(compared_report)
    assert page.get_by_role("heading", name="2 runs compared").is_visible()
    assert "first: The reward is constant" in page.locator("#diagnosis .findings > li").first.inner_text()
    assert "steps 1 to 5" in page.locator("#diagnosis .findings > li").first.inner_text()
    (table,) = page.get_by_role("region", name="Settings that differ").all()
    assert table.locator("tbody tr").all_inner_texts() == ["seed\t0\t7"]
    assert chart(page, "Reward").locator(".legend").inner_text().split()[::4][:1] == ["first"]
    assert chart(page, "Reward").locator(".swatch").count() == 2
    assert chart(page, "Reward").evaluate(MARKED) > 50
    assert page.get_by_label("Marks on the axis").locator("li").count() == 3  # two problems, evaluations
    page.locator("#completions").get_by_label("Run").select_option("1")
    assert page.locator("#completions .group").count() == 2


def test_tokens_are_coloured_and_read_by_keys(opened: Open, long_report: Path) -> None:
    page = opened(long_report)
    section = page.locator("#completions")
    section.get_by_label("Colour by").select_option("change")  # goes to the nearest step that has values
    group = section.get_by_role("heading", name="Step 1,960, group 1").locator("xpath=ancestor::article")
    assert section.locator(".group").first.get_by_role("heading").inner_text() == "Step 1,960, group 1"
    block = group.locator(".tokens").nth(1)
    assert block.locator(".token").count() == 100
    first, last = block.locator(".token").first, block.locator(".token").last
    assert first.get_attribute("class") == "token along"  # a positive advantage, and the log-prob rose by 0.3
    assert last.get_attribute("class") == "token against"
    colours = [one.evaluate("one => getComputedStyle(one).backgroundColor") for one in (first, last)]
    assert len({*colours, "rgba(0, 0, 0, 0)"}) == 3
    block.focus()
    page.keyboard.press("ArrowRight")
    assert "“Some”: probability 36.8\u202f% → 49.7\u202f% · +0.3 in log-prob" in block.locator("xpath=..").inner_text()
    assert page.locator("#spoken").inner_text().startswith("“Some”: ")
    block.locator(".token").nth(3).hover()
    assert "part of a character" in group.locator(".token-values").nth(1).inner_text()
    assert [one.inner_text() for one in section.get_by_label("Colour by").locator("option").all()] == [
        "nothing", "advantage × probability change", "entropy"  # the run has no reference
    ]  # fmt: skip
    section.get_by_label("Next step").click()
    section.get_by_role("button", name="Go to step 1,960").click()
    section.get_by_label("Colour by").select_option("entropy")
    assert group.locator(".token.plain").count() == 400


def test_episodes_are_shown_turn_by_turn(opened: Open, compared_report: Path) -> None:
    page = opened(compared_report)
    group = page.get_by_role("heading", name="Step 20, group 9").locator("xpath=ancestor::article")
    messages = group.locator(".sample").first.locator(".message")
    shown = [" ".join(one.inner_text().split()) for one in messages.all()]
    assert shown == [
        "assistant · reward 0 · 2 tokens 5",
        "environment · 2 tokens less",
        "assistant · reward 0.75 · 2 tokens 4",
    ]
    page.locator("#completions").get_by_label("Search").fill("less")
    wait_for_count(page.locator("#completions .group"), 1)
    wait_for_count(page.locator("#completions mark"), 2)


def test_hostile_texts_are_inert(opened: Open, make_run: Any, made: SimpleNamespace) -> None:
    folder = make_run()
    rows = [made.sample(12, 0, i, text, prompt=text) for i, text in enumerate(made.hostile)]
    made.write_lines(folder / "samples.jsonl", rows)
    tokens = [made.token_row(12, 0, 0, [*made.hostile[:5], "end"])]
    made.write_lines(folder / "tokens.jsonl", tokens)
    made.write_lines(folder / "after.jsonl", [made.evaluated(i, t, True, prompt=t) for i, t in enumerate(made.hostile)])
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("a/new/metric", "<img src=x onerror=alert(1)>"))
    named = folder.rename(folder.with_name("<b>run\u202e"))
    write_report(named / "report.html", [named])
    page = opened(named / "report.html", drawn="figure.chart")  # many findings keep the charts out of sight
    page.locator("details.charts").evaluate_all("all => all.forEach(one => { one.open = true; })")
    page.locator("figure.chart", has_text="<img src=x onerror=alert(1)>").scroll_into_view_if_needed()
    samples = page.locator("#completions .sample .text")
    assert samples.nth(0).inner_text() == made.hostile[0]
    assert samples.nth(1).inner_text() == made.hostile[1]
    shown = samples.nth(3).inner_text()
    assert "\\x1b[31mred\\x07 \\u202ereversed\\u202c zero\\u200bwidth \\ufeff \\ud800 end\\u2028line" in shown
    assert "994,000 characters are left out" in samples.nth(5).inner_text()
    page.locator("#completions").get_by_label("Colour by").select_option("change")
    assert samples.nth(0).locator(".token").nth(1).inner_text() == made.hostile[1]
    samples.nth(0).locator(".token").nth(0).hover(position={"x": 5, "y": 5})
    assert "window.broken = 1" in page.locator(".token-values").first.inner_text()
    assert page.locator("h1").inner_text() == "<b>run\\u202e"
    assert page.evaluate("window.broken") is None
    assert page.locator("img, iframe, object, h1 b").count() == 0
    assert page.locator("script").count() == 4


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_nothing_keeps_anybody_out(opened: Open, long_report: Path, compared_report: Path, mode: str) -> None:
    """No violation of the rules of axe-core, WCAG AA contrast among them, with everything open."""
    for file in (long_report, compared_report):
        page = opened(file, color_scheme=mode)
        if file == long_report:
            page.get_by_label("Colour by").select_option("change")
            wait_for_count(page.locator("#completions .tokens"), 4)
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        wait_for_count(page.locator("details.numbers table"), page.locator("figure.chart").count())
        assert "\n".join(violations(page)) == ""


def test_the_theme_can_be_chosen_and_paper_is_light(opened: Open, compared_report: Path) -> None:
    page = opened(compared_report, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(ground) != dark
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(ground) == dark
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(ground) != dark
    assert page.locator("#curves > .body > .grid canvas").count() == 4
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(ground) == dark


@pytest.mark.parametrize("mode", ["dark", "phone"])
def test_the_page_of_data_is_readable_and_inert(
    opened: Open, browser: Any, made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A page with hostile tokens, a long row and a histogram, as `covey data --html` writes it."""
    bars = [{"first": n, "last": n + 9, "rows": n, "over": n // 2} for n in range(0, 60, 10)]
    lengths = {"measured": 9, "mean": 9.5, "median": 9.0, "p99": 60.0, "longest": 60, "over": 3, "bars": bars}
    same = {"equal_in": "every column", "distinct": 8, "repeated": 1, "most": 2, "held_out": 1}
    monkeypatch.setattr("covey_report.data_page.HEAD", 320)
    monkeypatch.setattr("covey_report.data_page.TAIL", 10)
    tokens = [*made.hostile[:-1], *["a token\n"] * 1000]
    segments = [{"role": "system", "texts": tokens}, {"role": "completion", "texts": ["4"]}]
    finding = {
        "title": made.hostile[0],
        "evidence": "e",
        "threshold": "",
        "setting": "s",
        "level": "problem",
        "samples": [],
    }
    summary = {
        "recipe": made.hostile[1], "source": "rows.jsonl", "model": "m", "train": 9, "used": 5, "held_out": 2,
        "every": 2, "seconds": 1.5, "lengths": lengths, "limit": {"tokens": 40, "setting": "training.max_length"},
        "duplicates": [same] * 3, "columns": [{"name": made.hostile[2], "filled": 9, "lacking": 0, "read_by": []}],
        "shown": [{"title": "row 1", "segments": segments}], "findings": [finding],
    }  # fmt: skip
    write_data_page(tmp_path / "data.html", summary)
    options = browser.phone if mode == "phone" else {"color_scheme": mode}
    page = opened(tmp_path / "data.html", drawn="#columns td", **options)
    assert page.evaluate("window.broken") is None
    assert page.locator("#rows .pieces").first.locator("> span").count() == 330
    assert "675 tokens left out" in page.locator("#rows").inner_text()
    over = page.locator("#lengths .over").last
    assert over.evaluate("bar => bar.offsetWidth") > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert violations(page) == []
