"""Execute `covey rewards`: tell whether there is a learning signal before the first update.

The untouched model samples groups for training prompts, or recorded completions are read from a file; the recipe's
reward functions score them. Recorded completions need neither a model nor JAX.
"""

import json
from dataclasses import asdict
from pathlib import Path

from covey.cli.parse import Line
from covey.config import recipe
from covey.config.algorithms import algorithm_of
from covey.display import echo
from covey.errors import CoveyError

PROMPTS = 16
"""Number of prompts that are sampled when --prompts is not given."""


def show_signal(line: Line) -> None:
    """Execute `covey rewards NAME_OR_YAML [--samples FILE] [--prompts N] [--completion TEXT] [--row N] [--json]`.

    Raises:
        CoveyError: the recipe names no reward function, or the file, the data or the model cannot be read.
    """
    loaded = recipe.load(line.arguments[0], line.settings)
    by_hand = _check_options(line, loaded)

    from covey_report import scored_groups, signal, signal_table  # late: they need NumPy

    if by_hand is not None:
        groups = [scored_groups.written_group(loaded, by_hand, line.whole_number("--row") or 1)]
    elif samples := line.options.get("--samples"):
        groups = scored_groups.read_groups(Path(samples), loaded, line.whole_number("--prompts"))
    else:
        groups = scored_groups.sample_groups(loaded, line.whole_number("--prompts") or PROMPTS)
    scored, failed = scored_groups.score_groups(groups, loaded)
    measured = signal.measure_signal(scored, failed, algorithm_of(loaded.grpo).needs_critic)
    examples, missing = scored_groups.examples_of(scored), not_included(loaded)
    if "--json" in line.options:
        source = line.options.get("--samples") or loaded.model.source
        result = {"recipe": loaded.name, "samples": source, **asdict(measured)}
        echo(json.dumps(result | {"examples": examples, "not_included": missing}))
    elif by_hand is not None:
        signal_table.print_scores(examples[-1], failed, missing)
    else:
        signal_table.print_signal(measured, examples, missing)


def _check_options(line: Line, loaded: recipe.Recipe) -> str | None:
    """Return the completion of --completion; refuse options that exclude each other, and what cannot be scored."""
    by_hand = line.options.get("--completion")
    others = [flag for flag in ("--samples", "--prompts") if flag in line.options]
    if by_hand is not None and others:
        raise CoveyError(f"--completion beside {others[0]}", want="one of them", fix="leave one of them out")
    if by_hand is None and "--row" in line.options:
        raise CoveyError("--row without --completion", fix='--completion "TEXT"')
    if (loaded.envs.environment or loaded.envs.tools) and (by_hand is not None or "--samples" in line.options):
        what = "this recipe scores episodes of several turns, and a text is not an episode"
        raise CoveyError(what, want="episodes", fix=f"covey rewards {line.arguments[0]} plays new ones")
    if not loaded.rewards and not loaded.envs.environment:
        also = ", and its reward model is not asked" if loaded.reward_model else ""
        what = f"this recipe names no reward function{also}"
        raise CoveyError(what, want="one or more in rewards", where="rewards")
    return by_hand


def not_included(loaded: recipe.Recipe) -> list[str]:
    """Return the parts of a run's reward that this command leaves out."""
    buffer = algorithm_of(loaded.grpo).overlong_buffer
    model = f"the reward model {loaded.reward_model} (reward_model)" if loaded.reward_model else ""
    penalty = f"the penalty for long completions (grpo.overlong_buffer {buffer:g})" if buffer else ""
    return [part for part in (model, penalty) if part]
