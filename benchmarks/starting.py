"""`python -m benchmarks.starting EVENTS WORDS`: run `covey WORDS`, with a line in the file EVENTS for each program that
JAX makes ready, and one for each of those that came from the cache. Run by `startup`.
"""

import json
import sys
from pathlib import Path
from typing import Any

READY = "/jax/core/compile/backend_compile_duration"
FOUND = "/jax/compilation_cache/cache_hits"


def main() -> int:
    """Run the command and write the events of compilation; return its exit code."""
    import jax

    from covey.cli import main as cli

    with Path(sys.argv[1]).open("w", buffering=1) as file:

        def ready(event: str, duration_secs: float, **_: Any) -> None:
            if event == READY:
                print(json.dumps({"seconds": round(duration_secs, 4)}), file=file)

        def found(event: str, **_: Any) -> None:
            if event == FOUND:
                print(json.dumps({"from_cache": True}), file=file)

        jax.monitoring.register_event_duration_secs_listener(ready)
        jax.monitoring.register_event_listener(found)
        return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
