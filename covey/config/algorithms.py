"""Settings of the section `grpo`: a policy-gradient algorithm as advantage × ratio × surrogate × aggregate × KL.

A `GRPOConfig` names a preset and overrides single settings of it; `algorithm_of` returns the result. The functions
behind the settings are in `losses.advantages` and `losses.policy`. This module does not import JAX.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Gt

from covey.config.advantages import ADVANTAGES, AdvantageName
from covey.config.base import (
    Config,
    Fraction,
    GroupSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Problem,
    UsedWhen,
    refuse_if,
    setting,
    unused_settings,
)

T = TypeVar("T")
OTHERWISE = "otherwise"
"""Key of a field's value where neither the config nor its preset sets it."""
AlgorithmName = Literal[
    "grpo", "dr_grpo", "bnpo", "dapo", "gspo", "gspo_token", "cispo", "rloo", "reinforce", "sapo", "ppo"
]
Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]
MoreThanOne = Annotated[float, Gt(1)]
if TYPE_CHECKING:
    FromPreset = Annotated[T, "from the preset"]
else:
    FromPreset = Annotated[T | None, "from the preset"]
"""Type of a setting that is None where the preset decides. Type checkers see it as it is in an `Algorithm`."""


def from_preset(default: T) -> T:
    """Return the field of a setting that a preset may set; its value is `default` where the preset does not."""
    field: Any = dataclasses.field(default=None, metadata={OTHERWISE: default})
    return field  # type: ignore[no-any-return]


class GRPOConfig(Config, section="grpo", on_resume="report"):
    """Algorithm: a preset (`PRESETS`), and the settings in which the run differs from it.

    A setting that is None has the preset's value; `algorithm_of` returns all of them. Formulas: docs/algorithms.md.
    """

    algorithm: AlgorithmName = setting("grpo", on_resume="refuse")
    """Preset: the settings of a published algorithm."""
    num_generations: GroupSize = setting(8, on_resume="refuse")
    """Number of samples for each prompt: the group size G."""
    num_iterations: PositiveInt = setting(1, on_resume="refuse")
    """Number of updates on each batch of rollouts: μ."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward function in the total; all 1 when not set. That of a reward model comes last. A function
    with weight 0 is logged only: it counts neither in the total nor in whether an answer was scored.
    """
    advantage: FromPreset[AdvantageName] = from_preset("group_zscore")
    """Rule that turns rewards into advantages; gae needs a critic."""
    credit: Literal["episode", "turn"] = "episode"
    """Reward of a turn in an environment: that of the whole episode, or of the turn and those after it, which is
    compared with what the group's other episodes got from the same turn on.
    """
    turn_gamma: Probability = 1.0
    """credit turn: factor of the rewards of each later turn."""
    ratio: FromPreset[Literal["token", "sequence", "sequence_token"]] = from_preset("token")
    """Importance ratio: of each token, of the whole answer (GSPO), or of the answer with the gradient of the token."""
    surrogate: FromPreset[Literal["clip", "dual_clip", "cispo", "reinforce", "sapo"]] = from_preset("clip")
    """Objective at each token, as a function of ratio and advantage."""
    aggregate: FromPreset[Literal["sequence_mean", "token_mean", "constant"]] = from_preset("sequence_mean")
    """Mean over answers of their token means, mean over all tokens of the step, or sum over answers × max_new_tokens.
    """
    epsilon: FromPreset[Fraction] = from_preset(0.2)
    """Clip range of the ratio below 1, and above 1 unless epsilon_high is set."""
    epsilon_high: PositiveFloat | None = None
    """Clip range of the ratio above 1."""
    delta: MoreThanOne | None = None
    """clip, dual_clip: upper bound of the ratio where it is not clipped (two-sided clip, INTELLECT-2); off when not
    set.
    """
    dual_clip: FromPreset[MoreThanOne] = from_preset(3.0)
    """dual_clip: c of Ye et al. (2020); for A < 0 the loss is at most c·|A|."""
    cap: FromPreset[PositiveFloat] = from_preset(5.0)
    """cispo: largest weight of a token."""
    sapo_positive: FromPreset[PositiveFloat] = from_preset(1.0)
    """sapo: temperature for A > 0."""
    sapo_negative: FromPreset[PositiveFloat] = from_preset(1.05)
    """sapo: temperature for A ≤ 0."""
    beta: FromPreset[NonNegativeFloat] = from_preset(0.0)
    """Weight of the KL to the reference; 0 needs no reference model."""
    kl: FromPreset[Literal["k1", "k2", "k3"]] = from_preset("k3")
    """Estimator of the KL (Schulman, 2020). k1 belongs in the reward: as a loss its expected gradient is 0."""
    kl_in: FromPreset[Literal["loss", "reward"]] = from_preset("loss")
    """Use the KL as a term of the loss, or subtract it from the reward."""
    kl_target: PositiveFloat | None = None
    """KL value toward which beta is adapted (Ziegler et al., 2019); off when not set."""
    kl_horizon: FromPreset[PositiveInt] = from_preset(10_000)
    """Number of samples over which an adapted beta moves."""
    entropy_bonus: FromPreset[NonNegativeFloat] = from_preset(0.0)
    """Weight of the entropy, which is added to the objective."""
    correction: FromPreset[Correction] = from_preset("none")
    """Treatment of tokens where trainer and sampler disagree: weigh them by exp(logp_trainer − logp_sampler), limited
    to correction_cap (truncate) or left out beyond it (mask), for each token, for each answer, or for each answer by
    the geometric mean of its tokens.
    """
    correction_cap: FromPreset[PositiveFloat] = from_preset(2.0)
    """Largest weight of the correction."""
    correction_floor: NonNegativeFloat | None = None
    """Smallest weight of the correction; smaller ones are raised to it (truncate) or left out (mask). When not set it
    is 1 / correction_cap for a mask, and 0 for truncation.
    """
    mask_truncated: FromPreset[bool] = from_preset(False)
    """Leave completions that a limit of tokens or of time cut out of the loss."""
    overlong_buffer: FromPreset[NonNegativeFloat] = from_preset(0.0)
    """Number of tokens before max_new_tokens in which the reward falls linearly (DAPO); below 1 it is a fraction of
    max_new_tokens, 0 is off.
    """
    overlong_penalty: FromPreset[NonNegativeFloat] = from_preset(1.0)
    """Amount by which the reward has fallen at max_new_tokens."""
    max_sampling_rounds: FromPreset[PositiveInt] = from_preset(1)
    """Largest number of prompt batches sampled in a step to replace groups of equal rewards (DAPO); 1 replaces none."""
    reference: Literal["start", "base"] = "start"
    """Frozen policy of the KL: the model as the run begins, with a loaded adapter, or the base under the adapters."""
    reference_every_n_updates: NonNegativeInt = 0
    """Number of updates after which the reference moves toward the actor (TR-DPO); 0 keeps it."""
    reference_mixing: Fraction = 0.6
    """Weight α of such a move: reference ← α·actor + (1 − α)·reference."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for settings that contradict each other, or that the algorithm does not use."""
        a = algorithm_of(self)
        return [
            *unused_settings(self, USED_WHEN, f"{a.name} with these settings", a),
            *refuse_if(
                self.num_generations < 2 and not a.needs_critic,
                "num_generations",
                f"grpo.num_generations is {self.num_generations}: an answer needs others to be compared with",
                "at least 2; one answer a prompt is for grpo.algorithm ppo",
            ),
            *refuse_if(
                self.num_generations < 2 and a.max_sampling_rounds > 1,
                "max_sampling_rounds",
                "grpo.max_sampling_rounds replaces groups of equal rewards, and groups of one are always equal",
                "1, or grpo.num_generations of at least 2",
            ),
            *refuse_if(
                a.beta and a.kl == "k1" and a.kl_in == "loss",
                "kl",
                "grpo.kl is k1 in the loss, where its expected gradient is 0: it would not hold the policy back",
                "k2 or k3, or grpo.kl_in reward",
            ),
            *refuse_if(
                self.num_iterations > 1 and a.surrogate == "reinforce",
                "num_iterations",
                f"grpo.num_iterations is {self.num_iterations}, and grpo.surrogate reinforce has no ratio: later "
                "updates on a batch would take the answers for those of a policy that did not sample them",
                f"1, or an algorithm with a ratio: {', '.join(WITH_RATIO)}",
            ),
            *refuse_if(
                a.correction != "none" and a.smallest_correction > a.correction_cap,
                "correction_floor",
                f"grpo.correction_floor is {a.smallest_correction:g}, and grpo.correction_cap {a.correction_cap:g}",
                "a floor that is not above the cap, such as 0.5 beside 5; without one a mask needs a cap of at least 1",
            ),
            *refuse_if(
                self.reward_weights is not None and not any(self.reward_weights),
                "reward_weights",
                "grpo.reward_weights are all 0: no answer would be scored",
                "one that is not 0",
            ),
        ]


class PPOConfig(GRPOConfig):
    """GRPO's settings with PPO's defaults: the preset `ppo`, one sample a prompt."""

    algorithm: AlgorithmName = setting("ppo", on_resume="refuse")
    num_generations: GroupSize = setting(1, on_resume="refuse")
    gamma: FromPreset[Probability] = from_preset(1.0)
    """gae: discount."""
    gae_lambda: FromPreset[Probability] = from_preset(0.95)
    """gae: λ."""
    value_clip: FromPreset[NonNegativeFloat] = from_preset(0.2)
    """ppo: largest distance of a value from that of the rollout within which its loss still falls; 0 is off."""
    whiten: FromPreset[bool] = from_preset(False)
    """gae: shift and scale the advantages of the step to mean 0 and variance 1."""


class Algorithm(PPOConfig):
    """Complete settings of the loss and the advantages: a `GRPOConfig` without any None that its preset decides."""

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.algorithm

    @property
    def high(self) -> float:
        """Clip range above 1: `epsilon_high`, or `epsilon` if that is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def smallest_correction(self) -> float:
        """Smallest weight of the correction: `correction_floor`, or what it is where that is not set."""
        otherwise = 1 / self.correction_cap if self.correction.endswith("mask") else 0.0
        return otherwise if self.correction_floor is None else self.correction_floor

    @cached_property
    def needs_critic(self) -> bool:
        """Whether advantages are computed from a critic's values."""
        return ADVANTAGES[self.advantage].needs_critic

    @cached_property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model are computed, for the KL in the loss or in the reward."""
        return self.beta > 0

    @cached_property
    def needs_old_logps(self) -> bool:
        """Whether log-probs before the first update are computed; a single update computes its own."""
        return self.num_iterations > 1

    @cached_property
    def needs_whole_step(self) -> bool:
        """Whether advantages depend on other groups, so that all completions of the step must be sampled first."""
        return ADVANTAGES[self.advantage].whole_step or self.whiten or self.max_sampling_rounds > 1

    def contradictions(self) -> Iterable[Problem]:
        """Return nothing: resolved settings include settings that the algorithm does not use."""
        return ()


class Preset(NamedTuple):
    """A published algorithm. See `docs/algorithms.md`.

    Attributes:
        paper: the publication.
        deviations: differences from the paper; empty if there are none.
        when: use cases.
        settings: values of `GRPOConfig` and `PPOConfig` that differ from the defaults.
    """

    paper: str
    deviations: str
    when: str
    settings: Mapping[str, Any]


def algorithm_of(config: GRPOConfig) -> Algorithm:
    """Return the preset that `config` names, with the settings that `config` overrides."""
    fields = dataclasses.fields(Algorithm)
    values = {f.name: f.metadata.get(OTHERWISE, f.default) for f in fields}
    overrides = {name: value for name, value in vars(config).items() if name in values and value is not None}
    return Algorithm.from_checked({**values, **PRESETS[config.algorithm].settings, **overrides})


def config_for(config: GRPOConfig) -> GRPOConfig:
    """Return `config` as the class that has the settings of its algorithm: `PPOConfig` if that has a critic.

    Settings of a critic keep `PPOConfig` without a critic too, so that they are refused.
    """
    of_critic = [getattr(config, name, None) for name in PPOConfig.kinds.keys() - GRPOConfig.kinds.keys()]
    are_set = any(value is not None and value is not False for value in of_critic)
    cls = PPOConfig if are_set or algorithm_of(config).needs_critic else GRPOConfig
    if isinstance(config, PPOConfig) == (cls is PPOConfig):
        return config
    return cls.from_checked({name: value for name, value in vars(config).items() if name in cls.kinds})


def with_correction(config: GRPOConfig, off_policy_steps: int) -> GRPOConfig:
    """Return `config` with the correction for samples of earlier weights, token_truncate, if it names none."""
    if not off_policy_steps or config.correction is not None:
        return config
    return dataclasses.replace(config, correction="token_truncate")


def off_policy_problems(off_policy_steps: int, config: GRPOConfig, *, total_steps: int | None = None) -> list[Problem]:
    """Return the problems of settings that cannot train on samples of earlier steps."""
    key = "training.off_policy_steps"
    text = f"{key} is {off_policy_steps}, and "
    problems = [
        *refuse_if(
            config.num_iterations > 1,
            key,
            f"{text}grpo.num_iterations is {config.num_iterations}: several updates on a batch need the last samples",
            "0, or grpo.num_iterations 1",
        ),
        *refuse_if(
            algorithm_of(config).needs_critic,
            key,
            f"{text}{config.algorithm} has a critic, which learns the values of the last weights",
            "0, or an algorithm without a critic",
        ),
        *refuse_if(
            total_steps is not None and off_policy_steps >= total_steps,
            key,
            f"{text}the run has {total_steps} steps: all would train on samples of the initial weights",
            "fewer than its steps; 1 to 4 are usual",
        ),
    ]
    return problems if off_policy_steps else []


USED_WHEN: tuple[UsedWhen, ...] = (
    UsedWhen(("credit",), lambda a: not a.needs_critic, "another grpo.advantage than gae, which credits each token"),
    UsedWhen(("turn_gamma",), lambda a: a.credit == "turn", "grpo.credit turn"),
    UsedWhen(("ratio",), lambda a: a.surrogate != "reinforce", "a grpo.surrogate with a ratio"),
    UsedWhen(
        ("epsilon", "epsilon_high", "delta"),
        lambda a: a.surrogate in ("clip", "dual_clip"),
        "grpo.surrogate clip or dual_clip",
    ),
    UsedWhen(("dual_clip",), lambda a: a.surrogate == "dual_clip", "grpo.surrogate dual_clip"),
    UsedWhen(("cap",), lambda a: a.surrogate == "cispo", "grpo.surrogate cispo"),
    UsedWhen(("sapo_positive", "sapo_negative"), lambda a: a.surrogate == "sapo", "grpo.surrogate sapo"),
    UsedWhen(
        ("kl", "kl_in", "kl_target", "reference", "reference_every_n_updates"),
        lambda a: a.needs_reference,
        "a grpo.beta above 0 to begin with",
    ),
    UsedWhen(("kl_horizon",), lambda a: a.kl_target is not None, "a grpo.kl_target"),
    UsedWhen(
        ("reference_mixing",), lambda a: a.reference_every_n_updates > 0, "a grpo.reference_every_n_updates above 0"
    ),
    UsedWhen(("correction_cap", "correction_floor"), lambda a: a.correction != "none", "a grpo.correction"),
    UsedWhen(("overlong_penalty",), lambda a: a.overlong_buffer > 0, "a grpo.overlong_buffer above 0"),
    UsedWhen(("gamma", "gae_lambda", "value_clip", "whiten"), lambda a: a.needs_critic, "grpo.advantage gae"),
)
"""Settings that some algorithms do not read, each with the `Algorithm` that does. All others are always read."""

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

WITH_RATIO = [name for name, preset in PRESETS.items() if preset.settings.get("surrogate") != "reinforce"]
"""Names of the presets with a ratio of policies in the loss."""
