"""Requests of OpenAI's API, and of the extensions of vLLM that have a meaning here."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from covey.config.schema import SamplingConfig
from covey_serve.body import Form
from covey_serve.errors import ApiError

MAX_TOP = 20
"""Largest number of most likely tokens of an answer."""
MAX_CHOICES = 128
"""Largest number of choices of an answer."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "best_of": (1,), "suffix": ("",), "response_format": ({"type": "text"},), "structured_outputs": (),
    "min_tokens": (0,), "ignore_eos": (False,), "skip_special_tokens": (True,), "allowed_token_ids": (),
    "bad_words": ([],), "include_stop_str_in_output": (False,), "prompt_logprobs": (), "chat_template": (),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "functions": (), "function_call": (),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "web_search_options": (),
    "parallel_tool_calls": (True,), "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip
"""Fields that this server does not have, each with the values that ask for nothing; null is one for all."""
UNUSED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "session_id", "cache_salt")
"""Fields that change no answer."""

Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Form):
    """What a stream has besides its text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Form):
    """Fields that chat and completions have in common."""

    model: str | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = 0
    min_p: Probability | None = 0.0
    seed: StrictInt | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = False
    return_tokens_as_token_ids: StrictBool | None = False

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Leave out fields that ask for nothing; refuse those that ask for what the server does not have."""
        for name, values in WITHOUT_EFFECT.items():
            if (given := value.get(name)) is not None and given not in values:
                raise ApiError(f"{name} is {given!r:.80}, and this server does not have it", param=name)
        return {name: x for name, x in value.items() if name not in WITHOUT_EFFECT and name not in UNUSED}

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def sampling_params(self) -> SamplingConfig:
        """The settings of the distribution."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = max(self.top_k or 0, 0)
        return SamplingConfig(temperature=temperature, top_p=self.top_p or 1.0, top_k=top_k, min_p=self.min_p or 0.0)

    @property
    def top(self) -> int | None:
        """Number of most likely tokens at each place of the answer; None without log-probs."""
        raise NotImplementedError


class CompletionForm(Generation):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: StrictBool | None = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP)] | None = None
    add_special_tokens: StrictBool | None = True

    @property
    def top(self) -> int | None:
        """Number of most likely tokens at each place."""
        return self.logprobs


class FunctionForm(Form):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolForm(Form):
    """A tool."""

    type: Literal["function"]
    function: FunctionForm


class Offer(Form):
    """Tools that are offered to the model, and how its turn begins."""

    tools: Annotated[list[ToolForm], Field(max_length=256)] | None = None
    add_generation_prompt: StrictBool | None = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model may call."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools or ()]


class ChatForm(Generation, Offer):
    """`POST /v1/chat/completions`."""

    echo: ClassVar[bool] = False
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolForm | None = None

    @property
    def top(self) -> int | None:
        """Number of most likely tokens at each place."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model may call."""
        if not isinstance(self.tool_choice, ToolForm):
            return [] if self.tool_choice == "none" else super().offered
        name = self.tool_choice.function.name
        if not (chosen := [schema for schema in super().offered if schema["function"]["name"] == name]):
            raise ApiError(f"tool_choice names {name!r:.80}, which is none of the tools", param="tool_choice")
        return chosen


class TokenizeForm(Offer):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = False


class DetokenizeForm(Form):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
