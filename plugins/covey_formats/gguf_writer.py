"""Export to a GGUF file for llama.cpp: the inverse of `covey_formats.gguf`, by the same tables.

Matrices have the requested type; norms and biases stay float32, as llama.cpp requires. Of llama.cpp's quantised types
Q8_0 is written: 8 bits a weight and a scale for each 32 (8.5 bits together), as the package gguf computes it. The
package has no code for Q4_K and its relatives.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.schema import RolloutConfig
from covey.errors import WeightsError
from covey.models import families
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.layers import rope_frequencies
from covey.models.loading import weights
from covey.text.tokenizer import Tokenizer
from covey_formats.files import Difference, compare_logits, export_parameters, new_folder, parameter_arrays
from covey_formats.gguf import FAMILY_NAMES, GEMMA_PERIODS, ROPE_FREQS, TENSOR_NAMES, GGUFCheckpoint, permute
from covey_formats.gguf_reader import import_gguf
from covey_formats.gguf_tokenizer import vocabulary_metadata

FILE_NAME = "model.gguf"
WRITTEN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families that are written; more are read."""
Q8_0, Q8_0_BLOCK = "q8_0", 32
"""Name of llama.cpp's type of 8 bits, and the number of weights with a common scale."""
SAMPLE_TEXT = "Hello, world! It's 123 + 4567.\n\n\tTabs  and  spaces; ümläute, 日本語, 🙂."


def write_gguf(
    model: Decoder,
    tokenizer: Tokenizer,
    out: Path,
    *,
    dtype: str | None = None,
    card: str = "",
    sampling: RolloutConfig | None = None,
) -> Difference:
    """Write `model`, adapters merged, as `model.gguf` in a folder.

    Args:
        out: the folder, new or empty.
        dtype: float32, bfloat16 or q8_0; the type in memory by default.
        card: text of README.md.
        sampling: settings of training, which llama.cpp then takes by default.

    Returns:
        The difference between the logits of the written model, read back, and those of `model`.

    Raises:
        CoveyError: `out` is in use, or cannot be written.
        WeightsError: the `gguf` package is not installed; GGUF has no name for the family, the tokenizer or a setting,
            or we know none; or what was written differs from the model.
    """
    dtype = dtype or str(model.head_weight.dtype)
    metadata = make_metadata(model.config, tokenizer)
    if sampling is not None:
        metadata |= {f"general.sampling.{name}": getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
        metadata["general.sampling.temp"] = sampling.temperature
    with new_folder(out, card) as folder:
        _write_file(folder / FILE_NAME, metadata, model, dtype)
        _check_written(GGUFCheckpoint(folder / FILE_NAME), model.config, tokenizer)
        whole = "float32" if dtype == Q8_0 else dtype
        written = weights.load(folder / FILE_NAME, param_dtype=whole, compute_dtype=str(model.dtype))
        return compare_logits(model, written.model, tokenizer.vocab_size, "bfloat16" if dtype == Q8_0 else dtype, out)


def _write_file(path: Path, metadata: dict[str, Any], model: Decoder, dtype: str) -> None:
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, architecture(model.config))
    types = gguf.LlamaFileType
    known = {"float32": types.ALL_F32, "bfloat16": types.MOSTLY_BF16, Q8_0: types.MOSTLY_Q8_0}
    writer.add_file_type(known[dtype])
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        kinds.get(type(value), writer.add_array)(key, value)
    tensors = list(_tensor_infos(model, dtype))
    for name, shape, kind in tensors:
        raw = gguf.GGMLQuantizationType[kind]
        stored = gguf.quants.quant_shape_to_byte_shape(shape, raw)  # as bytes: NumPy has neither bfloat16 nor blocks
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array, (_, _, kind) in zip(_tensor_arrays(model, dtype), tensors, strict=True):
        stored = np.ascontiguousarray(array)
        if kind == "Q8_0":
            stored = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
        writer.write_tensor_data(stored.view(np.uint8))
    writer.close()


def _tensor_infos(model: Decoder, dtype: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and type of each tensor in the file's order. Rows that 32 does not divide are not quantised."""
    state, names = parameter_arrays(model), families.tensor_names(model.config, TENSOR_NAMES)
    kinds = {"float32": "F32", "bfloat16": "BF16", Q8_0: "Q8_0"}
    if _rope_divisors(model.config) is not None:
        yield ROPE_FREQS, (model.config.head_dim // 2,), "F32"
    for path in families.parameter_paths(model.config):
        shape = state[path].shape[::-1] if path.endswith(".kernel") else state[path].shape
        plain = len(shape) < 2 or (dtype == Q8_0 and shape[-1] % Q8_0_BLOCK)
        yield names[path], shape, "F32" if plain else kinds[dtype]


def _tensor_arrays(model: Decoder, dtype: str) -> Iterator[np.ndarray]:
    """Yield the tensors in the file's layout, in the order of `_tensor_infos`, before they are quantised; one on the
    host at a time.
    """
    c, divisors = model.config, _rope_divisors(model.config)
    if divisors is not None:
        yield divisors
    for path, array in export_parameters(model, "float32" if dtype == Q8_0 else dtype, vectors="float32"):
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads}.get(path.split(".")[-2])
        tensor = families.convert_layout(path, array)
        tensor = permute(tensor, heads) if heads and c.family == "llama" else tensor
        yield tensor + np.float32(c.norm_offset) if path.endswith("norm.scale") else tensor
        del array, tensor  # free them before the next is made


# --- metadata


def make_metadata(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata of a model's file.

    Raises:
        WeightsError: GGUF has no name for the family or for the tokenizer, or we know none.
    """
    if config.family not in WRITTEN:
        raise WeightsError(
            f"GGUF files of the family {config.family!r} are not supported",
            want="one of: " + ", ".join(WRITTEN),
            fix="--format hf",
        )
    return _architecture_metadata(config) | vocabulary_metadata(tokenizer, config.vocab_size)


def _architecture_metadata(c: ModelConfig) -> dict[str, Any]:
    arch = architecture(c)
    fields: dict[str, Any] = {
        "context_length": c.max_positions,
        "embedding_length": c.hidden_size,
        "block_count": c.num_layers,
        "feed_forward_length": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
    }
    if c.rope_scaling is not None and c.rope_scaling.kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(c.rope_scaling.factor)}
    fields |= _gemma_fields(c) if arch in GEMMA_PERIODS else {}
    return {f"{arch}.{name}": value for name, value in fields.items() if value is not None}


def _gemma_fields(c: ModelConfig) -> dict[str, Any]:
    """Return the fields that only Gemma's architectures have."""
    windows = c.windows or ()
    return {
        "attention.sliding_window": next(filter(None, windows), 0),
        "attention.sliding_window_pattern": [*windows, None].index(None) + 1,
        "rope.freq_base_swa": c.local_rope_theta,
        "attn_logit_softcapping": c.attn_softcap,
        "final_logit_softcapping": c.final_softcap,
    }


def architecture(c: ModelConfig) -> str:
    """Return llama.cpp's name for the family of `c`."""
    return {family: arch for arch, family in FAMILY_NAMES.items()}.get(c.family, c.family)


def _rope_divisors(c: ModelConfig) -> np.ndarray | None:
    """Return the divisor of each rotary frequency under Llama 3's scaling; None for other models."""
    if c.rope_scaling is None or c.rope_scaling.kind != "llama3":
        return None
    plain, scaled = (rope_frequencies(c.head_dim, c.rope_theta, scaling) for scaling in (None, c.rope_scaling))
    return np.asarray(plain / scaled, np.float32)


def _check_written(written: GGUFCheckpoint, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Check that config and tokenizer of the file, read back, equal the exported ones."""
    ours, theirs = ([t.encode(SAMPLE_TEXT).tolist(), t.stop_ids, t.add_bos] for t in (tokenizer, written.tokenizer))
    if written.config != config or ours != theirs:
        what = "the architecture" if written.config != config else "the tokenizer"
        raise WeightsError(f"{what} of this model is not one that a GGUF file can describe", fix="--format hf")
