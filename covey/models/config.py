"""`ModelConfig`: the architecture of a decoder, one field for each way in which the families differ."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies.

    `linear` divides all of them by `factor` (Chen et al., 2023); `llama3` leaves the fast ones alone and blends
    between `low_freq_factor` and `high_freq_factor` (Llama 3.1 release).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass needs to know. Widths in units of numbers, positions in tokens.

    The defaults are the plain Llama block (Touvron et al., 2023); the switches below them are what other families
    change.
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
    """down(act(gate(x)) · up(x)); down(act(up(x))) otherwise (nanochat)."""
    attention_bias: bool = False
    """Biases on q, k and v (Qwen2.5)."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation (Qwen3, Gemma 3). nanochat's comes after it, which is
    the same for a norm without scales: a rotation keeps lengths.
    """
    norm_scales: bool = True
    """Norms have a learnt scale (nanochat's have none)."""
    embed_norm: bool = False
    """A norm between the embedding and the first layer (nanochat)."""
    post_norms: bool = False
    """Norms after attention and MLP, before the residual sum (Gemma)."""
    norm_offset: float = 0.0
    """Added to every norm scale: 1 for Gemma."""
    embed_scale: float = 1.0
    """Factor on the embeddings: sqrt(hidden_size) for Gemma."""
    query_scale: float | None = None
    """Factor on the queries; head_dim ** -0.5 when not set."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer in tokens, None for full attention."""
    rope_backwards: bool = False
    """Heads turn the other way with growing position (nanochat)."""
    local_rope_theta: float | None = None
    """RoPE base of the layers with a window (Gemma 3)."""
    local_rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies of the layers with a window (Gemma 3)."""

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer`, None when it sees everything before it."""
        return self.windows[layer] if self.windows else None
