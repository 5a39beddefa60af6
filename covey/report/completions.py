"""Choose the completions that a page keeps, and put them into a compact form.

`samples.jsonl` of a long run has more text than one page can hold. Whole groups are kept, because completions are
compared within a group: first all of them, and if they are too many, some groups of evenly spaced steps. The file is
indexed by the beginning of each line, and only the lines that are kept are parsed.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.report.reduce import spread
from covey.report.run_data import Row, number, parse_line

MAX_BYTES = 2_600_000
"""Maximum size in bytes of the completions of a page, of all runs together."""
GROUPS_PER_STEP = 4
"""Number of groups kept of each step where not all fit."""
TRIED = 16
"""Number of groups from whose size that of the others is estimated."""
HEAD, TAIL = 4000, 2000
"""Number of characters kept from the beginning and the end of a long text."""

_KEY = re.compile(rb'\{"step": (\d{1,15}), "group": (\d{1,9}),')


@dataclass(frozen=True)
class Location:
    """Place of one group in the file.

    Attributes:
        start, stop: offsets of its lines in bytes.
    """

    step: int
    group: int
    start: int
    stop: int


class Texts:
    """Table of texts, each kept once: prompts repeat from sample to sample and from step to step."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[str, int] = {}

    def add(self, row: Row) -> tuple[int, int]:
        """Add the prompt of `row`; return its number, and the bytes that this took."""
        key = json.dumps([row.get("prompt"), row.get("turns")])
        if key in self._numbers:
            return self._numbers[key], 0
        self._numbers[key] = len(self.rows)
        self.rows.append(prompt_turns(row))
        return self._numbers[key], encoded_size(self.rows[-1])


def collect(file: Path, budget: int, unreadable: dict[str, int]) -> dict[str, Any]:
    """Return the completions of `file` that fit in `budget` bytes, in the form that the page reads.

    Returns:
        prompts: table of prompts, as turns `[role, text]`.
        rewards: names of the reward functions.
        steps: `[step, number of groups, groups kept]` per step kept. A group is `[number, prompt, samples]`, and a
            sample `[text, reward, advantage, reward parts, finish, tokens]`. A long text is `[head, characters left
            out, tail]`.
        total, kept: numbers of steps and of groups, in the file and on the page.
    """
    index = locate(file, unreadable)
    by_step: dict[int, list[Location]] = {}
    for location in index:
        by_step.setdefault(location.step, []).append(location)
    found: dict[int, list[Any]] = {}
    table, left = _Table(), budget
    for location in _in_order_of_choice(by_step, _room(file, index, budget)):
        group, size = table.add(location, _read(file, location))
        left -= size
        if left < 0 and found:
            break
        if group:
            found.setdefault(location.step, []).append(group)
    prompts, functions = table.prompts, table.functions
    steps = [[step, len(by_step[step]), sorted(found[step], key=lambda group: group[0])] for step in sorted(found)]
    kept = {"steps": len(found), "groups": sum(map(len, found.values()))}
    total = {"steps": len(by_step), "groups": len(index)}
    return {"prompts": prompts.rows, "rewards": list(functions), "steps": steps, "total": total, "kept": kept}


def locate(file: Path, unreadable: dict[str, int]) -> list[Location]:
    """Return where each group of `file` lies. The beginning of a line tells its step and group; a line that begins
    otherwise is parsed.
    """
    found: list[Location] = []
    place = 0
    with file.open("rb") if file.is_file() else nullcontext(()) as lines:
        for line in lines:
            start, place = place, place + len(line)
            if not line.endswith(b"\n"):
                break
            key = _key(line)
            if key is None:
                unreadable[file.name] = unreadable.get(file.name, 0) + 1
            elif found and (found[-1].step, found[-1].group) == key and found[-1].stop == start:
                found[-1] = Location(*key, found[-1].start, place)
            else:
                found.append(Location(*key, start, place))
    return found


def shortened(text: Any) -> Any:
    """Return a text as the page keeps it: itself, or `[head, number of characters left out, tail]`."""
    text = text if isinstance(text, str) else ""
    if len(text) <= HEAD + TAIL + 200:
        return text
    return [text[:HEAD], len(text) - HEAD - TAIL, text[-TAIL:]]


def prompt_turns(row: Row) -> list[list[Any]]:
    """Return the prompt of `row` as turns `[role, text]`; one turn without a role if its turns are not recorded.

    `turns` of the row has the role and the number of characters of each message of `prompt`.

    >>> prompt_turns({"prompt": "user: Hi\\nassistant: Ho", "turns": [["user", 2], ["assistant", 2]]})
    [['user', 'Hi'], ['assistant', 'Ho']]
    """
    text = row.get("prompt")
    text = text if isinstance(text, str) else ""
    found, place = [], 0
    turns = row.get("turns")
    for turn in turns if isinstance(turns, list) else ():
        role, length = turn if isinstance(turn, list) and len(turn) == 2 else ("", -1)
        begin = f"{role}: "
        if not isinstance(length, int) or length < 0 or not text.startswith(begin, place):
            return [["", shortened(text)]]
        place += len(begin)
        found.append([role, shortened(text[place : place + length])])
        place += length + 1
    return found if found and place == len(text) + 1 else [["", shortened(text)]]


def encoded_size(value: Any) -> int:
    """Return about how many bytes `value` takes on the page, escapes included."""
    text = json.dumps(value, ensure_ascii=False)
    return len(text.encode("utf-8", "surrogatepass")) + 5 * sum(map(text.count, "<>&")) + 16


class _Table:
    """Prompts and names of reward functions that the groups of a page refer to by number."""

    def __init__(self) -> None:
        self.prompts, self.functions = Texts(), dict[str, int]()

    def add(self, location: Location, rows: Sequence[Row]) -> tuple[list[Any], int]:
        """Return a group in the page's form, and the bytes that it takes with its prompt; empty without rows."""
        if not rows:
            return [], 0
        prompt, size = self.prompts.add(rows[0])
        group = [location.group, prompt, [_sample(row, self.functions) for row in rows]]
        return group, size + encoded_size(group)


def _room(file: Path, index: Sequence[Location], budget: int) -> int:
    """Estimate from some groups how many groups fit in `budget` bytes."""
    table = _Table()
    some = [index[i] for i in spread(len(index), TRIED)]
    size = sum(table.add(location, _read(file, location))[1] for location in some)
    return budget * len(some) // max(size, 1)


def _in_order_of_choice(by_step: Mapping[int, list[Location]], room: int) -> Iterator[Location]:
    """Yield the groups to keep, the most important first: all if there is `room` for so many, or else some of evenly
    spaced steps.
    """
    steps = sorted(by_step)
    everything = sum(map(len, by_step.values())) <= room
    if not everything:
        steps = [steps[i] for i in spread(len(steps), max(2, room // GROUPS_PER_STEP))]
    for i in _coarse_to_fine(len(steps)):
        here = by_step[steps[i]]
        yield from here if everything else (here[j] for j in spread(len(here), GROUPS_PER_STEP))


def _coarse_to_fine(count: int) -> Iterator[int]:
    """Yield 0 to count − 1: the first, the last, then the middle of each gap, so that any beginning is spread evenly.

    >>> list(_coarse_to_fine(5))
    [0, 4, 2, 1, 3]
    """
    yield from range(min(count, 1))
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)]
    for first, last in gaps:
        if last - first > 1:
            middle = (first + last) // 2
            yield middle
            gaps += [(first, middle), (middle, last)]


def _key(line: bytes) -> tuple[int, int] | None:
    if found := _KEY.match(line):
        return int(found[1]), int(found[2])
    row = parse_line(line) or {}
    step, group = row.get("step"), row.get("group")
    return (step, group) if isinstance(step, int) and isinstance(group, int) else None


def _read(file: Path, location: Location) -> list[Row]:
    with file.open("rb") as lines:
        lines.seek(location.start)
        content = lines.read(location.stop - location.start)
    return [row for line in content.splitlines() if (row := parse_line(line)) is not None]


def _sample(row: Row, functions: dict[str, int]) -> list[Any]:
    """Return a sample in the page's form; `functions` numbers the reward functions, and new ones are added."""
    rewards = row.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    for name in rewards:
        functions.setdefault(name, len(functions))
    parts = [_rounded(rewards.get(name)) for name in functions]
    finish, length = row.get("finish"), row.get("length")
    return [
        shortened(row.get("text")),
        _rounded(row.get("reward")),
        _rounded(row.get("advantage")),
        parts,
        finish if isinstance(finish, str) else "",
        length if isinstance(length, int) else None,
    ]


def _rounded(value: Any) -> float | None:
    found = number(value)
    return None if found is None else float(f"{found:.4g}")
