"""The model families, as tables only: how to read their config.json, and the names of their tensors.

A family is a row of `FAMILIES`, or comes from an installed package by an entry point of the group `covey.models`: a
reader from the checkpoint's config.json to `ModelConfig` and its inverse (both in `hf_config`), and a name table from
our parameter paths (`layers.3.attn.q_proj.kernel`) to its tensor names. Loading and export use the same table.

Our kernels are [in, out], theirs [out, in]: every path that ends in `.kernel` is transposed, nothing else is. Paths of
one name share a tensor, whose rows are theirs in the order of `parameter_paths` (Phi-3's q, k and v). Norm scales stay
as they are stored; Gemma's +1 is `ModelConfig.norm_offset`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from covey.errors import WeightsError
from covey.models.config import ModelConfig
from covey.models.layer_kinds import layer_shapes, top_shapes
from covey.models.loading import hf_config
from covey.models.loading.hf_config import Config, Fields, text_config, whole_kinds
from covey.registry import Registry

SCORE_TENSOR = "score.weight"
"""Name of the tensor of a classification head."""


@dataclass(frozen=True)
class NameTable:
    """Tensor names of a checkpoint format: `layer` under `prefix` with the layer's number, `top` outside the layers."""

    prefix: str
    layer: Mapping[str, str]
    top: Mapping[str, str]

    def name(self, path: str) -> str:
        """Return the checkpoint's name for our parameter `path`."""
        if path in self.top:
            return self.top[path]
        _, index, rest = path.split(".", 2)
        return self.prefix.format(index) + self.layer[rest]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: its name.
        read, write: reader and writer of its config.
        names: Hugging Face names of its tensors.
        architecture: its class in transformers.
        layer_types: kinds of layers in `layer_types` that only this family reads.
        unused: names of tensors of a model that its files may have and that nothing computes with.
        has_older_form: whether transformers 4 has it; exports then have the rotary settings in its form too.
    """

    name: str
    read: Callable[[Config], ModelConfig]
    write: Callable[[ModelConfig], Fields]
    names: NameTable
    architecture: str
    layer_types: tuple[str, ...] = ()
    unused: Callable[[ModelConfig], set[str]] = lambda _: set()
    has_older_form: bool = True


def find_family(kind: str) -> Family | None:
    """Return the family of a `model_type`, from our table or from an installed package; None if there is none.

    Raises:
        RecipeError: several packages offer it, or the module of the one that does cannot be imported.
    """
    if kind in FAMILIES or kind not in INSTALLED.names():
        return FAMILIES.get(kind)
    family: Family = INSTALLED.resolve(kind)()
    return family


def read_config(config: Config, where: str = "config.json") -> ModelConfig:
    """Convert a config.json, or its text part if the model reads images, to our `ModelConfig`.

    Raises:
        WeightsError: the family is unknown, a field is missing, or a setting is not supported.
    """
    config = text_config(config, where)
    kind = str(config.get("model_type"))
    family = find_family(kind)
    if family is None:
        raise _unknown_family(kind, config, where)
    try:
        return family.read(config)
    except KeyError as error:
        raise WeightsError(f"the field {error} is missing", where=where) from error


def _unknown_family(kind: str, config: Config, where: str) -> WeightsError:
    """Return the error for an unknown family. It suggests no near name: a tool wrote it, so it is not misspelt."""
    why, fix, text = "", "", config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    if has_experts(kind, {**config, **inner}):
        why = ": mixtures of experts are not"
    elif str(inner.get("model_type")) in (*FAMILIES, *INSTALLED.names()):
        why = f": its text model alone, {inner['model_type']!r}, is"
        fix = "save the text model as a folder of its own: docs/add-a-model.md shows how"
    return WeightsError(
        f"model_type {kind!r} is not supported{why}",
        want="one of: " + ", ".join(sorted({*FAMILIES, *whole_kinds(), *INSTALLED.names()})),
        fix=fix,
        where=where,
    )


def has_experts(kind: str, settings: Mapping[str, Any]) -> bool:
    """Return True if the name `kind` or the `settings` describe a mixture of experts."""
    return "moe" in kind.lower() or any("expert" in name and value for name, value in settings.items())


def write_config(config: ModelConfig) -> Fields:
    """Convert `config` to a config.json, without the fields of the tokenizer.

    Raises:
        WeightsError: the family's config.json cannot express it, as after changing a switch that the family lacks.
    """
    family = find_family(config.family)
    fields: Fields = {"model_type": config.family}
    if family is not None:
        fields |= {"architectures": [family.architecture]} | family.write(config)
    if family is None or read_config(fields) != config:
        raise WeightsError(
            f"a config.json of the family {config.family!r} cannot describe this model",
            want="an architecture that the family has: " + ", ".join(sorted(FAMILIES)),
        )
    return fields


def parameter_paths(config: ModelConfig) -> list[str]:
    """Return the dotted paths of all parameters of the decoder that `config` describes."""
    return [*top_shapes(config)] + [
        f"layers.{i}.{path}" for i in range(config.num_layers) for path in layer_shapes(config, i)
    ]


def projection_names(config: ModelConfig) -> dict[str, str]:
    """Return the path of each projection in the layers, `layers.0.attn.q_proj`, → its Hugging Face module's path, which
    is Llama's where `config` belongs to no family.
    """
    table = _hugging_face_names(config)
    kernels = [path for path in parameter_paths(config) if path.endswith(".kernel")]
    return {path.removesuffix(".kernel"): table.name(path).removesuffix(".weight") for path in kernels}


def _hugging_face_names(config: ModelConfig) -> NameTable:
    return (find_family(config.family) or FAMILIES["llama"]).names


def tensor_names(config: ModelConfig, table: NameTable | None = None, *, scored: bool = False) -> dict[str, str]:
    """Return our path → the checkpoint's tensor name per parameter; `table` defaults to the family's Hugging Face one.

    `scored`: for a *ForSequenceClassification checkpoint, which has `score` [labels, D] and no language head.
    """
    table = table or _hugging_face_names(config)
    top = {"score": SCORE_TENSOR} if scored else {}
    config = replace(config, tie_embeddings=config.tie_embeddings or scored)
    return {path: table.name(path) for path in parameter_paths(config)} | top


def parameter_shape(config: ModelConfig, path: str) -> tuple[int, ...]:
    """Return the shape of a parameter of the decoder, or of `score`, in our layout."""
    if path.startswith("layers."):
        _, layer, name = path.split(".", 2)
        return layer_shapes(config, int(layer))[name]
    return (1, config.hidden_size) if path == "score" else top_shapes(config)[path]  # a reward model has one row


def match_tensors(
    config: ModelConfig,
    names: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    ignored: Callable[[str], bool],
    where: str,
) -> dict[str, slice | None]:
    """Check that a checkpoint has exactly the tensors of the model. Return our path → its rows in its tensor; None for
    all rows.

    Args:
        config: the model.
        names: our path → name of the tensor; projections that share one have its rows in this order.
        shapes: name of each tensor → its shape, in the checkpoint's layout.
        ignored: whether the model does not need a tensor of this name.

    Raises:
        WeightsError: a tensor is missing or unused, and the message names the first few; or it has another shape.
    """
    _check_names(names, shapes, ignored, where)
    rows: dict[str, slice | None] = dict.fromkeys(names)
    for name, paths in paths_by_name(names).items():
        wanted = [parameter_shape(config, path)[:: -1 if is_transposed(path) else 1] for path in paths]
        ends = list(accumulate((shape[0] for shape in wanted), initial=0))
        whole = [ends[-1], *wanted[0][1:]]
        if list(shapes[name]) != whole:
            raise WeightsError(
                f"{name} has shape {list(shapes[name])}",
                want=f"{whole}, by the config",
                fix="config and weights belong to different models, or one was changed without the other",
                where=where,
            )
        if len(paths) > 1:
            rows |= {path: slice(*span) for path, span in zip(paths, pairwise(ends), strict=True)}
    return rows


def paths_by_name(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {name: our paths that have it}: one path, or several that share a tensor, as Phi-3's q, k and v."""
    paths: dict[str, list[str]] = {}
    for path, name in names.items():
        paths.setdefault(name, []).append(path)
    return paths


def convert_layout(path: str, tensor: np.ndarray) -> np.ndarray:
    """Convert a tensor from the checkpoint's layout to ours, or back: kernels are transposed."""
    return tensor.T if is_transposed(path) else tensor


def is_transposed(path: str) -> bool:
    """Return whether the checkpoint's layout of a tensor is the transpose of ours: kernels are [in, out] here."""
    return path.endswith(".kernel")


def _check_names(expected: Mapping[str, str], names: Iterable[str], ignored: Callable[[str], bool], where: str) -> None:
    """Refuse a checkpoint that lacks a tensor or has one that the model would not use."""
    have = set(names)
    missing = sorted(set(expected.values()) - have)
    extra = sorted(name for name in have - set(expected.values()) if not ignored(name))
    if missing:
        fixes = (
            (
                missing == [expected.get("head.embedding")],
                "save the model with its head; if that is the embedding, set tie_word_embeddings: true in config.json",
            ),
            (
                any(".lora_A." in name for name in extra),
                "these are adapters beside their base: merge them by model.merge_and_unload().save_pretrained(FOLDER)",
            ),
            (True, "the config describes another model, or a part was not saved or fetched: save or fetch it again"),
        )
        raise WeightsError(
            f"{_format_names(missing)} missing" + (f", and {_format_names(extra)} unknown" if extra else ""),
            fix=next(text for applies, text in fixes if applies),
            where=where,
        )
    if extra:
        raise WeightsError(
            f"{_format_names(extra)} unknown to this family",
            want="only tensors that the model computes with",
            fix="the config describes another model, as one with fewer layers; or remove what is not of the model",
            where=where,
        )


def _format_names(names: list[str]) -> str:
    """Format names as `a is`, `a, b are`, or the first three of many and their number."""
    shown = ", ".join(names[:3]) + (f" … ({len(names)} tensors)" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


_TOP = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.embedding": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm.scale": "input_layernorm.weight",
    "attn.q_proj.kernel": "self_attn.q_proj.weight",
    "attn.k_proj.kernel": "self_attn.k_proj.weight",
    "attn.v_proj.kernel": "self_attn.v_proj.weight",
    "attn.o_proj.kernel": "self_attn.o_proj.weight",
    "attn.q_proj.bias": "self_attn.q_proj.bias",
    "attn.k_proj.bias": "self_attn.k_proj.bias",
    "attn.v_proj.bias": "self_attn.v_proj.bias",
    "attn.q_norm.scale": "self_attn.q_norm.weight",
    "attn.k_norm.scale": "self_attn.k_norm.weight",
    "mlp.gate_proj.kernel": "mlp.gate_proj.weight",
    "mlp.up_proj.kernel": "mlp.up_proj.weight",
    "mlp.down_proj.kernel": "mlp.down_proj.weight",
}
# "post_attention_layernorm" is the norm before the MLP in Llama, and the norm on the attention's output in Gemma.
_LLAMA_NAMES = NameTable("model.layers.{}.", _ATTENTION | {"mlp_norm.scale": "post_attention_layernorm.weight"}, _TOP)
_GEMMA_NORMS = {
    "post_attn_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "post_mlp_norm.scale": "post_feedforward_layernorm.weight",
}
GEMMA_NAMES = NameTable("model.layers.{}.", _ATTENTION | _GEMMA_NORMS, _TOP)

FAMILIES = {
    "llama": Family(
        "Llama (SmolLM2, Llama 3)", hf_config.read_llama, hf_config.write_llama, _LLAMA_NAMES, "LlamaForCausalLM"
    ),
    "mistral": Family("Mistral", hf_config.read_mistral, hf_config.write_mistral, _LLAMA_NAMES, "MistralForCausalLM"),
    "qwen2": Family("Qwen2", hf_config.read_qwen2, hf_config.write_qwen2, _LLAMA_NAMES, "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3", hf_config.read_qwen3, hf_config.write_qwen3, _LLAMA_NAMES, "Qwen3ForCausalLM"),
    "gemma2": Family("Gemma 2", hf_config.read_gemma2, hf_config.write_gemma2, GEMMA_NAMES, "Gemma2ForCausalLM"),
    "gemma3_text": Family(
        "Gemma 3 text", hf_config.read_gemma3, hf_config.write_gemma3, GEMMA_NAMES, "Gemma3ForCausalLM"
    ),
}

INSTALLED = Registry("model family", "covey.models", "function", "config.json", {})
"""Families of installed packages: an entry point names a function that returns a `Family`."""
