"""Settings of the distribution that tokens are drawn from: in rollouts, evaluations and conversations."""

from covey.config.base import Config, Fraction, NonNegativeFloat, NonNegativeInt, Probability


class SamplingConfig(Config):
    """Temperature and truncation of the next-token distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Fraction = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to at least this; 1 is off."""
    top_k: NonNegativeInt = 0
    """Number of most likely tokens to keep; 0 is off."""
    min_p: Probability = 0.0
    """Keep tokens that have at least this fraction of the probability of the most likely one (Nguyen et al., 2024,
    arXiv:2407.01082); 0 is off.
    """
