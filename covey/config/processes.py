"""Environment variables by which several processes of a run find each other (see `parallel.joining`)."""

MODE = "COVEY_DISTRIBUTED"
"""auto: the cluster is asked. off: one process, whatever else is set."""
ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""host:port of process 0."""
COUNT = "JAX_NUM_PROCESSES"
"""Number of processes."""
NUMBER = "JAX_PROCESS_ID"
"""Number of this process, from 0."""
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""host:port at which process 0 listens, when it differs from the address that the others use."""
PEER_LOST = 69
"""Exit code of a process that has ended because another one is stopped, gone, or has failed."""
