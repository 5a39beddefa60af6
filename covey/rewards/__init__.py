"""Reward functions, and the form in which they read completions.

`scoring` calls them by `call`, `registry` has their names, and each other module has the functions of a task. What
`scoring` and `call` define is imported at its first use: to check the name of a function needs no NumPy.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.call import (
        RewardFn,
        RewardFns,
        check_columns,
        check_evaluation_columns,
        environment_reward,
        function_names,
        resolve_reward_fns,
    )
    from covey.rewards.scoring import RewardRunner, Scorer, score

__all__ = [
    "Completions",
    "RewardFn",
    "RewardFns",
    "RewardRunner",
    "Scorer",
    "check_columns",
    "check_evaluation_columns",
    "environment_reward",
    "function_names",
    "resolve_reward_fns",
    "score",
    "texts",
]

ChatCompletion = Sequence[Mapping[str, str]]
"""A completion as chat messages, as TRL passes it: `[{"role": "assistant", "content": "..."}]`."""
Completions = Sequence[str | ChatCompletion]


def text_of(completion: str | ChatCompletion) -> str:
    """Return the text of a completion, in any form in which a trainer passes it: its last assistant message.

    >>> text_of([{"role": "assistant", "content": "#### 4"}])
    '#### 4'
    """
    if isinstance(completion, str):
        return completion
    turns = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    return turns[-1] if turns else ""


def texts(completions: Completions) -> list[str]:
    """Return the text of each completion."""
    return [text_of(completion) for completion in completions]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey.rewards' has no attribute {name!r}")
    home = "scoring" if name in ("RewardRunner", "Scorer", "score") else "call"
    return getattr(import_module(f"covey.rewards.{home}"), name)
