"""Mistakes on the command line: each row of MISTAKES.md, and more. None of the answers needs JAX or NumPy."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.cli.commands import COMMANDS
from covey.config import recipe

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("MISTAKES.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `\$ (covey [^`]+)` \| `([^`]+)` \|$", PAGE, re.M)
FILES = re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)


MORE = [
    ("covey train", "built-in recipes: arithmetic-gemma3, arithmetic-smollm2"),
    ("covey train quickstart --training.show klll", "wanted: did you mean 'kl'?"),
    ("covey train gsm8k-smollm2 --data.path nowhere", "data.path: there is no nowhere"),
    ("covey train quickstart --data.test-path mine.jsonl", "data.test_path is mine.jsonl, and data.task first"),
    ("covey sft", "built-in recipes: sft-arithmetic, sft-gemma3, sft-guess, sft-smollm2"),
    ("covey sft sft-arithmetic --grpo.beta 1", "there is no setting --grpo.beta"),
    ("covey eval ./nowhere --recipe quickstart", "./nowhere"),
    ("covey generate smollm2-135m hello --temprature 0.1", "did you mean --rollout.temperature?"),
    ("covey recipes quickstart seed=3", "recipes has no setting seed"),
    ("covey watch", "an argument is missing"),
    ("covey export smollm2-135m out=x format=zzz", "format is 'zzz'"),
    ("covey train quickstart --dry-run=false", "--dry-run takes no value"),
    ("covey watch a --twice 2", "watch has no setting --twice"),
    ("covey plan quickstart --completion-tokens -1", "wanted: a whole number from 1 up"),
    ("covey plan quickstart --on v5e:1x1 --here", "--here measures this machine"),
    ("covey plan quickstart --price-per-hour free", "wanted: a number above 0, as in 2.5"),
    ("covey plan quickstart --price-per-hour 2 --quick", "fix: leave --quick out"),
]
"""Further commands, each with a part of its answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page describes."""
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES:
        (made / name).write_text(text)
    (made / "empty.jsonl").touch()
    for wide, name in (("wide.yaml", "mine.yaml"), ("wide.jsonl", "rows.jsonl")):
        (made / wide).write_text((made / name).read_text(), encoding="utf-16")
    (made / "weights").mkdir()
    for run, checkpoints in (("done", ["00000008"]), ("begun", [])):
        (made / "runs" / run / "checkpoints").mkdir(parents=True)
        (made / "runs" / run / "recipe.yaml").write_text(recipe.to_yaml(recipe.load("quickstart")))
        for step in checkpoints:
            (made / "runs" / run / "checkpoints" / step).mkdir()
    return made


def test_the_page_has_its_rows_and_files() -> None:
    assert len(ROWS) == PAGE.count("| `$ covey ") >= 40
    assert len(FILES) == PAGE.count("\n```") // 2 == 15


@pytest.mark.parametrize(("command", "line"), [*ROWS, *MORE], ids=[command for command, _ in [*ROWS, *MORE]])
def test_a_mistake_is_answered(
    command: str, line: str, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (verb := shlex.split(command)[1]) in OF_PLUGINS and verb not in COMMANDS:
        pytest.skip("a command of a plugin")
    of_options = {"--yes": "push", "--episodes": "rollout"}
    if any(option in command and verb not in COMMANDS for option, verb in of_options.items()):
        pytest.skip("an option of a plugin's command")
    monkeypatch.chdir(folder)
    before = files_in(folder)
    assert cli.main(shlex.split(command)[1:]) == 2
    out, err = capsys.readouterr()
    assert out == "" or command.startswith("covey validate")
    assert line in err if (command, line) in MORE else line in [text.strip() for text in err.splitlines()]
    assert files_in(folder) == before


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


WITHOUT_NUMPY = [
    "covey",
    "covey --version",
    "covey recipes",
    "covey recipes quickstart",
    "covey watch runs/done --once",
]
OF_PLUGINS = (
    "board", "chat", "compare", "data", "export", "generate", "launch", "plan", "push", "recipes", "report", "rewards",
    "rollout", "validate", "watch",
)  # fmt: skip
WITHOUT_NUMPY += [*(f"covey {name} --help" for name in COMMANDS), *(command for command, _ in [*ROWS, *MORE])]
WITHOUT_JAX = ["covey validate quickstart", "covey rewards quickstart --samples samples.jsonl"]
CODE = """
import json, shlex, sys
from covey.cli.main import main
for heavy, lines in json.load(sys.stdin):
    codes = [main(shlex.split(line)[1:]) for line in lines]
    print(codes, sorted(set(heavy) & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.slow
def test_what_needs_no_jax_or_numpy_imports_neither(folder: Path) -> None:
    """All commands in one process of its own, since that of the tests may have imported them."""
    sample = {"step": 1, "group": 0, "prompt": "x", "text": "y", "letter": "Y", "topic": "z"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    lines = [(["jax", "numpy"], WITHOUT_NUMPY), (["jax"], WITHOUT_JAX)]
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(lines), capture_output=True, text=True, cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    first, second = (line for line in done.stderr.splitlines() if line.startswith("["))
    assert first.endswith("] []")
    assert second == "[0, 0] []"
