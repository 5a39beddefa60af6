"""`python -m benchmarks.memory_events EVENTS WORDS`: run `covey WORDS`, with a line in the file EVENTS for each phase
that begins: the bytes of the live JAX arrays at that moment, and the most temporary memory of a program made ready
since the line before. Run by `memory`.
"""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO


def main() -> int:
    """Run the command and write its phases; return its exit code."""
    from covey.cli import main as cli
    from covey_status.programs import CompileCounter

    with Path(sys.argv[1]).open("w", buffering=1) as file:
        events, begin = Events(file), CompileCounter.phase

        def phase(counter: CompileCounter, name: str) -> None:
            events.phase(name)
            begin(counter, name)

        CompileCounter.phase = phase  # type: ignore[method-assign]
        return cli.main(sys.argv[2:])


class Events:
    """Writer of the lines.

    Args:
        file: where they go.
    """

    def __init__(self, file: TextIO):
        self._file, self._known = file, 0

    def phase(self, name: str) -> None:
        """Write that the phase `name` begins, and what the one before it has left."""
        import jax

        programs = jax.devices()[0].client.live_executables()
        latest_first = programs[: len(programs) - self._known]
        self._known = len(programs)
        planned = (program.get_compiled_memory_stats().temp_size_in_bytes for program in latest_first)
        found = {"live": live_bytes(jax.live_arrays()), "temporary": max(planned, default=0)}
        print(json.dumps({"time": time.time(), "phase": name, **found}), file=self._file)


def live_bytes(arrays: Iterable[Any]) -> int:
    """Return the bytes of the buffers of `arrays`; one that several arrays share counts once."""
    pieces = [piece.data for array in arrays if not array.is_deleted() for piece in array.addressable_shards]
    return sum({piece.unsafe_buffer_pointer(): piece.nbytes for piece in pieces}.values())


if __name__ == "__main__":
    sys.exit(main())
