"""Save and restore verified checkpoints: written aside, digested, renamed into place, and checked before use.

    folder/00000500/arrays/       Orbax; every leaf under its dotted path, so that no class name is stored
                    meta.json     the step, dtype and shape of each leaf, and the caller's `extra`
                    SHA256SUMS    digest of every file; `sha256sum -c SHA256SUMS` checks them by hand
    folder/lock                   held by the one writer

SHA256SUMS is written last and marks a step complete (`train.steps`). With a lock alone in the folder the steps may lie
in a Cloud Storage bucket (`train.bucket_steps`). Orbax silently casts dtypes and reads corrupted bytes, so this module
refuses files that do not match their digest and leaves that do not match the target.

With several processes each writes the shards that it has, and the digests of its own files (`train.joint_save`);
process 0 merges them and does the rest. All need the folder at the same path. A checkpoint may be restored on another
number of processes and another mesh.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from orbax import checkpoint as legacy
from orbax.checkpoint import v1 as ocp

from covey.allocator import release_free_memory
from covey.errors import CoveyError, ResumeError
from covey.files import check_not_url
from covey.parallel.reshard import flatten
from covey.parallel.store import together
from covey.train.bucket_steps import BucketSteps, open_bucket
from covey.train.checksums import SUMS, Digests, holds_lock, take_lock
from covey.train.joint_save import find_damage, gather_digests, is_joint
from covey.train.json_lines import is_count, number
from covey.train.steps import META, FolderSteps, Steps

ARRAYS = "arrays"
BYTES_IN_FLIGHT = 2**28
"""Maximum number of bytes of the state that a save encodes at a time; one array alone may be larger."""


class Checkpointer:
    """Save and restore the checkpoints of one run. Several processes call each method together.

    Close it, preferably with `with`: a save still in progress when the program exits is lost (earlier steps are not).

    Args:
        folder: the folder of the checkpoints; created when missing.
        max_to_keep: how many of the latest steps are kept, besides the one with the best score.
        read_only: only restore: no lock is taken, nothing is removed, and a run may be writing at the same time.
        address: gs://BUCKET/FOLDER, for the steps of a new run; `folder` then refers to it.

    Raises:
        CoveyError: the folder is the address of an object store, or `address` is none of a bucket.
        ResumeError: another writer holds the folder, or it is not writable; or another run is at `address`.
    """

    def __init__(self, folder: str | Path, max_to_keep: int = 4, *, read_only: bool = False, address: str = ""):
        if max_to_keep < 1:
            raise CoveyError(f"max_to_keep is {max_to_keep}", want="at least 1: the last checkpoint always stays")
        check_not_url(folder)
        self.folder = Path(folder).absolute()
        self._max_to_keep = max_to_keep
        self._pending: Future[None] | None = None
        self._reading: Future[None] | None = None
        self._abandoned: set[int] = set()
        self._reads_only, self._is_first = read_only, jax.process_index() == 0
        self._lock = take_lock(self.folder) if self._is_first and not read_only else None
        self._bucket = self._open_bucket(address)
        self._steps: Steps = self._bucket or FolderSteps(self.folder)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        logging.getLogger("absl").addFilter(_is_not_orbax_error)
        if self._lock is not None:
            self._finish_interrupted(self._lock)

    @property
    def address(self) -> str:
        """Address of the steps in a bucket; empty when they are in the folder."""
        return self._bucket.address if self._bucket else ""

    def release(self) -> None:
        """Leave the address in a bucket to others, if a new run has taken it and has written no step."""
        if self._bucket and self._is_first and not self.steps():
            self._bucket.release()

    def digest(self, step: int) -> str:
        """Return the SHA-256 of a step: of the digests of its files."""
        return hashlib.sha256(self._steps.read(step, SUMS)).hexdigest()

    def holds(self) -> bool:
        """Return whether the folder is still the locked one; False when it was removed or replaced."""
        return self._lock is not None and holds_lock(self._lock, self.folder)

    def steps(self) -> list[int]:
        """Return the steps in the folder in ascending order, without a step that is still being written."""
        return sorted(self._steps.whole())

    def latest(self) -> int | None:
        """Return the last step, or None when there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step with the highest score (the latest on a tie), or None when no step has a score."""
        scores = {step: score for step in self.steps() if (score := self._score(step)) is not None}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def save(
        self, step: int, state: PyTree, extra: Mapping[str, Any] | None = None, *, score: float | None = None
    ) -> None:
        """Start writing `state`; return at once, so that the caller may continue training or donate it.

        On a CPU the arrays themselves are read, and JAX copies those that are donated meanwhile; `wait_until_read`
        avoids that. First wait for an earlier save and raise its failure. A step that already exists is replaced.

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
        joint = is_joint(flat.values())
        if not (joint or self._is_first):
            return  # the arrays of each process are replicas
        meta = {"step": step, "leaves": {name: _entry(name, leaf) for name, leaf in flat.items()}, "extra": extra or {}}
        if score is not None and math.isfinite(score):
            meta["score"] = score
        text = json.dumps(meta, indent=1)
        needed = sum(leaf.nbytes for leaf in flat.values()) + len(text)
        with together("checkpoint/prepare", joint):
            if self._is_first:
                self._prepare(step, needed)
        stored = {name: _as_stored(leaf) for name, leaf in flat.items() if leaf.size}
        writing = self._worker.submit(_write(f"{self._steps.draft(step)}/{ARRAYS}", stored, joint))
        self._reading = writing if any(map(_is_in_host_memory, stored.values())) else None
        complete = self._complete_jointly if joint else self._complete
        self._pending = self._worker.submit(complete, step, text, writing, needed)

    def restore(
        self,
        step: int | None = None,
        target: PyTree | None = None,
        *,
        subset: bool = False,
        check: Callable[[Mapping[str, Any]], None] = lambda extra: None,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Return the state of `step` and its `extra`, after checking every file against its digest.

        Args:
            step: default is the latest. After restoring an earlier step, the next save removes the later ones.
            target: arrays, or `jax.ShapeDtypeStruct` with shardings (default: the first device), in the wanted nesting.
                Devices and layout may differ from those at saving. When not set: nested dicts on the first device.
            subset: skip saved leaves that are not in `target` (to load only the parameters, say); otherwise an error.
            check: called with `extra` before the leaves are compared; it may raise its own error.

        Raises:
            ResumeError: the step does not exist; a file is damaged (the message names the last intact step); or a leaf
                is missing or differs in dtype or shape from `target`.
        """
        self.wait()
        step = self._existing(step)
        place = self._steps.place(step)
        if damage := find_damage(self._steps, step):
            raise self._damaged(step, damage)
        meta = self._meta(step)
        check(meta["extra"])
        flat = _abstract(meta["leaves"]) if target is None else flatten(target)
        _refuse_misfit(flat, meta["leaves"], subset, place)
        loaded = _load(f"{place}/{ARRAYS}", flat, meta["leaves"])
        self._abandoned = {later for later in self.steps() if later > step}
        if target is None:
            return _nested(loaded), meta["extra"]
        return jax.tree.unflatten(jax.tree.structure(target), list(loaded.values())), meta["extra"]

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
        lock, self._lock, self._reads_only = self._lock, None, True
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if lock is not None:
                lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish_interrupted(self, lock: IO[bytes]) -> None:
        try:
            self._steps.finish_interrupted()
        except Exception:
            lock.close()
            raise

    def _open_bucket(self, address: str) -> BucketSteps | None:
        try:
            return open_bucket(self.folder, address, writes=self._lock is not None)
        except Exception:
            if self._lock is not None:
                self._lock.close()
            raise

    def _prepare(self, step: int, needed: int) -> None:
        """Refuse a step that cannot be written; remove what an earlier attempt has left."""
        self._refuse_going_back(step)
        try:
            self._steps.prepare(step, needed)
        except OSError as error:
            raise self._not_written(step, needed, str(error)) from error

    def _complete_jointly(self, step: int, meta: str, writing: Future[None], needed: int) -> None:
        """Run in the worker thread of each process, after Orbax: digest its own files; process 0 completes the step."""
        with together("checkpoint/written"):
            writing.result()
        digests = gather_digests(self._steps, step)
        with together("checkpoint/complete"):
            if self._is_first:
                self._complete(step, meta, writing, needed, digests)

    def _complete(self, step: int, meta: str, writing: Future[None], needed: int, known: Digests | None = None) -> None:
        """Run in the worker thread, after Orbax: seal, rename into place, and remove steps no longer kept.

        Args:
            step: the step.
            meta: text of meta.json.
            writing: what Orbax does.
            needed: bytes of the step.
            known: digests of files that were digested by the processes that have written them.
        """
        release_free_memory()  # of what Orbax encoded
        try:
            writing.result()
            self._steps.complete(step, {META: meta.encode()}, known)
        except (OSError, ValueError) as error:  # Orbax turns a full disk into a ValueError
            self._steps.discard(step)
            raise self._not_written(step, needed, str(error)) from error
        self._drop_old(step)

    def _drop_old(self, step: int) -> None:
        """Remove the steps made obsolete by `step`: those this run rolled back, and those beyond `max_to_keep`."""
        for abandoned in self._abandoned - {step}:
            self._steps.remove(abandoned)
        self._abandoned = set()
        best = self.best()
        for old in self.steps()[: -self._max_to_keep]:
            if old != best:
                self._steps.remove(old)

    def _meta(self, step: int) -> dict[str, Any]:
        try:
            meta = json.loads(self._steps.read(step, META))
            problem = _wrong_in_meta(meta)
        except (OSError, ValueError, RecursionError) as error:  # the digests agree, so it was sealed like that
            problem = f"cannot be read ({error})"
        if problem:
            raise self._damaged(step, f"{META} {problem}")
        return dict(meta)

    def _score(self, step: int) -> float | None:
        try:
            meta = json.loads(self._steps.read(step, META))
        except (OSError, ValueError, RecursionError):  # damaged: `restore` raises the error
            return None
        return number(meta.get("score")) if isinstance(meta, dict) else None

    def _not_written(self, step: int, needed: int, why: str) -> ResumeError:
        free = self._steps.free()
        room = "" if free is None else f" ({free:,} are free)"
        return ResumeError(
            f"checkpoint {step} could not be written: {why}",
            want=f"{needed:,} bytes of room{room}, and the right to write",
            fix="make room and resume; the checkpoints before it are whole",
            where=self.address or str(self.folder),
        )

    def _refuse_going_back(self, step: int) -> None:
        later = [found for found in self.steps() if found > step and found not in self._abandoned]
        if later:
            raise ResumeError(
                f"checkpoint {step} would come before {later[-1]}, which is already there",
                want="one run in a folder",
                fix=f"resume from {later[-1]}, or choose another folder",
                where=str(self.folder),
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
        good = next((before for before in earlier if not self._steps.damage(before)), None)
        fix = f"remove this folder to go on from {good}, the last step that is whole" if good is not None else ""
        return ResumeError(
            f"checkpoint {step} is damaged: {damage}",
            want="files as they were written",
            fix=fix or "start again: no earlier checkpoint is whole",
            where=self._steps.place(step),
        )


def _write(path: str, arrays: Mapping[str, jax.Array], joint: bool) -> Callable[[], Any]:
    """Let Orbax begin to write the arrays; return a function that waits until they are written.

    With several processes, `v1` waits for the others to save too and refuses arrays of one process alone. So one that
    saves alone uses Orbax's older API, which does neither; it writes the same files from host arrays.
    """
    if not arrays:
        return lambda: None
    if joint or jax.process_count() == 1:
        context, largest = ocp.Context(), max(leaf.nbytes for leaf in arrays.values())
        context.memory.write_concurrent_bytes = max(BYTES_IN_FLIGHT, largest + 1)  # an array must be smaller
        with context:
            wait: Callable[[], Any] = ocp.save_async(path, {n: _of_all(x, joint) for n, x in arrays.items()}).result
        return wait
    on_host = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    return lambda: _write_alone(path, on_host)


def _of_all(leaf: jax.Array, joint: bool) -> Any:
    """Return what Orbax takes for `leaf`: in a joint save, an array that each process has alone goes by its values."""
    return np.asarray(leaf) if joint and leaf.is_fully_addressable else leaf


def _write_alone(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    me = jax.process_index()
    alone = legacy.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    tree = legacy.PyTreeCheckpointHandler(multiprocessing_options=alone)
    options = legacy.CompositeOptions(multiprocessing_options=alone)
    handler = legacy.CompositeCheckpointHandler(composite_options=options, state=tree)
    with legacy.Checkpointer(handler, multiprocessing_options=alone) as saver:
        saver.save(path, legacy.args.Composite(state=legacy.args.PyTreeSave(arrays)))


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
    """Filter out the traceback that Orbax logs in each of its threads when a save fails: `wait` raises that error."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _entry(name: str, leaf: Any) -> dict[str, Any]:
    """Return the entry of a leaf in meta.json."""
    if not isinstance(leaf, jax.Array):
        kind = type(leaf).__name__
        raise CoveyError(
            f"leaf {name!r} of a checkpoint is a {kind}", want="JAX arrays", fix="put other values into `extra`"
        )
    entry: dict[str, Any] = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    return entry | {"key": str(jax.random.key_impl(leaf))} if _is_key(leaf) else entry


def _wrong_in_meta(meta: Any) -> str:
    """Describe what is wrong in the content of meta.json; empty when it has the form that `save` writes."""
    if not isinstance(meta, dict) or not all(isinstance(meta.get(name), dict) for name in ("leaves", "extra")):
        return "has not the mappings leaves and extra"
    odd = [name for name, entry in meta["leaves"].items() if not _is_entry(entry)]
    return f"describes no array at {odd[0]!r}" if odd else ""


def _is_entry(entry: Any) -> bool:
    """Return whether `entry` has the form that `_entry` gives, with a type that exists."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, implementation = entry.get("shape"), entry.get("key")
    try:
        dtype = jnp.dtype(entry["dtype"]) if implementation is None else jax.random.key(0, impl=implementation).dtype
    except (TypeError, ValueError, AttributeError):
        return False
    return str(dtype) == entry["dtype"] and isinstance(shape, list) and all(map(is_count, shape))


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _is_in_host_memory(leaf: jax.Array) -> bool:
    return any(device.platform == "cpu" for device in leaf.devices())


def _as_stored(leaf: jax.Array) -> jax.Array:
    """Return the array to store for a leaf: random keys are stored as their uint32 data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _abstract(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Build a target on the first device for every saved leaf."""

    def one(entry: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        dtype = jax.random.key(0, impl=entry["key"]).dtype if "key" in entry else jnp.dtype(entry["dtype"])
        return jax.ShapeDtypeStruct(tuple(entry["shape"]), dtype)

    return {name: one(entry) for name, entry in leaves.items()}


def _load(path: str, target: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Load the leaves of `target` from Orbax, in the order and with the shardings of `target`."""

    def stored(leaf: Any) -> jax.ShapeDtypeStruct:
        plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        plain = jax.eval_shape(jax.random.key_data, plain) if _is_key(leaf) else plain
        return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=_sharding(leaf))

    wanted = {name: stored(leaf) for name, leaf in target.items() if 0 not in leaf.shape}
    shared = {name: leaf for name, leaf in wanted.items() if not leaf.sharding.is_fully_addressable}
    own = {name: leaf for name, leaf in wanted.items() if name not in shared}
    found = _load_arrays(path, shared, joint=True) | _load_arrays(path, own, joint=False)

    def as_saved(name: str, leaf: Any) -> jax.Array:
        if name not in found:
            empty: jax.Array = jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _sharding(leaf))
            return empty
        data: jax.Array = found[name]
        return jax.random.wrap_key_data(data, impl=leaves[name]["key"]) if _is_key(leaf) else data

    return {name: as_saved(name, leaf) for name, leaf in target.items()}


def _load_arrays(path: str, wanted: Mapping[str, jax.ShapeDtypeStruct], joint: bool) -> dict[str, jax.Array]:
    """Load arrays from Orbax: those over several processes together, those of this process alone without the others."""
    if not wanted:
        return {}
    context = ocp.Context()
    if jax.process_count() > 1 and not joint:  # Orbax would wait for the others at each array
        me = jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = me, {me}
    context.pytree.loading.partial_load = True
    with context:
        found: dict[str, jax.Array] = ocp.load(path, wanted)
    return found


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _refuse_misfit(target: Mapping[str, Any], leaves: Mapping[str, Any], subset: bool, place: str) -> None:
    """Refuse a target with leaves that are missing, superfluous, or of another dtype or shape; name each of them."""
    wrong = [f"{name} is not in the checkpoint" for name in target if name not in leaves]
    wrong += [f"{name} is not in the target" for name in leaves if name not in target and not subset]
    for name, leaf in target.items():
        have = leaves.get(name, {"dtype": str(leaf.dtype), "shape": list(leaf.shape)})
        want = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
        if (have["dtype"], have["shape"]) != (want["dtype"], want["shape"]):
            saved, wanted = (f"{entry['dtype']}{entry['shape']}" for entry in (have, want))
            wrong.append(f"{name} was saved as {saved}, wanted is {wanted}")
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ResumeError(
            "the checkpoint does not fit: " + "; ".join(wrong[:5]) + more,
            want="the model, adapters and optimizer it was saved with",
            fix="resume with the recipe in the run folder",
            where=place,
        )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree
