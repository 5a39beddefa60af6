"""Settings of the section `model`: the checkpoint, its adapters and its devices."""

import math
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge

from covey.config.base import (
    Config,
    Decay,
    Int,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    refuse_if,
    setting,
)
from covey.errors import nearest

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2")
"""Names that a projection has in some family."""


class LoRAConfig(Config, section="model.lora", on_resume="refuse"):
    """Low-rank adapters (Hu et al., 2021): W + (alpha / rank)·A·B on the named projections."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains every weight instead (full fine-tuning)."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Projections that get an adapter: all-linear, names (q_proj), or regular expressions over whole dotted paths
    (layers\\.[0-7]\\.attn\\..*); ours or Hugging Face's.
    """
    dropout: Decay = 0.0
    """Probability with which an update drops an input of an adapter; one mask serves all tokens of the update."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for adapters without any target."""
        return refuse_if(
            self.rank > 0 and not self.targets,
            "targets",
            "model.lora.targets is empty: nothing would be trained",
            "at least one projection",
        )

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each target that is a name, but of a projection in no family of models."""
        unknown = [target for target in self.targets if target.isidentifier() and target not in LORA_TARGETS]
        return [Problem("targets", f"model.lora.targets has no {t!r}", nearest(t, LORA_TARGETS)) for t in unknown]


class MeshConfig(Config, section="model.mesh", on_resume="ignore"):
    """Devices as a grid, those of all processes together; 1 along every axis is one device of each process."""

    data: PositiveInt = 1
    """Number of copies of the weights; each copy gets an equal part of the rows."""
    fsdp: PositiveInt = 1
    """Number of parts into which the weights are split; the devices of each part get an equal part of the rows."""
    tp: PositiveInt = 1
    """Number of parts into which each matrix product is split."""


class RoleMeshConfig(Config, section="role_to_mesh.rollout", on_resume="ignore"):
    """Devices of a role beside those of model.mesh, all processes counted; 0 along every axis is none of its own."""

    data: NonNegativeInt = 0
    """Number of copies of the weights; each copy samples an equal part of the completions."""
    fsdp: NonNegativeInt = 0
    """Number of parts into which the weights are split; 0 is 1 if another axis is set."""
    tp: NonNegativeInt = 0
    """Number of parts into which each matrix product is split; 0 is 1 if another axis is set."""

    @property
    def size(self) -> int:
        """Number of devices; 0 for none of its own."""
        axes = self.data, self.fsdp, self.tp
        return math.prod(size or 1 for size in axes) if any(axes) else 0


class RoleMeshes(Config, section="role_to_mesh", on_resume="ignore"):
    """Meshes of roles with devices of their own; the other roles are on model.mesh."""

    rollout: RoleMeshConfig = field(default_factory=RoleMeshConfig)


class ModelOptions(Config, section="model", on_resume="refuse"):
    """Checkpoint to start with, and its types in memory and in computation."""

    source: str = setting("smollm2-135m", on_resume="ignore")
    """A name (smollm2-135m), a Hugging Face folder, a .gguf file, hf:org/name[@revision], the folder of a run, or a
    model made from scratch (scratch:arithmetic-tiny; its weights are drawn from the run's seed).
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type of the operands of matrix products; they always accumulate in float32. auto chooses bfloat16 where the
    device multiplies it in hardware, else float32; the run folder records the choice.
    """
    remat: bool = setting(True, on_resume="report")
    """Recompute each layer in the backward pass instead of keeping its activations."""
    remat_keeps: Literal["nothing", "products"] = setting("products", on_resume="report")
    """Activations that a recomputed layer keeps: the results of its projections, which are nearly all of the work, or
    nothing.
    """
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Storage of the frozen projections under adapters: as they are, 8 bits with one scale for each column, or 4 bits
    with one scale for each block (QLoRA, Dettmers et al., 2023). Embeddings, norms and heads stay in dtype.
    """
    quantize_block: Annotated[Int, Ge(2)] = 64
    """nf4: number of inputs of a projection with a common scale; even, and a divisor of the inputs of each."""
    adapter: str | None = setting(None, on_resume="ignore")
    """Folder of a PEFT adapter (adapter_config.json), which is put on the model and trained on; lora.rank is then 0,
    since the adapter has its own.
    """
    thinking: Literal["default", "on", "off"] = "default"
    """Variable enable_thinking of chat templates that have it (Qwen3, Qwen3.5, SmolLM3, Gemma 4); default leaves the
    choice to the template.
    """
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for settings of adapters and quantisation that exclude each other."""
        return [
            *refuse_if(
                self.adapter and self.lora.rank,
                "adapter",
                f"model.lora.rank is {self.lora.rank}, and model.adapter brings its own",
                "model.lora.rank 0 beside an adapter",
            ),
            *refuse_if(
                self.quantize != "none" and not (self.lora.rank or self.adapter),
                "quantize",
                f"model.quantize is {self.quantize} without adapters, and a quantised base cannot be trained",
                "none; or adapters: a model.lora.rank above 0, or model.adapter",
            ),
            *refuse_if(
                self.quantize != "nf4" and self.quantize_block != ModelOptions.quantize_block,
                "quantize_block",
                f"model.quantize_block is {self.quantize_block}, and model.quantize is {self.quantize}",
                f"model.quantize nf4; else {ModelOptions.quantize_block}, its default",
            ),
            *refuse_if(
                self.quantize_block % 2,
                "quantize_block",
                f"model.quantize_block is {self.quantize_block}",
                "an even number",
            ),
        ]
