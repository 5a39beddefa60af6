"""Compare the modules of the user's that a recipe names over all processes, before they are imported for the run."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from covey.config.recipe import Recipe, SFTRecipe
from covey.files import file_sha256
from covey.parallel import processes


def check_code(recipe: Recipe | SFTRecipe) -> None:
    """Refuse processes in which a file of a module that the recipe names as module:member differs from that of process
    0.

    Raises:
        CoveyError: one does.
    """
    processes.here().check_same(
        "code of the recipe",
        lambda: {
            name: digest
            for package in {name.partition(".")[0] for name in module_names(recipe)}
            for name, digest in digests(package).items()
        },
        want="the same files in all processes",
        fix="copy the files of process 0 to all machines, or start all processes in one shared folder",
    )


def module_names(recipe: Recipe | SFTRecipe) -> list[str]:
    """Return the names of the modules of reward functions, environments and tools; they need not exist."""
    return sorted({module for name in _members(recipe) if (module := _module_of(name))})


def digests(module: str) -> dict[str, str]:
    """Return the digest of the file of a module, by its name; of a package those of all its modules. Nothing is
    imported, and a missing module has none: importing it says why.
    """
    top, files = module.partition(".")[0], list[tuple[str, Path]]()
    sys.path.insert(0, here := os.getcwd())
    try:
        spec = find_spec(top)
    except ValueError:  # its name is empty, or it is the script itself
        spec = None
    finally:
        sys.path.remove(here)
    if spec is not None and spec.submodule_search_locations is not None:
        for root in map(Path, spec.submodule_search_locations):
            files += [(f"{top}/{file.relative_to(root).as_posix()}", file) for file in root.rglob("*.py")]
    elif spec is not None and spec.origin:
        files = [(Path(spec.origin).name, Path(spec.origin))]
    return {name: file_sha256(file) for name, file in files if file.is_file()}


def _members(recipe: Recipe | SFTRecipe) -> Iterator[str]:
    yield from recipe.evaluation.judges.values()
    if isinstance(recipe, Recipe):
        yield from (str(name) for name in (*recipe.rewards, *recipe.envs.tools, recipe.envs.environment or ""))


def _module_of(name: str) -> str:
    """Return the module in `module:member`, `trl:module:Class` or `verifiers:MODULE`; "" for other names."""
    first, _, rest = name.partition(":")
    if first == "verifiers":
        return rest
    if first == "trl":
        first, _, rest = rest.partition(":")
    return first if rest and first != "openenv" else ""
