"""The oracle: log-probs, the gradient of a whole step, and AdamW, dense and in float64, by NumPy alone.

It shares nothing with the models and losses of the package: no JAX, no automatic differentiation, no padding, no
batches. Each sample is one sequence, whose gradient is written out; a test compares it with finite differences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from covey_conformance.tiny_model import HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, NORM_EPS, ROPE_THETA, Weights

Array = Float[np.ndarray, "..."]
Row = Mapping[str, Any]
"""A sample: `prompt` and `completion`, token ids; `advantage`; `finished`, whether the model ended it; and, where it
has them, `mask`, False for tokens that a tool wrote, `old_logps` and `ref_logps`, each [n]."""
Settings = Mapping[str, Any]
Back = Callable[[Array], Array]
"""Function from the gradient of an output to that of the input, which adds the gradients of weights on its way."""


class Model:
    """The dense model.

    Args:
        weights: arrays by Hugging Face name.
    """

    def __init__(self, weights: Weights):
        self.weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self.gradients = {name: np.zeros_like(w) for name, w in self.weights.items()}

    def logps(self, row: Row, temperature: float = 1.0) -> tuple[Float[np.ndarray, "n"], Callable[[Array], None]]:
        """Compute the log-probs of the completion's tokens.

        Returns:
            The log-probs, and a function of their gradient that adds the gradients of all weights to `gradients`.
        """
        tokens = np.array([*row["prompt"], *row["completion"]], int)
        start, ids = len(row["prompt"]) - 1, tokens[len(row["prompt"]) :]
        logits, back = self._logits(tokens[:-1])
        at = np.arange(len(ids))
        scaled = logits[start:] / temperature
        scaled = scaled - scaled.max(-1, keepdims=True)
        probabilities = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)

        def backward(gradient: Array) -> None:
            d = np.zeros_like(logits)
            d[start:] = -probabilities * gradient[:, None]
            d[start + at, ids] += gradient
            back(d / temperature)

        return np.log(probabilities[at, ids]), backward

    def next_token(self, tokens: Sequence[int], temperature: float) -> Float[np.ndarray, "V"]:
        """Compute the probabilities of the token after `tokens`."""
        logits = self._logits(np.array(tokens, int))[0][-1] / temperature
        exponentials: Array = np.exp(logits - logits.max())
        return np.asarray(exponentials / exponentials.sum())

    def _logits(self, tokens: Int[np.ndarray, "T"]) -> tuple[Float[np.ndarray, "T V"], Back]:
        x, backs = self.weights["model.embed_tokens.weight"][tokens], list[Back]()
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for norm, block in (("input_layernorm", self._attention), ("post_attention_layernorm", self._mlp)):
                normed, back_norm = self._norm(x, f"{at}{norm}.weight")
                added, back_block = block(normed, at)
                x, backs = x + added, [*backs, _residual(back_norm, back_block)]
        normed, back_norm = self._norm(x, "model.norm.weight")
        logits, back_head = self._linear(normed, "lm_head.weight")

        def backward(gradient: Array) -> Array:
            gradient = back_norm(back_head(gradient))
            for back in reversed(backs):
                gradient = back(gradient)
            np.add.at(self.gradients["model.embed_tokens.weight"], tokens, gradient)
            return gradient

        return logits, backward

    def _linear(self, x: Array, name: str) -> tuple[Array, Back]:
        def backward(gradient: Array) -> Array:
            self.gradients[name] += gradient.T @ x
            return np.asarray(gradient @ self.weights[name])

        return x @ self.weights[name].T, backward

    def _norm(self, x: Array, name: str) -> tuple[Array, Back]:
        inverse = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + NORM_EPS)
        normed, scale = x * inverse, self.weights[name]

        def backward(gradient: Array) -> Array:
            self.gradients[name] += (gradient * normed).sum(0)
            scaled = gradient * scale
            return np.asarray(inverse * (scaled - normed * (scaled * normed).mean(-1, keepdims=True)))

        return normed * scale, backward

    def _mlp(self, x: Array, at: str) -> tuple[Array, Back]:
        gate, back_gate = self._linear(x, f"{at}mlp.gate_proj.weight")
        up, back_up = self._linear(x, f"{at}mlp.up_proj.weight")
        sigmoid = 1 / (1 + np.exp(-gate))
        down, back_down = self._linear(gate * sigmoid * up, f"{at}mlp.down_proj.weight")

        def backward(gradient: Array) -> Array:
            inner = back_down(gradient)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            return back_gate(inner * up * slope) + back_up(inner * gate * sigmoid)

        return down, backward

    def _attention(self, x: Array, at: str) -> tuple[Array, Back]:
        projections = [self._linear(x, f"{at}self_attn.{name}_proj.weight") for name in "qkv"]
        q, k, v = (y.reshape(len(x), -1, HEAD_WIDTH).swapaxes(0, 1) for y, _ in projections)
        q, k, groups = _rotate(q), _rotate(k), HEADS // KV_HEADS
        keys, values = np.repeat(k, groups, axis=0), np.repeat(v, groups, axis=0)
        scores = np.where(np.tri(len(x), dtype=bool), q @ keys.swapaxes(1, 2) / HEAD_WIDTH**0.5, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out, back_out = self._linear((p @ values).swapaxes(0, 1).reshape(len(x), -1), f"{at}self_attn.o_proj.weight")

        def merge(d: Array) -> Array:
            summed: Array = d.reshape(KV_HEADS, groups, *d.shape[1:]).sum(1)
            return summed

        def backward(gradient: Array) -> Array:
            heads = back_out(gradient).reshape(len(x), HEADS, HEAD_WIDTH).swapaxes(0, 1)
            d_p = heads @ values.swapaxes(1, 2)
            d_scores = p * (d_p - (d_p * p).sum(-1, keepdims=True)) / HEAD_WIDTH**0.5
            d_q, d_k = _rotate(d_scores @ keys, -1), _rotate(merge(d_scores.swapaxes(1, 2) @ q), -1)
            parts = (d_q, d_k, merge(p.swapaxes(1, 2) @ heads))
            flat = (part.swapaxes(0, 1).reshape(len(x), -1) for part in parts)
            return np.asarray(sum(back(part) for part, (_, back) in zip(flat, projections, strict=True)))

        return out, backward


def step_gradient(
    weights: Weights, rows: Sequence[Row], settings: Settings, only: Sequence[Sequence[float]] | None = None
) -> Weights:
    """Compute the gradient of one optimizer step: of the loss over all rows, float64.

    Args:
        weights: the policy.
        rows: all samples of the step.
        settings: `algorithm`, `epsilon`, `epsilon_high`, `beta`, `kl`, `temperature`, `max_tokens`, `mask_truncated`.
        only: 1 for the tokens whose part of the gradient is wanted, [n] for each row; all when not given.
    """
    model = Model(weights)
    forward = [model.logps(row, settings["temperature"]) for row in rows]
    masks = [_in_loss(row, settings["mask_truncated"]) for row in rows]
    total = sum(mask.sum() for mask in masks)
    parts = only or [[1.0] * len(mask) for mask in masks]
    for row, mask, part, (logps, backward) in zip(rows, masks, parts, forward, strict=True):
        count = max(mask.sum(), 1)
        denominator = {"dr_grpo": len(rows) * settings["max_tokens"], "dapo": max(total, 1)}
        weight = mask / denominator.get(settings["algorithm"], len(rows) * count)
        slope = _surrogate_slope(row, logps, mask, weight, settings) + weight * _kl_slope(row, logps, settings)
        backward(slope * np.array(part))
    return model.gradients


def _in_loss(row: Row, mask_truncated: bool) -> Float[np.ndarray, "n"]:
    """Return 1 for the tokens in the loss and 0 for the others."""
    mask = np.array(row.get("mask", np.ones(len(row["completion"]))), float)
    return mask * float(row["finished"] or not mask_truncated)


def _surrogate_slope(row: Row, logps: Array, mask: Array, weight: Array, settings: Settings) -> Array:
    """Compute the slope of Σ weight·(−min(w·A, clip(w)·A)) in each log-prob, w the ratio of the token, or for GSPO that
    of the completion: the exponential of the mean of logp − logp_old over its tokens.
    """
    advantage, difference = row["advantage"], logps - row.get("old_logps", logps)
    is_sequence, count = settings["algorithm"] == "gspo", max(mask.sum(), 1)
    ratio = np.exp((difference * mask).sum() / count) if is_sequence else np.exp(difference)
    high, low = ratio > 1 + settings["epsilon_high"], ratio < 1 - settings["epsilon"]
    slope = np.where((high & (advantage > 0)) | (low & (advantage < 0)), 0.0, -advantage * ratio)
    return weight.sum() * slope * mask / count if is_sequence else weight * slope


def _kl_slope(row: Row, logps: Array, settings: Settings) -> Array:
    """Compute the slope of β·KL in each log-prob."""
    if not settings["beta"]:
        return np.zeros_like(logps)
    d = row["ref_logps"] - logps
    slopes = {"k1": np.ones_like(d), "k2": -d, "k3": 1 - np.exp(d)}
    return np.asarray(settings["beta"] * slopes[settings["kl"]])


def clip_by_global_norm(gradient: Weights, max_norm: float) -> Weights:
    """Scale a gradient down to the norm `max_norm` over all weights; 0 is off."""
    norm = sum(float(np.square(g).sum()) for g in gradient.values()) ** 0.5
    factor = min(1.0, max_norm / norm) if max_norm else 1.0
    return {name: factor * g for name, g in gradient.items()}


def first_adamw_step(weights: Weights, gradient: Weights, settings: Settings) -> Weights:
    """Compute the weights after the first step of AdamW, whose moments are then the gradient and its square."""
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    clipped = clip_by_global_norm(gradient, settings["max_grad_norm"])
    return {
        name: w - rate * (clipped[name] / (np.abs(clipped[name]) + settings["eps"]) + decay * w * (w.ndim > 1))
        for name, w in ((name, w.astype(np.float64)) for name, w in weights.items())
    }


def _residual(back_norm: Back, back_block: Back) -> Back:
    """Return the gradient of x + block(norm(x))."""
    return lambda gradient: gradient + back_norm(back_block(gradient))


def _rotate(x: Array, direction: int = 1) -> Array:
    """Rotate the halves of [heads, T, width] by the position's angles, or back by `direction` −1 (RoPE)."""
    half = x.shape[-1] // 2
    angles = direction * np.outer(np.arange(x.shape[1]), ROPE_THETA ** -(np.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
