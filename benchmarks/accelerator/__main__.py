"""`python -m benchmarks.accelerator CHECK FOLDER`: make one check, and write its outcome to FOLDER/outcome.json; with
`describe` in place of a check, the identity and facts of this machine.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from benchmarks.accelerator.checks import CHECKS, Check, Context
from benchmarks.accelerator.results import ERROR, NOT_TRIED, NotTriedError, Outcome
from covey.errors import reason_of
from covey.monitor.writer import strict_json

OUTCOME, DESCRIBE = "outcome.json", "describe"


def run(check: Check, context: Context) -> Outcome:
    """Return the outcome of a check, whatever it raises."""
    try:
        return Outcome.of(check.call(context))
    except NotTriedError as error:
        return Outcome(NOT_TRIED, message=str(error))
    except Exception as error:  # a check that raises is a finding, and the others go on
        traceback.print_exc()
        return Outcome(ERROR, message=reason_of(error))


def main(words: list[str]) -> int:
    """Make the check that `words` name."""
    name, folder = words[0], Path(words[1])
    if name == DESCRIBE:
        from benchmarks.accelerator.machine import describe  # late: it begins JAX, and a check may start processes

        (folder / OUTCOME).write_text(json.dumps(describe()), encoding="utf-8")
        return 0
    context = Context(folder, lambda text: print(f"    {text}", flush=True))
    outcome = run(next(check for check in CHECKS if check.name == name), context)
    (folder / OUTCOME).write_text(strict_json(asdict(outcome)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
