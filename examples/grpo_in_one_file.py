"""GRPO in one file: a language model learns sums by reinforcement learning.

    prompts → G completions of each → rewards → advantages over each group → log-probs of the padded batch [B, T]
    → clipped loss with a KL to the reference → gradient → AdamW → next step

From Covey it uses only the decoder, the loader and the engine. The rest is written as simply as possible: one sample
per row, padding after it, the logits of all tokens in memory at once. The package computes the same numbers with less
memory and time, and `tests/test_one_file.py` compares the two. Read this file first, then `covey/rl/learner.py`.

    python examples/grpo_in_one_file.py
    python examples/grpo_in_one_file.py --model smollm2-135m --learning-rate 1e-5 --before "11+25=36 30+14=44 "

Source: Shao et al., 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.
Dimensions: P prompts, G completions of each, B = P·G samples, T tokens in a padded sample, V tokens in the vocabulary.
"""

import argparse
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from covey.config.schema import RolloutConfig
from covey.models.attention import causal_attention
from covey.models.decoder import Decoder
from covey.models.loading.weights import load
from covey.sampling.engine import Engine, Request, generate
from covey.text.tokenizer import Tokenizer
from covey.types import Completion


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each is a flag of the command."""

    seed: int = 0
    before: str = ""  # solved problems before each prompt show a pretrained model the task
    prompts_per_step: int = 16  # P
    num_generations: int = 8  # G
    num_iterations: int = 1  # updates per batch; from the second on the ratio is not 1, and the clip matters
    max_prompt_length: int = 64  # tokens
    max_new_tokens: int = 6  # tokens
    temperature: float = 1.0
    epsilon: float = 0.2  # the clip keeps the ratio within 1 ± epsilon
    beta: float = 0.04  # weight of the KL
    learning_rate: float = 3e-4  # for random weights; a pretrained model needs about 1e-5
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


# --- The task: problems, and a reward for an answer.


def make_problems(rng: random.Random, count: int, before: str = "") -> list[dict[str, str]]:
    """Draw sums of two two-digit numbers; the text `before` is put before each."""
    pairs = [(rng.randrange(10, 50), rng.randrange(10, 50)) for _ in range(count)]
    return [{"prompt": f"{before}{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def right_characters(text: str, answer: str) -> float:
    """Return the share of characters that are right and in place: 1 for the exact answer, less for longer text."""
    right = sum(mine == wanted for mine, wanted in zip(text, answer, strict=False))
    return right / max(len(text), len(answer))


# --- From completions to a batch.


class Batch(NamedTuple):
    """Samples of a step, one per row, with the inputs of the loss.

    Attributes:
        tokens: prompt, completion and padding of each sample.
        real: False for padding.
        drawn: True where the next token was drawn by the model: the completion including its stop token.
        advantage: advantage of each sample.
        old_logps: log-probs of the drawn tokens under the policy that sampled; 0 elsewhere.
        ref_logps: log-probs of the drawn tokens under the reference; 0 elsewhere.
    """

    tokens: Int[Any, "B T"]
    real: Bool[Any, "B T"]
    drawn: Bool[Any, "B T-1"]
    advantage: Float[Any, "B"]
    old_logps: Float[Any, "B T-1"] | None = None
    ref_logps: Float[Any, "B T-1"] | None = None


def group_advantages(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """Return (R − mean of the group) / (std of the group + 1e-4): 0 for a group of equal rewards."""
    mean, std = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    return (rewards - mean) / (std + 1e-4)


def padded_batch(
    prompts: Sequence[np.ndarray], groups: Sequence[Sequence[Completion]], advantages: Float[np.ndarray, "P G"]
) -> Batch:
    """Put each prompt and completion into a row of its own, with padding after them."""
    samples = [(prompt, c.tokens) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    longest = max(len(prompt) + len(completion) for prompt, completion in samples)
    tokens = np.zeros((len(samples), -(-longest // 16) * 16), np.int32)  # rounded up, so that few shapes are compiled
    real, drawn = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for row, (prompt, completion) in enumerate(samples):
        end = len(prompt) + len(completion)
        tokens[row, :end] = np.concatenate([prompt, completion])
        real[row, :end], drawn[row, len(prompt) : end] = True, True
    return Batch(tokens, real, drawn[:, 1:], advantages.reshape(-1).astype(np.float32))


@partial(jax.jit, static_argnames=("graph", "temperature"))
def log_probs(
    graph: nnx.GraphDef[Decoder], params: nnx.State, batch: Batch, temperature: float
) -> Float[Array, "B T-1"]:
    """Compute the log-prob of each drawn token, given the tokens before it; 0 elsewhere."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    hidden, _ = model(batch.tokens, positions, causal_attention(batch.real, positions))
    logits = model.logits(hidden[:, :-1]) / temperature  # [B, T-1, V]: position t predicts token t + 1
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(batch.drawn, logps, 0.0)


# --- The loss and the update.


def grpo_loss(
    params: nnx.State, graph: nnx.GraphDef[Decoder], batch: Batch, settings: Settings
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return −min(w·A, clip(w, 1 − ε, 1 + ε)·A) + β·KL, averaged over the tokens of each sample, then over samples."""
    logps, advantage = log_probs(graph, params, batch, settings.temperature), batch.advantage[:, None]

    ratio = jnp.exp(logps - batch.old_logps)
    clipped = jnp.clip(ratio, 1 - settings.epsilon, 1 + settings.epsilon)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)

    d = batch.ref_logps - logps
    kl = jnp.expm1(d) - d  # exp(d) − d − 1: the estimator k3 (Schulman, 2020), which is never negative

    def mean(values: Float[Array, "B T-1"]) -> Float[Array, ""]:
        return jnp.mean(jnp.sum(values * batch.drawn, axis=1) / jnp.sum(batch.drawn, axis=1))

    cut = clipped * advantage < ratio * advantage  # these tokens pass no gradient of the surrogate
    return mean(settings.beta * kl - surrogate), {"kl": mean(kl), "clip_ratio": mean(cut)}


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with gradient clipping by norm. Matrices have weight decay; the scales of the norms do not."""
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(settings.learning_rate, b2=0.99, weight_decay=settings.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)


@partial(jax.jit, static_argnames=("graph", "settings"))
def update(
    graph: nnx.GraphDef[Decoder], settings: Settings, params: nnx.State, opt_state: optax.OptState, batch: Batch
) -> tuple[nnx.State, optax.OptState, dict[str, Array]]:
    """Update the weights once by the gradient of the loss."""
    (loss, metrics), grads = jax.value_and_grad(grpo_loss, has_aux=True)(params, graph, batch, settings)
    changes, opt_state = make_optimizer(settings).update(grads, opt_state, params)
    metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, changes), opt_state, metrics


# --- One step, and the loop.


class GRPO(NamedTuple):
    """State of a training: first what no step changes, then what each step changes."""

    graph: nnx.GraphDef[Decoder]
    reference: nnx.State
    tokenizer: Tokenizer
    engine: Engine
    reward: Callable[[str, str], float]
    settings: Settings
    params: nnx.State
    opt_state: optax.OptState
    updates: int = 0


def begin(model: Decoder, tokenizer: Tokenizer, reward: Callable[[str, str], float], settings: Settings) -> GRPO:
    """Prepare to train `model` with a reward of text and answer; the reference keeps the current weights."""
    names = ("seed", "max_prompt_length", "max_new_tokens", "temperature")
    graph, params = nnx.split(model)
    engine = Engine(model, tokenizer.stop_ids, RolloutConfig(**{name: getattr(settings, name) for name in names}))
    return GRPO(graph, params, tokenizer, engine, reward, settings, params, make_optimizer(settings).init(params))


def grpo_step(run: GRPO, problems: Sequence[dict[str, str]]) -> tuple[GRPO, dict[str, float], list[list[str]]]:
    """Sample, score and update; return the new run, the metrics, and the texts of each prompt's completions."""
    settings = run.settings
    # Sample G completions of each prompt. Seed, number of updates, prompt and sample number determine the noise.
    prompts = [run.tokenizer.encode_prompt(problem["prompt"]) for problem in problems]
    requests = [Request(prompt, settings.num_generations, i, run.updates) for i, prompt in enumerate(prompts)]
    run.engine.update_weights(run.params)
    groups = generate(run.engine, requests)
    texts = [[run.tokenizer.decode(completion.tokens) for completion in group] for group in groups]

    # Score each completion, and compare it with the others of its group.
    pairs = zip(problems, texts, strict=True)
    rewards = np.array([[run.reward(text, problem["answer"]) for text in group] for problem, group in pairs])
    batch = padded_batch(prompts, groups, group_advantages(rewards))

    # Compute their log-probs under the policy that sampled and under the reference, before any update.
    old_logps = log_probs(run.graph, run.params, batch, settings.temperature)
    ref_logps = log_probs(run.graph, run.reference, batch, settings.temperature)
    batch = batch._replace(old_logps=old_logps, ref_logps=ref_logps)

    # Update the policy, once or several times on the same batch.
    history = []
    for _ in range(settings.num_iterations):
        params, opt_state, metrics = update(run.graph, settings, run.params, run.opt_state, batch)
        run = run._replace(params=params, opt_state=opt_state, updates=run.updates + 1)
        history.append(metrics)
    means = {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}
    return run, {"reward": float(rewards.mean()), **means}, texts


def main() -> None:
    """Train, and print one line per step."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="scratch:arithmetic-tiny", help="any model that covey loads")
    flags.add_argument("--steps", type=int, default=40)
    for field in fields(Settings):
        flags.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(flags.parse_args())

    logging.basicConfig(format="%(message)s")
    logging.getLogger("covey").setLevel(logging.INFO)
    loaded, steps = load(given.pop("model")), given.pop("steps")
    run = begin(loaded.model, loaded.tokenizer, right_characters, Settings(**given))
    rng = random.Random(run.settings.seed)
    for step in range(1, steps + 1):
        problems = make_problems(rng, run.settings.prompts_per_step, run.settings.before)
        run, metrics, texts = grpo_step(run, problems)
        numbers = "  ".join(f"{name} {value:z.4f}" for name, value in metrics.items())
        print(f"step {step}/{steps}  {numbers}  {problems[0]['answer']}: {texts[0][0]!r}", flush=True)


if __name__ == "__main__":
    main()
