"""Parts of a checkpoint that several processes write or verify together, through the store that they share.

Orbax has each process write its shards into `ocdbt.process_N`. Each process digests its own files, so that no host
reads the whole; process 0 merges the digests, writes the rest and marks the step complete. At restore each process
verifies a part of the files. No step here launches a device program: a save goes on in its thread during training.
"""

import json
from collections.abc import Iterable
from typing import Any

import jax

from covey.parallel.store import exchange
from covey.train.checksums import Digests
from covey.train.steps import Steps


def is_joint(leaves: Iterable[Any]) -> bool:
    """Return whether the processes have to save these arrays together, because a process has only parts of one."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)


def gather_digests(steps: Steps, step: int) -> Digests:
    """Return the digests of the files that the processes have written, on every process; each digests its own."""
    found = exchange(json.dumps(steps.digest_own(step)), "checkpoint/digests")
    return {file: digest for text in found for file, digest in json.loads(text).items()}


def find_damage(steps: Steps, step: int) -> str:
    """Describe the damage to the files of a checkpoint; empty when they are intact. Each process verifies a part."""
    damage = steps.damage(step, (jax.process_index(), jax.process_count()))
    return next(filter(None, exchange(damage, "checkpoint/damage")), "")
