"""Names of reward functions: built-in ones, those of the user's modules, and mistakes in both."""

import importlib.metadata
import importlib.util
import sys
from importlib import import_module

import pytest

from covey import registry
from covey.config.schema import RewardSafetyConfig
from covey.errors import CoveyError, RecipeError
from covey.models.stored_kernel import find_format
from covey.rewards.registry import REGISTRY, REWARDS, resolve
from covey.rewards.scoring import RewardRunner


def test_built_in_names_resolve_to_functions_of_that_name():
    for name in REGISTRY.names():
        assert resolve(name).__name__ == name


@pytest.mark.parametrize("name", REGISTRY.names())
def test_a_built_in_reward_reads_chats_as_it_reads_texts(name):
    """TRL passes completions as chats; the columns are those that any of them names."""
    texts = ["<reasoning>a</reasoning><answer>42</answer>", "\\boxed{42}", "#### 42", "Snow falls.", "42"]
    columns = {"answer": ["42"] * 5, "letter": ["S"] * 5, "topic": ["snow"] * 5, "episode_rewards": [0.5] * 5}
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert resolve(name)(["?"] * 5, chats, **columns) == resolve(name)(["?"] * 5, texts, **columns)


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'number_only'"):
        resolve("number_onyl")


def test_a_function_of_ones_own_is_found_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "my_covey_rewards.py").write_text("def brevity(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert resolve("my_covey_rewards:brevity")(["a"]) == [1.0]
    assert sys.path == before
    with pytest.raises(RecipeError, match="did you mean 'brevity'"):
        resolve("my_covey_rewards:brevty")


IMPORT_MISTAKES = {
    "a script that exits": ("import sys\n\nsys.exit(0)\n", 3, "correct covey_mine: it raises"),
    "a syntax error": ("x = 1\ndef f(:\n", 2, "correct line 2 of covey_mine.py"),
    "a missing package": ("x = 1\n\nimport no_such_package.part\n", 3, "pip install no_such_package, or"),
    "a missing name": ("from os import no_such_name\n", 1, "correct covey_mine: it raises"),
}


@pytest.mark.parametrize(("text", "line", "fix"), IMPORT_MISTAKES.values(), ids=IMPORT_MISTAKES)
def test_a_module_that_cannot_be_imported_is_told_with_line_and_fix(tmp_path, monkeypatch, text, line, fix):
    (tmp_path / "covey_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"importing 'covey_mine' failed: \w+: ") as caught:
        resolve("covey_mine:f")
    assert caught.value.where == f"{tmp_path / 'covey_mine'}.py:{line}"
    assert caught.value.fix.startswith(fix)


def test_a_module_that_is_not_there_is_told_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=f"import from {tmp_path}") as caught:
        resolve("covey_nowhere.part:f")
    assert caught.value.where == "rewards"


# --- installed packages


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(package, group=..., **names)`: a package that offers names as entry points of a group."""

    def install(package, group="covey.rewards", **names):
        folder = tmp_path / package
        (folder / f"{package}-1.0.dist-info").mkdir(parents=True)
        (folder / f"{package}-1.0.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        points = "".join(f"{name} = {package}:{member}\n" for name, member in names.items())
        (folder / f"{package}-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{points}")
        (folder / f"{package}.py").write_text("def brevity(completions):\n    return [2.0] * len(completions)\n")
        monkeypatch.syspath_prepend(str(folder))

    return install


def test_an_installed_package_adds_a_reward_by_name(installed):
    installed("covey_example_rewards", brief="brevity", number_only="brevity", exact_answer="brevity")
    assert resolve("brief")(["a", "b"]) == [2.0, 2.0]
    for name, package in {"number_only": "covey", "exact_answer": "covey_gsm8k"}.items():
        if importlib.util.find_spec(package):
            assert resolve(name).__module__.startswith(f"{package}."), "a package replaces no reward of Covey's"
    names = REGISTRY.names()
    assert (names[: len(REWARDS)], "brief" in names) == ([*REWARDS], True)
    with pytest.raises(RecipeError, match="did you mean 'brief'"):
        resolve("breif")


def test_a_name_that_two_packages_offer_is_refused_with_both(installed):
    installed("covey_example_one", brief="brevity")
    installed("covey_example_two", brief="brevity")
    with pytest.raises(RecipeError, match="covey_example_one and covey_example_two both offer") as caught:
        resolve("brief")
    assert "name its module: covey_example_" in caught.value.fix
    assert resolve("covey_example_two:brevity")(["a"]) == [2.0]


def test_an_installed_package_adds_an_environment_and_a_tool(installed):
    envs = pytest.importorskip("covey_envs.registry")
    for group in ("environments", "tools"):
        installed(f"covey_example_{group}", group=f"covey.{group}", brief="brevity")
    assert envs.resolve("brief") is import_module("covey_example_environments").brevity
    assert envs.resolve_tool("brief") is import_module("covey_example_tools").brevity
    with pytest.raises(RecipeError, match="did you mean 'brief'"):
        envs.resolve("breif")


def test_an_entry_point_that_leads_nowhere_is_told(installed):
    installed("covey_example_rewards", brief="brevty", other="brevity.__name__")
    with pytest.raises(RecipeError, match="no function 'brevty'"):
        resolve("brief")
    with pytest.raises(RecipeError, match="no function"):
        resolve("other")


def test_where_no_package_offers_any_name_the_fix_installs_one(monkeypatch):
    monkeypatch.setattr("covey.registry.entry_points", lambda **_: importlib.metadata.EntryPoints())
    with pytest.raises(RecipeError, match=r"no kernel format 'int8'\n  fix: pip install"):
        find_format("int8", 64)


def test_workers_need_a_package_that_offers_them(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda **_: ())
    with pytest.raises(CoveyError, match=r"reward_workers needs a package [\s\S]*covey\.isolation") as caught:
        RewardRunner(RewardSafetyConfig(workers=1))
    assert caught.value.fix == registry.install_command()


# --- import paths


@pytest.mark.parametrize(
    "name", ["no_such_module_of_covey:f", ":f", "covey.rewards.numbers:", "covey.rewards.numbers:Fraction.x"]
)
def test_an_import_path_that_leads_nowhere_is_refused(name):
    with pytest.raises(RecipeError):
        resolve(name)
