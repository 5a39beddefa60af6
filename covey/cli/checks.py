"""Checks of a command that need no JAX: paths, models, names of reward functions, and the folder of a new run.

A run makes the checks of its recipe before it starts, and stops at the first mistake; `covey validate` makes them all.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from covey.config import processes, recipe
from covey.config.recipe import (
    COMMANDS,
    AnyRecipe,
    Recipe,
    SFTRecipe,
    chain_of_runs,
    find,
    is_run,
    kind_of,
    names,
)
from covey.config.schema import HUBS
from covey.config.schema.data import DATA_PATHS, FROM_PYTHON
from covey.errors import CoveyError, RecipeError, WeightsError
from covey.files import check_not_url, folder_below
from covey.monitor.run_files import CHECKPOINTS
from covey.registry import offered


class Check(NamedTuple):
    """One check of a recipe.

    Attributes:
        subject: what it looks at.
        function: `module:function`, which raises `CoveyError` if that is wrong; it is imported when the check is made.
        arguments: arguments of the function.
        name: reward function, environment or tool that the check looks up.
    """

    subject: str
    function: str
    arguments: tuple[Any, ...]
    name: str = ""

    def run(self) -> None:
        """Make the check.

        Raises:
            CoveyError: the subclass that fits.
        """
        resolve_name(self.function)(*self.arguments)


def check_run(recipe: Recipe | SFTRecipe) -> None:
    """Refuse a recipe if its model, data or reward functions do not exist.

    Raises:
        CoveyError: the subclass that fits.
    """
    for check in checks_of(recipe):
        check.run()


def checks_of(recipe: Recipe | SFTRecipe) -> Iterator[Check]:
    """Yield the checks of a recipe that need neither a model nor JAX, the fastest first."""
    data = recipe.data
    if data.task == FROM_PYTHON:
        yield Check("data", "covey.data.sources:find_task", (data,))
    yield Check("model", "covey.cli.checks:check_source", (recipe.model.source,))
    if recipe.model.adapter:
        yield Check("adapter", "covey.cli.checks:check_adapter", (recipe.model.adapter,))
    for key, path in (("data.path", data.path), ("data.test_path", data.test_path)):
        if path and not path.startswith(HUBS):
            yield Check("data", "covey.data.readers:existing_path", (path, key, DATA_PATHS[data.task]))
    if isinstance(recipe, Recipe):
        yield from _rl_checks(recipe)
    for name in reward_names(recipe):
        yield Check("rewards", "covey.rewards.registry:resolve", (name,), name)


def _rl_checks(recipe: Recipe) -> Iterator[Check]:
    """Yield the checks of settings that only an RL run has."""
    envs = recipe.envs
    for role, source in (("critic", recipe.critic), ("reward_model", recipe.reward_model)):
        if source:
            yield Check(role, "covey.models.loading.sources:check_source", (source,))
    if envs.environment or envs.tools:
        yield from offered("covey.checks", "envs")(envs)
    yield Check("training", "covey.rl.stage_sizes:stage_sizes", (recipe.training, recipe.grpo.num_generations))


def reward_names(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names of the functions that train and that judge the held-out completions."""
    trains = recipe.rewards if isinstance(recipe, Recipe) else ()
    return list(dict.fromkeys([*trains, *recipe.evaluation.judges.values()]))


def check_adapter(adapter: str) -> None:
    """Refuse a folder without the configuration of an adapter."""
    if not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        raise WeightsError(
            "no adapter_config.json here", want="--model.adapter FOLDER, as PEFT saves it", where=adapter
        )


def check_not_model(source: str, kind: type[AnyRecipe]) -> None:
    """Refuse a model in the place of a recipe of this kind.

    Raises:
        RecipeError: `source` is a name or a folder of a model; the error says how to train it.
    """
    if source in names() or is_run(source):
        return
    from covey.models.loading.sources import NAMED_MODELS

    if source in NAMED_MODELS or source.startswith("hf:") or (Path(source) / "config.json").is_file():
        raise RecipeError(
            "this is a model",
            want="a recipe: a built-in name or a YAML file",
            fix=f"{COMMANDS[kind.method]} NAME_OR_YAML --model.source {source}",
            where=source,
        )


def check_not_recipe(source: str) -> None:
    """Refuse a recipe in the place of a model.

    Raises:
        WeightsError: it is a built-in recipe or a YAML file; the error says which command makes a model of it.
    """
    is_file = Path(source).suffix in (".yaml", ".yml") and Path(source).is_file()
    if is_file or (source in names() and not Path(source).exists()):
        raise WeightsError(
            "this is a recipe",
            want="a run or a model",
            fix=f"{COMMANDS[kind_of(source).method]} {source}, and then the folder of its run in this place",
            where=source,
        )


def check_source(source: str) -> None:
    """Refuse a source that is neither a model nor a run with a checkpoint."""
    from covey.models.loading import sources

    if not is_run(source):
        check_not_recipe(source)
        if not Path(source).exists() and (command := _command_for(source)):
            raise WeightsError("this run does not exist yet", fix=command, where=source)
        sources.check_source(source)
    elif not has_checkpoint(source):
        raise CoveyError("this run has no checkpoint yet", fix=f"go on with it: {resume_command(source)}", where=source)
    else:
        chain_of_runs(source)


def _command_for(source: str) -> str:
    """Return the command of the built-in recipe with the default run folder `source`, or ""."""
    line = re.compile(rf"^out: {re.escape(source)}\s*(#.*)?$", re.M)  # to parse all takes a quarter of a second
    made_by = (name for name in names() if line.search(find(name).read_text(encoding="utf-8")))
    return next((f"{COMMANDS[kind_of(name).method]} {name}" for name in made_by), "")


def has_checkpoint(run: str | Path) -> bool:
    """Return whether a run folder has a checkpoint to resume from; a bucket is assumed to have it."""
    folder = folder_below(Path(run), CHECKPOINTS)
    return any(folder.glob("*[0-9]")) or (folder / "bucket.json").exists()


def check_one_process(command: str) -> None:
    """Refuse a command of one process if the environment names several processes or asks the cluster.

    Raises:
        CoveyError: it does.
    """
    count, mode = os.environ.get(processes.COUNT, ""), os.environ.get(processes.MODE)
    several = count.isdecimal() and int(count) > 1
    if mode == "auto" or (several and mode != "off"):
        named = f"{processes.MODE} is auto" if mode == "auto" else f"{processes.COUNT} is {count}"
        raise CoveyError(
            f"{command} runs in one process, and {named}",
            want="one process",
            fix=f"{processes.MODE}=off before the command",
            where="environment",
        )


def resume_command(run: str | Path) -> str:
    """Return the command that resumes the run at `run`, or the call in the script that began it."""
    if recipe.read_settings(Path(run)).get("data.task") == FROM_PYTHON:
        return "the script that began it: learner.train(rows, out=...)"
    return f"{COMMANDS[kind_of(run).method]} --resume {run}"


def new_run_folder(recipe: AnyRecipe) -> Path:
    """Return the folder of a new run: `out`, or runs/<name>-<n> with the first n that is free.

    Raises:
        CoveyError: something is already there, or it is the address of an object store.
    """
    if recipe.out is None:
        taken = {path.name for path in Path("runs").glob(f"{recipe.name}-*")}
        return Path("runs") / next(n for i in range(1, len(taken) + 2) if (n := f"{recipe.name}-{i}") not in taken)
    out = Path(recipe.out).expanduser()
    check_not_url(out)
    if is_run(out):
        raise CoveyError("a run is already here", fix=f"--out ANOTHER, or: {resume_command(out)}", where=str(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CoveyError("this folder is not empty", want="a new or empty folder", fix="--out ANOTHER", where=str(out))
    return out


@contextmanager
def reserve_run_folder(recipe: AnyRecipe) -> Iterator[Path]:
    """Create the folder that `new_run_folder` names, for the duration of the context. If the recipe sets no folder and
    another process has just taken the number, the next free one is used. An empty folder is removed at the end.

    Raises:
        CoveyError: something is already there, or the folder cannot be created.
    """
    from covey.train.storage import make_folder

    out = new_run_folder(recipe)
    while not (created := make_folder(out.absolute())) and recipe.out is None:
        out = new_run_folder(recipe)
    path = out.absolute()  # a reward function may change the working directory meanwhile
    try:
        yield out
    finally:
        if created:
            with suppress(OSError):  # not empty
                path.rmdir()
