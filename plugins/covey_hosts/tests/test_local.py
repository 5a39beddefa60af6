"""The launcher of processes, with small scripts in place of training runs, and once with real ones."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from covey.config.processes import ADDRESS, COUNT, MODE, NUMBER, PEER_LOST
from covey.errors import CoveyError
from covey_hosts import LocalOptions, launch, local
from covey_hosts.local import TrainingCommand, training_command

WAIT = "while True: time.sleep(0.05)"


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(local, "NOTICE_SECONDS", 0.4)
    monkeypatch.setattr(local, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.02)


def launched(folder, code, resumed="", **options):
    """Launch processes that run `code`, or `resumed` behind a restart; return the exit code."""
    command = TrainingCommand(("train", "recipe", "--out", str(folder / "run")), str(folder / "run"))
    script = f"import os, signal, sys, time; me = int(os.environ['{NUMBER}'])\n"
    script += f"if '--resume' in sys.argv: exec({resumed!r}); sys.exit()\n{code}"
    return launch(command, LocalOptions(logs=str(folder / "logs"), **options), (sys.executable, "-c", script))


def test_each_process_has_its_number_and_a_log(tmp_path, capfd):
    assert launched(tmp_path, f"print(me, os.environ['{COUNT}'], os.environ['{ADDRESS}'])", processes=3) == 0
    shown = capfd.readouterr().out
    logs = [(tmp_path / "logs" / f"process-{n}.log").read_text().splitlines()[-1] for n in (1, 2)]
    assert [line.split()[:2] for line in (shown, *logs)] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({line.split()[2] for line in (shown, *logs)}) == 1


def test_a_second_command_writes_behind_the_logs_of_the_first(tmp_path):
    for said in ("trained", "evaluated"):
        assert launched(tmp_path, f"print('{said}')") == 0
    lines = (tmp_path / "logs" / "process-1.log").read_text().splitlines()
    assert [line for line in lines if line in ("trained", "evaluated")] == ["trained", "evaluated"]
    assert len([line for line in lines if line.startswith("--- 20") and sys.executable in line]) == 2


@pytest.mark.parametrize(
    ("fails", "told", "code"),
    [
        ("print('the reason'); sys.exit(3)", "process 2 ended with code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 2 was killed by SIGKILL", 137),
    ],
)
def test_one_that_fails_stops_all_and_is_named(tmp_path, capfd, fails, told, code):
    begin = time.monotonic()
    assert launched(tmp_path, f"if me == 2: {fails}\n{WAIT}", processes=4) == code
    shown = capfd.readouterr().err
    assert told in shown
    assert ("the reason" in shown) == ("reason" in fails)
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_one_that_ignores_signals_or_is_halted_is_killed(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    halted = "os.kill(os.getpid(), signal.SIGSTOP)"
    code = f"if me == 0: {stubborn}\nopen(f'{tmp_path}/{{me}}', 'w').write(str(os.getpid()))\nif me == 1: {halted}\n"
    code += f"while me == 2 and not all(os.path.exists(f'{tmp_path}/{{n}}') for n in (0, 1)): time.sleep(0.02)\n"
    code += f"if me == 2: sys.exit(4)\n{WAIT}"
    assert launched(tmp_path, code, processes=3) == 4
    for name in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_the_first_cause_is_chosen():
    failures = [local.Failure(0, 75), local.Failure(1, 1), local.Failure(2, -9)]
    assert local.cause(failures) == failures[2]
    assert local.cause(failures[:2]) == failures[1]
    assert local.cause([local.Failure(0, PEER_LOST), failures[1]]) == failures[1]
    assert str(local.Failure(0, PEER_LOST)) == f"process 0 ended with code {PEER_LOST}"


@pytest.mark.parametrize(("slowest", "notice"), [(0.2, 0.5), pytest.param(4.0, 3.0, marks=pytest.mark.slow)])
def test_one_that_is_halted_is_named_when_the_others_give_it_up(tmp_path, capfd, monkeypatch, slowest, notice):
    """The trap: the others end by themselves, and the first of them, or the slowest, is taken for the cause."""
    monkeypatch.setattr(local, "NOTICE_SECONDS", notice)
    code = "if me == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    code += f"time.sleep({slowest} if me == 0 else 0.1)\nsys.exit({PEER_LOST})"
    assert launched(tmp_path, code, processes=3) == PEER_LOST
    assert "process 1 was stopped, or hung; the others were stopped" in capfd.readouterr().err


def test_a_signal_reaches_all_and_is_no_failure(tmp_path):
    stops = "signal.signal(signal.SIGTERM, lambda *at: sys.exit(75))"
    code = f"{stops}\nopen(f'{tmp_path}/ready-{{me}}', 'w')\n{WAIT}"

    def send():
        while not all((tmp_path / f"ready-{n}").exists() for n in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert launched(tmp_path, code, processes=2, max_restarts=3) == 75
    assert not list((tmp_path / "logs").glob("*restart*"))


@pytest.mark.slow
def test_a_process_that_joins_uninvited_is_named(tmp_path, capfd):
    """Real ones: a second process 1 joins, for which JAX aborts both with a stack trace of C++."""
    join = "from covey.parallel import processes\n"
    join += f"with processes.start():\n    open(f'{tmp_path}/{{me}}', 'w').write(os.environ['{ADDRESS}'])\n    {WAIT}"
    uninvited = []

    def intrude():
        wait_until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"), 60)
        environment = os.environ | {ADDRESS: (tmp_path / "1").read_text(), COUNT: "2", NUMBER: "1"}
        words = [sys.executable, "-c", "from covey.parallel import processes\nwith processes.start(): pass"]
        uninvited.append(subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL))

    thread = threading.Thread(target=intrude)
    thread.start()
    assert launched(tmp_path, join) == 128 + signal.SIGABRT
    thread.join()
    uninvited[0].kill()
    uninvited[0].wait()
    verdict = [line for line in capfd.readouterr().err.splitlines() if line.startswith("covey launch: ")]
    assert verdict[0].endswith("was killed by SIGABRT; the others were stopped")
    assert "an uninvited process has joined the run" in verdict[1]
    assert not any("the end of" in line for line in verdict)


def test_an_intruder_of_an_earlier_command_is_not_named_again(tmp_path, capfd):
    said = "1 unexpectedly tried to connect with a different incarnation. It has likely restarted."
    for text, told in ((said, True), ("another reason", False)):
        code = f"if me == 1: print('{text}')\nsys.stdout.flush()\nos.abort()"
        assert launched(tmp_path, code) == 128 + signal.SIGABRT
        assert ("uninvited" in capfd.readouterr().err) == told


def test_processes_of_a_killed_launcher_stop(tmp_path):
    """The trap: they train on, and hold the devices, without anyone who stops them."""
    rank = "import os, sys, time, covey.cli.main as command\n"
    rank += f"number = os.environ['{NUMBER}']\n"
    rank += "def work(): open(f'ready-{number}', 'w').write(str(os.getpid())); time.sleep(60)\n"
    rank += "command.parse = lambda words: work\ncommand.main()"
    start = "import sys; from covey_hosts import LocalOptions, launch; "
    start += "from covey_hosts.local import TrainingCommand as Command; "
    start += "launch(Command(('train', 'x'), 'run'), LocalOptions(), (sys.executable, '-c', sys.argv[1]))"
    launcher = subprocess.Popen([sys.executable, "-c", start, rank], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    ready = [tmp_path / f"ready-{n}" for n in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in ready))
    launcher.kill()
    pids = [int(file.read_text()) for file in ready]
    try:
        wait_until(lambda: not any(runs(pid) for pid in pids))
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
    assert "the launcher is gone: this process stops" in launcher.communicate()[1]


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def runs(pid):
    """Return whether the process runs; one that has ended and that nobody has waited for does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_restart_resumes_the_run_once_it_has_begun(tmp_path):
    begins = f"os.makedirs('{tmp_path}/run', exist_ok=True); open('{tmp_path}/run/recipe.yaml', 'w'); sys.exit(1)"
    resumes = f"open('{tmp_path}/resumed', 'a').write(str(me))"
    assert launched(tmp_path, f"if me == 0: {begins}\n{WAIT}", resumes, processes=2, max_restarts=2) == 0
    assert sorted((tmp_path / "resumed").read_text()) == ["0", "1"]


def test_a_restart_may_leave_out_the_process_that_failed_and_its_gpus(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    begins = f"os.makedirs('{tmp_path}/run', exist_ok=True); open('{tmp_path}/run/recipe.yaml', 'w'); sys.exit(1)"
    resumes = f"open('{tmp_path}/resumed', 'a').write(os.environ['{COUNT}'] + os.environ['CUDA_VISIBLE_DEVICES'] + ' ')"
    options = {"processes": 3, "min_processes": 1, "gpus_per_process": 1, "max_restarts": 1}
    assert launched(tmp_path, f"if me == 1: {begins}\n{WAIT}", resumes, **options) == 0
    assert sorted((tmp_path / "resumed").read_text().split()) == ["24", "26"]
    assert "restart 1 of 1, 2 processes" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "devices", "fewer"),
    [
        ({}, 0, None),
        ({"min_processes": 1}, 0, 3),
        ({"min_processes": 4}, 0, None),
        ({"min_processes": 1}, 4, 2),
        ({"min_processes": 3}, 4, None),
        ({"min_processes": 1, "gpus_per_process": 1}, 4, None),
        ({"min_processes": 1, "gpus_per_process": 2}, 4, 2),
    ],
)
def test_fewer_processes_divide_the_mesh_and_have_its_devices(tmp_path, options, devices, fewer):
    options = LocalOptions(processes=4, logs=str(tmp_path), **options)
    assert options.fewer(4, devices) == fewer
    if options.min_processes and fewer is None:
        with pytest.raises(CoveyError, match="no restart of 4 processes can have fewer"):
            launch(TrainingCommand(("train", "recipe"), None, devices), options, ("no such program",))


def test_restarts_end(tmp_path):
    code = f"open('{tmp_path}/tries', 'a').write('x')\nsys.exit(6)"
    assert launched(tmp_path, code, processes=1, max_restarts=2) == 6
    assert (tmp_path / "tries").read_text() == "xxx"


def test_gpus_are_divided():
    base = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", MODE: "off", "KEPT": "1"}
    options = LocalOptions(processes=2, gpus_per_process=2)
    found = [local.process_environment(base, n, options, 80) for n in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["4,5", "6,7"]
    assert found[1] == {"KEPT": "1", ADDRESS: "127.0.0.1:80", COUNT: "2", NUMBER: "1", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert "CUDA_VISIBLE_DEVICES" not in local.process_environment({}, 0, LocalOptions(), 80)
    assert local.process_environment({}, 1, options, 80)["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(CoveyError, match="of 2 GPUs each"):
        local.process_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, options, 80)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing cannot be launched"),
        (["generate", "here", "Hi"], "covey generate cannot be launched"),
        (["export"], "no model is given to export"),
        (["export", "here"], "no folder is given to export to"),
        (
            ["export", "a", "--out", "b", "--format=gguf"],
            "fix: covey export a --out b --format=gguf, where one process",
        ),
        (["eval"], "no model is given"),
        (["eval", "here", "--recipe", "quickstart", "--evaluation.samples", "-3"], "samples"),
        (["train"], "no recipe is given"),
        (["train", "quikstart"], "quickstart"),
        (["train", "quickstart", "--gropu-size", "3"], "no setting --gropu-size"),
        (["train", "quickstart", "--max-steps", "-3"], "max_steps"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(words, told):
    with pytest.raises(CoveyError, match=told):
        training_command(words)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "RUN", "--recipe", "quickstart"],
        ["eval", "RUN", "--recipe", "sft-tiny"],
        ["export", "a", "--out", "RUN"],
    ],
)
def test_evaluation_and_export_are_repeated_and_not_resumed(tmp_path, words):
    (tmp_path / "recipe.yaml").write_text("")
    command = training_command([f"{tmp_path}/" if word == "RUN" else word for word in words])
    assert command.run == str(tmp_path)  # the logs lie beside it
    assert command.next_words() == command.words
    with pytest.raises(CoveyError, match="run folder"):
        _ = command.resume_words


def test_the_run_folder_of_a_command(tmp_path):
    command = training_command(["train", "quickstart", "--out", str(tmp_path / "a"), "--max-steps", "3"])
    assert command.run == str(tmp_path / "a")
    assert command.next_words() == command.words
    assert training_command(["train", "quickstart", "--out", f"{tmp_path}/a/"]).run == command.run
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.yaml").write_text("")
    assert command.next_words() == ("train", "--resume", str(tmp_path / "a"))
    longer = TrainingCommand((*command.next_words(), "--max-steps", "9"), command.run)
    assert longer.next_words() == longer.words  # what it changes is not lost
    assert (command.devices, training_command([*command.words, "--mesh.fsdp", "4"]).devices) == (0, 4)
    with pytest.raises(CoveyError, match="--out"):
        _ = TrainingCommand(("train", "quickstart"), None).resume_words


def test_the_command_refuses_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "covey", "launch", "local", "-n", "0", "train", "quickstart"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "processes" in done.stderr
    assert list(tmp_path.iterdir()) == []
