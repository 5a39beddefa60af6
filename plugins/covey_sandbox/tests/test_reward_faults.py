"""Reward functions that raise, hang, die or answer nonsense: real processes, really killed.

What a function does is written in the completion: `faulty` obeys it. The policies are tried on each of the ways to
hang; what is left behind is looked for in /proc.
"""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config import recipe
from covey.config.schema import RewardSafetyConfig
from covey.errors import RecipeError, RewardError
from covey.rewards.scoring import RewardRunner, score
from covey.types import Completion, FinishReason, Group
from covey_sandbox import child
from covey_sandbox.reward_workers import outcome_from_json

TINY = str(Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")

TIMEOUT = 0.4
FAULTY = """
import asyncio, ctypes, os, re, signal, subprocess, sys, threading

GRANDCHILD = "trap '' TERM; echo $$ >> grandchildren; while :; do sleep 1; done"


def obey(text):
    if text == "spin":
        while True:
            pass
    if text == "regex":  # one call in C, which never lets go of the GIL
        re.match("(a+)+$", "a" * 64 + "b")
    if text == "grandchild":
        subprocess.run(["/bin/sh", "-c", GRANDCHILD])
    if text == "daemon":  # the grandchild of a grandchild, in a session of its own, whose parent is gone
        subprocess.run(["/bin/sh", "-c", 'setsid /bin/sh -c "$0" & exit', GRANDCHILD])
        ctypes.CDLL(None).sleep(60)
    if text == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "forge":  # an answer of full marks, before the right one
        answer = b'{"values": [1.0], "number": 1}'
        os.write(int(sys.argv[1]), answer + b"\\n")
    if text in ("kill", "stop"):
        os.kill(os.getppid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[text])
        obey("regex")
    if text == "deaf":  # it answers, and from then on reads nothing
        threading.Timer(0.5, obey, ["regex"]).start()
    if text == "exit":
        sys.exit("enough")
    if text == "raise":
        raise KeyError("unreadable")
    special = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "array": [1.0]}
    return special[text] if text in special else float(len(text))


def faulty(completions):
    return [obey(text) for text in completions]


def another(completions):
    return [1.0 for _ in completions]


async def later(completions, answer):
    await asyncio.sleep(0)
    return [float(a) for a in answer]


def alone(completions):
    return [1.0]


def flat(completions):
    return 1.0


def process(completions):
    return [float(os.getpid())] * len(completions)


def with_jax(completions, **columns):
    return [float("jax" in sys.modules)] * len(completions)


def by_column(column):
    return [float(sum(map(float, c["points"]))) for c in column]


lost = lambda completions: [2.0] * len(completions)
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of functions above, where a recipe would find it."""
    (tmp_path / "faulty_rewards.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    yield "faulty_rewards"
    sys.modules.pop("faulty_rewards", None)


def groups(*texts: str, **columns: Any) -> list[Group]:
    none = np.zeros(1)
    return [
        Group("p", np.array([1]), tuple(Completion(none, none, none, FinishReason.STOP, t) for t in texts), columns)
    ]


def scores(runner: RewardRunner | None, function: Any, *texts: str, **columns: Any) -> list[float | None]:
    (scored,) = score(groups(*texts, **columns), function, runner=runner)
    return [None if math.isnan(r) else r for r in np.asarray(scored.rewards).tolist()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def of_group(group: int) -> list[int]:
    """The living members of a process group."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(entry)] if int(stat[2]) == group and stat[0] not in "ZX" else []
    return found


def comes_true(claim: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (true := claim()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


def grandchildren(count: int = 1) -> list[int]:
    """Their numbers, once `count` of them have come up."""
    file = Path("grandchildren")
    assert comes_true(lambda: file.exists() and len(file.read_text().split()) >= count)
    return list(map(int, file.read_text().split()))


def guarded(**settings: Any) -> RewardRunner:
    return RewardRunner(RewardSafetyConfig(**{"workers": 1, "timeout": TIMEOUT, **settings}))


# --- hangs, in three ways under three policies


@pytest.mark.parametrize(
    ("way", "policy", "instead"),
    [
        ("spin", "none", None),
        ("regex", "none", None),
        ("grandchild", "none", None),
        pytest.param("regex", "raise", (), marks=pytest.mark.slow),
        pytest.param("spin", "value", -1.0, marks=pytest.mark.slow),
    ],
)
def test_a_function_that_hangs_is_killed_with_all_it_started(way: str, policy: str, instead: Any, faulty: str) -> None:
    timeout = 1.0 if way == "grandchild" else TIMEOUT  # it has to come up
    with guarded(on_error=policy, value=-1.0, timeout=timeout) as runner:
        (worker,) = runner._workers.workers
        function = f"{faulty}:faulty"
        assert scores(runner, f"{faulty}:process", "x") != [os.getpid()]
        first = worker.pid
        start = time.monotonic()
        if policy == "raise":
            with pytest.raises(RewardError, match=rf"'faulty' took longer than .* was killed \(for sample 1: '{way}'"):
                scores(runner, function, way)
        else:
            assert scores(runner, function, way) == [instead]
        assert time.monotonic() - start < timeout + 5
        assert comes_true(lambda: of_group(first) == [])
        assert not any(map(alive, grandchildren() if way == "grandchild" else []))
        assert worker.pid is None


@pytest.mark.slow
def test_the_one_that_hangs_is_found_and_the_others_keep_their_numbers(faulty: str) -> None:
    with guarded(on_error="none") as runner:
        failed: dict[str, int] = {}
        (scored,) = score(groups("spin", "bbb", "cc"), f"{faulty}:faulty", runner=runner, failed=failed)
        assert np.array_equal(scored.rewards, [np.nan, 3.0, 2.0], equal_nan=True)
        assert failed == runner.failed == {"faulty": 1}


@pytest.mark.slow
def test_a_daemon_of_a_function_ends_with_its_worker(faulty: str) -> None:
    """It has left group and session, and its parent is gone; the keeper is its parent now."""
    with guarded(on_error="none", timeout=1.5) as runner:
        assert scores(runner, f"{faulty}:faulty", "daemon") == [None]
        (daemon,) = grandchildren()
        assert comes_true(lambda: not alive(daemon))


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_told(faulty: str) -> None:
    with guarded(on_error="value", value=0.5) as runner:
        assert scores(runner, f"{faulty}:faulty", "die") == [0.5]
        assert scores(runner, f"{faulty}:faulty", "abc") == [3.0]
    with guarded() as runner, pytest.raises(RewardError, match=r"'faulty' ended its worker process \(SIGSEGV\)"):
        scores(runner, f"{faulty}:faulty", "die")


def test_an_answer_that_was_not_asked_for_is_never_taken_for_the_next(faulty: str) -> None:
    """Whoever gets at the pipe may lie about his own sample, not about those that follow."""
    with guarded(on_error="none", timeout=20.0) as runner:
        assert scores(runner, f"{faulty}:faulty", "forge") == [1.0]
        assert scores(runner, f"{faulty}:faulty", "abc") == [None], "its right answer came late"
        assert scores(runner, f"{faulty}:faulty", "abcd") == [4.0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_function_that_ends_its_keeper_is_killed_too(way: str, faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "EXIT_SECONDS", 0.2)
    with guarded(on_error="none") as runner:
        assert scores(runner, f"{faulty}:faulty", "a") == [1.0]
        first = runner._workers.workers[0].pid
        assert first is not None
        assert scores(runner, f"{faulty}:faulty", way) == [None]
        assert comes_true(lambda: of_group(first) == [])
        assert scores(runner, f"{faulty}:faulty", "a") == [1.0]


@pytest.mark.slow
def test_a_job_that_is_not_read_is_given_up_at_the_time_limit(faulty: str) -> None:
    """It is longer than what the system keeps between two processes."""
    with guarded(on_error="none", timeout=2.0) as runner:
        assert scores(runner, f"{faulty}:faulty", "deaf") == [4.0]
        time.sleep(0.7)
        start = time.monotonic()
        assert scores(runner, f"{faulty}:faulty", "x" * (1 << 23)) == [None]
        assert time.monotonic() - start < 5


@pytest.mark.slow
def test_nothing_is_left_when_the_run_is_killed_in_a_hung_call(faulty: str) -> None:
    """SIGKILL gives nobody time to tidy up, and a worker inside C code cannot notice."""
    code = f"""
    import threading, time
    import numpy as np
    from covey.rewards.scoring import RewardRunner, score
    from covey.config.schema import RewardSafetyConfig
    from covey.types import Completion, FinishReason, Group

    runner, none = RewardRunner(RewardSafetyConfig(workers=2)), np.zeros(1)

    def call(name, text):
        group = Group("p", none, (Completion(none, none, none, FinishReason.STOP, text),))
        score([group], "{faulty}:" + name, runner=runner)

    call("faulty", "x")
    call("another", "x")
    threading.Thread(target=call, args=("faulty", "regex"), daemon=True).start()
    time.sleep(0.5)
    print(*(worker.pid for worker in runner._workers.workers), flush=True)
    time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=found) as run:
        assert run.stdout is not None
        workers = list(map(int, run.stdout.readline().split()))
        assert len(workers) == 2
        assert all(len(of_group(worker)) == 2 for worker in workers), "a keeper and one that works, each"
        run.send_signal(signal.SIGKILL)
    assert comes_true(lambda: not any(map(of_group, workers)))


# --- what would end the run as if it were done


EXITING = """
import os
from os import _exit

def exits(call):
    def share(completions):
        if not os.fork():
            os._exit(0)  # as multiprocessing ends its children
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        call()
    return share

first, second, third = exits(lambda: os._exit(0)), exits(lambda: _exit(256)), exits(lambda: exit(0))
"""
SCORING = """
import logging, os, sys
import numpy as np
from covey.rewards.scoring import RewardRunner, score
from covey.config.schema import RewardSafetyConfig
from covey.types import Completion, FinishReason, Group

logging.basicConfig(stream=sys.stdout)
none = np.zeros(1)
group = Group("p", none, (Completion(none, none, none, FinishReason.STOP, "x"),))
for name, policy in (("first", "raise"), ("second", "none"), ("third", "value")):
    try:
        score([group], f"exiting_rewards:{name}", runner=RewardRunner(RewardSafetyConfig(on_error=policy)))
    except ValueError as error:
        print(error)
print("alive", flush=True)
os._exit(3)
"""


def in_a_process(tmp_path: Path, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Python with these words, where modules in `tmp_path` and those of this process are found."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=found, cwd=tmp_path, timeout=120
    )


def test_a_function_that_exits_is_a_failure_like_another(tmp_path: Path) -> None:
    """In a process of its own, really called, under each policy. Behind the function os._exit is what it always is."""
    (tmp_path / "exiting_rewards.py").write_text(EXITING)
    done = in_a_process(tmp_path, "-c", SCORING)
    assert done.stdout.count("'share' raised SystemExit") == 3, done.stdout + done.stderr
    assert (done.stdout.split()[-1], done.returncode) == ("alive", 3)


def test_a_module_that_exits_while_it_is_imported_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "exiting_rewards.py").write_text("import os\n\nos._exit(0)\n")
    settings = [f"model.source={TINY}", "rewards=exiting_rewards:share"]
    done = in_a_process(tmp_path, "-m", "covey", "train", "quickstart", *settings)
    assert done.returncode == 2
    assert "importing 'exiting_rewards' failed: SystemExit: os._exit(0)" in done.stderr


# --- what raises, and what answers nonsense


CASES: dict[str, tuple[str, str]] = {
    "raise": ("raise", r"raised KeyError: 'unreadable' \(for sample 3: 'raise'\)"),
    "exit": ("exit", r"raised SystemExit: enough \(for sample 3: 'exit'\)"),
    "nan": ("nan", "gave nan for sample 3: 'nan'"),
    "inf": ("inf", "gave inf for sample 3: 'inf'"),
    "text": ("text", "gave '1.0' for sample 3: 'text'"),
    "array": ("array", r"gave \[1.0\] for sample 3: 'array'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_each_fault_under_each_policy(workers: int, faulty: str) -> None:
    """The same in this process and in a worker; the samples beside the guilty one keep their numbers."""
    name, timeout = f"{faulty}:faulty", 20.0 * workers
    for policy, instead in (("none", None), ("value", -1.0)):
        with guarded(workers=workers, timeout=timeout, on_error=policy, value=-1.0) as runner:
            for number, (text, _) in enumerate(CASES.values(), 1):
                assert scores(runner, name, "a", "bb", text, "cccc") == [1.0, 2.0, instead, 4.0], (policy, text)
                assert runner.failed == {"faulty": number}
            assert scores(runner, name, "a", "none") == [1.0, None], "None is an answer, and no failure"
            assert scores(runner, name, "raise", "a", "exit", "bb", "nan") == [instead, 1.0, instead, 2.0, instead]
            assert scores(runner, f"{faulty}:alone", "a", "b") == scores(runner, f"{faulty}:flat", "a", "b")
            assert scores(runner, f"{faulty}:alone", "a", "b") == [instead] * 2, "never broadcast, never halved to fit"
            assert runner.failed == {"faulty": len(CASES) + 3, "alone": 4, "flat": 2}
    with guarded(workers=workers, timeout=timeout) as runner:
        for text, told in CASES.values():
            with pytest.raises(RewardError, match=f"'faulty' {told}") as caught:
                scores(runner, name, "a", "bb", text, "cccc")
        with pytest.raises(RewardError, match=r"'faulty' raised KeyError") as caught:
            scores(runner, name, "raise")
        assert Path(caught.value.where.rpartition(":")[0]).name == "faulty_rewards.py"
        with pytest.raises(RewardError, match=r"'alone' returned 1 values, none for sample 2: 'b'[\s\S]*each of the 2"):
            scores(runner, f"{faulty}:alone", "a", "b")
        with pytest.raises(RewardError, match=r"'flat' returned 1.0 for the whole batch"):
            scores(runner, f"{faulty}:flat", "a", "b")
        assert runner.failed == {}


def test_a_policy_may_be_one_functions(faulty: str) -> None:
    functions = [f"{faulty}:faulty", f"{faulty}:another"]
    runner = RewardRunner(RewardSafetyConfig(on_error_of={f"{faulty}:faulty": "none"}))
    failed: dict[str, int] = {}
    (scored,) = score(groups("raise", "a"), functions, runner=runner, failed=failed)
    assert scored.rewards is not None
    assert scored.rewards.tolist() == [1.0, 2.0]
    assert failed == {"faulty": 1}, "the other has no policy"
    with pytest.raises(RewardError, match="'alone' returned 1 values"):
        scores(runner, f"{faulty}:alone", "a", "b")


def test_the_budget_ends_the_run_with_function_and_sample(faulty: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = RewardRunner(RewardSafetyConfig(on_error="none", budget=2))
    assert scores(runner, f"{faulty}:faulty", "raise", "a") == [None, 1.0]
    assert scores(runner, f"{faulty}:faulty", "nan", "a") == [None, 1.0]
    assert len(caplog.messages) == 1, "the first failure of a function is said, and no other"
    assert "raised KeyError: 'unreadable' (for sample 1: 'raise')" in caplog.messages[0]
    told = r"3 failures of reward functions \(faulty 3\), the last: the reward function 'faulty' gave nan for sample 2"
    with pytest.raises(RewardError, match=told):
        scores(runner, f"{faulty}:faulty", "a", "nan")


def test_a_function_that_only_sees_whole_batches_loses_the_batch() -> None:
    def picky(completions: list[str]) -> list[float]:
        if len(completions) == 3:
            raise ValueError("three")
        return [1.0] * len(completions)

    runner = RewardRunner(RewardSafetyConfig(on_error="none"))
    assert scores(runner, picky, "a", "b", "c") == [None] * 3
    assert runner.failed == {"picky": 3}


def test_async_functions_have_policies_too(faulty: str) -> None:
    runner = RewardRunner(RewardSafetyConfig(on_error="value"))
    assert scores(runner, f"{faulty}:later", "a", "b", answer="x") == [0.0, 0.0]
    assert runner.failed == {"later": 2}


# --- what a worker is given


def test_a_worker_gives_what_the_run_itself_would(faulty: str) -> None:
    column = {"points": np.array([1, 2], np.int8), "of": ({"x": np.float32(0.5)}, None)}
    wanted = [f"{faulty}:later", "exact_answer", f"{faulty}:lost", f"{faulty}:by_column"]
    sample = groups("#### 4", "#### 5\ud800\x00", answer="4", column=column)
    with guarded(workers=2, timeout=20.0) as runner:
        (apart,), (here,) = score(sample, wanted, runner=runner), score(sample, wanted)
        assert {k: v.tolist() for k, v in apart.rewards_by_function.items()} == {
            k: v.tolist() for k, v in here.rewards_by_function.items()
        }
        assert scores(runner, f"{faulty}:with_jax", "a") == [0.0]
        processes = {scores(runner, f"{faulty}:process", "a")[0] for _ in range(3)}
        assert len(processes) == 1, "a function finds again what it kept"
        with pytest.raises(
            RewardError, match=r"'with_jax' cannot get 'blob' in a worker process: it holds b'x' \(bytes"
        ):
            scores(runner, f"{faulty}:with_jax", "a", blob=b"x")


def test_a_forged_reply_names_only_completions_that_exist() -> None:
    """An index that is none, or no whole number, would end the run where the policy uses it."""
    failure: dict[str, Any] = dict.fromkeys(("what", "kind", "where", "want", "fix"), "")
    for sample, wanted in ((1.0, 1), (-1, None), (2, None), ("1", None)):
        reply = {"values": [0.5, None], "invalid": [1.0, -3, 7, "0"], "failure": {**failure, "sample": sample}}
        outcome = outcome_from_json(reply, 2)
        assert outcome.failure is not None
        assert (outcome.invalid, outcome.failure.sample) == ([1], wanted)
        assert {type(index) for index in (*outcome.invalid, outcome.failure.sample)} <= {int, type(None)}


def test_what_a_worker_would_not_find_is_refused_before_anything_runs() -> None:
    def local(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with guarded() as runner:
        for function in (local, lambda completions: [0.0], partial(score, weights=None)):
            with pytest.raises(RecipeError, match=r"cannot be called in a worker process[\s\S]*workers 0"):
                runner.check({"inner": function})
        local.in_process = True  # type: ignore[attr-defined]
        runner.check({"inner": local})
        assert scores(runner, local, "a") == [0.0]
        assert runner._workers.workers[0].pid is None


def test_any_thread_gets_the_same(faulty: str) -> None:
    """A rollout and an evaluation may both call; neither is the main thread, and none waits for ever."""
    texts = ("a", "raise", "bbb", "nan")
    with guarded(on_error="none", workers=2, timeout=20.0, budget=1000) as runner, ThreadPoolExecutor(4) as threads:
        name = f"{faulty}:faulty"
        expected = scores(runner, name, *texts)
        found = list(threads.map(lambda _: scores(runner, name, *texts), range(8)))
        assert found == [expected] * 8 == [[1.0, None, 3.0, None]] * 8
        assert runner.failed == {"faulty": 18}


@pytest.mark.slow
def test_nothing_is_left_open(faulty: str) -> None:
    """Killed, replaced and closed: no process, no pipe, no thread more than before."""
    state = lambda: (sorted(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: E731
    scores(None, f"{faulty}:faulty", "a")
    before = state()
    runner = guarded(on_error="none")
    for text in ("a", "spin", "die", "a"):
        scores(runner, f"{faulty}:faulty", text)
    last = runner._workers.workers[0].pid
    runner.close()
    assert last is not None
    assert comes_true(lambda: of_group(last) == [])
    assert state() == before


def test_an_error_does_not_wait_for_a_hung_neighbour(faulty: str) -> None:
    """Without a time limit: the worker is killed as soon as nobody wants its answer."""

    def broken(completions: list[str]) -> list[float]:
        raise ValueError("at once")

    broken.in_process = True  # type: ignore[attr-defined]
    with guarded(timeout=0.0) as runner, pytest.raises(RewardError, match="'broken' raised ValueError: at once"):
        score(groups("spin"), [broken, f"{faulty}:faulty"], runner=runner)


# --- the recipe

WHOLE = recipe.Recipe(rewards=("first_letter", "mine:judge"))


def test_the_recipe_says_it_all() -> None:
    text = """
    rewards: [first_letter, "mine:judge"]
    reward_safety: {workers: 2, timeout: 30, on_error_of: {"mine:judge": none}}
    """
    read = recipe.parse(text, ["--reward-safety.on-error", "value", "--reward-safety.budget=7"])
    expected = RewardSafetyConfig(2, 30.0, "value", {"mine:judge": "none"}, 0.0, 7)
    assert read.reward_safety == recipe.parse(recipe.to_yaml(read)).reward_safety == expected
    assert recipe.parse(text, ["--on-error-of", "{judge: value}"]).reward_safety.on_error_of == {"judge": "value"}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"timeout": 3.0}, "reward_safety.timeout is 3, and reward_safety.workers is 0"),
        ({"workers": -1}, "reward_safety.workers is -1"),
        ({"budget": -1}, "reward_safety.budget is -1"),
        ({"on_error_of": {"juge": "none"}}, "names 'juge'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        recipe.validate(replace(WHOLE, reward_safety=RewardSafetyConfig(**given)))
    if "on_error_of" not in given:
        with pytest.raises(RecipeError, match=part):
            RewardRunner(RewardSafetyConfig(**given))
