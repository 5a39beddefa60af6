"""Save and restore verified checkpoints: written aside, digested, renamed into place, and checked before use.

    folder/00000500/arrays/       Orbax; every leaf under its dotted path, so that no class name is stored
                    meta.json     the step, dtype and shape of each leaf, and the caller's `extra`
                    SHA256SUMS    digest of every file; `sha256sum -c SHA256SUMS` checks them by hand
    folder/lock                   held by the one writer

SHA256SUMS is written last and marks a step complete (`train.storage`). The steps may be in a Cloud Storage bucket
instead, with only the lock in the folder (entry point `covey.storage`). Orbax silently casts dtypes and reads corrupted
bytes, so this module refuses files that do not match their digest and leaves that do not match the target.

Several processes save together: Orbax has each write its shards into `ocdbt.process_N`, and process 0 the arrays of
which each process has a replica. Each process digests its own files, so that no host reads the whole; process 0 merges
the digests, writes the rest and seals the step. At restore each process verifies a part of the files. No step of a save
launches a device program: a save continues in its thread during training. All processes need the folder at the same
path. A checkpoint may be restored on another number of processes and another mesh.
"""

import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from covey.errors import CoveyError, ResumeError
from covey.files import check_not_url, has_file, is_count, number
from covey.parallel import processes
from covey.parallel.arrays import flatten
from covey.parallel.processes import PeerLostError
from covey.registry import offered
from covey.train.allocator import release_free_memory
from covey.train.storage import LOCK, POINTER, SUMS, CheckpointStore, is_open_at, take_lock

ARRAYS, META = "arrays", "meta.json"
OF_GROUP = re.compile(r"inner_states\.\w+\.inner_state\.")
"""Part of the name of a leaf in the state of an optimizer with a transformation for each group of parameters."""
MAX_CONCURRENT_BYTES = 2**28
"""Maximum number of bytes of the state that a save encodes at a time; one array alone may be larger."""


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Save and restore the checkpoints of one run. Several processes call each method together.

    Close it, preferably with `with`: a save still in progress when the program exits is lost (earlier steps are not).

    Args:
        folder: the folder of the checkpoints; created when missing.
        max_to_keep: number of the latest steps that are kept, besides the step with the best score.
        read_only: only restore: no lock is taken, nothing is removed, and a run may be writing at the same time.
        address: gs://BUCKET/FOLDER, for the steps of a new run; `folder` then refers to it.
        scored_by: name of the score. Steps with a score of another name have none.

    Raises:
        CoveyError: the folder is the address of an object store, or `address` is no address in a bucket.
        ResumeError: another writer holds the folder, or it is not writable; or another run is at `address`.
    """

    def __init__(
        self,
        folder: str | Path,
        max_to_keep: int = 4,
        *,
        read_only: bool = False,
        address: str = "",
        scored_by: str = "",
    ):
        if max_to_keep < 1:
            raise CoveyError(f"max_to_keep is {max_to_keep}", want="at least 1: the last checkpoint always stays")
        check_not_url(folder)
        self.folder = Path(folder).absolute()
        self._max_to_keep, self._scored_by = max_to_keep, scored_by
        self._pending: Future[None] | None = None
        self._reading: Future[None] | None = None
        self._abandoned: set[int] = set()
        self._reads_only, self._is_first = read_only, jax.process_index() == 0
        with ExitStack() as resources:  # an error below gives the lock back
            writes = self._is_first and not read_only
            # When one process of a launch was killed, the others hold the lock for some seconds more.
            self._lock = (
                resources.enter_context(take_lock(self.folder, processes.here().seconds_to_end)) if writes else None
            )
            self._store = CheckpointStore(self.folder)
            if address or has_file(self.folder, POINTER):
                self._store = offered("covey.storage", "gs")(self.folder, address, writes)
            if writes:
                self._store.finish_interrupted()
            self._worker = resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
            self._resources = resources.pop_all()
        logging.getLogger("absl").addFilter(_is_not_orbax_error)

    @property
    def address(self) -> str:
        """Address of the steps in a bucket; empty when they are in the folder."""
        return self._store.address

    def release(self) -> None:
        """Leave the address in a bucket to others, if a new run has taken it and has written no step."""
        if self.address and self._is_first and not self.steps():
            self._store.release()

    def digest(self, step: int) -> str:
        """Return the SHA-256 of a step: of the digests of its files."""
        return hashlib.sha256(self._store.read(step, SUMS)).hexdigest()

    def holds(self) -> bool:
        """Return whether the locked folder is still there; False when it was removed or replaced."""
        return self._lock is not None and is_open_at(self._lock, self.folder / LOCK)

    def steps(self) -> list[int]:
        """Return the steps in the folder in ascending order, without a step that is still being written."""
        return sorted(self._store.committed())

    def latest(self) -> int | None:
        """Return the last step, or None when there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the highest score (the latest on a tie, in 12 digits), or None when none has a score."""
        scores = {step: score for step in self.steps() if (score := self._score(step)) is not None}
        return max(scores, key=lambda step: (float(f"{scores[step]:.12g}"), step), default=None)

    def save(
        self, step: int, state: PyTree, extra: Mapping[str, Any] | None = None, *, score: float | None = None
    ) -> None:
        """Start writing `state`; return at once, so that the caller may continue training or donate it.

        On a CPU the arrays themselves are read, and JAX copies an array that is donated meanwhile; `wait_until_read`
        avoids the copy. First wait for an earlier save and raise its failure. A step that already exists is replaced.

        Args:
            step: number of optimizer updates done.
            state: arrays in any nesting, typed random keys included.
            extra: other values needed to resume; they make a JSON round trip (tuples become lists, keys strings).
            score: score of the step; the best step is kept however old it is. A non-finite score is ignored.

        Raises:
            ResumeError: the disk is full; or the folder holds a later step that this run did not roll back with
                `restore`.
            CoveyError: a leaf is not a JAX array.
            TypeError: `extra` cannot be encoded as JSON.

        If the disk fills up during writing, the next `save`, `wait` or `close` raises a ResumeError.
        """
        if self._reads_only:
            raise CoveyError("these checkpoints were opened to be read, or are closed", want="an open Checkpointer")
        self.wait()
        flat = flatten(state)
        meta = {"step": step, "leaves": {name: _entry(name, leaf) for name, leaf in flat.items()}, "extra": extra or {}}
        if score is not None and math.isfinite(score):
            meta |= {"score": score, "scored_by": self._scored_by}
        text = json.dumps(meta, indent=1)
        needed = sum(leaf.nbytes for leaf in flat.values()) + len(text)
        with processes.here().together("checkpoint/prepare"):
            if self._is_first:
                self._prepare(step, needed)
        # Random keys are stored as their uint32 data.
        arrays = {name: jax.random.key_data(x) if _is_key(x) else x for name, x in flat.items() if x.size}
        writing = self._worker.submit(_write(f"{self._store.temporary_path(step)}/{ARRAYS}", arrays))
        in_host_memory = any(device.platform == "cpu" for leaf in arrays.values() for device in leaf.devices())
        self._reading = writing if in_host_memory else None
        self._pending = self._worker.submit(self._complete, step, text, writing, needed)

    def shapes(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the leaves of `step` by dotted name; none if the step is damaged (`restore` says so)."""
        try:
            return {name: _read_entry(name, entry) for name, entry in self._read_meta(step)["leaves"].items()}
        except (OSError, ValueError):
            return {}

    def restore(
        self,
        step: int | None = None,
        target: PyTree | None = None,
        *,
        subset: bool = False,
        check: Callable[[Mapping[str, Any]], object] = lambda extra: None,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Return the state of `step` and its `extra`, after checking every file against its digest.

        Args:
            step: default is the latest. After restoring an earlier step, the next save removes the later ones.
            target: arrays, or `jax.ShapeDtypeStruct` with shardings (default: the first device), in the wanted nesting.
                Devices and layout may differ from the saved ones. When not set: nested dicts on the first device.
            subset: skip saved leaves that are not in `target` (to load only the parameters, say); otherwise an error.
            check: called with `extra` before the leaves are compared; it may raise its own error.

        Raises:
            ResumeError: the step does not exist; a file is damaged (the message names the last intact step); or a leaf
                is missing or differs in dtype or shape from `target`.
        """
        self.wait()
        step = self._existing(step)
        path = self._store.path(step)
        if damage := self._find_damage(step):
            raise self._damaged(step, damage)
        try:
            meta = self._read_meta(step)
            saved = {name: _read_entry(name, entry) for name, entry in meta["leaves"].items()}
        except ValueError as error:  # the digests agree, so it was sealed like that
            raise self._damaged(step, str(error)) from error
        check(meta["extra"])
        leaves = _by_saved_name(saved if target is None else flatten(target), saved)
        wanted = dict(leaves)
        _check_fit(wanted, saved, subset, path)
        loaded = _load(f"{path}/{ARRAYS}", wanted, meta["leaves"])
        self._abandoned = {later for later in self.steps() if later > step}
        if target is None:
            return unflatten_dict(loaded, sep="."), meta["extra"]  # type: ignore[no-untyped-call]
        # Several groups may have the same number in the checkpoint. An update donates each, so each is a copy.
        return jax.tree.unflatten(
            jax.tree.structure(target),
            [jnp.copy(loaded[name]) if leaf.ndim == 0 else loaded[name] for name, leaf in leaves],
        ), meta["extra"]

    def wait(self) -> None:
        """Wait until the last save is in place; raise its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def wait_until_read(self) -> None:
        """Wait until the last save has read the state, so that donating it costs no copy; see `save`."""
        if self._reading is not None:
            wait([self._reading])  # `wait` of the checkpointer raises its error

    def close(self) -> None:
        """Wait for the last save, then release the lock of the folder."""
        self._lock, self._reads_only = None, True
        with self._resources:
            self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, step: int, needed: int) -> None:
        """Check that a step can be written; remove the rest of an earlier attempt."""
        later = [other for other in self.steps() if other > step and other not in self._abandoned]
        if later:
            raise ResumeError(
                f"checkpoint {step} would come before {later[-1]}, which is already there",
                want="one run in a folder",
                fix=f"resume from {later[-1]}, or choose another folder",
                where=str(self.folder),
            )
        try:
            self._store.prepare(step, needed)
        except OSError as error:
            raise self._not_written(step, needed, str(error)) from error

    def _complete(self, step: int, meta: str, writing: Future[None], needed: int) -> None:
        """Run in the worker thread, after Orbax: digest this process's files; process 0 commits the step and removes
        steps no longer kept.

        Args:
            step: the step.
            meta: text of meta.json.
            writing: the work of Orbax.
            needed: bytes of the step.
        """
        release_free_memory()  # which held the bytes that Orbax encoded
        try:
            with processes.here().together("checkpoint/written"):
                writing.result()
            digests = processes.here().all_gather(
                self._store.local_digests(step, jax.process_index()), "checkpoint/digests"
            )
            with processes.here().together("checkpoint/complete"):
                if self._is_first:
                    known = {name: digest for local in digests for name, digest in local.items()}
                    self._store.commit(step, {META: meta.encode()}, known)
        except PeerLostError:
            raise
        except (OSError, ValueError) as error:  # Orbax turns a full disk into a ValueError
            if self._is_first:
                self._store.discard(step)
            raise self._not_written(step, needed, str(error)) from error
        if self._is_first:
            self._drop_old(step)

    def _drop_old(self, step: int) -> None:
        """Remove the steps made obsolete by `step`: those this run rolled back, and those beyond `max_to_keep`."""
        for abandoned in self._abandoned - {step}:
            self._store.remove(abandoned)
        self._abandoned = set()
        best = self.best()
        for old in self.steps()[: -self._max_to_keep]:
            if old != best:
                self._store.remove(old)

    def _find_damage(self, step: int) -> str:
        """Describe the damage to the files of a step; empty when they are intact. Each process verifies a part."""
        damage = self._store.damage(step, (jax.process_index(), jax.process_count()))
        return next(filter(None, processes.here().all_gather(damage, "checkpoint/damage")), "")

    def _read_meta(self, step: int) -> dict[str, Any]:
        """Read meta.json.

        Raises:
            ValueError: it cannot be read, or is not of the form that `save` writes.
        """
        try:
            meta = json.loads(self._store.read(step, META))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{META} cannot be read ({error})") from error
        if not isinstance(meta, dict) or not all(isinstance(meta.get(name), dict) for name in ("leaves", "extra")):
            raise ValueError(f"{META} has not the mappings leaves and extra")
        return meta

    def _score(self, step: int) -> float | None:
        with suppress(ValueError):  # damaged: `restore` raises the error
            meta = self._read_meta(step)
            return number(meta.get("score")) if meta.get("scored_by", self._scored_by) == self._scored_by else None
        return None

    def _not_written(self, step: int, needed: int, why: str) -> ResumeError:
        space = "" if self.address else f" ({shutil.disk_usage(self.folder).free:,} are free)"
        return ResumeError(
            f"checkpoint {step} could not be written: {why}",
            want=f"{needed:,} bytes of space{space}, and the right to write",
            fix="free some space and resume; the checkpoints before it are whole",
            where=self.address or str(self.folder),
        )

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise ResumeError("no checkpoint here", fix="start a new run", where=str(self.folder))
        if step is not None and step not in steps:
            raise ResumeError(f"no checkpoint {step}", want=f"one of {steps}", where=str(self.folder))
        return steps[-1] if step is None else step

    def _damaged(self, step: int, damage: str) -> ResumeError:
        earlier = [before for before in reversed(self.steps()) if before < step]
        good = next((before for before in earlier if not self._store.damage(before)), None)
        return ResumeError(
            f"checkpoint {step} is damaged: {damage}",
            want="files as they were written",
            fix=(f"remove this folder to go on from {good}, the last step that is whole" if good is not None else "")
            or "start again: no earlier checkpoint is whole",
            where=self._store.path(step),
        )


def _write(path: str, arrays: Mapping[str, jax.Array]) -> Callable[[], Any]:
    """Let Orbax begin to write the arrays; return a function that waits until they are written."""
    if not arrays:
        return lambda: None
    context, largest = ocp.Context(), max(leaf.nbytes for leaf in arrays.values())
    context.memory.write_concurrent_bytes = max(MAX_CONCURRENT_BYTES, largest + 1)  # an array must be smaller
    context.memory.deepcopy_host_arrays = False
    with context:
        wait: Callable[[], Any] = ocp.save_async(
            path, {name: _for_all_processes(x) for name, x in arrays.items()}
        ).result
    return wait


def _for_all_processes(leaf: jax.Array) -> jax.Array | np.ndarray:
    """Return an array that each process has as a host array, which process 0 writes: Orbax refuses JAX arrays of one
    process alone. The other processes need its shape only.
    """
    if jax.process_count() == 1 or not leaf.is_fully_addressable:
        return leaf
    return np.asarray(leaf) if jax.process_index() == 0 else np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
    """Filter out the traceback that Orbax logs in each of its threads when a save fails: `wait` raises that error."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _entry(name: str, leaf: Any) -> dict[str, Any]:
    """Return the entry of a leaf in meta.json."""
    if not isinstance(leaf, jax.Array):
        raise CoveyError(
            f"leaf {name!r} of a checkpoint is a {type(leaf).__name__}",
            want="JAX arrays",
            fix="put other values into `extra`",
        )
    entry: dict[str, Any] = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    return entry | {"key": str(jax.random.key_impl(leaf))} if _is_key(leaf) else entry


def _read_entry(name: str, entry: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf from its entry in meta.json.

    Raises:
        ValueError: `_entry` makes no such entry, or the dtype does not exist.
    """
    with suppress(TypeError, ValueError, AttributeError, KeyError):
        key, shape = entry.get("key"), entry["shape"]
        dtype = jnp.dtype(entry["dtype"]) if key is None else jax.random.key(0, impl=key).dtype
        if str(dtype) == entry["dtype"] and isinstance(shape, list) and all(map(is_count, shape)):
            return jax.ShapeDtypeStruct(tuple(shape), dtype)
    raise ValueError(f"{META} describes no array at {name!r}")


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _load(path: str, target: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Load the leaves of `target` from Orbax, in the order and with the shardings of `target`."""

    def stored(leaf: Any) -> jax.ShapeDtypeStruct:
        plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        plain = jax.eval_shape(jax.random.key_data, plain) if _is_key(leaf) else plain
        return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=_sharding(leaf))

    wanted = {name: stored(leaf) for name, leaf in target.items() if 0 not in leaf.shape}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        arrays = ocp.load(path, wanted) if wanted else {}

    def as_saved(name: str, leaf: Any) -> Any:
        if name not in arrays:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _sharding(leaf))
        return jax.random.wrap_key_data(arrays[name], impl=entries[name]["key"]) if _is_key(leaf) else arrays[name]

    return {name: as_saved(name, leaf) for name, leaf in target.items()}


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _by_saved_name(target: Mapping[str, Any], saved: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a target, each with its name in the checkpoint. AdamW has a state for all parameters, or a
    state for each group where a group has settings of its own. Each form is read from the other.
    """
    others = {OF_GROUP.sub("", name): name for name in saved}
    return [
        (name if name in saved else others.get(OF_GROUP.sub("", name), name), leaf) for name, leaf in target.items()
    ]


def _check_fit(target: Mapping[str, Any], saved: Mapping[str, Any], subset: bool, path: str) -> None:
    """Check that no leaf of a target is missing, superfluous, or of another dtype or shape.

    Raises:
        ResumeError: some are; it names them.
    """

    def describe(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}"

    wrong = [f"{name} is not in the checkpoint" for name in target if name not in saved]
    wrong += [
        f"{name} is not in the target"
        for name in saved
        if name not in target and not subset and not OF_GROUP.search(name)
    ]
    pairs = {name: (describe(saved[name]), describe(leaf)) for name, leaf in target.items() if name in saved}
    wrong += [f"{name} was saved as {have}, wanted is {want}" for name, (have, want) in pairs.items() if have != want]
    if wrong:
        raise ResumeError(
            "the checkpoint does not fit: "
            + "; ".join(wrong[:5])
            + (f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
            want="the model, adapters and optimizer it was saved with",
            fix="resume with the recipe in the run folder",
            where=path,
        )
