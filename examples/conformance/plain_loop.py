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
def all_logps(weights, ids, temperature):
    """Compute the log-probs [B, T, V] of the token behind each of ids [B, T]."""
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
    return jax.nn.log_softmax(linear(weights, "lm_head", norm(weights, "model.norm", x)) / temperature)


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T


def norm(weights, name, x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]


def rotate(x, angles):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


@jax.jit
def weights_gradient(weights, batch, temperature, slope):
    """Compute the gradient of the loss in the weights from its slope in each token's log-prob (chain rule)."""
    logps = lambda weights: pick(all_logps(weights, batch["ids"], temperature), batch["labels"])  # noqa: E731
    return jax.vjp(logps, weights)[1](slope)[0]


def pick(logps, labels):
    return jnp.take_along_axis(logps[:, :-1], labels[..., None], -1)[..., 0]


def loss(logps, batch, s):
    """Compute the part of the step's loss that a micro-batch has: a weighted sum over its tokens."""
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


class Trainer:
    """Weights with the moments of AdamW; with a rank, the sum of a frozen base and adapters B·A that are trained."""

    def __init__(self, weights, s):
        self.s, self.count, self.draws = s, 0, 0
        self.base = self.params = self.sampler = weights
        if s["lora_rank"]:
            rng, r = np.random.default_rng(s["seed"]), s["lora_rank"]
            shapes = {name: w.shape for name, w in weights.items() if "proj" in name}
            a = {f"{name} A": rng.normal(size=(r, n)).astype("f") / n**0.5 for name, (_, n) in shapes.items()}
            self.params = a | {f"{name} B": np.zeros((m, r), "f") for name, (m, _) in shapes.items()}
        self.params = dict(self.params)
        self.first, self.second = ({name: np.zeros_like(w) for name, w in self.params.items()} for _ in range(2))

    def weights(self):
        if self.s["lora_rank"]:
            scale = np.float32(self.s["lora_alpha"] / self.s["lora_rank"])
            at = [name for name in self.base if "proj" in name]
            return self.base | {n: self.base[n] + scale * self.params[f"{n} B"] @ self.params[f"{n} A"] for n in at}
        return {name: w.astype(jnp.dtype(self.s["dtype"])).astype("f") for name, w in self.params.items()}

    def gradient(self, rows):
        masks = [token_mask(row, self.s) for row in rows]
        counts = np.array([mask.sum() for mask in masks])
        divisors = {"dapo": counts.sum(), "dr_grpo": len(rows) * self.s["max_tokens"]}
        divisor = divisors.get(self.s["algorithm"], len(rows) * np.maximum(counts, 1))
        weight = np.broadcast_to(1 / divisor, len(rows))
        size, weights = self.s["micro_batch"], self.weights()
        total = {name: np.zeros_like(w) for name, w in weights.items()}
        for at in range(0, len(rows), size):
            batch = make_batch(rows[at : at + size], masks[at : at + size], weight[at : at + size], self.s)
            logps = pick(all_logps(weights, batch["ids"], self.s["temperature"]), batch["labels"])
            slope = jax.grad(loss)(logps, batch, self.s)
            part = weights_gradient(weights, batch, self.s["temperature"], slope)
            total = {name: g + np.asarray(part[name]) for name, g in total.items()}
        return total

    def step(self, rows):
        s, gradient = self.s, self.gradient(rows)
        if s["lora_rank"]:
            scale, whole = np.float32(s["lora_alpha"] / s["lora_rank"]), gradient
            gradient = {n: scale * self.params[n[:-1] + "B"].T @ whole[n[:-2]] for n in self.params if n[-1] == "A"}
            gradient |= {n: scale * whole[n[:-2]] @ self.params[n[:-1] + "A"].T for n in self.params if n[-1] == "B"}
        norm = sum(float((g * g).sum()) for g in gradient.values()) ** 0.5
        factor = np.float32(min(1, s["max_grad_norm"] / norm) if s["max_grad_norm"] and norm else 1)
        self.count += 1
        rate = s["learning_rate"] * min(1, self.count / (s["warmup_steps"] + 1))
        for name, g in gradient.items():
            g, w = g * factor, self.params[name]
            self.first[name] = s["b1"] * self.first[name] + (1 - s["b1"]) * g
            self.second[name] = s["b2"] * self.second[name] + (1 - s["b2"]) * g * g
            m, v = self.first[name] / (1 - s["b1"] ** self.count), self.second[name] / (1 - s["b2"] ** self.count)
            self.params[name] = w - rate * (m / (np.sqrt(v) + s["eps"]) + s["weight_decay"] * w * (w.ndim > 1))
        self.sampler = self.weights()

    def sample(self, prompts):
        """Draw a completion for each of at most `ROWS` prompts; return ids and log-probs of the drawn distribution."""
        self.draws += 1
        rng, s = np.random.default_rng([self.s["seed"], self.draws]), self.s
        drawn, logps = [[] for _ in prompts], [[] for _ in prompts]
        for _ in range(s["max_tokens"]):
            ids = padded([[*p, *c] for p, c in zip(prompts, drawn, strict=True)])
            of_all = np.asarray(all_logps(self.sampler, ids, s["temperature"]))
            for row, (prompt, completion) in enumerate(zip(prompts, drawn, strict=True)):
                if 2 in completion:
                    continue
                of_token = of_all[row, len(prompt) + len(completion) - 1]
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
        batch["advantage"][n], batch["has_old"][n, at] = row["advantage"], old is not None
        batch["old_logps"][n, at], batch["ref_logps"][n, at] = 0 if old is None else old, row.get("ref_logps", 0)
    return batch | {"ids": ids, "labels": ids[:, 1:]}


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
    if settings["devices"] > 1 or settings["processes"] > 1:
        raise NotImplementedError("this loop uses one device in one process")
    trainer = Trainer(load_file(Path(folder) / "model.safetensors"), settings)
    trainer.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return trainer


def gradient(trainer, rows):
    return trainer.gradient(rows)


def step(trainer, rows):
    trainer.step(rows)
    return trainer.weights()


def logps(trainer, rows):
    found, weights = [], trainer.weights()
    for at in range(0, len(rows), ROWS):
        part = rows[at : at + ROWS]
        ids = padded([[*row["prompt"], *row["completion"]] for row in part])
        picked = np.asarray(pick(all_logps(weights, ids, trainer.s["temperature"]), ids[:, 1:]))
        starts = [len(row["prompt"]) - 1 for row in part]
        found += [
            picked[n, at : at + len(row["completion"])] for n, (at, row) in enumerate(zip(starts, part, strict=True))
        ]
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
    arrays = {f"{kind} {name}": x for kind, tree in state(trainer).items() for name, x in tree.items()}
    np.savez(Path(folder) / "state.npz", count=trainer.count, draws=trainer.draws, **arrays)


def restore(folder, settings):
    trainer = load(settings["model"], settings)
    with np.load(Path(folder) / "state.npz") as file:
        trainer.count, trainer.draws = int(file["count"]), int(file["draws"])
        for kind, tree in state(trainer).items():
            tree.update({name: file[f"{kind} {name}"] for name in tree})
    return trainer


def state(trainer):
    return {"weights": trainer.params, "first": trainer.first, "second": trainer.second}


def export(trainer, folder):
    Path(folder).mkdir()
    weights = {name: np.ascontiguousarray(w) for name, w in trainer.weights().items()}
    save_file(weights, Path(folder) / "model.safetensors")
