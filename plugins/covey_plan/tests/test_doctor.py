"""`covey doctor` sees what is missing, and survives it."""

import re
import sys

import pytest

from covey import __version__
from covey.cli import main as cli
from covey.cli.parse import Line
from covey_plan import doctor
from covey_plan.command import DOCTOR

LINE = Line(DOCTOR, [], {}, [])


def install_covey(folder, *requirements):
    """Installs a Covey with these requirements in front of the one that is there."""
    info = folder / f"covey-{__version__}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: covey", f"Version: {__version__}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements)]) + "\n")


@pytest.mark.slow
def test_doctor_looks_at_every_package_of_an_extra(capsys, monkeypatch, tmp_path):
    """The trap: the first package of an extra is there, the second is not, and all is said to be well."""
    requirements = "numpy>=2; extra == 'hub'", "made-up[x]>=1; extra == 'hub'", "numpy; extra == 'math'"
    install_covey(tmp_path, "jax>=0.10", *requirements)
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.doctor(LINE) == 0  # the metadata in front have no commands
    shown = capsys.readouterr().out
    assert "jax" in shown
    assert re.search(r"^warn  hub .*: without made-up\n +fix: pip install -e .*\[hub\]", shown, re.M)
    assert re.search(r"^ok    math ", shown, re.M)
    assert re.search(r"^ok    sampler +(\d+) of \1 tokens", shown, re.M)
    assert list(doctor.EXTRAS) == sorted(doctor.EXTRAS)


@pytest.mark.slow
def test_doctor_survives_a_broken_jax(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    assert cli.main(["doctor"]) == 2
    assert "does not work" in capsys.readouterr().out
