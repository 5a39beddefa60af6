"""Execute the commands that use a model without training it: eval, generate and chat."""

from dataclasses import asdict, replace

from covey.cli.checks import check_not_recipe, check_one_process, check_run, check_source
from covey.cli.commands import ChatOptions, GenerateOptions
from covey.cli.parse import Line, build_settings, list_recipes, missing_argument
from covey.config import recipe
from covey.config.schema import ModelOptions
from covey.display import echo
from covey.errors import CoveyError
from covey.registry import offered


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


def generate(line: Line) -> None:
    """Execute `covey generate RUN_OR_MODEL "PROMPT" [settings]`."""
    source = line.arguments[0]
    if len(line.arguments) == 1:
        check_not_recipe(source)  # it is the mistake, and not the prompt that is missing
        raise missing_argument(line.command)
    options = build_settings(GenerateOptions, line, source)
    check_one_process("covey generate")
    check_source(source)
    from covey import recipes

    answers = recipes.generate(source, line.arguments[1], options.n, options.rollout)
    for number, text in enumerate(answers, start=1):
        if len(answers) > 1:
            echo(f"--- {number} of {len(answers)}")
        echo(text, keep="\n\t")


def chat(line: Line) -> None:
    """Execute `covey chat RUN_OR_MODEL [settings]`, or `covey chat --server URL [MODEL] [settings]`."""
    source, server = "".join(line.arguments), line.options.get("--server")
    if not source and server is None:
        raise missing_argument(line.command)
    options = build_settings(ChatOptions, line, source)
    if server is not None:
        offered("covey.chats", "server")(server, source, options.rollout)
        return
    check_one_process("covey chat")
    check_source(source)
    from covey import recipes

    recipes.chat(source, options.rollout)
