"""GRPO from top to bottom: a language model learns sums by comparing its own answers.

    prompts → G completions of each → rewards → advantages over each group → log-probs of the padded batch [B, T]
    → clipped loss with a KL to the reference → gradient → AdamW → next step

Of Covey only the decoder, its loader and its sampler are used. The rest is written as plainly as possible: one sample a
row, padding behind it, the logits of all tokens in memory at once. The package computes the same numbers with less
memory and time, and `tests/test_one_file.py` compares the two. Read this file first, then `covey/rl/learner.py`.

    python examples/grpo_in_one_file.py
    python examples/grpo_in_one_file.py --model smollm2-135m --learning-rate 1e-5 --before "11+25=36 30+14=44 "

The algorithm: Shao et al., 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.
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
from covey.sampling.engine import Request, Sampler
from covey.text.tokenizer import Tokenizer
from covey.types import Completion


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each is a flag of the command."""

    seed: int = 0
    before: str = ""  # solved problems in front of each prompt show a pretrained model what is asked
    prompts_per_step: int = 16  # P
    num_generations: int = 8  # G
    num_iterations: int = 1  # updates on each batch; from the second on the ratio is not 1, and the clip matters
    max_prompt_length: int = 64  # in tokens, as the next
    max_new_tokens: int = 6
    temperature: float = 1.0
    epsilon: float = 0.2  # the clip holds the ratio within 1 ± epsilon
    beta: float = 0.04  # weight of the KL
    learning_rate: float = 3e-4  # for random weights; a pretrained model wants about 1e-5
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


# --- The task: problems, and a reward for an answer.


def make_problems(rng: random.Random, count: int, before: str = "") -> list[dict[str, str]]:
    """Draw sums of two two-digit numbers; the text `before` stands in front of each."""
    pairs = [(rng.randrange(10, 50), rng.randrange(10, 50)) for _ in range(count)]
    return [{"prompt": f"{before}{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def right_characters(text: str, answer: str) -> float:
    """Pay for each character that is right and in its place: 1 for the answer alone, less for what is longer."""
    right = sum(mine == wanted for mine, wanted in zip(text, answer, strict=False))
    return right / max(len(text), len(answer))


# --- From completions to a batch.


class Batch(NamedTuple):
    """The samples of a step as rows, with what the loss needs beside them.

    Attributes:
        tokens: prompt, completion and padding of each sample.
        real: False at the padding.
        drawn: True where the token that comes next was drawn by the model: the completion, its stop token included.
        advantage: of each sample.
        old_logps: log-probs of the drawn tokens under the policy that sampled; 0 elsewhere, as in the next.
        ref_logps: log-probs under the reference.
    """

    tokens: Int[Any, "B T"]
    real: Bool[Any, "B T"]
    drawn: Bool[Any, "B T-1"]
    advantage: Float[Any, "B"]
    old_logps: Float[Any, "B T-1"] | None = None
    ref_logps: Float[Any, "B T-1"] | None = None


def group_advantages(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """(R − mean of the group) / (standard deviation of the group + 1e-4): equal rewards teach nothing."""
    mean, std = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    return (rewards - mean) / (std + 1e-4)


def padded_batch(
    prompts: Sequence[np.ndarray], groups: Sequence[Sequence[Completion]], advantages: Float[np.ndarray, "P G"]
) -> Batch:
    """Lay each prompt and completion into a row of its own, padding behind them."""
    samples = [(prompt, c.tokens) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    longest = max(len(prompt) + len(completion) for prompt, completion in samples)
    tokens = np.zeros((len(samples), -(-longest // 16) * 16), np.int32)  # rounded up: few shapes are compiled
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
    """−min(w·A, clip(w, 1 − ε, 1 + ε)·A) + β·KL: the mean over samples of the mean over their tokens."""
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
    """AdamW behind a clip of the gradient's norm. Matrices decay; the scales of the norms do not."""
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(settings.learning_rate, b2=0.99, weight_decay=settings.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)


@partial(jax.jit, static_argnames=("graph", "settings"))
def update(
    graph: nnx.GraphDef[Decoder], settings: Settings, params: nnx.State, opt_state: optax.OptState, batch: Batch
) -> tuple[nnx.State, optax.OptState, dict[str, Array]]:
    """Move the weights along the gradient of the loss, once."""
    (loss, metrics), grads = jax.value_and_grad(grpo_loss, has_aux=True)(params, graph, batch, settings)
    changes, opt_state = make_optimizer(settings).update(grads, opt_state, params)
    metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return optax.apply_updates(params, changes), opt_state, metrics


# --- One step, and the loop.


class GRPO(NamedTuple):
    """A model in training: what no step changes, and then what each does."""

    graph: nnx.GraphDef[Decoder]
    reference: nnx.State
    tokenizer: Tokenizer
    sampler: Sampler
    reward: Callable[[str, str], float]
    settings: Settings
    params: nnx.State
    opt_state: optax.OptState
    updates: int = 0


def begin(model: Decoder, tokenizer: Tokenizer, reward: Callable[[str, str], float], settings: Settings) -> GRPO:
    """Prepare to train `model` by a function of text and answer; the reference keeps the weights that it has now."""
    names = ("seed", "max_prompt_length", "max_new_tokens", "temperature")
    graph, params = nnx.split(model)
    sampler = Sampler(graph, tokenizer.stop_ids, RolloutConfig(**{name: getattr(settings, name) for name in names}))
    return GRPO(graph, params, tokenizer, sampler, reward, settings, params, make_optimizer(settings).init(params))


def grpo_step(run: GRPO, problems: Sequence[dict[str, str]]) -> tuple[GRPO, dict[str, float], list[list[str]]]:
    """Sample, score and update: the run after it, the metrics, and the text of each prompt's completions."""
    settings = run.settings

    # Sample G completions of each prompt. The seed, the updates made and the two numbers of a sample fix its noise.
    prompts = [run.tokenizer.encode_prompt(problem["prompt"]) for problem in problems]
    requests = [Request(prompt, settings.num_generations, i, run.updates) for i, prompt in enumerate(prompts)]
    groups = run.sampler.generate(run.params, requests)
    texts = [[run.tokenizer.decode(completion.tokens) for completion in group] for group in groups]

    # Score each completion, and compare it with the others of its prompt.
    pairs = zip(problems, texts, strict=True)
    rewards = np.array([[run.reward(text, problem["answer"]) for text in group] for problem, group in pairs])
    batch = padded_batch(prompts, groups, group_advantages(rewards))

    # Compute their log-probs under the policy that sampled and under the reference, before anything moves.
    old_logps = log_probs(run.graph, run.params, batch, settings.temperature)
    ref_logps = log_probs(run.graph, run.reference, batch, settings.temperature)
    batch = batch._replace(old_logps=old_logps, ref_logps=ref_logps)

    # Update the policy, once or several times on the same batch.
    told = []
    for _ in range(settings.num_iterations):
        params, opt_state, metrics = update(run.graph, settings, run.params, run.opt_state, batch)
        run = run._replace(params=params, opt_state=opt_state, updates=run.updates + 1)
        told.append(metrics)
    means = {name: float(np.mean([metrics[name] for metrics in told])) for name in told[0]}
    return run, {"reward": float(rewards.mean()), **means}, texts


def main() -> None:
    """Train, and print a line for each step."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="scratch:arithmetic-tiny", help="of random weights; or any that covey loads")
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
