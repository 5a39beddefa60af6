"""Execute `covey doctor`: check this machine. Each finding is one line, ok or warn; a warning names the fix."""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from covey.cli.parse import Line
from covey.display import make_console
from covey.errors import first_line
from covey.models.loading.cache import cache_folder
from covey.registry import all_offered, install_command

if TYPE_CHECKING:
    from covey_plan.agreement import Agreement

GIGABYTE = 1e9
LEAST_AGREEMENT = 0.99
"""Share of tokens below which more than rounding keeps the trainer from drawing what the sampler drew."""


class Finding(NamedTuple):
    """Subject of a check, its result, and the fix (empty when all is well)."""

    subject: str
    result: str
    fix: str = ""


def doctor(line: Line) -> int:
    """Execute `covey doctor`: print all findings. Return exit code 2 if JAX does not work, otherwise 0."""
    console, works = make_console(highlight=False), True
    for check in CHECKS:
        for finding in check():
            mark = Text("warn", "yellow") if finding.fix else Text("ok  ", "green")
            console.print(Text.assemble(mark, f"  {finding.subject:<10} {finding.result}"), soft_wrap=True)
            if finding.fix:
                console.print(Text(f"{'':<17}fix: {finding.fix}"), soft_wrap=True)
            works = works and not (finding.subject == "jax" and finding.fix)
    return 0 if works else 2


def _machine() -> Iterator[Finding]:
    """Yield Python's version, the number of cores and the memory."""
    yield Finding("python", platform.python_version())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", str(cores), "" if cores > 1 else "quickstart takes twice as long on one core")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIGABYTE if hasattr(os, "sysconf") else 0.0
    if memory:
        yield Finding(
            "memory", f"{memory:.0f} GB", "" if memory > 4 else "quickstart needs about 4 GB: close other programs"
        )


def _disk() -> Iterator[Finding]:
    """Yield the free space of the cache and of the working folder."""
    for subject, folder in (("cache", cache_folder()), ("here", Path.cwd())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / GIGABYTE
        fix = "" if free > 3 else "a run needs about 3 GB for weights and checkpoints"
        if not os.access(existing, os.W_OK):
            fix = f"not writable: {'COVEY_CACHE=FOLDER chooses another' if subject == 'cache' else '--out FOLDER'}"
        yield Finding(subject, f"{folder} ({free:.0f} GB free)", fix)


def _jax() -> Iterator[Finding]:
    """Yield JAX's version and devices, the types of numbers that it can multiply, and a GPU that it does not see."""
    try:
        import jax
        import jax.numpy as jnp

        devices = jax.devices()
    except Exception as error:  # any error that keeps JAX from starting is the finding
        yield Finding("jax", f"does not work: {error}", f"{install_command()} --force-reinstall")
        return
    yield Finding("jax", f"{jax.__version__}, {len(devices)} × {devices[0].device_kind} ({devices[0].platform})")
    for name in ("float32", "bfloat16"):
        try:
            ones = jnp.ones((8, 8), name)
            right = float(jnp.matmul(ones, ones, preferred_element_type=jnp.float32)[0, 0]) == 8.0
        except Exception as error:  # an unsupported type is a finding, whatever exception it raises
            yield Finding(name, f"not supported: {error}", f"do not set model.dtype {name}")
        else:
            yield Finding(name, "works" if right else "wrong result", "" if right else "another version of jax")
    if devices[0].platform == "cpu" and (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        yield Finding("gpu", "there is an NVIDIA GPU, and jax does not see it", install_command("cuda"))


def _sampler() -> Iterator[Finding]:
    """Yield the agreement of the sampler with a forward as in training, on tokens of a tiny model of random weights."""
    try:
        agreement = _sampled_and_scored()
    except Exception as error:  # whatever keeps JAX from running a model is the finding
        yield Finding("sampler", f"does not work: {first_line(error)}", f"{install_command()} --force-reinstall")
        return
    result = f"{agreement.agreed} of {agreement.drawn} tokens are those that the trainer draws with the same noise"
    fix = "" if agreement.share >= LEAST_AGREEMENT else "another version of jax: training would be off-policy"
    yield Finding("sampler", result, fix)


def _sampled_and_scored() -> "Agreement":
    """Sample with a tiny model of random weights, and draw the tokens again by its forward as in training."""
    from covey.config.schema import RolloutConfig
    from covey.models.loading.weights import load
    from covey.recipes import use_compilation_cache
    from covey.rl.rollout_worker import RolloutWorker
    from covey_plan.agreement import token_agreement

    use_compilation_cache()  # to compile the programs takes nearly all of the time
    loaded = load("scratch:arithmetic-tiny")
    config = RolloutConfig(max_prompt_length=16, max_new_tokens=32, slots=32, decode_chunk=32)
    groups = RolloutWorker(loaded.model, loaded.tokenizer, config).generate(["1+2=", "17+25="], samples=16)
    return token_agreement(loaded.model, groups, config)


def _offered() -> Iterator[Finding]:
    """Yield (subject, result, fix) from each function that installed packages offer as `covey.findings`."""
    for load in all_offered("covey.findings").values():
        yield from map(Finding._make, load()())


def _extras() -> Iterator[Finding]:
    """Yield each extra of the package with the packages that are missing."""
    for extra, purpose in EXTRAS.items():
        try:
            lacking = missing_packages(extra)
        except PackageNotFoundError:
            yield Finding("extras", "unknown: Covey runs from files that were not installed", install_command())
            return
        if lacking:
            yield Finding(extra, f"{purpose}: without {', '.join(lacking)}", f"{install_command(extra)} if you need it")
        else:
            yield Finding(extra, purpose)


def missing_packages(extra: str) -> list[str]:
    """Return the packages of `extra` that are not installed, according to the metadata of the installed Covey.

    Raises:
        PackageNotFoundError: Covey itself is not installed.
    """
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    wanted = [line for line in importlib.metadata.requires("covey") or () if marker.search(line)]
    return [name for name in map(_package_name, wanted) if not any(importlib.metadata.distributions(name=name))]


def _package_name(requirement: str) -> str:
    """Return the package name of a requirement.

    >>> _package_name("jax[cuda12]>=0.10; extra == 'cuda'")
    'jax'
    """
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


EXTRAS = {
    "hub": "hf:org/name models and data sets, Parquet files",
    "math": "mathematical answers compared as mathematics",
    "openenv": "environments of OpenEnv servers",
    "serve": "covey board, a local web page of runs",
    "tfds": "GSM8K and others from TensorFlow Datasets",
    "track": "experiment trackers",
    "verifiers": "environments of the library verifiers",
    "wasm": "the Python tool's second engine, for systems without Landlock and for results that repeat",
}
"""Map from extra to its purpose. The packages come from the metadata of the installed Covey."""

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_machine, _disk, _jax, _offered, _extras, _sampler)
