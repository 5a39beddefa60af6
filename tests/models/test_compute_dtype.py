"""The type of products that `auto` chooses on each kind of device."""

from pathlib import Path
from typing import Any

import pytest

from covey.models import compute_dtype
from covey.models.compute_dtype import resolve_compute_dtype
from covey.models.loading import weights

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`machine(platform, flags)`: a machine whose first device and whose processor's flags are these; None for no
    cpuinfo.
    """

    def make(platform: str, flags: str | None = "") -> None:
        file = tmp_path / "cpuinfo"
        if flags is not None:
            file.write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {flags}\nbugs\t\t: amx_bf16\n")
        monkeypatch.setattr(compute_dtype, "CPUINFO", file)
        monkeypatch.setattr(compute_dtype, "platform_of", lambda place: platform)

    return make


@pytest.mark.parametrize(
    ("platform", "flags", "chosen"),
    [
        ("cpu", "avx512f amx_bf16 amx_tile", "bfloat16"),
        ("cpu", "avx512_bf16", "bfloat16"),
        ("cpu", "avx512f avx512_bf16x", "float32"),
        ("cpu", None, "float32"),
        ("tpu", "", "bfloat16"),
        ("cuda", "", "bfloat16"),
        ("gpu", "amx_bf16", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_multiplies_it(
    machine: Any, platform: str, flags: str | None, chosen: str
) -> None:
    machine(platform, flags)
    assert resolve_compute_dtype("auto") == chosen


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_a_type_that_is_named_is_kept(machine: Any, given: str) -> None:
    for flags in ("amx_bf16", ""):
        machine("cpu", flags)
        assert resolve_compute_dtype(given) == given


def test_a_model_is_loaded_with_the_type_chosen(machine: Any) -> None:
    for flags, chosen in (("amx_bf16", "bfloat16"), ("", "float32")):
        machine("cpu", flags)
        assert weights.load(TINY, compute_dtype="auto").model.dtype == chosen
