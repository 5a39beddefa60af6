"""What can be known to be wrong before JAX is imported: paths, names of reward functions, a folder that is taken."""

from pathlib import Path

from covey.errors import CoveyError, DataError
from covey.models import sources
from covey.recipe import Recipe, is_run


def check_run(recipe: Recipe) -> None:
    """Refuse a recipe whose model, data or reward functions are not there.

    Raises:
        CoveyError: the subclass that fits.
    """
    sources.check(recipe.model.source)
    for key, path in (("data.path", recipe.data.path), ("data.test_path", recipe.data.test_path)):
        if path and not Path(path).expanduser().exists():
            raise DataError(f"{key}: there is no {path}", fix=f"--{key.replace('_', '-')} PATH")

    from covey.rewards.scoring import resolve  # late: it needs NumPy, and what is above does not

    for name in filter(None, (*recipe.rewards, recipe.evaluation.accuracy, recipe.evaluation.format)):
        resolve(name)


def check_source(source: str) -> None:
    """Refuse what is neither a run folder nor a model."""
    if not is_run(source):
        sources.check(source)


def new_run_folder(recipe: Recipe) -> Path:
    """Where the run goes: `out`, or runs/<name>-<n> with the first n that is free.

    Raises:
        CoveyError: something is already there.
    """
    if recipe.out is None:
        taken = {path.name for path in Path("runs").glob(f"{recipe.name}-*")}
        return Path("runs") / next(n for i in range(1, len(taken) + 2) if (n := f"{recipe.name}-{i}") not in taken)
    out = Path(recipe.out).expanduser()
    if is_run(out):
        raise CoveyError("a run is already here", fix=f"--out ANOTHER, or: covey train --resume {out}", where=str(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CoveyError("this folder is not empty", want="a new or empty folder", fix="--out ANOTHER", where=str(out))
    return out
