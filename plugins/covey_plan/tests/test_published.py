"""Each published run names its page, a model that Covey loads, and settings of a recipe."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from covey.config import recipe
from covey.models.loading.weights import open_checkpoint
from covey_plan.lengths import expected_lengths
from covey_plan.machines import parse_target
from covey_plan.topologies import check_mesh, rollout_config

KNOWN = tomllib.loads(published.RUNS.read_text())


@pytest.mark.parametrize("run", KNOWN["runs"], ids=lambda run: str(run["name"]))
def test_a_published_run_can_be_planned(run: dict[str, Any], tmp_path: Path) -> None:
    published.write_model(tmp_path, KNOWN["models"][run["model"]])
    assert open_checkpoint(tmp_path).config.num_layers == KNOWN["models"][run["model"]]["num_hidden_layers"]
    words = published.command(run, str(tmp_path))[4:]
    given = {name: value for name, _, value in (word.partition("=") for word in words[1:])}
    options = {name: given.pop(name) for name in ("--on", "--json", "--prompt-tokens", "--completion-tokens")}
    ready = recipe.load_any(words[0], [f"{name}={value}" for name, value in given.items()])
    expected_lengths(ready, int(options["--prompt-tokens"]), (int(options["--completion-tokens"]),))
    check_mesh(ready.model.mesh, rollout_config(ready), parse_target(options["--on"]))
    assert run["url"].startswith("https://")
    assert run.get("seconds") or run.get("gigabytes")
