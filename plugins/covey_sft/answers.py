"""Answers of a model in supervised training to some held-out examples."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from covey.config.recipe import SFTRecipe
from covey.config.schema import RolloutConfig
from covey.data.rows import Row
from covey.models.decoder import Decoder
from covey.monitor.writer import Correct
from covey.parallel.arrays import mesh_of, reshard, shardings
from covey.parallel.mesh import local_mesh, spans_processes
from covey.rl.evaluate import evaluate
from covey.rl.rollout_worker import RolloutWorker
from covey.run.outputs import Measured
from covey.text.tokenizer import Tokenizer
from covey.types import Group
from covey_sft.learner import SFTLearner

log = logging.getLogger(f"covey.{__name__}")


class Answers:
    """Answer the first held-out examples that leave room for it, with the current weights of a learner.

    Args:
        recipe: number of answers, their sampling, and the functions that say what is right.
        model: the model of the learner.
        held_out: the held-out examples.
    """

    def __init__(self, recipe: SFTRecipe, model: Decoder, tokenizer: Tokenizer, held_out: Sequence[Row]):
        self._recipe, self._worker = recipe, answering_worker(model, tokenizer, recipe.rollout)
        self._examples = select_answerable(self._worker, held_out, recipe.evaluation.answers)

    def __call__(self, learner: SFTLearner) -> Measured:
        """Answer the examples. Several processes have copies of the weights meanwhile."""
        worker, params = self._worker, learner.prepared.params
        worker.update_params(on_local_devices(params) if self._examples else params)
        metrics, groups, correct = answer_examples(worker, self._examples, self._recipe, learner.outputs.advance)
        worker.update_params(params)
        return Measured(metrics, {"": (groups, correct)})


def answering_worker(model: Decoder, tokenizer: Tokenizer, rollout: RolloutConfig) -> RolloutWorker:
    """Build a worker for answers to held-out examples. A prompt may take the room that an answer leaves in the model
    and its cache; `max_prompt_length` does not count.
    """
    positions = model.config.max_positions
    answer = min(rollout.max_new_tokens, positions - 1)
    return RolloutWorker(
        model,
        tokenizer,
        replace(
            rollout,
            max_new_tokens=answer,
            max_prompt_length=max(1, min(positions, rollout.kv_cache_size or positions) - answer),
        ),
    )


def select_answerable(worker: RolloutWorker, examples: Sequence[Row], count: int) -> list[Row]:
    """Return the first `count` examples with room for an answer; log the examples without."""
    answerable: list[Row] = []
    too_long: list[int] = []
    for row in (row for row in examples if row["prompt"]):
        if len(answerable) == count:
            break
        tokens = len(worker.tokenizer.encode_prompt(row["prompt"]))
        if tokens <= worker.config.max_prompt_length:
            answerable.append(row)
        else:
            too_long.append(tokens)
    if too_long:
        log.warning(_describe_too_long(too_long, worker.config))
    return answerable


def _describe_too_long(tokens: Sequence[int], config: RolloutConfig) -> str:
    room = config.max_prompt_length + config.max_new_tokens
    which = "1 held-out example is" if len(tokens) == 1 else f"{len(tokens)} held-out examples are"
    asked = f"{max(tokens)} tokens and rollout.max_new_tokens = {config.max_new_tokens}"
    why = f"{asked} are more than the {room} that there is room for"
    fix = f"; --rollout.max-new-tokens {room - max(tokens)} would do" if room > max(tokens) else ""
    return f"{which} not answered: {why}{fix}"


def answer_examples(
    worker: RolloutWorker, examples: Sequence[Row], recipe: SFTRecipe, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], Sequence[Group], Correct]:
    """Generate answers to `examples` and score them; the result is empty when there are none.

    Returns:
        The metrics, the completions, and which of these are right.
    """
    if not examples:
        return {}, (), {}
    every = replace(recipe.evaluation, prompts=0)
    evaluation = evaluate(worker, examples, every, worker.config, progress=progress)
    return evaluation.summary(), evaluation.groups, evaluation.correct


def on_local_devices(params: Any) -> Any:
    """Return weights on this process's part of their mesh; themselves if that is the whole mesh."""
    mesh = mesh_of(params)
    if mesh is None or not spans_processes(mesh):
        return params
    return reshard(params, shardings(params, local_mesh(mesh)))
