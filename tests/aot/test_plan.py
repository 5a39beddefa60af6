"""A plan for TPUs that are not there has the compiler's estimates, collectives and kernels."""

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.config import recipe
from covey_plan.machines import parse_target
from covey_plan.plan import make_plan

TINY = str(Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama")


def test_a_plan_for_tpus_has_the_estimates_of_their_compiler(topology: Callable[[str], Any]) -> None:
    topology("v5e:2x2")

    def load(more: Sequence[str]) -> recipe.Recipe:
        settings = [f"model.source={TINY}", "model.mesh.tp=4", "rollout.max_new_tokens=128", "training.row_length=256"]
        return recipe.load("quickstart", [*settings, "model.dtype=bfloat16", "model.compute_dtype=bfloat16", *more])

    made = make_plan(load, parse_target("v5e:2x2"), lambda what: None)
    gradients = next(program for program in made.programs if program.name == "gradients")
    assert {"prefill", "admit", "decode"} <= {program.name for program in made.programs}
    assert len(made.inventory) <= 12
    assert made.process == 0
    assert made.fits
    assert gradients.cycles is not None
    assert gradients.cycles[0] > 0
    assert sum(gradients.kernels) >= 3
    assert gradients.collectives
    caught = re.search(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())
    assert caught is not None
    assert not int(caught[1], 16) >> signal.SIGTERM - 1 & 1  # libtpu's handler waits in a compilation
    assert all(time.compiled is not None and time.expected >= time.roofline for time in made.phases)
