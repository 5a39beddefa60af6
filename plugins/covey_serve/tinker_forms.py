"""Requests of Tinker's training API that are JSON."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictInt

from covey_serve.body import Form
from covey_serve.forms import StopText, TokenId
from covey_serve.states import check_path

Count = Annotated[StrictInt, Field(ge=0, lt=2**31)]
SeqId = Annotated[StrictInt, Field(ge=1, lt=2**31)]
"""Place of a request among the requests to a model."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of a state: one part of a path, which cannot leave its folder."""
StatePath = Annotated[str, AfterValidator(check_path)]
NumLikely = Annotated[StrictInt, Field(ge=0, le=20)]
"""Number of most likely tokens."""


class Request(Form):
    """A request. Its type is also the end of its path."""

    type: str = ""


class Loose(Request):
    """A request of which only these fields matter."""

    model_config = ConfigDict(extra="ignore")
    model_id: str = ""
    tinker_path: StatePath | None = None


class Lora(Form):
    """Settings of new adapters; rank 0 trains all weights in their place."""

    rank: Annotated[StrictInt, Field(ge=0, le=256)]
    seed: StrictInt | None = None
    train_unembed: StrictBool = True
    train_mlp: Literal[True] = True
    train_attn: Literal[True] = True


class Optimizer(Form):
    """Family of the optimizer."""

    type: Literal["adamw"] = "adamw"


class NewModel(Request):
    """What makes a model: `create_model`, or `load_weights` without a model."""

    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None


class CreateModel(NewModel):
    """`create_model`."""

    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: Lora = Lora(rank=0)


class Load(NewModel):
    """`load_weights`: into a model, or as a new one."""

    path: StatePath
    optimizer: StrictBool
    model_id: str | None = None
    seq_id: SeqId | None = None


class OfModel(Request):
    """A request to a model, in its place among the requests to it."""

    model_id: str
    seq_id: SeqId | None = None


class Adam(Form):
    """AdamW of one step."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfModel):
    """`optim_step`; its parameters have the form of `Adam`."""

    adam_params: Any


class Save(OfModel):
    """`save_weights`, `save_weights_for_sampler`."""

    path: Name | None = None
    ttl_seconds: Count | None = None
    overwrite: StrictBool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot"] = "snapshot"


class SamplingSession(Request):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: StatePath | None = None


class TextChunk(Form):
    """A piece of a prompt."""

    tokens: list[TokenId]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Form):
    """A prompt."""

    chunks: list[TextChunk]


class Sampling(Form):
    """How to sample."""

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    seed: StrictInt | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | list[TokenId] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Request):
    """`asample`."""

    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    base_model: str | None = None
    model_path: StatePath | None = None
    sampling_session_id: str | None = None
    seq_id: Count | None = None
    prompt_logprobs: StrictBool | None = None
    topk_prompt_logprobs: NumLikely = 0
    topk_sample_logprobs: NumLikely = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class LoadAdapter(Form):
    """`load_lora_adapter`, with vLLM's names; the path is that of a saved state."""

    lora_name: Name
    lora_path: StatePath
    load_inplace: StrictBool = False


class UnloadAdapter(Form):
    """`unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


class Retrieve(Form):
    """`retrieve_future`."""

    request_id: str
    allow_metadata_only: StrictBool = False
