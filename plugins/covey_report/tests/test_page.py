"""The page of a report: one file, a strict policy, harmless texts, its size, and what is embedded in it."""

import hashlib
import html.parser
import json
import re
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.metrics import TABLE
from covey.errors import CoveyError
from covey_report.charts import CHARTS, MAIN, OTHER, charts_for
from covey_report.diagnosis import Finding
from covey_report.page import page_data, write_report
from covey_report.public import public_runs
from covey_report.run_data import read_run
from covey_report.sections import commands, facts

ROOT = Path(__file__).parents[3]
EMBEDDED = {
    "uPlot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of each file of the npm package uplot 1.6.32 that is embedded."""


class Parsed(html.parser.HTMLParser):
    """Start tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._data = ""

    def handle_data(self, data: str) -> None:
        self._data += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self.texts.append((tag, self.tags[-1][1], self._data))


def parsed(folder: Path, **more: Any) -> Parsed:
    write_report(folder / "report.html", [folder], **more)
    return Parsed((folder / "report.html").read_text(encoding="utf-8"))


def data_of(page: Parsed) -> Any:
    """The data of the page, each run with its texts."""
    data, *texts = (json.loads(text) for _, one, text in page.texts if one.get("type") == "application/json")
    for run, more in zip(data["runs"], texts, strict=True):
        run.update(more)
    return data


def test_a_checkpoint_as_a_model_is_named_after_its_run(make_run: Any) -> None:
    """But not on a public page."""
    run = read_run(make_run("run", 3))
    summary = {**run.summary, "model": "checkpoint 68 of a run, sha256 0123456789abcdef"}
    run = replace(run, summary=summary, settings={**run.settings, "model.source": "runs/sft-tiny-3"})
    assert ["model", "checkpoint 68 of sft-tiny-3, sha256 0123456789abcdef"] in facts(run)
    assert ["model", summary["model"]] in facts(*public_runs([run]))


def test_the_policy_allows_what_is_in_the_page_and_nothing_else(make_run: Any) -> None:
    page = parsed(make_run())
    (policy,) = (one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split("; ")}
    digest = lambda text: f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"  # noqa: E731
    scripts = [digest(text) for tag, one, text in page.texts if tag == "script" and "type" not in one]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert len(scripts) == 2
    assert rules["script-src"] == scripts
    assert rules["style-src"] == [digest(text) for tag, _, text in page.texts if tag == "style"]
    others = {"img-src": ["data:"], "require-trusted-types-for": ["'script'"], "trusted-types": ["'none'"]}
    assert {name: rules[name] for name in others} == others
    assert rules.keys() - others.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert not {"'unsafe-inline'", "'unsafe-eval'"} & set(policy.split())


def test_the_page_asks_for_nothing_and_has_no_inline_handlers(make_run: Any) -> None:
    page = parsed(make_run())
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        assert all(value in ("data:,", "#overview") for name, value in attributes.items() if name == "href")


def test_our_scripts_never_parse_markup_nor_evaluate_text() -> None:
    for file in (ROOT / "plugins" / "covey_report" / "assets").glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert "</script" not in text.lower(), file
        if not file.name.startswith("uPlot"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|https?:", text
            )


def test_hostile_texts_stay_texts(make_run: Any, made: SimpleNamespace) -> None:
    folder = make_run()
    rows = [made.sample(1, 0, i, text, prompt=text, rewards={text[:99]: 1.0}) for i, text in enumerate(made.hostile)]
    made.write_lines(folder / "samples.jsonl", rows)
    for name in ("before", "after"):
        made.write_lines(
            folder / f"{name}.jsonl", [made.evaluated(i, t, True, prompt=t) for i, t in enumerate(made.hostile)]
        )
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(re.sub("description: .*", "description: '</script><b>'", recipe))
    (folder / "metrics.jsonl").write_text('{"step": 1, "</script><img src=x>": 3.0}\n')
    named = folder.rename(folder.with_name("<img src=x>\u202e"))
    page = parsed(named, findings=[[Finding("</script>", "<b>", "\u2028", "&lt;")]])
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert "img" not in {tag for tag, _ in page.tags}
    data = data_of(page)
    samples = data["runs"][0]["completions"]["steps"][0][2][0][2]
    assert [one[0] for one in samples[:-1]] == list(made.hostile[:-1])
    assert samples[-1][0][1] == 1_000_000 - 6000
    for raw in (text for _, one, text in page.texts if one.get("type") == "application/json"):
        assert not re.search("[<>&\u2028\u2029\u202e\u200b\ufeff]", raw)


@pytest.mark.slow
def test_a_long_run_is_under_five_megabytes(make_run: Any) -> None:
    folder = make_run("long", 2000, 4, text="A completion of a usual length, with ten words or so. " * 8)
    assert (folder / "samples.jsonl").stat().st_size > 15_000_000
    size = write_report(folder / "report.html", [folder])
    assert 1_000_000 < size < 5_000_000
    (run,) = page_data([read_run(folder)])["runs"]
    assert len(run["series"]) > 60
    assert {len(points[0]) for name, points in run["series"].items() if not name.startswith("eval/")} == {2000}
    samples = data_of(Parsed((folder / "report.html").read_text(encoding="utf-8")))["runs"][0]["completions"]
    assert samples["total"]["groups"] == 8000
    assert 100 < samples["kept"]["groups"] < 8000


@pytest.mark.slow
def test_several_runs_share_the_room(make_run: Any) -> None:
    one = make_run("one", 1000, 1)
    data = page_data([read_run(folder) for folder in [one] * 4])
    assert len({len(points[0]) for run in data["runs"] for points in run["series"].values()}) > 1
    assert len(json.dumps(data)) < 5_000_000


def test_secrets_of_the_environment_are_masked(make_run: Any, made: SimpleNamespace, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    folder = make_run()
    made.write_lines(folder / "samples.jsonl", [made.sample(1, 0, 0, "the key is hunter2-hunter2")])
    write_report(folder / "report.html", [folder])
    assert "hunter2" not in (folder / "report.html").read_text()


@pytest.mark.parametrize("several", [False, True])
def test_a_public_page_has_numbers_and_no_text_of_the_user(
    make_run: Any, made: SimpleNamespace, monkeypatch: Any, tmp_path: Path, several: bool
) -> None:
    settings = ["--data.system", "a concealed instruction", "--rewards", "concealed_rewards:score"]
    names = ("mine", "other")[: 1 + several]
    folders = [make_run(name, text="A concealed answer", settings=settings) for name in names]
    for folder in folders:
        made.write_lines(folder / "tokens.jsonl", [made.token_row(1, 0, 0, ["concealed"])])
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"model": "/srv/someone/model", "environment": {"jax": "0.10.2", "host": "box.example/someone"}}
        (folder / "summary.json").write_text(json.dumps(summary))
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, folders), "--public"]) == 0
    text = (tmp_path / "report-public.html").read_text(encoding="utf-8")
    data = data_of(Parsed(text))
    shown = json.dumps({name: value for name, value in data.items() if name != "charts"})  # charts have fixed texts
    for private in ("concealed", "Question", "Held-out", "old 0", "new 1", "someone", "mine", str(tmp_path), "/srv"):
        assert private not in shown, private
    assert str(tmp_path) not in text
    assert [run["name"] for run in data["runs"]] == (["run 1", "run 2"] if several else ["quickstart"])
    run = data["runs"][0]
    assert len(run["series"]["reward"][0]) == 12
    assert run["figures"][0]["change"] == pytest.approx([0.5, 0.3416], abs=1e-4)
    assert ["environment: jax", "0.10.2"] in run["facts"]
    values = {row["name"]: row["values"][0] for row in data["settings"]}
    assert (values["data.system"], values["rewards"], values["seed"]) == ("(left out)", "(left out)", "0")
    assert values["grpo.algorithm"] == "grpo"


def test_runs_of_one_name_are_told_apart(make_run: Any) -> None:
    runs = [read_run(make_run(name, 2)) for name in ("a/run", "b/run", "c")]
    assert [run["name"] for run in page_data(runs)["runs"]] == ["a/run", "b/run", "c"]


def test_the_diagnosis_has_its_place(make_run: Any) -> None:
    folder = make_run()
    for found in data_of(parsed(folder))["findings"]:
        assert found["level"] in ("problem", "note")
        assert found["title"]
        assert found["evidence"]
    finding = Finding("The reward is constant", "reward_std is 0 in 5 steps", "steps 1 to 5", "rewards")
    data = data_of(parsed(folder, findings=[[finding]]))
    assert data["findings"] == [vars(finding) | {"samples": [], "run": 0}]
    about = {"number": 1, "text": finding.title}
    evaluations = [{"kind": "evaluation", "first": step, "last": step} for step in (0, 12)]
    assert data["runs"][0]["marks"] == [*evaluations, {"kind": "finding", "first": 1, "last": 5, **about}]


def test_the_command_says_that_the_page_holds_data(make_run: Any, capsys: Any) -> None:
    assert main(["report", str(make_run())]) == 0
    assert "to publish it is to publish them" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "task", "first"), [("finished", "sums", "train"), ("running", "python", "watch")])
def test_commands_go_on_from_the_state_of_a_run(make_run: Any, status: str, task: str, first: str) -> None:
    run = read_run(make_run())
    run = replace(run, status=status, settings={**run.settings, "data.task": task}, path=Path("my runs/a"))
    texts = [command for _, command in commands(run)]
    assert texts[0].startswith(f"covey {first} ")
    assert all("'my runs/a'" in command for command in texts)
    assert any("export" in command for command in texts) == (task != "python")


def test_nothing_but_a_report_is_replaced(make_run: Any, tmp_path: Path) -> None:
    folder, mine = make_run(), tmp_path / "mine.html"
    mine.write_text("<!doctype html>mine")
    with pytest.raises(CoveyError, match="no report of Covey"):
        write_report(mine, [folder])
    assert mine.read_text() == "<!doctype html>mine"
    with pytest.raises(CoveyError, match="no such folder"):
        write_report(tmp_path / "nowhere" / "report.html", [folder])
    with pytest.raises(CoveyError, match="a folder"):
        write_report(tmp_path, [folder])
    write_report(tmp_path / "new.html", [folder])
    write_report(tmp_path / "new.html", [folder])


def test_every_metric_has_a_chart() -> None:
    charted = {name for chart in CHARTS for name in (*chart.metrics, *chart.band, chart.error) if name}
    names = {row.name for row in TABLE} - {"step"}
    by_pattern = {"rewards/overlong-penalty/mean", "rewards/overlong-penalty/std"}
    assert names - charted - {"env/<name>"} == by_pattern  # each of an environment's own numbers has a chart of its own
    assert charted - names == set()
    assert {title for titles in MAIN.values() for title in titles} <= {chart.title for chart in CHARTS}


def test_charts_are_those_of_the_metrics_in_the_file() -> None:
    names = ["reward", "reward_error", "rewards/a/mean", "rewards/b/mean", "entropy", "strange/one"]
    charts = {chart["title"]: chart for chart in charts_for(names, ["rl"])}
    assert list(charts) == ["Reward", "Entropy", "Reward by function", "strange/one"]
    assert charts["Reward"]["series"][0]["error"] == "reward_error"
    assert [one["label"] for one in charts["Reward by function"]["series"]] == ["a", "b"]
    assert [chart["main"] for chart in charts.values()] == [True, True, False, False]
    assert charts["strange/one"]["section"] == OTHER


def test_phases_are_stacked_in_three_lanes_where_threads_draw_ahead() -> None:
    phases = ["time/rollout", "time/reward", "time/logps", "time/update", "time/sync"]
    (turns,) = charts_for(phases, ["rl"])
    assert turns["stacked"]
    assert [one["name"] for one in turns["series"]] == phases
    lanes = charts_for([*phases, "time/wait", "time/rollout_wait", "time/reward_wait"], ["rl"])
    assert [[one["label"] for one in lane["series"]] for lane in lanes if lane["stacked"]] == [
        ["wait", "logps", "update", "sync"],
        ["rollout wait", "rollout"],
        ["reward wait", "reward"],
    ]


def test_a_report_needs_no_accelerator_library() -> None:
    code = "import sys, covey_report; print({'jax', 'flax', 'orbax', 'tokenizers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


def test_what_is_embedded_is_what_npm_has() -> None:
    assets = ROOT / "plugins" / "covey_report" / "assets"
    for name, digest in EMBEDDED.items():
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == digest, name
    assert {file.name for file in assets.glob("uPlot*")} == EMBEDDED.keys()
