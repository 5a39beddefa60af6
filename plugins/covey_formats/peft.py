"""Export of LoRA weights as a PEFT adapter, for Hugging Face PEFT or `peft_reader` to load onto the base."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from covey.errors import WeightsError
from covey.models import families
from covey.models.decoder import Decoder
from covey.models.hf_folder import write_json
from covey.models.layers import Linear, LoRA
from covey.models.loading.hf_config import Fields
from covey.models.lora import projections, without_lora
from covey.parallel import processes
from covey_formats.files import (
    Difference,
    compare_logits,
    lies_over_processes,
    new_folder,
    write_safetensors,
)
from covey_formats.peft_reader import CONFIG_FILE, NAME_PREFIX, TENSORS_FILE, load_adapter

Parts = list[Linear]
"""The projections that are one module in Hugging Face's model: one, or Phi-3's three of q, k and v."""


def write_peft(
    model: Decoder,
    vocabulary: int,
    out: Path,
    *,
    base: str,
    inside: str = "model",
    card: str = "",
    write_beside: Callable[[Path], None] = lambda folder: None,
) -> Difference:
    """Write the adapters of `model`, in float32.

    Args:
        vocabulary: number of tokens that the comparison may use.
        out: the folder, new or empty.
        base: name of the base model in adapter_config.json: a repository, or the name of a local one.
        inside: module of the decoder in the base: `hf_config.MODULE` where the base is a model with images.
        card: text of README.md.
        write_beside: writes further files, such as the tokenizer's, into the folder that it gets.

    Returns:
        The difference between the logits of base and adapter, read back, and those of `model`. If the model's arrays
        lie over several processes, all must call this; they gather the adapters, which the first writes.

    Raises:
        CoveyError: `out` is in use, or cannot be written.
        WeightsError: the model has no adapters, or what was written differs from them.
    """
    modules = {module.replace("model", inside, 1): parts for module, parts in _modules(model).items()}
    adapted = {module: parts for module, parts in modules.items() if _loras(parts)}
    if not adapted:
        raise no_adapters_error()
    tensors, targets = _tensors(adapted), _target_modules(list(adapted), list(modules), inside)
    with new_folder(out, card) as folder:
        with processes.here().together("export/adapters"):
            if jax.process_index() == 0:
                write_json(folder / CONFIG_FILE, _config(adapted, targets, base))
                write_safetensors(folder / TENSORS_FILE, tensors)
                write_beside(folder)
        if lies_over_processes(model):
            return Difference(0.0, math.nan)
        return compare_logits(model, load_adapter(without_lora(model), folder), vocabulary, "float32", out)


def no_adapters_error() -> WeightsError:
    """Return the error for a model that has no adapters."""
    return WeightsError(
        "this model has no LoRA adapters to export",
        want="a run with model.lora.rank above 0",
        fix="--format hf writes the whole model",
    )


def _modules(model: Decoder) -> dict[str, Parts]:
    """Return Hugging Face's module → the projections that it is."""
    linears, modules = projections(model), families.paths_by_name(families.projection_names(model.config))
    return {module: [linears[path] for path in paths] for module, paths in modules.items()}


def _loras(parts: Parts) -> list[LoRA]:
    return [linear.lora for linear in parts if linear.lora is not None]


def _config(adapted: dict[str, Parts], targets: list[str] | str, base: str) -> Fields:
    loras = [lora for parts in adapted.values() for lora in _loras(parts)]
    rank, scale = loras[0].a.shape[1], loras[0].scale
    assert {(lora.a.shape[1], lora.scale) for lora in loras} == {(rank, scale)}, "one rank and scale"
    ranks = {module: rank * len(_loras(parts)) for module, parts in adapted.items() if len(_loras(parts)) > 1}
    patterns = {"rank_pattern": ranks, "alpha_pattern": {module: scale * wide for module, wide in ranks.items()}}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": loras[0].dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    } | (patterns if ranks else {})


def _target_modules(adapted: list[str], every: list[str], inside: str) -> list[str] | str:
    """Return names if each is adapted in every layer; else a regular expression that matches exactly these modules. A
    model with images has modules of the same names in other parts.
    """
    names = sorted({module.rsplit(".", 1)[-1] for module in adapted})
    if len(adapted) == sum(module.rsplit(".", 1)[-1] in names for module in every):
        return names if inside == "model" else rf"{re.escape(inside)}\..*\.({'|'.join(names)})"
    return "|".join(map(re.escape, adapted))


def _tensors(adapted: dict[str, Parts]) -> dict[str, np.ndarray]:
    """Return the adapters under PEFT's names and in its layout: A [rank, in], B [out, rank]."""
    return {
        f"{NAME_PREFIX}{module}.lora_{side}.weight": matrix
        for module, parts in adapted.items()
        for side, matrix in (("A", _narrowing(parts)), ("B", _widening(parts)))
    }


def _narrowing(parts: Parts) -> np.ndarray:
    """Return A: the rows of the module's adapters below each other."""
    return np.concatenate([processes.here().to_host(lora.a[...]).T for lora in _loras(parts)])


def _widening(parts: Parts) -> np.ndarray:
    """Return B: blocks on a diagonal, one for each part of the module; a part without an adapter has rows of zeros."""
    rank = _loras(parts)[0].a.shape[1]
    b = np.zeros((sum(linear.shape[1] for linear in parts), rank * len(_loras(parts))), np.float32)
    row, column = 0, 0
    for linear in parts:
        end = row + linear.shape[1]
        if linear.lora is not None:
            b[row:end, column : column + rank] = processes.here().to_host(linear.lora.b[...]).T
            column += rank
        row = end
    return b
