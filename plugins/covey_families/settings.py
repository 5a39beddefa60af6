"""Sizes of gated delta nets, and the kind of their layers; this module imports no JAX."""

from dataclasses import dataclass

from covey.models.config import ModelConfig
from covey.models.layer_kinds import LayerKind, Shapes


@dataclass(frozen=True)
class DeltaSettings:
    """Sizes of gated delta nets: numbers and widths of heads, and the number of tokens that the convolution sees. Each
    head of keys serves adjacent heads of values.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of all keys, and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim


def delta_shapes(c: ModelConfig) -> Shapes:
    """Return the parameters of a gated delta net."""
    s: DeltaSettings = c.kind_settings
    keys, values = s.widths
    channels = {"q": keys, "k": keys, "v": values}
    outputs = channels | {"z": values, "b": s.value_heads, "a": s.value_heads}
    kernels: Shapes = {f"{name}_proj.kernel": (c.hidden_size, width) for name, width in outputs.items()}
    convolutions: Shapes = {f"{name}_conv.weight": (width, 1, s.conv_width) for name, width in channels.items()}
    vectors: Shapes = dict.fromkeys(("a_log", "dt_bias"), (s.value_heads,))
    return {"norm.scale": (s.value_dim,), "o_proj.kernel": (values, c.hidden_size)} | kernels | convolutions | vectors


DELTA = LayerKind("delta", "covey_families.delta_net:DeltaNet", delta_shapes, has_state=True)
