"""`covey data`: what is wrong with the data of a recipe is told before a run, and a run refuses the same."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from covey.cli import main as cli
from covey.config.schema import SFTDataConfig
from covey.data import load_data
from covey.errors import DataError

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chat(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def write(*rows: dict[str, Any] | str) -> list[str]:
    """Write rows, and lines as they are, to a file; return the settings that name it."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path("rows.jsonl").write_text("\n".join(lines) + "\n")
    return ["--data.task", "jsonl", "--data.path", "rows.jsonl", "--model.source", TINY]


def summary(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["data", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_chat_file_with_broken_rows_is_looked_at_to_its_end(capsys: Any) -> None:
    rows = [chat(f"{n} + 1?", str(n + 1)) for n in range(20)]
    settings = write('{"messages": [', chat("empty?", " "), {"question": "?"}, chat("long " * 60, "no"), *rows)
    code, found = summary(capsys, "sft-smollm2", *settings, "--training.max-length", "100")
    assert (code, found["refused"], found["train"], found["held_out"]) == (2, True, 19, 2)
    assert [one["places"] for one in found["malformed"]] == [
        ["rows.jsonl:1"],
        ["rows.jsonl, row 2"],
        ["rows.jsonl, row 3"],
    ]
    assert [finding["title"] for finding in found["findings"]] == [
        "3 rows are malformed",
        "longer than 100 tokens: 1 training row, refused, as are the data",
    ]
    assert [segment["role"] for segment in found["shown"][0]["segments"]][-2:] == ["template", "completion"]
    with pytest.raises(DataError, match=r"^rows\.jsonl:1: is not JSON"):
        load_data(SFTDataConfig(path="rows.jsonl"))


def test_one_prompt_many_times_is_told_and_shown(capsys: Any) -> None:
    settings = write(*[{"prompt": "2+2?", "answer": "4" if n else None} for n in range(200)])
    words = ["arithmetic-smollm2", *settings, "--data.system", "Be brief.", "--max-prompt-length", "300"]
    code, found = summary(capsys, *words, "--rows", "1")
    titles = ["20 of 20 held-out rows are training rows", "180 training rows, 1 distinct"]
    assert [finding["title"] for finding in found["findings"]] == [
        *titles,
        "the column 'answer' is empty in 1 of 200 rows",
    ]
    assert code == 0
    assert [row["title"] for row in found["shown"][1:]] == [
        "the most frequent training row, row 1: 180 times",
        "a held-out row that is a training row, row 181",
    ]
    roles = [segment["role"] for segment in found["shown"][0]["segments"]]
    assert roles == ["template", "system", "template", "user", "template"]


def test_a_column_that_a_reward_needs_is_missing(capsys: Any) -> None:
    settings = write(*[{"prompt": f"{n}?\x1b[2J", "solution": "4"} for n in range(10)])
    assert cli.main(["data", "arithmetic-smollm2", *settings, "--evaluation.format", "starts_with_letter"]) == 2
    shown = capsys.readouterr().out
    text = " ".join(shown.split())  # lines end at the width
    assert "asks for 'answer', which no data column gives" in text
    assert "evaluation.format: the reward function 'starts_with_letter' asks for 'letter'" in text
    assert "\x1b[2J" not in shown


def test_the_page_replaces_no_other_file(capsys: Any) -> None:
    settings = write(*[{"prompt": f"{n}?</script>", "answer": "4"} for n in range(10)])
    words = ["data", "arithmetic-smollm2", *settings, "--html", "page.html"]
    assert cli.main(words) == cli.main(words) == 0
    page = Path("page.html").read_text()
    assert page.count("</script>") == 2
    assert "default-src 'none'; script-src 'sha256-" in page
    Path("page.html").write_text("mine")
    assert cli.main(words) == 2
    assert "no report of Covey" in capsys.readouterr().err


def test_a_file_without_a_row_that_can_be_trained_on_is_refused(capsys: Any) -> None:
    code, found = summary(capsys, "arithmetic-smollm2", *write('{"prompt":'))
    assert (code, found["train"], found["lengths"], found["shown"]) == (2, 0, None, [])
    assert [one["title"] for one in found["findings"]][1:] == ["there is no training row", "there is no held-out row"]
    code, found = summary(capsys, "arithmetic-smollm2", *write({"prompt": "2+2?", "answer": "4"}))
    assert (code, [one["title"] for one in found["findings"]][:1]) == (2, ["there is no held-out row"])


def test_plain_text_for_a_model_with_a_chat_template_is_named_before_the_run(capsys: Any) -> None:
    """By `covey data` and a dry run, as by a run; `data.system` makes chats of the prompts."""
    numbers = random.Random(1).sample(range(20), 20)
    settings = write(*[{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in numbers])
    words = ["arithmetic-smollm2", *settings, "--data.system", "", "--rewards", "arithmetic_answer"]
    title = "20 prompts are plain text, and the model has a chat template"
    assert [one["title"] for one in summary(capsys, *words)[1]["findings"]] == [title]
    assert title not in [one["title"] for one in summary(capsys, *words[:-3], "Be brief.", *words[-2:])[1]["findings"]]
    pytest.importorskip("covey_plan")
    assert cli.main(["train", *words, "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert told.startswith("18 prompts are plain text, and the model has a chat template: a chat model that gets")


SUMS = [(a, b) for a in range(20) for b in range(20)]
random.Random(0).shuffle(SUMS)
ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS[:100]]
RL = ("arithmetic-smollm2", "--max-prompt-length", "400")


def titles(capsys: Any, rows: list[dict[str, Any]], *words: str) -> list[tuple[str, str]]:
    """Levels and titles of the findings, but for the one that prompts are plain text."""
    found = summary(capsys, *(words or RL), *write(*rows))[1]
    return [(one["level"], one["title"]) for one in found["findings"] if "are plain text" not in one["title"]]


@pytest.mark.parametrize(
    ("form", "every", "level"),
    [
        ("{prompt} Answer: {answer}", 1, "problem"),
        ("{prompt} {answer}", 1, "problem"),
        ("{prompt}\n{answer}\nThink step by step.", 1, "problem"),
        ("(The answer is {answer}.) {prompt}", 1, "problem"),
        ("{prompt} #### {answer}", 25, "note"),
    ],
)
def test_an_answer_in_its_prompt_is_told(capsys: Any, form: str, every: int, level: str) -> None:
    rows = [row if n % every else row | {"prompt": form.format(**row)} for n, row in enumerate(ROWS)]
    told = titles(capsys, rows)
    assert told == [(level, f"the answer stands in the prompt of {100 // every} of 100 training rows")]
    found = summary(capsys, *RL, *write(*rows))[1]
    assert found["findings"][0]["samples"][0] == f"row 1: …{rows[0]['prompt']!r}"


def test_a_long_completion_in_its_prompt_is_told(capsys: Any) -> None:
    numbers = random.Random(0).sample(range(100), 100)
    rows = [
        {"prompt": f"Mend: it is number {n} of many. Please.", "completion": f"it is number {n} of many"}
        for n in numbers
    ]
    assert titles(capsys, rows, "sft-smollm2") == [
        ("problem", "the completion stands in the prompt of 100 of 100 training rows")
    ]


SOUND = {
    "plain": lambda row, n: row,
    "solved examples": lambda row, n: row | {"prompt": f"1+1? Answer: 2\n7+2? Answer: 9\n{row['prompt']} Answer:"},
    "a choice": lambda row, n: {"prompt": f"{row['prompt']} Answer A or B", "answer": "AB"[n * 7 % 3 % 2]},
    "numbers of rows": lambda row, n: row | {"id": n, "name": f"train-{n}"},
    "one odd value": lambda row, n: row | {"source": "a" if n else "b"},
    "answers in another spelling": lambda row, n: row | {"answer": f" {row['answer']}"},
}


@pytest.mark.parametrize("change", SOUND.values(), ids=SOUND)
def test_nothing_is_told_of_sound_rows(capsys: Any, change: Any) -> None:
    assert titles(capsys, [change(row, n) for n, row in enumerate(ROWS)]) == []


ORDERS = {
    "answer": sorted(ROWS, key=lambda row: int(row["answer"])),
    "level": [row | {"level": "hard" if n < 60 else "easy"} for n, row in enumerate(ROWS)],
    "score": [row | {"score": n / 7} for n, row in enumerate(ROWS)],
    "length of the prompt": [row | {"prompt": f"{row['prompt']:{n + 20}}."} for n, row in enumerate(ROWS)],
    "prompt": sorted(ROWS, key=lambda row: [int(word) for word in re.findall(r"\d+", row["prompt"])]),
}


@pytest.mark.parametrize(("column", "rows"), ORDERS.items(), ids=ORDERS)
def test_a_held_out_tail_of_a_sorted_file_is_told(capsys: Any, column: str, rows: list[dict[str, Any]]) -> None:
    """Not if there are held-out rows of their own."""
    title = f"the held-out rows are the last of a file that is sorted by {column!r}"
    assert titles(capsys, rows) == [("note" if column == "prompt" else "problem", title)]
    Path("test.jsonl").write_text(json.dumps({"prompt": "?", "answer": "1"}))
    assert titles(capsys, rows, *RL, "--data.test-path", "test.jsonl") == []


def test_empty_and_contradicting_answers_are_told_with_rows(capsys: Any) -> None:
    rows = [row | {"answer": "" if n % 20 == 3 else row["answer"]} for n, row in enumerate(ROWS)]
    rows[50:50] = [{"prompt": ROWS[0]["prompt"].upper(), "answer": "99"}, {"prompt": ROWS[3]["prompt"], "answer": "5"}]
    found = summary(capsys, *RL, *write(*rows))[1]["findings"]
    assert [(one["title"], one["evidence"]) for one in found if not re.search("rows are|plain", one["title"])] == [
        ("1 prompt has several answers", "as rows 1 and 51, but for case and white space"),
        ("92 training rows, 90 distinct (91 with case and white space)", "the most frequent one is there 2 times"),
        (
            "the column 'answer' is empty in 5 of 102 rows",
            "it is read by arithmetic_answer, number_only; as in rows 4, 24, 44",
        ),
    ]


def test_a_column_for_the_prompt_is_told(capsys: Any) -> None:
    told = titles(capsys, [row | {"tools": [{"name": "add"}]} for row in ROWS])
    assert told == [("note", "no prompt has what stands in the column 'tools'")]
