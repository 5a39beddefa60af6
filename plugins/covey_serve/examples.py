"""Data of clients as rows: examples that begin alike, as those of a group do, have their beginning computed once.

The tokens before the first one with a loss are the same for all samples of a prompt. Examples with an equal beginning
are branches of one completion (`packing.rows`), and the log-probs of the beginning are those of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from covey.packing.rows import Rows, pack, scatter_to_rows, unpack
from covey.types import Branch, Completion, FinishReason, Group

MAX_TOKENS = 2048
"""About how many tokens are computed at a time."""
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
BY_TOKEN = ("cross_entropy", "importance_sampling", "ppo", "cispo")
"""Losses that are 0 where the weight or the advantage is."""
COLUMNS = ("weights", "advantages", "logprobs")


class Batch(NamedTuple):
    """Rows with what the losses need, each [R, M]; settings are [R, 1]."""

    rows: Rows
    weight: Any
    advantage: Any
    old: Any
    mask: Any
    low: Any
    high: Any
    beta: Any


@dataclass(frozen=True)
class Example:
    """One datum: its tokens, and arrays with a value for each.

    Attributes:
        tokens: int32 [n], the input of the model.
        inputs: `target_tokens`, and `weights` or `logprobs` and `advantages`. The first two may be [n, k]: k targets
            for each token.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]

    def by_target(self) -> list["Example"]:
        """Return an example for each of the k targets."""
        if self.inputs["target_tokens"].ndim == 1:
            return [self]
        count = self.inputs["target_tokens"].shape[1]
        return [Example(self.tokens, {key: x[:, n] for key, x in self.inputs.items()}) for n in range(count)]


@dataclass
class Tree:
    """Examples with an equal beginning.

    Attributes:
        shared: number of targets of the beginning.
        examples: the examples, by their number.
        length: number of targets, those of the beginning once.
    """

    shared: int
    examples: dict[int, Example] = field(default_factory=dict)
    length: int = 0

    def add(self, number: int, example: Example) -> None:
        """Add an example."""
        self.length += len(example.tokens) - (self.shared if self.examples else 0)
        self.examples[number] = example

    def join(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Return a column of all examples end to end, the beginning once."""
        return np.concatenate([column[self.shared if number else 0 :] for number, column in enumerate(columns)])

    def group(self) -> Group:
        """Return the group of one completion: of each example, the token after its last one is its last target."""
        examples, none = list(self.examples.values()), np.zeros(0, np.float32)
        tokens = self.join([np.append(e.tokens[1:], e.inputs["target_tokens"][-1:]) for e in examples])
        sizes = [len(e.tokens) - (self.shared if number else 0) for number, e in enumerate(examples)]
        branches = tuple(Branch(int(start), self.shared + 1) for start in np.cumsum(sizes)[:-1])
        completion = Completion(tokens.astype(np.int32), none, none, FinishReason.STOP, branches=branches or None)
        return Group("", examples[0].tokens[:1], (completion,))

    def split(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Return the values of each example, by its number."""
        parts, start = dict[int, np.ndarray](), 0
        for number, example in self.examples.items():
            kept = self.shared if parts else 0
            end = start + len(example.tokens) - kept
            parts[number] = np.concatenate([values[:kept], values[start:end]])
            start = end
        return parts


def make_trees(name: str, examples: Sequence[Example]) -> list[Tree]:
    """Divide examples into trees of at most `MAX_TOKENS` targets, if the loss allows; a longer one is alone."""
    trees, latest = list[Tree](), dict[Any, Tree]()
    for number, example in enumerate(examples):
        loss = np.asarray(example.inputs["weights" if name == "cross_entropy" else "advantages"])
        shared = int(np.append(loss[:-1] != 0, True).argmax()) if name in BY_TOKEN else 0
        targets = np.asarray(example.inputs["target_tokens"], np.int64)
        key = (example.tokens[: shared + 1].tobytes(), targets[:shared].tobytes()) if shared else number
        if key not in latest or latest[key].length + len(example.tokens) - shared > MAX_TOKENS:
            latest[key] = Tree(shared)
            trees.append(latest[key])
        latest[key].add(number, example)
    return trees


def join_targets(examples: Sequence[Example], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return values of all targets, an array for each, as arrays [n] or [n, k] of the examples."""
    left, joined = iter(values), list[np.ndarray]()
    for example in examples:
        shape = example.inputs["target_tokens"].shape
        joined.append(np.stack([next(left) for _ in range(shape[1])], axis=1) if len(shape) > 1 else next(left))
    return joined


def make_batch(
    name: str, examples: Sequence[Example], settings: Mapping[str, float], compile_cost: float = 0.0
) -> tuple[Batch, Callable[[np.ndarray], list[np.ndarray]]]:
    """Lay examples out as rows for a loss. Return them, and the function from values of the rows [R, M] to values of
    each example. `compile_cost` is that of another row length than the usual one, in tokens.
    """
    trees = make_trees(name, examples)
    rows = pack([tree.group() for tree in trees], max_tokens=MAX_TOKENS, compile_cost=compile_cost)

    def column(key: str) -> np.ndarray:
        columns = ([e.inputs.get(key, np.zeros(len(e.tokens))) for e in tree.examples.values()] for tree in trees)
        return scatter_to_rows(rows, [tree.join(each) for tree, each in zip(trees, columns, strict=True)])

    def of_examples(values: np.ndarray) -> list[np.ndarray]:
        parts = dict[int, np.ndarray]()
        for tree, own in zip(trees, unpack(rows, values, [tree.length for tree in trees]), strict=True):
            parts |= tree.split(own)
        return [parts[number] for number in range(len(examples))]

    weight, advantage, old = map(column, COLUMNS)
    each = np.ones((len(rows.tokens), 1), np.float32)
    low, high, beta = (each * settings.get(key, 1.0) for key in (*CLIPS, "beta"))
    mask = (advantage != 0).astype(np.float32)
    # Ids of tokens are below 2**24: float32 holds them.
    rows = rows._replace(target=column("target_tokens").astype(np.int32))
    return Batch(rows, weight, advantage, old, mask, low, high, beta), of_examples
