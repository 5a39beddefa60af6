"""Play episodes with a model before it is trained, and print them as turns."""

import sys
from functools import partial

from covey.config.recipe import Recipe
from covey.data import sources as data_source
from covey.display import echo, show_log
from covey.monitor.formats import completion_text, prompt_text
from covey.recipes.use import open_worker
from covey.types import Completion, FinishReason


def play(recipe: Recipe, episodes: int) -> None:
    """Sample one completion or episode for each of the first training prompts with the model that `recipe` begins with,
    and print them as turns.
    """
    rows = data_source.load_data(recipe.data).train[:episodes]
    warn = partial(echo, keep="\n\t", file=sys.stderr)
    with show_log(info=lambda _: None, warning=warn), open_worker(recipe) as worker:
        groups = worker.generate(rows, 1)
    for number, group in enumerate(groups, 1):
        echo(f"--- {number} of {len(groups)}\n{prompt_text(group.prompt)}", keep="\n\t")
        for completion in group.completions:
            echo(f"{completion_text(completion)}\n{_outcome(completion)}\n", keep="\n\t")


def _outcome(completion: Completion) -> str:
    """Describe the end of a completion or of an episode in one line."""
    tokens, episode = f"{completion.num_sampled} tokens of the model", completion.episode
    if episode is None:
        return f"({tokens}, finish {completion.finish})"
    ended = episode.failure or ENDINGS[completion.finish]
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    return f"({reward}, {len(episode.turn_ends)} turns, {tokens}, {ended})"


ENDINGS = {
    FinishReason.STOP: "ended by the environment",
    FinishReason.TURNS: "ended by envs.max_turns",
    FinishReason.LENGTH: "cut by a limit of tokens",
}
"""Ends of an episode that did not fail."""
