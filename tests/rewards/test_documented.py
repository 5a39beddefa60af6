"""The tables of the pages on rewards and data are complete. Their Python is executed by `tests/docs/test_blocks.py`."""

import re
from pathlib import Path
from typing import get_args

from covey.config.schema.data import TaskName
from covey.rewards import REWARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("add-a-reward.md", "data.md")


def test_every_reward_and_every_task_has_its_row():
    rewards, data = ((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    assert re.findall(r"^\| `(\w+)` \| .* \| .*\|$", rewards.split("## Built-in rewards")[1], re.M) == list(REWARDS)
    assert re.findall(r"^\| `([\w-]+)` \| .* \| .* \|$", data, re.M) == [*get_args(TaskName)][:-1]
