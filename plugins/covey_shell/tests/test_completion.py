"""Completion scripts: what a shell offers at planted words, and that no option of a command is missing."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.cli.commands import COMMANDS
from covey_shell import completion

ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={at}
_covey
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, and with a recipe and a file in it."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in completion.SHELLS:
        (folder / f"covey.{shell}").write_text("\n".join(completion.script(shell)) + "\n")
    (folder / "mine.yaml").touch()
    return folder


def offered(scripts: Path, *words: str) -> set[str]:
    """What bash offers for the last of `words`, with PATH empty: nothing is started."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = ASK.format(script=scripts / "covey.bash", words=quoted, at=len(words) - 1)
    done = subprocess.run(
        [str(shutil.which("bash")), "--norc", "-c", code],
        capture_output=True, text=True, cwd=scripts, env={"PATH": ""}, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("covey", "tr"), {"train"}),
        (("covey", "train", "quick"), {"quickstart"}),
        (("covey", "sft", "sft-t"), {"sft-tiny"}),
        (("covey", "train", "quickstart", "--grpo.b"), {"--grpo.beta"}),
        (("covey", "train", "quickstart", "--grpo.algorithm", "da"), {"dapo"}),
        (("covey", "train", "quickstart", "--grpo.algorithm", "=", "gsp"), {"gspo", "gspo_token"}),
        (
            ("covey", "train", "quickstart", "--algorithm", "="),
            set(completion.flags_of(COMMANDS["train"])["--grpo.algorithm"]),
        ),
        (("covey", "train", "quickstart", "--model.remat", ""), {"true", "false"}),
        (("covey", "plan", "quickstart", "--json", "--on", "v5"), {"v5e:2x4", "v5p:2x2x2"}),
        (("covey", "train", "quickstart", "--seed", ""), set()),
        (("covey", "launch", "local", "export", "r", "--out", "mine"), {"mine.yaml"}),
        (("covey", "completion", ""), {"bash", "zsh", "fish"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_bash_offers(scripts: Path, words: tuple[str, ...], expected: set[str]) -> None:
    assert offered(scripts, *words) == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_reads_its_script(scripts: Path, shell: str) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", str(scripts / f"covey.{shell}")], check=True, capture_output=True)


def test_zsh_and_fish_offer_the_same_settings(scripts: Path) -> None:
    """They are made from one table, so that only the syntax differs."""
    flags = completion.flags_of(COMMANDS["train"])
    fish = (scripts / "covey.fish").read_text()
    assert set(re.findall(r"_from train' -l (\S+)", fish)) == {flag.removeprefix("--") for flag in flags}
    assert re.search(r"_from train' -l grpo.algorithm -x -a '.*\bdapo\b.*'$", fish, re.M)
    zsh, bash = ((scripts / f"covey.{shell}").read_text() for shell in ("zsh", "bash"))
    tables = [text[text.index("_covey_values()") : text.index("\n_covey() {")] for text in (zsh, bash)]
    assert tables[0] == tables[1]


def test_the_command_prints_a_script(capsys: Any) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("# Completion of covey for bash")
    assert cli.main(["completion", "bsh"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
