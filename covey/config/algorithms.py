"""Policy-gradient algorithms as combinations of advantage × ratio × surrogate × aggregate × KL.

`PRESETS` holds the combinations that have a name; a `GRPOConfig` names one and overrides single settings, and
`algorithm_of` returns the result. The functions behind the settings are in `losses.advantages` and `losses.policy`.
This module does not import JAX.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from covey.config.schema import GRPOConfig
from covey.errors import RecipeError, nearest


@dataclass(frozen=True)
class Algorithm:
    """Complete settings of the loss and the advantages. See `docs/algorithms.md`.

    The settings are those of `GRPOConfig`, whose docstrings describe each of them.

    Attributes:
        paper: the publication.
        deviations: differences from the paper; empty if there are none.
        when: use cases.
    """

    paper: str
    deviations: str
    when: str
    name: str = "custom"
    advantage: str = "group_zscore"
    ratio: str = "token"
    surrogate: str = "clip"
    aggregate: str = "sequence_mean"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dual_clip: float = 3.0
    cap: float = 5.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    beta: float = 0.0
    kl: str = "k3"
    kl_in: str = "loss"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    entropy_bonus: float = 0.0
    correction: str = "none"
    correction_cap: float = 2.0
    mask_truncated: bool = False
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0
    max_sampling_rounds: int = 1
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    whiten: bool = False

    @property
    def high(self) -> float:
        """Clip range above 1: `epsilon_high`, or `epsilon` if that is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_critic(self) -> bool:
        """Whether advantages are computed from a critic's values."""
        return self.advantage == "gae"

    @property
    def needs_whole_step(self) -> bool:
        """Whether advantages depend on other groups, so that all completions of the step must be sampled first."""
        return self.advantage == "batch_std" or self.whiten or self.max_sampling_rounds > 1


def algorithm_of(config: GRPOConfig) -> Algorithm:
    """Return the preset that `config` names, with the settings that `config` overrides.

    Raises:
        RecipeError: there is no preset with that name.
    """
    if config.algorithm not in PRESETS:
        raise RecipeError(
            f"there is no algorithm {config.algorithm!r}",
            fix=nearest(config.algorithm, PRESETS),
            where="grpo.algorithm",
        )
    shared = {f.name for f in fields(Algorithm)} & {f.name for f in fields(GRPOConfig)}
    moved = {name: getattr(config, name) for name in shared if getattr(config, name) is not None}
    return replace(PRESETS[config.algorithm], name=config.algorithm, **moved)


Problem = tuple[str, str, str]
"""Name of a setting, description of its problem, and values that would be valid."""


def problems(config: GRPOConfig) -> Iterator[Problem]:
    """Yield problems of settings that contradict each other, or that the algorithm of `config` does not use.

    Raises:
        RecipeError: the algorithm does not exist.
    """
    a = algorithm_of(config)
    for names, used, by in _uses(config, a):
        for name in names:
            if not used and getattr(config, name) is not None:
                what = f"grpo.{name} is set, and {a.name} with these settings has no use for it"
                yield name, what, f"null, or {by}"
    if config.num_generations < 2 and not a.has_critic:
        what = f"grpo.num_generations is {config.num_generations}: an answer needs others to be compared with"
        yield "num_generations", what, "at least 2; one answer a prompt is for grpo.algorithm ppo"
    if config.num_generations < 2 and a.max_sampling_rounds > 1:
        what = "grpo.max_sampling_rounds replaces groups of equal rewards, and groups of one are always equal"
        yield "max_sampling_rounds", what, "1, or grpo.num_generations of at least 2"
    if a.beta and a.kl == "k1" and a.kl_in == "loss":
        what = "grpo.kl is k1 in the loss, where its expected gradient is 0: it would not hold the policy back"
        yield "kl", what, "k2 or k3, or grpo.kl_in reward"
    if config.num_iterations > 1 and a.surrogate == "reinforce":
        yield _updates_without_a_ratio(config)
    if config.reward_weights is not None and not any(config.reward_weights):
        what = "grpo.reward_weights are all 0: no answer would be scored"
        yield "reward_weights", what, "one that is not 0"
    if config.reference != "start" and not a.beta:
        what = f"grpo.reference is {config.reference}, a reference that nothing uses, for grpo.beta is 0"
        yield "reference", what, "start, or a grpo.beta above 0"
    if config.reference_every_n_updates and not a.beta:
        what = "grpo.reference_every_n_updates moves a reference that nothing uses, for grpo.beta is 0"
        yield "reference_every_n_updates", what, "0, or a grpo.beta above 0"


def _updates_without_a_ratio(config: GRPOConfig) -> Problem:
    what = f"grpo.num_iterations is {config.num_iterations}, and grpo.surrogate reinforce has no ratio: later updates "
    what += "on a batch would take the answers for those of a policy that did not sample them"
    with_ratio = ", ".join(name for name, preset in PRESETS.items() if preset.surrogate != "reinforce")
    return "num_iterations", what, f"1, or an algorithm with a ratio: {with_ratio}"


def _uses(config: GRPOConfig, a: Algorithm) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield names of settings, whether `a` uses them, and the setting that would make it use them."""
    yield ("ratio",), a.surrogate != "reinforce", "a grpo.surrogate with a ratio"
    yield ("epsilon", "epsilon_high"), a.surrogate in ("clip", "dual_clip"), "grpo.surrogate clip or dual_clip"
    yield ("delta",), a.surrogate in ("clip", "dual_clip"), "grpo.surrogate clip or dual_clip"
    yield ("dual_clip",), a.surrogate == "dual_clip", "grpo.surrogate dual_clip"
    yield ("cap",), a.surrogate == "cispo", "grpo.surrogate cispo"
    yield ("sapo_positive", "sapo_negative"), a.surrogate == "sapo", "grpo.surrogate sapo"
    yield ("kl_target",), a.beta > 0, "a grpo.beta above 0 to begin with"
    yield ("kl_horizon",), a.kl_target is not None, "a grpo.kl_target"
    yield ("correction_cap",), a.correction != "none", "a grpo.correction"
    yield ("overlong_penalty",), a.overlong_buffer > 0, "a grpo.overlong_buffer above 0"
    yield ("gamma", "gae_lambda", "value_clip"), a.has_critic, "grpo.advantage gae"
    yield ("whiten",), a.has_critic or not config.whiten, "grpo.advantage gae"


PRESETS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
        deviations="std with ddof 1 and ε 1e-4 (as TRL and Tunix); a group of equal rewards gives exactly 0",
        when="the default: any verifiable reward",
        beta=0.04,
    ),
    "dr_grpo": Algorithm(
        paper="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
        deviations="",
        when="completions grow longer without improving; groups whose standard deviation is not informative",
        advantage="centred",
        aggregate="constant",
    ),
    "bnpo": Algorithm(
        paper="Xiao et al. 2025, BNPO, arXiv:2506.02864; the token-mean form that TRL calls bnpo",
        deviations="advantage over the group, not the Beta normalisation of the paper (as TRL); one denominator for "
        "the whole step",
        when="the aggregate of dapo without its other parts",
        aggregate="token_mean",
    ),
    "dapo": Algorithm(
        paper="Yu et al. 2025, DAPO, arXiv:2503.14476",
        deviations="a step that is not full when the sampling budget is used up is filled with tied groups",
        when="long reasoning; many prompts that are always or never solved",
        aggregate="token_mean",
        epsilon_high=0.28,
        max_sampling_rounds=4,
        overlong_buffer=0.2,
    ),
    "gspo": Algorithm(
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        deviations="",
        when="several updates per batch on long completions; mixture-of-experts models",
        ratio="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "gspo_token": Algorithm(
        paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, section 4.3",
        deviations="",
        when="as gspo, with an advantage that differs within a completion",
        ratio="sequence_token",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "cispo": Algorithm(
        paper="MiniMax 2025, MiniMax-M1, arXiv:2506.13585; the cap of Khatri et al. 2025, ScaleRL, arXiv:2510.13786",
        deviations="the cap on the ratio is a separate setting (TRL calls it epsilon_high); MiniMax also uses "
        "dynamic sampling and overlong shaping of dapo",
        when="rare but decisive tokens should keep their gradient however far the ratio moves",
        surrogate="cispo",
        aggregate="token_mean",
        cap=5.0,
    ),
    "rloo": Algorithm(
        paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
        deviations="the KL penalty is the sum of k1 over the completion, with the log-probs of the sampling "
        "policy; sums of log-probs are divided by max_new_tokens; updates after the first on a batch are clipped by "
        "token",
        when="a plain unbiased policy gradient with the KL inside the reward",
        advantage="leave_one_out",
        aggregate="constant",
        beta=0.05,
        kl="k1",
        kl_in="reward",
    ),
    "reinforce": Algorithm(
        paper="Williams 1992; the form of nanochat's reinforcement learning",
        deviations="one token denominator for the whole step, not one per pass",
        when="strictly on-policy training: one update per batch",
        advantage="centred",
        surrogate="reinforce",
        aggregate="token_mean",
    ),
    "sapo": Algorithm(
        paper="Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347",
        deviations="",
        when="several updates per batch, with a smooth gate instead of a hard clip",
        surrogate="sapo",
    ),
    "ppo": Algorithm(
        paper="Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al. 2022, arXiv:2203.02155",
        deviations="the critic has its own optimizer; values are clipped around those of the rollout",
        when="one completion per prompt; credit within a completion; a critic fits in memory",
        advantage="gae",
        aggregate="token_mean",
        beta=0.05,
        kl="k1",
        kl_in="reward",
        whiten=True,
    ),
}
"""Algorithms by name."""
