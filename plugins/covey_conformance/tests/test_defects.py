"""Each of twelve planted defects is found by the check that is meant for it, and the plain loop passes without them.

All run in this process on the tiny model, with the compiled functions of the unchanged loop.
"""

import sys

import pytest

from covey_conformance import worker
from covey_conformance.bench import Bench
from covey_conformance.checks import CHECKS
from covey_conformance.results import DIFFERS, NOT_APPLICABLE, PASS, judge
from covey_conformance.trainers import Trainer
from plugins.covey_conformance.tests.defects import DEFECTS, PLAIN

pytestmark = pytest.mark.slow
MANY_STEPS = {"optimizer/bf16", "resume/steps", "turns/tokens", "turns/logps", "invariance/padding-behind"}
"""Checks that take longest, and that no planted defect touches."""
NOT_DONE = {
    "invariance/padding-before",
    "invariance/packing",
    "invariance/devices",
    "invariance/processes",
    "sampler/agreement",
}
"""Checks that do not apply to the plain loop."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def verdicts(bench):
    """`verdicts(text, names)`: the verdict of each check on the loop with this text."""
    compiled = {}

    def verdicts(text, names):
        file = bench.new_folder().with_suffix(".py")
        file.write_text(text, "utf-8")

        def exchange(message, seconds):
            reply = worker.answer({**message, "log": ""})
            if "open" in message:
                for name in ("all_logps", "weights_gradient"):
                    setattr(sys.modules["adapter"], name, compiled.setdefault(name, vars(sys.modules["adapter"])[name]))
            return reply

        trainer = Trainer("plain", "plain", file, exchange, bench.folder)
        return {name: judge(CHECKS[name], bench, trainer).verdict for name in names}

    yield verdicts
    del sys.modules["adapter"]


def test_the_plain_loop_passes(verdicts):
    found = verdicts(PLAIN.read_text("utf-8"), CHECKS)
    assert {name for name, verdict in found.items() if verdict == NOT_APPLICABLE} == NOT_DONE
    assert {verdict for name, verdict in found.items() if name not in NOT_DONE} == {PASS}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(verdicts, name):
    defect = DEFECTS[name]
    found = verdicts(defect.plant(), [check for check in CHECKS if check not in MANY_STEPS | NOT_DONE])
    assert {check for check, verdict in found.items() if verdict == DIFFERS} == {defect.meant, *defect.others}
    assert set(found.values()) <= {PASS, DIFFERS}
