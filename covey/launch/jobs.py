"""Write the job file of a training command for a cluster: Slurm, Kubernetes (JobSet), TPU VMs or SkyPilot.

Nothing is submitted: a job file is written for review, with the command that submits it. In each of them the processes
find each other through the variables of `config.processes`, and a restart resumes the run when its folder has one. The
test for that is made by every process before it joins the others, and process 0 creates the folder after they have
joined, so all come to the same answer.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from covey.config.base import Config, NonNegativeInt, PositiveInt, Problem, shortened
from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.errors import CoveyError
from covey.launch.command import TrainingCommand

PORT = 12345
"""Port of process 0 where the cluster chooses none."""
SAVE_SECONDS = 120
"""Seconds before the time limit of a Slurm job at which the run is asked to save a checkpoint and stop."""


FORMS = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "up to 40 lower-case letters, digits and hyphens, a letter first"),
    "time": (r"[0-9:-]+", "hours:minutes:seconds, as in 12:00:00"),
    "partition": (r"[\w.,+-]+", "the name of a partition"),
    "accelerator": (r"[\w-]+", "the name of an accelerator, as in H100"),
}
"""Pattern of the settings that a cluster reads, and its description in errors."""


class JobOptions(Config):
    """Settings of `covey launch slurm`, `k8s`, `tpu-vm` and `skypilot`."""

    name: str = "covey"
    """Name of the job: lower-case letters, digits and hyphens."""
    nodes: PositiveInt = 1
    """Number of machines."""
    gpus_per_node: NonNegativeInt = 8
    """Number of GPUs of each machine; 0 for machines without."""
    accelerator: str | None = None
    """skypilot: kind of accelerator, as in H100."""
    time: str | None = None
    """slurm: longest time of the job, as in 12:00:00."""
    partition: str | None = None
    """slurm: the partition."""
    image: str | None = None
    """k8s: the container image, with Covey in it."""
    volume: str | None = None
    """k8s: name of the claim of a volume that all pods share; it is mounted at the working directory."""
    zone: str | None = None
    """tpu-vm: the zone of the cloud."""
    workdir: str = "."
    """Folder in which the command runs; relative paths of the recipe and of --out start there."""
    setup: str = ""
    """Shell command that is run first, as in: source .venv/bin/activate."""
    max_restarts: NonNegativeInt = 0
    """Number of times that the run is resumed from its last checkpoint after a failure."""
    file: str | None = None
    """File to write; covey-job.sh or covey-job.yaml when not set."""

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for each word that a cluster would refuse."""
        for key, (form, want) in FORMS.items():
            value = getattr(self, key)
            if value is not None and not re.fullmatch(form, value):
                yield Problem(key, f"{key} is {shortened(value)}", want=want)


@dataclass(frozen=True)
class Job:
    """A kind of job file.

    Attributes:
        write: returns the text of the file.
        file: name of the file when none is given.
        submit: command that submits the file, with {file} in place of its name.
        needs: settings without which the file cannot be written, each with an example.
    """

    write: Callable[[TrainingCommand, JobOptions], str]
    file: str
    submit: str
    needs: Mapping[str, str]

    def text(self, command: TrainingCommand, options: JobOptions) -> str:
        """Return the text of the job file.

        Raises:
            CoveyError: a setting that this kind needs is missing, or the command names no run folder.
        """
        for name, example in self.needs.items():
            if getattr(options, name) is None:
                raise CoveyError(f"--{name} is missing", want=f"--{name} {example}")
        if command.run is None:
            raise CoveyError("the command names no run folder", want="--out FOLDER behind the recipe, on a shared path")
        return self.write(command, options)


def slurm(command: TrainingCommand, options: JobOptions) -> str:
    """Return a script for sbatch: a task for each GPU, or one for each machine without GPUs."""
    tasks = max(options.gpus_per_node, 1)
    settings = {
        "job-name": options.name,
        "nodes": options.nodes,
        "ntasks-per-node": tasks,
        "gres": f"gpu:{options.gpus_per_node}" if options.gpus_per_node else None,
        "time": options.time,
        "partition": options.partition,
        "output": "%x-%j.log",
        "signal": f"TERM@{SAVE_SECONDS}",
    }
    head = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
    return _script(
        [
            "#!/bin/bash",
            *head,
            "",
            *_preparation(options),
            f"export {MODE}=auto  # the processes find each other through Slurm",
            f"for attempt in $(seq 0 {options.max_restarts}); do",
            *(f"  {line}" for line in _choice(command, "words=({})")),
            '  srun --kill-on-bad-exit=1 --output=%x-%j-%t.log covey "${words[@]}" && exit 0',
            "  code=$?",
            '  case "$code" in 75 | 130 | 143) break ;; esac  # it was stopped and has saved a checkpoint',
            "done",
            'exit "$code"',
        ]
    )


def kubernetes(command: TrainingCommand, options: JobOptions) -> str:
    """Return a JobSet with one pod for each machine, which has all of its GPUs."""
    host = f"{options.name}-worker-0-0.{options.name}"
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    environment = [
        {"name": ADDRESS, "value": f"{host}:{PORT}"},
        {"name": BIND, "value": f"0.0.0.0:{PORT}"},
        {"name": COUNT, "value": str(options.nodes)},
        {"name": NUMBER, "valueFrom": index},
    ]
    container: dict[str, Any] = {
        "name": "covey",
        "image": options.image,
        "workingDir": _absolute(options.workdir),
        "command": ["bash", "-c", "\n".join([*_setup(options), *_choice(command, "exec covey {}")])],
        "env": environment,
        "volumeMounts": [{"name": "shared", "mountPath": _absolute(options.workdir)}],
    }
    if options.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": options.gpus_per_node}}
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": options.volume}}],
    }
    job = {
        "parallelism": options.nodes,
        "completions": options.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return _yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": options.name},
            "spec": {
                "failurePolicy": {"maxRestarts": options.max_restarts},
                "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}],
            },
        }
    )


def tpu_vm(command: TrainingCommand, options: JobOptions) -> str:
    """Return a script that runs the command on every host of a TPU VM that exists."""
    inside = "\n".join([*_preparation(options), f"export {MODE}=auto", *_choice(command, "exec covey {}")])
    ssh = f"gcloud compute tpus tpu-vm ssh {shlex.quote(options.name)} --zone={shlex.quote(str(options.zone))}"
    return _script(
        [
            "#!/bin/bash",
            "set -uo pipefail",
            f"for attempt in $(seq 0 {options.max_restarts}); do",
            f"  {ssh} --worker=all --command={shlex.quote(inside)} && exit 0",
            "  code=$?",
            "done",
            'exit "$code"',
        ]
    )


def skypilot(command: TrainingCommand, options: JobOptions) -> str:
    """Return a SkyPilot task with one process for each machine, which has all of its accelerators."""
    run = [
        *_setup(options),
        f'export {ADDRESS}="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"',
        f'export {BIND}="0.0.0.0:{PORT}"',
        f'export {COUNT}="$SKYPILOT_NUM_NODES" {NUMBER}="$SKYPILOT_NODE_RANK"',
        *_choice(command, "exec covey {}"),
    ]
    if not options.gpus_per_node:
        raise CoveyError("--gpus-per-node is 0", want="the number of accelerators of each machine")
    resources: dict[str, Any] = {"accelerators": f"{options.accelerator}:{options.gpus_per_node}"}
    if options.max_restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": options.max_restarts}
    return _yaml(
        {
            "name": options.name,
            "num_nodes": options.nodes,
            "workdir": options.workdir,
            "resources": resources,
            "run": "\n".join(run) + "\n",
        }
    )


def _choice(command: TrainingCommand, form: str) -> list[str]:
    """Return the lines of shell that resume the run if its folder has one, and begin it if not."""
    begin = form.format(shlex.join(command.words))
    if command.words[1:2] == ("--resume",):
        return [begin]
    folder = shlex.quote(f"{command.run}/recipe.yaml")
    return [
        f"if [ -e {folder} ]; then",
        f"  {form.format(shlex.join(command.resume_words))}",
        "else",
        f"  {begin}",
        "fi",
    ]


def _preparation(options: JobOptions) -> list[str]:
    return ["set -uo pipefail", f"cd {shlex.quote(options.workdir)} || exit 1", *_setup(options)]


def _setup(options: JobOptions) -> list[str]:
    return [f"{options.setup} || exit 1"] if options.setup else []


def _absolute(folder: str) -> str:
    if not folder.startswith("/"):
        raise CoveyError(f"--workdir is {folder!r}", want="the absolute path in the containers, as in /workspace")
    return folder


def _script(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types here
    """Writes text of several lines as a block."""


def _block(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _yaml(value: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=120)
    return text


JOBS: dict[str, Job] = {
    "slurm": Job(slurm, "covey-job.sh", "sbatch {file}", {}),
    "k8s": Job(kubernetes, "covey-job.yaml", "kubectl apply -f {file}", {"image": "IMAGE", "volume": "CLAIM"}),
    "tpu-vm": Job(tpu_vm, "covey-job.sh", "bash {file}", {"zone": "us-central1-a"}),
    "skypilot": Job(skypilot, "covey-job.yaml", "sky launch {file}", {"accelerator": "H100"}),
}
"""Kind of job file by the word behind `covey launch`."""
