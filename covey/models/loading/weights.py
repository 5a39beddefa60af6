"""Loading of pretrained weights: convert a source to a model, its tokenizer and its config.

The decoder is built abstractly (shapes only) and filled one tensor at a time, each cast or quantised and put on its
devices (on a mesh: in shards), so the host never holds more than one tensor. Each of several processes reads of a
folder what its own devices hold (`stored_tensor`). Tensors of the checkpoint and parameters of the model must match one
to one, with equal shapes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from covey.errors import WeightsError
from covey.files import check_file
from covey.models import families
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder, DecoderOptions, abstract_decoder, rngs_for_shapes
from covey.models.dtypes import resolve_compute_dtype
from covey.models.loading import config_fields, hf_config, sources
from covey.models.loading.gguf import GGUFCheckpoint
from covey.models.loading.stored_tensor import StoredTensor
from covey.models.quantised import parse_format, quantise_tensors
from covey.models.scratch import PREFIX
from covey.models.scratch_checkpoint import ScratchCheckpoint
from covey.models.value_model import ValueModel
from covey.parallel.mesh import spans_processes
from covey.parallel.reshard import flatten
from covey.parallel.sharding import build_for_devices, shardings
from covey.text.tokenizer import Tokenizer, read_json

Model = TypeVar("Model", bound=nnx.Module)

PutArray = Callable[[str, np.ndarray], jax.Array]
"""Function that puts one tensor on its devices: (path, host array) → array of the same shape and type."""


class Checkpoint(Protocol):
    """Interface of a checkpoint: `FolderCheckpoint`, `gguf.GGUFCheckpoint` and `ScratchCheckpoint` have it."""

    config: ModelConfig
    tokenizer: Tokenizer

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, array in our layout) for each parameter, one in memory at a time; a classification head is
        `score`.
        """


@dataclass(frozen=True)
class LoadedModel(Generic[Model]):
    """A loaded model and its origin: `origin` is a source that leads to the same weights again."""

    model: Model
    tokenizer: Tokenizer
    config: ModelConfig
    origin: str


def load(
    source: str | Path,
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    remat: bool = True,
    remat_keeps: str = "products",
    quantize: str = "none",
    quantize_block: int = 64,
    mesh: Mesh | None = None,
) -> LoadedModel[Decoder]:
    """Load a pretrained language model.

    Args:
        source: a Hugging Face folder, a .gguf file, `hf:org/name[@revision]`, a name such as `smollm2-135m`, or
            `scratch:name[@seed]`.
        param_dtype, compute_dtype, remat, remat_keeps, quantize, quantize_block: see `config.schema.ModelOptions`.
        mesh: devices to shard the parameters over, by `parallel.sharding`; the default device if not given.

    Raises:
        WeightsError: the source is unavailable, incomplete, or not a supported model.
        RecipeError: there is no such format to quantise to, or its blocks do not divide the inputs of a projection.
    """
    fmt = parse_format(quantize, quantize_block)
    resolved, checkpoint = open_source(source)
    _check_language_head(checkpoint, str(resolved.path))
    abstract = abstract_decoder(
        checkpoint.config,
        fmt,
        param_dtype=param_dtype,
        compute_dtype=resolve_compute_dtype(compute_dtype),
        remat=remat,
        remat_keeps=remat_keeps,
    )
    tensors = tensors_for(checkpoint, mesh) if fmt is None else quantise_tensors(checkpoint.tensors(), fmt)
    model = fill_parameters(abstract, tensors, make_put(abstract, mesh), where=str(resolved.path))
    return LoadedModel(model, checkpoint.tokenizer, checkpoint.config, resolved.origin)


def read_settings(folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """Return config and tokenizer of a folder that need not have weights."""
    where = str(folder / "config.json")
    described = hf_config.text_config(read_json(folder / "config.json"), where)
    return families.read_config(described, where), Tokenizer.from_folder(folder)


def load_blank(config: ModelConfig, mesh: Mesh | None, **options: Any) -> Decoder:
    """Return the model of `config` with zeros in place of weights, which a checkpoint replaces."""
    options["compute_dtype"] = resolve_compute_dtype(options["compute_dtype"])
    model = abstract_decoder(config, **options)
    zeros = ((path, np.zeros(leaf.shape, np.float32)) for path, leaf in flatten(nnx.state(model)).items())
    return fill_parameters(model, zeros, make_put(model, mesh))


def tensors_for(checkpoint: Checkpoint, mesh: Mesh | None) -> Iterator[tuple[str, np.ndarray | StoredTensor]]:
    """Yield (our path, array in our layout) for each parameter. For a mesh over several processes, those of a folder
    are read slice by slice when they are put there.
    """
    if isinstance(checkpoint, FolderCheckpoint) and spans_processes(mesh):
        return checkpoint.stored()
    return checkpoint.tensors()


def open_source(source: str | Path) -> tuple[sources.Resolved, Checkpoint]:
    """Find `source` on this disk, and open its checkpoint without reading its tensors.

    Raises:
        WeightsError: the source is unavailable, not a supported model, or its tokenizer does not fit.
    """
    resolved = sources.resolve_source(source)
    from_scratch = resolved.origin.startswith(PREFIX)
    checkpoint: Checkpoint = ScratchCheckpoint(resolved.origin) if from_scratch else open_checkpoint(resolved.path)
    _check_vocabulary(checkpoint, str(resolved.path))
    return resolved, checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or .gguf file as a `Checkpoint`, without reading its tensors."""
    return GGUFCheckpoint(path) if path.is_file() else FolderCheckpoint(path)


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that the checkpoint at `path` is read from: the .gguf file itself, or those of a folder.

    Raises:
        WeightsError: the folder has no weights.
    """
    if path.is_file():
        return [path]
    beside = [path / name for name in CONFIG_FILES if (path / name).is_file()]
    return beside + [path / name for name in _safetensors_names(path)]


def num_labels(checkpoint: Checkpoint) -> int | None:
    """Return the number of labels of its classification head; None for a language model."""
    return checkpoint.num_labels() if isinstance(checkpoint, FolderCheckpoint) else None


def fill_parameters(
    model: Model, tensors: Iterable[tuple[str, np.ndarray | StoredTensor]], put: PutArray, where: str = ""
) -> Model:
    """Fill every parameter of the abstract `model` from `tensors`, cast to the parameter's type.

    Raises:
        WeightsError: a parameter has no tensor, or one of another shape.
    """
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    keys = {".".join(map(str, key)): key for key in flat}
    for path, tensor in tensors:
        slot = flat[keys[path]]
        if tensor.shape != slot.shape:
            raise WeightsError(f"{path} has shape {tensor.shape}", want=str(slot.shape), where=where)
        stored = isinstance(tensor, StoredTensor)
        host: Any = tensor.astype(slot.dtype) if stored else np.ascontiguousarray(tensor, dtype=slot.dtype)
        flat[keys.pop(path)] = slot.replace(jax.block_until_ready(put(path, host)))
        del tensor, host  # free them before the next is read
    if keys:
        raise WeightsError(f"nothing in the checkpoint fills {min(keys)}", where=where)
    return build_for_devices(nnx.merge(graph, nnx.from_flat_state(flat)))


def make_put(model: nnx.Module, mesh: Mesh | None) -> PutArray:
    """Return a function that puts each parameter of the abstract `model` on `mesh` by `parallel.sharding`; without a
    mesh, on the default device. Each device gets only its own shard, in every process of a run.
    """
    if mesh is None:
        return lambda path, tensor: jnp.asarray(_copy(tensor))
    where = flatten(shardings(nnx.state(model), mesh))

    def put(path: str, tensor: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(tensor.shape, where[path], lambda index: _copy(tensor[index]))

    return put


def _copy(tensor: np.ndarray) -> np.ndarray:
    """Return a copy. On CPU JAX may alias the memory it is given, and would then keep reading the checkpoint's file."""
    return np.array(tensor)


def _check_vocabulary(checkpoint: Checkpoint, where: str) -> None:
    tokens, rows = checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size
    if tokens > rows:
        raise WeightsError(
            f"the tokenizer has {tokens} tokens and the model embeds {rows}",
            fix="the tokenizer belongs to another model, or tokens were added without resizing the embedding",
            where=where,
        )


def _check_language_head(checkpoint: Checkpoint, where: str) -> None:
    if num_labels(checkpoint) is not None:
        raise WeightsError(
            f"this checkpoint has a classification head ({families.SCORE_TENSOR}) and no language head: "
            "it cannot write",
            fix="it can score: reward=, or with another head critic=",
            where=where,
        )


class FolderCheckpoint:
    """A Hugging Face folder: config.json, tokenizer.json, and one or many safetensors files.

    Raises:
        WeightsError: a file is missing or malformed, or the family is unknown.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._read_config(str(folder / "config.json"))
        self.tokenizer = Tokenizer.from_folder(folder)

    def _read_config(self, where: str) -> ModelConfig:
        whole = read_json(self.folder / "config.json")
        described = hf_config.text_config(whole, where)
        self._name_of = hf_config.text_name if hf_config.is_whole(whole) else str
        if families.find_family(str(described.get("model_type"))) is not None:
            config_fields.check_config(described, where)
            with self._open_tensors() as holders:
                config_fields.check_layers(described, len(holders), where)
        return families.read_config(described, where)

    def num_labels(self) -> int | None:
        """Return the number of labels; see `weights.num_labels`."""
        with self._open_tensors() as holders:
            if families.SCORE_TENSOR not in holders:
                return None
            shape = holders[families.SCORE_TENSOR].shape
        if len(shape) != 2:
            raise WeightsError(f"{families.SCORE_TENSOR} has shape {shape}", want="[labels, D]", where=str(self.folder))
        return int(shape[0])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, array in our layout and the file's type) for each parameter, one in memory at a time."""
        for path, stored in self.stored():
            tensor = stored.whole()
            yield path, tensor
            del tensor  # free it before the next is read

    def stored(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (our path, tensor in our layout that is read when it is asked for) for each parameter."""
        with self._open_tensors() as holders:
            wanted = families.tensor_names(self.config, scored=families.SCORE_TENSOR in holders)
            families.check_tensor_names(wanted, holders, self._ignored, str(self.folder))
            parts = families.shared_rows(self.config)
            shapes = {wanted[path]: holders[wanted[path]].shape for path in parts}
            families.check_shared_rows(parts, wanted, shapes, str(self.folder))
            for path, name in wanted.items():
                require_float(*holders[name], self.folder)
                yield path, StoredTensor(*holders[name], parts.get(path), families.is_transposed(path))

    @contextmanager
    def _open_tensors(self) -> Iterator[Mapping[str, "_Holder"]]:
        """Yield tensor name in the text model → the open file that holds it, and its name there."""
        with ExitStack() as stack:
            files = [
                stack.enter_context(open_safetensors(self.folder / name)) for name in _safetensors_names(self.folder)
            ]
            stored = [_Holder(file, name) for file in files for name in file.keys()]  # noqa: SIM118
            yield {name: holder for holder in stored if (name := self._name_of(holder.name)) is not None}

    def _ignored(self, name: str) -> bool:
        """Return True for a tensor that the model does not need: a copy of a tied head, or derived from the config."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tie_embeddings and name == "lm_head.weight")


class _Holder(NamedTuple):
    """An open safetensors file, and the name of a tensor in it."""

    file: Any
    name: str

    @property
    def shape(self) -> list[int]:
        """Shape of the tensor."""
        shape: list[int] = self.file.get_slice(self.name).get_shape()
        return shape


def _safetensors_names(folder: Path) -> list[str]:
    """Return the names of the checkpoint's safetensors files; the folder may hold others."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _names_in_index(index)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise WeightsError(
        "no model.safetensors and no model.safetensors.index.json in this folder",
        fix="for older formats, save again with safetensors: model.save_pretrained(folder)",
        where=str(folder),
    )


def _names_in_index(index: Path) -> list[str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise WeightsError("holds no weight_map from tensor to file", where=str(index))
    for name in sorted(set(entries.values())):
        if not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise WeightsError(f"{name!r} leaves the folder", want="*.safetensors beside the index", where=str(index))
    return sorted(set(entries.values()))


def open_safetensors(file: Path) -> Any:
    """Open a safetensors file as a context manager, without reading its tensors.

    Raises:
        WeightsError: the file is incomplete; see also `files.check_file`.
    """
    import safetensors

    check_file(file)
    try:
        return safetensors.safe_open(file, "numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(
            f"not a whole safetensors file: {error}",
            fix="the download may have been cut short: fetch it again",
            where=str(file),
        ) from error


def read_float(file: Any, name: str, folder: Path) -> np.ndarray:
    """Read one tensor in the file's type.

    Raises:
        WeightsError: it does not hold floating-point numbers.
    """
    require_float(file, name, folder)
    return StoredTensor(file, name).whole()


def require_float(file: Any, name: str, folder: Path) -> None:
    """Check that a tensor holds floating-point numbers; a WeightsError names one that does not."""
    kind = file.get_slice(name).get_dtype()
    if kind not in FLOAT_TYPES:
        raise WeightsError(f"{name} is stored as {kind}", want="one of: " + ", ".join(FLOAT_TYPES), where=str(folder))


FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
CONFIG_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
"""Names of the files that are read from a folder besides its weights."""


def load_value_model(
    source: str | Path,
    *,
    new_head: bool = False,
    mesh: Mesh | None = None,
    **options: Unpack[DecoderOptions],
) -> LoadedModel[ValueModel]:
    """Load a reward model, or the start of a critic.

    Args:
        source: as for `load`. A *ForSequenceClassification folder with num_labels 1 brings its head.
        new_head: accept a language model too, and give it a zero head, as the start of a critic.
        mesh, options: as for `load`.

    Raises:
        WeightsError: the source is unavailable or incomplete, its head has more than one label, or it is a language
            model and `new_head` is not set.
    """
    resolved, checkpoint = open_source(source)
    labels = num_labels(checkpoint)
    _check_labels(labels, new_head, str(resolved.path))
    config = replace(checkpoint.config, tie_embeddings=True)
    build = lambda: ValueModel(Decoder(config, rngs=rngs_for_shapes(), **options))  # noqa: E731
    tensors = _value_tensors(tensors_for(checkpoint, mesh), zero=config.hidden_size if labels is None else 0)
    abstract = nnx.eval_shape(build)
    model = fill_parameters(abstract, tensors, make_put(abstract, mesh), where=str(resolved.path))
    return LoadedModel(model, checkpoint.tokenizer, config, resolved.origin)


load_critic = partial(load_value_model, new_head=True)


def _check_labels(labels: int | None, new_head: bool, where: str) -> None:
    wanted = "a *ForSequenceClassification folder with num_labels 1 (score.weight [1, hidden size])"
    if labels not in (None, 1):
        raise WeightsError(
            f"this is a classifier with num_labels {labels}",
            want=wanted,
            fix="a model trained for one score, with num_labels=1",
            where=where,
        )
    if labels is None and not new_head:
        raise WeightsError(
            "this is a language model: it has no score.weight and cannot score",
            want=wanted,
            fix="a reward model; as critic a language model will do",
            where=where,
        )


def _value_tensors(
    given: Iterable[tuple[str, np.ndarray | StoredTensor]], zero: int
) -> Iterator[tuple[str, np.ndarray | StoredTensor]]:
    """Yield a checkpoint's tensors under the value model's paths; with `zero`, a head of that many zeros."""
    for path, tensor in given:
        if path == "score":
            yield path, (tensor.whole() if isinstance(tensor, StoredTensor) else tensor)[0]
        elif path != "head.embedding":
            yield f"decoder.{path}", tensor
        del tensor  # free it before the next is read
    if zero:
        yield "score", np.zeros(zero, np.float32)
