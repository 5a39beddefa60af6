"""Loading of LoRA adapters in the format of Hugging Face PEFT onto a base model.

The folder holds adapter_config.json and adapter_model.safetensors. The tensors determine which projections are adapted;
the config gives the scale, and unsupported settings in it are refused by name. PEFT's matrices are [out, in], ours
[in, out], as for every projection. The inverse is `peft`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from covey.errors import WeightsError
from covey.models import families
from covey.models.decoder import Decoder
from covey.models.layers import Linear, LoRA
from covey.models.loading.hf_config import WRAPPERS, text_name
from covey.models.loading.stored_tensor import StoredTensor
from covey.models.loading.weights import FLOAT_TYPES, open_safetensors
from covey.models.lora import projections
from covey.text.tokenizer import read_json

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."

Matrices = tuple[np.ndarray, np.ndarray]
"""Matrices A [n_in, r] and B [r, n_out] of one adapter."""


def load_adapter(base: Decoder, folder: str | Path, *, dropout: float = 0.0, seed: int = 0) -> Decoder:
    """Return a model that shares every array of `base` and has the adapters of `folder`.

    Args:
        dropout, seed: dropout of further training, and its seed; see `lora.apply_lora_dropout`.

    Raises:
        WeightsError: a file is missing or truncated, the kind of adapter is not supported, or the adapters do not fit
            this model.
    """
    folder = Path(folder).expanduser()
    modules = families.paths_by_name(families.projection_names(base.config))
    config = _check_config(read_json(folder / CONFIG_FILE), modules, str(folder / CONFIG_FILE))
    pairs = _read_matrices(folder, modules)
    numbers = {path: number for number, path in enumerate(sorted(path for module in pairs for path in modules[module]))}
    model = nnx.merge(*nnx.split(base))
    linears = projections(model)
    for module, (a, b) in pairs.items():
        _check_shapes(modules[module], linears, a, b, _module_value(config, "r", module), str(folder))
        widths = [linears[path].shape[1] for path in modules[module]]
        columns = np.split(b, np.cumsum(widths[:-1]), axis=1)
        for path, part in zip(modules[module], columns, strict=True):
            lora = linears[path].lora = _lora(a, part, config, module)
            lora.dropout, lora.noise = dropout, (seed, numbers[path])
    return model


def _check_shapes(
    paths: list[str], linears: Mapping[str, Linear], a: np.ndarray, b: np.ndarray, rank: int, where: str
) -> None:
    n_in, n_out = linears[paths[0]].shape[0], sum(linears[path].shape[1] for path in paths)
    if a.shape != (n_in, rank) or b.shape != (rank, n_out):
        raise WeightsError(
            f"the adapter of {', '.join(paths)} has shapes {a.T.shape} and {b.T.shape}",
            want=f"({rank}, {n_in}) and ({n_out}, {rank})",
            fix="the adapter belongs to another model",
            where=where,
        )


def _lora(a: np.ndarray, b: np.ndarray, config: Mapping[str, Any], module: str) -> LoRA:
    """Return the adapter of one projection. Projections that are one module share A."""
    rank, alpha = _module_value(config, "r", module), _module_value(config, "lora_alpha", module)
    lora = LoRA(len(a), b.shape[1], rank, 0.0, rngs=nnx.Rngs(0))
    lora.a[...], lora.b[...] = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    lora.scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return lora


def _module_value(config: Mapping[str, Any], name: str, module: str) -> Any:
    """Return the rank or alpha of a module."""
    pattern: Mapping[str, Any] = config.get(PATTERNS[name]) or {}
    return pattern.get(module, config[name])


def adapter_digest(folder: str | Path) -> str:
    """Return the SHA-256 of the adapter's files, in hex."""
    files = [Path(folder).expanduser() / name for name in (CONFIG_FILE, TENSORS_FILE)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _check_config(config: Mapping[str, Any], modules: Iterable[str], where: str) -> Mapping[str, Any]:
    """Return `config` if it describes plain LoRA; refuse it otherwise. A pattern may name only whole `modules`."""
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"peft_type {config.get('peft_type')!r} is not supported", want="LORA", where=where)
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise WeightsError(f"{name} is {config.get(name)!r}", want="a number above 0", where=where)
    for name, value in config.items():
        known = name in KNOWN_FIELDS or _is_plain_pattern(name, value, modules)
        if not known and value and value not in PLAIN_VALUES.get(name, ()):
            raise WeightsError(f"{name}: {value!r} is not supported", want="plain LoRA", where=where)
    return config


def _is_plain_pattern(name: str, value: Any, modules: Iterable[str]) -> bool:
    """Return True for ranks or alphas of whole modules. PEFT has regular expressions in their place."""
    if name not in PATTERNS.values() or not isinstance(value, dict):
        return False
    kind = int if name == PATTERNS["r"] else int | float
    return all(module in modules and isinstance(x, kind) and 0 < x < 2**31 for module, x in value.items())


def _read_matrices(folder: Path, ours: Mapping[str, list[str]]) -> dict[str, Matrices]:
    """Return the two matrices of each adapted module, in our layout."""
    if not (folder / TENSORS_FILE).is_file():
        raise WeightsError(
            f"no {TENSORS_FILE} in this folder",
            fix="save it again with safetensors: model.save_pretrained(folder)",
            where=str(folder),
        )
    matrices: dict[str, dict[str, np.ndarray]] = {}
    with open_safetensors(folder / TENSORS_FILE) as file:
        for name in file.keys():  # noqa: SIM118
            match = re.fullmatch(rf"{re.escape(NAME_PREFIX)}(.+)\.lora_([AB])\.weight", name)
            module = None if match is None else text_name(WRAPPERS.sub("", match[1]))
            if match is None or module is None or module not in ours:
                raise WeightsError(
                    f"{name} adapts nothing that this model has",
                    want=f"adapters of projections, such as {NAME_PREFIX}{min(ours)}.lora_A.weight",
                    where=str(folder),
                )
            matrices.setdefault(module, {})[match[2]] = _read_float(file, name, folder).T
    for module, pair in matrices.items():
        if len(pair) < 2:
            lacks, paths = "B" if "A" in pair else "A", ", ".join(ours[module])
            raise WeightsError(f"the adapter of {paths} has no lora_{lacks}", where=str(folder))
    if not matrices:
        raise WeightsError(f"{TENSORS_FILE} holds no adapter", where=str(folder))
    return {module: (pair["A"], pair["B"]) for module, pair in matrices.items()}


def _read_float(file: Any, name: str, folder: Path) -> np.ndarray:
    """Read one tensor in the file's type.

    Raises:
        WeightsError: it does not hold floating-point numbers.
    """
    tensor = StoredTensor(file, name)
    if tensor.kind not in FLOAT_TYPES:
        raise WeightsError(
            f"{name} is stored as {tensor.kind}", want="one of: " + ", ".join(FLOAT_TYPES), where=str(folder)
        )
    return tensor.whole()


KNOWN_FIELDS = {
    "peft_type", "r", "lora_alpha", "use_rslora",
    # which projections are adapted (the tensors determine that), and fields that do not affect the function
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode",
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "megatron_core",
    "qalora_group_size", "runtime_config",
}  # fmt: skip
PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
"""Field → the one with its values for some modules."""
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
"""Field → values that mean plain LoRA, besides null, false and empty ones."""
