"""Execute `covey validate`: make every check of a recipe that needs neither a model nor JAX.

A run makes the same checks before it starts and stops at the first mistake; this command makes all of them and lists
every mistake. Data in local files are read in full, so that a malformed line or a missing column is found.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from covey.cli.checks import Check, checks_of, judges, new_run_folder, reward_names
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.schema import HUBS
from covey.display import echo
from covey.errors import CoveyError

NOT_IMPORTED = "not imported"
"""Subject of the names whose modules --no-import leaves out."""


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
    skipped = list(dict.fromkeys(check.name for check in checks if check.executes_module and not imports))
    failures = list(_failures(check for check in checks if check.name not in skipped))
    wrong, problems = {subject for subject, _ in failures}, [error for _, error in failures]
    results = {"settings": f"{loaded.name}, for {recipe.COMMANDS[loaded.method]}", "model": loaded.model.source}
    results["adapter"] = loaded.model.adapter or ""
    results["rewards"] = ", ".join(name for name in reward_names(loaded) if name not in skipped)
    results[NOT_IMPORTED] = ", ".join(skipped)
    read = partial(_check_data, loaded, None if "rewards" in wrong else skipped)
    for subject, describe in (("data", read), ("run folder", partial(new_run_folder, loaded))):
        try:
            results[subject] = "" if subject in wrong else str(describe())
        except CoveyError as error:
            problems.append(error)
    return {subject: text for subject, text in results.items() if text and subject not in wrong}, problems


def _failures(checks: Iterable[Check]) -> Iterator[tuple[str, CoveyError]]:
    """Make the checks; yield the subject and the error of those that fail."""
    for check in checks:
        try:
            check.run()
        except CoveyError as error:
            yield check.subject, error


def _check_data(loaded: recipe.Recipe | recipe.SFTRecipe, skipped: Sequence[str] | None) -> str:
    """Read the data if they are local and return a description.

    Args:
        loaded: the recipe.
        skipped: reward functions whose columns are not checked; None for all of them.

    Raises:
        CoveyError: the data cannot be read, or lack a column that a reward function needs.
    """
    from covey.data import sources  # late, here and below: a mistake in the settings is found without them

    if (loaded.data.path or "").startswith(HUBS):
        return f"{loaded.data.path}, which is not read here"
    if isinstance(loaded, recipe.Recipe):
        data, trains, judged = sources.load(loaded.data), loaded.rewards, True
    else:
        data, trains, judged = sources.load_examples(loaded.data), (), bool(loaded.evaluation.answers)
    if skipped is not None:
        from covey.rewards import check_columns, check_evaluation_columns

        for rows in (data.train, data.test):
            check_columns(tuple(name for name in trains if name not in skipped), rows)
        if judged and not set(skipped).intersection(judges(loaded)):
            check_evaluation_columns(loaded.evaluation, data.test)
    columns = dict.fromkeys(name for row in data.train for name in row)
    shown = f"{loaded.data.path or data.name}: {len(data.train):,} training rows, {len(data.test):,} held out"
    return f"{shown}; columns {', '.join(columns)}"


def _print(results: dict[str, str], problems: Sequence[CoveyError]) -> None:
    for subject, text in results.items():
        unchecked = ", nor are the columns checked that they need" if subject == NOT_IMPORTED else ""
        echo(f"{'--' if unchecked else 'ok':<5} {subject:<10} {text}{unchecked}")
    for problem in problems:
        echo(str(problem), keep="\n", file=sys.stderr)
