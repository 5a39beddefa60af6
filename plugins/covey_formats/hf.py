"""Export to a Hugging Face folder that transformers loads: weights with the adapters merged, config,
tokenizer, generation config, model card. A model over several processes is written by all of them (`sharded`).

If the model was loaded from such a folder, the folder's config and tokenizer files are copied. What the run used
replaces what they say: stop tokens, chat template, sampling. Nothing names code or a path that is not exported.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path

import jax
import numpy as np

from covey.config.schema import RolloutConfig
from covey.models import families, hf_folder
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.hf_folder import write_json
from covey.models.loading import weights
from covey.models.loading.hf_config import Fields, is_whole
from covey.text.tokenizer import Tokenizer, read_json
from covey_formats.files import (
    Difference,
    compare_logits,
    export_parameters,
    lies_over_processes,
    new_folder,
    parameter_arrays,
    write_safetensors,
)
from covey_formats.sharded import write_jointly

SHARD_SIZE = 5_000_000_000
WriteFiles = Callable[[Decoder, str, Mapping[Path, Sequence[str]]], None]
"""Function (model, type, {file: names of its tensors}) that writes the tensors of a model in a type."""


def write_hf(
    model: Decoder,
    tokenizer: Tokenizer,
    out: Path,
    *,
    source: Path | None = None,
    dtype: str | None = None,
    shard_size: int = SHARD_SIZE,
    card: str = "",
    sampling: RolloutConfig | None = None,
) -> Difference:
    """Write `model` as a Hugging Face folder.

    Args:
        out: the folder, new or empty.
        source: the Hugging Face folder that the model was loaded from, if it was.
        dtype: float32 or bfloat16; the type in memory by default.
        shard_size: maximum bytes per file of weights; a larger tensor has a file of its own.
        card: text of README.md.
        sampling: settings of sampling in training, for generation_config.json; the settings of `source` by default.

    Returns:
        The difference between the logits of `model` and of the written model, read back. If the model's arrays lie over
        several processes, all must call this: each writes its shards and reads them back.

    Raises:
        CoveyError: `out` is in use, or cannot be written.
        WeightsError: the family's config.json cannot describe the model, or what was written differs from the model.
    """
    dtype = dtype or str(model.head_weight.dtype)
    with new_folder(out, card) as folder:
        if jax.process_index() == 0:
            _write_settings(model.config, tokenizer, source, folder, dtype, sampling)
        if lies_over_processes(model):
            _write_weights(model, folder, dtype, shard_size, write_jointly)
            return Difference(0.0, math.nan)
        _write_weights(model, folder, dtype, shard_size, write_from_one)
        written = weights.load(folder, param_dtype=dtype, compute_dtype=str(model.dtype))
        return compare_logits(model, written.model, tokenizer.vocab_size, dtype, out)


def _write_weights(model: Decoder, folder: Path, dtype: str, shard_size: int, write: WriteFiles) -> None:
    sizes = _tensor_sizes(model, dtype)
    shards = list(_split_shards(sizes, shard_size))
    count = len(shards)
    numbered = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = numbered if count > 1 else ["model.safetensors"]
    write(model, dtype, {folder / file: shard for file, shard in zip(files, shards, strict=True)})
    if len(files) > 1 and jax.process_index() == 0:
        file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


def write_from_one(model: Decoder, dtype: str, files: Mapping[Path, Sequence[str]]) -> None:
    """Write the tensors named for each of `files`, from one process."""
    tensors = _named_tensors(model, dtype)
    for file, names in files.items():
        write_safetensors(file, dict(islice(tensors, len(names))))


def _named_tensors(model: Decoder, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of each tensor of the checkpoint; the parameters that share one are adjacent."""
    names = families.tensor_names(model.config)
    for name, group in groupby(export_parameters(model, dtype), lambda item: names[item[0]]):
        parts = [families.convert_layout(path, array) for path, array in group]
        yield name, parts[0] if len(parts) == 1 else np.concatenate(parts)
        del parts  # free them before the next is made


def _tensor_sizes(model: Decoder, dtype: str) -> dict[str, int]:
    """Return the bytes of each tensor of the checkpoint, in the order of `_named_tensors`."""
    arrays, sizes = parameter_arrays(model), dict[str, int]()
    for path, name in families.tensor_names(model.config).items():
        sizes[name] = sizes.get(name, 0) + arrays[path].size * jax.numpy.dtype(dtype).itemsize
    return sizes


def _split_shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Split the names, in their order, into runs of at most `limit` bytes."""
    shard: list[str] = []
    remaining = limit
    for name, size in sizes.items():
        if shard and size > remaining:
            yield shard
            shard, remaining = [], limit
        shard.append(name)
        remaining -= size
    yield shard


# --- settings


def _write_settings(
    described: ModelConfig,
    tokenizer: Tokenizer,
    source: Path | None,
    folder: Path,
    dtype: str,
    sampling: RolloutConfig | None,
) -> None:
    """Write all files of a Hugging Face folder but its weights, config.json last; arguments as for `write_hf`."""
    config = _config(described, tokenizer, source, dtype)
    write_tokenizer(tokenizer, source, folder, sampling)
    write_json(folder / "config.json", config)


def _config(described: ModelConfig, tokenizer: Tokenizer, source: Path | None, dtype: str) -> Fields:
    """Return the source's own config if it describes this model, else a newly written one."""
    if source is not None:
        config = _without_paths(read_json(source / "config.json"))
        if not is_whole(config) and families.read_config(config) == described:
            own = {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}
            return hf_folder.for_older_readers(config, described) | _stops_of(tokenizer) | own
    return hf_folder.new_config(described, tokenizer, dtype)


def _without_paths(config: Fields) -> Fields:
    """Return a config without the names of code and folders that an export does not have."""
    return {name: value for name, value in config.items() if name not in ("auto_map", "_name_or_path")}


def _stops_of(tokenizer: Tokenizer) -> Fields:
    return {"eos_token_id": hf_folder.special_token_ids(tokenizer)["eos_token_id"]}


def write_tokenizer(tokenizer: Tokenizer, source: Path | None, folder: Path, sampling: RolloutConfig | None) -> None:
    """Write the files of the tokenizer, and generation_config.json; arguments as for `write_hf`."""
    own = None if source is None else Tokenizer.from_folder(source)
    if source is not None and own is not None and _is_same(own, tokenizer):
        _copy_tokenizer(source, folder, tokenizer, own.chat_template != tokenizer.chat_template)
    else:
        hf_folder.write_tokenizer(tokenizer, folder)
    before = {} if source is None else read_json(source / "generation_config.json", missing={})
    write_json(folder / "generation_config.json", _generation_config(tokenizer, before, sampling))


def _copy_tokenizer(source: Path, folder: Path, tokenizer: Tokenizer, with_template: bool) -> None:
    """Copy the source's files of the tokenizer; `with_template` writes the chat template of `tokenizer` in them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    settings = read_json(folder / "tokenizer_config.json", missing=hf_folder.tokenizer_config(tokenizer))
    if with_template:
        for name in ("chat_template.jinja", "chat_template.json"):
            (folder / name).unlink(missing_ok=True)
        settings["chat_template"] = tokenizer.chat_template
    write_json(folder / "tokenizer_config.json", _without_paths(settings))


def _is_same(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers are equal, apart from their chat templates and stop tokens."""
    return (
        all(getattr(one, name) == getattr(other, name) for name in ("eos_id", "bos_id", "add_bos"))
        and one.inner.to_str() == other.inner.to_str()
    )


def _generation_config(tokenizer: Tokenizer, before: Fields, sampling: RolloutConfig | None) -> Fields:
    """Return generation_config.json: the one `before`, with the stop tokens and the sampling that were used. Penalties
    and the like, which no training by Covey has, are then left out.
    """
    ids = hf_folder.special_token_ids(tokenizer)
    if sampling is None:
        return ids | before | _stops_of(tokenizer)
    names = ("temperature", "top_p", "top_k", "min_p") if sampling.temperature else ()
    used: Fields = {"do_sample": bool(sampling.temperature), "max_new_tokens": sampling.max_new_tokens}
    kept = {name: value for name, value in before.items() if name in ids}
    return ids | kept | _stops_of(tokenizer) | used | {name: getattr(sampling, name) for name in names}


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Names of the files that are copied from a Hugging Face folder."""
