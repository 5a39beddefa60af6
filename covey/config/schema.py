"""The settings of a run, as small frozen dataclasses: the parts of `recipe.Recipe`, which the Python API takes too.

No JAX here: the command answers `--help` and typos before it is imported.
"""

from dataclasses import dataclass, field
from typing import Literal

from covey.config.keywords import Config

CALCULATOR_MARKERS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
HUBS = ("hf:", "tfds:")
"""What a `data.path` that is no path begins with."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2")
"""Names that a projection has in some family."""


@dataclass(frozen=True)
class LoRAConfig(Config, section="model.lora"):
    """Low-rank adapters (Hu et al., 2021): W + (alpha / rank)·A·B on the named projections."""

    rank: int = 0
    """Rank of the adapters; 0 trains every weight instead (full fine-tuning)."""
    alpha: float = 32.0
    """Numerator of the scale alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Projections that get an adapter: all-linear, names (q_proj), or regular expressions over whole dotted paths
    (layers\\.[0-7]\\.attn\\..*); ours or Hugging Face's.
    """
    dropout: float = 0.0
    """Share of an adapter's inputs that an update leaves out, drawn once for all of its tokens."""


@dataclass(frozen=True)
class MeshConfig(Config, section="model.mesh"):
    """The devices of a process as a grid; 1 along every axis is one device."""

    data: int = 1
    """Copies of the weights, each with its share of the rows."""
    fsdp: int = 1
    """Parts of the weights, each with its share of the rows."""
    tp: int = 1
    """Parts of each matrix product."""


@dataclass(frozen=True)
class ModelOptions(Config, section="model"):
    """Which checkpoint, and how it is held and computed."""

    source: str = "smollm2-135m"
    """A name (smollm2-135m), a Hugging Face folder, a .gguf file, hf:org/name[@revision], the folder of a run, or a
    model made from scratch (scratch:arithmetic-tiny; its weights are drawn from the run's seed).
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the operands of matrix products; they always accumulate in float32."""
    remat: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    remat_keeps: Literal["nothing", "products"] = "products"
    """What recomputed layers keep nonetheless: the results of their projections, nearly all of the work, or nothing."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Under adapters: hold the projections of the base, which nothing trains, in 8 bits with a scale a column, or in 4
    bits with a scale a block (QLoRA, Dettmers et al., 2023). Embeddings, norms and heads stay in dtype.
    """
    quantize_block: int = 64
    """nf4: inputs of a projection that share a scale; even, and a divisor of the inputs of each."""
    adapter: str | None = None
    """A folder with a PEFT adapter (adapter_config.json), which is put on the model and trained on; then lora.rank is
    0, since it brings its own.
    """
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


@dataclass(frozen=True)
class DataConfig(Config, section="data"):
    """Where prompts come from."""

    task: Literal["first-letter", "arithmetic", "sums", "gsm8k", "jsonl"] = "first-letter"
    """first-letter, arithmetic and sums are made on the fly; gsm8k and jsonl are read from `path`."""
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file; a folder with train and test of one kind (train.jsonl and test.jsonl), or
    main_train.csv and main_test.csv; hf:org/name[/config][@revision]; or tfds:name.
    """
    test_path: str | None = None
    """The held-out file beside a file. Without it the last tenth of `path` is held out."""
    prompt_column: str = "prompt"
    """jsonl: the column that holds the prompt (text, or a list of chat messages)."""
    system: str | None = None
    """System message put before each prompt; the task's own when not set."""
    train_fraction: float = 1.0
    """Share of the training set that is used, after shuffling."""
    seed: int = 42
    """Seed of the shuffle and of the tasks made on the fly."""


@dataclass(frozen=True)
class RolloutConfig(Config, section="rollout"):
    """How completions are sampled."""

    max_prompt_length: int = 256
    """Longest prompt in tokens; training.too_long says what becomes of a longer one."""
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
    tool: Literal["none", "calculator"] = "none"
    """calculator: what the model writes between the first two of tool_markers is calculated, and the result is put
    behind it between the other two. Those tokens count toward max_new_tokens and carry no loss.
    """
    tool_markers: tuple[str, ...] = CALCULATOR_MARKERS
    """Four control tokens of the tokenizer: begin and end of a question, begin and end of its answer."""


@dataclass(frozen=True)
class GRPOConfig(Config, section="grpo"):
    """The algorithm: a preset (`algorithms.PRESETS`), and the settings in which the run differs from it.

    A setting that is None is the preset's; `algorithms.algorithm_of` gives the whole. Formulas: docs/algorithms.md.
    """

    algorithm: str = "grpo"
    """grpo, dr_grpo, bnpo, dapo, gspo, gspo_token, cispo, rloo, reinforce, sapo or ppo."""
    num_generations: int = 8
    """Samples per prompt: the group G."""
    num_iterations: int = 1
    """Updates per batch of rollouts: μ."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function in the total; all 1 when not set. A reward model comes last. With weight 0 a
    function is only shown: it counts for nothing, neither in the total nor in whether an answer was scored.
    """
    advantage: Literal["group_zscore", "batch_std", "centred", "leave_one_out", "gae"] | None = None
    """How rewards become advantages; gae needs a critic."""
    ratio: Literal["token", "sequence", "sequence_token"] | None = None
    """Importance ratio per token, per answer (GSPO), or the answer's with the token's gradient."""
    surrogate: Literal["clip", "dual_clip", "cispo", "reinforce", "sapo"] | None = None
    """What is made of ratio and advantage at each token."""
    aggregate: Literal["sequence_mean", "token_mean", "constant"] | None = None
    """Mean over answers of their token means, mean over all tokens of the step, or sum over answers ×
    max_new_tokens.
    """
    epsilon: float | None = None
    """Clip range of the ratio below 1, and above 1 unless epsilon_high is set."""
    epsilon_high: float | None = None
    """Clip range of the ratio above 1."""
    delta: float | None = None
    """clip, dual_clip: upper bound of the unclipped ratio too (two-sided clip, INTELLECT-2); off when not set."""
    dual_clip: float | None = None
    """dual_clip: c of Ye et al. (2020); for A < 0 the loss is at most c·|A|."""
    cap: float | None = None
    """cispo: largest weight of a token."""
    sapo_positive: float | None = None
    """sapo: temperature for A > 0."""
    sapo_negative: float | None = None
    """sapo: temperature for A ≤ 0."""
    beta: float | None = None
    """Weight of the KL to the reference; 0 needs no reference model."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL (Schulman, 2020). k1 belongs into the reward: as a loss its expected gradient is 0."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether the KL is a term of the loss or is taken from the reward."""
    kl_target: float | None = None
    """Adapts beta so that the KL stays near this (Ziegler et al., 2019); off when not set."""
    kl_horizon: int | None = None
    """Samples over which an adapted beta moves."""
    entropy_bonus: float | None = None
    """Weight of the entropy that is added to the objective."""
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """What to do where trainer and sampler disagree: weigh by exp(logp_trainer − logp_sampler), cut at
    correction_cap (truncate) or leave out above it (mask), per token or per answer (geometric mean).
    """
    correction_cap: float | None = None
    """Largest weight of the correction."""
    mask_truncated: bool | None = None
    """Leave completions that ran out of tokens out of the loss."""
    overlong_buffer: float | None = None
    """Tokens before max_new_tokens in which the reward falls linearly (DAPO); below 1 a share of max_new_tokens, 0 is
    off.
    """
    overlong_penalty: float | None = None
    """What the reward has fallen by at max_new_tokens."""
    max_sampling_rounds: int | None = None
    """Prompt batches sampled a step, at most, to replace groups whose rewards are all equal (DAPO); 1 replaces none."""
    gamma: float | None = None
    """gae: discount."""
    gae_lambda: float | None = None
    """gae: λ."""
    value_clip: float | None = None
    """ppo: how far a value may move from the rollout's before its loss stops falling; 0 is off."""
    whiten: bool | None = None
    """gae: advantages of the step shifted and scaled to mean 0 and variance 1."""
    reference: Literal["start", "base"] = "start"
    """The frozen policy of the KL: as the run begins, with a loaded adapter; or the base under the adapters."""
    reference_every_n_updates: int = 0
    """Moves the reference toward the actor every so many updates (TR-DPO); 0 keeps it."""
    reference_mixing: float = 0.6
    """α of that: reference ← α·actor + (1 − α)·reference."""


@dataclass(frozen=True)
class PPOConfig(GRPOConfig):
    """GRPO's settings with PPO's defaults: the preset `ppo`, one sample a prompt."""

    algorithm: str = "ppo"
    num_generations: int = 1


@dataclass(frozen=True)
class OptimizerConfig(Config, section="training.optimizer"):
    """AdamW (Loshchilov & Hutter, 2019), or Muon (Jordan et al., 2024) for matrices, with warm-up and decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """What moves the matrices of the layers; everything else is always AdamW's."""
    learning_rate: float = 1e-6
    """Peak learning rate, of the matrices where the others have their own."""
    embedding_learning_rate: float | None = None
    """Peak of the embeddings, a tied head included; learning_rate when not set."""
    unembedding_learning_rate: float | None = None
    """Peak of a head of its own; learning_rate when not set."""
    vector_learning_rate: float | None = None
    """Peak of norm scales and biases; learning_rate when not set."""
    initial_fraction: float = 1.0
    """Factor on every learning rate from the first update on."""
    b1: float = 0.9
    """AdamW: decay of the first moment."""
    b2: float = 0.99
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: float = 0.95
    """muon: decay of the momentum."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices and embeddings; biases and norm scales are left alone."""
    warmup_ratio: float = 0.1
    """Share of the steps that warm up linearly; the first is already above 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at the last step."""
    max_grad_norm: float = 1.0
    """Clip of the gradient's global norm; 0 is off."""


@dataclass(frozen=True)
class RLTrainingConfig(Config, section="training"):
    """How long, how large, how often."""

    max_steps: int | None = None
    """Optimizer steps (rollout batches × num_iterations); when not set, the data times num_epochs."""
    num_epochs: int = 1
    """Passes over the training data when max_steps is not set."""
    prompts_per_step: int = 8
    """Prompts in a rollout batch: P. Each is sampled num_generations times."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a prompt longer than rollout.max_prompt_length: the run is refused, its row is left out, or its
    beginning is cut off (of a chat that of the longest message), in training and evaluation. summary.json counts both.
    """
    actor_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    """ppo: the critic's own."""
    rollout_micro_batch_size: int | None = None
    """Prompts sampled at a time; inside the stage that is × num_generations samples. The whole step when not set."""
    ref_logps_micro_batch_size: int | None = None
    """Prompts (× num_generations samples) whose reference log-probs and values are computed at a time."""
    old_logps_micro_batch_size: int | None = None
    """Prompts (× num_generations samples) whose old log-probs are computed at a time."""
    train_micro_batch_size: int | None = None
    """Prompts (× num_generations samples) whose gradients are accumulated at a time. The whole step when not set."""
    queueing: Literal["auto", "sync", "async"] = "auto"
    """async: a thread samples and scores the step's next micro-batch while the last one is trained on; auto does so
    when actor and rollout live on different devices. The result is the same.
    """
    eval_every_n_steps: int = 0
    """Held-out evaluation during training; 0 leaves it to before and after."""
    checkpoint_every_n_steps: int = 0
    """Checkpoints during training; one is always written at the end."""
    max_to_keep: int = 4
    """Checkpoints kept."""
    keep_best: str = ""
    """A metric, such as eval/accuracy: the checkpoint at which it was best is kept beside the latest."""
    skip_nonfinite: int = 0
    """Updates with a loss or gradient that is no finite number that may be left out before the run stops; the batch of
    each is kept in the folder bad/. One that is left out counts as a step: of the run, the schedule and the dropout.
    """
    watchdog_seconds: float = 1800.0
    """When a phase takes longer, what every thread does is written to stacks.txt; 0 is never."""
    show: tuple[str, ...] = ("kl",)
    """Metrics on the progress line, besides the reward; docs/metrics.md lists them all."""
    packing: Literal["groups", "dense"] = "groups"
    """groups: prompt once, completions behind it. dense: one sample a row (the oracle)."""
    row_length: int = 768
    """Longest row in tokens; shorter ones are used where they fit, and a longer sample raises it."""
    max_tokens_per_micro_batch: int = 1024
    """Most tokens in one forward-backward, in whole rows and at least one a device: a micro-batch that has more is cut
    further. Changes speed and memory, never the gradient.
    """


@dataclass(frozen=True)
class EvalConfig(Config, section="evaluation"):
    """The evaluation before and after training, and on the way."""

    prompts: int = 100
    """Held-out prompts; 0 means all."""
    during_prompts: int | None = None
    """covey train: held-out prompts of the evaluations on the way; `prompts` when not set, 0 means all."""
    samples: int = 1
    """Completions sampled for each."""
    accuracy: str = ""
    """Reward function whose value of 1 or more means a right answer."""
    partial: str = ""
    """Reward function whose value of 1 or more means a nearly right answer."""
    format: str = ""
    """Reward function whose value of 1 or more means a well-formed answer."""
    pass_k: int = 0
    """Largest k of pass@k, at most `samples`: that one of k answers is right, as accuracy says; 0 is off."""
    preset: Literal["greedy", "standard", "liberal", "all"] | None = None
    """Sampling by name (temperature, top_k, top_p): greedy 1e-4, 1, 1; standard 0.7, 50, 0.95; liberal 0.85, 2000, 1;
    all evaluates under each, and on the way under the first.
    """
    temperature: float | None = None
    """The rollout's when not set; 0 is greedy."""
    top_p: float | None = None
    """The rollout's when not set."""
    top_k: int | None = None
    """The rollout's when not set."""


@dataclass(frozen=True)
class SFTDataConfig(DataConfig):
    """Where the examples come from: prompts with the completions to learn."""

    task: Literal["first-letter", "arithmetic", "sums", "gsm8k", "jsonl"] = "jsonl"
    """jsonl: rows with answers, read from `path`, in the forms that covey sft --help lists. arithmetic, sums and gsm8k
    bring worked answers; first-letter has none.
    """
    completion_column: str = "completion"
    """jsonl: the column that holds the completion."""


@dataclass(frozen=True)
class SFTConfig(Config, section="training"):
    """Supervised training: how long, how large, how often."""

    max_steps: int | None = None
    """Optimizer steps; when not set, the data times num_epochs."""
    num_epochs: int = 1
    """Passes over the training data when max_steps is not set."""
    batch_size: int = 16
    """Examples in an optimizer step."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=2e-5))
    completion_only: bool = True
    """Learn the completions alone; otherwise the prompts too."""
    max_length: int = 1024
    """Most tokens in an example, prompt and completion together."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a longer one: the run is refused, the example is left out, or its end is cut off, which leaves it
    without its stop token. Both are counted in summary.json.
    """
    packing: bool = True
    """Short examples share a row, and nothing crosses between them; otherwise one a row. The gradient is the same."""
    row_length: int = 768
    """Longest row in tokens; shorter ones are used where they fit, and a longer example raises it."""
    max_tokens_per_micro_batch: int = 1024
    """Most tokens in one forward-backward, in whole rows and at least one a device; gradients are accumulated over the
    step. Changes speed and memory, never the gradient.
    """
    eval_every_n_steps: int = 0
    """Held-out loss during training; 0 leaves it to before and after."""
    checkpoint_every_n_steps: int = 0
    """Checkpoints during training; one is always written at the end."""
    max_to_keep: int = 4
    """Checkpoints kept."""
    keep_best: str = ""
    """A metric, such as eval/loss: the checkpoint at which it was best is kept beside the latest."""
    skip_nonfinite: int = 0
    """Updates with a loss or gradient that is no finite number that may be left out before the run stops; the batch of
    each is kept in the folder bad/. One that is left out counts as a step: of the run, the schedule and the dropout.
    """
    watchdog_seconds: float = 1800.0
    """When a phase takes longer, what every thread does is written to stacks.txt; 0 is never."""
    show: tuple[str, ...] = ("perplexity",)
    """Metrics on the progress line, besides the loss; docs/metrics.md lists them all."""


@dataclass(frozen=True)
class SFTEvalConfig(EvalConfig):
    """The evaluation before and after supervised training: the loss on held-out examples, and a few answers."""

    answers: int = 4
    """Held-out prompts that are also answered, judged by accuracy and format where those are named; 0 is none. A prompt
    that leaves the model no room for rollout.max_new_tokens is passed over.
    """
