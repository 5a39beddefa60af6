"""Policy-gradient algorithms that have a name, as overrides of the defaults of `algorithms.GRPOConfig`.

This module does not import JAX.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A published algorithm. See `docs/algorithms.md`.

    Attributes:
        paper: the publication.
        deviations: differences from the paper; empty if there are none.
        when: use cases.
        settings: those settings of `GRPOConfig` and `PPOConfig` whose value is not the default.
    """

    paper: str
    deviations: str
    when: str
    settings: Mapping[str, Any]


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
        deviations="std with ddof 1 and ε 1e-4 (as TRL and Tunix); a group of equal rewards gives exactly 0",
        when="the default: any verifiable reward",
        settings={"beta": 0.04},
    ),
    "dr_grpo": Preset(
        paper="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
        deviations="",
        when="completions grow longer without improving; groups whose standard deviation is not informative",
        settings={"advantage": "centred", "aggregate": "constant"},
    ),
    "bnpo": Preset(
        paper="Xiao et al. 2025, BNPO, arXiv:2506.02864; the token-mean form that TRL calls bnpo",
        deviations="advantage over the group, not the Beta normalisation of the paper (as TRL); one denominator for "
        "the whole step",
        when="the aggregate of dapo without its other parts",
        settings={"aggregate": "token_mean"},
    ),
    "dapo": Preset(
        paper="Yu et al. 2025, DAPO, arXiv:2503.14476",
        deviations="a step that is not full when the sampling budget is used up is filled with tied groups",
        when="long reasoning; many prompts that are always or never solved",
        settings={"aggregate": "token_mean", "epsilon_high": 0.28, "max_sampling_rounds": 4, "overlong_buffer": 0.2},
    ),
    "gspo": Preset(
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        deviations="",
        when="several updates per batch on long completions; mixture-of-experts models",
        settings={"ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo_token": Preset(
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, section 4.3",
        deviations="",
        when="as gspo, with an advantage that differs within a completion",
        settings={"ratio": "sequence_token", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": Preset(
        paper="MiniMax 2025, MiniMax-M1, arXiv:2506.13585; the cap of Khatri et al. 2025, ScaleRL, arXiv:2510.13786",
        deviations="the cap on the ratio is a separate setting (TRL calls it epsilon_high); MiniMax also uses "
        "dynamic sampling and overlong shaping of dapo",
        when="rare but decisive tokens should keep their gradient however far the ratio moves",
        settings={"surrogate": "cispo", "aggregate": "token_mean", "cap": 5.0},
    ),
    "rloo": Preset(
        paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
        deviations="the KL penalty is the sum of k1 over the completion, with the log-probs of the sampling "
        "policy; sums of log-probs are divided by max_new_tokens; updates after the first on a batch are clipped by "
        "token",
        when="a plain unbiased policy gradient with the KL inside the reward",
        settings={"advantage": "leave_one_out", "aggregate": "constant", "beta": 0.05, "kl": "k1", "kl_in": "reward"},
    ),
    "reinforce": Preset(
        paper="Williams 1992; the form of nanochat's reinforcement learning",
        deviations="one token denominator for the whole step, not one per pass",
        when="strictly on-policy training: one update per batch",
        settings={"advantage": "centred", "surrogate": "reinforce", "aggregate": "token_mean"},
    ),
    "sapo": Preset(
        paper="Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347",
        deviations="",
        when="several updates per batch, with a smooth gate instead of a hard clip",
        settings={"surrogate": "sapo"},
    ),
    "ppo": Preset(
        paper="Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155",
        deviations="the critic has its own optimizer; values are clipped around those of the rollout",
        when="one completion per prompt; credit within a completion; a critic fits in memory",
        settings={
            "advantage": "gae",
            "aggregate": "token_mean",
            "beta": 0.05,
            "kl": "k1",
            "kl_in": "reward",
            "whiten": True,
        },
    ),
}
"""Presets by name."""
