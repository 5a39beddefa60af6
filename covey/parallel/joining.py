"""Start of JAX's multi-process runtime from environment variables.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID    set by hand: host:port of process 0, count, own index
COVEY_DISTRIBUTED=auto                                        read from the cluster: Slurm, MPI, Kubernetes, a TPU pod
COVEY_DISTRIBUTED=off                                         one process, whatever else is set

Process 0 listens only at the address given to the others, unless JAX_COORDINATOR_BIND_ADDRESS names another. The
runtime has no authentication, so anyone who can reach that port can disturb the run.
"""

import re
import socket
import sys
from collections.abc import Mapping

import jax

from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.errors import CoveyError, nearest

HEARTBEAT = 60
"""Seconds without a heartbeat after which a process is taken to be dead."""
LEAVING = 30
"""Seconds that a process waits at its end for the others to end; then JAX aborts it."""


def join(environment: Mapping[str, str]) -> None:
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
    address, processes, number = named if named and mode != "auto" else (None, None, None)
    if processes == 1:
        return
    listens = _listens_at(address, environment) if address and number == 0 else None
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
            coordinator_bind_address=listens,
        )
    except (RuntimeError, ValueError) as error:
        raise CoveyError(
            f"the processes did not come together: {str(error).strip() or type(error).__name__}",
            want=f"{ADDRESS}, {COUNT} and {NUMBER} for each process, or a cluster that JAX knows",
            fix="docs/scaling.md",
        ) from error
    if jax.process_index():
        print(f"process {jax.process_index()} of {jax.process_count()}; process 0 shows the progress", file=sys.stderr)


def _listens_at(address: str, environment: Mapping[str, str]) -> str:
    """Return the host:port that process 0 listens at.

    Raises:
        CoveyError: the address cannot be bound; JAX would end the process with a segmentation fault.
    """
    place = environment.get(BIND) or address
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        with socket.socket(*found[0][:3]) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
    except OSError as error:
        raise CoveyError(
            f"process 0 cannot listen at {place}: {error.strerror or error}",
            want="an address of this machine and a free port",
            fix=f"where the others reach it under another address, {BIND}=[::]:port listens on every interface",
            where="environment",
        ) from error
    return place


def _named(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the address, the number of processes and this one's index; None if the environment has none of them."""
    given = {name: environment[name] for name in (ADDRESS, COUNT, NUMBER) if environment.get(name)}
    if not given or environment.get(MODE):
        return None
    if missing := [name for name in (ADDRESS, COUNT, NUMBER) if name not in given]:
        what = f"{' and '.join(given)} set, and {' and '.join(missing)} not"
        raise CoveyError(what, want="all three, or none", fix=f"{MODE}=auto lets JAX ask the cluster for them")
    for name, (form, want) in FORMS.items():
        if not re.fullmatch(form, given[name]):
            raise CoveyError(f"{name} is {given[name]!r}", want=want, where="environment")
    processes, number = int(given[COUNT]), int(given[NUMBER])
    if number >= processes:
        what = f"{NUMBER} is {number}, and {COUNT} is {processes}"
        raise CoveyError(what, want=f"a number from 0 to {processes - 1}", where="environment")
    return given[ADDRESS], processes, number


FORMS = {
    ADDRESS: (r".+:\d{1,5}", "host:port of process 0"),
    COUNT: ("[0-9]+", "a whole number"),
    NUMBER: ("[0-9]+", "a whole number"),
}
"""Pattern of the value of each variable, and its description in errors."""
