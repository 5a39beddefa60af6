"""Settings of the section `training`, of reinforcement learning and of supervised training, and of optimizers."""

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import WrapValidator

from covey.config import metrics
from covey.config.base import (
    Config,
    Decay,
    Fraction,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    refuse_if,
    setting,
)
from covey.files import IN_BUCKET


class OptimizerConfig(Config, section="training.optimizer", on_resume="report"):
    """AdamW (Loshchilov & Hutter, 2019), or Muon (Jordan et al., 2024) for matrices, with warm-up and decay."""

    kind: Literal["adamw", "muon"] = setting("adamw", on_resume="refuse")
    """Optimizer of the matrices of the layers; all other weights always use AdamW."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; of the matrices alone where other weights have their own."""
    embedding_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the embeddings, a tied head included; learning_rate when not set."""
    unembedding_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of an untied head; learning_rate when not set."""
    vector_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of norm scales and biases; learning_rate when not set."""
    initial_fraction: Fraction = 1.0
    """Factor on every learning rate from the first update on."""
    b1: Decay = 0.9
    """AdamW: decay of the first moment."""
    b2: Decay = 0.99
    """AdamW: decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Decay = 0.95
    """muon: decay of the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices and embeddings; biases and norm scales do not decay."""
    embedding_weight_decay: NonNegativeFloat | None = None
    """Decoupled decay of the embeddings, a tied head included; weight_decay when not set."""
    unembedding_weight_decay: NonNegativeFloat | None = None
    """Decoupled decay of an untied head; weight_decay when not set."""
    warmup_ratio: Decay = 0.1
    """Fraction of the steps in which the learning rate rises linearly; it is above 0 in the first step."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up, to 0 at the last step."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest global norm of the gradient, which is clipped to it; 0 is off."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for a momentum without Muon."""
        return refuse_if(
            self.kind != "muon" and self.momentum != OptimizerConfig.momentum,
            "momentum",
            f"momentum is {self.momentum:g}, and the optimizer {self.kind} does not use it",
            f"kind muon, or {OptimizerConfig.momentum}, the default; adamw has b1",
            unused=True,
        )


Optimizer = Annotated[
    OptimizerConfig, WrapValidator(lambda value, validate: value if hasattr(value, "init") else validate(value))
]
"""Settings of an optimizer; in Python also an optax transformation."""


class RLTrainingConfig(Config, section="training", on_resume="report"):
    """Duration, batch sizes and intervals of the training."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps (rollout batches × num_iterations); when not set, the data times num_epochs."""
    num_epochs: PositiveInt = 1
    """Number of passes over the training data when max_steps is not set."""
    prompts_per_step: PositiveInt = setting(8, on_resume="refuse")
    """Number of prompts in a rollout batch, over all processes: P. Each is sampled num_generations times."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Treatment of a prompt longer than rollout.max_prompt_length: refuse the run, leave out its row, or cut off its
    beginning (in a chat the beginning of the longest message), in training and evaluation. summary.json counts rows
    left out and cut.
    """
    actor_optimizer: Optimizer = field(default_factory=OptimizerConfig)
    critic_optimizer: Optimizer = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    """ppo: optimizer of the critic."""
    rollout_micro_batch_size: PositiveInt | None = None
    """Number of prompts (× num_generations samples) sampled at a time; the whole step when not set."""
    ref_logps_micro_batch_size: PositiveInt | None = None
    """Number of prompts (× num_generations samples) whose reference log-probs and values are computed at a time."""
    old_logps_micro_batch_size: PositiveInt | None = None
    """Number of prompts (× num_generations samples) whose old log-probs are computed at a time."""
    train_micro_batch_size: PositiveInt | None = None
    """Number of prompts (× num_generations samples) whose gradients are accumulated at a time; the whole step when not
    set.
    """
    off_policy_steps: NonNegativeInt = setting(0, on_resume="refuse")
    """k: step t trains on samples of the weights after step max(t − 1 − k, 0), which a thread draws while earlier steps
    train; 0 trains on samples of the last weights. Where k is not 0, grpo.correction is token_truncate if it is not
    set.
    """
    eval_every_n_steps: NonNegativeInt = setting(0, on_resume="ignore")
    """Held-out evaluation during training; 0 leaves it to before and after."""
    checkpoint_every_n_steps: NonNegativeInt = setting(0, on_resume="ignore")
    """Checkpoints during training; one is always written at the end."""
    max_to_keep: PositiveInt = setting(4, on_resume="ignore")
    """Number of checkpoints kept."""
    checkpoint_path: str = setting("", on_resume="ignore")
    """gs://BUCKET/FOLDER for the checkpoints, where each run has a folder named as its run folder; the other files stay
    in the run folder. When not set, the checkpoints are in the run folder.
    """
    keep_best: str = ""
    """A metric, such as eval/accuracy: the checkpoint with its best value is kept beside the latest."""
    skip_nonfinite: NonNegativeInt = 0
    """Number of updates whose loss or gradient is not finite that may be left out before the run stops; the batch of
    each is saved in the folder bad/. An update left out counts as a step of the run, the schedule and the dropout.
    """
    watchdog_seconds: NonNegativeFloat = setting(1800.0, on_resume="ignore")
    """Duration of a phase in seconds after which the stack of every thread is written to stacks.txt; 0 is never."""
    token_values_every_n_steps: NonNegativeInt | None = setting(None, on_resume="ignore")
    """Interval of the steps at which the tokens of one group (of 8 completions, and 512 tokens of each, at most) are
    scored before and after the update, so that the report can colour them; 0 is never. When not set, it is the shortest
    at which this costs less than 1 % of a step, and at most 50 steps of the run. It changes no result.
    """
    token_agreement: bool = setting(True, on_resume="ignore")
    """Measure sampling/token_agreement in each step's first update. Without truncation it costs less than 1 % of a
    step; with top_k, top_p or min_p the logits are computed once more, for about 5 %. It changes no result.
    """
    show: tuple[str, ...] = setting(("kl",), on_resume="ignore")
    """Metrics on the progress line, besides the reward; docs/metrics.md lists them all."""
    packing: Literal["groups", "dense"] = "groups"
    """groups: the prompt once, followed by its completions. dense: one sample in a row (the oracle)."""
    row_length: PositiveInt = 768
    """Largest length of a row in tokens; shorter rows are used where they suffice, and a longer sample makes a longer
    one.
    """
    max_tokens_per_micro_batch: PositiveInt = 1024
    """Largest number of tokens in one forward-backward pass, in whole rows and at least one for each device; a larger
    micro-batch is split. It changes speed and memory, never the gradient.
    """

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for each named metric that no run logs, whatever its reward functions are called, and for a
        place of checkpoints that is none.
        """
        return [*metrics.unlogged(self.show, self.keep_best, metrics.RL), *_unusable(self.checkpoint_path)]


class SFTConfig(Config, section="training", on_resume="report"):
    """Duration, batch sizes and intervals of supervised training."""

    max_steps: PositiveInt | None = None
    """Number of optimizer steps; when not set, the data times num_epochs."""
    num_epochs: PositiveInt = 1
    """Number of passes over the training data when max_steps is not set."""
    batch_size: PositiveInt = setting(16, on_resume="refuse")
    """Number of examples in an optimizer step."""
    optimizer: Optimizer = field(default_factory=lambda: OptimizerConfig(learning_rate=2e-5))
    completion_only: bool = True
    """Learn the completions only; otherwise the prompts too."""
    max_length: Annotated[Int, Ge(2)] = 1024
    """Largest length of an example in tokens, prompt and completion together."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Treatment of a longer example: refuse the run, leave the example out, or cut off its end, and with it the stop
    token. summary.json counts examples left out and cut.
    """
    packing: bool = True
    """Put several short examples into one row, where none sees another; otherwise one in a row. The gradient is the
    same.
    """
    row_length: PositiveInt = 768
    """Largest length of a row in tokens; shorter rows are used where they suffice, and a longer example makes a longer
    one.
    """
    max_tokens_per_micro_batch: PositiveInt = 1024
    """Largest number of tokens in one forward-backward pass, in whole rows and at least one for each device; gradients
    are accumulated over the step. It changes speed and memory, never the gradient.
    """
    eval_every_n_steps: NonNegativeInt = setting(0, on_resume="ignore")
    """Held-out loss during training; 0 leaves it to before and after."""
    checkpoint_every_n_steps: NonNegativeInt = setting(0, on_resume="ignore")
    """Checkpoints during training; one is always written at the end."""
    max_to_keep: PositiveInt = setting(4, on_resume="ignore")
    """Number of checkpoints kept."""
    checkpoint_path: str = setting("", on_resume="ignore")
    """gs://BUCKET/FOLDER for the checkpoints, where each run has a folder named as its run folder; the other files stay
    in the run folder. When not set, the checkpoints are in the run folder.
    """
    keep_best: str = ""
    """A metric, such as eval/loss: the checkpoint with its best value is kept beside the latest."""
    skip_nonfinite: NonNegativeInt = 0
    """Number of updates whose loss or gradient is not finite that may be left out before the run stops; the batch of
    each is saved in the folder bad/. An update left out counts as a step of the run, the schedule and the dropout.
    """
    watchdog_seconds: NonNegativeFloat = setting(1800.0, on_resume="ignore")
    """Duration of a phase in seconds after which the stack of every thread is written to stacks.txt; 0 is never."""
    show: tuple[str, ...] = setting(("perplexity",), on_resume="ignore")
    """Metrics on the progress line, besides the loss; docs/metrics.md lists them all."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for a place of checkpoints that is none."""
        return _unusable(self.checkpoint_path)


def _unusable(checkpoint_path: str) -> Iterable[Problem]:
    """Return the problem of a path to which no checkpoints can be written."""
    return refuse_if(
        checkpoint_path and not IN_BUCKET.fullmatch(checkpoint_path),
        "checkpoint_path",
        f"training.checkpoint_path is {checkpoint_path!r}",
        "gs://BUCKET/FOLDER; s3:// is not supported",
        fix="leave it out: checkpoints then lie in the run folder, which may be on a mounted bucket (mount-s3, s3fs)",
    )
