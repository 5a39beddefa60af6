"""The settings of a run, as small frozen dataclasses. `recipe.Recipe` is a tree of them; the Python API takes the same
ones.

No JAX here: the command answers `--help` and typos before it is imported.
"""

from dataclasses import dataclass, field
from typing import Literal

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al., 2021): W + (alpha / rank)·A·B on the named projections."""

    rank: int = 0
    """Rank of the adapters; 0 trains every weight instead (full fine-tuning)."""
    alpha: float = 32.0
    """Numerator of the scale alpha / rank."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Projections that get an adapter, by their Hugging Face names."""


@dataclass(frozen=True)
class ModelOptions:
    """Which checkpoint, and how it is held and computed."""

    source: str = "smollm2-135m"
    """A name (smollm2-135m), a Hugging Face folder, a .gguf file, or hf:org/name[@revision]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the operands of matrix products; they always accumulate in float32."""
    remat: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    scan_layers: bool = False
    """Train with a scan over stacked layers: compiles faster, runs slower on CPU. Decoding always unrolls."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    task: Literal["first-letter", "arithmetic", "gsm8k", "jsonl"] = "first-letter"
    """first-letter and arithmetic are made on the fly; gsm8k and jsonl are read from `path`."""
    path: str | None = None
    """gsm8k: folder with train.jsonl and test.jsonl. jsonl: the training file."""
    test_path: str | None = None
    """jsonl: the held-out file. Without it the last tenth of `path` is held out."""
    prompt_column: str = "prompt"
    """jsonl: the column that holds the prompt (text, or a list of chat messages)."""
    system: str | None = None
    """System message put before each prompt; the task's own when not set."""
    train_fraction: float = 1.0
    """Share of the training set that is used, after shuffling."""
    seed: int = 42
    """Seed of the shuffle and of the tasks made on the fly."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    max_prompt_length: int = 256
    """Longest prompt in tokens; a longer one is an error, never cut silently."""
    max_new_tokens: int = 512
    """Most tokens a completion may have, the stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """Most likely tokens kept; 0 is off."""
    seed: int = 0
    """Seed of the noise; the run's seed when it comes from a recipe."""
    slots: int = 32
    """Completions decoded side by side."""
    decode_chunk: int = 8
    """Decode steps between two looks at which slots are finished."""
    kv_cache_size: int | None = None
    """Most tokens a slot's cache may hold; max_prompt_length + max_new_tokens when not set."""


@dataclass(frozen=True)
class GRPOConfig:
    """The algorithm (Shao et al., 2024, DeepSeekMath)."""

    num_generations: int = 8
    """Samples per prompt: the group G."""
    num_iterations: int = 1
    """Updates per batch of rollouts: μ."""
    beta: float = 0.04
    """Weight of the KL term to the reference; 0 needs no reference model."""
    epsilon: float = 0.2
    """Clip range of the ratio below 1, and above 1 unless epsilon_high is set."""
    epsilon_high: float | None = None
    """Clip range of the ratio above 1."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function in the total; all 1 when not set."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, 2019) with warm-up and decay."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.99
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices and embeddings; biases and norm scales are left alone."""
    warmup_ratio: float = 0.1
    """Share of the steps that warm up linearly; the first is already above 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at the last step."""
    max_grad_norm: float = 1.0
    """Clip of the gradient's global norm; 0 is off."""


@dataclass(frozen=True)
class RLTrainingConfig:
    """How long, how large, how often."""

    max_steps: int | None = None
    """Optimizer steps (rollout batches × num_iterations); when not set, the data times num_epochs."""
    num_epochs: int = 1
    """Passes over the training data when max_steps is not set."""
    prompts_per_step: int = 8
    """Prompts in a rollout batch: P. Each is sampled num_generations times."""
    actor_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval_every_n_steps: int = 0
    """Held-out evaluation during training; 0 leaves it to before and after."""
    checkpoint_every_n_steps: int = 0
    """Checkpoints during training; one is always written at the end."""
    max_to_keep: int = 4
    """Checkpoints kept."""
    packing: Literal["groups", "dense"] = "groups"
    """groups: prompt once, completions behind it. dense: one sample a row (the oracle)."""
    row_length: int = 512
    """Longest row in tokens; shorter ones are used where they fit, and a longer sample raises it."""
    tokens_per_micro_batch: int = 1024
    """Tokens in one forward-backward, in whole rows and at least one a device; changes speed and memory, never the
    gradient.
    """


@dataclass(frozen=True)
class EvalConfig:
    """The evaluation before and after training."""

    prompts: int = 100
    """Held-out prompts; 0 means all."""
    samples: int = 1
    """Completions sampled for each."""
    accuracy: str = ""
    """Reward function whose value of 1 or more means a right answer."""
    format: str = ""
    """Reward function whose value of 1 or more means a well-formed answer."""
    temperature: float | None = None
    """The rollout's when not set; 0 is greedy."""
    top_p: float | None = None
    """The rollout's when not set."""
    top_k: int | None = None
    """The rollout's when not set."""
