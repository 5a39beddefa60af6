"""The Python in the pages on rewards and data runs as written, and their tables are complete."""

import re
from pathlib import Path

import pytest

from covey.data.sources import TASKS
from covey.rewards import REWARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("add-a-reward.md", "data.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_of_the_page_runs(block, capsys):
    exec(compile(block, "page", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^print\(.*\) +# (.*)$", block, re.M)
    assert [line.strip() for line in printed[: len(promised)]] == promised


def test_every_reward_and_every_task_has_its_row():
    rewards, data = ((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    assert re.findall(r"^\| `(\w+)` \| .* \| .*\|$", rewards.split("## Built-in rewards")[1], re.M) == list(REWARDS)
    assert re.findall(r"^\| `([\w-]+)` \| .* \| .* \|$", data, re.M) == list(TASKS)
