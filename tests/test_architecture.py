"""The house holds: sizes, layers, packaging, and documentation whose commands and examples are true."""

import ast
import doctest
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name

import pytest

import covey
from covey.cli import main as cli
from covey.cli.commands import COMMANDS
from covey.cli.parse import Line, build_settings
from covey.config import recipe

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(file.parent for file in ROOT.glob("plugins/*/__init__.py"))
PACKAGE = [f for folder in (ROOT / "covey", *PLUGINS) for f in sorted(folder.rglob("*.py")) if "tests" not in f.parts]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *(ROOT / "docs").rglob("*.md")])
INCLUDED = {path for d in DOCUMENTS for path in re.findall(r'^--8<-- "(.*\.md)"$', d.read_text(), re.M)}
DOCUMENTS += [ROOT / path for path in sorted(INCLUDED - {"CHANGELOG.md", "benchmarks/RESULTS.md"})]
DOCUMENTS += [folder / "README.md" for folder in (*PLUGINS, ROOT / "tests")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[parts[0] == "plugins" :]).removesuffix(".__init__")


# --- the package


def test_no_file_is_too_long_to_keep_in_the_head():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in PACKAGE}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def test_every_folder_of_the_package_is_a_package():
    assert [str(f.parent) for f in PACKAGE if not (f.parent / "__init__.py").exists()] == []


def test_every_module_has_its_layer():
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    layers = set(chain.from_iterable(re.findall(r"[\w.]+", line) for line in contract["layers"]))
    outside = {"covey", "covey.__main__"}
    names = {module_name(file) for file in PACKAGE} - outside
    assert {name for name in names if not any(name == one or name.startswith(one + ".") for one in layers)} == set()


def test_what_plugins_log_is_shown_by_a_run():
    """The trap: `getLogger(__name__)` of a package beside Covey is not below `covey`, where a run listens."""
    logs = [
        line
        for file in (ROOT / "plugins").glob("*/*.py")
        for line in re.findall(r"getLogger\((.*?)\)", file.read_text())
    ]
    assert len(logs) > 5
    assert {name for name in logs if not name.startswith(('f"covey.', '"math_verify"'))} == set()


@pytest.mark.slow
def test_a_member_that_is_named_exists_in_the_same_layer_or_below():
    """The contract on imports does not see a member that a table names as "module:member"."""
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    heights = {module: height for height, line in enumerate(layers) for module in re.findall(r"[\w.]+", line)}

    def height(module):
        return next(heights[name] for name in heights if module == name or module.startswith(name + "."))

    named = re.compile(r"""(["'])(covey\w*(?:\.\w+)+:\w+)\1""")
    edges = {(module_name(file), name) for file in PACKAGE for _, name in named.findall(file.read_text())}
    assert len(edges) > 40
    for module, name in edges:
        assert callable(resolve_name(name)), name
        assert height(module) <= height(name.partition(":")[0]), f"{module} names {name}"


@pytest.mark.parametrize("file", [f for f in PACKAGE if ">>> " in f.read_text()], ids=module_name)
def test_examples_in_docstrings_are_true(file):
    assert doctest.testmod(importlib.import_module(module_name(file))).failed == 0


def test_no_program_asks_for_the_devices_of_this_process():
    """Programs are also built for devices that are not there; the platform is an argument."""
    folders = ("models", "losses", "packing", "sampling", "train", "rl", "sft")
    questions = re.compile(r"\bjax\.(default_backend|devices|device_count|local_device_count)\b")
    sources = {module_name(file): file.read_text() for file in PACKAGE if file.relative_to(ROOT).parts[1] in folders}
    assert len(sources) > 50
    assert {name: found for name, text in sources.items() if (found := questions.findall(text))} == {}


def test_public_names_are_there():
    for name in covey.__all__:
        assert getattr(covey, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'GRPOLerner'"):
        covey.GRPOLerner  # noqa: B018


def test_the_import_of_covey_is_free():
    code = "import sys, covey; print(*sorted({'jax', 'flax', 'numpy', 'rich', 'yaml'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "\n"


def test_the_wheel_holds_every_module_and_recipe(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("covey-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    others = (
        "config/recipes/*.yaml",
        "py.typed",
        "__init__.pyi",
    )
    files = [*(ROOT / "plugins" / "covey_sandbox").rglob("*.bpf")]
    files += (ROOT / "plugins" / "covey_report").rglob("assets/*")
    wanted = [*PACKAGE, *files, *chain.from_iterable((ROOT / "covey").glob(pattern) for pattern in others)]
    assert len(wanted) > len(PACKAGE) + 20
    assert {str(file.relative_to(ROOT)).removeprefix("plugins/") for file in wanted} - held == set()
    folders = {"covey", f"covey-{covey.__version__}.dist-info", *(folder.name for folder in PLUGINS)}
    assert {name.split("/")[0] for name in held} == folders
    assert not [name for name in held if "/tests/" in name]


def test_the_typed_program_runs():
    """`make release-check` has mypy read it too, against the installed wheel."""
    runpy.run_path(str(ROOT / "tests" / "typed" / "program.py"), run_name="__main__")


def test_constraints_lie_within_the_declared_ranges():
    requirements = pytest.importorskip("packaging.requirements")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for requirement in map(requirements.Requirement, chain.from_iterable(groups)):
        pinned = pins.get(requirement.name.lower().replace("_", "-"))
        assert pinned is None or requirement.specifier.contains(pinned), requirement


# --- the documents


def test_nothing_names_a_folder_of_somebodys_machine():
    pattern = re.compile(r"(?<![\w.~])/(?:work|root|home|opt|Users)/\w")
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json")
    folders = ("covey", "plugins", "tests", "docs", "benchmarks", "examples", "tools", ".github")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in kinds]
    files += [f for f in ROOT.iterdir() if f.is_file() and (f.suffix in kinds or f.name in ("Makefile", "run"))]
    found = {str(f.relative_to(ROOT)): pattern.findall(f.read_text()) for f in files if f != Path(__file__)}
    assert {name: hits for name, hits in found.items() if hits} == {}


def commands_in(text):
    """The `covey ...` commands of a text, without comments, pipes and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|(?!\|)", re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))):
            words = part.strip()
            if re.match(r"(?:\.venv/bin/)?covey\s", words) and "…" not in words and "..." not in words:
                yield re.sub(r"\s>\s*\S+$", "", words)


def documented():
    fence = re.compile(r"^```(?:bash|sh|console|shell)?\n(.*?)^```", re.M | re.S)
    for document in (d for d in DOCUMENTS if d.exists()):
        text = document.read_text()
        inline = re.findall(r"(?<!`)`(covey [^`\n]+)`", text)
        inline = [command for command in inline if command.removeprefix("covey ") not in COMMANDS]  # a bare name
        yield document.name, [command for block in [*fence.findall(text), *inline] for command in commands_in(block)]
    for name, row in COMMANDS.items():
        yield f"{name} --help", list(commands_in(row.examples))


@pytest.mark.parametrize("commands", [pytest.param(commands, id=place) for place, commands in documented()])
def test_documented_commands_are_understood(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("name: mine\nrewards: [first_letter]\n")
    for words in map(shlex.split, dict.fromkeys(commands)):
        # A usage line has placeholders among its first words.
        if not any(re.fullmatch(r"[A-Z_]{2,}|\[.*", word) for word in words[1:3]):
            check(words[1:])


def check(words):
    """Check a command line, with the settings that it changes, without executing it."""
    line = cli.parse(words).args[0]
    if not isinstance(line, Line):  # help
        return
    sources = [line.options["--recipe"]] if "--recipe" in line.options else line.arguments
    if line.command.prefix_of:
        resolve_name("covey_hosts.command:parse")(line)
    elif any(issubclass(cls, recipe.AnyRecipe) for cls in line.command.classes):
        if "NAME_OR_YAML" in line.command.arguments or "--recipe" in line.options:
            recipe.load_any(sources[0], line.settings) if sources else None
    elif line.command.classes:
        build_settings(line.command.classes[0], line)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.exists()], ids=lambda d: d.name)
def test_documents_name_targets_of_the_makefile(document):
    """`tests/docs/test_site.py` follows the links."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.M)) - targets == set()


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.exists()], ids=lambda d: d.name)
def test_python_in_documents_compiles_and_finds_its_names(document):
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S):
        for statement in ast.parse(block, document.name).body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("covey"):
                module = importlib.import_module(statement.module)
                assert [name.name for name in statement.names if not hasattr(module, name.name)] == []


def test_what_is_to_be_installed_is_an_extra_of_this_clone():
    """No index has Covey: what reads `pip install 'covey[...]'` fails."""
    files = [*DOCUMENTS, *(ROOT / "examples").glob("*.*"), *PACKAGE, *(ROOT / "covey" / "config").rglob("*.yaml")]
    texts = {str(f.relative_to(ROOT)): f.read_text() for f in files}
    assert {name for name, text in texts.items() if re.search(r"\bcovey\[", text)} == set()
    named = re.findall(r"'\.\[(\w+)\]'|install\(\"(\w+)\"\)", "\n".join(texts.values()))
    listed = re.findall(r"`\[(\w+)\]`", texts["README.md"].partition("Optional packages")[2].partition("##")[0])
    extras = {name for found in named for name in found if name} | {*listed}
    assert {"hub", "track", "math"} <= extras <= set(PROJECT["project"]["optional-dependencies"])


# --- the page on the architecture


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_shows_the_imports_that_there_are():
    pytest.importorskip("grimp")
    tool = runpy.run_path(str(ROOT / "tools" / "draw_architecture.py"))
    picture = tool["drawing"](tool["reduced"](tool["folder_imports"](ROOT)))
    assert picture == tool["PICTURE"].read_text("utf-8"), "run tools/draw_architecture.py"
    assert "(images/architecture.svg)" in ARCHITECTURE


def test_the_page_lists_each_folder_and_files_that_exist():
    rows = re.findall(r"^\| `(\w+)/` \| (.*?) \|", ARCHITECTURE, re.M)
    folders = [file.parent.name for file in (ROOT / "covey").glob("*/__init__.py")]
    assert sorted(folder for folder, _ in rows) == sorted(folders)
    plugins = re.findall(r"^\| `(covey_\w+)` \|", ARCHITECTURE, re.M)
    assert sorted(plugins) == [folder.name for folder in PLUGINS]
    files = [ROOT / "covey" / folder / name for folder, named in rows for name in re.findall(r"`([^`]+)`", named)]
    assert [str(file) for file in files if not file.exists()] == []


def file_of(path, document):
    """Return the file at a path from the root of the repository, or in a plugin's README from its folder."""
    return document.parent / path if (document.parent / path).exists() else ROOT / path


def test_paths_and_names_in_documents_exist():
    """A name before a path in brackets, as in `Group` (`covey/types.py`), is in that file."""
    text = {d: d.read_text() for d in DOCUMENTS if d.name not in ("CHANGELOG.md", "RESULTS.md")}
    pattern = re.compile(r"`((?:covey|plugins|tests|tools|examples)/[\w./-]+)`")
    paths = {(d, path) for d in text for path in pattern.findall(text[d])}
    assert {(str(d), path) for d, path in paths if not file_of(path, d).exists()} == set()
    name_in_file = re.compile(r"`([\w.]+)`(?:,? (?:and|or) `[\w.]+`)? \(`([\w/]+\.py)`\)")
    named = {(d, name.rpartition(".")[2], path) for d in text for name, path in name_in_file.findall(text[d])}
    assert len(named) > 40
    gone = [
        (str(d), name, path) for d, name, path in named if not re.search(rf"\b{name}\b", file_of(path, d).read_text())
    ]
    assert gone == []


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_the_readme_of_a_plugin_lists_its_files(folder):
    table = (folder / "README.md").read_text().partition("| file | holds |")[2].partition("\n\n")[0]
    listed = re.findall(r"`([^`]+)`", "\n".join(row.split(" | ")[0] for row in table.splitlines()))
    assert [name for name in listed if not any(folder.rglob(name.rstrip("/")))] == []
    files = [file.relative_to(folder) for file in PACKAGE if file.is_relative_to(folder) and file.stem != "__init__"]
    folders = {name.rstrip("/") for name in listed if name.endswith("/")}
    assert [str(file) for file in files if str(file) not in listed and file.parts[0] not in folders] == []
