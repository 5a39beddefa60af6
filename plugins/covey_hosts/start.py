"""Start several processes: join JAX's multi-process runtime, and open the channel between them.

Programs over several processes are launched from one thread, in one order; otherwise they hang, or compute wrong values
without an error (`order`).

`initialize` starts JAX's multi-process runtime from environment variables:

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID    set by hand: host:port of process 0, count, own index
COVEY_DISTRIBUTED=auto                                        read from the cluster: Slurm, MPI, Kubernetes, a TPU pod
COVEY_DISTRIBUTED=off                                         one process, whatever else is set

Process 0 listens only at the address given to the others, unless JAX_COORDINATOR_BIND_ADDRESS names another. The
runtime has no authentication, so anyone who can reach that port can disturb the run.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.errors import CoveyError, nearest
from covey_hosts.channel import PORT, SILENT, SILENT_SECONDS, listen
from covey_hosts.checks import check_same_code
from covey_hosts.several import opened

HEARTBEAT = 60
"""Seconds without a heartbeat after which JAX takes a process to be dead."""
LEAVING = 30
"""Seconds that a process waits at its end for the others to end; then JAX aborts it."""


@contextmanager
def start(environment: Mapping[str, str]) -> Iterator[None]:
    """Join the processes that the environment names (`initialize`), if any, for the body of the `with` statement; see
    `covey.parallel.processes.start`.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together, or run different code.
    """
    silent, port = (_checked(environment, name) for name in (SILENT, PORT))
    if not jax.distributed.is_initialized():
        initialize(environment)
    if jax.process_count() == 1:
        yield
        return
    if jax.default_backend() == "cpu":
        disable_compilation_cache()
    # Where JAX has the address from the cluster, it listens on every interface too.
    place = environment.get(BIND) or ("" if environment.get(MODE) else environment.get(ADDRESS, ""))
    with opened(place.rpartition(":")[0], int(port or 0), float(silent or SILENT_SECONDS)) as several:
        check_same_code(several)
        yield


def disable_compilation_cache() -> None:
    """Let this process compile its programs instead of reading them from JAX's cache, from now on.

    For CPUs, where process 0 alone finds programs in the cache, because their keys hold the process. Four processes of
    which one had read the gradients' program and three had compiled it waited for each other until gloo gave up.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a cache


def initialize(environment: Mapping[str, str]) -> None:
    """Join the processes that `environment` names; do nothing if it names none, or only this one.

    Call it before any other use of JAX.

    Raises:
        CoveyError: the environment is contradictory, or the processes do not come together.
    """
    mode, named = environment.get(MODE, ""), _named(environment)
    if mode not in ("", "auto", "off"):
        raise CoveyError(f"{MODE} is {mode!r}", fix=nearest(mode, ("auto", "off")), where="environment")
    if mode == "off" or (mode == "" and not named):
        return
    address, processes, number = named or (None, None, None)
    if processes == 1:
        return
    place = (environment.get(BIND) or address) if number == 0 else None
    if place is not None:
        listen(place).close()  # where the address cannot be bound, JAX ends with a segmentation fault
    print(f"waiting for {processes or 'all'} processes at {address or 'the place the cluster names'}", file=sys.stderr)
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM and keep the process running
    # On CPUs, a program on one device of a process and a later one on several would run at once and mix their messages.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(
            address,
            processes,
            number,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=LEAVING,
            coordinator_bind_address=place,
        )
    except (RuntimeError, ValueError) as error:
        raise CoveyError(
            f"the processes did not come together: {str(error).strip() or type(error).__name__}",
            want=f"{ADDRESS}, {COUNT} and {NUMBER} for each process, or a cluster that JAX knows",
            fix="docs/scaling.md",
        ) from error
    if jax.process_index():
        print(f"process {jax.process_index()} of {jax.process_count()}; process 0 shows the progress", file=sys.stderr)


def _named(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the address, the number of processes and this one's index; None if the environment has none of them, or
    sets the mode.
    """
    texts = {name: text for name in (ADDRESS, COUNT, NUMBER) if (text := environment.get(name))}
    if not texts or environment.get(MODE):
        return None
    if missing := [name for name in (ADDRESS, COUNT, NUMBER) if name not in texts]:
        raise CoveyError(
            f"{' and '.join(texts)} set, and {' and '.join(missing)} not",
            want="all three, or none",
            fix=f"{MODE}=auto lets JAX ask the cluster for them",
        )
    address, processes, number = (_checked(environment, name) for name in texts)
    if int(number) >= int(processes):
        raise CoveyError(
            f"{NUMBER} is {number}, and {COUNT} is {processes}",
            want=f"a number from 0 to {int(processes) - 1}",
            where="environment",
        )
    return address, int(processes), int(number)


def _checked(environment: Mapping[str, str], name: str) -> str:
    """Return the value of a variable, "" if it is not set.

    Raises:
        CoveyError: it has another form.
    """
    text, (form, want) = environment.get(name, ""), FORMS[name]
    if text and not re.fullmatch(form, text):
        raise CoveyError(f"{name} is {text!r}", want=want, where="environment")
    return text


A_PORT = "([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""Pattern of a port: the system takes a larger number modulo 65,536."""
FORMS = {
    ADDRESS: (f".+:{A_PORT}", "host:port of process 0"),
    COUNT: ("[0-9]+", "a whole number"),
    NUMBER: ("[0-9]+", "a whole number"),
    PORT: (A_PORT, "a port"),
    SILENT: (r"([5-9]|[1-9][0-9]+)(\.[0-9]+)?", "seconds, from 5 up"),
}
"""Pattern of the value of each variable, and its description in errors."""
