"""The code of a recipe is compared before any of it is executed."""

from pathlib import Path

import pytest

from covey.config import recipe
from covey.files import file_sha256
from covey_hosts.recipe_code import _module_of, digests, module_names


def test_modules_of_a_recipe_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit")
    (tmp_path / "games" / "inner").mkdir(parents=True)
    (tmp_path / "games" / "inner" / "chess.py").write_text("raise SystemExit")
    changes = ["rewards=[environment,mine:score]", "envs.environment=trl:games.inner.chess:Chess"]
    assert module_names(recipe.load("guess-tiny", changes)) == ["games.inner.chess", "mine"]
    changes = ["envs.tools=[calculator,no_such_module:f]"]
    assert module_names(recipe.load("quickstart", changes)) == ["no_such_module"]
    assert digests("mine") == {"mine.py": file_sha256(tmp_path / "mine.py")}
    assert list(digests("games.inner.chess")) == ["games/inner/chess.py"]
    assert digests("no_such_module") == digests("") == {}
    for name, module in {"verifiers:wordle": "wordle", "openenv:http://a:1": "", "guess": ""}.items():
        assert _module_of(name) == module
