"""Settings of the section `envs`: environments of several turns, their limits and the treatment of their failures."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, Literal

from pydantic import JsonValue

from covey.config.base import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Problem,
    UsedWhen,
    refuse_if,
    setting,
    unused_settings,
)
from covey.config.schema.rewards import OnRewardError

PythonEngine = Literal["auto", "child", "wasm"]
ToolFormat = Literal["auto", "hermes", "smollm", "llama", "mistral", "mistral_args", "qwen3_coder", "gemma4"]


class EnvsConfig(Config, section="envs", on_resume="report"):
    """Environment in which the model acts in turns, or tools that it may call."""

    environment: str | None = setting(None, on_resume="refuse")
    """A built-in environment (guess, wordle), your own (module:Class), one of the library verifiers
    (verifiers:MODULE), one in the shape of TRL's environment_factory (trl:module:Class), or one of an OpenEnv server
    (openenv:URL). Not set: every sample is one turn, unless there are tools.
    """
    arguments: dict[str, JsonValue] = field(default_factory=dict, metadata={"on_resume": "refuse"})
    """Arguments by name for what makes the environment: your class behind the row, load_environment of verifiers 0.2,
    the taskset of verifiers 0.4, a class for TRL, or reset of an OpenEnv server.
    """
    tools: tuple[str, ...] = setting((), on_resume="refuse")
    """Functions that the model may call: built-in ones (calculator, python), and your own: module:function. Their
    results follow its turn; a turn without a call ends the episode.
    """
    tool_format: ToolFormat = setting("auto", on_resume="refuse")
    """Form in which the model writes calls: that of its chat template (auto), <tool_call> with a JSON object (hermes,
    also Qwen's) or a list (smollm), bare JSON (llama), a list behind [TOOL_CALLS] (mistral), a name and [ARGS] behind
    it (mistral_args), <tool_call> with <function=NAME> and <parameter=KEY> (qwen3_coder), or <|tool_call> with
    call:NAME{KEY:VALUE} (gemma4).
    """
    python_engine: PythonEngine = setting("auto", on_resume="refuse")
    """Engine of the tool python: a process that Landlock and seccomp lock in (child), CPython as WebAssembly, which
    needs the extra wasm and whose results repeat bit for bit (wasm), or child where it holds and wasm elsewhere (auto).
    """
    max_turns: PositiveInt = setting(8, on_resume="refuse")
    """Largest number of turns that the model has in an episode."""
    max_turn_tokens: PositiveInt | None = setting(None, on_resume="refuse")
    """Largest number of tokens of one turn of the model. rollout.max_new_tokens limits the whole episode, with the
    tokens of the environment; a turn is limited by that alone when this is not set.
    """
    history: Literal["sampled", "template"] = setting("sampled", on_resume="refuse")
    """Turns of the model before the one that is sampled, where the chat template renders them differently once others
    follow: as they were sampled, or as the template renders them, in a new branch of the sample.
    """
    different_prompts: Literal["refuse", "group"] = "refuse"
    """Treatment of samples of a row whose episodes begin with different prompts: stop the run (refuse), or compare
    samples with equal prompts (group). A sample without another of its prompt is then left out of training and counted.
    """
    max_characters: PositiveInt = 20_000
    """Largest number of characters of the environment's messages of one turn; more is a failure."""
    timeout: NonNegativeFloat = 60.0
    """Seconds that an environment may take to begin or to respond; 0 is no limit."""
    max_live: PositiveInt | None = None
    """Largest number of episodes that are begun and not over. If it is more than rollout.slots, a sample that waits for
    its environment gives its slot to another, and its cache is kept beside the slots: memory for as many caches. As
    many as there are slots when not set; a warning says if they wait much, and how many would keep them busy.
    """
    answer_lag: NonNegativeInt | None = None
    """Number of chunks of rollout.decode_chunk decode steps behind the end of a turn at which its answer is taken, and
    waited for if it is late; then what is decoded side by side does not follow the clock. Not set: an answer is taken
    as soon as it is there, or one chunk behind its turn where training.off_policy_steps is not 0.
    """
    concurrency: PositiveInt = 64
    """Largest number of calls of environments under way at once, and of tools."""
    on_error: OnRewardError = "raise"
    """Treatment of an episode in which the environment raises, takes too long or responds with something invalid: stop
    the run (raise), leave its reward out (none), or give it the reward `value`. The episode ends there.
    """
    value: float = 0.0
    """Reward of such an episode under the treatment value."""
    budget: NonNegativeInt = 100
    """Number of failures in the whole run, of all processes, that none and value accept; one more stops the run."""
    rehearsal: bool | None = setting(None, on_resume="ignore")
    """Play one episode twice before the run, with scripted replies, and stop if its course differs. Not set: yes, but
    not for openenv, verifiers and tools alone, nor where different prompts are grouped.
    """
    action_field: str | None = None
    """Field of an OpenEnv action that takes the model's reply as text. Not set: the reply must be a JSON object."""
    private_addresses: bool = False
    """Whether an OpenEnv server may be at a private address, such as 127.0.0.1."""

    def contradictions(self) -> Iterable[Problem]:
        """Return a problem for an environment beside tools, and for a tool that is named twice."""
        return [
            *refuse_if(
                self.environment is not None and self.tools,
                "tools",
                f"envs.tools names {', '.join(map(repr, self.tools))}, and envs.environment is {self.environment}",
                "one of them: an environment can answer calls itself",
            ),
            *refuse_if(len({*self.tools}) < len(self.tools), "tools", "envs.tools names a tool twice", "each once"),
            *refuse_if(
                not all(map(math.isfinite, _numbers(self.arguments))),
                "arguments",
                "envs.arguments has a number that is not finite",
                "numbers that JSON has",
            ),
        ]

    def contradictions_in_recipe(self) -> Iterable[Problem]:
        """Return a problem for each setting that nothing reads. A script may have its environment elsewhere."""
        return unused_settings(self, USED_WHEN, "a run with these settings")


OWN_CONDITIONS = (
    UsedWhen(
        ("tool_format",),
        lambda envs: bool(envs.tools) or (envs.environment or "").startswith("trl:"),
        "envs.tools, or an envs.environment of trl:",
    ),
    UsedWhen(("arguments",), lambda envs: envs.environment is not None, "an envs.environment"),
    UsedWhen(("python_engine",), lambda envs: "python" in envs.tools, "python in envs.tools"),
    UsedWhen(
        ("action_field", "private_addresses"),
        lambda envs: (envs.environment or "").startswith("openenv:"),
        "an envs.environment of openenv:",
    ),
)
_NAMED = ("environment", "tools", *(name for condition in OWN_CONDITIONS for name in condition.names))
USED_WHEN = (
    *OWN_CONDITIONS,
    UsedWhen(
        tuple(name for name in EnvsConfig.kinds if name not in _NAMED),
        lambda envs: envs.environment is not None or bool(envs.tools),
        "an envs.environment, or envs.tools",
    ),
)
"""Settings that a recipe uses with an environment or tools alone."""


def _numbers(value: Any) -> Iterator[float]:
    """Yield the floats in a value of JSON."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, (list, dict)):
        yield from (one for part in (value.values() if isinstance(value, dict) else value) for one in _numbers(part))


def metric_name(environment: str) -> str:
    """Return the name of an environment in metrics: that of its class, function or server, in small letters.

    >>> metric_name("guess"), metric_name("games.words:Hangman"), metric_name("openenv:wss://a.org")
    ('guess', 'hangman', 'openenv')
    """
    adapter, _, name = environment.partition(":")
    return "openenv" if adapter == "openenv" else (name.rpartition(":")[2] or adapter).lower()
