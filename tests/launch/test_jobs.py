"""Job files: read by parsers of their own languages; what is in them is what was asked for."""

import subprocess

import pytest
import yaml

from covey.cli.help import PAGES
from covey.cli.main import main
from covey.config.processes import ADDRESS, COUNT, MODE, NUMBER
from covey.errors import CoveyError
from covey.launch import JOBS, JobOptions, LocalOptions
from covey.launch.command import TrainingCommand

FULL = {
    "slurm": {"time": "12:00:00", "partition": "gpu", "nodes": 2},
    "k8s": {"image": "registry/covey:1", "volume": "data", "workdir": "/workspace", "nodes": 4},
    "tpu-vm": {"zone": "us-central1-a", "name": "pod"},
    "skypilot": {"accelerator": "H100", "nodes": 2},
}
BEGIN = ("train", "mine.yaml", "--out", "runs/a b", "--name", "it's; rm -rf $HOME")


def text(place, words=BEGIN, **options):
    return JOBS[place].text(TrainingCommand(words, "runs/a b"), JobOptions(**(FULL[place] | options)))


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


@pytest.mark.parametrize("place", JOBS)
def test_shell_gets_the_words_as_they_were_given(place, tmp_path):
    """The shell code is run with a `covey` that writes down its words; nothing in a setting is executed."""
    (tmp_path / "covey").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [ "$1" != covey ]; do shift; done\nexec "$@"\n')
    (tmp_path / "gcloud").write_text('#!/bin/bash\nfor word; do :; done\nexec bash -c "${word#--command=}"\n')
    for name in ("covey", "srun", "gcloud"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "HOME": "/nowhere"}
    for begun in (False, True):
        if begun:
            (tmp_path / "runs" / "a b").mkdir(parents=True)
            (tmp_path / "runs" / "a b" / "recipe.yaml").write_text("")
        done = subprocess.run(
            ["bash", "-c", shell_of(place)], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        words = ("train", "--resume", "runs/a b") if begun else BEGIN
        assert (tmp_path / "words").read_text().splitlines() == list(words)


def test_slurm_restarts_what_failed_and_not_what_was_stopped(tmp_path):
    (tmp_path / "srun").write_text(f'#!/bin/bash\necho x >> {tmp_path}/tries\nexit "$WITH"\n')
    (tmp_path / "srun").chmod(0o755)
    for code, tries in ((1, 3), (75, 1), (0, 1)):
        (tmp_path / "tries").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WITH": str(code)}
        done = subprocess.run(["bash", "-c", text("slurm", max_restarts=2)], env=environment, cwd=tmp_path)
        assert done.returncode == code
        assert len((tmp_path / "tries").read_text().split()) == tries


def test_slurm_asks_for_what_was_set():
    script = text("slurm", gpus_per_node=4, setup="source .venv/bin/activate", workdir="/shared/my work")
    asked = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4", "--time=12:00:00", "--partition=gpu"}
    assert "cd '/shared/my work' || exit 1" in script
    assert "source .venv/bin/activate || exit 1" in script
    assert f"export {MODE}=auto" in script
    assert "--gres" not in text("slurm", gpus_per_node=0)


def test_a_jobset_has_a_pod_for_each_machine():
    job = yaml.safe_load(text("k8s", max_restarts=3))
    (worker,) = job["spec"]["replicatedJobs"]
    spec = worker["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (4, 4, "Indexed")
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 3}
    container = pod(job)["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment[ADDRESS] == "covey-worker-0-0.covey:12345"
    assert environment[COUNT] == "4"
    assert environment[NUMBER] is None  # from the pod's own index
    assert container["image"] == "registry/covey:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "resources" not in pod(yaml.safe_load(text("k8s", gpus_per_node=0)))["containers"][0]


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
    assert not list(tmp_path.iterdir())
    assert main(["launch", "slurm", "--nodes", "2", *words]) == 0
    assert "sbatch covey-job.sh" in capsys.readouterr().out
    assert (tmp_path / "covey-job.sh").read_text() == printed
    assert main(["launch", "slurm", "--nodes=3", *words]) == 2
    assert "already there" in capsys.readouterr().err
    assert main(["launch", "slrm", *words]) == 2
    assert "did you mean 'slurm'?" in capsys.readouterr().err
    assert main(["launch", "slurm", "export", "runs/a"]) == 2
    assert f"fix: {MODE}=auto covey export RUN --out FOLDER, by the cluster's own" in capsys.readouterr().err


def test_the_help_names_every_option():
    shown, _ = PAGES["launch"]
    for name in (*LocalOptions.kinds, *JobOptions.kinds):
        assert f"--{name.replace('_', '-')}" in shown
