"""Checkpoints of the Hugging Face hub, `hf:org/name[@revision]`, through huggingface_hub. No JAX here."""

import logging
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from covey.errors import WeightsError
from covey.models.loading.sources import Resolved
from covey.registry import import_package

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
PROBE_SECONDS = 5.0
"""Timeout of the request for a commit, after which the hub counts as unreachable."""


def resolve_hub(repo: str, revision: str) -> Resolved:
    """Return the snapshot of one commit; from the hub's own cache if the hub is unreachable.

    Args:
        repo: `org/name`.
        revision: branch, tag or commit.

    Raises:
        WeightsError: the hub has no such repository, or the download failed.
    """
    hub = import_hub()
    try:
        commit = _latest_commit(hub, repo, revision)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise WeightsError(
            f"the hub has no {repo!r} at revision {revision!r}, or it is private",
            fix="check the spelling; for a private or gated model log in with `hf auth login`",
        ) from error
    except Exception as error:  # whatever the reason the hub is unreachable, a complete local copy is as good
        return resolve_hub_offline(hub, repo, revision, error)
    log.info(f"fetching hf:{repo}@{commit} (files already here are kept)")
    try:
        return _download_snapshot(hub, repo, revision)  # not the commit: the hub's cache would not record `revision`
    except Exception as error:
        raise WeightsError(
            f"the download of hf:{repo} failed: {error}", fix="try again: it goes on where it stopped"
        ) from error


def resolve_hub_offline(hub: Any, repo: str, revision: str, reason: Exception) -> Resolved:
    """Return the snapshot of a commit from the hub's own cache.

    Args:
        hub: the package huggingface_hub.
        repo: `org/name`.
        reason: why the hub is not asked, for the error.

    Raises:
        WeightsError: it is not there in full.
    """
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


def import_hub() -> Any:
    """Import huggingface_hub."""
    hub = import_package("huggingface_hub", WeightsError, "hf: sources need the package huggingface_hub", "hub")
    resolve_name("huggingface_hub.errors:HfHubHTTPError")  # which it does not import by itself
    return hub
