"""The command line: what reaches `covey.run`, exit codes, and answers that need no JAX."""

import io
import re
import subprocess
import sys
import types
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from covey import __version__
from covey.cli import main as cli
from covey.cli.commands import COMMANDS, Command, Commands
from covey.config import recipe
from covey.config.base import leaves
from covey.config.processes import PEER_LOST
from covey.errors import STOPPED, Stopped
from covey.parallel.processes import PeerLostError

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The calls of a stand-in for covey.run, in an empty working folder."""
    made = []

    def record(name, answer=None):
        def call(*arguments):
            made.append((name, *arguments))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    fake = types.ModuleType("covey.recipes")
    for name in ("train", "resume", "evaluate"):
        setattr(fake, name, record(name))
    fake.record = record
    monkeypatch.setitem(sys.modules, "covey.recipes", fake)
    monkeypatch.setattr("covey.recipes", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    return made


def run_folder(name="run", *overrides, of="quickstart", trained=True):
    """The folder of a run of the recipe `of`, with a checkpoint when it is trained."""
    folder = Path(name)
    (folder / "checkpoints" / "00000008").mkdir(parents=True) if trained else folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.to_yaml(recipe.load_any(of, overrides)))
    return folder


# --- help


def test_help_of_every_command(capsys):
    for name in COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"covey {name}")
    for words in ([], ["--help"], ["help"]):
        assert cli.main(words) == 0
        shown = capsys.readouterr()
        assert re.findall(r"^  covey (\w+)", shown.out, re.M) == list(COMMANDS)
        assert "\x1b" not in shown.out + shown.err  # no colours where no terminal is
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"covey {__version__}\n"


def test_help_all_lists_every_setting_with_its_value(capsys):
    cli.main(["train", "--help", "all", "quickstart"])
    shown = capsys.readouterr().out
    for path in leaves(recipe.Recipe).keys() - recipe.HIDDEN.keys():
        assert f"--{path.replace('_', '-')} " in shown
    assert "  " not in " ".join(line.strip() for line in shown.splitlines() if line.startswith(" " * 30))
    assert f"--training.max-steps {recipe.load('quickstart').training.max_steps}" in shown
    assert "--grpo.num-iterations 1 " in shown


def settings_in(shown):
    return re.findall(r"^  --([\w.-]+) ", shown, re.M)


def test_help_has_layers(capsys):
    """The common settings first, then a section, then one setting."""
    for name in ("train", "sft"):
        assert cli.main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert len(settings_in(shown)) == 25
        sections = re.findall(rf"^  covey {name} --help (\w+) ", shown, re.M)
        assert {"model", "data", "training", "evaluation", "all"} <= set(sections)
        for section in sections:
            assert cli.main([name, "--help", section]) == 0
            assert settings_in(capsys.readouterr().out)
    assert cli.main(["--help", "grpo"]) == 0
    assert all(path.startswith("grpo.") for path in settings_in(capsys.readouterr().out))
    assert cli.main(["--help", "lora"]) == 0
    assert settings_in(capsys.readouterr().out)[0] == "model.lora.rank"
    assert cli.main(["train", "quickstart", "--max-steps", "3", "--help", "temperature"]) == 0
    shown = capsys.readouterr().out
    assert settings_in(shown) == ["rollout.temperature", "evaluation.temperature"]
    assert f"--rollout.temperature {recipe.load('quickstart').rollout.temperature} " in shown
    assert cli.main(["--help", "sft"]) == 0
    assert capsys.readouterr().out.startswith("covey sft ")
    assert cli.main(["--help", "grop"]) == 2
    assert capsys.readouterr().out == ""


def test_a_printed_recipe_runs(calls, capsys):
    pytest.importorskip("covey_shell")
    assert cli.main(["recipes", "quickstart"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert rest == recipe.find("quickstart").read_text().partition("\n")[2]
    assert Path(first.partition("$schema=")[2]) == ROOT / "docs" / "recipe.schema.json"
    Path("mine.yaml").write_text(f"{first}\n{rest}")
    assert cli.main(["train", "mine.yaml"]) == 0
    assert calls[0][1] == recipe.load("quickstart")


# --- what reaches covey.recipes


def refused(capsys, *words):
    """The answer to a mistake."""
    assert cli.main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "name"), [("train", "quickstart"), ("sft", "sft-arithmetic")])
def test_a_recipe_and_a_free_folder_are_handed_on(calls, capsys, command, name):
    run_folder(f"runs/{name}-1", of=name)
    assert cli.main([command, name, "--max-steps", "3", "--seed=7"]) == 0
    function, ready, out = calls[0]
    assert (function, recipe.COMMANDS[ready.method]) == ("train", f"covey {command}")
    assert (ready.training.max_steps, ready.seed) == (3, 7)
    assert out == Path(f"runs/{name}-2")
    cli.main([command, "--help", name])
    assert f"--training.num-epochs {ready.training.num_epochs}" in capsys.readouterr().out


def test_out_chooses_the_folder_and_a_taken_one_is_refused(calls, capsys):
    assert cli.main(["train", "quickstart", "--out", "here"]) == 0
    assert calls[0][2] == Path("here")
    run_folder("here")
    assert "covey train --resume here" in refused(capsys, "train", "quickstart", "--out", "here")
    Path("other").mkdir()
    Path("other/thing").touch()
    assert "not empty" in refused(capsys, "train", "quickstart", "--out", "other")
    assert len(calls) == 1


def test_a_run_is_resumed_with_changes_by_the_command_that_began_it(calls, capsys):
    rl, supervised = run_folder("rl"), run_folder("supervised", of="sft-arithmetic")
    assert cli.main(["train", "--seed", "3", "--resume", "rl", "--max-steps=20"]) == 0
    assert cli.main(["sft", "--resume", "supervised"]) == 0
    assert calls == [("resume", rl, ["--seed=3", "--max-steps=20"]), ("resume", supervised, [])]
    assert "fix: covey train --resume rl\n" in refused(capsys, "sft", "--resume", "rl")
    assert "fix: covey sft --resume supervised\n" in refused(capsys, "train", "--resume", "supervised")
    assert "covey sft --resume supervised" in refused(capsys, "sft", "sft-arithmetic", "--out", "supervised")
    assert "--out beside --resume" in refused(capsys, "train", "--resume", "rl", "--out", "x")
    assert len(calls) == 2


def test_a_run_can_be_a_model_once_it_has_a_checkpoint(calls, capsys):
    run_folder("done", of="sft-arithmetic")
    run_folder("begun", of="sft-arithmetic", trained=False)
    assert cli.main(["train", "quickstart", "--model.source", "done"]) == 0
    assert cli.main(["eval", "done"]) == 0
    assert cli.main(["eval", "done", "--recipe", "quickstart"]) == 0
    assert [name for name, *_ in calls] == ["train", "evaluate", "evaluate"]
    assert [ready.method for *_, ready in calls[1:]] == ["sft", "rl"]
    for words in (["train", "quickstart", "--model.source", "begun"], ["eval", "begun"]):
        assert "fix: go on with it: covey sft --resume begun" in refused(capsys, *words)


def test_eval_takes_the_recipe_of_the_run_or_the_named_one(calls):
    run_folder("run", "--seed", "5")
    assert cli.main(["eval", "run", "--evaluation.samples", "4"]) == 0
    assert cli.main(["eval", MODEL, "--recipe", "quickstart", "--evaluation.prompts=7"]) == 0
    (_, first, of_run), (_, second, named) = calls
    assert (first, of_run.seed, of_run.evaluation.samples) == ("run", 5, 4)
    assert (second, named.evaluation.prompts) == (MODEL, 7)


def test_eval_refuses_settings_of_the_model_of_a_run(calls, capsys):
    run_folder("run")
    for words in (
        ["--model.adapter", "mine"],
        ["--model.source", "other"],
        ["--recipe", "quickstart", "--lora.rank=3"],
    ):
        assert "beside a run, which is loaded as its own recipe says" in refused(capsys, "eval", "run", *words)
    assert cli.main(["eval", "run", "--model.mesh.data", "2"]) == 0
    assert len(calls) == 1


# --- exit codes


def test_ctrl_c_is_130_and_says_how_to_go_on(calls, monkeypatch, capsys):
    fake = sys.modules["covey.recipes"]
    monkeypatch.setattr(fake, "train", fake.record("train", KeyboardInterrupt()))
    assert cli.main(["train", "quickstart", "--out", "out"]) == 130
    assert "--resume" not in capsys.readouterr().err

    def stopped(ready, out):
        run_folder(out)  # with a checkpoint: without one there is nothing to go on from
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "train", stopped)
    assert cli.main(["train", "quickstart", "--out", "out"]) == 130
    assert "covey train --resume out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stopped", "code"), [(Stopped("SIGTERM"), 143), (Stopped("SIGINT", step=3), STOPPED), (None, PEER_LOST)]
)
def test_a_signal_to_another_process_has_its_code_here_too(calls, monkeypatch, capsys, stopped, code):
    fake, error = sys.modules["covey.recipes"], PeerLostError("process 1 has failed, or has given no sign for 18 s")
    error.stopped = stopped
    monkeypatch.setattr(fake, "train", fake.record("train", error))
    assert cli.main(["train", "quickstart", "--out", "out"]) == code
    assert "process 1 has failed" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(calls, monkeypatch):
    fake = sys.modules["covey.recipes"]
    monkeypatch.setattr(fake, "train", fake.record("train", ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "quickstart"])


def test_a_reader_that_goes_away_is_no_defect():
    command = [sys.executable, "-m", "covey", "train", "--help"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_output_without_unicode_shows_escapes(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii"))
    assert cli.main(["train", "--help"]) == 0
    sys.stdout.flush()
    assert b"\\u03bc" in written.getvalue()  # μ


def test_a_command_of_a_package_that_cannot_be_imported_is_answered_with_the_package(capsys, monkeypatch):
    point = EntryPoint("gone", "no_such_package.command:GONE", "covey.commands")
    monkeypatch.setattr("covey.registry.entry_points", lambda **_: [point])
    assert "gone belongs to the package no_such_package, which cannot be imported" in refused(capsys, "gone", "x")
    assert "there is no command 'gne'" in refused(capsys, "gne", "x")
    assert set(Commands(COMMANDS._own.values())) == set(COMMANDS._own)  # the overview has the others


def test_a_command_that_follows_one_that_is_missing_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = {name: Command(name, "", "", "", "", follows=place) for name, place in (("a", "gone"), ("b", "eval"))}
    monkeypatch.setattr("covey.cli.commands.all_offered", lambda _: {x: partial(offers.get, x) for x in offers})
    assert list(Commands(COMMANDS._own.values())) == ["train", "sft", "eval", "b", "a"]
