"""Makes the golden numbers of TRL: advantages, loss, its gradient and a few metrics, all from TRL's own lines.

Run by `make parity`, in an environment with the extra `[parity]`, from the repository's root; a second run writes the
same bytes:

    python tests/parity/make_trl_golden.py

A trainer of TRL is made without its `__init__`: it gets the settings of a real config, answers and log-probs drawn at
random instead of a model's, and then does a step as it always does: rewards, advantages, correction, denominators
(`_generate_and_score_completions`), loss (`_compute_loss`), gradient with respect to the log-probs. All in float64 on
numbers that float32 holds exactly. Writes into `golden/` beside this file:

    trl.json    versions, seeds, and for each case its settings, loss and metrics
    trl.npz     the drawn inputs (`<draw>/...`), and for each case the advantages and the gradient

Set alike, not TRL's default: the KL term without TRL's factor (`use_bias_correction_kl=False`).
"""

import json
import logging
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
import trl
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import split_tensor_dict

GOLDEN = Path(__file__).parent / "golden"
P, G, T = 5, 4, 9
"""Prompts, samples a prompt, tokens of the longest answer."""
WORD, EOS, PAD = 7, 2, 0
DRAWS = {"near": {"seed": 0, "spread": 0.02}, "far": {"seed": 1, "spread": 0.6}}
"""How far apart the log-probs of policy, old policy, reference and sampler are: standard deviation, in nats."""
FIXED = {
    "output_dir": "unused",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "num_generations": G,
    "max_completion_length": T + 3,
    "reward_weights": [1.0, 0.5],
}
GRPO = {"per_device_train_batch_size": P * G, "num_iterations": 2, "use_bias_correction_kl": False}
ON_POLICY = {"num_iterations": 1}
"""One update a batch: the old log-probs are the policy's own, and TRL does not keep them."""
TWO_PARTS = {"per_device_train_batch_size": P * G // 2, "gradient_accumulation_steps": 2}
SEQUENCE = {"importance_sampling_level": "sequence"}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"scale_rewards": "none"},
    "dapo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.04},
    "on_policy": ON_POLICY | {"beta": 0.04},
    "sequence": SEQUENCE | {"beta": 0.04},
    "truncated": {"mask_truncated_completions": True, "beta": 0.04},
}
SPECIAL: dict[str, dict[str, Any]] = {
    "grpo/batch_std": {"loss_type": "grpo", "scale_rewards": "batch"},
    "grpo/delta": {"loss_type": "grpo", "delta": 1.4},
    "dapo/delta": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4},
    "grpo/sequence_delta": {"loss_type": "grpo", "delta": 1.1} | SEQUENCE,
    "grpo/two_parts": {"loss_type": "grpo", "beta": 0.04} | TWO_PARTS,
    "dr_grpo/two_parts": {"loss_type": "dr_grpo", "scale_rewards": "none"} | TWO_PARTS,
    "dapo/two_parts": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04} | TWO_PARTS,
    "cispo/two_parts": {"loss_type": "cispo", "epsilon_high": 5.0, "mask_truncated_completions": True} | TWO_PARTS,
    "sapo/temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6},
}
NEAR: dict[str, dict[str, Any]] = {
    "grpo/near": {"loss_type": "grpo", "beta": 0.04},
    "grpo/gspo": {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4} | SEQUENCE,
}
MODE = "vllm_importance_sampling_mode"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
FLOOR = {"vllm_importance_sampling_clip_min": 0.8}
CORRECTED: dict[str, dict[str, Any]] = {
    **{f"dapo/{mode}": {"loss_type": "dapo", MODE: mode} for mode in MODES},
    **{f"dapo/{mode}_two_bounds": {"loss_type": "dapo", MODE: mode} | FLOOR for mode in MODES},
    "dapo/token_truncate_on_policy": {"loss_type": "dapo", MODE: "token_truncate"} | ON_POLICY,
    "cispo/token_truncate": {"loss_type": "cispo", "epsilon_high": 1.5, MODE: "token_truncate"},
    "grpo/sequence_mask": {"loss_type": "grpo", MODE: "sequence_mask"} | SEQUENCE,
}
CAP = {"vllm_importance_sampling_clip_max": 1.2, "beta": 0.04}
"""Of every corrected case."""
SETTINGS = (
    "loss_type", "num_iterations", "gradient_accumulation_steps", "max_completion_length", "epsilon", "epsilon_high",
    "delta", "beta", "importance_sampling_level", "scale_rewards", "mask_truncated_completions",
    "sapo_temperature_pos", "sapo_temperature_neg", "use_vllm", MODE,
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "reward_weights",
)  # fmt: skip
"""Settings of a case that are written down."""
METRICS = {
    "kl": "kl",
    "clip_ratio/low_mean": "clip_ratio/low_mean",
    "clip_ratio/high_mean": "clip_ratio/high_mean",
    "clip_ratio/region_mean": "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean": "sampling/logp_difference/mean",
    "sampling/sampling_logp_difference/max": "sampling/logp_difference/max",
    "sampling/importance_sampling_ratio/mean": "sampling/correction/mean",
}
"""Metrics that are written down: TRL's name → ours."""


# --- what is drawn


def draw(seed: int, spread: float) -> dict[str, np.ndarray]:
    """Answers of 1 to T tokens with log-probs [P·G, T] (random behind the answer's end too, where nobody may look), and
    rewards [P·G, 2], NaN for None.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, P * G)
    lengths[:2] = 1, T
    old = -rng.gamma(2.0, 1.0, (P * G, T))
    moved = {name: old + spread * rng.standard_normal(old.shape) for name in ("logps", "ref", "sampled")}
    return {
        "lengths": lengths,
        "finished": finished(rng),
        "rewards": rewards(rng),
        **{name: np.float32(value) for name, value in {"old": old, **moved}.items()},
    }


def finished(rng: np.random.Generator) -> np.ndarray:
    """Which answers ended by themselves: about two thirds, and none of the second prompt's."""
    done = rng.random(P * G) < 0.7
    done[G : 2 * G] = False
    return done


def rewards(rng: np.random.Generator) -> np.ndarray:
    """The third group is tied; in the fourth a sample is scored by no function and others by one only; in the last one
    sample alone is scored.
    """
    drawn = np.float32(rng.random((P * G, 2)) * [3.0, 1.0])
    drawn[2 * G : 3 * G] = 0.7
    drawn[3 * G], drawn[3 * G + 1, 0], drawn[3 * G + 2, 1] = np.nan, np.nan, np.nan
    drawn[4 * G : 5 * G - 1] = np.nan
    return drawn


# --- TRL's trainers, with the numbers given


class Given:
    """Stands before a trainer of TRL: the settings of `config`, and drawn numbers where a model's would be."""

    def __init__(self, config: Any, drawn: dict[str, np.ndarray], sampled: np.ndarray | None, old: np.ndarray):
        for name, value in vars(config).items():
            if not callable(getattr(type(self), name, None)):
                setattr(self, name, value)
        self.args, self.drawn, self.sampled = config, drawn, sampled
        self.epsilon_low, self.epsilon_high = config.epsilon, config.epsilon_high or config.epsilon
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False, logps=torch.tensor(old))
        self.ref_model = SimpleNamespace(logps=torch.tensor(np.float64(drawn["ref"])))
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.state = SimpleNamespace(global_step=0)
        self.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=PAD), [EOS]
        self.tools, self.environments, self.environment_factories = [], None, None
        self.aux_loss_enabled = self._entropy_bonus_enabled = self._is_vlm = False
        self.reward_func_names = ["first", "second"]
        self.reward_funcs = [self.reward(k) for k in range(2)]
        self.reward_processing_classes = [None, None]
        self.reward_weights = torch.tensor(config.reward_weights)
        self._metrics, self._logs = {"train": defaultdict(list)}, defaultdict(list) | {"rewards": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)

    def reward(self, k: int) -> Any:
        values = [None if np.isnan(v) else float(v) for v in self.drawn["rewards"][:, k]]
        return lambda prompts, **columns: [values[int(prompt)] for prompt in prompts]

    def answers(self) -> list[list[int]]:
        pairs = zip(self.drawn["lengths"], self.drawn["finished"], strict=True)
        return [[WORD] * (n - 1) + [EOS if done else WORD] for n, done in pairs]

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        """A prompt is one token: the sample's number."""
        logps = model.logps[input_ids[:, 0]]
        return logps, torch.zeros_like(logps), None


class GivenGRPO(Given, GRPOTrainer):
    def _generate(self, prompts: list[str]) -> Any:
        sampled = None if self.sampled is None else [list(row) for row in self.sampled]
        return [[int(p)] for p in prompts], self.answers(), None, [""] * len(prompts), sampled, {}, None, []


class GivenRLOO(Given, RLOOTrainer):
    def _generate(self, prompts: list[str]) -> Any:
        return [[int(p)] for p in prompts], self.answers(), [""] * len(prompts)


# --- a step of each


def grpo(name: str, chosen: dict[str, Any], drawn: dict[str, np.ndarray]) -> tuple[dict[str, Any], Any]:
    config = GRPOConfig(**FIXED, **(GRPO | chosen))
    old, sampled = np.float64(drawn["logps" if config.num_iterations == 1 else "old"]), None
    if MODE in chosen:
        config.use_vllm, sampled = True, np.float64(drawn["sampled"])
    return step(name, GivenGRPO(config, drawn, sampled, old))


def rloo(name: str, chosen: dict[str, Any], drawn: dict[str, np.ndarray]) -> tuple[dict[str, Any], Any]:
    """On-policy, where its ratio of whole answers is 1: a ratio that is the product over the tokens is not ours."""
    config = RLOOConfig(**FIXED, per_device_train_batch_size=P * G, **chosen)
    return step(name, GivenRLOO(config, drawn, None, np.float64(drawn["logps"])))


def step(name: str, trainer: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    batch = trainer._generate_and_score_completions([{"prompt": str(i)} for i in range(P * G)])
    logps = torch.tensor(np.float64(trainer.drawn["logps"]), requires_grad=True)
    policy = SimpleNamespace(logps=logps)
    parts = split_tensor_dict(batch, trainer.args.gradient_accumulation_steps)
    loss = sum(trainer._compute_loss(policy, part) for part in parts)
    loss.backward()
    seen = trainer._metrics["train"]
    told = {
        "trainer": type(trainer).__mro__[2].__name__,
        "settings": {key: getattr(trainer.args, key) for key in SETTINGS if hasattr(trainer.args, key)},
        "loss": short(loss.item()),
        "metrics": {ours: short(seen[theirs][0]) for theirs, ours in METRICS.items() if len(seen[theirs]) == 1},
    }
    arrays = {"advantages": batch["advantages"].numpy(), "gradient": logps.grad.numpy()}
    return told, {f"{name}/{key}": np.float32(value) for key, value in arrays.items()}


def short(value: float) -> float:
    return float(f"{value:.9g}")


def cases() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Name → function, draw, and the settings in which the case differs from `FIXED` and `GRPO`."""
    crossed = {
        f"{loss}/{variant}": {"loss_type": loss} | extra | change
        for loss, extra in LOSSES.items()
        for variant, change in VARIANTS.items()
    }
    far = crossed | SPECIAL | {name: chosen | CAP for name, chosen in CORRECTED.items()}
    rows = {name: (grpo, "far", chosen) for name, chosen in far.items()}
    rows |= {name: (grpo, "near", chosen) for name, chosen in NEAR.items()}
    return rows | {"rloo/plain": (rloo, "far", {"beta": 0.0}), "rloo/kl": (rloo, "far", {"beta": 0.05})}


def versions() -> dict[str, str]:
    made_with = {"trl": trl, "transformers": transformers, "torch": torch, "numpy": np}
    return {name: module.__version__.split("+")[0] for name, module in made_with.items()}


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    drawn = {name: draw(**how) for name, how in DRAWS.items()}
    arrays = {f"{name}/{key}": value for name, kept in drawn.items() for key, value in kept.items()}
    told = {}
    for name, (make, place, chosen) in cases().items():
        told[name], results = make(name, chosen, drawn[place])
        told[name] |= {"draw": place}
        arrays |= results
    facts = {"made_with": versions(), "draws": DRAWS, "prompts": P, "generations": G, "cases": told}
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "trl.json").write_text(json.dumps(facts, indent=1) + "\n")
    np.savez_compressed(GOLDEN / "trl.npz", **arrays)
    print(f"{len(told)} cases, {sum((GOLDEN / f).stat().st_size for f in ('trl.json', 'trl.npz')) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
