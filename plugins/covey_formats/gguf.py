"""Reader of GGUF files, the format of llama.cpp, which hold architecture, tokenizer and tensors in one file.

Tensors are dequantised one at a time. llama.cpp stores the query and key rows of Llama and SmolLM3 in the order of its
own rotary convention (adjacent pairs); they are reordered here to the half-split convention of all other models. A
Mistral is stored as a Llama, without its window.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from covey.errors import WeightsError
from covey.models.config import ModelConfig, RopeScaling
from covey.models.families import (
    NameTable,
    convert_layout,
    has_experts,
    match_tensors,
    tensor_names,
)
from covey_formats.gguf_reader import Metadata, open_reader
from covey_formats.gguf_tokenizer import read_tokenizer


class GGUFCheckpoint:
    """An open GGUF file.

    Attributes:
        config: the architecture.
        tokenizer: the tokenizer, with the chat template and every stop token.

    Raises:
        WeightsError: the `gguf` package is not installed, or the file is truncated or holds an unsupported model.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._reader = open_reader(self.path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        fields = Metadata(self._reader.fields, str(self.path))
        self.config = _read_config(fields, self._tensors)
        self.tokenizer = read_tokenizer(fields, self.config.vocab_size)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our path, float32 array in our layout) for each parameter, one in memory at a time."""
        for path, (name, part) in self.check().items():
            tensor = _dequantise(self._tensors[name])[part]
            if path.endswith("norm.scale"):
                tensor = tensor - np.float32(self.config.norm_offset)  # llama.cpp stores the sum
            yield path, convert_layout(path, self._restore_order(path, tensor))

    def check(self) -> dict[str, tuple[str, slice]]:
        """Check names and shapes of the tensors; return our path → name, and the rows of its part."""
        names = replace(TENSOR_NAMES, layer={**TENSOR_NAMES.layer, **OTHER_NAMES.get(self.config.family, {})})
        wanted = tensor_names(self.config, names)
        shapes = {name: [int(size) for size in tensor.shape[::-1]] for name, tensor in self._tensors.items()}
        rows = match_tensors(self.config, wanted, shapes, lambda name: name == ROPE_FREQS, str(self.path))
        return {path: (name, rows[path] or slice(None)) for path, name in wanted.items()}

    def _restore_order(self, path: str, tensor: np.ndarray) -> np.ndarray:
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(path.split(".")[-2])
        return tensor if heads is None or self.config.family not in PERMUTED else unpermute(tensor, heads)


def unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from llama.cpp's order (0, W/2, 1, W/2+1, …) to (0, 1, 2, …).

    >>> unpermute(np.array([0, 2, 1, 3]), heads=1)
    array([0, 1, 2, 3])
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from (0, 1, 2, …) to llama.cpp's order: the inverse of `unpermute`.

    >>> permute(np.array([0, 1, 2, 3]), heads=1)
    array([0, 2, 1, 3])
    """
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _dequantise(tensor: Any) -> np.ndarray:
    from gguf import quants

    try:
        return quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise WeightsError(f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}: {error}") from error


# --- architecture


def _read_config(fields: Metadata, tensors: Mapping[str, Any]) -> ModelConfig:
    arch, kind = fields.text("general.architecture"), fields.text("general.type", "model")
    parts = fields.count("split.count", 1, least=0)
    if parts > 1 or kind != "model":
        raise WeightsError(
            f"this GGUF file is one of {parts} parts of a model"
            if parts > 1
            else f"this GGUF file is of type {kind!r}",
            want="a whole model in one file",
            fix="llama-gguf-split --merge FIRST WHOLE" if parts > 1 else "",
            where=fields.where,
        )
    if arch not in ARCHITECTURES:
        mixed = has_experts(arch, {"experts": fields.count(f"{arch}.expert_count", 0, least=0)})
        why = ": mixtures of experts are not" if mixed else ""
        raise WeightsError(
            f"GGUF architecture {arch!r} is not supported{why}",
            want="one of: " + ", ".join(ARCHITECTURES),
            fix=f"load the Hugging Face folder of the model: {FOLDERS[arch]}" if arch in FOLDERS else "",
            where=fields.where,
        )
    heads, hidden = fields.count(f"{arch}.attention.head_count"), fields.count(f"{arch}.embedding_length")
    head_dim = fields.count(f"{arch}.attention.key_length", max(1, hidden // heads))
    if fields.count(f"{arch}.expert_count", 0, least=0):
        raise WeightsError("mixtures of experts are not supported", where=fields.where)
    if fields.count(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise WeightsError("rotary positions on part of each head are not supported", where=fields.where)
    theta = fields.number(f"{arch}.rope.freq_base", 10_000.0)  # llama.cpp's default for an absent key
    theta = _shortest_decimal(theta)
    layers = _num_layers(fields, f"{arch}.block_count", tensors)
    return ModelConfig(
        vocab_size=_vocab_size(tensors, fields.where),
        hidden_size=hidden,
        intermediate_size=fields.count(f"{arch}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(fields, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=_shortest_decimal(fields.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=_rope_scaling(fields, arch, tensors, theta, head_dim),
        tie_embeddings="output.weight" not in tensors,
        max_positions=fields.count(f"{arch}.context_length"),
        family=FAMILY_NAMES.get(arch, arch),
        windows=_windows(fields, arch, layers),
        rope_layers=tuple((i + 1) % 4 != 0 for i in range(layers)) if arch == "smollm3" else None,
        **ARCHITECTURES[arch],
        **(_gemma_settings(fields, arch, layers, hidden, heads, head_dim) if arch in GEMMA_PERIODS else {}),
    )


def _gemma_settings(fields: Metadata, arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the settings that only Gemma has. llama.cpp tells the models of 27B, whose queries have another scale, by
    their number of layers.
    """
    caps = {"attn": 50.0, "final": 30.0} if arch == "gemma2" else {"final": None}
    per_head = hidden // heads if (arch, layers) in GEMMA_27B else head_dim
    settings = {
        f"{name}_softcap": _softcap(fields, f"{arch}.{name}_logit_softcapping", cap) for name, cap in caps.items()
    }
    if arch == "gemma3":
        settings["local_rope_theta"] = _shortest_decimal(fields.number(f"{arch}.rope.freq_base_swa", 10_000.0))
    return settings | {"embed_scale": hidden**0.5, "query_scale": per_head**-0.5}


def _softcap(fields: Metadata, key: str, default: float | None) -> float | None:
    return _shortest_decimal(fields.number(key, default)) if key in fields or default else None


def _windows(fields: Metadata, arch: str, layers: int) -> tuple[int | None, ...] | None:
    """Return the window of each layer. All layers of Phi-3 have the same, and in Gemma the last of each period has
    none. Files say 0 for a model without a window.
    """
    window = fields.count(f"{arch}.attention.sliding_window", 4096 if arch == "gemma2" else 0, least=0)
    if window and arch != "phi3" and arch not in GEMMA_PERIODS:
        raise WeightsError(f"sliding windows are not supported for {arch}", where=fields.where)
    period = GEMMA_PERIODS.get(arch, layers + 1)
    if arch in GEMMA_PERIODS:
        period = fields.count(f"{arch}.attention.sliding_window_pattern", period)
    return tuple(window if (i + 1) % period else None for i in range(layers)) if window else None


def _vocab_size(tensors: Mapping[str, Any], where: str) -> int:
    """Return the number of rows of the embedding."""
    shape = list(tensors["token_embd.weight"].shape) if "token_embd.weight" in tensors else []
    if len(shape) != 2:
        raise WeightsError("token_embd.weight is missing or no matrix", want="a whole model in one file", where=where)
    return int(shape[1])


def _num_layers(fields: Metadata, key: str, tensors: Mapping[str, Any]) -> int:
    layers = fields.count(key)
    if layers > len(tensors):  # before anything is made for each of them
        raise WeightsError(f"{key!r} is {layers} and the file holds {len(tensors)} tensors", where=fields.where)
    return layers


def _num_kv_heads(fields: Metadata, key: str, heads: int) -> int:
    kv_heads = fields.count(key, heads)
    if heads % kv_heads:
        raise WeightsError(f"{key!r} is {kv_heads}", want=f"a divisor of the {heads} query heads", where=fields.where)
    return kv_heads


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of a number stored in float32: 9.999999747378752e-06 → 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(
    fields: Metadata, arch: str, tensors: Mapping[str, Any], theta: float, head_dim: int
) -> RopeScaling | None:
    """Read linear scaling from the metadata, or derive Llama 3's settings from its tensor of divisors."""
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if "rope_factors_long.weight" in tensors:  # see `hf_config.read_phi3`
        raise WeightsError(
            "RoPE scaling 'longrope' is not supported", want="a model with plain rotary positions", where=fields.where
        )
    if ROPE_FREQS in tensors:
        return _llama3_scaling(_dequantise(tensors[ROPE_FREQS]), theta, head_dim, fields.where)
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", _shortest_decimal(fields.number(f"{arch}.rope.scaling.factor")))
    raise WeightsError(f"RoPE scaling {kind!r} is not supported", want="none or linear", where=fields.where)


def _llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int, where: str) -> RopeScaling:
    if divisors.shape != (len(range(0, head_dim, 2)),):
        raise WeightsError(f"rope_freqs.weight has shape {divisors.shape}", want="half a head", where=where)
    scaling = RopeScaling("llama3", factor=_shortest_decimal(divisors.max()))
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_positions * frequency / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    if not np.allclose(divisors, 1 / (blend + (1 - blend) / scaling.factor), rtol=1e-3):
        raise WeightsError("rope_freqs.weight is not Llama 3's scaling of the rotary frequencies", where=where)
    return scaling


ROPE_FREQS = "rope_freqs.weight"
"""Name of the tensor that holds Llama 3's scaling of the rotary frequencies."""

_GEMMA = {"activation": "gelu_tanh", "post_norms": True, "norm_offset": 1.0}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "phi3": {},
    "olmo2": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
    "smollm3": {},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, "qk_norm": True},
}
"""Architecture → switches of its config. In llama.cpp every fourth layer of SmolLM3 does not rotate; no key says so."""

FOLDERS = {"qwen35": "hf:Qwen/Qwen3.5-4B", "gemma4": "hf:google/gemma-4-E4B-it"}
"""Architectures that are read from folders alone → an example."""

FAMILY_NAMES = {"gemma3": "gemma3_text"}
"""Architectures that we call by another name, which is that of Hugging Face."""

GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Architecture → number of layers of which the last attends without a window, where the file does not say it."""

GEMMA_27B = (("gemma2", 46), ("gemma3", 62))
"""Architecture and number of layers of the models with 27 billion weights."""

PERMUTED = ("llama", "smollm3")
"""Architectures whose query and key rows are in the order of adjacent pairs."""


TENSOR_NAMES = NameTable(
    prefix="blk.{}.",
    top={"embed.embedding": "token_embd.weight", "norm.scale": "output_norm.weight", "head.embedding": "output.weight"},
    layer={
        "attn_norm.scale": "attn_norm.weight",
        "attn.q_proj.kernel": "attn_q.weight",
        "attn.k_proj.kernel": "attn_k.weight",
        "attn.v_proj.kernel": "attn_v.weight",
        "attn.o_proj.kernel": "attn_output.weight",
        "attn.q_proj.bias": "attn_q.bias",
        "attn.k_proj.bias": "attn_k.bias",
        "attn.v_proj.bias": "attn_v.bias",
        "attn.q_norm.scale": "attn_q_norm.weight",
        "attn.k_norm.scale": "attn_k_norm.weight",
        "mlp_norm.scale": "ffn_norm.weight",
        "mlp.gate_proj.kernel": "ffn_gate.weight",
        "mlp.up_proj.kernel": "ffn_up.weight",
        "mlp.down_proj.kernel": "ffn_down.weight",
        "post_attn_norm.scale": "post_attention_norm.weight",
        "post_mlp_norm.scale": "post_ffw_norm.weight",
    },
)

OTHER_NAMES: dict[str, dict[str, str]] = {
    "phi3": {
        **{f"attn.{name}.kernel": "attn_qkv.weight" for name in ("q_proj", "k_proj", "v_proj")},
        **{f"mlp.{name}.kernel": "ffn_up.weight" for name in ("gate_proj", "up_proj")},
    },
}
"""Names in which an architecture differs from `TENSOR_NAMES`; projections of one name share a tensor."""
