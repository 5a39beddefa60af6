"""The task GSM8K: its rows, and the worked answers to learn."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import DataConfig, SFTDataConfig
from covey.data import load_data
from covey.errors import DataError
from covey_gsm8k.rewards import answer_number, answer_ratio, exact_answer, format_exact, reference
from covey_gsm8k.task import MARKER_SYSTEM, final_answer

GSM8K = Path(__file__).resolve().parents[3].parent / "shared" / "gsm8k"

SAMPLE = [
    {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
    for n in range(1, 2001, 40)
]


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.jsonl", SAMPLE[:40])
    write(tmp_path / "test.jsonl", SAMPLE[40:])
    return tmp_path


@pytest.fixture
def gsm8k(folder):
    """The real data set where it lies beside the repository, a small one of the same form elsewhere."""
    return (GSM8K, 7473, 1319) if GSM8K.is_dir() else (folder, 40, 10)


def test_gsm8k_is_read_whole_and_every_answer_is_a_number(gsm8k):
    path, train, test = gsm8k
    data = load_data(DataConfig(task="gsm8k", path=str(path)))
    assert (len(data.train), len(data.test)) == (train, test)
    for row in [*data.train, *data.test]:
        assert reference(row["answer"]) is not None, row
        assert row["prompt"][1] == {"role": "user", "content": row["question"]}
        assert set(row) == {"prompt", "question", "answer"}


def test_the_reference_solutions_of_gsm8k_score_one_against_themselves(gsm8k):
    path, _, test = gsm8k
    records = [json.loads(line) for line in (path / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    solutions, answers = [r["answer"] for r in records], [final_answer(r["answer"]) for r in records]
    assert sum(exact_answer(solutions, solutions, answers)) == test
    assert sum(exact_answer(solutions, solutions, answers, strict=True)) == test
    assert sum(exact_answer(solutions, solutions, [None] * test)) == 0


def test_gsm8k_asks_for_the_tags_unless_told_otherwise(folder):
    data = load_data(DataConfig(task="gsm8k", path=str(folder)))
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert data.system.count(tag) == 1
    assert data.train[0]["prompt"][0] == {"role": "system", "content": data.system}
    own = load_data(DataConfig(task="gsm8k", path=str(folder), system="End with #### and the number."))
    assert own.test[0]["prompt"][0]["content"] == "End with #### and the number."


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so 3\n#### 3", "3"),
        ("####  1,000 \n", "1,000"),
        ("####-5", "-5"),
        ("no marker", None),
        ("", None),
        ("####", None),
        ("#### \n", None),
    ],
)
def test_the_answer_is_the_text_behind_the_marker(solution, answer):
    assert final_answer(solution) == answer


GSM = [
    {"question": f"What is {n}+{n}?", "answer": f"Add: <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n:,}"}
    for n in range(600, 640)
]


def learnt(folder: Path, **settings: Any) -> tuple[Any, list[str], list[str]]:
    """Held-out rows, their completions and their answers."""
    write(folder / "train.jsonl", GSM[:30])
    write(folder / "test.jsonl", GSM[30:])
    rows = load_data(SFTDataConfig(task="gsm8k", path=str(folder), **settings)).test
    return rows, [row["completion"] for row in rows], [row["answer"] for row in rows]


def test_the_answers_of_gsm8k_are_worth_the_full_reward(tmp_path: Path) -> None:
    rows, completions, answers = learnt(tmp_path)
    assert set(format_exact([], completions)) == set(answer_ratio([], completions, answers)) == {3.0}
    assert set(answer_number([], completions, answers)) == {1.5}
    assert completions[0] == "<reasoning>\nAdd: 1260.\n</reasoning>\n<answer>1,260</answer>"
    assert "<reasoning>" in rows[0]["prompt"][0]["content"]


def test_gsm8k_is_answered_in_the_layout_that_is_asked_for(tmp_path: Path) -> None:
    """The trap: a system message of one layout, and answers in another."""
    _, completions, answers = learnt(tmp_path, system=MARKER_SYSTEM)
    assert set(exact_answer([], completions, answers)) == {1.0}
    assert completions[0] == "Add: 1260.\n#### 1,260"


def test_a_solution_without_an_answer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": "What?", "answer": "no idea"}])
    write(tmp_path / "test.jsonl", GSM[:2])
    with pytest.raises(DataError, match="no #### and answer"):
        load_data(SFTDataConfig(task="gsm8k", path=str(tmp_path)))
