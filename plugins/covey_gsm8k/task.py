"""GSM8K (Cobbe et al., 2021): grade-school problems, each with a worked solution that ends in `#### number`."""

import re
from collections.abc import Callable
from typing import Any

from covey.config.schema import DataConfig, SFTDataConfig
from covey.data.rows import Row
from covey.data.sources import Splits, Task, open_rows
from covey.errors import DataError

COLUMNS = ("question", "answer")
EXPECTED_FILES = (
    "GSM8K's folder, with train.jsonl and test.jsonl or Kaggle's main_train.csv and main_test.csv; "
    "or hf:openai/gsm8k; or tfds:gsm8k"
)

REASONING_SYSTEM = (
    "Solve the problem. Write your reasoning between <reasoning> and </reasoning>, "
    "then the answer, one number, between <answer> and </answer>."
)
"""System message for the reward functions that read tags, such as `format_exact` and `answer_number`."""

MARKER_SYSTEM = "Solve the problem step by step. End with a line of #### and the answer, one number, like this: #### 42"
"""System message for `exact_answer`; set it as `data.system`."""


def as_row(record: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Convert a record to a row with `prompt`, `question` and `answer`: the text after `####`, or None without `####`.

    >>> as_row({"question": "2+2?", "answer": "2+2 = 4\\n#### 4"})
    {'prompt': '2+2?', 'question': '2+2?', 'answer': '4'}

    Raises:
        DataError: the question or the solution is not text, or the question is empty.
    """
    question, solution = record["question"], record["answer"]
    for name, text in (("question", question), ("answer", solution)):
        if not isinstance(text, str) or not (text.strip() or name == "answer"):
            raise DataError(f"the {name} is {text!r:.80}", want="text", where=where)
    return {"prompt": question, "question": question, "answer": final_answer(solution)}


def as_example(record: dict[str, Any], system: str, where: str = "") -> dict[str, Any]:
    """Convert a record to a row with the completion to learn: the worked solution without calculator annotations.

    The completion ends in `####` and the answer if `system` mentions `####`; otherwise it has tags.

    >>> as_example({"question": "2+2?", "answer": "2+2 = <<2+2=4>>4\\n#### 4"}, MARKER_SYSTEM)["completion"]
    '2+2 = 4\\n#### 4'

    Raises:
        DataError: the solution has no final answer.
    """
    asked, steps = as_row(record, where), _ANNOTATION.sub("", record["answer"]).partition("####")[0].strip()
    if asked["answer"] is None:
        raise DataError(f"a solution has no #### and answer: {record['answer']!r:.80}", where=where)
    tagged = f"<reasoning>\n{steps}\n</reasoning>\n<answer>{asked['answer']}</answer>"
    return {**asked, "completion": f"{steps}\n#### {asked['answer']}" if "####" in system else tagged}


def final_answer(solution: str) -> str | None:
    """Return the stripped text after `####`; None if there is no `####` or no text after it."""
    return solution.partition("####")[2].strip() or None


_ANNOTATION = re.compile(r"<<[^<>]*>>")


def _examples(config: SFTDataConfig) -> Splits:
    system = REASONING_SYSTEM if config.system is None else config.system
    return _rows(config, lambda record, where: as_example(record, system, where))


def _rows(config: DataConfig, row: Callable[[Row, str], Row] = as_row) -> Splits:
    return open_rows(config, COLUMNS, EXPECTED_FILES, row, hub_config="main")


GSM8K = Task(_rows, _examples, REASONING_SYSTEM)
