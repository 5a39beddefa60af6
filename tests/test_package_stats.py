"""The figures that tools/package_stats.py prints, on a package small enough to count by hand and on Covey itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grimp")
ROOT = Path(__file__).parents[1]
FILES = {
    "covey/__init__.py": '"""Story."""\n',
    "covey/first.py": '"""Story\nof two lines."""\n\nfrom covey import second\n\nLIMIT = 3\n"""Documented."""\n',
    "covey/second.py": "# Why.\ndef late():\n    from covey import first  # late\n\n    return (\n        first)\n",
    "covey/third.py": "import json\n\nfrom covey import first, second\n",
    "pyproject.toml": '[[tool.importlinter.contracts]]\nlayers = ["a", "b : c"]\n[[tool.importlinter.contracts]]\n',
}


def stats(*words: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools" / "package_stats.py"), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_a_small_package_is_counted_as_by_hand(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert stats("--root", str(tmp_path), "--module", "covey.third") == {
        "files": 4,
        "lines": 17,
        "code lines": 8,
        "statements": 7,
        "contract lines": 2,
        "import cycles": [["covey.first", "covey.second"]],
        "import closure": 2,
    }
