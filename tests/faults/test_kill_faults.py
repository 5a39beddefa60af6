"""SIGKILL at any moment: what was saved is whole, and the run gone on with is the run that was never killed, bit for
bit. All runs here are processes, really killed, or halted while their files are copied: a kill at that moment leaves
the same files.

COVEY_KILLS=5 tries all ways to train, each killed at five random steps, which `benchmarks.soak` does; without it
they are skipped, and `test_soak.py` kills one of them once.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey import recipes
from covey.cli.main import main
from covey.config import recipe
from covey.errors import ResumeError
from covey.train.checkpoint import Checkpointer
from tests.one_layer import ONE_LAYER

REPOSITORY = Path(__file__).parents[2]
TINY = str(ONE_LAYER)
KILLS = int(os.environ.get("COVEY_KILLS", "0"))
STEPS = 6
SETTINGS = [
    *Path(__file__).with_name("small_run.txt").read_text(encoding="utf-8").split(),
    f"model.source={TINY}",
    "data.task=jsonl",
    "rewards=letters:share",
    f"training.max_steps={STEPS}",
    "training.actor_optimizer.warmup_ratio=0",
    "training.checkpoint_every_n_steps=2",
    "training.max_to_keep=9",
    "evaluation.prompts=2",
    "evaluation.accuracy=",
    "evaluation.format=",
]
WAYS = {
    "full, in turn": (),
    "lora, ahead": ("training.off_policy_steps=1", "model.lora.rank=4", "grpo.beta=0.1"),
    "full, ahead": ("training.off_policy_steps=2",),
    "lora, in turn": ("model.lora.rank=4",),
    "episodes, ahead": ("training.off_policy_steps=2", "envs.environment=letters:Talk", "envs.max_turn_tokens=2"),
}

TALK = """
import random, time

class Talk:
    def __init__(self, row):
        self.prompt, self.left = row["prompt"], 1 + len(row["prompt"]) % 3

    def reset(self):
        return self.prompt

    def step(self, reply):
        from covey import Step  # late: covey_envs has it

        time.sleep(random.random() / 20)
        self.left -= 1
        return Step(str(len(reply)), float(len(reply) % 3), not self.left)
"""
"""An environment of one to three turns, whose answers come at random times."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with data and a reward. Five rows, two a step: epochs end inside of steps."""
    folder = tmp_path_factory.mktemp("place")
    lines = [f'{{"prompt": "Say {word}."}}\n' for word in ("one", "two", "three", "four", "five", "six")]
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "letters.py").write_text(
        "import os\n\ndef share(completions):\n    return [sum(c < 'n' for c in t) for t in completions]\n\n"
        "def leave(completions):\n    os._exit(0)\n" + TALK
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(REPOSITORY))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        yield folder


@pytest.fixture(scope="module")
def straight(place: Path) -> Callable[[str], Path]:
    """`straight(way)`: the run that nobody killed."""

    def run_of(way: str) -> Path:
        out = place / f"straight-{way}"
        if not out.exists():
            recipes.train(ready(*WAYS[way]), out)
        return out

    return run_of


def ready(*more: str) -> recipe.Recipe:
    return recipe.load("quickstart", [*SETTINGS, "data.path=data.jsonl", *more])


def command(out: Path, *more: str) -> list[str]:
    return ["train", "quickstart", "--out", str(out), *SETTINGS, "data.path=data.jsonl", *more]


# --- at any moment of a run


@pytest.mark.skipif(not KILLS, reason="COVEY_KILLS is not set")
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_is_the_run_that_was_never_killed(way: str, tmp_path: Path, straight: Any) -> None:
    from benchmarks.soak import differences, killed

    draw, out = random.Random(way), tmp_path / "killed"
    kills = draw.sample(range(1, STEPS), KILLS)
    done = killed(command(out, *WAYS[way]), out, kills, draw, environment=dict(os.environ), linger=0.3)
    assert done == len(kills)
    assert differences(straight(way), out) == []


CHILDREN = """
    import json, os, shutil, signal, sys
    import covey.recipes
    from covey.cli.main import main
    from covey.train.checkpoint import Checkpointer
    from covey.train.storage import CheckpointStore
    from covey.monitor.run_files import SAMPLES
    from covey.monitor.writer import MetricsWriter

    MOMENTS = {
        "commit": (CheckpointStore, "commit", lambda step, *_: step),
        "save": (Checkpointer, "save", lambda step, *_: step),
        "metrics": (MetricsWriter, "step", lambda row: row["step"]),
        "samples": (MetricsWriter, "lines", lambda name, lines: name == SAMPLES and first(lines)["step"]),
    }

    def first(lines):
        return json.loads(bytes(lines[0]).splitlines()[0])

    def send(number, before, at):
        kind, name, step_of = MOMENTS[before]
        call = getattr(kind, name)
        def struck(self, *args, **kwargs):
            if step_of(*args) == at:
                os.kill(os.getpid(), number)
            return call(self, *args, **kwargs)
        setattr(kind, name, struck)

    for line in sys.stdin:
        out, (*halts, kill), words = json.loads(line)
        child = os.fork()  # before JAX has a thread
        if not child:
            for moment in halts:
                send(signal.SIGSTOP, *moment)
            send(signal.SIGKILL, *kill)
            os.dup2(2, 1)  # what the command prints is no answer
            os._exit(main(words))
        for before, _ in halts:
            os.waitpid(child, os.WUNTRACED)
            shutil.copytree(out, f"{out}-{before}")
            os.kill(child, signal.SIGCONT)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def children(place: Path, straight: Any, bucket: Any) -> str:
    """What runs wrote that are halted and killed at moments, or whose reward function ends the process. One process has
    imported everything, and those that train are its children.
    """
    pytest.importorskip("covey_bucket")
    straight("full, in turn")  # compiles what the children find
    jobs = [
        ("near", [("samples", 3), ("save", 4), ("metrics", 5)], ()),
        ("far", [("commit", 4)], (f"training.checkpoint_path={bucket.address}/runs",)),
        ("left", [("save", STEPS)], ("rewards=letters:leave",)),
    ]
    lines = [
        json.dumps((name, moments, command(Path(name), *WAYS["full, in turn"], *more))) for name, moments, more in jobs
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILDREN)], input="\n".join(lines), capture_output=True, text=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL), str(-signal.SIGKILL), "2"], done.stderr
    return done.stderr


KILLED = {"samples": "near-samples", "save": "near-save", "metrics": "near", "commit": "far"}
"""Moment → run folder as it was then; the last of each folder's moments is that of the kill."""


@pytest.mark.parametrize(("before", "step"), [("save", 4), ("metrics", 5), ("samples", 3), ("commit", 4)])
def test_killed_between_metrics_and_save(
    before: str, step: int, bucket: Any, place: Path, children: str, straight: Any
) -> None:
    """Metrics of step 4 without its checkpoint; a checkpoint without metrics after it; half of the rows of a step; the
    arrays of step 4 in a bucket, without its digests.
    """
    from benchmarks.soak import differences, steps_of

    out = place / KILLED[before]
    assert steps_of(out) >= min(step, 4)
    if before == "commit":
        assert f"{bucket.address[5:]}/runs/far/00000004/arrays/commit_success.txt" in bucket.objects
        with Checkpointer(out / "checkpoints", read_only=True) as saves:
            assert saves.steps() == [2]
    recipes.resume(out)
    assert differences(straight("full, in turn"), out) == []


def test_a_run_whose_reward_exits_does_not_end_as_if_it_were_done(place: Path, children: str) -> None:
    assert "the reward function 'leave' raised SystemExit: os._exit(0)" in children
    assert not (place / "left" / "metrics.jsonl").exists()


def test_a_flipped_byte_is_found_and_the_way_back_leads_to_the_same_run(
    tmp_path: Path, straight: Any, capsys: Any
) -> None:
    from benchmarks.soak import differences

    out = tmp_path / "run"
    shutil.copytree(straight("full, in turn"), out)
    shutil.rmtree(out / "checkpoints" / f"{STEPS:08d}")
    file = max((out / "checkpoints" / "00000004" / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["train", "--resume", str(out)]) == 2
    told = capsys.readouterr().err
    assert "checkpoint 4 is damaged" in told
    assert "remove this folder to go on from 2" in told
    shutil.rmtree(out / "checkpoints" / "00000004")
    assert main(["train", "--resume", str(out)]) == 0
    assert differences(straight("full, in turn"), out) == []


# --- gone on with in another way


@pytest.fixture
def edited(straight: Any, tmp_path: Path) -> Callable[..., Path]:
    """`edited(old, new, ...)`: a copy of the run whose recipe was edited, to be gone on with for a step more."""

    def edit(*pairs: str) -> Path:
        shutil.copytree(straight("full, in turn"), tmp_path / "run")
        text = (tmp_path / "run" / "recipe.yaml").read_text()
        longer = (f"max_steps: {STEPS}", f"max_steps: {STEPS + 1}")
        for old, new in (longer, *zip(pairs[::2], pairs[1::2], strict=True)):
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / "run" / "recipe.yaml").write_text(text)
        return tmp_path / "run"

    return edit


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("prompts_per_step: 2", "prompts_per_step: 3", r"training\.prompts_per_step was 2, is 3"),
        ("\nseed: 0", "\nseed: 7", r"seed was 0, is 7; rollout\.seed was 0, is 7"),
        ("  seed: 42", "  seed: 43", r"data\.seed was 42, is 43"),
        ("system: null", "system: Be brief.", r"data\.system was None, is 'Be brief\.'"),
        ("num_generations: 4", "num_generations: 8", r"grpo\.num_generations was 4, is 8"),
        ("  dtype: float32", "  dtype: bfloat16", r"model\.dtype was 'float32', is 'bfloat16'"),
        ("compute_dtype: float32", "compute_dtype: bfloat16", r"compute_dtype was 'float32', is 'bfloat16'"),
        ("rank: 0", "rank: 2", r"model\.lora\.rank was 0, is 2"),
    ],
)
def test_another_batch_data_seed_or_type_is_refused_with_a_diff(old: str, new: str, told: str, edited: Any) -> None:
    with pytest.raises(ResumeError, match=told):
        recipes.resume(edited(old, new, "max_prompt_length: 32", "max_prompt_length: 64"))  # room for a system message


def test_other_data_under_the_same_name_are_refused(edited: Any, place: Path) -> None:
    out, file = edited(), place / "data.jsonl"
    good = file.read_text()
    file.write_text(good.replace("two", "too"))
    try:
        with pytest.raises(ResumeError, match="content was"):
            recipes.resume(out)
    finally:
        file.write_text(good)


def test_what_may_change_is_told(edited: Any, capsys: Any) -> None:
    recipes.resume(edited("epsilon: null", "epsilon: 0.1"))
    assert "changed since the run was saved: grpo.epsilon was None, is 0.1" in " ".join(capsys.readouterr().out.split())
