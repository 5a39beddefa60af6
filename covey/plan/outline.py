"""Outline of a run: memory, tokens of a step and disk, from shapes alone, before any program is compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console

from covey.config.recipe import Recipe, SFTRecipe
from covey.parallel.programs import Program
from covey.plan.memory import RunResidents


@dataclass(frozen=True)
class Outline:
    """Needs of a run that its shapes determine.

    Attributes:
        memory: role → part → most bytes of the arrays on one of its devices. The temporary memory of the programs comes
            on top.
        step: numbers of prompts, completions and tokens of a step, by what they are.
        checkpoint: bytes of a checkpoint: the trained weights and the optimizer's state.
        checkpoints: number of checkpoints that the run folder has at the end, at most.
        not_counted: parts of the run that are not counted.
    """

    memory: Mapping[str, Mapping[str, int]]
    step: Mapping[str, int]
    checkpoint: int
    checkpoints: int
    not_counted: Sequence[str]


def make_outline(
    recipe: Recipe | SFTRecipe,
    trainable: Any,
    programs: Sequence[Program],
    residents: RunResidents,
    not_counted: Sequence[str],
) -> Outline:
    """Return the outline of a run of `recipe`.

    Args:
        recipe: the settings.
        trainable: shapes of the weights that are trained.
        programs: programs of the run.
        residents: arrays on its devices.
        not_counted: parts of the run that are not counted.
    """
    optimizer = next(program.args[1] for program in programs if program.name == "apply")
    return Outline(
        {role: held.most() for role, held in residents._asdict().items() if held},
        _step(recipe),
        _total_bytes(trainable) + _total_bytes(optimizer),
        _checkpoints(recipe),
        not_counted,
    )


def _step(recipe: Recipe | SFTRecipe) -> dict[str, int]:
    if isinstance(recipe, SFTRecipe):
        batch = recipe.training.batch_size
        return {"examples": batch, "tokens, at most": batch * recipe.training.max_length}
    prompts, rollout = recipe.training.prompts_per_step, recipe.rollout
    completions = prompts * recipe.grpo.num_generations
    return {
        "prompts": prompts,
        "completions": completions,
        "prompt tokens, at most": prompts * rollout.max_prompt_length,
        "completion tokens, at most": completions * rollout.max_new_tokens,
    }


def _checkpoints(recipe: Recipe | SFTRecipe) -> int:
    """Return the number of checkpoints that are kept: the latest ones, and the best one if there is one."""
    training = recipe.training
    return training.max_to_keep + bool(training.keep_best) if training.checkpoint_every_n_steps else 1


def _total_bytes(tree: Any) -> int:
    """Return the bytes of arrays or shapes over all devices."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def memory_lines(outline: Outline) -> list[str]:
    """Return the memory in words, a line for each role."""
    lines = []
    for role, held in outline.memory.items():
        parts = ", ".join(f"{name} {size_in_words(size)}" for name, size in held.items())
        device = f"a device of the {role}" if len(outline.memory) > 1 else "a device"
        lines.append(f"{size_in_words(sum(held.values()))} {device} at most: {parts}")
    not_counted = " and ".join(outline.not_counted)
    return [*lines[:-1], f"{lines[-1]}; without {not_counted}" if not_counted else lines[-1]]


def disk_line(outline: Outline) -> str:
    """Return the size of the checkpoints in words."""
    count = "1 checkpoint" if outline.checkpoints == 1 else f"at most {outline.checkpoints} checkpoints"
    return f"{count} of about {size_in_words(outline.checkpoint)}: the trained weights and the optimizer's state"


def show(outline: Outline, console: Console) -> None:
    """Print an outline."""
    step = "; ".join(f"{name} {count:,}" for name, count in outline.step.items())
    rows = [("memory", line) for line in memory_lines(outline)] + [("step", step), ("disk", disk_line(outline))]
    for name, text in rows:
        console.print(f"{name:<8}{text}", soft_wrap=True, highlight=False, markup=False)


def to_json(outline: Outline) -> dict[str, Any]:
    """Return an outline in JSON's types."""
    figures = asdict(outline)
    figures["left_out"] = list(figures.pop("not_counted"))
    return figures


def size_in_words(size: float) -> str:
    """Return a number of bytes in the unit that fits.

    >>> size_in_words(36_864), size_in_words(1_230_000), size_in_words(4_560_000_000)
    ('36.9 kB', '1.2 MB', '4.56 GB')
    """
    if size >= 1e8:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
