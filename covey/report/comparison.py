"""Compare the settings of runs with the defaults and with each other."""

import json
from collections.abc import Sequence
from typing import Any

from covey.report.run_data import RunData, built_in_settings, default_settings

NAMES = ("name", "description", "needs", "expect", "out", "method")
"""Settings that describe a run and do not change it; they do not count as differences."""


def settings_table(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return every setting of the runs: its name, default, value in the built-in recipe of the first run's name, value
    per run, and whether it differs.

    `changed` is whether a run has another value than the default, `edited` another one than the built-in recipe of its
    name, and `differs` whether the runs have different values. A setting that this version of Covey lacks has the
    default null, and one that a run lacks has the value null.
    """
    recipes = [built_in_settings(str(run.settings.get("name"))) for run in runs]
    defaults = [default_settings(run.method, run.settings.get("grpo.algorithm")) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = []
    for name in names:
        values = [_shown(run.settings[name]) if name in run.settings else None for run in runs]
        standard = [_shown(known[name]) if name in known else None for known in defaults]
        built_in = [_shown(known[name]) if name in known else None for known in recipes]
        counts = name not in NAMES
        rows.append(
            {
                "name": name,
                "default": standard[0],
                "values": values,
                "built_in": built_in[0],
                "edited": counts and any(old not in (None, new) for old, new in zip(built_in, values, strict=True)),
                "changed": counts and values != standard,
                "differs": counts and len(set(values)) > 1,
            }
        )
    return rows


def _shown(value: Any) -> str:
    """Return a value as text: as in JSON, and text itself without quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
