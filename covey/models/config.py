"""`ModelConfig`, the architecture of a decoder, with one field for each way in which the families differ."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies.

    `linear` divides all of them by `factor` (Chen et al., 2023); `llama3` keeps the high frequencies and interpolates
    between `low_freq_factor` and `high_freq_factor` (Llama 3.1 release); `yarn` keeps the pairs that turn more than
    `beta_fast` times in `original_max_positions`, divides those that turn less than `beta_slow` times, and interpolates
    linearly between these pairs, whose numbers are made whole by `truncate` (Peng et al., 2023).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor on cosines and sines, so that scores have its square: 0.1 ln(factor) + 1 in the paper of YaRN."""


@dataclass(frozen=True)
class ModelConfig:
    """All settings of the forward pass. Widths count numbers, positions count tokens.

    The defaults are the plain Llama block (Touvron et al., 2023); other families change the switches from `activation`
    on.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    max_positions: int = 2048
    family: str = "llama"

    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    gated_mlp: bool = True
    """Compute the MLP as down(act(gate(x)) · up(x)); as down(act(up(x))) when False (nanochat)."""
    attention_bias: bool = False
    """Add biases to q, k and v (Qwen2.5)."""
    qk_norm: bool = False
    """Apply an RMS norm to each query and key head before the rotation (Qwen3, Gemma 3). nanochat applies it after the
    rotation, which is the same for a norm without scales: a rotation keeps lengths.
    """
    qk_norm_whole: bool = False
    """Apply the norm of queries and keys to all heads together, with a scale for each number (OLMo 2)."""
    norm_scales: bool = True
    """Give norms a learnt scale (nanochat's have none)."""
    embed_norm: bool = False
    """Apply a norm between the embedding and the first layer (nanochat)."""
    pre_norms: bool = True
    """Apply norms before attention and MLP (OLMo 2 does not)."""
    post_norms: bool = False
    """Apply norms after attention and MLP, before the residual sum (Gemma, OLMo 2)."""
    norm_offset: float = 0.0
    """Number added to every norm scale: 1 for Gemma."""
    embed_scale: float = 1.0
    """Factor on the embeddings: sqrt(hidden_size) for Gemma."""
    query_scale: float | None = None
    """Factor on the queries; None means head_dim ** -0.5."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer in tokens; None means full attention."""
    rope_backwards: bool = False
    """Rotate by negative angles (nanochat)."""
    rope_layers: tuple[bool, ...] | None = None
    """Whether each layer rotates queries and keys; None means all do (SmolLM3 leaves some out)."""
    local_rope_theta: float | None = None
    """RoPE base of the layers with a window (Gemma 3)."""
    local_rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies of the layers with a window (Gemma 3)."""

    rotary_dim: int | None = None
    """Number of elements of a head that are rotated, the first ones; None means all (Qwen3.5 rotates a quarter)."""
    attention_gate: bool = False
    """Multiply the output of attention by the sigmoid of a gate, which `q_proj` computes (Qwen3.5)."""
    mixers: tuple[str, ...] | None = None
    """Kind of the mixer of each layer, a name of `layer_kinds`; None means attention in all."""
    kind_settings: Any = None
    """Settings of the layer kinds of other packages: a frozen dataclass of the package."""

    def parts(self, layer: int) -> tuple[str, str]:
        """Return the kinds of the two parts of `layer`, mixer and feed-forward; see `layer_kinds`."""
        return "attention" if self.mixers is None else self.mixers[layer], "mlp"

    def rotates_otherwise(self, layer: int) -> bool:
        """Return True if `layer` does not rotate by `rope_theta`: it has the local base, or does not rotate at all."""
        if self.rope_layers is not None:
            return not self.rope_layers[layer]
        return self.local_rope_theta is not None and self.window(layer) is not None

    def window(self, layer: int) -> int | None:
        """Return the sliding window of `layer`, or None when it has full attention."""
        return self.windows[layer] if self.windows else None
