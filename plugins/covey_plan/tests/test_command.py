"""The command sets what its compilers need; the user sets nothing."""

import os

import pytest

from covey_plan import command
from covey_plan.machines import parse_target


@pytest.mark.parametrize(("on", "for_tpus"), [("v5e:2x2", True), ("cpu", False)])
def test_the_environment_is_that_of_compiling(monkeypatch: pytest.MonkeyPatch, on: str, for_tpus: bool) -> None:
    found = {"JAX_PLATFORMS": "tpu", "TPU_STDERR_LOG_LEVEL": "0"}
    monkeypatch.setattr(os, "environ", found)
    command.prepare_environment(parse_target(on))
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == ""
    assert os.environ["TPU_STDERR_LOG_LEVEL"] == "0"
    assert ("TPU_SKIP_MDS_QUERY" in os.environ) is for_tpus
