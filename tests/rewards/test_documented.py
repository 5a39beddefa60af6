"""The tables of the pages on rewards and tasks are complete. `tests/docs/test_blocks.py` executes their Python."""

import re
from pathlib import Path
from typing import get_args

from covey.config.schema.data import TaskName
from covey.rewards.registry import REWARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
OFFERED = [
    "format_exact",
    "format_approximate",
    "answer_ratio",
    "answer_number",
    "answer_close",
    "exact_answer",
    "exact_answer_strict",
    "math_verify",
]
"""Rewards that plugins offer."""
PAGES = ("add-a-reward.md", "tasks.md")


def test_every_reward_and_every_task_has_its_row():
    rewards, data = ((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    rows = re.findall(r"^\| `(\w+)` \| .* \| .*\|$", rewards.split("## Built-in rewards")[1], re.M)
    assert sorted(rows) == sorted([*REWARDS, *OFFERED])
    assert re.findall(r"^\| `([\w-]+)` \| .* \| .* \|$", data, re.M) == [*get_args(TaskName)][:-1]
