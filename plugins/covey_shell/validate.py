"""Execute `covey validate`: make every check of a recipe, and list all mistakes.

Local data are read in full, and models at a path are checked as loading does, which needs JAX.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from covey.cli.checks import Check, checks_of, new_run_folder, reward_names
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.schema import HUBS
from covey.display import echo
from covey.errors import CoveyError

NOT_IMPORTED, DUPLICATES = "not imported", "duplicates"
"""Subjects that are no mistakes: names that --no-import does not import, and equal rows."""


def validate(line: Line) -> int:
    """Execute `covey validate NAME_OR_YAML [--no-import] [--json] [settings]`; return 0, or 2 if something is wrong."""
    (source,) = line.arguments
    try:
        loaded = recipe.load_any(source, line.settings)
    except CoveyError as error:
        results, problems = dict[str, str](), list(error.problems) or [error]
    else:
        results, problems = run_checks(loaded, "--no-import" not in line.options)
    if "--json" in line.options:
        listed = [{name: getattr(problem, name) for name in ("what", "want", "fix", "where")} for problem in problems]
        echo(json.dumps({"recipe": source, "valid": not problems, "found": results, "problems": listed}))
    else:
        _print(results, problems)
    return 2 if problems else 0


def run_checks(loaded: recipe.Recipe | recipe.SFTRecipe, imports: bool) -> tuple[dict[str, str], list[CoveyError]]:
    """Make every check.

    Args:
        loaded: the recipe.
        imports: import the modules of the reward functions, environments and tools that the recipe names, and so
            execute them.

    Returns:
        What is right, by subject, and what is wrong.
    """
    checks = list(checks_of(loaded))
    skipped = list(dict.fromkeys(check.name for check in checks if ":" in check.name and not imports))
    failures = list(_failures(check for check in checks if check.name not in skipped))
    failures += _failures(check for check in weight_checks(loaded) if check.subject not in dict(failures))
    wrong, problems = {subject for subject, _ in failures}, [error for _, error in failures]
    unread = ", which is not read here" if loaded.model.source.startswith("hf:") else ""
    results = {
        "settings": f"{loaded.name}, for {recipe.COMMANDS[loaded.method]}",
        "model": loaded.model.source + unread,
    }
    results["adapter"] = loaded.model.adapter or ""
    results["rewards"] = ", ".join(name for name in reward_names(loaded) if name not in skipped)
    results[NOT_IMPORTED] = ", ".join(skipped)
    looks: dict[str, Callable[[], dict[str, str]]] = {
        "data": partial(_check_data, loaded, None if "rewards" in wrong else skipped),
        "run folder": lambda: {"run folder": str(new_run_folder(loaded))},
    }
    for subject, check in looks.items():
        try:
            results |= {} if subject in wrong else check()
        except CoveyError as error:
            problems.append(error)
    return {subject: text for subject, text in results.items() if text and subject not in wrong}, problems


def weight_checks(loaded: recipe.Recipe | recipe.SFTRecipe) -> Iterator[Check]:
    """Yield the checks of models at a path, which import JAX; weights are not read."""
    for role in ("model", "critic", "reward_model"):
        source = loaded.model.source if role == "model" else getattr(loaded, role, None)
        if source and os.path.exists(os.path.expanduser(source)) and not recipe.is_run(source):
            yield Check(role, "covey.models.loading.weights:check_loadable", (source, role))
            if role == "model" and loaded.model.adapter:
                yield Check("adapter", "covey.recipes.load_model:abstract_for", (loaded, "cpu"))


def _failures(checks: Iterable[Check]) -> Iterator[tuple[str, CoveyError]]:
    """Make the checks; yield subject and error of each failure."""
    for check in checks:
        try:
            check.run()
        except CoveyError as error:
            yield check.subject, error


def _check_data(loaded: recipe.Recipe | recipe.SFTRecipe, skipped: Sequence[str] | None) -> dict[str, str]:
    """Read local data; return descriptions of rows and duplicates by subject.

    Args:
        loaded: the recipe.
        skipped: reward functions whose columns are not checked; None for all of them.

    Raises:
        CoveyError: the data cannot be read, or lack a column that a reward function needs.
    """
    from covey.data import sources  # late, here and below: a mistake in the settings is found without them

    if (loaded.data.path or "").startswith(HUBS):
        return {"data": f"{loaded.data.path}, which is not read here"}
    data = sources.load_data(loaded.data)
    if isinstance(loaded, recipe.Recipe):
        trains, judged = loaded.rewards, True
    else:
        trains, judged = (), bool(loaded.evaluation.answers)
    if skipped is not None:
        from covey.rewards.call import check_columns, check_evaluation_columns

        for rows in (data.train, data.test):
            check_columns(tuple(name for name in trains if name not in skipped), rows)
        if judged and not set(skipped).intersection(loaded.evaluation.judges.values()):
            check_evaluation_columns(loaded.evaluation, data.test)
    columns = dict.fromkeys(name for row in data.train for name in row)
    shown = f"{loaded.data.path or data.name}: {len(data.train):,} training rows, {len(data.test):,} held out"
    from covey_data.duplicates import compare_rows, describe_overlap, describe_repeated

    duplicates = compare_rows(loaded, data.train, data.test)
    found = filter(None, (describe_repeated(duplicates), describe_overlap(duplicates, len(data.test))))
    return {"data": f"{shown}; columns {', '.join(columns)}", DUPLICATES: "; ".join(found)}


def _print(results: dict[str, str], problems: Sequence[CoveyError]) -> None:
    for subject, text in results.items():
        mark = "--" if subject in (NOT_IMPORTED, DUPLICATES) else "ok"
        unchecked = ", nor are the columns checked that they need" if subject == NOT_IMPORTED else ""
        echo(f"{mark:<5} {subject:<10} {text}{unchecked}")
    for problem in problems:
        echo(str(problem), keep="\n", file=sys.stderr)
