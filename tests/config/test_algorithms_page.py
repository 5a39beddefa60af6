"""The pages on algorithms say what `PRESETS` says: every row, deviation and key. The functions of the guide work."""

import re
import runpy
from dataclasses import fields
from itertools import dropwhile, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.config.algorithms import PRESETS, Algorithm, algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.advantages import ADVANTAGES
from covey.losses.policy import AGGREGATES, KLS, RATIOS, SURROGATES, LossInputs, policy_loss

advantages_table = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools" / "advantages_table.py")))
DOCS = Path(__file__).parents[2] / "docs"
PAGE, GUIDE, *MORE = (
    (DOCS / f"{name}.md").read_text() for name in ("algorithms", "choose-algorithm", "algorithm-settings", "ppo")
)


def table(heading: str) -> list[dict[str, str]]:
    """The first table under a heading: a dict a row, column → cell."""
    lines = dropwhile(lambda line: not line.startswith("|"), PAGE.partition(f"## {heading}\n")[2].splitlines())
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in takewhile(bool, lines)]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


ROWS = {row["name"].strip("`"): row for row in table("The presets")}


def clip(x: Algorithm) -> str:
    high = "" if x.epsilon_high is None else f" / {x.epsilon_high:.4g}"
    return {
        "clip": f"{x.epsilon:.4g}{high}",
        "cispo": f"cap {x.cap:g}",
        "sapo": f"τ {x.sapo_positive:g} / {x.sapo_negative:g}",
        "reinforce": "—",
    }[x.surrogate]


def extras(x: Algorithm) -> str:
    found = {
        "dynamic sampling": x.max_sampling_rounds > 1,
        "overlong shaping": x.overlong_buffer > 0,
        "critic": x.needs_critic,
        "whitened advantages": x.whiten,
        "entropy bonus": x.entropy_bonus != 0,
        "correction": x.correction != "none",
        "truncated masked": x.mask_truncated,
        "adaptive β": x.kl_target is not None,
    }
    return ", ".join(name for name, there in found.items() if there) or "—"


def test_every_preset_has_a_row() -> None:
    assert list(ROWS) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_is_its_preset(name: str) -> None:
    x, row = algorithm_of(GRPOConfig(name)), ROWS[name]
    assert row == {
        "name": f"`{name}`",
        "advantage": f"`{x.advantage}`",
        "ratio": "—" if x.surrogate == "reinforce" else f"`{x.ratio}`",
        "surrogate": f"`{x.surrogate}`",
        "aggregate": f"`{x.aggregate}`",
        "clip": clip(x),
        "KL": f"`{x.kl}` in {x.kl_in}, β {x.beta:g}" if x.beta else "—",
        "extras": extras(x),
        "paper": row["paper"],
        "when": PRESETS[name].when,
    }
    numbers = re.findall(r"arXiv:([\d.]+\d)", PRESETS[name].paper)
    assert re.findall(r"abs/([\d.]+)", row["paper"]) == numbers
    assert numbers or row["paper"] in PRESETS[name].paper


@pytest.mark.parametrize("name", PRESETS)
def test_a_deviation_is_told(name: str) -> None:
    line = f"- `{name}`: {PRESETS[name].deviations}."
    assert (line in PAGE.splitlines()) == bool(PRESETS[name].deviations)


def test_every_setting_and_every_function_is_explained() -> None:
    texts = {"paper", "deviations", "when", "name"}
    settings = ({f.name for f in fields(Algorithm)} | {f.name for f in fields(GRPOConfig)}) - texts
    names = {*settings, *ADVANTAGES, *RATIOS, *SURROGATES, *AGGREGATES, *KLS} - {"algorithm", "reward_weights"}
    assert sorted(name for name in names if not re.search(rf"`{name}\b", "".join([PAGE, GUIDE, *MORE]))) == []


def test_the_table_of_advantages_is_that_of_the_package() -> None:
    assert advantages_table.text() == PAGE


def test_the_functions_of_the_page_work() -> None:
    """The surrogate in a loss with its gradient, the advantages of a table with gaps."""
    page: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", GUIDE, re.S)[0], page)
    ones = jnp.ones((1, 2))
    inputs = LossInputs(advantage=ones, weight=ones, rollout_logps=-ones, beta=0 * ones[:, :1], old_logps=-ones)

    def loss(logps: jax.Array) -> jax.Array:
        return policy_loss(
            algorithm_of(GRPOConfig("dr_grpo")),
            logps,
            ones,
            jnp.array([[1, 2]]),
            inputs,
            page["my_surrogate"],
        )[0]

    value, grad = jax.value_and_grad(loss)(jnp.array([[-1.0, -0.5]]))
    assert float(value) == pytest.approx(-1.0 - 1.2, rel=1e-6)
    assert grad.tolist() == [[-1.0, 0.0]]
    assert page["my_advantage"](np.array([[1.0, 0.0, np.nan]])).tolist() == [[1.0, -1.0, 0.0]]
