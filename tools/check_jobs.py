"""Check the job files of `covey launch` with the parsers of the projects that read them, without a cluster.

    make check-jobs                          # of Debian: apt-get install shellcheck slurm-client
    make check-jobs ARGS=--allow-missing     # says which of them is not here, and checks the rest
    make check-jobs ARGS="--crd FILE"        # also by JobSet's own schema, jobset.x-k8s.io_jobsets.yaml of its project

Each checker must first refuse the file with a planted mistake. SLURM_PLUGINS names the folder of Slurm's plugins where
it is not below /usr/lib.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from covey_hosts import JOBS, JobOptions
from covey_hosts.local import TrainingCommand

RUN = "/shared/runs/a b"
COMMAND = TrainingCommand(("train", "mine.yaml", "--out", RUN), RUN)
SLURM = {"time": "12:00:00", "partition": "p", "nodes": 2, "cpus_per_task": 4, "mem": "8G", "account": "lab"}
K8S = {
    "image": "registry/covey:1",
    "volume": "data",
    "workdir": "/shared",
    "nodes": 4,
    "mem": "64G",
    "cpus_per_task": 8,
}
TPU = {"tpus_per_node": 4, "accelerator": "tpu-v5-lite-podslice", "topology": "4x4"}
SKY = {"accelerator": "H100", "nodes": 2, "max_restarts": 2}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "slurm": ("slurm", {**SLURM, "lines": ("--qos=high",), "max_restarts": 2, "setup": "source .venv/bin/activate"}),
    "slurm without GPUs": ("slurm", {"gpus_per_node": 0}),
    "k8s": ("k8s", {**K8S, "cpus_per_task": 8}),
    "k8s with TPUs": ("k8s", K8S | TPU),
    "tpu-vm": ("tpu-vm", {"zone": "us-central1-a", "max_restarts": 1, "workdir": "/data/my work"}),
    "skypilot with a volume": ("skypilot", {**SKY, "volume": "data"}),
    "skypilot with a bucket": ("skypilot", {**SKY, "volume": "gs://bucket/a"}),
}
"""Name of a file → kind and settings."""
CONF = """\
ClusterName=none
SlurmctldHost=none(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
MessageTimeout=2
PluginDir={plugins}
GresTypes=gpu
NodeName=n State=UNKNOWN
PartitionName=p Nodes=n
"""
Check = Callable[[str], str]
"""Function that returns what is wrong with the text of a file; empty when nothing is."""


def shellcheck(text: str) -> str:
    """Return the findings of shellcheck but for those on files of the user and on code that another shell expands."""
    words = ["shellcheck", "-s", "bash", "-e", "SC1091,SC2016", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    return done.stdout.strip()


def shell_of(text: str) -> str:
    """Return the shell code of a job file in YAML."""
    job = yaml.safe_load(text)
    if "run" in job:
        return str(job["run"])
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return str(pod["containers"][0]["command"][2])


def sbatch(text: str) -> str:
    """Return the complaints of sbatch; with a right file it ends at the controller, which is not there."""
    with tempfile.TemporaryDirectory() as folder:
        file, conf = Path(folder, "job.sh"), Path(folder, "slurm.conf")
        file.write_text(text)
        plugins = next(iter(Path("/usr/lib").glob("*/slurm-wlm")), Path("/usr/lib/slurm"))
        conf.write_text(CONF.format(plugins=os.environ.get("SLURM_PLUGINS", plugins)))
        environment = os.environ | {"SLURM_CONF": str(conf)}
        done = subprocess.run(["sbatch", "--test-only", str(file)], env=environment, capture_output=True, text=True)
    return "" if "Unable to contact slurm controller" in done.stderr else done.stderr.strip()


def kubernetes(text: str) -> str:
    """Check each job of a JobSet as one of Kubernetes, and the JobSet by the models of Kubeflow, which leave out what
    they do not know.
    """
    import kubernetes_validate
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    jobset = yaml.safe_load(text)
    try:
        for job in jobset["spec"]["replicatedJobs"]:
            document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
            kubernetes_validate.validate(document, "1.34", strict=True)
        read = JobsetV1alpha2JobSet.from_dict(jobset)
    except Exception as error:  # each project has its own
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return "\n".join(left_out(jobset["spec"], read.to_dict()["spec"], "spec"))


def left_out(given: Any, read: Any, at: str) -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if key in read:
                yield from left_out(value, read[key], f"{at}.{key}")
            else:
                yield f"unknown field {at}.{key}"
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from left_out(one, other, f"{at}[{number}]")


def jobset_schema(text: str, crd: str) -> str:
    """Check a JobSet by the schema in the definition `crd` of its resource; unknown fields are mistakes."""
    import jsonschema

    versions = yaml.safe_load(Path(crd).read_text())["spec"]["versions"]
    schema = closed(next(version for version in versions if version["served"])["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {}
    try:
        jsonschema.validate(yaml.safe_load(text), schema)
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return ""


def closed(schema: Any) -> Any:
    """Return a schema that allows the named properties alone, where it names some."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    only = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return only | {name: closed(part) for name, part in schema.items()}


def sky(text: str) -> str:
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    import sky as skypilot

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            skypilot.Task.from_yaml(file.name)
        except Exception as error:  # it raises several
            return f"{type(error).__name__}: {error}"
    return ""


CHECKS: dict[str, tuple[tuple[str, Check, tuple[str, str]], ...]] = {
    "slurm": (
        ("shellcheck", shellcheck, ('"$code"', "$code")),
        ("sbatch", sbatch, ("--nodes=", "--nodez=")),
    ),
    "tpu-vm": (("shellcheck", shellcheck, ("set -uo", "rm $1; set -uo")),),
    "k8s": (
        ("shellcheck", lambda text: shellcheck(shell_of(text)), ("exec covey", "exec covey $x")),
        ("kubernetes_validate", kubernetes, ("backoffLimit", "backofLimit")),
        ("kubernetes_validate", kubernetes, ("maxRestarts", "maxRestart")),
    ),
    "skypilot": (
        ("shellcheck", lambda text: shellcheck(shell_of(text)), ("exec covey", "exec covey $x")),
        ("sky", sky, ("num_nodes", "num_node")),
    ),
}
"""Kind of file → its checkers: program or module, function, and a planted mistake that it must find."""


def is_missing(name: str) -> bool:
    from importlib.util import find_spec

    return shutil.which(name) is None and find_spec(name) is None


def main(words: list[str]) -> int:
    """Check all files, print a line for each, and return the exit code."""
    wrong, checks = 0, dict(CHECKS)
    if "--crd" in words:
        check = partial(jobset_schema, crd=words[words.index("--crd") + 1])
        checks["k8s"] += (("jsonschema", check, ("FailJobSet", "FailJobs")),)
    for name, (kind, settings) in FILES.items():
        text = JOBS[kind].text(COMMAND, JobOptions(**settings))
        for checker, check, (right, planted) in checks[kind]:
            if is_missing(checker):
                problem = "" if "--allow-missing" in words else "missing"
                print(f"{name}: {checker} is not installed here: not checked")
            elif right in text and not check(text.replace(right, planted)):
                problem = f"does not find {planted!r} in place of {right!r}"
            else:
                problem = check(text)
                print(f"{name}: {checker}: {problem or 'right'}")
            wrong += bool(problem)
    print(f"{wrong} problems" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
