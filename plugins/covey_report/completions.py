"""Choose the completions that a page keeps, and put them into a compact form.

`samples.jsonl` of a long run has more text than one page can hold. Whole groups are kept, because completions are
compared within a group: first all of them, and if they are too many, some groups of evenly spaced steps. The file is
indexed by the beginning of each line, and only the lines that are kept are parsed.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from os import SEEK_END
from pathlib import Path
from typing import IO, Any, NamedTuple

from covey.files import is_count, number, open_or_empty, parse_line
from covey.types import FinishReason
from covey_report.run_data import Row, coarse_to_fine, read_lines, spread
from covey_report.texts import Mask, Prompts, completion_form, fitting, number_json, script_json, size_of

MAX_BYTES = 2_600_000
"""Maximum size in bytes of the completions of a page, of all runs together."""
GROUPS_PER_STEP = 4
"""Number of groups kept of each step where not all fit."""
TRIED = 16
"""Number of groups from which the mean size of a group is estimated."""

MAX_TOKEN_BYTES = 800_000
"""Maximum size in bytes of the token values of a page, of all runs together; completions have that much less room."""
MAX_TOKENS = 512
"""Maximum number of tokens of a completion."""
VALUES = ("logps", "change", "entropy", "kl")
"""Values of each token, in the order of the page."""

GroupKey = tuple[int, int]
"""Step and number of a group."""
_KEY = re.compile(rb'\{"step": (\d{1,15}), "group": (\d{1,9}),')


class Location(NamedTuple):
    """Position of one group in the file.

    Attributes:
        start, stop: offsets of its lines in bytes.
    """

    step: int
    group: int
    start: int
    stop: int


def collect(
    file: Path,
    budget: int,
    unreadable: dict[str, int],
    mask: Mask = lambda value: value,
    first: Collection[tuple[int, int]] = (),
) -> str:
    """Return the completions of `file` that fit in `budget` bytes as JSON, in the form that the page reads.

    Args:
        file: `samples.jsonl` of a run.
        budget: maximum number of bytes.
        unreadable: number of lines that cannot be read by file name; added to.
        mask: masks secrets.
        first: step and number of the groups that are kept before all others.

    Returns:
        prompts: table of prompts, as turns `[role, text]`.
        rewards: names of the reward functions.
        steps: `[step, number of groups, groups kept]` per step kept. A group is `[number, prompt, samples]`, and a
            sample `[text, reward, advantage, reward parts, was cut, tokens]`. A long text is `[head, characters left
            out, tail]`, and a conversation `{"turns": ...}`; see `texts.completion_form`.
        total, kept: numbers of steps and of groups, in the file and on the page.
    """
    return encode_groups(file, locate(file, unreadable), budget, mask, first)


def encode_groups(
    file: Path,
    index: Sequence[Location],
    budget: int,
    mask: Mask = lambda value: value,
    first: Collection[tuple[int, int]] = (),
) -> str:
    """Return the groups of `index` that fit in `budget` bytes, as `collect` does."""
    by_step: dict[int, list[Location]] = {}
    for location in index:
        by_step.setdefault(location.step, []).append(location)
    with open_or_empty(file.parent, file.name) as lines:
        table = _Table(lines, mask)
        preferred = [location for location in index if (location.step, location.group) in first]
        others = _in_order_of_choice(by_step, _room(_Table(lines, mask), index, budget))
        groups = fitting(
            ((location, *table.add(location)) for location in dict.fromkeys((*preferred, *others))), budget
        )
    in_file = groupby(sorted(groups, key=lambda group: (group.step, group.start)), key=lambda group: group.step)
    steps = [f"[{step},{len(by_step[step])},[{','.join(map(groups.__getitem__, some))}]]" for step, some in in_file]
    return (
        f'{{"prompts":[{",".join(table.prompts.encoded)}],"rewards":{script_json(list(table.functions))},'
        f'"steps":[{",".join(steps)}],"total":{script_json({"steps": len(by_step), "groups": len(index)})},'
        f'"kept":{script_json({"steps": len(steps), "groups": len(groups)})}}}'
    )


def locate(file: Path, unreadable: dict[str, int], known: Sequence[Location] = ()) -> list[Location]:
    """Return the position of each group of `file`. The beginning of a line tells its step and group; a line that begins
    otherwise is parsed.

    Args:
        known: groups at the beginning of the file that were located before; only what follows them is read. They count
            for nothing if the file has become shorter, as in a resumed run.
    """
    with open_or_empty(file.parent, file.name) as lines:
        groups = list(known) if known and lines.seek(0, SEEK_END) >= known[-1].stop else []
        position = lines.seek(groups[-1].stop if groups else 0)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            start, position = position, position + len(line)
            if (key := _key(line)) is None:
                unreadable[file.name] = unreadable.get(file.name, 0) + 1
            elif groups and (*key, start) == (groups[-1].step, groups[-1].group, groups[-1].stop):
                groups[-1] = groups[-1]._replace(stop=position)
            else:
                groups.append(Location(*key, start, position))
    return groups


def read_group(lines: IO[bytes], location: Location) -> list[Row]:
    """Return the rows of a group."""
    lines.seek(location.start)
    content = lines.read(location.stop - location.start).split(b"\n")
    return [row for line in content if (row := parse_line(line)) is not None]


def rewards_of(row: Row) -> dict[str, Any]:
    """Return the rewards of a row by function; none where they are no mapping."""
    return rewards if isinstance(rewards := row.get("rewards"), dict) else {}


class _Table:
    """Groups of a file in the page's form, and the prompts and names of reward functions that they refer to.

    Args:
        lines: the file.
        mask: masks secrets.

    Attributes:
        functions: number of each reward function by name.
    """

    def __init__(self, lines: IO[bytes], mask: Mask):
        self._lines, self._mask = lines, mask
        self.prompts = Prompts()
        self.functions: dict[str, int] = {}

    def add(self, location: Location) -> tuple[str, int]:
        """Return a group as JSON, and the bytes that it takes with its prompt; empty if no line is readable."""
        if not (rows := [self._mask(row) for row in read_group(self._lines, location)]):
            return "", 0
        prompt, size = self.prompts.add(rows[0])
        group = f"[{location.group},{prompt},[{','.join(map(self._sample, rows))}]]"
        return group, size + size_of(group) + 1

    def _sample(self, row: Row) -> str:
        rewards = rewards_of(row)
        for name in rewards:
            self.functions.setdefault(name, len(self.functions))
        parts = ",".join(number_json(rewards.get(name)) for name in self.functions)
        text, length = completion_form(row), number(row.get("length"))
        score = ",".join(number_json(row.get(name)) for name in ("reward", "advantage"))
        was_cut = script_json(FinishReason.recorded(row.get("finish")).was_cut)
        tokens = "null" if length is None else int(length)
        return f"[{script_json(text)},{score},[{parts}],{was_cut},{tokens}]"


def _room(table: _Table, index: Sequence[Location], budget: int) -> int:
    """Estimate from some groups how many groups fit in `budget` bytes."""
    sample = [index[i] for i in spread(len(index), TRIED)]
    return budget * len(sample) // max(1, sum(table.add(location)[1] for location in sample))


def _in_order_of_choice(by_step: Mapping[int, list[Location]], room: int) -> Iterator[Location]:
    """Yield the groups to keep, the most important first: all if there is `room` for so many, or else some of evenly
    spaced steps.
    """
    steps = sorted(by_step)
    everything = sum(map(len, by_step.values())) <= room
    if not everything:
        steps = [steps[i] for i in spread(len(steps), max(2, room // GROUPS_PER_STEP))]
    for i in coarse_to_fine(len(steps)):
        groups = by_step[steps[i]]
        yield from groups if everything else (groups[j] for j in spread(len(groups), GROUPS_PER_STEP))


def _key(line: bytes) -> tuple[int, int] | None:
    if (match := _KEY.match(line)) and line.endswith(b"}\n"):
        return int(match[1]), int(match[2])
    row = parse_line(line) or {}
    step, group = row.get("step"), row.get("group")
    return (step, group) if is_count(step) and is_count(group) else None


def keep_token_values(
    file: Path, budget: int, unreadable: dict[str, int], mask: Mask = lambda value: value
) -> tuple[dict[GroupKey, str], int]:
    """Return the token values of `file` that fit in `budget` bytes, as JSON by group, and the number of all groups.

    A group is a list of `[sample, texts, advantage, log-probs, changes, entropies, KL, inserted]`: `advantage` is one
    number or one per token; the lists of values have null where a row has none; `inserted` has the indices of the
    tokens that a tool or an environment inserted. A completion whose text has a secret in it is left out, because the
    secret would be spread over its tokens.
    """
    groups: dict[GroupKey, list[Row]] = {}
    for row in read_lines(file, unreadable):
        step, group = row.get("step"), row.get("group")
        if is_count(step) and is_count(group) and _texts(row) is not None:
            groups.setdefault((step, group), []).append(row)
    encoded: dict[GroupKey, str] = {}
    keys = sorted(groups)
    for key in (keys[i] for i in coarse_to_fine(len(keys))):
        samples = [values for row in groups[key] if (values := _token_values(row, mask))]
        group = f"[{','.join(samples)}]"
        budget -= size_of(group) + 20
        if budget < 0:
            break
        encoded |= {key: group} if samples else {}
    return encoded, len(groups)


def token_values_json(groups: Mapping[GroupKey, str], total: int) -> str:
    """Return the groups as the page reads them: `groups` by `step-group`, and the number of all of them."""
    entries = ",".join(f'"{step}-{group}":{values}' for (step, group), values in sorted(groups.items()))
    return f'{{"groups":{{{entries}}},"total":{total}}}'


def _token_values(row: Row, mask: Mask) -> str:
    """Return the values of one completion as JSON; empty where they are not shown."""
    texts, sample = _texts(row), row.get("sample")
    assert texts is not None, "rows without texts are left out before"
    joined = "".join(texts)
    if not is_count(sample) or mask(joined) != joined:
        return ""
    count, advantage, sampled = len(texts), row.get("advantage"), row.get("sampled")
    advantages = _numbers(advantage, count) if isinstance(advantage, list) else number_json(advantage)
    values = ",".join(_numbers(row.get(name), count) for name in VALUES)
    inserted = [i for i, flag in enumerate(sampled[:count]) if flag == 0] if isinstance(sampled, list) else []
    return f"[{sample},[{','.join(map(script_json, texts))}],{advantages},{values},{script_json(inserted)}]"


def _texts(row: Row) -> Sequence[str] | None:
    texts = row.get("texts")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return None
    return texts[:MAX_TOKENS]


def _numbers(values: Any, count: int) -> str:
    """Return `count` numbers, one per token, as JSON; null if there are fewer."""
    if not isinstance(values, list) or len(values) < count:
        return "null"
    return f"[{','.join(number_json(value, digits=3) for value in values[:count])}]"
