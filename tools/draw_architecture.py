"""Write the picture of docs/architecture.md, docs/images/architecture.svg: the folders of the package and what each
stands on. It is a file, because a picture that is drawn in the browser would need a program from another site.

    python tools/draw_architecture.py

An arrow means "imports". Only the arrows that no other path implies are drawn (the transitive reduction), because a
folder may import everything below it. The small files beside the folders are left out: every folder may import them.
Needs the `dev` extra (grimp comes with import-linter). Nothing of the package is executed.
"""

import sys
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

import grimp

ROOT = Path(__file__).parents[1]
ROLES = {
    "cli": "the covey command",
    "recipes": "a recipe as a run, and its model",
    "run": "the loop, a run folder: stop, resume",
    "rl": "GRPO: the loop and its workers",
    "rewards": "reward functions and scores",
    "monitor": "metrics, files and displays of a run",
    "train": "trainer, optimizers, checkpoints",
    "losses": "log-probs, advantages, policy and value loss",
    "packing": "ragged groups into rows",
    "sampling": "the rollout engine",
    "models": "decoder, LoRA, loading",
    "data": "data sets and tasks",
    "text": "tokenizer and chat template",
    "parallel": "meshes, the processes of a run",
    "config": "settings, recipes, algorithms",
}
"""Role of each folder, as the picture writes it."""

PICTURE = ROOT / "docs" / "images" / "architecture.svg"
MARGIN, BOX, HEIGHT, GAP = 14.0, 184.0, 60.0, 18.0
LAYER = HEIGHT + 34.0
"""Distance of two layers."""
CHARACTERS = 28
"""Maximum number of characters on a line of a box."""
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" role="img" font-family="system-ui, sans-serif">
  <title>The folders of the package</title>
  <defs>
    <marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#5b6b7b"/></marker>
  </defs>
  <style>
    .panel {{ fill: #ffffff; }}
    .box {{ fill: #eef4fb; stroke: #3b6ea5; stroke-width: 1.5; }}
    .flow {{ stroke: #5b6b7b; stroke-width: 1.3; fill: none; marker-end: url(#tip); }}
    .name {{ font-weight: 600; font-size: 14px; fill: #1c2733; text-anchor: middle; }}
    .text {{ fill: #36424e; font-size: 12px; text-anchor: middle; }}
  </style>
  <rect class="panel" width="{0:g}" height="{1:g}" rx="10"/>
{2}</svg>
"""  # noqa: E501
BOX_SVG = (
    f'  <rect class="box" x="{{0:g}}" y="{{1:g}}" width="{BOX:g}" height="{HEIGHT:g}" rx="8"/>\n'
    '  <text class="name" x="{2:g}" y="{3:g}">{4}/</text>\n'
    '  <text class="text" x="{2:g}" y="{5:g}">{6}</text>\n'
    '  <text class="text" x="{2:g}" y="{7:g}">{8}</text>\n'
)

Edges = set[tuple[str, str]]
Node = str | tuple[str, str, int]
"""Folder, or the place of an arrow (from, to) in a layer that it passes through."""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawing(reduced(folder_imports(ROOT))), encoding="utf-8")


def folder_imports(root: Path) -> Edges:
    """Return the pairs of folders of which the first imports the second, read from the sources under `root`."""
    sys.path.insert(0, str(root))
    graph = grimp.build_graph("covey", exclude_type_checking_imports=True, cache_dir=None)
    sys.path.remove(str(root))
    folders = [folder.name for folder in (root / "covey").iterdir() if (folder / "__init__.py").exists()]
    names = {folder: f"covey.{folder}" for folder in folders}
    return {
        (one, other)
        for one in folders
        for other in folders
        if one != other and graph.direct_import_exists(importer=names[one], imported=names[other], as_packages=True)
    }


def reduced(edges: Edges) -> Edges:
    """Leave out each edge that a longer path implies.

    >>> sorted(reduced({("a", "b"), ("b", "c"), ("a", "c")}))
    [('a', 'b'), ('b', 'c')]
    """
    return {(one, other) for one, other in edges if other not in _reached(edges - {(one, other)}, one)}


def drawing(edges: Edges) -> str:
    """Return the picture of `edges` as SVG: each folder below those that import it, arrows around those between."""
    layers = _layers(edges)
    chains = [_chain(edge, layers) for edge in sorted(edges)]
    places = _places(layers, chains)
    top = {one: y for y, layer in enumerate(layers) for one in layer}
    boxes = [_box(name, places[name], MARGIN + top[name] * LAYER) for name in ROLES]
    arrows = [f'  <path class="flow" d="{_path(chain, places, top)}"/>\n' for chain in chains]
    width = max(places[name] for name in ROLES) + BOX / 2 + MARGIN
    return FRAME.format(width, len(layers) * LAYER + MARGIN - GAP, "".join(arrows) + "".join(boxes))


def _box(name: str, x: float, y: float) -> str:
    """Return the box of a folder around `x`, from `y` downwards, with its role on two lines."""
    first, second = (*wrap(ROLES[name], CHARACTERS), "")[:2]
    return BOX_SVG.format(x - BOX / 2, y, x, y + 20, name, y + 37, first, y + 52, second)


def _layers(edges: Edges) -> list[list[Node]]:
    """Return the folders by their distance from the top, and in each layer the arrows that pass through it."""
    depth = dict.fromkeys(ROLES, 0)
    for _ in ROLES:
        for one, other in edges:
            depth[other] = max(depth[other], depth[one] + 1)
    layers: list[list[Node]] = [[name for name in ROLES if depth[name] == y] for y in range(max(depth.values()) + 1)]
    for one, other in sorted(edges):
        for y in range(depth[one] + 1, depth[other]):
            layers[y].append((one, other, y))
    return layers


def _chain(edge: tuple[str, str], layers: list[list[Node]]) -> list[Node]:
    """Return the nodes of an arrow from top to bottom: its two folders, and a place in each layer between them."""
    between = [node for layer in layers for node in layer if isinstance(node, tuple) and node[:2] == edge]
    return [edge[0], *between, edge[1]]


def _places(layers: list[list[Node]], chains: list[list[Node]]) -> dict[Node, float]:
    """Return the middle of each node; each layer is ordered by the mean of its neighbours, a few times up and down."""
    neighbours: dict[Node, list[Node]] = {node: [] for layer in layers for node in layer}
    for chain in chains:
        for one, other in pairwise(chain):
            neighbours[one].append(other)
            neighbours[other].append(one)
    width = max(sum(map(_width, layer)) for layer in layers)
    places: dict[Node, float] = {}
    for layer in [*layers, *layers[::-1], *layers, *layers[::-1], *layers]:
        known = {n: [places[o] for o in neighbours[n] if o in places] for n in layer}
        layer.sort(key=lambda n: sum(known[n]) / len(known[n]) if known[n] else 0.0)
        left = MARGIN + (width - sum(map(_width, layer))) / 2
        for node in layer:
            places[node] = left + _width(node) / 2
            left += _width(node)
    return places


def _width(node: Node) -> float:
    return BOX + GAP if isinstance(node, str) else GAP


def _path(chain: list[Node], places: dict[Node, float], top: dict[Node, int]) -> str:
    """Return the curve from the lower edge of the first folder to the upper edge of the last."""
    x, y = places[chain[0]], MARGIN + top[chain[0]] * LAYER + HEIGHT
    path = f"M{x:g} {y:g}"
    for node in chain[1:]:
        to, end = places[node], MARGIN + top[node] * LAYER
        path += f" C{x:g} {(y + end) / 2:g} {to:g} {(y + end) / 2:g} {to:g} {end:g}"
        x, y = to, end
        if isinstance(node, tuple):
            y += HEIGHT
            path += f" V{y:g}"
    return path


def _reached(edges: Edges, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        at = waiting.pop()
        new = {other for one, other in edges if one == at} - found
        found |= new
        waiting.extend(new)
    return found


if __name__ == "__main__":
    main()
