"""Models that are known by name: one or two of each family, for `covey models` and docs/models.md.

Every checkpoint of a family in `families` loads, whether it stands here or not. Sizes follow from the shapes; licences
are from the models' cards. This module imports neither JAX nor NumPy.
"""

from typing import Literal, NamedTuple


class KnownModel(NamedTuple):
    """One model.

    Attributes:
        source: value of `model.source`.
        kind: its `model_type`, by which its family is found.
        parameters: number of weights, shared ones once.
        licence: name of the licence; "" for a model that is made from scratch.
        template: form of its chat template; "" if it has none.
        tools: where its prompts list tools; "" where no template was tried.
        thinking: "switch" if its chat template has the switch of `model.thinking`; "" if not, or if none was tried.
        status: trained: runs with it at this size are in the docs. logits: the logits of its family equal those of
            transformers on small checkpoints, and it has not been trained.
    """

    source: str
    kind: str
    parameters: int
    licence: str
    template: str
    tools: Literal["template", "system message", ""]
    status: Literal["trained", "logits"]
    thinking: Literal["switch", ""] = ""


def memory_of(parameters: int) -> tuple[int, int]:
    """Return the least bytes to train all of so many weights in float32, with their gradient and two moments, and to
    train adapters on them in bfloat16. Activations, the KV cache and the adapters come on top.
    """
    return 16 * parameters, 2 * parameters


APACHE = "Apache-2.0"
MODELS = (
    KnownModel("scratch:arithmetic-tiny", "llama", 2_424_320, "", "", "", "trained"),
    KnownModel("scratch:guess-tiny", "llama", 391_552, "", "", "", "trained"),
    KnownModel("scratch:wordle-tiny", "llama", 379_392, "", "", "", "trained"),
    KnownModel("smollm2-135m", "llama", 134_515_008, APACHE, "ChatML", "system message", "trained"),
    KnownModel("hf:HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 1_711_376_384, APACHE, "ChatML", "", "logits"),
    KnownModel(
        "hf:meta-llama/Llama-3.2-1B-Instruct",
        "llama",
        1_235_814_400,
        "Llama 3.2 Community",
        "Llama 3",
        "template",
        "logits",
    ),
    KnownModel(
        "hf:meta-llama/Llama-3.1-8B-Instruct",
        "llama",
        8_030_261_248,
        "Llama 3.1 Community",
        "Llama 3",
        "template",
        "logits",
    ),
    KnownModel(
        "hf:mistralai/Mistral-7B-Instruct-v0.3", "mistral", 7_248_023_552, APACHE, "[INST]", "template", "logits"
    ),
    KnownModel("hf:microsoft/Phi-3-mini-4k-instruct", "phi3", 3_821_079_552, "MIT", "Phi-3", "", "logits"),
    KnownModel("hf:allenai/OLMo-2-0425-1B-Instruct", "olmo2", 1_484_916_736, APACHE, "Tulu", "", "logits"),
    KnownModel("hf:HuggingFaceTB/SmolLM3-3B", "smollm3", 3_075_098_624, APACHE, "ChatML", "", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 494_032_768, APACHE, "ChatML", "template", "logits"),
    KnownModel("hf:Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 1_543_714_304, APACHE, "ChatML", "template", "logits"),
    KnownModel("hf:Qwen/Qwen3-0.6B", "qwen3", 596_049_920, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3-4B", "qwen3", 4_022_468_096, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3.5-0.8B", "qwen3_5_text", 752_393_024, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3.5-2B", "qwen3_5_text", 1_881_825_088, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3.5-4B", "qwen3_5_text", 4_205_751_296, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3.5-9B", "qwen3_5_text", 8_953_803_264, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:Qwen/Qwen3.5-27B", "qwen3_5_text", 26_895_998_464, APACHE, "ChatML", "template", "logits", "switch"),
    KnownModel("hf:google/gemma-2-2b-it", "gemma2", 2_614_341_888, "Gemma terms", "Gemma", "", "logits"),
    KnownModel("gemma3-270m", "gemma3_text", 268_098_176, "Gemma terms", "", "", "trained"),
    KnownModel("hf:google/gemma-3-1b-it", "gemma3_text", 999_885_952, "Gemma terms", "Gemma", "", "logits"),
    KnownModel(
        "hf:google/gemma-4-E2B-it", "gemma4_text", 4_628_569_379, APACHE, "Gemma 4", "template", "logits", "switch"
    ),
    KnownModel(
        "hf:google/gemma-4-E4B-it", "gemma4_text", 7_463_013_418, APACHE, "Gemma 4", "template", "logits", "switch"
    ),
    KnownModel(
        "hf:google/gemma-4-12B-it",
        "gemma4_unified_text",
        11_907_350_320,
        APACHE,
        "Gemma 4",
        "template",
        "logits",
        "switch",
    ),
    KnownModel(
        "hf:google/gemma-4-31B-it", "gemma4_text", 30_697_345_340, APACHE, "Gemma 4", "template", "logits", "switch"
    ),
    KnownModel("hf:nanochat-students/nanochat-d20", "nanochat", 560_988_160, "MIT", "nanochat", "", "logits"),
)
"""All of them, by family."""
