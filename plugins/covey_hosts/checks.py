"""Checks that several processes make together: all run the same code on the same recipe, data and weights, and all see
one folder.

A process with other code would compute other numbers from the same data, and nothing later notices it. A folder that
each machine has for itself stops a run at its first save, where each process waits for the files of the others. With
one process nothing is checked.
"""

import hashlib
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import covey
from covey.errors import CoveyError, RecipeError
from covey.parallel import channel

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose version may change results."""
NAMED = 5
"""Largest number of differences that an error names for a process, and of processes that it names."""


def check_same_code() -> None:
    """Refuse processes that have other versions of Python and of packages than process 0, or another source of Covey.

    Raises:
        RecipeError: some have.
    """
    check_same(
        "code",
        lambda: versions() | source_digests(),
        want="the same versions, and the same files of Covey, in all processes",
        fix="install on all machines what process 0 has: its pip freeze, its wheel or commit of Covey",
    )


def check_same(about: str, value: Callable[[], Any], fix: str, want: str = "the same in all processes") -> None:
    """Refuse processes whose `value` differs from that of process 0; with one process it is not computed.

    Args:
        about: name of what is compared.
        value: function that returns the value of this process; differences of dicts are named, without digests.
        fix: way to mend it, in the error.
        want: wanted, in the error.

    Raises:
        RecipeError: the values differ.
    """
    if channel.current() is None:
        return
    everyone = channel.all_gather((socket.gethostname(), value()), about)
    host, first = everyone[0]
    others = [
        f"process {number} on {place}{_differences(first, theirs)}"
        for number, (place, theirs) in enumerate(everyone)
        if theirs != first
    ]
    if others:
        raise RecipeError(
            f"{about} differs from that of process 0 on {host}: {'; '.join(others[:NAMED])}", want=want, fix=fix
        )


def fingerprint(tree: Any) -> int:
    """Return a checksum of the bits of all arrays of `tree`; differences that cancel out in the sum go unnoticed."""
    return int(_bits(tree))


@jax.jit
def _bits(tree: Any) -> jax.Array:
    """Sum the arrays' bits as integers modulo 2³²: the order, and so the sharding, does not matter."""
    total: jax.Array = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        total += jnp.sum(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)
    return total


def check_shared_folder(folder: Path) -> None:
    """Refuse a folder that is not one and the same for all processes, or that one of them cannot write in. Process 0
    creates it if it is missing, and writes a new file, which all read.

    Raises:
        CoveyError: a process sees another folder or none, or may not write there.
    """
    if (between := channel.current()) is None:
        return
    folder, first = folder.absolute(), between.index == 0
    mine = {"name": f".shared-{secrets.token_hex(8)}", "text": secrets.token_hex(16), "folder": str(folder)}
    problem = _problem(lambda: _write(folder, mine)) if first else ""
    announced, failed = channel.broadcast((mine, problem), "folder")
    try:
        if not failed and not first:
            problem = _problem(lambda: _read(folder, announced, between.index))
        problems = channel.all_gather((socket.gethostname(), problem), "problems of the folder")
    finally:
        if first:
            (folder / mine["name"]).unlink(missing_ok=True)
    for number, (host, problem) in enumerate(problems):
        if problem:
            raise CoveyError(
                f"process {number} on {host}: {problem}",
                want="one folder that all processes share and may write in",
                fix="mount one file system (NFS, Lustre, a bucket through gcsfuse or mount-s3) at the same path on all "
                "machines, and name a folder there by its absolute path",
                where=announced["folder"],
            )


def versions() -> dict[str, str]:
    """Return the versions of Covey, Python and `PACKAGES`; of Python as far as results follow from it: its `sum` of
    floats has changed in 3.12.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {"covey": covey.__version__, "python": python} | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """Return the version of an installed package, or "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def source_digests() -> dict[str, str]:
    """Return the SHA-256 of each module and recipe of Covey, by its path in the package."""
    root = Path(covey.__file__).parent
    files = (path for path in root.rglob("*") if path.suffix in (".py", ".yaml"))
    return {f"covey/{path.relative_to(root).as_posix()}": digest_of(path) for path in files}


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, line ends as they are."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _differences(wanted: Any, value: Any) -> str:
    if not (isinstance(wanted, Mapping) and isinstance(value, Mapping)):
        return ""
    names = [name for name in sorted(wanted.keys() | value.keys()) if wanted.get(name) != value.get(name)]
    differences = [_difference(name, str(wanted.get(name, "")), str(value.get(name, ""))) for name in names[:NAMED]]
    return ": " + ", ".join([*differences, *([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])])


def _difference(name: str, wanted: str, value: str) -> str:
    if not value:
        return f"{name} is missing"
    if len(wanted) == 64 or len(value) == 64:  # digests say nothing to a reader
        return f"{name} is {'another file' if wanted else 'not there in process 0'}"
    return f"{name} is {value}, there {wanted or 'missing'}"


def _problem(call: Callable[[], str]) -> str:
    try:
        return call()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _write(folder: Path, mine: Mapping[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mine["name"]).write_text(mine["text"])
    return ""


def _read(folder: Path, announced: Mapping[str, str], index: int) -> str:
    """Read the file of process 0 and write one beside it as process `index`; describe what is wrong."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    # Asks the server of a network file system, which this machine would else only do when its cache has run out.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if (folder / announced["name"]).read_text() != announced["text"]:
            return f"{folder} has another content than process 0 has written there"
    except FileNotFoundError:
        for path in missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        return f"{folder} is not the folder of that path in process 0: a file written there is not here"
    probe = folder / f"{announced['name']}-{index}"
    probe.write_text("")
    probe.unlink()
    return ""
