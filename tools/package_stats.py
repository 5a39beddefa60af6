"""Print the size and the import structure of the package, so that a reorganisation can be measured before and after.

    python tools/package_stats.py
    python tools/package_stats.py --root FOLDER --json    # another checkout
    python tools/package_stats.py --gates                 # compare with tools/gates.toml, as `make lint` does
    python tools/package_stats.py --lower                 # write figures that have fallen into tools/gates.toml

Needs the `dev` extra (grimp comes with import-linter). Of the package only a step is executed, for the gates.

files               Python files of the package
lines               all of their lines
code lines          lines that hold code: no blank lines, comments and docstrings
statements          statements of the syntax tree, docstrings left out
contract lines      lines of the layer contracts in pyproject.toml
import cycles       groups of modules that import each other, directly or through others of the group
import closure      modules of the package that --module imports, directly or not, inside functions too

Gates are upper limits: a figure above its gate is an error. A gate is raised only with the reason in the commit, such
as code that has moved there.

statements          of the package, of the library (all rooms but recipes and the command), and of the plugins
rooms               statements of each folder of covey/, of the files beside these ("leaves"), and of each plugin
closure             modules and statements that a public name needs: imports, inside functions too, and names in strings
                    such as "covey.module:name"; modules without statements are left out
step                files and functions that the second step of a run enters, from tools/step_walk.py
class               most methods and most attributes (names assigned to `self`) of a class
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
GATES = "tools/gates.toml"
HEAD = "# Upper limits of `python tools/package_stats.py --gates`. One is raised only with the reason in the commit."
ABOVE_LIBRARY = ("cli", "recipes")
IN_STRING = re.compile(r"""(["'])(covey(?:\.\w+)+):\w+\1""")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> None:
    """Read the options and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--module", default="covey.rl.learner", help="module whose import closure is counted")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--gates", action="store_true", help=f"fail if a figure exceeds its gate in {GATES}")
    parser.add_argument("--lower", action="store_true", help=f"write figures that have fallen into {GATES}")
    options = parser.parse_args()
    if options.gates or options.lower:
        raise SystemExit(check_gates(options.root, options.lower))
    figures = sizes(options.root) | structure(options.root, options.module)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:16} {shown(figures[name])}" for name in figures))


def sizes(root: Path) -> dict[str, Any]:
    """Count files, lines, code lines and statements of the package and lines of its layer contracts."""
    texts = [file.read_text() for file in sorted((root / "covey").rglob("*.py"))]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "code lines": sum(len(code_lines(text)) for text in texts),
        "statements": sum(sum(1 for _ in statements(text)) for text in texts),
        "contract lines": contract_lines(root / "pyproject.toml"),
    }


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of `text` that hold code.

    >>> code_lines('x = 1\\n\\n# why\\ny = (  # both\\n    2)\\n')
    {1, 4, 5}
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    docs = {line for node in ast.walk(ast.parse(text)) if is_docstring(node) for line in lines_of(node)}
    return held - docs


def statements(text: str) -> Iterator[ast.stmt]:
    """Count the statements of `text` at every depth, without docstrings."""
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt) and not is_docstring(node))


def is_docstring(node: ast.AST) -> bool:
    """Tell whether `node` is a docstring; one that documents a constant counts too."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: Any) -> range:
    """Return the numbers of the lines that `node` spans."""
    return range(node.lineno, node.end_lineno + 1)


def contract_lines(project: Path) -> int:
    """Count the lines of all layer contracts of import-linter in `project`."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    return sum(len(contract.get("layers", [])) for contract in contracts)


def structure(root: Path, module: str) -> dict[str, Any]:
    """Find the import cycles of the package and count the modules that `module` imports."""
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("covey", exclude_type_checking_imports=True, cache_dir=None)
    if module not in graph.modules:
        raise SystemExit(f"there is no module {module} under {root}; name another with --module")
    return {"import cycles": cycles(graph), "import closure": len(graph.find_upstream_modules(module))}


def cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return groups of modules that import each other, directly or not, each group sorted."""
    above = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {frozenset({m} | {n for n in above[m] if m in above[n]}) for m in graph.modules}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def check_gates(root: Path, lower: bool) -> int:
    """Print each figure whose gate differs; return 1 if one exceeds its gate or has none."""
    file = root / GATES
    gates = flat(tomllib.loads(file.read_text()))
    figures = gate_figures(root, [name.split("/")[1] for name in gates if re.fullmatch("closure/.*/modules", name)])
    above = [name for name, figure in figures.items() if figure > gates.get(name, -1)]
    fallen = [name for name, figure in figures.items() if figure < gates.get(name, -1)]
    gone = [name for name in gates if name not in figures]
    for name in above:
        print(f"{name}: {figures[name]} is above its gate, {gates.get(name, 'which is missing')}, in {GATES}")
    for name in fallen:
        print(f"{name}: {figures[name]} is below its gate, {gates[name]}")
    if lower:
        file.write_text(as_toml({name: min(figures[name], gate) for name, gate in gates.items() if name not in gone}))
    elif fallen or gone:
        print(f"Write what has fallen into {GATES}:  python tools/package_stats.py --lower")
    return 1 if above else 0


def gate_figures(root: Path, public: list[str]) -> dict[str, int]:
    """Measure everything that has a gate; `public` names are those whose import closure is counted."""
    counts = {file: sum(1 for _ in statements(file.read_text())) for file in sources(root)}
    rooms = Counter[str]()
    for file, count in counts.items():
        rooms[room(file.relative_to(root))] += count
    in_covey = {name: count for name, count in rooms.items() if not name.startswith("plugins.")}
    figures = {
        "statements/covey": sum(in_covey.values()),
        "statements/library": sum(count for name, count in in_covey.items() if name not in ABOVE_LIBRARY),
        "statements/plugins": rooms.total() - sum(in_covey.values()),
        **{f"rooms/{name}": rooms[name] for name in sorted(rooms)},
    }
    edges = imports(root)
    for name in public:
        reached = reachable(edges, origin(root, name))
        sizes = [size for file, size in counts.items() if module_name(file.relative_to(root)) in reached and size]
        figures |= {f"closure/{name}/modules": len(sizes), f"closure/{name}/statements": sum(sizes)}
    return figures | step_figures(root) | class_figures(counts)


def sources(root: Path) -> list[Path]:
    """Return the Python files of the package and of the plugins."""
    return sorted(
        file for folder in ("covey", "plugins") for file in (root / folder).rglob("*.py") if "tests" not in file.parts
    )


def room(file: Path) -> str:
    """Return the room of a file of the repository.

    >>> room(Path("covey/rl/learner.py")), room(Path("covey/types.py")), room(Path("plugins/covey_plan/hlo.py"))
    ('rl', 'leaves', 'plugins.covey_plan')
    """
    folder, *inside = file.parts[:-1]
    return ".".join(["plugins", *inside[:1]]) if folder == "plugins" else inside[0] if inside else "leaves"


def module_name(file: Path) -> str:
    """Return the module of a file of the repository.

    >>> module_name(Path("covey/rl/__init__.py")), module_name(Path("plugins/covey_plan/hlo.py"))
    ('covey.rl', 'covey_plan.hlo')
    """
    parts = file.with_suffix("").parts
    return ".".join(parts[parts[0] == "plugins" :]).removesuffix(".__init__")


def imports(root: Path) -> dict[str, set[str]]:
    """Return {module: modules that it imports or names in strings, and the packages around it}."""
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("covey", exclude_type_checking_imports=True, cache_dir=None)
    files = {module_name(file.relative_to(root)): file for file in sources(root)}
    return {
        module: graph.find_modules_directly_imported_by(module)
        | {name for _, name in IN_STRING.findall(files[module].read_text()) if name in files}
        | {module.rpartition(".")[0]} - {""}
        for module in graph.modules
    }


def reachable(edges: Mapping[str, set[str]], module: str) -> set[str]:
    """Return `module` and all modules that `edges` lead to from it."""
    seen, ahead = set[str](), [module]
    while ahead:
        if (module := ahead.pop()) not in seen:
            seen.add(module)
            ahead += edges.get(module, ())
    return seen


def origin(root: Path, name: str) -> str:
    """Return the module that defines the name `covey.NAME`, from the package's stub."""
    stub = ast.parse((root / "covey" / "__init__.pyi").read_text())
    modules = {a.name: str(n.module) for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    return modules[name.removeprefix("covey.")]


def step_figures(root: Path) -> dict[str, int]:
    """Count the files and functions that a training step enters."""
    walk = subprocess.run([sys.executable, root / "tools" / "step_walk.py"], capture_output=True, text=True, check=True)
    files, functions = re.findall(r"\d+", walk.stdout.splitlines()[-1])
    return {"step/files": int(files), "step/functions": int(functions)}


def class_figures(files: Mapping[Path, int]) -> dict[str, int]:
    """Return the largest numbers of methods and of attributes of a class."""
    classes = [n for file in files for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
    return {
        "class/methods": max(sum(isinstance(n, ast.FunctionDef) for n in c.body) for c in classes),
        "class/attributes": max(len(attributes(c)) for c in classes),
    }


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign to `self`.

    >>> sorted(attributes(ast.parse("class A:\\n def f(self): self.x, self.y = 1, 2; self.z.w = 3").body[0]))
    ['x', 'y']
    """
    stores = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def flat(tables: Mapping[str, Any], path: str = "") -> dict[str, int]:
    """Return {names of tables and key, joined by slashes: value}.

    >>> flat({"step": {"files": 24}})
    {'step/files': 24}
    """
    pairs = (
        flat(value, f"{path}{key}/") if isinstance(value, Mapping) else {path + key: value}
        for key, value in tables.items()
    )
    return {key: value for part in pairs for key, value in part.items()}


def as_toml(gates: Mapping[str, int]) -> str:
    """Return the file of these gates.

    >>> print(as_toml({"closure/covey.GRPOLearner/modules": 105, "step/files": 24}), end="")
    # Upper limits of `python tools/package_stats.py --gates`. One is raised only with the reason in the commit.
    [closure."covey.GRPOLearner"]
    modules = 105
    <BLANKLINE>
    [step]
    files = 24
    """
    lines, before = list[str](), ""
    for name, value in gates.items():
        table, _, key = name.rpartition("/")
        if table != before:
            lines += ["", f"[{'.'.join(quoted(part) for part in table.split('/'))}]"]
        lines, before = [*lines, f"{quoted(key)} = {value}"], table
    return "\n".join([HEAD, *lines[1:], ""])


def quoted(key: str) -> str:
    """Return a key of TOML, in quotes where it has a dot."""
    return f'"{key}"' if "." in key else key


def shown(figure: Any) -> str:
    """Format a figure: a number, or the number of groups followed by one group per line."""
    return str(figure) if isinstance(figure, int) else "\n  ".join([str(len(figure)), *map(" ".join, figure)])


if __name__ == "__main__":
    main()
