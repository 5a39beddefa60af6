"""What `covey.methods` offers as `sft`: a run of supervised training by a recipe, and the evaluation of a model."""

from typing import Any

from jax.sharding import Mesh

from covey.config.recipe import SFTRecipe
from covey.data import Dataset
from covey.display import show_log
from covey.monitor.progress import Progress
from covey.recipes.build import load_data
from covey.recipes.load_model import available_mesh, load_for, load_to_train
from covey.recipes.use import check_same_inputs
from covey.run.saved_run import ReadyRun, SavedRun, console_of_process
from covey_sft.answers import Answers, answer_examples, answering_worker, on_local_devices, select_answerable
from covey_sft.learner import HELD_OUT, SFTLearner


def build(recipe: SFTRecipe, data: Dataset, mesh: Mesh | None, run: SavedRun) -> ReadyRun:
    """Make a run of supervised training; see `recipes.build.build`."""
    model, tokenizer, origin = load_to_train(recipe, mesh, run.folder)
    learner = SFTLearner(
        model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh, seed=recipe.seed, observers=[]
    )
    fitted = learner.drop_long_examples(data.train)
    if fitted.dropped or fitted.truncated:
        run.phase(f"examples longer than max_length: {fitted.dropped} dropped, {fitted.truncated} cut")
    held_out = learner.drop_long_examples(data.test, HELD_OUT).rows[: recipe.evaluation.prompts or None]
    learner.answer = Answers(recipe, learner.program_model, tokenizer, held_out)
    loader = learner.loader(fitted.rows)
    counts = {"examples": len(loader.rows), "dropped": fitted.dropped, "truncated": fitted.truncated}
    return ReadyRun(learner, loader, tokenizer, model.config, held_out, origin, counts)


def evaluate(source: str, recipe: SFTRecipe) -> dict[str, Any]:
    """Evaluate the held-out loss of the model or run at `source` and some answers; print and return the metrics.

    The loss is computed on the mesh of all processes. Each answers its share of the examples, with a copy of the model
    on its devices.
    """
    held_out = load_data(recipe).test
    check_same_inputs(recipe, held_out)
    with Progress(0, console_of_process()) as progress, show_log(progress.phase, progress.message):
        mesh = available_mesh(recipe.model.mesh)
        model, tokenizer, _ = load_for(recipe, mesh, source)
        progress.phase("evaluating")
        learner = SFTLearner(model=model, tokenizer=tokenizer, config=recipe.training, mesh=mesh, observers=[])
        chosen = learner.drop_long_examples(held_out, HELD_OUT).rows[: recipe.evaluation.prompts or None]
        metrics = learner.held_out_loss(chosen) | {"examples": len(chosen)}
        del learner  # on accelerators it has stacks of the model's layers
        worker = answering_worker(model, tokenizer, recipe.rollout)
        answerable = select_answerable(worker, chosen, recipe.evaluation.answers)
        if answerable:
            worker.update_params(on_local_devices(worker.params))
        metrics |= answer_examples(worker, answerable, recipe, progress.advance)[0]
        progress.evaluation(source, metrics)
    return metrics
