"""Adapters and states of AdamW as files of a folder: one for each name, replaced as a whole."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from covey.files import replace_file
from covey.parallel.arrays import flatten
from covey_serve.errors import ApiError
from covey_serve.training import Trained, Trainer

PATH = re.compile(r"tinker://[A-Za-z0-9:-]{1,64}/(weights|sampler_weights|bases)/[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_path(path: str) -> str:
    """Return the path of a state.

    Raises:
        ApiError: it is none.
    """
    if PATH.fullmatch(path) is None:
        raise ApiError(f"{path!r:.120} is no path of a state", param="path")
    return path


class States:
    """The folder of saved states.

    Args:
        folder: the folder.
        trainer: makes adapters, whose arrays a state must have.
    """

    def __init__(self, folder: Path, trainer: Trainer):
        self._folder, self._trainer = folder, trainer

    def file(self, path: str) -> Path:
        """Return the file of a state.

        Raises:
            ApiError: it is no path of a state.
        """
        model, kind, name = check_path(path).split("/")[2:]
        return self._folder / model / kind / f"{name}.safetensors"

    def save(self, path: str, model: Trained, *, moments: bool) -> None:
        """Write the adapters of a model, with the state of AdamW if `moments`."""
        file, tree = self.file(path), _tree(model, moments)
        file.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: jax.device_get(x) for name, x in flatten(tree).items()}
        # One entry: safetensors writes several in any order.
        facts = {"facts": json.dumps({"rank": model.rank, "steps": model.steps})}
        replace_file(file, safetensors.numpy.save(arrays, facts))

    def keep(self, path: str, name: str) -> None:
        """Give the present state at a path a second name, at which it stays when the first is saved again."""
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.hardlink_to(self.file(path))

    def forget_before(self, path: str) -> None:
        """Remove the states at the folder of a path whose names are numbers below its own."""
        last = self.file(path)
        for file in last.parent.glob("*.safetensors"):
            if int(file.stem) < int(last.stem):
                file.unlink()

    def rank(self, path: str) -> int:
        """Return the rank of saved adapters."""
        with self._open(path) as file:
            return _facts(file)["rank"]

    def load(self, path: str, *, moments: bool) -> Trained:
        """Return the adapters of a state, with the saved state of AdamW if `moments`, otherwise with a new one.

        Raises:
            ApiError: there is no such state, or it does not fit the model.
        """
        model = self._trainer.create(self.rank(path), 0)
        tree = _tree(model, moments)
        wanted = flatten(tree)
        with self._open(path) as file:
            if missing := wanted.keys() - set(file.keys()):
                raise ApiError(f"{path} has no {min(missing)}", param="path")
            arrays = {name: jnp.asarray(file.get_tensor(name)) for name in wanted}
            steps = _facts(file)["steps"]
        if any((arrays[name].shape, arrays[name].dtype) != (x.shape, x.dtype) for name, x in wanted.items()):
            raise ApiError(f"{path} is a state of another model", param="path")
        loaded = jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in wanted])
        return Trained(model.rank, loaded["params"], loaded.get("moments", model.moments), steps)

    def _open(self, path: str) -> Any:
        try:
            return safe_open(self.file(path), "numpy")
        except (OSError, SafetensorError) as error:
            raise ApiError(f"there is no state {path}", 404, "path") from error


def _facts(file: Any) -> dict[str, int]:
    """Return the rank and the number of steps of a state; earlier versions wrote the rank alone."""
    metadata = file.metadata()
    facts: dict[str, int] = json.loads(metadata.get("facts") or f'{{"rank": {metadata["rank"]}, "steps": 0}}')
    return facts


def _tree(model: Trained, moments: bool) -> dict[str, Any]:
    return {"params": model.trainable} | ({"moments": model.moments} if moments else {})
