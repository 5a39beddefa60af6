"""Job files: read by parsers of their own languages; what is in them is what was asked for."""

import re
import subprocess
import time

import pytest
import yaml

from covey.cli.main import main
from covey.config.processes import ADDRESS, COUNT, MODE, NUMBER
from covey.errors import CoveyError
from covey_hosts import JOBS, JobOptions, LocalOptions
from covey_hosts.local import TrainingCommand

FULL = {
    "slurm": {"time": "12:00:00", "partition": "gpu", "nodes": 2},
    "k8s": {"image": "registry/covey:1", "volume": "data", "workdir": "/workspace", "nodes": 4},
    "tpu-vm": {"zone": "us-central1-a", "name": "pod"},
    "skypilot": {"accelerator": "H100", "nodes": 2, "volume": "claim"},
}
RUNS = {"skypilot": "/shared/runs/a b"}
BEGIN = ("train", "mine.yaml", "--out", "runs/a b", "--name", "it's; rm -rf $HOME")


def text(place, words=BEGIN, run=None, **options):
    run = run or RUNS.get(place, "runs/a b")
    return JOBS[place].text(TrainingCommand(words, run), JobOptions(**(FULL[place] | options)))


def bash(script):
    """Return the shell code of a job file that `bash -n` accepts."""
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return script


def shell_of(place, **options):
    if place in ("slurm", "tpu-vm"):
        return bash(text(place, **options))
    job = yaml.safe_load(text(place, **options))
    if place == "skypilot":
        return bash(job["run"])
    return bash(pod(job)["containers"][0]["command"][2])


def pod(job):
    (worker,) = job["spec"]["replicatedJobs"]
    return worker["template"]["spec"]["template"]["spec"]


@pytest.fixture
def run_script(tmp_path):
    """`run_script(script, variables, program=its bash code)`: run a script in a folder that has these programs."""

    def run(script, variables=(), **programs):
        for name, code in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **dict(variables)}
        return subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run


GCLOUD = 'for word; do :; done\nexec bash -c "${word#--command=}"'


@pytest.mark.parametrize("place", JOBS)
def test_shell_gets_the_words_as_they_were_given(place, tmp_path, run_script):
    """The shell code is run with a `covey` that writes down its words; nothing in a setting is executed."""
    programs = {"covey": f'printf "%s\\n" "$@" > {tmp_path}/words', "gcloud": GCLOUD}
    programs["srun"] = 'while [ "$1" != covey ]; do shift; done\nexec "$@"'
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}
    run, options = "runs/a b", {}
    if place == "skypilot":
        run, options = f"{tmp_path}/runs/a b", {"mount": str(tmp_path)}
    for begun in (False, True):
        if begun:
            (tmp_path / "runs" / "a b").mkdir(parents=True)
            (tmp_path / "runs" / "a b" / "recipe.yaml").write_text("")
        done = run_script(shell_of(place, run=run, **options), variables | {"HOME": "/nowhere"}, **programs)
        assert done.returncode == 0, done.stderr
        words = ("train", "--resume", run) if begun else BEGIN
        until = time.monotonic() + 20
        while read(tmp_path / "words") != list(words):  # on a TPU VM the run goes on behind the script
            assert time.monotonic() < until, read(tmp_path / "words")
            time.sleep(0.02)


def read(file):
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("resume", [("--resume", "runs/a b"), ("--resume=runs/a b",)])
def test_what_changes_a_resumed_run_is_not_lost(tmp_path, run_script, resume):
    """Wherever `--resume` stands among the words, and however it is written."""
    words = ("train", "--max-steps", "9", *resume)
    (tmp_path / "runs" / "a b").mkdir(parents=True)
    (tmp_path / "runs" / "a b" / "recipe.yaml").write_text("")
    programs = {"srun": f'while [ "$1" != covey ]; do shift; done\nshift; printf "%s\\n" "$@" > {tmp_path}/words'}
    assert run_script(bash(text("slurm", words=words, workdir=str(tmp_path))), **programs).returncode == 0
    assert read(tmp_path / "words") == list(words)


@pytest.mark.parametrize(
    ("code", "tries", "requeued"),
    [(1, 3, False), (69, 3, False), (75, 1, True), (2, 1, False), (143, 1, False), (0, 1, False)],
)
def test_slurm_restarts_what_failed_and_requeues_what_was_stopped(tmp_path, run_script, code, tries, requeued):
    """Not tried again: a mistake in the input, and a run that was stopped before anything was saved."""
    programs = {"srun": f"echo x >> {tmp_path}/tries\nexit {code}", "scontrol": f'echo "$@" > {tmp_path}/requeued'}
    assert run_script(text("slurm", max_restarts=2), {"SLURM_JOB_ID": "7"}, **programs).returncode == code
    assert read(tmp_path / "tries") == ["x"] * tries
    assert read(tmp_path / "requeued") == (["requeue 7"] if requeued else [])


def test_a_tpu_vm_goes_on_without_the_session_and_restarts_by_itself(tmp_path, run_script):
    covey = f"echo $PPID >> {tmp_path}/parents\nsleep 0.3\nexit 1"
    assert run_script(text("tpu-vm", max_restarts=1), gcloud=GCLOUD, covey=covey).returncode == 0
    assert len(read(tmp_path / "parents")) < 2  # the script has ended, and the run has not
    until = time.monotonic() + 20
    while len(read(tmp_path / "parents")) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    (pid,) = {line for file in tmp_path.glob("pod-*.pid") for line in read(file)}
    assert set(read(tmp_path / "parents")) == {pid}  # what the documented command stops


def test_slurm_asks_for_what_was_set():
    script = text("slurm", gpus_per_node=4, setup="source .venv/bin/activate", workdir="/shared/my work")
    asked = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4", "--time=12:00:00", "--partition=gpu"}
    assert "cd '/shared/my work' || exit 1" in script
    assert "source .venv/bin/activate || exit 1" in script
    assert f"export {MODE}=auto" in script
    assert "--gres" not in text("slurm", gpus_per_node=0)
    more = text("slurm", cpus_per_task=12, mem="200G", account="lab.a", lines=("--qos=high", "-C ib"))
    asked = {line.removeprefix("#SBATCH ") for line in more.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--cpus-per-task=12", "--mem=200G", "--account=lab.a", "--qos=high", "-C ib"}
    assert asked >= {"--open-mode=append", "--requeue"}
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in more  # srun takes it from nowhere else since Slurm 22.05
    assert more.count("--open-mode=append") == 2


def test_a_jobset_has_a_pod_for_each_machine():
    job = yaml.safe_load(text("k8s", max_restarts=3))
    (worker,) = job["spec"]["replicatedJobs"]
    spec = worker["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (4, 4, "Indexed")
    assert job["spec"]["failurePolicy"]["maxRestarts"] == 3
    container = pod(job)["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment[ADDRESS] == "covey-worker-0-0.covey:12345"
    assert environment[COUNT] == "4"
    assert environment[NUMBER] is None  # from the pod's own index
    assert container["image"] == "registry/covey:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod(yaml.safe_load(text("k8s", gpus_per_node=0)))["containers"][0]["resources"]["limits"] == {}


def test_a_pod_has_time_to_save_and_room_in_shared_memory():
    found = pod(yaml.safe_load(text("k8s", cpus_per_task=8, mem="64G")))
    assert found["terminationGracePeriodSeconds"] == 120
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in found["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in found["containers"][0]["volumeMounts"]
    wanted = {"cpu": 8, "memory": "64G", "nvidia.com/gpu": 8}
    assert found["containers"][0]["resources"] == {"limits": wanted, "requests": wanted}


def test_a_preempted_pod_restarts_all_and_a_mistake_none():
    """The trap: one pod that is replaced alone would join under a number that is taken."""
    spec = yaml.safe_load(text("k8s"))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    codes, disrupted = job["podFailurePolicy"]["rules"]
    assert (job["backoffLimit"], codes["onExitCodes"]["values"]) == (0, [2, 75])
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    mistake, stopped = spec["failurePolicy"]["rules"]
    message = "Container covey for pod default/covey-worker-0-0 failed with exit code {} matching FailJob rule 0"
    (pattern,) = mistake["onJobFailureMessagePatterns"]
    assert [bool(re.search(pattern, message.format(code))) for code in (2, 75)] == [True, False]
    assert mistake["action"] == "FailJobSet"
    assert stopped["action"] == "RestartJobSetAndIgnoreMaxRestarts"


def test_a_jobset_of_a_tpu_slice():
    tpus = {"tpus_per_node": 4, "accelerator": "tpu-v5-lite-podslice", "topology": "4x4"}
    found = pod(yaml.safe_load(text("k8s", **tpus)))
    assert found["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    gke = "cloud.google.com/gke-tpu"
    assert found["nodeSelector"] == {f"{gke}-accelerator": "tpu-v5-lite-podslice", f"{gke}-topology": "4x4"}


def test_a_skypilot_task_has_its_run_folder_on_shared_storage():
    job = yaml.safe_load(text("skypilot", max_restarts=2))
    assert job["volumes"] == {"/shared": "claim"}
    assert job["resources"]["job_recovery"] == {"max_restarts_on_errors": 2, "recover_on_exit_codes": [75]}
    assert JOBS["skypilot"].submit == "sky jobs launch {file}"
    job = yaml.safe_load(text("skypilot", volume="gs://bucket/a"))
    assert job["file_mounts"] == {"/shared": {"source": "gs://bucket/a", "mode": "MOUNT"}}
    assert "volumes" not in job


@pytest.mark.parametrize(
    ("place", "options", "told"),
    [
        ("k8s", {"image": None}, "--image is missing"),
        ("k8s", {"workdir": "here"}, "absolute path"),
        ("tpu-vm", {"zone": None}, "--zone is missing"),
        ("skypilot", {"accelerator": None}, "--accelerator is missing"),
        ("skypilot", {"gpus_per_node": 0}, "--gpus-per-node"),
        ("slurm", {"name": "My Job"}, "lower-case"),
        ("slurm", {"partition": "a\n#SBATCH --uid=0"}, "the name of a partition"),
        ("slurm", {"time": "a day"}, "12:00:00"),
        ("slurm", {"lines": ("--qos=a\nrm -rf /",)}, "options of sbatch"),
        ("slurm", {"image": "a"}, "--image has no meaning"),
        ("tpu-vm", {"nodes": 4}, "--nodes has no meaning"),
        ("k8s", {"tpus_per_node": 4}, "--topology"),
        ("k8s", {"mem": "much"}, "64G"),
        ("skypilot", {"volume": None}, "--volume is missing"),
        ("skypilot", {"volume": "s3://bucket"}, "or gs://BUCKET"),
        ("skypilot", {"run": "runs/a"}, "--out /shared/a"),
        ("skypilot", {"mount": "shared"}, "an absolute path"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_here(place, options, told):
    with pytest.raises(CoveyError, match=told):
        text(place, **options)


def test_a_job_needs_its_run_folder():
    with pytest.raises(CoveyError, match="names no run folder"):
        JOBS["slurm"].text(TrainingCommand(("train", "quickstart"), None), JobOptions())


def test_the_command_writes_a_file_once_or_prints_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "quickstart", "--out", "runs/a"]
    assert main(["launch", "slurm", "--dry-run", "--nodes", "2", *words]) == 0
    printed = capsys.readouterr().out
    assert main(["launch", "slurm", "nodes=2", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == printed
    assert main(["launch", "slurm", "2", "--dry-run", *words]) == 2
    assert "'2' is one word too many" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["launch", "slurm", "--nodes", "2", *words]) == 0
    assert "sbatch covey-job.sh" in capsys.readouterr().out
    assert (tmp_path / "covey-job.sh").read_text() == printed
    assert main(["launch", "slurm", "--nodes=3", *words]) == 2
    assert "already there" in capsys.readouterr().err
    (tmp_path / "link.sh").symlink_to(tmp_path / "elsewhere.sh")
    assert main(["launch", "slurm", "--file", "link.sh", *words]) == 2
    assert not (tmp_path / "elsewhere.sh").exists()
    assert main(["launch", "slrm", *words]) == 2
    assert "did you mean 'slurm'?" in capsys.readouterr().err
    assert main(["launch", "slurm", "export", "runs/a"]) == 2
    assert f"fix: {MODE}=auto covey export RUN --out FOLDER, by the cluster's own" in capsys.readouterr().err


def test_the_help_names_every_option(capsys):
    assert main(["launch", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in (*LocalOptions.kinds, *JobOptions.kinds):
        assert f"--{name.replace('_', '-')}" in shown
