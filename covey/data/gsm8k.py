"""GSM8K (Cobbe et al., 2021): grade-school problems, each with a worked solution that ends in `#### number`."""

from typing import Any

COLUMNS = ("question", "answer")

REASONING = (
    "Solve the problem. Write your reasoning between <reasoning> and </reasoning>, "
    "then the answer, one number, between <answer> and </answer>."
)
"""System message for the rewards of SPEC S4: the layout with tags."""

MARKER = "Solve the problem step by step. End with a line of #### and the answer, one number, like this: #### 42"
"""System message for `exact_answer` (SPEC S5); set it as `data.system`."""


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the data set as a row: `prompt`, `question`, and `answer`, the text after `####`.

    >>> row({"question": "2+2?", "answer": "2+2 = 4\\n#### 4"})
    {'prompt': '2+2?', 'question': '2+2?', 'answer': '4'}
    """
    question, solution = record["question"], record["answer"]
    return {"prompt": question, "question": question, "answer": final_answer(solution)}


def final_answer(solution: str) -> str | None:
    """The text after `####`, stripped; None when there is no marker or nothing after it."""
    return solution.partition("####")[2].strip() or None
