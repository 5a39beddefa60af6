"""The checks: each is an equation or an invariance, with a number, a tolerance that follows from the arithmetic, and
its source.

A check calls a trainer and returns a number, which should be `expected` within `tolerance`. Most numbers are the
largest difference between two sets of arrays as a fraction of the largest entry (`bench.distance`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float

from covey_conformance.bench import SETTINGS, Bench, distance
from covey_conformance.oracle import Model, first_adamw_step
from covey_conformance.tiny_model import PAD, STOP, Weights, read_weights
from covey_conformance.trainers import Handle, NotApplicableError, Trainer

EPS = float(np.finfo(np.float32).eps)
GRADIENT = 128 * EPS, "128 eps: 30 products of 64 terms with independent roundings, √(30·64) = 44 eps, times 3"
REORDERED = 64 * EPS, "64 eps: the same terms, summed in another order"
LOGPS = 256 * EPS, "256 eps: 44 eps of a gradient's forward half, times logits of up to 6"
SHARE = 1e-4, "128 eps of the gradient, over the share of these tokens in it, at least 1/6"
ADAMW = 1024 * EPS, "1024 eps: weights of up to 8, rounded, over a step of 0.01"
EQUAL = 0.0, "equal bits"
PROMPTS = ("the hen on the hill", "an ox in a stable")
CHAT = ({"role": "user", "content": "is the hen on the hill?"},)
REPLIES = ("and the ox?", "think again.")
LIKELY = 0.01
"""Tokens of a smaller probability are one cell of the χ² statistic."""
Measure = Callable[[Bench, Trainer], float]


class Check(NamedTuple):
    """One check.

    Attributes:
        name: group and name.
        equation: what should hold, in a line.
        source: where that is defined.
        measure: function (bench, trainer) → number.
        tolerance: largest distance of the number from `expected`, and what it follows from.
        expected: the number that should come out.
    """

    name: str
    equation: str
    source: str
    measure: Measure
    tolerance: tuple[float, str]
    expected: float = 0.0


# --- gradients, and what must not change them


def gradient(change_row: Callable[[dict[str, Any]], dict[str, Any]] = dict, **settings: Any) -> Measure:
    """Return a measure: distance of the gradient of a whole step, of rows that were changed, from the oracle's."""

    def measure(bench: Bench, trainer: Trainer) -> float:
        rows = [change_row(row) for row in bench.rows]
        got = trainer.gradient(shared(bench, trainer, **settings), rows, bench.weights)
        return distance(got, bench.gradient(rows, **settings))

    return measure


def without_short(row: dict[str, Any]) -> dict[str, Any]:
    """Empty the completion of two tokens."""
    empty = {"completion": [], "old_logps": np.zeros(0, np.float32), "ref_logps": np.zeros(0, np.float32)}
    return {**row, **(empty if len(row["completion"]) == 2 else {})}


def invariance(common: dict[str, Any], *variants: dict[str, Any]) -> Measure:
    """Return a measure: largest distance of the gradients under the variants from that without them; a trainer need
    not have all of them.
    """

    def measure(bench: Bench, trainer: Trainer) -> float:
        first = trainer.gradient(shared(bench, trainer, **common), bench.rows, bench.weights)
        distances, reasons = list[float](), list[str]()
        for variant in variants:
            try:
                handle = shared(bench, trainer, **common, **variant)
                distances.append(distance(trainer.gradient(handle, bench.rows, bench.weights), first))
            except NotApplicableError as error:
                reasons.append(str(error))
        if not distances:
            raise NotApplicableError(reasons[0])
        return max(distances)

    return measure


def model_logps(bench: Bench, trainer: Trainer) -> float:
    """Compare a trainer's log-probs with the oracle's, where its adapter mends nothing in the trainer's own code."""
    handle, model = shared(bench, trainer, as_released=True), Model(bench.weights)
    return _largest_gap(trainer.logps(handle, bench.rows), [model.logps(row)[0] for row in bench.rows])


def order_of_rows(bench: Bench, trainer: Trainer) -> float:
    """Compare the gradients of the rows and of the rows in reverse, groups and members."""
    handle = shared(bench, trainer, algorithm="dapo")
    first, second = (trainer.gradient(handle, rows, bench.weights) for rows in (bench.rows, bench.rows[::-1]))
    return distance(second, first)


# --- masks: the share with which some tokens count, by the projection of a gradient on theirs


def share(
    choose: Callable[[list[dict[str, Any]]], tuple[list[dict[str, Any]], list[list[float]]]],
    *,
    counted: float,
    drop: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    **settings: Any,
) -> Measure:
    """Return a measure: the share with which tokens count in the gradient, 1 if they do and 0 if they do not.

    Args:
        choose: rows of the step → rows in which the oracle scores these tokens, and 1 for each of them, else 0.
        counted: the share that is right, and that the oracle's gradient of the step has.
        drop: changes a row for the trainer and the oracle alike.
        settings: settings of the trainer.
    """

    def measure(bench: Bench, trainer: Trainer) -> float:
        rows = [drop(row) for row in bench.rows]
        got = trainer.gradient(shared(bench, trainer, **settings), rows, bench.weights)
        want = bench.gradient(rows, **settings)
        scored, only = choose(rows)
        direction = bench.gradient(scored, only=only)
        excess = {name: got[name] - w for name, w in want.items()}
        return counted + _dot(excess, direction) / _dot(direction, direction)

    return measure


def with_tool_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Let a tool have written the second and third token of each completion that has more than three."""
    length = len(row["completion"])
    return {**row, "mask": [0.0 if length > 3 and at in (1, 2) else 1.0 for at in range(length)]}


def rewarded(row: dict[str, Any]) -> dict[str, Any]:
    """Give the row the advantage 1: those of a group would cancel at its prompt."""
    return {**row, "advantage": 1.0}


def prompt_tokens(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Choose all tokens of the prompts that have one before them."""
    scored = [
        {"prompt": row["prompt"][:1], "completion": row["prompt"][1:], "advantage": row["advantage"], "finished": True}
        for row in rows
    ]
    return scored, [[1.0] * len(row["completion"]) for row in scored]


def padding_tokens(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Choose padding after each completion that is not cut off, up to the longest."""
    longest = max(len(row["completion"]) for row in rows)
    names = ("prompt", "advantage", "finished")
    scored = [
        {**{n: r[n] for n in names}, "completion": r["completion"] + [PAD] * (longest - len(r["completion"]))}
        for r in rows
    ]
    return scored, [[float(at >= len(r["completion"])) for at in range(longest)] for r in rows]


def stop_tokens(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Choose the stop token of each completion that has one."""
    return rows, [[float(token == STOP) for token in row["completion"]] for row in rows]


def tool_tokens(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Choose the tokens that a tool has written."""
    masks = [row["mask"] for row in rows]
    scored = [{name: value for name, value in row.items() if name != "mask"} for row in rows]
    return scored, [[1 - x for x in mask] for mask in masks]


def cut_tokens(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Choose all tokens of the completions that were cut off."""
    return rows, [[float(not row["finished"])] * len(row["completion"]) for row in rows]


# --- the sampler against the trainer


def sampler_logps(bench: Bench, trainer: Trainer, **settings: Any) -> float:
    """Compare the sampler's log-probs of its tokens with the trainer's: the largest difference."""
    handle = shared(bench, trainer, **settings)
    rows = _samples(trainer, handle)
    return _largest_gap(trainer.logps(handle, rows), [row["logps"] for row in rows])


def mean_ratio(bench: Bench, trainer: Trainer) -> float:
    """Compute the mean of exp(logp of the trainer − logp of the sampler) under temperature and top-p."""
    handle = shared(bench, trainer, temperature=0.7, top_p=0.8)
    rows = _samples(trainer, handle)
    pairs = zip(trainer.logps(handle, rows), (row["logps"] for row in rows), strict=True)
    return float(np.concatenate([np.exp(mine - its) for mine, its in pairs]).mean())


def first_ratio(bench: Bench, trainer: Trainer, iterations: int = 1) -> float:
    """Compare the gradient of sampled rows before any update with the oracle's at a ratio of 1; with several iterations
    the ratio is taken against the log-probs that the trainer has stored.
    """
    handle = shared(bench, trainer, temperature=0.7, iterations=iterations)
    rows = [{**row, "advantage": (-1.0) ** n} for n, row in enumerate(_samples(trainer, handle, least=""))]
    return distance(trainer.gradient(handle, rows, bench.weights), bench.gradient(rows, temperature=0.7))


def without_stop(bench: Bench, trainer: Trainer) -> float:
    """Compute the share of finished completions whose last token for training is not the stop token."""
    rows = [row for row in _samples(trainer, shared(bench, trainer, temperature=0.7), least="") if row["finished"]]
    return float(np.mean([row["completion"][-1:] != [STOP] for row in rows]))


def other_tokens(bench: Bench, trainer: Trainer) -> float:
    """Compute the share of completions that are trained on with other tokens than the sampler drew."""
    rows = _samples(trainer, shared(bench, trainer, temperature=0.7), least="")
    return float(np.mean([list(row["sampled"]) != list(row["completion"]) for row in rows]))


def repeated_noise(bench: Bench, trainer: Trainer) -> float:
    """Compute the share of completions that a second call draws again in the same places."""
    handle = shared(bench, trainer)
    first, second = (_samples(trainer, handle, least="") for _ in range(2))
    return float(np.mean([a["sampled"] == b["sampled"] for a, b in zip(first, second, strict=True)]))


def drawn_distribution(bench: Bench, trainer: Trainer) -> float:
    """Compare the counts of 512 first tokens with their probabilities under temperature and top-p: the distance of χ²
    from its mean, in standard deviations.
    """
    settings = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 1}
    rows = trainer.sample(shared(bench, trainer, **settings), PROMPTS[:1], 512)
    p = Model(bench.weights).next_token(rows[0]["prompt"], 0.7)
    order = np.argsort(-p)
    cut = order[1 + int(np.searchsorted(np.cumsum(p[order]), 0.8)) :]
    p[cut] = 0
    p /= p.sum()
    counts = np.bincount([row["sampled"][0] for row in rows], minlength=len(p))
    if counts[cut].any():
        return float(np.inf)
    cells = np.flatnonzero(p >= LIKELY)
    expected, seen = ([*x[cells], x.sum() - x[cells].sum()] for x in (len(rows) * p, counts))
    pairs = [(e, s) for e, s in zip(expected, seen, strict=True) if e > 1]
    free = len(pairs) - 1
    return float((sum((s - e) ** 2 / e for e, s in pairs) - free) / (2 * free) ** 0.5)


def stale_sampler(bench: Bench, trainer: Trainer) -> float:
    """Compare log-probs of what is sampled after a step with the oracle's under the new weights."""
    handle = fresh(bench, trainer)
    model = Model(trainer.step(handle, bench.rows, bench.weights))
    rows = _samples(trainer, handle)
    return _largest_gap([model.logps(row)[0] for row in rows], [row["logps"] for row in rows])


def agreement(bench: Bench, trainer: Trainer) -> float:
    """Return the share of drawn tokens that the trainer's own logits draw from the same noise."""
    return float(trainer.call("agreement", fresh(bench, trainer, temperature=0.7), PROMPTS))


# --- advantages


def advantages(
    rewards: Callable[[], Float[np.ndarray, "P G K"]], formula: Callable[[np.ndarray], np.ndarray], **settings: Any
) -> Measure:
    """Return a measure: largest difference of a trainer's advantages from a formula of the weighted sum [P, G]."""

    def measure(bench: Bench, trainer: Trainer) -> float:
        table = rewards()
        got = np.asarray(trainer.call("advantages", shared(bench, trainer, **settings), table), float)
        scored = ~np.isnan(table)
        weights = settings.get("reward_weights") or [1.0] * table.shape[-1]
        totals = np.where(scored.any(-1), (np.where(scored, table, 0.0) * weights).sum(-1), np.nan)
        gap = np.abs(got - np.nan_to_num(np.array([formula(group) for group in totals])))
        return float(np.where(np.isnan(gap), np.inf, gap).max())

    return measure


def z_scores(group: np.ndarray) -> np.ndarray:
    """Compute (R − mean) / (std + 1e-4) with ddof 1 over the rewards of a group that are no NaN; 0 for equal ones."""
    scored = group[~np.isnan(group)]
    if len(scored) < 2 or scored.max() == scored.min():
        return np.zeros_like(group)
    return np.asarray((group - scored.mean()) / (scored.std(ddof=1) + 1e-4))


def random_rewards(functions: int = 1, missing: Sequence[tuple[int, ...]] = ()) -> np.ndarray:
    """Return rewards [2, 4, functions] with NaN in the places `missing`."""
    rewards = np.random.default_rng(5).normal(size=(2, 4, functions)).round(2)
    for place in missing:
        rewards[place] = np.nan
    return rewards


# --- turns


def foreign_tokens(bench: Bench, trainer: Trainer) -> float:
    """Compute the share of episodes whose tokens in the loss are not those that the sampler drew, turn after turn."""
    episodes = trainer.call("turns", shared(bench, trainer), CHAT, REPLIES)
    return float(np.mean([list(chain(*e["sampled"])) != list(e["trained"]) for e in episodes]))


def turn_logps(bench: Bench, trainer: Trainer) -> float:
    """Compare the sampler's log-probs of the tokens in the loss with the trainer's, over all turns."""
    episodes = trainer.call("turns", shared(bench, trainer), CHAT, REPLIES)
    return _largest_gap([e["trainer_logps"] for e in episodes], [e["logps"] for e in episodes])


# --- the optimizer


def adamw(**settings: Any) -> Measure:
    """Return a measure: distance of the first step's change of the weights from the oracle's."""

    def measure(bench: Bench, trainer: Trainer) -> float:
        got = trainer.step(fresh(bench, trainer, **settings), bench.rows, bench.weights)
        want = first_adamw_step(bench.weights, bench.gradient(bench.rows), {**SETTINGS, **settings})
        return distance(*(change(weights, bench.weights) for weights in (got, want)))

    return measure


def decay(bench: Bench, trainer: Trainer) -> float:
    """Compare a step without a gradient with decay alone, of matrices and embeddings and not of norm scales."""
    rows = [{**row, "advantage": 0.0} for row in bench.rows]
    got = trainer.step(fresh(bench, trainer, weight_decay=0.1), rows, bench.weights)
    zero = {name: np.zeros_like(w) for name, w in bench.weights.items()}
    want = first_adamw_step(bench.weights, zero, {**SETTINGS, "weight_decay": 0.1})
    return distance(*(change(weights, bench.weights) for weights in (got, want)))


def first_warm_up(bench: Bench, trainer: Trainer) -> float:
    """Compute the size of the first step of a warm-up of three, as a fraction of that without warm-up."""
    steps = [trainer.step(fresh(bench, trainer, warmup_steps=n), bench.rows, bench.weights) for n in (3, 0)]
    warm, full = (change(weights, bench.weights) for weights in steps)
    return _dot(warm, full) / _dot(full, full)


def moved_in_bf16(bench: Bench, trainer: Trainer, steps: int = 16) -> float:
    """Compute the number of weights that have moved after 16 steps of 1e-6, as a fraction of those that move in float32
    and are rounded then.
    """
    handle = fresh(bench, trainer, dtype="bfloat16", learning_rate=1e-6, eps=1e-8, total_steps=steps)
    for _ in range(steps):
        got = trainer.step(handle, bench.rows, bench.weights)
    start = {name: _bf16(w) for name, w in bench.weights.items()}
    slope = bench.gradient(bench.rows)
    want = {name: _bf16(w - steps * 1e-6 * np.sign(slope[name])) for name, w in start.items()}
    moved = [sum(int((now[name] != w).sum()) for name, w in start.items()) for now in (got, want)]
    return moved[0] / moved[1]


# --- files


def resumed(bench: Bench, trainer: Trainer) -> float:
    """Compare four steps with two, a checkpoint, and two more."""
    straight, first, folder = fresh(bench, trainer), fresh(bench, trainer), str(bench.new_folder())
    for _ in range(4):
        want = trainer.step(straight, bench.rows, bench.weights)
    for _ in range(2):
        trainer.step(first, bench.rows, bench.weights)
    trainer.call("save", first, folder)
    second = trainer.call("restore", folder, {**SETTINGS, "model": str(bench.model)})
    for _ in range(2):
        got = trainer.step(second, bench.rows, bench.weights)
    return distance(got, want)


def exported(bench: Bench, trainer: Trainer) -> float:
    """Compare the weights of an exported folder with the trainer's after a step."""
    handle, folder = fresh(bench, trainer), bench.new_folder()
    want = trainer.step(handle, bench.rows, bench.weights)
    trainer.call("export", handle, str(folder))
    return distance(trainer.checked(read_weights(folder), bench.weights, "export"), want)


def merged(bench: Bench, trainer: Trainer) -> float:
    """Compare log-probs of trained adapters, as the trainer applies them, with the oracle's on the exported model."""
    handle, folder = fresh(bench, trainer, lora_rank=2, lora_alpha=8.0, learning_rate=0.05), bench.new_folder()
    for _ in range(2):
        trainer.step(handle, bench.rows, bench.weights)
    trainer.call("export", handle, str(folder))
    weights = trainer.checked(read_weights(folder), bench.weights, "export")
    if distance(weights, bench.weights) < 1e-3:
        return float(np.inf)  # the adapters are not in what was written
    model = Model(weights)
    rows = [row for row in bench.rows if row["completion"]]
    return _largest_gap(trainer.logps(handle, rows), [model.logps(row)[0] for row in rows])


# --- helpers


def shared(bench: Bench, trainer: Trainer, **settings: Any) -> Handle:
    """Load the tiny model, or take the trainer that was loaded so before: the calls made on it change no weights."""
    return trainer.load(str(bench.model), {**SETTINGS, **settings})


def fresh(bench: Bench, trainer: Trainer, **settings: Any) -> Handle:
    """Load the tiny model for calls that change it."""
    handle: Handle = trainer.call("load", str(bench.model), {**SETTINGS, **settings})
    return handle


def change(weights: Weights, start: Weights) -> Weights:
    """Return the change of each weight, float64."""
    return {name: weights[name] - w.astype(np.float64) for name, w in start.items()}


def _samples(trainer: Trainer, handle: Handle, least: str = "logps") -> list[dict[str, Any]]:
    """Sample a step of rows with the number of their group; `least` is what each must have."""
    rows = trainer.sample(handle, PROMPTS, SETTINGS["samples"], least)
    return [{**row, "group": n // SETTINGS["samples"]} for n, row in enumerate(rows)]


def _largest_gap(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Compute the largest difference; infinite where there are other numbers of tokens."""
    if [len(x) for x in got] != [len(x) for x in want]:
        return float(np.inf)
    return max(float(np.abs(np.asarray(a, float) - b).max(initial=0.0)) for a, b in zip(got, want, strict=True))


def _dot(left: Weights, right: Weights) -> float:
    return sum(float((left[name] * w).sum()) for name, w in right.items())


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


GRPO, DAPO, DR = "Shao et al., 2024, eq. 3", "Yu et al., 2025, eq. 8", "Liu et al., 2025 (R1-Zero), eq. 4"
KL = "Schulman, 2020, Approximating KL divergence"
ZSCORE = "Shao et al., 2024, section 4.1.2; ddof 1 and 1e-4 as TRL and Tunix"
_each = {"micro_batch": 4}, {"micro_batch": 2}
CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check("gradient/logps", "log-probs of the checkpoint are those of its config.json", "Hugging Face's Llama",
              model_logps, LOGPS),
        Check("gradient/grpo", "∇ mean_i mean_t −min(w·A, clip(w)·A), w_t = exp(logp − logp_old)", GRPO,
              gradient(), GRADIENT),
        Check("gradient/grpo-k1", "the same + β·(logp − logp_ref)", KL, gradient(beta=0.5, kl="k1"), GRADIENT),
        Check("gradient/grpo-k2", "the same + β·(logp_ref − logp)²/2", KL, gradient(beta=0.5, kl="k2"), GRADIENT),
        Check("gradient/grpo-k3", "the same + β·(exp(d) − d − 1), d = logp_ref − logp", KL,
              gradient(beta=0.5), GRADIENT),
        Check("gradient/dr_grpo", "the sum over tokens, divided by samples × max_tokens", DR,
              gradient(algorithm="dr_grpo"), GRADIENT),
        Check("gradient/dapo", "the mean over all tokens of the step, clip range 0.8 to 1.28", DAPO,
              gradient(algorithm="dapo", epsilon_high=0.28), GRADIENT),
        Check("gradient/gspo", "w = exp(mean_t(logp − logp_old)) for the whole completion, clip range 0.97 to 1.04",
              "Zheng et al., 2025, eq. 5 and 7", gradient(algorithm="gspo", epsilon=0.03, epsilon_high=0.04), GRADIENT),
        Check("gradient/empty", "a completion without tokens adds 0 and counts among the samples", GRPO,
              gradient(without_short), GRADIENT),
        Check("invariance/micro-batch", "8, 4 or 2 samples at a time, the mean over samples", GRPO,
              invariance({}, *_each), REORDERED),
        Check("invariance/accumulation", "8, 4 or 2 samples at a time, the mean over tokens: of the step, not the mean "
              "of means", DAPO, invariance({"algorithm": "dapo"}, *_each), REORDERED),
        Check("invariance/padding-before", "3 more tokens of padding before the prompts", "padding is masked",
              invariance({}, {"pad_prompt": 3}), REORDERED),
        Check("invariance/padding-behind", "5 more tokens of padding behind the completions", "padding is masked",
              invariance({}, {"pad_completion": 5}), REORDERED),
        Check("invariance/order", "groups and samples in reverse", "a sum has no order", order_of_rows, REORDERED),
        Check("invariance/packing", "several samples in a row, or one", "no token sees another sample",
              invariance({"algorithm": "dapo"}, {"packing": True}), REORDERED),
        Check("invariance/devices", "one or two devices", "a mean over the step is over all devices",
              invariance({"algorithm": "dapo"}, {"devices": 2}), REORDERED),
        Check("invariance/processes", "one process, or two that each sample a part", "a mean over the step is over all",
              invariance({"algorithm": "dapo"}, {"processes": 2}), REORDERED),
        Check("mask/prompt", "share with which tokens of the prompt count", "they were not sampled",
              share(prompt_tokens, counted=0.0, drop=rewarded), SHARE),
        Check("mask/padding", "share with which padding counts", "it was not sampled",
              share(padding_tokens, counted=0.0), SHARE),
        Check("mask/stop", "share with which the stop token counts", "it was sampled",
              share(stop_tokens, counted=1.0), SHARE, 1.0),
        Check("mask/tool", "share with which tokens count that a tool wrote", "they were not sampled",
              share(tool_tokens, counted=0.0, drop=with_tool_tokens), SHARE),
        Check("mask/cut", "share with which a completion counts that was cut off", "GRPO leaves none out",
              share(cut_tokens, counted=1.0), SHARE, 1.0),
        Check("mask/cut-left-out", "the same with mask_truncated", "Yu et al., 2025, section 3.4 (overlong filtering)",
              share(cut_tokens, counted=0.0, mask_truncated=True), SHARE),
        Check("sampler/logps", "|logp of the sampler − logp of the trainer| at temperature 0.7",
              "both are log_softmax(logits / temperature)", partial(sampler_logps, temperature=0.7), LOGPS),
        Check("sampler/mean-ratio", "mean of exp(logp of the trainer − of the sampler), temperature 0.7, top-p 0.8",
              "importance weights have mean 1", mean_ratio, LOGPS, 1.0),
        Check("sampler/first-ratio", "the gradient of the first update is that of a ratio of 1", GRPO,
              first_ratio, GRADIENT),
        Check("sampler/stored-ratio", "the same of the first of two updates, by the log-probs that the trainer stores",
              GRPO, partial(first_ratio, iterations=2), GRADIENT),
        Check("sampler/stop", "share of finished completions that lack the stop token", "it was sampled",
              without_stop, EQUAL),
        Check("sampler/tokens", "share of completions trained on with other tokens than were drawn",
              "a text does not tell its tokens", other_tokens, EQUAL),
        Check("sampler/noise", "share of completions that a second call draws again", "each call has its own noise",
              repeated_noise, (0.25, "2 of 8 short completions by chance")),
        Check("sampler/distribution", "512 first tokens against softmax(logits / 0.7) cut at top-p 0.8",
              "Pearson's χ², in standard deviations", drawn_distribution, (5.0, "5 standard deviations")),
        Check("sampler/fresh", "|logp of the sampler after a step − logp under the new weights|",
              "the next rollout is on-policy", stale_sampler, LOGPS),
        Check("sampler/agreement", "share of drawn tokens that the trainer's logits draw from the same noise",
              "one distribution, one noise", agreement, EQUAL, 1.0),
        Check("advantage/z-score", "(R − mean) / (std + 1e-4) over the group, ddof 1", ZSCORE,
              advantages(random_rewards, z_scores), LOGPS),
        Check("advantage/centred", "R − mean over the group", DR,
              advantages(random_rewards, lambda group: group - group.mean(), advantage="centred"), LOGPS),
        Check("advantage/equal", "a group of equal rewards, 0.1 or 0.7, gives exactly 0", "R − mean = 0",
              advantages(lambda: np.array([[[0.1]] * 4, [[0.7]] * 4]), z_scores), EQUAL),
        Check("advantage/single", "a group of one sample gives 0, or is refused", "R − mean = 0",
              advantages(lambda: np.ones((2, 1, 1)), z_scores, samples=1), EQUAL),
        Check("advantage/weights", "R = 0.25·r₁ + 2·r₂", "TRL, reward_weights",
              advantages(partial(random_rewards, 2), z_scores, reward_weights=[0.25, 2.0]), LOGPS),
        Check("advantage/none", "a function that returns None is left out of the sum; a sample without any gets 0",
              "TRL, reward functions", advantages(
                  partial(random_rewards, 2, [(0, 1, 0), (1, 2, 0), (1, 2, 1)]), z_scores), LOGPS),
        Check("turns/tokens", "share of episodes whose tokens in the loss are not those drawn", "no tokenising again",
              foreign_tokens, EQUAL),
        Check("turns/logps", "|logp of the sampler − logp of the trainer| over three turns, where the template drops "
              "earlier reasoning", "both see one history", turn_logps, LOGPS),
        Check("optimizer/adamw", "the first step of AdamW, lr 0.01, eps 0.01", "Loshchilov & Hutter, 2019",
              adamw(), ADAMW),
        Check("optimizer/clip", "the same, clipped to a norm of 0.05 over all parameters", "Pascanu et al., 2013",
              adamw(max_grad_norm=0.05), ADAMW),
        Check("optimizer/warm-up", "the first of three warm-up steps, as a fraction of a full one: above 0, below 1",
              "a step of 0 is a batch wasted", first_warm_up, (0.499, "from 0.001 to 0.999"), 0.5),
        Check("optimizer/decay", "a step without a gradient: w·(1 − lr·decay), norm scales stay",
              "Hugging Face Trainer, nanoGPT", decay, ADAMW),
        Check("optimizer/bf16", "weights that have moved after 16 steps of 1e-6 in bfloat16, as a fraction of those of "
              "float32 copies", "the spacing of bfloat16 near 0.02 is 1e-4", moved_in_bf16, (0.15, "signs of gradients "
              "near 0"), 1.0),
        Check("resume/steps", "two steps, a checkpoint and two steps equal four steps", "a run continues as if never "
              "stopped", resumed, EQUAL),
        Check("resume/export", "the weights of the exported folder are those of the trainer", "nothing is converted",
              exported, EQUAL),
        Check("resume/merge", "|logp with adapters − logp of the exported model|", "W + α/r·B·A (Hu et al., 2021)",
              merged, LOGPS),
    )
}  # fmt: skip
"""Map from the name of a check to the check, in the order of the table."""
