"""Print the size and the import structure of the package, so that a reorganisation can be measured before and after.

    python tools/package_stats.py
    python tools/package_stats.py --root FOLDER --json    # another checkout

Needs the `dev` extra (grimp comes with import-linter). Nothing of the package is executed.

files               Python files of the package
lines               all of their lines
code lines          lines that hold code: no blank lines, comments and docstrings
statements          statements of the syntax tree, docstrings left out
contract lines      lines of the layer contracts in pyproject.toml
import cycles       groups of modules that import each other, directly or through others of the group
import closure      modules of the package that --module imports, directly or not, inside functions too
"""

import argparse
import ast
import io
import json
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
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
    options = parser.parse_args()
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


def shown(figure: Any) -> str:
    """Format a figure: a number, or the number of groups followed by one group per line."""
    return str(figure) if isinstance(figure, int) else "\n  ".join([str(len(figure)), *map(" ".join, figure)])


if __name__ == "__main__":
    main()
