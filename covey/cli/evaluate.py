"""Execute `covey eval`."""

from dataclasses import asdict, replace

from covey.cli.checks import check_run, check_source
from covey.cli.parse import Line, list_recipes
from covey.config import recipe
from covey.config.schema import ModelOptions
from covey.errors import CoveyError


def evaluate(line: Line) -> None:
    """Execute `covey eval RUN_OR_MODEL [--recipe NAME] [settings]`."""
    (source,) = line.arguments
    chosen = line.options.get("--recipe") or (source if recipe.is_run(source) else None)
    settings = recipe.load_any(chosen, line.settings) if chosen else None
    check_source(source)
    if settings is None:
        raise CoveyError(
            f"no recipe is given to evaluate {source} on",
            want="covey eval MODEL --recipe NAME",
            fix=list_recipes(line.command),
        )
    if recipe.is_run(source):
        _check_own_model(source, recipe.load_any(str(chosen)).model, settings.model)
    check_run(replace(settings, model=ModelOptions(source=source)))  # that of the recipe is not loaded
    from covey import recipes
    from covey.parallel import processes

    with processes.start():
        recipes.evaluate(source, settings)


def _check_own_model(run: str, recorded: ModelOptions, wanted: ModelOptions) -> None:
    """Refuse other settings of the model than the recipe's: a run is loaded as its own recipe says, on any mesh."""
    before, after = (recipe.flatten(asdict(options), "model.") for options in (recorded, wanted))
    changed = [name for name, value in after.items() if value != before[name] and not name.startswith("model.mesh.")]
    if changed:
        raise CoveyError(
            f"{', '.join(changed)} beside a run, which is loaded as its own recipe says",
            fix=f"leave it out; or write the model with covey export {run} --out FOLDER, and evaluate that",
            where=run,
        )
