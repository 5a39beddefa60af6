"""Advantages by name. The choices of `grpo.advantage`, a table of docs/algorithms.md and the tests of the contract of
advantages follow from this table. The function of a name has the same name in `covey/losses/advantages.py`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple


class Advantage(NamedTuple):
    """An advantage.

    Attributes:
        formula: the formula, for docs/algorithms.md.
        whole_step: whether the advantages of a group depend on the rewards of other groups.
        needs_critic: whether it needs the values of a critic.
    """

    formula: str
    whole_step: bool = False
    needs_critic: bool = False


ADVANTAGES: Mapping[str, Advantage] = {
    "group_zscore": Advantage(r"$A_i = (R_i - \mathrm{mean}_g R) / (\mathrm{std}_g R + 10^{-4})$"),
    "batch_std": Advantage(
        r"$A_i = (R_i - \mathrm{mean}_g R) / (\mathrm{std}_{\mathrm{step}} R + 10^{-4})$ "
        "([2508.08221](https://arxiv.org/abs/2508.08221))",
        whole_step=True,
    ),
    "centred": Advantage(r"$A_i = R_i - \mathrm{mean}_g R$"),
    "leave_one_out": Advantage(r"$A_i = R_i - \frac{1}{G-1}\sum_{j \ne i} R_j$"),
    "gae": Advantage("see [PPO](ppo.md)", needs_critic=True),
}
"""Advantages by name."""

if TYPE_CHECKING:
    AdvantageName = str
else:
    AdvantageName = Literal[tuple(ADVANTAGES)]
