"""Rehearsal: before a run, an episode is played with scripted replies, and again together with another episode.

An environment must depend on its row and its replies alone. State in a class or a module, unseeded random numbers and
any other dependence on the order of play make the second course differ from the first. The model and the noise of
sampling have no part in this, nothing is counted, and one process plays for all.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from covey.errors import EpisodeError
from covey.parallel import processes
from covey.rewards.call import excerpt
from covey_envs.protocol import checked_prompt, checked_step, pays_at_end
from covey_envs.schemas import Schema
from covey_envs.tool_calls import Call
from covey_envs.tools import Toolset

if TYPE_CHECKING:
    from covey_envs.runner import EnvironmentRunner  # which rehearses

REPLIES = ("50", "a", "yes", "1")
"""Scripted turns of the model. Where there are tools, the first three are calls."""
ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
"""Scripted arguments of calls by their JSON type; any other is a text."""

Row = Mapping[str, Any]
Course = dict[str, Any]
"""Parts of the course of an episode by name, in order."""


def is_due(runner: "EnvironmentRunner") -> bool:
    """Tell whether a run with these environments begins with a rehearsal: by `envs.rehearsal`, or if that is not set
    where they are in this process and may not begin at random. Tools alone are no environment.
    """
    config = runner.config
    excused = runner.is_remote or runner.keeps_prompts or config.different_prompts == "group"
    return not excused if config.rehearsal is None else config.rehearsal


def rehearse(runner: "EnvironmentRunner", rows: Sequence[Row]) -> None:
    """Play the first of `rows` twice: alone, then together with the next one. Process 0 plays, and all processes agree.

    Raises:
        EpisodeError: the two courses differ.
    """
    difference = ""
    if processes.here().is_first:
        difference = runner.submit(_find_difference(runner, rows[0], rows[min(1, len(rows) - 1)])).result()
    if difference := processes.here().broadcast(difference, "rehearsal"):
        raise EpisodeError(
            f"the environment {runner.name!r} played the same row with the same replies twice, the second time beside "
            f"another episode, and the courses differ: {difference}",
            want="episodes that depend on their row and their replies alone",
            fix="keep the state in self, not in the class or the module, and seed random numbers from the row; or "
            "envs.rehearsal: false, if the environment is random on purpose",
        )


async def _find_difference(runner: "EnvironmentRunner", row: Row, other: Row) -> str:
    """Find the first difference between an episode played alone and together with another; "" if there is none."""
    alone, beside = Course(), Course()
    async with aclosing(_play(runner, row)) as parts:
        async for part in parts:
            alone |= part
    async with aclosing(_play(runner, row)) as parts, aclosing(_play(runner, other)) as others:
        async for part in parts:
            beside |= part
            await anext(others, None)
    for name in alone | beside:
        first, second = alone.get(name), beside.get(name)
        if first != second:
            return f"{name} {_format_part(first)}, then {_format_part(second)}"
    return ""


async def _play(runner: "EnvironmentRunner", row: Row) -> AsyncGenerator[Course, None]:
    """Play an episode, and yield the parts of its course: the prompt, then each turn."""
    limit, turns, environment = runner.config.max_characters, min(len(REPLIES), runner.config.max_turns), None
    part = "the beginning"
    try:
        environment = await runner.make(row, runner.tools and _with_scripted_calls(runner.tools))
        prompt = checked_prompt(await runner.call("reset", environment.reset), limit)
        yield {"prompt": prompt}
        for number, reply in enumerate(REPLIES[:turns], 1):
            part = f"turn {number}"
            step = await runner.call("step", environment.step, reply)
            step = checked_step(step, not isinstance(prompt, str), limit)
            yield {
                f"failure in {part}": "",
                f"message of {part}": step.messages,
                f"reward of {part}": step.reward,
                f"end of the episode in {part}": step.done,
            }
            if step.done:
                break
        if pays_at_end(environment, step):
            part = "the end"
            yield {"reward at the end": await runner.ask_reward(environment)}
    except EpisodeError as error:  # a run treats failures by its policy; here they are a part of the course
        yield {f"failure in {part}": error.what.partition(":")[0]}
    finally:
        await runner.close_environment(environment)


def _with_scripted_calls(tools: Toolset) -> Toolset:
    """Make tools whose calls are read from the scripted replies: each tool in turn, and none in the last reply."""
    schemas = cycle(tool.schema["function"] for tool in tools.tools.values())
    calls = {
        reply: [Call(schema["name"], _arguments(schema))] for reply, schema in zip(REPLIES[:-1], schemas, strict=False)
    }
    return replace(tools, format=replace(tools.format, parse=lambda text: calls.get(text, [])))


def _arguments(function: Schema) -> dict[str, Any]:
    """Make scripted arguments for the required ones of a function, by its JSON Schema."""
    parameters = function["parameters"]
    return {
        name: next(iter(kind.get("enum", ())), ARGUMENTS.get(str(kind.get("type")), "a"))
        for name, kind in parameters["properties"].items()
        if name in parameters.get("required", ())
    }


def _format_part(value: Any) -> str:
    """Format a part of a course for an error: of messages, their texts."""
    if isinstance(value, list):
        value = "\n".join(message["content"] for message in value)
    return excerpt(value)
