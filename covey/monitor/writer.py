"""Write the records of a run: `metrics.jsonl`, one row per step; `samples.jsonl`, every completion; other files of rows
of steps; `summary.json`.

In: names and numbers, and scored groups. Out: strict JSON, one object per line, numbers at full precision; NaN and
infinities, which JSON lacks, are null. Rows reach the operating system as they are written, so a killed run leaves
complete lines, and they are synced to disk before a checkpoint that includes them. A resumed run first cuts the rows
after its checkpoint, and then writes the same rows again.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from covey.errors import ResumeError
from covey.files import folder_below, has_file, open_below, open_or_empty, replace_file
from covey.monitor.formats import completion_text, prompt_text
from covey.monitor.run_files import BAD, METRICS, SAMPLES, SUMMARY, run_files
from covey.train.storage import is_open_at, sync
from covey.types import Completion, Group, Message, Prompt

Correct = Mapping[str, Sequence[np.ndarray]]
"""Map from a metric to which completions of each group are right: bool [G]."""
CONTROL_CHARACTERS = re.compile(
    r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
"""Pattern of characters that a terminal interprets or hides: control, direction and invisible characters. They are
written as JSON escapes.
"""


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Append rows of steps to the files of one run folder. A context manager; not thread-safe.

    Write a step's rows and `sync` them before saving its checkpoint, so that no row of a checkpoint is missing.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None, must_reach: Collection[str] = ()):
        """Open the files in `folder`, which is created when missing.

        Args:
            folder: the run folder.
            resume_at: the checkpoint's step: rows of later steps are cut. None for a new run.
            must_reach: names of the files whose last row must belong to that step, for a step above 0.

        Raises:
            ResumeError: a new run has existing rows, a row has the wrong form, or the rows end before the checkpoint.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._resume_at, self._known = folder, resume_at, [f.name for f in run_files() if f.per_step]
        for name in self._known:
            self._cut(folder / name, must_reach=name in must_reach)
        self._files = {name: self._open(name) for name in (METRICS, SAMPLES)}

    def step(self, row: Mapping[str, Any]) -> None:
        """Append the row of a step to the metrics."""
        self.rows(METRICS, [row])

    def rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to the file `name`, which is made with the first of them; their `step` must not decrease."""
        self.lines(name, map(encode_row, rows))

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._known:
            self._cut(self._folder / name)
        return open_below(self._folder, name, "ab", buffering=0)

    def _cut(self, file: Path, must_reach: bool = False) -> None:
        """Cut the rows after the checkpoint of a resumed run, and refuse rows of another run."""
        if self._resume_at is not None:
            truncate_rows(file, self._resume_at, must_reach)
        elif has_file(self._folder, file.name) and file.stat().st_size:
            raise ResumeError("there are rows of another run here", fix="another folder, or resume", where=str(file))

    def lines(self, name: str, lines: Iterable[bytes | bytearray | memoryview]) -> None:
        """Append encoded rows; see `rows` and `group_lines`."""
        if not (encoded := b"".join(lines)):
            return
        if name not in self._files:
            self._files[name] = self._open(name)
        file = self._files[name]
        with self._writing(file, f"{len(encoded):,} bytes"):
            remaining = memoryview(encoded)
            while remaining:  # a full disk accepts a part, and refuses the next
                remaining = remaining[file.write(remaining) :]
        if not is_open_at(file, Path(file.name)):
            raise ResumeError(
                "this file was removed or replaced while the run was writing it",
                want="files that are left alone until the run has ended; an editor replaces what it saves",
                fix="put the file back and resume: the run goes on from its last checkpoint",
                where=file.name,
            )

    @contextmanager
    def _writing(self, file: IO[bytes], what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResumeError(
                f"{what} could not be written: {error.strerror}",
                want=f"room ({shutil.disk_usage(self._folder).free:,} bytes are free)",
                fix="make room and resume: the run goes on from its last checkpoint",
                where=file.name,
            ) from error

    def sync(self) -> None:
        """Sync the rows and the directory entries of their files to disk."""
        for file in self._files.values():
            with self._writing(file, "the last rows"):
                os.fsync(file.fileno())
        sync(self._folder)

    def close(self) -> None:
        """Sync the rows to disk and close the files."""
        for file in self._files.values():
            if not file.closed:
                os.fsync(file.fileno())
                file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def write_answers(folder: Path, name: str, groups: Iterable[Group], correct: Correct | None = None) -> None:
    """Write an evaluation's completions as `<name>.jsonl`, in the form of `samples.jsonl` with step 0.

    Args:
        correct: which completions of each group are right, by the name of the metric, 1, 0 or NaN: written as `correct`
            of the row, true, false or null.
    """
    with open_below(folder, f"{name}.jsonl", "wb") as file:
        for row in sample_rows(0, groups):
            marks = {name: right[row["group"]][row["sample"]] for name, right in (correct or {}).items()}
            judged = {name: None if np.isnan(mark) else bool(mark) for name, mark in marks.items()}
            file.write(encode_row(row | {"correct": judged} if judged else row))


def write_bad_batch(folder: Path, step: int, groups: Iterable[Group], arrays: Mapping[str, np.ndarray]) -> Path:
    """Keep the batch of a non-finite update for debugging: `bad/<step>.jsonl` in the form of `samples.jsonl`, and
    `bad/<step>.npz` with the inputs of the losses. Return their common path without a suffix.
    """
    folder_below(folder, BAD).mkdir(exist_ok=True)
    name = f"{BAD}/{step:08d}"
    with open_below(folder, f"{name}.jsonl", "wb") as file:
        file.writelines(encode_row(row) for row in sample_rows(step, groups))
    with open_below(folder, f"{name}.npz", "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return folder / name


GroupRows = Callable[[int, int, Group], Iterable[Mapping[str, Any]]]
"""Function of (step, number of a group in it, the group) that returns the rows of the group in a file."""


def group_lines(rows: GroupRows, step: int, groups: Iterable[Group], numbers: Iterable[int]) -> list[bytes]:
    """Return the encoded rows of each group of a step; `numbers` has the number of each group in it."""
    numbered = zip(numbers, groups, strict=True)
    return [b"".join(map(encode_row, rows(step, number, group))) for number, group in numbered]


def sample_rows(step: int, groups: Iterable[Group]) -> Iterator[dict[str, Any]]:
    """Yield one row per completion: prompt, completion, scores, and how it ended."""
    for number, group in enumerate(groups):
        yield from group_rows(step, number, group)


def group_rows(step: int, number: int, group: Group) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group in `samples.jsonl`."""
    for index, completion in enumerate(group.completions):
        yield {
            "step": step,
            "group": number,
            "sample": index,
            "prompt": prompt_text(group.prompt),
            **prompt_turns(group.prompt),
            "text": completion_text(completion),
            "rewards": {name: values[index] for name, values in group.rewards_by_function.items()},
            "reward": None if group.rewards is None else group.rewards[index],
            "advantage": None if group.advantages is None else group.advantages[index],
            "finish": str(completion.finish),
            "prompt_length": len(group.prompt_tokens),
            "length": len(completion.tokens),
            **_episode_columns(completion),
        }


def _episode_columns(completion: Completion) -> dict[str, Any]:
    """Return the columns of a row that describe the episode of a completion, if it has an episode.

    `messages` has the role and the number of characters of each message of `text`, `turn_ends` the number of tokens at
    the end of each turn of the model, and `turn_tokens` the number that the model generated in it.
    """
    if (episode := completion.episode) is None:
        return {}
    sampled = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
    ends = list(episode.turn_ends)
    columns: dict[str, Any] = {
        "messages": message_lengths(episode.messages),
        "turn_rewards": list(episode.turn_rewards),
        "turn_ends": ends,
        "turn_tokens": [int(sampled[start:end].sum()) for start, end in zip([0, *ends], ends, strict=False)],
        "done": episode.done,
    }
    return columns | ({"failure": episode.failure} if episode.failure else {})


def prompt_turns(prompt: Prompt) -> dict[str, Any]:
    """Return `turns` of a row: role and number of characters of each chat message in `prompt_text`. A prompt that is
    plain text has none.
    """
    return {} if isinstance(prompt, str) else {"turns": message_lengths(prompt)}


def message_lengths(messages: Iterable[Message]) -> list[list[Any]]:
    """Return role and number of characters of each chat message, by which `prompt_text` of them can be taken apart."""
    return [[str(message["role"]), len(str(message["content"]))] for message in messages]


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` atomically: a reader sees the old file or the new one, never a part."""
    replace_file(folder / SUMMARY, strict_json(summary, indent=2).encode("utf-8") + b"\n")


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without an unfinished last line."""
    with open_below(file.parent, file.name) as lines:
        yield from (json.loads(text) for text in lines if text.endswith(b"\n"))


def truncate_rows(file: Path, step: int, must_reach: bool = False) -> None:
    """Shorten `file` to the rows of steps up to `step`; a missing file counts as empty.

    This is one system call, so it happens completely or not at all.

    Args:
        must_reach: whether the last row that is kept must belong to `step`, when that is not 0.

    Raises:
        ResumeError: a line inside the file is not a valid row; or the rows end before `step`.
    """
    keep = last = 0
    with open_or_empty(file.parent, file.name) as lines:
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n") or (row_step := _step_of(text, f"{file}:{number}")) > step:
                break
            keep, last = keep + len(text), row_step
    if must_reach and last != step:
        raise _missing_rows(file, last, step)
    if file.exists():
        with open_below(file.parent, file.name, "r+b") as rows:
            rows.truncate(keep)


def _missing_rows(file: Path, last: int, step: int) -> ResumeError:
    again = f"remove the checkpoints behind step {last}: the run goes on from the last one before it"
    return ResumeError(
        f"the last step with a row here is {last or 'none'}, and the last checkpoint is of step {step}",
        want="a row for every step that a checkpoint counts",
        fix=f"put the file back as the run left it; or {again if last else 'begin a new run'}",
        where=str(file),
    )


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Encode `row` as one line of strict JSON in UTF-8."""
    return (strict_json(row) + "\n").encode("utf-8")


def strict_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Encode `value` as JSON that any reader takes: a number that is not finite becomes null, and `CONTROL_CHARACTERS`
    characters become \\u escapes.
    """
    text = json.dumps(_json_value(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return CONTROL_CHARACTERS.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _json_value(value: Any) -> Any:
    """Convert array scalars to Python's own types, and non-finite numbers to None."""
    if isinstance(value, Mapping):
        return {name: _json_value(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(entry) for entry in value]
    if hasattr(value, "tolist"):  # NumPy and JAX
        return _json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(text: bytes, where: str) -> int:
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        raise ResumeError("this line is no row of a run", fix="remove the line, or start anew", where=where) from None
