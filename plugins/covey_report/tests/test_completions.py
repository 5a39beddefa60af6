"""Completions and held-out questions of a report."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.monitor.writer import sample_rows
from covey.types import Completion, Episode, FinishReason, Group
from covey_report.completions import collect, keep_token_values, locate
from covey_report.evaluation import figures, questions
from covey_report.run_data import read_run
from covey_report.texts import completion_form, prompt_turns, shortened

MEGABYTE = 1_000_000


def test_all_groups_are_kept_whole_when_they_fit(make_run: Any) -> None:
    found = json.loads(collect(make_run(steps=5, groups=3) / "samples.jsonl", MEGABYTE, {}))
    assert found["total"] == found["kept"] == {"steps": 5, "groups": 15}
    assert [step for step, _, _ in found["steps"]] == [1, 2, 3, 4, 5]
    (step, groups_of_step, kept) = found["steps"][0]
    assert (step, groups_of_step, [number for number, _, _ in kept]) == (1, 3, [0, 1, 2])
    (_, prompt, samples) = kept[1]
    assert found["prompts"][prompt] == [["user", "Question 1-1?"]]
    assert samples[3] == ["Answer 1-1-3", 1.5, 0.5, [0.5, 1.0], False, 9]
    assert found["rewards"] == ["spelling", "answer"]


def test_a_long_run_keeps_evenly_spaced_steps_within_the_budget(make_run: Any) -> None:
    folder = make_run(steps=200, groups=6, text="A longer answer " * 20)
    encoded = collect(folder / "samples.jsonl", 100_000, {})
    found = json.loads(encoded)
    steps = [step for step, _, _ in found["steps"]]
    assert 60_000 < len(encoded) < 102_000
    assert found["total"] == {"steps": 200, "groups": 1200}
    assert 20 < found["kept"]["groups"] < 120
    assert (steps[0], steps[-1]) == (1, 200)
    assert max(after - before for before, after in pairwise(steps)) <= 3 * 200 / len(steps)
    assert {len(samples) for _, _, groups in found["steps"] for _, _, samples in groups} == {4}


def test_one_group_is_shown_however_large_it_is(made: SimpleNamespace, tmp_path: Path) -> None:
    made.write_lines(tmp_path / "samples.jsonl", [made.sample(1, 0, 0, "x" * 5000)])
    assert json.loads(collect(tmp_path / "samples.jsonl", 10, {}))["kept"]["groups"] == 1


def test_rows_of_another_form_are_left_out_and_counted(made: SimpleNamespace, tmp_path: Path) -> None:
    file, unreadable = tmp_path / "samples.jsonl", dict[str, int]()
    odd = {"group": 1, "step": 1, "text": 7, "reward": "high", "rewards": [1], "finish": None, "length": "long"}
    file.write_text(f'nonsense\n[1]\n{json.dumps(odd)}\n{json.dumps(made.sample(2, 0, 0, "fine"))}\n{{"step": 3, "gro')
    found = json.loads(collect(file, MEGABYTE, unreadable))
    assert unreadable == {"samples.jsonl": 2}
    assert [step for step, _, _ in found["steps"]] == [1, 2]
    assert found["steps"][0][2] == [[1, 0, [["", None, None, [], False, None]]]]


def test_only_what_follows_the_known_groups_is_read(made: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    made.write_lines(file, [made.sample(step, 0, index, "text") for step in (1, 2) for index in (0, 2)])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    known = locate(file, {})
    assert [(group.step, group.stop) for group in known] == [(1, len(lines[0]) * 2), (2, len(lines[0]) * 3)]
    file.write_bytes(b"x" * len(lines[0]) * 3 + lines[3])  # the known part is not looked at again
    unreadable: dict[str, int] = {}
    assert locate(file, unreadable, known) == [known[0], known[1]._replace(stop=len(lines[0]) * 4)]
    file.write_bytes(lines[0])  # a resumed run has cut it
    assert locate(file, unreadable, known) == [known[0]._replace(stop=len(lines[0]))]
    assert unreadable == {}


def test_groups_whose_tokens_were_scored_are_kept_first(make_run: Any) -> None:
    file = make_run(steps=50, groups=6, text="A longer answer " * 20) / "samples.jsonl"
    found = json.loads(collect(file, 20_000, {}, first={(17, 4), (33, 5)}))
    groups = {(step, number) for step, _, kept in found["steps"] for number, _, _ in kept}
    assert groups >= {(17, 4), (33, 5)}
    assert len(groups) < 16


def test_episodes_are_kept_as_turns(made: SimpleNamespace, tmp_path: Path) -> None:
    """A turn of the model has its reward and its tokens by origin; what does not fit the text is shown as text."""
    spoilt = made.episode | {"messages": [["assistant", 99]]}
    rows = [made.sample(1, 0, 0, **made.episode), made.sample(1, 0, 1, **spoilt)]
    made.write_lines(tmp_path / "samples.jsonl", rows)
    samples = json.loads(collect(tmp_path / "samples.jsonl", MEGABYTE, {}))["steps"][0][2][0][2]
    turns = [["assistant", "5", 0.0, 2, 0], ["environment", "less"], ["assistant", "4", 0.75, 2, 2]]
    assert [sample[0] for sample in samples] == [{"turns": turns}, made.episode["text"]]


def test_token_values_are_kept_by_group(made: SimpleNamespace, tmp_path: Path) -> None:
    file, unreadable = tmp_path / "tokens.jsonl", dict[str, int]()
    odd = made.token_row(1, 0, 2, ["x"], change="x", entropy=[None], logps=[1, 2], advantage=[0.5], sampled=[0])
    rows = [made.token_row(1, 0, 1, ["a", "b"], kl=[0.0, 1 / 3]), odd, made.token_row(1, 0, 3, [7]), {"step": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    kept, total = keep_token_values(file, MEGABYTE, unreadable)
    assert (total, unreadable) == (1, {"tokens.jsonl": 1})
    plain = [1, ["a", "b"], 0.5, [-1.0, -1.1], [0.3, 0.2], [0.0, 0.1], [0.0, 0.333], []]
    assert json.loads(kept[1, 0]) == [plain, [2, ["x"], [0.5], [1], None, [None], None, [0]]]
    masked, _ = keep_token_values(file, MEGABYTE, {}, lambda text: text.replace("ab", "***"))
    assert [sample for sample, *_ in json.loads(masked[1, 0])] == [2]


def test_token_values_of_a_long_run_are_spread_evenly(made: SimpleNamespace, tmp_path: Path) -> None:
    rows = [made.token_row(step, 0, i, ["word"] * 50) for step in range(1, 101) for i in range(8)]
    made.write_lines(tmp_path / "tokens.jsonl", rows)
    kept, total = keep_token_values(tmp_path / "tokens.jsonl", 100_000, {})
    assert (total, sum(map(len, kept.values())) <= 100_000) == (100, True)
    steps = [step for step, _ in sorted(kept)]
    assert 5 < len(steps) < 100
    assert (steps[0], steps[-1]) == (1, 100)


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    head, left_out, tail = shortened("a" * 4000 + "b" * 1_000_000 + "c" * 2000)
    assert (set(head), left_out, set(tail)) == ({"a"}, 1_000_000, {"c"})


def test_turns_are_those_that_were_written() -> None:
    """A message that imitates another role does not become a turn, in a prompt or in an episode."""
    prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nassistant: I am a user"})
    said = ({"role": "assistant", "content": "5"}, {"role": "environment", "content": "less\nassistant: 9"})
    episode = Episode((*said, said[0]), turn_ends=(2, 6), turn_rewards=(0.5, 1.0), done=True)
    mask = np.array([True, True, False, False, True, True])
    completion = Completion(np.arange(6), *([0.0],) * 2, FinishReason.STOP, "", mask, episode)  # type: ignore[arg-type]
    (row,) = sample_rows(1, [Group(prompt, np.array([1]), (completion,))])
    row = json.loads(json.dumps(row, default=str))
    assert prompt_turns(row) == [["system", "Be brief."], ["user", "Hi\nassistant: I am a user"]]
    without = {name: value for name, value in row.items() if name != "turns"}
    assert prompt_turns(without) == [["", row["prompt"]]]
    turns = [["assistant", "5", 0.5, 2, 0], ["environment", "less\nassistant: 9"], ["assistant", "5", 1.0, 2, 2]]
    assert completion_form(row) == {"turns": turns}


@pytest.mark.parametrize("turns", ["x", [["user", 99]], [["user", -1]], [["system", 2]], [7], [["user", "2"]]])
def test_turns_that_do_not_fit_the_prompt_are_not_used(turns: Any) -> None:
    assert prompt_turns({"prompt": "user: Hi", "turns": turns}) == [["", "user: Hi"]]


def test_questions_are_compared_by_whether_they_are_right(make_run: Any) -> None:
    found = json.loads(questions(read_run(make_run()), MEGABYTE))
    assert found["judged"]
    assert sorted(found["changes"]) == [["right", "right", 1], ["right", "wrong", 1], ["wrong", "right", 4]]
    prompt, was, now, before, after = found["rows"][0]
    assert found["prompts"][prompt] == [["", "Held-out 0"]]
    assert (was, now, before, after) == ("right", "wrong", [["old 0", 1.0, True]], [["new 0", 0.0, False]])


def test_a_change_has_the_error_of_its_differences_by_prompt(make_run: Any) -> None:
    """Six prompts, of which one got worse, one stayed right and four got better."""
    folder = make_run()
    (accuracy,) = (row for row in figures(read_run(folder)) if row["name"] == "accuracy")
    assert accuracy["change"] == pytest.approx([0.5, np.std([-1, 0, 1, 1, 1, 1], ddof=1) / 6**0.5])
    assert accuracy["better"] == 1
    first = read_run(make_run("first"))
    (accuracy,) = (row for row in figures(read_run(folder), first) if row["name"] == "accuracy")
    assert accuracy["against_first"] == [0, 0]
    (folder / "after.jsonl").write_text("")  # without completions: as of two independent evaluations
    (accuracy,) = (row for row in figures(read_run(folder)) if row["name"] == "accuracy")
    assert accuracy["change"] == pytest.approx([0.5, 2**0.5 * 0.1])


def test_questions_of_older_runs_are_compared_by_reward(made: SimpleNamespace, make_run: Any) -> None:
    folder = make_run()
    for name, rewards in (("before", (0.0, 1.0, 1.0)), ("after", (1.0, 1.0, 0.5))):
        rows = [made.evaluated(i, name, None, reward=reward) for i, reward in enumerate(rewards)]
        made.write_lines(folder / f"{name}.jsonl", rows)
    found = json.loads(questions(read_run(folder), MEGABYTE))
    assert not found["judged"]
    assert [now for _, _, now, _, _ in found["rows"]] == ["better", "equal", "worse"]


def test_questions_that_changed_come_first_where_not_all_fit(made: SimpleNamespace, make_run: Any) -> None:
    folder = make_run()
    for name, last in (("before", False), ("after", True)):
        rows = [made.evaluated(i, name * 50, i < 99 or last) for i in range(100)]
        made.write_lines(folder / f"{name}.jsonl", rows)
    found = json.loads(questions(read_run(folder), 3000))
    assert found["total"] == 100
    assert 0 < len(found["rows"]) < 10
    assert ["wrong", "right"] in [row[1:3] for row in found["rows"]]
    assert sorted(found["changes"]) == [["right", "right", 99], ["wrong", "right", 1]]
