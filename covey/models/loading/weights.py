"""Loading of pretrained weights: convert a source to a model, its tokenizer and its config.

The decoder is built abstractly (shapes only) and filled one tensor at a time, each cast or quantised and put on its
devices (on a mesh: in shards), so the host never holds more than one tensor. Each of several processes reads of a
folder what its own devices hold (`stored_tensor`). Tensors of the checkpoint and parameters of the model must match one
to one, with equal shapes.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, Unpack

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
from covey.models.loading.cache import files_digest
from covey.models.loading.stored_tensor import StoredTensor
from covey.models.scratch import PREFIX
from covey.models.scratch_checkpoint import ScratchCheckpoint
from covey.models.stored_kernel import find_format
from covey.models.value_model import ValueModel
from covey.parallel.arrays import build_for_devices, flatten, shardings
from covey.parallel.mesh import spans_processes
from covey.registry import offered
from covey.text.tokenizer import Tokenizer, read_json

Model = TypeVar("Model", bound=nnx.Module)

log = logging.getLogger(__name__)

PutArray = Callable[[str, np.ndarray], jax.Array]
"""Function that puts one tensor on its devices: (path, host array) → array of the same shape and type."""


class Checkpoint(Protocol):
    """Interface of a checkpoint: `FolderCheckpoint`, `ScratchCheckpoint`, and readers of `covey.weights`."""

    config: ModelConfig
    tokenizer: Tokenizer

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, array in our layout) for each parameter, one in memory at a time; a classification head is
        `score`.
        """

    def check(self) -> object:
        """Check names and shapes of all tensors, without reading them.

        Raises:
            WeightsError: one is missing, is not expected or has another shape.
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
        mesh: devices to shard the parameters over, by `parallel.arrays`; the default device if not given.

    Raises:
        WeightsError: the source is unavailable, incomplete, or not a supported model.
        RecipeError: there is no such format to quantise to, or its blocks do not divide the inputs of a projection.
    """
    fmt = find_format(quantize, quantize_block)
    resolved, checkpoint = open_source(source)
    _check_head(num_labels(checkpoint), "model", str(resolved.path))
    abstract = abstract_decoder(
        checkpoint.config,
        fmt,
        param_dtype=param_dtype,
        compute_dtype=resolve_compute_dtype(compute_dtype),
        remat=remat,
        remat_keeps=remat_keeps,
    )
    tensors = tensors_for(checkpoint, mesh) if fmt is None else fmt.tensors(checkpoint.tensors())
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
    """Yield (our path, array in our layout) for each parameter. For a mesh over several processes, tensors of a folder
    are read slice by slice when they are put on devices.
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
    _tell_unread(resolved.path)
    return resolved, checkpoint


def _tell_unread(path: Path) -> None:
    """Log the weights in a folder that are not read: another set of files, a GGUF file, an adapter."""
    names = {file.name for file in path.glob("*") if file.suffix in (".safetensors", ".gguf")}
    if names and (unread := sorted(names - {file.name for file in checkpoint_files(path)})):
        log.warning(f"{path} holds other weights too, which are not read: {', '.join(unread)}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a file as a `Checkpoint`, without reading its tensors.

    A package reads a kind of file, by the entry point `covey.weights` with the suffix as its name: gguf.
    """
    kind: Callable[[Path], Checkpoint] = (
        offered("covey.weights", path.suffix[1:].lower()) if path.is_file() else FolderCheckpoint
    )
    return kind(path)


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that the checkpoint at `path` is read from: the .gguf file, or files of the folder.

    Raises:
        WeightsError: the folder has no weights.
    """
    if path.is_file():
        return [path]
    beside = [path / name for name in CONFIG_FILES if (path / name).is_file()]
    return beside + [path / name for name in _safetensors_names(path)]


def check_loadable(source: str, role: str) -> None:
    """Check a checkpoint at a path as loading does, without reading weights: config, vocabulary, head, and the names,
    types and shapes of all tensors.

    Args:
        role: what the checkpoint is for: model, critic or reward_model.

    Raises:
        WeightsError: it cannot be loaded for this role.
    """
    resolved, checkpoint = open_source(source)
    _check_head(num_labels(checkpoint), role, str(resolved.path))
    checkpoint.check()


def num_labels(checkpoint: Checkpoint) -> int | None:
    """Return the number of labels of its classification head; None for a language model."""
    return checkpoint.labels if isinstance(checkpoint, FolderCheckpoint) else None


def fill_parameters(
    model: Model, tensors: Iterable[tuple[str, np.ndarray | StoredTensor]], put: PutArray, where: str = ""
) -> Model:
    """Fill every parameter of the abstract `model` from `tensors`, cast to the parameter's type.

    Raises:
        WeightsError: a parameter has no tensor.
    """
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    keys = {".".join(map(str, key)): key for key in flat}
    for path, tensor in tensors:
        slot = flat[keys[path]]
        stored = isinstance(tensor, StoredTensor)
        host: Any = tensor.astype(slot.dtype) if stored else np.ascontiguousarray(tensor, dtype=slot.dtype)
        flat[keys.pop(path)] = slot.replace(jax.block_until_ready(put(path, host)))
        del tensor, host  # free them before the next is read
    if keys:
        raise WeightsError(f"nothing in the checkpoint fills {min(keys)}", where=where)
    return build_for_devices(nnx.merge(graph, nnx.from_flat_state(flat)))


def make_put(model: nnx.Module, mesh: Mesh | None) -> PutArray:
    """Return a function that puts each parameter of the abstract `model` on `mesh` by `parallel.arrays`; without a
    mesh, on the default device. Each device gets only its own shard, in every process of a run.
    """
    # Tensors are copied: on a CPU, JAX may alias the memory it is given, and would keep reading the checkpoint's file.
    if mesh is None:
        return lambda path, tensor: jnp.asarray(np.array(tensor))
    where = flatten(shardings(nnx.state(model), mesh))

    def put(path: str, tensor: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(tensor.shape, where[path], lambda index: np.array(tensor[index]))

    return put


def _check_vocabulary(checkpoint: Checkpoint, where: str) -> None:
    """Check that the model embeds every ordinary token, BOS and the stop tokens.

    A published tokenizer may have more added tokens, as for images: a text that needs one is refused.
    """
    tokenizer, rows = checkpoint.tokenizer, checkpoint.config.vocab_size
    ordinary = {*tokenizer.inner.get_vocab().values()} - tokenizer.inner.get_added_tokens_decoder().keys()
    last = max(*ordinary, *tokenizer.stop_ids, tokenizer.bos_id or 0)
    if last >= rows:
        raise WeightsError(
            f"the tokenizer has {last + 1} tokens and the model embeds {rows}",
            want=f"a row for {tokenizer.inner.id_to_token(last)!r}, which a text may have, begin with or end with",
            fix="the tokenizer belongs to another model, or tokens were added without resizing the embedding",
            where=where,
        )


def _check_head(labels: int | None, role: str, where: str) -> None:
    """Check that a checkpoint has the head of a language model, a critic or a reward model, by its number of labels."""
    wanted = "a *ForSequenceClassification folder with num_labels 1 (score.weight [1, hidden size])"
    problems = (
        (
            role == "model" and labels is not None,
            f"this checkpoint has a classification head ({families.SCORE_TENSOR}) and no language head: "
            "it cannot write",
            "",
            "it can score: reward=, or with another head critic=",
        ),
        (
            role != "model" and labels not in (None, 1),
            f"this is a classifier with num_labels {labels}",
            wanted,
            "a model trained for one score, with num_labels=1",
        ),
        (
            role == "reward_model" and labels is None,
            "this is a language model: it has no score.weight and cannot score",
            wanted,
            "a reward model; as critic a language model will do",
        ),
    )
    for applies, what, want, fix in problems:
        if applies:
            raise WeightsError(what, want=want, fix=fix, where=where)


class FolderCheckpoint:
    """A Hugging Face folder: config.json, tokenizer.json, and one or many safetensors files.

    Raises:
        WeightsError: a file is missing or malformed, or the family is unknown.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._read_config(str(folder / "config.json"))
        self.tokenizer = Tokenizer.from_folder(folder, self.config.vocab_size)

    def _read_config(self, where: str) -> ModelConfig:
        self._whole = read_json(self.folder / "config.json")
        described = hf_config.text_config(self._whole, where)
        family = families.find_family(str(described.get("model_type")))
        if family is None:
            return families.read_config(described, where)
        self._ends = [family.names.top[end] for end in ("embed.embedding", "head.embedding")]
        config_fields.check_config(described, where, family.layer_types)
        with self._open_tensors() as holders:
            config_fields.check_layers(described, len(holders), where)
            config = families.read_config(described, where)
            self._unused = family.unused(config)
            score = holders[families.SCORE_TENSOR].shape if families.SCORE_TENSOR in holders else None
            self.labels = None if score is None else (score[0] if len(score) == 2 else 1)
            # Adapters on the head, merged by some tools, leave a config that says the head is the embedding.
            return replace(config, tie_embeddings=config.tie_embeddings and not self._has_own_head(holders))

    def _has_own_head(self, holders: Mapping[str, StoredTensor]) -> bool:
        """Tell whether the file has a head that differs from the embedding."""
        if any(name not in holders or holders[name].kind not in FLOAT_TYPES for name in self._ends):
            return False
        embedding, head = (holders[name] for name in self._ends)
        starts = range(0, (*head.shape, 0)[0], ROWS_AT_ONCE)
        parts = (slice(start, min(start + ROWS_AT_ONCE, head.shape[0])) for start in starts)
        return embedding.shape != head.shape or not all(
            np.array_equal(replace(embedding, rows=part).whole(), replace(head, rows=part).whole()) for part in parts
        )

    def check(self) -> None:
        """Check names, types and shapes of all tensors."""
        next(self.stored())  # all are checked before the first is read

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
            saved = [name for name in self._ends if name in holders]  # of a tied model one may be enough
            wanted |= {"embed.embedding": saved[0]} if self.config.tie_embeddings and saved else {}
            self._check_types(holders)
            shapes = {name: tensor.shape for name, tensor in holders.items()}
            rows = families.match_tensors(self.config, wanted, shapes, self._ignored, str(self.folder))
            if self._left_out:
                log.warning(f"{self.folder}: {self._left_out} tensors are not of the text model, and are left out")
            for path, name in wanted.items():
                yield path, replace(holders[name], rows=rows[path], transposed=families.is_transposed(path))

    def _check_types(self, holders: Mapping[str, StoredTensor]) -> None:
        """Refuse weights that are no floating-point numbers, by the method that quantised them if it is known.

        A config may name a method that these files do not have.
        """
        others = [f"{x.name} is stored as {x.kind}" for x in holders.values() if x.kind not in FLOAT_TYPES]
        signs = [method for end, method in QUANTISED.items() if any(name.endswith(end) for name in (*holders, *others))]
        declared = self._whole.get("quantization_config")
        method = declared.get("quant_method") if isinstance(declared, Mapping) else None
        if signs or others:
            known = str(method or next(iter(signs), ""))
            raise WeightsError(
                f"these weights are quantised by {known!r:.80}, which is not read" if known else others[0],
                want="weights in one of: " + ", ".join(FLOAT_TYPES),
                fix="give the unquantised model; under adapters model.quantize int8 or nf4 quantises it as it loads",
                where=str(self.folder),
            )

    @contextmanager
    def _open_tensors(self) -> Iterator[Mapping[str, StoredTensor]]:
        """Yield tensor name in the text model → the tensor in its open file."""
        with ExitStack() as stack:
            files = [
                stack.enter_context(open_safetensors(self.folder / name)) for name in _safetensors_names(self.folder)
            ]
            stored = {name: StoredTensor(file, name) for file in files for name in file.keys()}  # noqa: SIM118
            names = hf_config.plain_names(stored, hf_config.text_part(self._whole), *self._ends, families.SCORE_TENSOR)
            holders = {text: stored[name] for name, text in names.items()}
            self._left_out = len(stored) - len(names)
            if len(holders) < len(names):
                raise WeightsError(
                    "several tensors have one name without the modules around it", where=str(self.folder)
                )
            yield holders

    def _ignored(self, name: str) -> bool:
        """Return True for a tensor that the model does not need: a copy of a tied head, or derived from the config."""
        copied = self.config.tie_embeddings and name == "lm_head.weight"
        return name.endswith("rotary_emb.inv_freq") or copied or name in self._unused


def _safetensors_names(folder: Path) -> list[str]:
    """Return the names of the checkpoint's safetensors files, as transformers chooses; the folder may hold others."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        return _names_in_index(index)
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    raise WeightsError(
        "no model.safetensors and no model.safetensors.index.json in this folder"
        + (f", beside {others[0]}" if others else ""),
        fix=("fetch the index too, or " if others else "for older formats, ")
        + "save again with safetensors: model.save_pretrained(folder)",
        where=str(folder),
    )


def _names_in_index(index: Path) -> list[str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise WeightsError("holds no weight_map from tensor to file", where=str(index))
    for name in sorted(set(entries.values())):
        if not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise WeightsError(f"{name!r} leaves the folder", want="*.safetensors beside the index", where=str(index))
    names = sorted(set(entries.values()))
    if absent := [name for name in names if not index.with_name(name).is_file()]:
        raise WeightsError(
            f"{len(absent)} of {len(names)} files of weights are missing: {', '.join(absent[:3])}",
            fix="fetch them: the download may have been cut short",
            where=str(index.parent),
        )
    return names


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


FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
QUANTISED = {
    ".qweight": "GPTQ or AWQ", ".absmax": "bitsandbytes", ".SCB": "bitsandbytes", "_scale_inv": "FP8",
    ".weight_packed": "compressed-tensors", ".weight_scale": "compressed-tensors", ".W_q": "HQQ", ".biases": "MLX",
    "F8_E4M3": "FP8", "F8_E5M2": "FP8",
}  # fmt: skip
"""End of the name of a tensor or of its type that only quantised weights have → method, unless the config names one."""
ROWS_AT_ONCE = 4096
"""Number of rows of the embedding and the head that are compared at a time."""
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
    _check_head(labels, "critic" if new_head else "reward_model", str(resolved.path))
    config = replace(checkpoint.config, tie_embeddings=True)
    build = lambda: ValueModel(Decoder(config, rngs=rngs_for_shapes(), **options))  # noqa: E731
    tensors = _value_tensors(tensors_for(checkpoint, mesh), zero=config.hidden_size if labels is None else 0)
    abstract = nnx.eval_shape(build)
    model = fill_parameters(abstract, tensors, make_put(abstract, mesh), where=str(resolved.path))
    return LoadedModel(model, checkpoint.tokenizer, config, resolved.origin)


load_critic = partial(load_value_model, new_head=True)


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


def with_digest(origin: str) -> str:
    """Return `origin`; for a path, add the digest of its content."""
    if not os.path.isabs(origin):
        return origin
    return f"{origin}, sha256 {files_digest(checkpoint_files(Path(origin)))[:16]}"
