"""Tools: functions that the model calls in its turns, and the environment that answers.

    turn of the model ─▶ calls in it ─▶ arguments checked ─▶ functions called ─▶ their results as messages, in order

Calls are executed one after the other, but neighbouring ones of tools that are `independent` at once.

A turn without a call ends the episode. What the model writes is not trusted: a call of an unknown tool, with other
arguments than the function takes, or one that raises or takes too long gets an error message as its result, and is
counted as a failure.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from covey.config.schema import EnvsConfig
from covey.display import safe_format
from covey.errors import DataError, EpisodeError, RecipeError
from covey.text.tokenizer import Tokenizer
from covey.types import Message, Prompt
from covey_envs.calculator import calculate
from covey_envs.protocol import FaultError, Step, independent, invoke
from covey_envs.schemas import Schema, function_name, json_schema, parameters, type_hints
from covey_envs.tool_calls import Call, CallFormat, choose_format, lists_tools, read_json

MAX_CALLS = 16
"""Maximum number of calls of one turn that are executed."""
MAX_ERROR = 300
"""Maximum characters of an error message to the model."""
WORDS = {"True": True, "False": False, "None": None}
"""Values as chat templates write them where they write arguments as text."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class CallError(Exception):
    """A call that cannot be executed, or failed; its text is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: name of the function.
        function: the function, sync or async.
        schema: its JSON Schema, as chat templates take it.
        arguments: its arguments: each with what checks and converts a JSON value, and whether it must be given.
        has_own_limits: whether it ends by itself what takes too long, so that `envs.timeout` is not for it.
        independent: whether its result does not depend on other calls, nor theirs on it.
    """

    name: str
    function: Callable[..., Any]
    schema: Schema
    arguments: Mapping[str, tuple["TypeAdapter[Any]", bool]]
    has_own_limits: bool = False
    independent: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Make the tool of a function.

        Raises:
            RecipeError: the function has no JSON Schema.
        """
        hints = type_hints(function)
        arguments = {
            name: (TypeAdapter(hints[name], config=STRICT), parameter.default is inspect.Parameter.empty)
            for name, parameter in parameters(function).items()
        }
        own, alone = (getattr(function, name, False) is True for name in ("has_own_limits", "independent"))
        return cls(function_name(function), function, json_schema(function), arguments, own, alone)

    def check(self, arguments: Mapping[str, Any], *, as_text: bool = False) -> dict[str, Any]:
        """Check the arguments of a call, and convert them to what the function takes.

        Args:
            arguments: values by name.
            as_text: whether they are texts, which are read by their types.

        Raises:
            CallError: one is missing, unknown, or not of its type.
        """
        if unknown := [name for name in arguments if name not in self.arguments]:
            raise CallError(f"{self.name} has no argument {unknown[0]!r:.80}; it has: {', '.join(self.arguments)}")
        if missing := [name for name, (_, needed) in self.arguments.items() if needed and name not in arguments]:
            raise CallError(f"{self.name} needs the argument {missing[0]!r}")
        convert = self._convert_text if as_text else self._convert
        return {name: convert(name, value) for name, value in arguments.items()}

    def _convert_text(self, name: str, text: str) -> Any:
        """Convert a text to the type of the argument: as JSON if the type takes its value, else as it is."""
        with suppress(ValueError, CallError):
            value = WORDS[text] if text in WORDS else read_json(text)
            if not isinstance(value, str):
                return self._convert(name, value)
        return self._convert(name, text)

    def _convert(self, name: str, value: Any) -> Any:
        """Convert a JSON value to the type of the argument; numbers stay numbers, and texts texts."""
        try:
            return self.arguments[name][0].validate_json(json.dumps(value))
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise CallError(f"the argument {name!r} of {self.name} is wrong: {reason}") from None


@dataclass(frozen=True)
class Toolset:
    """The tools of a run, and the form in which the model calls them.

    Attributes:
        tools: tools by name.
        format: how the model writes calls.
        in_template: whether the chat template lists the tools; otherwise a system message does, and results are
            messages of the user.
        seconds: time limit of a call; None for none.
        max_characters: limit of the messages of one turn.
        places: one for each call that may be under way at once, of all episodes.
    """

    tools: Mapping[str, Tool]
    format: CallFormat
    in_template: bool
    seconds: float | None
    max_characters: int
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS), compare=False)

    @property
    def template_schemas(self) -> list[Schema]:
        """Schemas for the chat template; none if that does not list tools."""
        return [tool.schema for tool in self.tools.values()] if self.in_template else []

    def prompt(self, chat: Prompt) -> Prompt:
        """List the tools in the prompt's system message, unless the chat template lists them.

        Raises:
            EpisodeError: it is plain text.
        """
        if isinstance(chat, str):
            raise EpisodeError(
                "has tools, and the prompt of the row is plain text",
                want="chat messages",
                fix="set data.system, which makes them of text",
            )
        if self.in_template:
            return chat
        assert self.format.system is not None, "make_toolset() refuses a format without it"
        text = self.format.system([tool.schema for tool in self.tools.values()])
        first, rest = (chat[:1], chat[1:]) if chat and chat[0]["role"] == "system" else ([], chat)
        return [{"role": "system", "content": "\n\n".join([*(m["content"] for m in first), text])}, *rest]

    def encode_prompt(self, chat: Prompt, tokenizer: Tokenizer) -> np.ndarray:
        """Encode a row's prompt to int32 [n], with the list of the tools, as an episode begins.

        Raises:
            DataError: it is plain text, or as for `Tokenizer.encode_prompt`.
        """
        if isinstance(chat, str):
            raise DataError(
                "there are tools, and a prompt is plain text",
                want="chat messages, which can list the tools",
                fix="set data.system, which makes chat messages of text",
            )
        return tokenizer.encode_prompt(self.prompt(chat), tools=self.template_schemas)

    def messages(self, results: Sequence[tuple[Call, str]]) -> list[Message]:
        """Make the messages that tell the model the results of its calls."""
        limit = max(self.max_characters // max(len(results), 1) - 100, 0)
        texts = [text if len(text) <= limit else f"{text[:limit]} … (cut)" for _, text in results]
        if not self.in_template:
            return [{"role": "user", "content": "\n".join(f"<tool_response>\n{t}\n</tool_response>" for t in texts)}]
        return [
            {
                "role": "tool",
                "name": call.name if call.name in self.tools else "",
                "tool_call_id": call.id,
                "content": t,
            }
            for (call, _), t in zip(results, texts, strict=True)
        ]


def make_toolset(tools: Mapping[str, Tool], template: str | None, config: EnvsConfig) -> Toolset:
    """Make the toolset for a model with this chat template, with the limits of the settings.

    Raises:
        RecipeError: there is no template, its form of calls is not known, or it does not list tools and the form is
            one in which only a template can.
    """
    form, in_template = choose_format(config.tool_format, template), lists_tools(template or "")
    if not in_template and form.system is None:
        raise RecipeError(
            f"the model's chat template has no place for tools, which the form {form.name} needs",
            want="hermes, smollm or llama",
            where="envs.tool_format",
        )
    places = asyncio.Semaphore(config.concurrency)
    return Toolset(tools, form, in_template, config.timeout or None, config.max_characters, places)


class ToolEnvironment:
    """An environment that answers the model's tool calls. It gives no reward: reward functions score the episode."""

    def __init__(self, row: Mapping[str, Any], tools: Toolset):
        self._prompt: Prompt = row["prompt"]
        self._tools, self._count = tools, 0

    def reset(self) -> Prompt:
        """Return the row's prompt, with the tools in it if the chat template does not list them."""
        return self._tools.prompt(self._prompt)

    async def step(self, reply: str) -> Step:
        """Execute the calls of a turn and return the results in their order; a turn without a call is the last.

        Raises:
            EpisodeError: this machine cannot execute them, whatever they are.
        """
        calls = self._tools.format.parse(reply)
        if not calls:
            return Step(done=True)
        results, failures = [], 0
        for group in self._groups(calls[:MAX_CALLS]):
            for call, (failed, text) in zip(group, await self._execute_all(group), strict=True):
                failures += failed
                self._count += 1
                results.append((Call(call.name, id=call.id or f"call{self._count:05d}"), text))
        return Step(self._tools.messages(results), info={"tool_calls": len(results), "tool_failures": failures})

    def _groups(self, calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
        """Yield the calls that are executed at once: neighbouring ones of independent tools, or a single one."""
        for at_once, neighbours in groupby(calls, self._is_independent):
            group = list(neighbours)
            yield from [group] if at_once else ([call] for call in group)

    def _is_independent(self, call: Call) -> bool:
        """Tell whether a call may be executed at the same time as others, as a call without a tool may."""
        tool = self._tools.tools.get(call.name)
        return tool is None or tool.independent

    async def _execute_all(self, calls: Sequence[Call]) -> list[tuple[bool, str]]:
        """Execute calls at once; return their results in order. All have ended before the first fault is raised."""
        tasks = [asyncio.ensure_future(self._try(call)) for call in calls]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _try(self, call: Call) -> tuple[bool, str]:
        """Execute a call; return whether it failed, and the text of its result or the error."""
        try:
            return False, as_text(await self._execute(call))
        except CallError as error:
            return True, f"Error: {error}"[:MAX_ERROR]

    async def _execute(self, call: Call) -> Any:
        if call.error:
            raise CallError(call.error)
        if (tool := self._tools.tools.get(call.name)) is None:
            raise CallError(f"there is no tool {call.name!r:.80}; there are: {', '.join(self._tools.tools)}")
        arguments = tool.check(call.arguments, as_text=call.as_text)
        seconds = None if tool.has_own_limits else self._tools.seconds
        try:
            async with self._tools.places, asyncio.timeout(seconds) as limit:
                return await invoke(partial(tool.function, **arguments))
        except TimeoutError as error:
            raise CallError(
                f"{tool.name} took longer than {seconds:g} s" if limit.expired() else f"{tool.name}: {error}"
            ) from None
        except FaultError:
            raise
        except EpisodeError as error:
            raise CallError(f"{tool.name} {error.what}") from None
        except Exception as error:
            raise CallError(f"{type(error).__name__}: {safe_format(error, str)}") from None


def as_text(result: Any) -> str:
    """Format a tool's result as text: text as it is, lists, mappings, booleans and None as JSON.

    >>> as_text("3"), as_text(2.5), as_text({"sum": [1, None]})
    ('3', '2.5', '{"sum": [1, null]}')
    """
    if isinstance(result, dict | list | tuple | bool | None):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # what it holds is no JSON
            return safe_format(result)
    return safe_format(result, str)


@independent
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, brackets and the operators + - * / //, for example (12 + 30) / 7
    """
    value = calculate(expression)
    if value is None:
        raise ValueError(f"no value: wanted numbers, brackets and + - * / //, got {expression!r:.80}")
    return value
