"""Processes with other code, or without a shared folder, are refused before anything is loaded; threads stand for
processes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.errors import RecipeError
from covey.files import file_sha256
from covey.parallel import processes
from covey_hosts import checks

Threads = Callable[[int, Callable[[int], Any]], list[Any]]


def test_other_versions_and_files_are_named_by_process(threads: Threads) -> None:
    first = {"jax": "0.10.2", "covey/rl/grpo.py": "a" * 64, "covey/new.py": "b" * 64}
    others = [{}, {"jax": "0.10.1"}, {"covey/rl/grpo.py": "c" * 64, "covey/old.py": "d" * 64}]
    values = [first | other for other in others]
    del values[2]["covey/new.py"]
    errors = threads(3, lambda i: processes.here().check_same("code", lambda: values[i], "install it"))
    assert len({str(error) for error in errors}) == 1
    text = str(errors[0])
    assert "process 1 on " in text
    assert "jax is 0.10.1, there 0.10.2" in text
    assert "covey/rl/grpo.py is another file" in text
    assert "covey/new.py is missing" in text
    assert "covey/old.py is not there in process 0" in text
    assert "fix: install it" in text
    assert threads(2, lambda i: processes.here().check_same("code", lambda: first, "")) == [None, None]


def test_differences_are_refused_by_all(threads: Threads) -> None:
    for error in threads(3, lambda i: processes.here().check_same("recipe", lambda: i // 2, "start again")):
        assert isinstance(error, RecipeError)
        assert "recipe differs from that of process 0 on" in str(error)
        assert "process 2 on" in str(error)
        assert "process 1" not in str(error)


def test_few_of_many_differences_are_named(threads: Threads) -> None:
    errors = threads(2, lambda i: processes.here().check_same("code", lambda: {str(n): f"v{i}" for n in range(20)}, ""))
    assert str(errors[0]).count("there v0") == checks.NAMED
    assert f"{20 - checks.NAMED} more" in str(errors[0])


def test_every_module_and_recipe_of_the_package_counts() -> None:
    digests, root = checks.source_digests(), Path(covey.__file__).parent
    assert digests["covey/rl/grpo.py"] == file_sha256(root / "rl" / "grpo.py")
    assert {"covey/config/recipes/quickstart.yaml", "covey_hosts/checks.py"} <= digests.keys()
    assert {"covey", "python", "jax", "jaxlib", "numpy"} <= {name for name, value in checks.versions().items() if value}


def test_one_shared_folder_is_left_as_it_was(threads: Threads, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    assert threads(3, lambda i: processes.here().check_shared_folder(tmp_path / "run")) == [None] * 3
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("there", [True, False])
def test_folders_of_one_name_on_two_disks_are_refused(threads: Threads, tmp_path: Path, there: bool) -> None:
    places = [tmp_path / str(number) / "run" for number in range(2)]
    if there:
        places[1].mkdir(parents=True)
    errors = threads(2, lambda i: processes.here().check_shared_folder(places[i]))
    assert str(errors[0]) == str(errors[1])
    assert f"{places[1]} is not the folder of that path in process 0" in str(errors[0])
    assert "process 1 on " in str(errors[0])
    assert "mount one file system" in str(errors[0])
    assert list(places[0].iterdir()) == []
    assert places[1].exists() == there


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_cannot_write_there_is_named(
    threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    name = "_write" if number == 0 else "_read"

    def refuses(*_: object) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(checks, name, refuses)
    errors = threads(2, lambda i: processes.here().check_shared_folder(tmp_path))
    assert all(f"process {number} on " in str(error) and "Permission denied" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_another_file_under_that_name_is_refused(
    threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = checks._read
    monkeypatch.setattr(checks, "_read", lambda folder, told, index: read(folder, told | {"text": "another"}, index))
    errors = threads(2, lambda i: processes.here().check_shared_folder(tmp_path))
    assert "has another content than process 0 has written there" in str(errors[1])
