"""Publish a run on the Hugging Face hub: its model with the card, and the records that the user agreed to publish."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.display import echo
from covey.errors import CoveyError
from covey.extras import install_command
from covey.files import open_below
from covey.report import REPORT, write_report
from covey.run.export import export


def publish(
    run: Path, repository: str, records: Sequence[str], private: bool, form: str, dtype: str | None, shard_size: int
) -> None:
    """Upload the trained model of `run` and its `records` to `repository` in one commit.

    Args:
        run: the run folder.
        repository: `org/name` on the hub; it is created if it does not exist.
        records: names of files of the run folder; the report is written anew.
        private: whether a new repository is private.
        form, dtype, shard_size: of the model's files, as for `export`.

    Raises:
        CoveyError: the package for the hub or a login is missing, the hub refuses, or the run cannot be exported.
    """
    api = open_hub()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        export(str(run), folder, form, dtype, shard_size)
        for name in records:
            if name == REPORT:
                write_report(folder / REPORT, [run])
            else:
                with open_below(run, name) as record, (folder / name).open("xb") as copy:
                    shutil.copyfileobj(record, copy)
        with _hub_errors(f"publishing {repository}"):
            api.create_repo(repository, private=private, exist_ok=True)
            echo(f"uploading {len(list(folder.iterdir()))} files")
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Publish a run of Covey")
    echo(f"published: {api.endpoint}/{repository}")


def open_hub() -> Any:
    """Return the client of the hub, logged in.

    Raises:
        CoveyError: the package is missing, there is no valid login, or the hub cannot be reached.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise CoveyError("publishing needs the package huggingface_hub", fix=install_command("hub")) from None
    api = huggingface_hub.HfApi()
    with _hub_errors("asking the hub who is logged in"):
        try:
            user = api.whoami()
        except (huggingface_hub.errors.LocalTokenNotFoundError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise CoveyError(f"no login that {api.endpoint} accepts", fix="hf auth login") from error
    echo(f"logged in at {api.endpoint} as {user.get('name', 'unknown')}")
    return api


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Convert whatever the hub's package raises to an error of the user."""
    try:
        yield
    except CoveyError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        told = f"{what} failed: {type(error).__name__}: {reason:.300}"
        raise CoveyError(told, fix="check the name, your right to write there, and the network") from error
