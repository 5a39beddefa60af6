"""Export of LoRA weights as a PEFT adapter, for Hugging Face PEFT or `models.loading.peft` to load onto the base."""

import re
from pathlib import Path

import numpy as np

from covey.errors import WeightsError
from covey.models import families
from covey.models.decoder import Decoder
from covey.models.export.files import Difference, compare_logits, new_folder, write_json, write_safetensors
from covey.models.layers import LoRA
from covey.models.loading.hf_config import Fields
from covey.models.loading.peft import CONFIG_FILE, NAME_PREFIX, TENSORS_FILE, load_adapter
from covey.models.lora import projections, without_lora


def write_peft(model: Decoder, vocabulary: int, out: Path, *, base: str, card: str = "") -> Difference:
    """Write the adapters of `model`, in float32.

    Args:
        vocabulary: number of tokens that the comparison may use.
        out: the folder, new or empty.
        base: name of the base model in adapter_config.json: a repository, or the name of a local one.
        card: text of README.md.

    Returns:
        The difference between the logits of base and adapter, read back, and those of `model`.

    Raises:
        CoveyError: `out` is in use, or cannot be written.
        WeightsError: the model has no adapters, or what was written differs from them.
    """
    named = families.projection_names(model.config)
    loras = {named[path]: linear.lora for path, linear in projections(model).items() if linear.lora is not None}
    if not loras:
        raise no_adapters_error()
    with new_folder(out, card) as folder:
        write_json(folder / CONFIG_FILE, _config(loras, list(named.values()), base))
        write_safetensors(folder / TENSORS_FILE, _tensors(loras))
        return compare_logits(model, load_adapter(without_lora(model), folder), vocabulary, "float32", out)


def no_adapters_error() -> WeightsError:
    """Return the error for a model that has no adapters."""
    return WeightsError(
        "this model has no LoRA adapters to export",
        want="a run with model.lora.rank above 0",
        fix="--format hf writes the whole model",
    )


def _config(loras: dict[str, LoRA], every: list[str], base: str) -> Fields:
    first = next(iter(loras.values()))
    rank = first.a.shape[1]
    assert {(lora.a.shape[1], lora.scale) for lora in loras.values()} == {(rank, first.scale)}, "one rank and scale"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": first.dropout,
        "target_modules": _target_modules(list(loras), every),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _target_modules(adapted: list[str], every: list[str]) -> list[str] | str:
    """Return names if each is adapted in every layer; else a regular expression that matches exactly these modules."""
    names = sorted({module.rsplit(".", 1)[-1] for module in adapted})
    if len(adapted) == sum(module.rsplit(".", 1)[-1] in names for module in every):
        return names
    return "|".join(map(re.escape, adapted))


def _tensors(loras: dict[str, LoRA]) -> dict[str, np.ndarray]:
    """Return the adapters under PEFT's names and in its layout: A [rank, in], B [out, rank]."""
    return {
        f"{NAME_PREFIX}{module}.lora_{side}.weight": np.asarray(matrix[...]).T
        for module, lora in loras.items()
        for side, matrix in (("A", lora.a), ("B", lora.b))
    }
