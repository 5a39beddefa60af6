"""Print the picture of docs/architecture.md, in Mermaid: the folders of the package and what each stands on.

    python tools/draw_architecture.py

An arrow means "imports". Only the arrows that no other path implies are drawn (the transitive reduction), because a
folder may import everything below it. The small files beside the folders are left out: every folder may import them.
Needs the `dev` extra (grimp comes with import-linter). Nothing of the package is executed.
"""

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
ROLES = {
    "cli": "the covey command",
    "launch": "several processes, here or on a cluster",
    "plan": "what a run needs, from its compiled programs",
    "run": "a run folder: start, resume, export",
    "report": "a run as one HTML page",
    "rl": "GRPO and PPO: the loop and its workers",
    "sft": "supervised fine-tuning",
    "envs": "environments of several turns",
    "rewards": "reward functions and their sandbox",
    "train": "trainer, optimizers, checkpoints, metrics",
    "losses": "log-probs, advantages, policy and value loss",
    "packing": "ragged groups into rows",
    "sampling": "the rollout engine",
    "models": "decoder, LoRA, loading, export",
    "data": "data sets and tasks",
    "text": "tokenizer and chat template",
    "parallel": "meshes and processes",
    "config": "settings, recipes, algorithms",
}
"""Role of each folder, as the picture writes it."""

Edges = set[tuple[str, str]]


def main() -> None:
    """Print the picture."""
    print(mermaid(reduced(folder_imports(ROOT))))


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


def mermaid(edges: Edges) -> str:
    """Write `edges` as a Mermaid flowchart, in the order of `ROLES`."""
    order = list(ROLES)
    boxes = [f'    {name}["<b>{name}/</b><br>{role}"]' for name, role in ROLES.items()]
    arrows = sorted(edges, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))
    return "\n".join(["flowchart TD", *boxes, *(f"    {one} --> {other}" for one, other in arrows)])


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
