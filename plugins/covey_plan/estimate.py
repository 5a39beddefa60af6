"""Expected time, memory and disk of a run that is about to train, in a few lines.

In: a run that is set up and evaluated: its model, trainer and rows, and the mean length of its completions. Out:
seconds by the work of a step (`work`) at the assumed share of this machine's rates, which are measured in half a
second; bytes of arrays. None of the run's programs is compiled for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import wrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from covey.config.algorithms import algorithm_of
from covey.config.recipe import Recipe, SFTRecipe, is_from_python
from covey.models.config import ModelConfig
from covey.models.layer_kinds import find_kind, has_state
from covey.monitor.formats import duration
from covey.rl.evaluate import during_training, presets_of
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun, memory_in_use
from covey.train.trainer import Trainer
from covey_plan.lengths import Lengths, cut_geometric, expected_lengths
from covey_plan.machines import MACHINES, Machine
from covey_plan.memory import checkpoint_bytes, nbytes, num_checkpoints, size_in_words
from covey_plan.roofline import CPU_SHARE, present_rates, step_times
from covey_plan.schedule import fitted
from covey_plan.topologies import mesh_size
from covey_plan.work import Sizes
from covey_sft.batch import encode_example

ROWS_READ, WIDTH = 64, 60
"""Number of rows whose lengths stand for all, and of characters of a line."""


class Expectation(NamedTuple):
    """Expected needs of a run.

    Attributes:
        step_seconds: seconds of a step without compilation.
        seconds: the same of the whole run, with its evaluations.
        memory: bytes in use on the fullest device, or by this process on a CPU, with gradients and KV cache.
        checkpoints: number of checkpoints at the end.
        checkpoint: bytes of one of them.
    """

    step_seconds: float
    seconds: float
    memory: int
    checkpoints: int
    checkpoint: int


class Estimate(Output):
    """Show the expected needs of a recipe's run before its first step."""

    def begin(self, run: SavedRun, summary: Mapping[str, Any]) -> None:
        if run.folder.resuming or is_from_python(run.recipe):
            return
        needs = estimate(run, (summary["before"] or {}).get("mean_length"))
        for line in in_words(needs, run):
            run.progress.message(line)


def estimate(run: SavedRun, sampled: float | None = None) -> Expectation:
    """Return the expected needs of a run that is set up.

    Args:
        sampled: mean length of the completions of the evaluation before training; assumed as in a plan when not given.
    """
    recipe, trainer = run.recipe, _trainer(run)
    lengths, machine = _lengths(run, sampled), _machine(run)
    by_phase = _phase_seconds(run, lengths, machine)
    step = sum(by_phase.values())
    batches = math.ceil(run.total / (recipe.grpo.num_iterations if isinstance(recipe, Recipe) else 1))
    memory = memory_in_use() + nbytes(trainer.trainable) + _cache_bytes(run, lengths)
    size = checkpoint_bytes(run.learner.checkpoint_shapes(dict))
    return Expectation(step, batches * step + _evaluation_seconds(run, by_phase), memory, _num_checkpoints(run), size)


def in_words(needs: Expectation, run: SavedRun) -> list[str]:
    """Return the lines that are shown: what is expected, and from what it is calculated."""
    count, machine = needs.checkpoints, "this processor" if jax.default_backend() == "cpu" else "the device"
    memory, disk = size_in_words(needs.memory), size_in_words(count * needs.checkpoint)
    steps = f"{run.total} step{'s' * (run.total > 1)} of {needs.step_seconds:.2g} s at the rate of {machine} now"
    kept = f"{count} checkpoint{'s' * (count > 1)}"
    details = f"{steps}, without {', '.join(_left_out(run.recipe))}; memory without temporary arrays; {kept}"
    return [
        f"expected: at least {duration(needs.seconds)}, {memory} of memory, {disk} of disk",
        *wrap(details, WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]


def _left_out(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names of the work that is not in the expected time."""
    if isinstance(recipe, SFTRecipe):
        return ["compiling", *["answers in evaluations"] * bool(recipe.evaluation.answers)]
    algorithm = algorithm_of(recipe.grpo)
    parts = {
        "the critic": algorithm.needs_critic,
        "the reward model": recipe.reward_model,
        "environments": recipe.envs.environment or recipe.envs.tools,
        "replaced groups": algorithm.max_sampling_rounds > 1,
    }
    return ["compiling", *(name for name, there in parts.items() if there), "rewards"]


def _num_checkpoints(run: SavedRun) -> int:
    """Return the number of checkpoints at the end; one is always written there."""
    every = run.recipe.training.checkpoint_every_n_steps
    return min(num_checkpoints(run.recipe), -(-run.total // every) if every else 1)


def _trainer(run: SavedRun) -> Trainer:
    trainer: Trainer = (run.learner.cluster if isinstance(run.recipe, Recipe) else run.learner).trainer
    return trainer


def _config(run: SavedRun) -> tuple[ModelConfig, bool]:
    """Return the shape of the model, and whether its programs have fixed shapes."""
    model = run.learner.cluster.program_actor if isinstance(run.recipe, Recipe) else run.learner.program_model
    return model.config, model.fixed_shapes


def _lengths(run: SavedRun, sampled: float | None) -> Lengths:
    """Return the lengths of the first rows, and of completions with the mean `sampled`."""
    recipe, rows = run.recipe, run.loader.rows[:ROWS_READ]
    if isinstance(recipe, Recipe):
        encode = run.learner.cluster.tokenizer.encode_prompt
        completions = () if sampled is None else (max(round(sampled), 1),)
        return expected_lengths(recipe, _mean([len(encode(row["prompt"])) for row in rows]), completions)
    encode_pair = partial(
        encode_example, tokenizer=run.learner.tokenizer, completion_only=recipe.training.completion_only
    )
    prompts, answers = zip(*(map(len, encode_pair(row)) for row in rows), strict=True)
    return Lengths(_mean(prompts), cut_geometric(_mean(answers), max(answers)))


def _mean(counts: Sequence[int]) -> int:
    return max(round(float(np.mean(counts))), 1)


def _machine(run: SavedRun) -> Machine:
    """Return a device of this machine with rates that are measured now, with operands of the run's type."""
    platform, dtype = jax.default_backend(), str(_compute_dtype(run))
    measured = present_rates(dtype)
    like = MACHINES["h100" if platform == "gpu" else "v5p"]
    rates: dict[str, Any] = {"flops": {dtype: measured.matmul}, "bandwidth": measured.bandwidth, "link": math.inf}
    machine = replace(like, name=platform, platform=platform, clock=0.0, **rates)
    return replace(machine, share=CPU_SHARE, memory_share=CPU_SHARE) if platform == "cpu" else machine


def _compute_dtype(run: SavedRun) -> Any:
    return jnp.dtype(run.recipe.model.compute_dtype)


def _phase_seconds(run: SavedRun, lengths: Lengths, machine: Machine) -> dict[str, float]:
    """Return the expected seconds of each phase of a step."""
    recipe, trainer, (config, fixed) = run.recipe, _trainer(run), _config(run)
    count = mesh_size(recipe.model.mesh)
    moved = 2 * nbytes(trainer.trainable) + 2 * nbytes(trainer.opt_state) + nbytes(trainer.trainable)
    itemsize = jnp.dtype(recipe.model.dtype).itemsize
    sizes = Sizes(nbytes(trainer.params) * count, moved * count, itemsize)
    (flops,) = machine.flops.values()
    processes = jax.process_count()
    times = step_times(recipe, config, lengths, sizes, machine, flops, fixed_shapes=fixed, processes=processes)
    return {time.phase.name: time.expected for time in times}


def _evaluation_seconds(run: SavedRun, by_phase: dict[str, float]) -> float:
    """Return the seconds of the evaluations during and after training; without supervised training's answers.

    A completion takes what one of a step takes, and a held-out example a third of what it takes to learn one.
    """
    recipe, rows = run.recipe, len(run.held_out)
    every = recipe.training.eval_every_n_steps
    during = run.total // every if every else 0
    if not isinstance(recipe, Recipe):
        learnt: float = (1 + during) * rows / recipe.training.batch_size
        return learnt * by_phase["update"] / 3
    prompts = [min(config.prompts or rows, rows) for config in (recipe.evaluation, during_training(recipe.evaluation))]
    count = prompts[0] * len(presets_of(recipe.evaluation)) + during * prompts[1]
    of_step = recipe.training.prompts_per_step * recipe.grpo.num_generations
    return by_phase["rollout"] * float(count) * recipe.evaluation.samples / of_step


def _cache_bytes(run: SavedRun, lengths: Lengths) -> int:
    """Return the bytes of the KV cache on a device when all slots are full; 0 in supervised training."""
    recipe, (config, fixed) = run.recipe, _config(run)
    if not isinstance(recipe, Recipe):
        return 0
    prompts = math.ceil(recipe.training.prompts_per_step / jax.process_count())
    requests = [lengths.prompt] * prompts, [recipe.grpo.num_generations] * prompts
    scheduler = fitted(*requests, recipe.rollout, fixed_shapes=fixed)
    tokens = len(scheduler.slots) * scheduler.longest_cache
    caches = [i for i in range(config.num_layers) if config.kv_source(i) is None and not has_state(config, i)]
    heads = sum(math.prod(config.heads(i)) for i in caches)
    cached = tokens * 2 * heads * jnp.dtype(recipe.model.dtype).itemsize
    return (cached + _state_bytes(config, len(scheduler.slots))) // mesh_size(recipe.model.mesh)


def _state_bytes(config: ModelConfig, slots: int) -> int:
    """Return the bytes of the states that layers have in place of keys and values."""
    kinds = [find_kind(config.parts(layer)[0]) for layer in range(config.num_layers) if has_state(config, layer)]
    states = [jax.eval_shape(partial(kind.load().state, config.kind_settings, slots)) for kind in kinds]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
