"""Functions that all exports share: create a new folder atomically, cast tensors to the requested type, write and
verify safetensors files, and compare the written model with the one in memory.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from covey.errors import CoveyError, WeightsError
from covey.models import families
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder
from covey.models.loading.weights import open_safetensors
from covey.models.lora import merge_kernel, projections
from covey.parallel import processes
from covey.parallel.arrays import flatten


class Difference(NamedTuple):
    """Difference between the logits of two models: the largest one, and the largest logit for comparison. Where no
    process has the whole model, the tensors that were read back are equal, and the largest logit is not known (nan).
    """

    max_difference: float
    max_logit: float


def check_new_folder(out: Path) -> None:
    """Check that a path is not yet in use.

    Raises:
        CoveyError: `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CoveyError(
            "something is already here, and an export replaces nothing",
            want="a new or empty folder",
            fix="--out ANOTHER",
            where=str(out),
        )


@contextmanager
def new_folder(out: Path, card: str) -> Iterator[Path]:
    """Yield a temporary folder next to `out`, with `card` as its README.md. Rename it to `out` at the end, or delete it
    on failure. Several processes share the folder, which the first process makes and renames.

    Raises:
        CoveyError: `out` is already in use, or the folder cannot be written.
    """
    draft = out.with_name(f".{out.name}.{processes.here().broadcast(secrets.token_hex(4), 'export/name')}")
    first = jax.process_index() == 0
    try:
        with processes.here().together("export/folder"):
            if first:
                check_new_folder(out)
                draft.mkdir(parents=True)
                (draft / "README.md").write_text(card, encoding="utf-8")
        yield draft
        with processes.here().together("export/rename"):
            if first:
                check_new_folder(out)
                os.rename(draft, out)  # replaces an empty folder and nothing else
    except OSError as error:
        raise CoveyError(f"cannot be written: {error.strerror or error}", where=str(out)) from error
    finally:
        if first:
            shutil.rmtree(draft, ignore_errors=True)


def lies_over_processes(model: Decoder) -> bool:
    """Return whether this process has only a part of the model."""
    return any(not array.is_fully_addressable for array in jax.tree.leaves(nnx.state(model)))


def export_parameters(model: Decoder, dtype: str, vectors: str | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (our path, array in our layout and in `dtype`) per parameter, adapters merged; one on the host at a time.

    `vectors` is the type of norms and biases where it differs from `dtype`.
    """
    for path, on_devices in export_arrays(model, dtype, vectors):
        array = np.asarray(on_devices)
        del on_devices
        yield path, array
        del array  # free it before the next is made


def export_arrays(model: Decoder, dtype: str, vectors: str | None = None) -> Iterator[tuple[str, jax.Array]]:
    """Yield (our path, array on the devices) as `export_parameters` does."""
    state, linears = parameter_arrays(model), projections(model)
    for path in families.parameter_paths(model.config):
        linear, array = linears.get(path.removesuffix(".kernel")), state[path]
        kind = dtype if array.ndim > 1 else vectors or dtype
        yield path, array.astype(kind) if linear is None else merge_kernel(linear, kind)


def parameter_arrays(model: Decoder) -> dict[str, Any]:
    """Return our path → the object that holds the parameter: it has a shape, and a kernel may be quantised."""
    kernels = {f"{path}.kernel": linear.kernel for path, linear in projections(model).items()}
    return flatten(nnx.state(model)) | kernels


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` to a safetensors file and read it back.

    Raises:
        WeightsError: what was read differs from what was written.
    """
    import safetensors.numpy

    # safetensors writes raw memory: an array that is not C-contiguous would be written in the wrong order.
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes it private; the folder has the user's umask
    with open_safetensors(file) as written:
        wrong = [name for name, tensor in contiguous.items() if written.get_tensor(name).tobytes() != tensor.tobytes()]
    if wrong:
        raise WeightsError(f"{wrong[0]} was not written as it is in memory", where=file.name)


def compare_logits(model: Decoder, written: Decoder, vocabulary: int, dtype: str, where: Path) -> Difference:
    """Compare the logits of `written` and `model` on random tokens of the vocabulary.

    Raises:
        WeightsError: they differ by more than rounding to `dtype` explains.
    """
    tokens = np.random.RandomState(0).randint(0, vocabulary, (2, min(32, model.config.max_positions)))
    ours, theirs = causal_logits(model, tokens), causal_logits(written, tokens)
    error = np.abs(ours - theirs)
    difference = Difference(float(error.max()), float(np.abs(ours).max()))
    if not error.mean() <= MAX_MEAN_DIFFERENCE[dtype] * ours.std():
        raise WeightsError(
            f"what was written is another model: its logits differ by up to {difference.max_difference:.3g}",
            want=f"little beside {difference.max_logit:.3g}, the largest logit",
            fix="none of yours, this is a defect; bfloat16 adds to it: --dtype float32",
            where=where.name,
        )
    return difference


def causal_logits(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Return float32 logits [B, T, V] under causal attention."""
    return np.asarray(_causal_logits(*nnx.split(model), jnp.asarray(tokens)))


@partial(jax.jit, static_argnums=0)
def _causal_logits(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    model, positions = nnx.merge(graph, state), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits: jax.Array = model.logits(
        model(tokens, positions, causal_attention(jnp.ones(tokens.shape, bool), positions))[0]
    )
    return logits


MAX_MEAN_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest allowed mean difference of logits per type, as a fraction of their spread. A transposed or misplaced matrix
causes more than 1.
"""
