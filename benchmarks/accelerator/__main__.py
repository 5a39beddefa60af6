"""`python -m benchmarks.accelerator CHECK FOLDER`: make one check, and write its outcome to a file in FOLDER after
each row; with `describe` in place of a check, the identity and facts of this machine.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from benchmarks.accelerator.checks import CHECKS, Check, Context
from benchmarks.accelerator.results import ERROR, NOT_TRIED, NotTriedError, Outcome, Row
from covey.errors import reason_of
from covey.files import replace_file
from covey.monitor.writer import strict_json

DESCRIBE = "describe"
NOT_AT_END = "did not come to its end"


def run(check: Check, context: Context) -> Outcome:
    """Return the outcome of a check, whatever it raises; what it has measured is written behind each row."""
    rows: list[Row] = []
    try:
        for row in check.call(context):
            rows.append(row)
            context.tell(f"{row.what}: {row.cells[1]}{' FAILED' if row.fails else ''}")
            write(check, context.folder, Outcome(ERROR, tuple(rows), NOT_AT_END))
        return Outcome.of(rows)
    except NotTriedError as error:
        return Outcome(NOT_TRIED, message=str(error))
    except Exception as error:  # a check that raises is a finding, and the others go on
        traceback.print_exc()
        return Outcome(ERROR, tuple(rows), reason_of(error))


def write(check: Check, folder: Path, outcome: Outcome) -> None:
    """Write an outcome to the file of its check."""
    replace_file(folder / f"{check.file_name}.json", strict_json(asdict(outcome)).encode())


def main(words: list[str]) -> int:
    """Make the check that `words` name."""
    name, folder = words[0], Path(words[1])
    if name == DESCRIBE:
        from benchmarks.accelerator.machine import describe  # late: it begins JAX, and a check may start processes

        (folder / f"{DESCRIBE}.json").write_text(json.dumps(describe()), encoding="utf-8")
        return 0
    context = Context(folder, lambda text: print(f"    {text}", flush=True))
    check = next(check for check in CHECKS if check.name == name)
    write(check, folder, run(check, context))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
