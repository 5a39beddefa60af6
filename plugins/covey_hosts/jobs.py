"""Write the job file of a training command for a cluster: Slurm, Kubernetes (JobSet), TPU VMs or SkyPilot.

Nothing is submitted: a job file is written for review, with the command that submits it. In each of them the processes
find each other through the variables of `config.processes`, and a restart resumes the run when its folder has one. The
test for that is made by every process before it joins the others, and process 0 creates the folder after they have
joined, so all come to the same answer.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from covey.config.base import Config, NonNegativeInt, PositiveInt, Problem, shortened
from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.errors import CoveyError
from covey_hosts.local import TrainingCommand

PORT = 12345
"""Port of process 0 where the cluster chooses none."""
COMMON = ("name", "workdir", "setup", "max_restarts", "file")
"""Settings that every kind of job file uses."""
SAVE_SECONDS = 120
"""Seconds that a run has to save a checkpoint and stop, before the time limit of a Slurm job or the end of a pod."""
MISTAKE, SAVED = 2, 75
"""Exit codes of a run: a mistake in the input, which is not tried again, and stopped behind a checkpoint."""


FORMS = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "up to 40 lower-case letters, digits and hyphens, a letter first"),
    "time": (r"[0-9:-]+", "hours:minutes:seconds, as in 12:00:00"),
    "partition": (r"[\w.,+-]+", "the name of a partition"),
    "account": (r"[\w.-]+", "the name of an account"),
    "mem": ("[0-9]+[MGT]", "a number with M, G or T, as in 64G"),
    "accelerator": (r"[\w-]+", "the name of an accelerator, as in H100"),
    "topology": ("[0-9]+(x[0-9]+)+", "the numbers of chips along each axis, as in 4x4"),
    "volume": (r"(gs://)?[a-z0-9][\w./-]*", "the name of a volume or claim, or gs://BUCKET for SkyPilot"),
    "mount": (r"/[\w./-]+", "an absolute path, as in /shared"),
}
"""Pattern of the settings that a cluster reads, and its description in errors."""


class JobOptions(Config):
    """Settings of `covey launch slurm`, `k8s`, `tpu-vm` and `skypilot`."""

    name: str = "covey"
    """Name of the job: lower-case letters, digits and hyphens. tpu-vm: name of the TPU VM."""
    nodes: PositiveInt = 1
    """Number of machines; a TPU VM has its own."""
    gpus_per_node: NonNegativeInt = 8
    """Number of GPUs of each machine; 0 for machines without."""
    tpus_per_node: NonNegativeInt = 0
    """k8s: number of TPU chips of each machine, in place of GPUs; with accelerator and topology."""
    accelerator: str | None = None
    """skypilot: kind of accelerator, as in H100. k8s: kind of TPU, as in tpu-v5-lite-podslice."""
    topology: str | None = None
    """k8s: topology of the TPU slice, as in 4x4."""
    cpus_per_task: PositiveInt | None = None
    """slurm, k8s: CPU cores of each process."""
    mem: str | None = None
    """slurm, k8s: memory of each machine, as in 64G."""
    account: str | None = None
    """slurm: the account that is charged."""
    lines: tuple[str, ...] = ()
    """slurm: further options of sbatch, as in [--qos=high, --constraint=ib]; each becomes a line."""
    time: str | None = None
    """slurm: longest time of the job, as in 12:00:00."""
    partition: str | None = None
    """slurm: the partition."""
    image: str | None = None
    """k8s: the container image, with Covey in it."""
    volume: str | None = None
    """Storage that all machines share, with the run folder in it. k8s: name of the claim of a volume, mounted at the
    working directory. skypilot: name of a volume, or address gs://BUCKET of a bucket, mounted at `mount`.
    """
    mount: str = "/shared"
    """skypilot: path of the volume; the run folder must lie below it."""
    zone: str | None = None
    """tpu-vm: the zone of the cloud."""
    workdir: str = "."
    """Folder in which the command runs; relative paths of the recipe and of --out start there. k8s: where the
    shared volume is mounted.
    """
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
        for line in self.lines:
            if not re.fullmatch(r"--?\w[ -~]*", line):
                yield Problem("lines", f"lines has {shortened(line)}", want="options of sbatch, as in --qos=high")


@dataclass(frozen=True)
class Job:
    """A kind of job file.

    Attributes:
        write: returns the text of the file.
        file: name of the file when none is given.
        submit: command that submits the file, with {file} in place of its name.
        needs: settings without which the file cannot be written, each with an example.
        uses: further settings that this kind has a use for, beside `COMMON`.
    """

    write: Callable[[TrainingCommand, JobOptions], str]
    file: str
    submit: str
    needs: Mapping[str, str]
    uses: tuple[str, ...]

    def text(self, command: TrainingCommand, options: JobOptions) -> str:
        """Return the text of the job file.

        Raises:
            CoveyError: a setting that this kind needs is missing, or the command names no run folder.
        """
        for name, example in self.needs.items():
            if getattr(options, name) is None:
                raise CoveyError(f"--{name} is missing", want=f"--{name} {example}")
        for field in fields(options):
            if field.name not in (*COMMON, *self.needs, *self.uses) and getattr(options, field.name) != field.default:
                flag = f"--{field.name.replace('_', '-')}"
                raise CoveyError(f"{flag} has no meaning in this kind of job file", fix=f"leave {flag} out")
        if command.run is None:
            raise CoveyError("the command names no run folder", want="--out FOLDER behind the recipe, on a shared path")
        return self.write(command, options)


def slurm(command: TrainingCommand, options: JobOptions) -> str:
    """Return a script for sbatch: a task for each GPU, or one for each machine without GPUs. A run that was stopped
    behind a checkpoint, as at the time limit, goes back into the queue; a mistake in the input is not tried again.
    """
    settings = {
        "job-name": options.name,
        "nodes": options.nodes,
        "ntasks-per-node": max(options.gpus_per_node, 1),
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "gres": f"gpu:{options.gpus_per_node}" if options.gpus_per_node else None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{SAVE_SECONDS}",
    }
    head = [f"--{name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
    cores = ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if options.cpus_per_task else ""  # srun does not inherit it
    start = f'srun --kill-on-bad-exit=1 --open-mode=append{cores} --output=%x-%j-%t.log covey "${{words[@]}}"'
    stopped = f'{SAVED}) scontrol requeue "$SLURM_JOB_ID"; exit {SAVED} ;;  # a checkpoint is saved: go on later'
    return _script(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in (*head, "--requeue", *options.lines)),
            "",
            *_preparation(options),
            f"export {MODE}=auto  # the processes find each other through Slurm",
            *_attempts(command, options, start, stopped),
        ]
    )


def kubernetes(command: TrainingCommand, options: JobOptions) -> str:
    """Return a JobSet with one pod for each machine, which has all of its GPUs or TPU chips."""
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
        "volumeMounts": [
            {"name": "shared", "mountPath": _absolute(options.workdir)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "resources": _resources(options),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        **_tpu_slice(options),
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL needs more than the 64 MB of a container
        ],
    }
    job = {
        "parallelism": options.nodes,
        "completions": options.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_failures()},
        "template": {"spec": pod},
    }
    return _yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": options.name},
            "spec": {
                "failurePolicy": {"maxRestarts": options.max_restarts, "rules": _job_failures()},
                "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}],
            },
        }
    )


def _resources(options: JobOptions) -> dict[str, Any]:
    limits: dict[str, Any] = {"cpu": options.cpus_per_task, "memory": options.mem}
    limits |= {"google.com/tpu": options.tpus_per_node or None}
    if not options.tpus_per_node:
        limits |= {"nvidia.com/gpu": options.gpus_per_node or None}
    limits = {name: value for name, value in limits.items() if value is not None}
    return {"limits": limits, "requests": limits}


def _tpu_slice(options: JobOptions) -> dict[str, Any]:
    """Return the nodes of GKE on which TPU pods run; the pods of a slice need a host each."""
    if bool(options.tpus_per_node) != bool(options.accelerator and options.topology):
        raise CoveyError(
            "TPUs of Kubernetes need --tpus-per-node, --accelerator and --topology, and not all of them are there",
            want="all three, or none",
            fix="--tpus-per-node 4 --accelerator tpu-v5-lite-podslice --topology 4x4",
        )
    if not options.tpus_per_node:
        return {}
    gke = "cloud.google.com/gke-tpu"
    return {"nodeSelector": {f"{gke}-accelerator": options.accelerator, f"{gke}-topology": options.topology}}


def _pod_failures() -> list[dict[str, Any]]:
    """Return the rules by which a pod's end fails the job with the reason PodFailurePolicy: a mistake, a checkpoint
    that was saved before a stop, and a pod that the cluster has preempted or evicted.
    """
    codes = {"containerName": "covey", "operator": "In", "values": [MISTAKE, SAVED]}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return [{"action": "FailJob", "onExitCodes": codes}, {"action": "FailJob", "onPodConditions": disrupted}]


def _job_failures() -> list[dict[str, Any]]:
    """Return the rules of the JobSet: a mistake ends it, and a preempted pod or a saved checkpoint restarts all pods
    without counting. Any other failure counts as a restart.
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    mistake = {"name": "mistake", "action": "FailJobSet", **reason}
    mistake |= {"onJobFailureMessagePatterns": [f"exit code {MISTAKE} "]}
    return [mistake, {"name": "stopped", "action": "RestartJobSetAndIgnoreMaxRestarts", **reason}]


def tpu_vm(command: TrainingCommand, options: JobOptions) -> str:
    """Return a script that starts the run on every host of a TPU VM that exists. It goes on when the session that has
    started it ends; each host restarts its process, so the processes of all hosts come together again.
    """
    log = f"{options.name}-$(hostname)"
    inside = [f"export {MODE}=auto", *_attempts(command, options, 'covey "${words[@]}"', "")]
    start = f'setsid nohup bash -c {shlex.quote(_script(inside))} > "{log}.log" 2>&1 < /dev/null &'
    begin = [*_preparation(options), start, f'echo $! > "{log}.pid"']
    ssh = f"gcloud compute tpus tpu-vm ssh {shlex.quote(options.name)} --zone={shlex.quote(str(options.zone))}"
    folder = shlex.quote(options.workdir)
    return _script(
        [
            "#!/bin/bash",
            f"# follow: {ssh} --worker=0 --command='tail -f {folder}/{log}.log'",
            f"# stop:   {ssh} --worker=all --command='kill -- \"-$(cat {folder}/{log}.pid)\"'",
            "set -uo pipefail",
            f"{ssh} --worker=all --command={shlex.quote(chr(10).join(begin))}",
        ]
    )


def skypilot(command: TrainingCommand, options: JobOptions) -> str:
    """Return a SkyPilot task with one process for each machine, which has all of its accelerators. The code is copied
    to each machine; the run folder lies on a volume that all have.
    """
    _check_mounted(command, options)
    if not options.gpus_per_node:
        raise CoveyError("--gpus-per-node is 0", want="the number of accelerators of each machine")
    run = [
        *_setup(options),
        f'{ADDRESS}="$(head -n 1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"',
        f'export {ADDRESS} {BIND}="0.0.0.0:{PORT}"',
        f'export {COUNT}="$SKYPILOT_NUM_NODES" {NUMBER}="$SKYPILOT_NODE_RANK"',
        *_choice(command, "exec covey {}"),
    ]
    bucket = str(options.volume).startswith("gs://")
    storage = {"source": options.volume, "mode": "MOUNT"} if bucket else options.volume
    recovery = {"max_restarts_on_errors": options.max_restarts, "recover_on_exit_codes": [SAVED]}
    return _yaml(
        {
            "name": options.name,
            "num_nodes": options.nodes,
            "workdir": options.workdir,
            "file_mounts" if bucket else "volumes": {options.mount: storage},
            "resources": {
                "accelerators": f"{options.accelerator}:{options.gpus_per_node}",
                "job_recovery": recovery,
            },
            "run": "\n".join(run) + "\n",
        }
    )


def _check_mounted(command: TrainingCommand, options: JobOptions) -> None:
    if not Path(str(command.run)).is_relative_to(options.mount):
        raise CoveyError(
            f"the run folder is {command.run}, and the machines share {options.mount} alone",
            want=f"a run folder below {options.mount}",
            fix=f"--out {options.mount}/{Path(str(command.run)).name}, or --mount with the folder above it",
        )


def _attempts(command: TrainingCommand, options: JobOptions, start: str, stopped: str) -> list[str]:
    """Return the lines of shell that start the run, and again after a failure; `stopped` is the case of a run that was
    stopped behind a checkpoint, if it is not just an end.
    """
    ends = f"{MISTAKE} | 130 | 143" if stopped else f"{MISTAKE} | {SAVED} | 130 | 143"
    return [
        f"for attempt in $(seq 0 {options.max_restarts}); do",
        '  echo "attempt $attempt"',
        *(f"  {line}" for line in _choice(command, "words=({})")),
        f"  {start} && exit 0",
        "  code=$?",
        '  case "$code" in',
        *([f"    {stopped}"] if stopped else []),
        f"    {ends}) break ;;  # a mistake in the input, or stopped: not tried again",
        "  esac",
        "done",
        'exit "$code"',
    ]


def _choice(command: TrainingCommand, form: str) -> list[str]:
    """Return the lines of shell that resume the run if its folder has one, and begin it if not."""
    begin = form.format(shlex.join(command.words))
    if command.resumes:
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


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style="|" if "\n" in text else None)
)


def _yaml(value: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=120)
    return text


JOBS: dict[str, Job] = {
    "slurm": Job(
        slurm,
        "covey-job.sh",
        "sbatch {file}",
        {},
        ("nodes", "gpus_per_node", "cpus_per_task", "mem", "time", "partition", "account", "lines"),
    ),
    "k8s": Job(
        kubernetes,
        "covey-job.yaml",
        "kubectl apply -f {file}",
        {"image": "IMAGE", "volume": "CLAIM"},
        ("nodes", "gpus_per_node", "tpus_per_node", "accelerator", "topology", "cpus_per_task", "mem"),
    ),
    "tpu-vm": Job(tpu_vm, "covey-job.sh", "bash {file}", {"zone": "us-central1-a"}, ()),
    "skypilot": Job(
        skypilot,
        "covey-job.yaml",
        "sky jobs launch {file}",
        {"accelerator": "H100", "volume": "VOLUME"},
        ("nodes", "gpus_per_node", "mount"),
    ),
}
"""Kind of job file by the word behind `covey launch`."""
