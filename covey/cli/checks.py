"""Check what can be checked before JAX is imported: paths, names of reward functions, a run folder that is taken."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from covey.config import processes, strict_yaml
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
    section_of,
)
from covey.config.schema import HUBS, DataConfig, EnvsConfig
from covey.config.schema.data import DATA_PATHS, FROM_PYTHON
from covey.errors import CoveyError, RecipeError, WeightsError
from covey.files import folder_below, refuse_url
from covey.monitor.run_files import CHECKPOINTS


class Check(NamedTuple):
    """One check of a recipe: what it looks at, and a function that raises `CoveyError` if that is wrong."""

    subject: str
    run: Callable[[], object]


def check_run(recipe: Recipe | SFTRecipe) -> None:
    """Refuse a recipe whose model, data or reward functions do not exist.

    Raises:
        CoveyError: the subclass that fits.
    """
    for check in checks_of(recipe):
        check.run()


def checks_of(recipe: Recipe | SFTRecipe, imports: bool = True) -> Iterator[Check]:
    """Yield the checks of a recipe that need neither a model nor JAX, the fastest first.

    Args:
        imports: include the checks that import modules which the recipe names.
    """
    yield Check("model", partial(check_source, recipe.model.source))
    if recipe.model.adapter:
        yield Check("adapter", partial(_check_adapter, recipe.model.adapter))
    for key, path in (("data.path", recipe.data.path), ("data.test_path", recipe.data.test_path)):
        if path and not path.startswith(HUBS):
            yield Check("data", partial(_check_path, recipe.data, key, path))
    if isinstance(recipe, Recipe):
        yield from _stage_checks(recipe, imports)
    for name in dict.fromkeys(reward_names(recipe)):
        if imports or not imports_module(name):
            yield Check("rewards", partial(_check_reward, name))


def imports_module(name: str) -> bool:
    """Return whether the lookup of a reward function, environment or tool may import a module that the name gives."""
    return ":" in name


def module_names(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names in a recipe whose lookup imports a module."""
    envs = (recipe.envs.environment or "", *recipe.envs.tools) if isinstance(recipe, Recipe) else ()
    return list(dict.fromkeys(filter(imports_module, (*reward_names(recipe), *envs))))


def reward_names(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names of the functions that train and that judge the held-out completions."""
    return [*(recipe.rewards if isinstance(recipe, Recipe) else ()), *judges(recipe)]


def judges(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names of the functions that judge the held-out completions."""
    evaluation = recipe.evaluation
    return list(filter(None, (evaluation.accuracy, evaluation.partial, evaluation.format)))


def _check_adapter(adapter: str) -> None:
    if not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        raise WeightsError(
            "no adapter_config.json here", want="--model.adapter FOLDER, as PEFT saves it", where=adapter
        )


def _check_path(config: DataConfig, key: str, path: str) -> None:
    from covey.data.readers import existing_path  # late: a command without data does not need it

    existing_path(path, key, DATA_PATHS[config.task])


def _check_reward(name: str) -> None:
    from covey.rewards.registry import resolve  # late, here and below: a command without rewards does not need it

    resolve(name)


def _check_environment(config: EnvsConfig) -> None:
    from covey.envs.registry import resolve

    resolve(str(config.environment), config)


def _check_tool(name: str, config: EnvsConfig) -> None:
    from covey.envs.registry import resolve_tool  # late: both need NumPy
    from covey.envs.tools import Tool

    Tool.of(resolve_tool(name, config.python_engine))


def _stage_checks(recipe: Recipe, imports: bool) -> Iterator[Check]:
    """Yield the checks of settings that only an RL run has."""
    for role, source in (("critic", recipe.critic), ("reward_model", recipe.reward_model)):
        if source:
            yield Check(role, partial(_check_model, source))
    environment = recipe.envs.environment
    if environment and (imports or not imports_module(environment)):
        yield Check("environment", partial(_check_environment, recipe.envs))
    for name in recipe.envs.tools:
        if imports or not imports_module(name):
            yield Check("tools", partial(_check_tool, name, recipe.envs))
    yield Check("training", partial(_check_stages, recipe))


def _check_model(source: str) -> None:
    from covey.models.loading import sources  # late, here and below: importing it takes as long as reading a recipe

    sources.check_source(source)


def _check_stages(recipe: Recipe) -> None:
    from covey.rl.stage_sizes import stage_sizes  # late, as above

    stage_sizes(recipe.training, recipe.grpo.num_generations)


def check_not_model(source: str, kind: type[AnyRecipe]) -> None:
    """Refuse a model in the place of a recipe of this kind.

    Raises:
        RecipeError: `source` is a name or a folder of a model; the error says how to train it.
    """
    if source in names() or is_run(source):
        return
    from covey.models.loading.sources import NAMED_MODELS

    if source in NAMED_MODELS or source.startswith("hf:") or (Path(source) / "config.json").is_file():
        fix = f"{COMMANDS[kind.method]} NAME_OR_YAML --model.source {source}"
        raise RecipeError("this is a model", want="a recipe: a built-in name or a YAML file", fix=fix, where=source)


def check_not_recipe(source: str) -> None:
    """Refuse a recipe in the place of a model.

    Raises:
        WeightsError: it is a built-in recipe or a YAML file; the error says which command makes a model of it.
    """
    is_file = Path(source).suffix in (".yaml", ".yml") and Path(source).is_file()
    if is_file or (source in names() and not Path(source).exists()):
        fix = f"{COMMANDS[kind_of(source).method]} {source}, and then the folder of its run in this place"
        raise WeightsError("this is a recipe", want="a run or a model", fix=fix, where=source)


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
    """Return the command of the built-in recipe whose default run folder is `source`, or ""."""
    texts = {name: find(name).read_text(encoding="utf-8") for name in names()}
    line = re.compile(rf"^out: .*{re.escape(source)}", re.M)
    for name in (name for name, text in texts.items() if line.search(text)):  # to parse all takes a quarter of a second
        written = strict_yaml.read(texts[name], name).tree
        if written.get("out") == source:
            return f"{COMMANDS[kind_of(name).method]} {name}"
    return ""


def has_checkpoint(run: str | Path) -> bool:
    """Return whether a run folder has a checkpoint to resume from; one in a bucket is not looked for."""
    folder = folder_below(Path(run), CHECKPOINTS)
    return any(folder.glob("*[0-9]")) or (folder / "bucket.json").exists()


def check_one_process(command: str) -> None:
    """Refuse a command of one process where the environment names several, or asks the cluster: each would do all of
    the work.

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
    tree = section_of(run, "data").tree
    data = tree.get("data") if isinstance(tree, dict) else None
    if isinstance(data, dict) and data.get("task") == FROM_PYTHON:
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
    refuse_url(out)
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
    from covey.train import checksums

    out = new_run_folder(recipe)
    while not (made := checksums.make_folder(out.absolute())) and recipe.out is None:
        out = new_run_folder(recipe)
    place = out.absolute()  # a reward function may change the working directory meanwhile
    try:
        yield out
    finally:
        if made:
            with suppress(OSError):  # not empty
                place.rmdir()
