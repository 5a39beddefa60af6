"""The table of hardware, and what `--on` may name."""

import re

import pytest

from covey.errors import CoveyError
from covey_plan.machines import MACHINES, MEMORY_FRACTIONS, machine_for_jax, parse_target


def test_rates_are_those_of_the_data_sheets() -> None:
    rates = {name: (one.flops["bfloat16"] / 1e12, one.bandwidth / 1e9) for name, one in MACHINES.items()}
    tpus = {"v5e": (197, 819), "v5p": (459, 2765), "v6e": (918, 1640)}
    assert rates == tpus | {"h100": (989, 3350), "h200": (989, 4800), "b200": (2250, 8000)}
    assert all(one.source and 0 < one.share <= 1 and one.memory <= 180e9 for one in MACHINES.values())


@pytest.mark.parametrize(
    ("variable", "value", "memory"),
    [
        ("", "", 105.75),
        (MEMORY_FRACTIONS[0], ".5", 70.5),
        (MEMORY_FRACTIONS[1], "0.9", 126.9),
        (MEMORY_FRACTIONS[1], "1", 141),
    ],
)
def test_of_a_gpu_programs_get_what_jax_takes(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, memory: float
) -> None:
    for name in MEMORY_FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    assert machine_for_jax("h200").memory == pytest.approx(memory * 1e9)
    assert "of 141 GB" in machine_for_jax("h200").source
    assert machine_for_jax("v5e") == MACHINES["v5e"]


@pytest.mark.parametrize("value", ["half", "0", "-1", "1e400", "nan"])
def test_a_fraction_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(MEMORY_FRACTIONS[1], value)
    with pytest.raises(CoveyError, match=r"such as 0\.9"):
        machine_for_jax("h200")


@pytest.mark.parametrize(
    ("name", "products"),
    [("v5e", 4 * 128**2), ("v5p", 8 * 128**2), ("v6e", 4 * 256**2)],
)
def test_clocks_are_those_at_which_the_units_for_products_reach_the_peak(name: str, products: int) -> None:
    machine = MACHINES[name]
    assert 2 * products * machine.clock == pytest.approx(machine.flops["bfloat16"], rel=0.01)


@pytest.mark.parametrize(
    ("text", "platform", "count"),
    [
        ("v5e:2x4", "tpu", 8),
        ("v5p:2x2x2", "tpu", 8),
        ("h100:8", "gpu", 8),
        ("H100", "gpu", 1),
        ("h100:2x8", "gpu", 16),
        ("H200", "gpu", 1),
        ("b200:8", "gpu", 8),
        ("V6E:2X4", "tpu", 8),
        ("CPU", "cpu", None),
        ("cpu", "cpu", None),
    ],
)
def test_devices_are_counted(text: str, platform: str, count: int | None) -> None:
    target = parse_target(text)
    assert (target.platform, target.count) == (platform, count)


@pytest.mark.parametrize("text", ["H100", "h100s", "a100", "v5e", "V5P", "v6", "v6e:", "h100:", "h20"])
def test_a_suggestion_is_accepted(text: str) -> None:
    try:
        target = parse_target(text)
    except CoveyError as error:
        for name in re.sub(r"did you mean |one of: |--on |[?']", "", error.fix).split(", "):
            assert parse_target(name).name == name
    else:
        assert target.name == f"{text.lower()}:1"


@pytest.mark.parametrize(
    "text", ["", "v4:2x2", "v5e", "v5e:8", "v5e:2x0", "v5e:2x2x2x2", "h100:2x4x2", "cpu:4", "v5e:²x2"]
)
def test_devices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(CoveyError, match=r"v5e:2x4|--on cpu"):
        parse_target(text)
