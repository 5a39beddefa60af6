"""A run that names no environment and no tools imports nothing of this package, and public names lead to it."""

import subprocess
import sys
from pathlib import Path

import pytest

import covey
from covey.config.schema import DataConfig, EnvsConfig
from covey.data import load_data
from covey.display import show_log
from covey.errors import CoveyError, EpisodeError
from covey.registry import offered
from covey_envs.runner import EnvironmentRunner

PROGRAM = """
import sys
from covey import GRPOLearner
from covey.cli.main import main
assert main(sys.argv[1:]) == 0
print(*[name for name in sys.modules if name.startswith("covey_envs")], sep="", end="")
"""
TINY = (
    "train arithmetic-tiny --model.source scratch:arithmetic-tiny --training.max-steps 1 --prompts-per-step 2"
    " --evaluation.prompts 2 --num-generations 2 --training.eval-every-n-steps 0"
    " --actor-optimizer.schedule constant --actor-optimizer.warmup-ratio 0 --out run"
)


@pytest.mark.slow
def test_a_run_without_environments_imports_none_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *TINY.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "covey_envs" not in done.stdout


def test_public_names_are_those_of_the_package() -> None:
    assert covey.EnvironmentRunner is EnvironmentRunner


def test_the_tasks_of_the_games_are_those_of_the_package() -> None:
    for name in ("guess", "wordle"):
        assert load_data(DataConfig(task=name)).train[0].keys() >= {"prompt"}


def test_a_run_shows_the_warnings_of_the_package() -> None:
    shown = list[str]()
    with show_log(info=shown.append, warning=shown.append):
        EnvironmentRunner("guess", EnvsConfig(environment="guess", on_error="none")).accept(EpisodeError("fails"))
    assert "'guess' fails" in shown[0]


def test_what_no_package_offers_is_told_with_what_to_install() -> None:
    with pytest.raises(CoveyError, match=r"covey\.responders(.|\n)*pip install"):
        offered("covey.responders", "no such section")
