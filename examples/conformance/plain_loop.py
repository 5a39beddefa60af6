"""A plain training loop in JAX, and the functions that make it an adapter of `covey conformance`.

The first part is the trainer: a Llama, the losses, AdamW and sampling. The second part is the adapter.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

VERSION = "1"
ROWS, TIMES = 8, (32, 128)  # every batch is padded to these shapes, so that the model is compiled twice


@jax.jit
def logits(weights, ids):
    """Compute the logits [B, T, V] of ids [B, T]."""
    angles = jnp.outer(jnp.arange(ids.shape[1]), 10_000.0 ** (-jnp.arange(8) / 8))[:, None]
    x = weights["model.embed_tokens.weight"][ids]
    for at in ("model.layers.0", "model.layers.1"):
        y = norm(weights, f"{at}.input_layernorm", x)
        q, k, v = (linear(weights, f"{at}.self_attn.{n}_proj", y).reshape(*ids.shape, -1, 16) for n in "qkv")
        scores = jnp.einsum("bthd,bsd->bhts", rotate(q, angles), rotate(k, angles)[:, :, 0]) / 4
        p = jax.nn.softmax(jnp.where(jnp.tri(ids.shape[1], dtype=bool), scores, -jnp.inf))
        y = jnp.einsum("bhts,bsd->bthd", p, v[:, :, 0]).reshape(*ids.shape, -1)
        x += linear(weights, f"{at}.self_attn.o_proj", y)
        y = norm(weights, f"{at}.post_attention_layernorm", x)
        gate, up = (linear(weights, f"{at}.mlp.{n}_proj", y) for n in ("gate", "up"))
        x += linear(weights, f"{at}.mlp.down_proj", jax.nn.silu(gate) * up)
    return linear(weights, "lm_head", norm(weights, "model.norm", x))


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T


def norm(weights, name, x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]


def rotate(x, angles):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def loss(weights, batch, s):
    """Compute the part of the step's loss that a micro-batch has: a weighted sum over its tokens."""
    per_token = jax.nn.log_softmax(logits(weights, batch["ids"])[:, :-1] / s["temperature"])
    logps = jnp.take_along_axis(per_token, batch["ids"][:, 1:, None], -1)[..., 0]
    mask, advantage = batch["mask"], batch["advantage"]
    difference = (logps - jnp.where(batch["has_old"], batch["old_logps"], jax.lax.stop_gradient(logps))) * mask
    if s["algorithm"] == "gspo":
        difference = difference.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    ratio = jnp.exp(difference)
    clipped = jnp.clip(ratio, 1 - s["epsilon"], 1 + s["epsilon_high"])
    terms = -jnp.minimum(ratio * advantage, clipped * advantage)
    if s["beta"]:
        d = (batch["ref_logps"] - logps) * mask
        terms += s["beta"] * {"k1": -d, "k2": d**2 / 2, "k3": jnp.exp(d) - d - 1}[s["kl"]]
    return (batch["weight"] * terms).sum()


@jax.jit
def adamw(w, g, m, v, count, rate, s):
    """Return a weight and its moments after a step; norm scales do not decay."""
    m, v = s["b1"] * m + (1 - s["b1"]) * g, s["b2"] * v + (1 - s["b2"]) * g * g
    moved = m / (1 - s["b1"] ** count) / (jnp.sqrt(v / (1 - s["b2"] ** count)) + s["eps"])
    return w - rate * (moved + s["weight_decay"] * w * (w.ndim > 1)), m, v


class Trainer:
    """Weights with the moments of AdamW; with a rank, the sum of a frozen base and adapters B·A that are trained."""

    def __init__(self, weights, s):
        self.s, self.count, self.draws = s, 0, 0
        self.base = self.sampler = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
        self.params, rng = dict(self.base), np.random.default_rng(s["seed"])
        if s["lora_rank"]:
            shapes = {name: w.shape for name, w in weights.items() if "proj" in name}
            a = {f"{name} A": rng.normal(size=(s["lora_rank"], n)) / n**0.5 for name, (_, n) in shapes.items()}
            self.params = a | {f"{name} B": np.zeros((m, s["lora_rank"])) for name, (m, _) in shapes.items()}
        self.params = {name: jnp.asarray(w, jnp.float32) for name, w in self.params.items()}
        self.moments = [{name: jnp.zeros_like(w) for name, w in self.params.items()} for _ in range(2)]

    def weights(self, params):
        if self.s["lora_rank"]:
            scale = self.s["lora_alpha"] / self.s["lora_rank"]
            merged = {n: w + scale * params[f"{n} B"] @ params[f"{n} A"] for n, w in self.base.items() if "proj" in n}
            return self.base | merged
        return {name: w.astype(self.s["dtype"]).astype(jnp.float32) for name, w in params.items()}

    def gradient(self, rows):
        masks = [token_mask(row, self.s) for row in rows]
        counts = np.array([mask.sum() for mask in masks])
        divisors = {"dapo": counts.sum(), "dr_grpo": len(rows) * self.s["max_tokens"]}
        divisor = divisors.get(self.s["algorithm"], len(rows) * np.maximum(counts, 1))
        weight = np.broadcast_to(1 / divisor, len(rows))
        size, total = self.s["micro_batch"], None
        for at in range(0, len(rows), size):
            batch = make_batch(rows[at : at + size], masks[at : at + size], weight[at : at + size], self.s)
            part = jax.grad(lambda params, batch=batch: loss(self.weights(params), batch, self.s))(self.params)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    def step(self, rows):
        s, gradient = self.s, self.gradient(rows)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
        factor = jnp.minimum(1, s["max_grad_norm"] / norm) if s["max_grad_norm"] else 1.0
        self.count += 1
        rate = s["learning_rate"] * min(1, self.count / (s["warmup_steps"] + 1))
        hyper = {name: s[name] for name in ("b1", "b2", "eps", "weight_decay")}
        for name, g in gradient.items():
            arrays = (self.params[name], g * factor, self.moments[0][name], self.moments[1][name])
            self.params[name], self.moments[0][name], self.moments[1][name] = adamw(*arrays, self.count, rate, hyper)
        self.sampler = self.weights(self.params)

    def sample(self, prompts):
        """Draw a completion for each of at most `ROWS` prompts; return ids and log-probs of the drawn distribution."""
        self.draws += 1
        rng, s = np.random.default_rng([self.s["seed"], self.draws]), self.s
        drawn, logps = [[] for _ in prompts], [[] for _ in prompts]
        for _ in range(s["max_tokens"]):
            ids = padded([[*p, *c] for p, c in zip(prompts, drawn, strict=True)])
            all_logps = np.asarray(jax.nn.log_softmax(logits(self.sampler, ids) / s["temperature"]))
            for row, (prompt, completion) in enumerate(zip(prompts, drawn, strict=True)):
                if 2 in completion:
                    continue
                of_token = all_logps[row, len(prompt) + len(completion) - 1]
                completion.append(draw(np.exp(of_token), s["top_p"], rng))
                logps[row].append(of_token[completion[-1]])
        return drawn, logps


def draw(p, top_p, rng):
    """Draw from the smallest set of most likely tokens whose probabilities add up to at least `top_p`."""
    order = np.argsort(-p)
    kept = order[: 1 + int(np.searchsorted(np.cumsum(p[order]), top_p))] if top_p < 1 else order
    return int(rng.choice(kept, p=p[kept].astype(float) / p[kept].astype(float).sum()))


def token_mask(row, s):
    return np.array(row.get("mask", np.ones(len(row["completion"])))) * (row["finished"] or not s["mask_truncated"])


def padded(sequences, more=0):
    longest = max(map(len, sequences)) + more
    ids = np.zeros((ROWS, next(time for time in TIMES if time >= longest)), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids


def make_batch(rows, masks, weight, s):
    """Return arrays [B, T - 1] of scored tokens: the label of position t is token t + 1."""
    names = ("mask", "weight", "old_logps", "has_old", "ref_logps")
    ids = padded([[*row["prompt"], *row["completion"]] for row in rows], 8 * s["pad_completion"])
    batch = {name: np.zeros((ROWS, ids.shape[1] - 1), np.float32) for name in names}
    batch["advantage"] = np.zeros((ROWS, 1), np.float32)
    for n, row in enumerate(rows):
        at = slice(len(row["prompt"]) - 1, len(row["prompt"]) - 1 + len(row["completion"]))
        batch["mask"][n, at], batch["weight"][n, at] = masks[n], masks[n] * weight[n]
        old = row.get("old_logps", row.get("logps") if s["iterations"] > 1 else None)  # None: the ratio is 1
        batch["advantage"][n], batch["has_old"][n] = row["advantage"], old is not None
        batch["old_logps"][n, at], batch["ref_logps"][n, at] = 0 if old is None else old, row.get("ref_logps", 0)
    return batch | {"ids": ids}


def group_advantages(rewards, s):
    """Return R - mean of each group, over its std + 1e-4 unless it is centred only.

    R is the weighted sum of the functions that scored.
    """
    weights = np.ones(rewards.shape[-1]) if s["reward_weights"] is None else np.array(s["reward_weights"])
    scored = ~np.isnan(rewards)
    total = np.where(scored.any(-1), (np.where(scored, rewards, 0) * weights).sum(-1), np.nan)
    out = np.zeros(total.shape)
    for group, advantage in zip(total, out, strict=True):
        valid = group[~np.isnan(group)]
        if len(valid) > 1 and valid.max() > valid.min():
            scale = 1.0 if s["advantage"] == "centred" else valid.std(ddof=1) + 1e-4
            advantage[~np.isnan(group)] = (valid - valid.mean()) / scale
    return out


# --- the adapter


def load(folder, settings):
    if settings["packing"] or settings["pad_prompt"]:
        raise NotImplementedError("this loop has one sample in a row, from its beginning")
    if settings["devices"] > 1:
        raise NotImplementedError("this loop uses one device")
    trainer = Trainer(load_file(Path(folder) / "model.safetensors"), settings)
    trainer.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return trainer


def gradient(trainer, rows):
    return {name: np.asarray(g) for name, g in trainer.gradient(rows).items()}


def step(trainer, rows):
    trainer.step(rows)
    return {name: np.asarray(w) for name, w in trainer.weights(trainer.params).items()}


def logps(trainer, rows):
    found = []
    for row in rows:
        ids = padded([[*row["prompt"], *row["completion"]]])
        of_all = np.asarray(jax.nn.log_softmax(logits(trainer.weights(trainer.params), ids) / trainer.s["temperature"]))
        at = np.arange(len(row["completion"])) + len(row["prompt"])
        found.append(of_all[0, at - 1, ids[0, at]])
    return found


def sample(trainer, prompts, count):
    ids = [trainer.tokenizer.encode(text).ids for text in prompts for _ in range(count)]
    rows = []
    for at in range(0, len(ids), ROWS):
        drawn, of_drawn = trainer.sample(ids[at : at + ROWS])
        for prompt, completion, logps in zip(ids[at : at + ROWS], drawn, of_drawn, strict=True):
            row = {"prompt": prompt, "sampled": completion, "completion": completion, "logps": np.array(logps)}
            rows.append(row | {"finished": completion[-1] == 2})
    return rows


def advantages(trainer, rewards):
    return group_advantages(rewards, trainer.s)


def turns(trainer, messages, replies):
    """Play episodes: the tokens of a turn stay as they were drawn, and those of the environment follow them."""
    episodes = []
    ids = [encode(trainer, messages)] * ROWS
    for reply in [*replies, None]:
        drawn, its = trainer.sample(ids)
        episodes.append((ids, drawn, its))
        after = [] if reply is None else encode(trainer, [{"role": "user", "content": reply}], "\n")
        ids = [[*before, *turn, *after] for before, turn in zip(ids, drawn, strict=True)]
    found = []
    for n in range(ROWS):
        parts = [{"prompt": ids[n], "completion": drawn[n]} for ids, drawn, _ in episodes]
        of_trainer = logps(trainer, parts)
        found.append({"sampled": [part["completion"] for part in parts]})
        found[-1]["trained"] = [token for part in parts for token in part["completion"]]
        found[-1]["logps"] = np.concatenate([its[n] for _, _, its in episodes])
        found[-1]["trainer_logps"] = np.concatenate(of_trainer)
    return found


def encode(trainer, messages, before=""):
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return trainer.tokenizer.encode(f"{before}{text}<|im_start|>assistant\n").ids


def save(trainer, folder):
    Path(folder).mkdir()
    arrays = {f"{kind} {name}": np.asarray(x) for kind, tree in state(trainer).items() for name, x in tree.items()}
    np.savez(Path(folder) / "state.npz", count=trainer.count, draws=trainer.draws, **arrays)


def restore(folder, settings):
    trainer = load(settings["model"], settings)
    with np.load(Path(folder) / "state.npz") as file:
        trainer.count, trainer.draws = int(file["count"]), int(file["draws"])
        for kind, tree in state(trainer).items():
            tree.update({name: jnp.asarray(file[f"{kind} {name}"]) for name in tree})
    return trainer


def state(trainer):
    return {"weights": trainer.params, "first": trainer.moments[0], "second": trainer.moments[1]}


def export(trainer, folder):
    Path(folder).mkdir()
    weights = {name: np.ascontiguousarray(w) for name, w in trainer.weights(trainer.params).items()}
    save_file(weights, Path(folder) / "model.safetensors")
