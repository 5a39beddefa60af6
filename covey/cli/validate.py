"""Implement `covey validate`: every check of a recipe that needs neither a model nor JAX.

A run makes the same checks before it starts and stops at the first mistake; this command makes all of them and lists
every mistake. Data in local files are read in full, so that a malformed line or a missing column is found.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from covey.cli.checks import checks_of, imports_module, judges, module_names, new_run_folder, reward_names
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.schema import HUBS
from covey.display import echo
from covey.errors import CoveyError

NOT_IMPORTED = "not imported"
"""Subject of the names whose modules --no-import leaves out."""


def validate(line: Line) -> int:
    """Execute `covey validate NAME_OR_YAML [--no-import] [--json] [settings]`; return 0, or 2 if something is wrong."""
    (source,), imports = line.arguments, "--no-import" not in line.options
    found: dict[str, str] = {}
    problems: list[CoveyError] = []
    try:
        checked = recipe.load_any(source, line.settings)
    except CoveyError as error:
        problems += error.problems or [error]
    else:
        found["settings"] = f"{checked.name}, for {recipe.COMMANDS[checked.method]}"
        problems += _run_checks(checked, found, imports)
    _print_json(source, found, problems) if "--json" in line.options else _print(found, problems)
    return 2 if problems else 0


def _run_checks(
    checked: recipe.Recipe | recipe.SFTRecipe, found: dict[str, str], imports: bool
) -> Iterator[CoveyError]:
    """Make every check; record in `found` what is right, by subject, and yield what is wrong."""
    wrong = set()
    for check in checks_of(checked, imports):
        try:
            check.run()
        except CoveyError as error:
            wrong.add(check.subject)
            yield error
    left_out = () if imports else module_names(checked)
    described = _describe(checked, left_out)
    found |= {subject: text for subject, text in described.items() if text and subject not in wrong}
    read = partial(_check_data, checked, "rewards" not in wrong, imports)
    for subject, describe in (("data", read), ("run folder", partial(_folder, checked))):
        try:
            if subject not in wrong:
                found[subject] = describe()
        except CoveyError as error:
            yield error


def _describe(checked: recipe.Recipe | recipe.SFTRecipe, left_out: Sequence[str]) -> dict[str, str]:
    names = [name for name in dict.fromkeys(reward_names(checked)) if name not in left_out]
    described = {"model": checked.model.source, "adapter": checked.model.adapter or "", "rewards": ", ".join(names)}
    return described | {NOT_IMPORTED: ", ".join(left_out)}


def _check_data(checked: recipe.Recipe | recipe.SFTRecipe, with_rewards: bool, imports: bool) -> str:
    """Read the data if they are local and return a description.

    Args:
        with_rewards: whether the reward functions exist, so that the columns they need are checked too.
        imports: whether modules that the recipe names are imported.

    Raises:
        CoveyError: the data cannot be read, or lack a column that a reward function needs.
    """
    from covey.data import sources  # late, here and below: a mistake in the settings is found without them

    if (checked.data.path or "").startswith(HUBS):
        return f"{checked.data.path}, which is not read here"
    if isinstance(checked, recipe.Recipe):
        data, trains, judged = sources.load(checked.data), checked.rewards, True
    else:
        data, trains, judged = sources.load_examples(checked.data), (), bool(checked.evaluation.answers)
    if with_rewards:
        from covey.rewards import check_columns, check_evaluation_columns

        trains = tuple(name for name in trains if imports or not imports_module(name))
        judged = judged and (imports or not any(map(imports_module, judges(checked))))
        check_columns(trains, data.train)
        check_columns(trains, data.test)
        if judged:
            check_evaluation_columns(checked.evaluation, data.test)
    columns = dict.fromkeys(name for row in data.train for name in row)
    shown = f"{checked.data.path or data.name}: {len(data.train):,} training rows, {len(data.test):,} held out"
    return f"{shown}; columns {', '.join(columns)}"


def _folder(checked: recipe.Recipe | recipe.SFTRecipe) -> str:
    return str(new_run_folder(checked))


def _print(found: dict[str, str], problems: Sequence[CoveyError]) -> None:
    for subject, text in found.items():
        unchecked = ", nor are the columns checked that they need" if subject == NOT_IMPORTED else ""
        echo(f"{'--' if unchecked else 'ok':<5} {subject:<10} {text}{unchecked}")
    for problem in problems:
        echo(str(problem), keep="\n", file=sys.stderr)


def _print_json(source: str, found: dict[str, str], problems: Sequence[CoveyError]) -> None:
    listed = [{name: getattr(one, name) for name in ("what", "want", "fix", "where")} for one in problems]
    result: dict[str, Any] = {"recipe": source, "valid": not problems, "found": found, "problems": listed}
    echo(json.dumps(result))
