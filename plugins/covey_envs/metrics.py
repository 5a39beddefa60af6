"""Metrics of the episodes of a step."""

from collections.abc import Mapping, Sequence

import numpy as np

from covey.rl.step_data import GroupTable


def episode_metrics(table: GroupTable) -> dict[str, float]:
    """Compute turns, branches, tokens, seconds and tool calls of completions in an environment; nothing for none."""
    episodes = [episode for episode in table.episodes if episode is not None]
    if not episodes:
        return {}
    in_environment = np.array([episode is not None for episode in table.episodes])
    calls, failures = (sum(getattr(episode, name) for episode in episodes) for name in ("tool_calls", "tool_failures"))
    branches = [len(of_completion) for of_completion in table.branches if of_completion is not None]
    return {
        **({"env/branches": float(np.mean(branches))} if branches else {}),
        **_own_numbers([episode.numbers for episode in episodes]),
        "env/turns": float(np.mean([len(episode.turn_ends) for episode in episodes])),
        "env/tokens": float((table.lengths - table.sampled)[in_environment].mean()),
        "env/done": float(np.mean([episode.done for episode in episodes])),
        "env/seconds": float(np.mean([episode.seconds for episode in episodes])),
        "env/failed": float(sum(bool(episode.failure) for episode in episodes)),
        "env/tool_calls": calls / len(episodes),
        "env/tool_failures": failures / len(episodes),
    }


def _own_numbers(episodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each of the environment's own numbers over the episodes that have it."""
    names = sorted({name for numbers in episodes for name in numbers})
    values = {name: [numbers[name] for numbers in episodes if name in numbers] for name in names}
    return {f"env/{name}": float(np.mean(each)) for name, each in values.items()}
