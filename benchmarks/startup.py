"""Benchmark of start-up: from the start of a process to the end of its first training step, with an empty cache of
compiled programs and with the one that this left behind.

The process is `covey train`, with one held-out prompt in the evaluation before the first step. The programs that it
compiles, and those that it finds in the cache, are counted by JAX (`starting` writes them down). A size becomes a
recipe of its own, with a checkpoint of random weights; the real models of the cache stay in reach.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Result, Settings, spread_of, with_python_path
from benchmarks.peers.checkpoint import write
from benchmarks.peers.work import STOP
from benchmarks.sizes import SIZES
from benchmarks.soak import steps_of
from covey.config.recipe import Recipe, to_yaml
from covey.config.schema import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    LoRAConfig,
    ModelOptions,
    RLTrainingConfig,
    RolloutConfig,
)
from covey.errors import CoveyError
from covey.models.config import ModelConfig
from covey.models.loading.cache import cache_folder

COMPILED = "compiled"
"""Folder of the compiled programs in Covey's cache."""


class StartError(CoveyError):
    """Error for a process that ended before its first step, with the end of its output."""


@dataclass(frozen=True)
class Start:
    """Costs of one process to the end of its first step: seconds, seconds of processor time, and programs."""

    seconds: float
    processor: float
    programs: int
    from_cache: int
    compile_seconds: float


def measure(settings: Settings) -> Result:
    """Start each twice per round: cold, then warm."""
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="startup-") as held:
        words = _words(settings, Path(held))
        for number in range(settings.repeat):
            cache = _cache(Path(held) / f"cache-{number}")
            for name, made in starts.items():
                made.append(start(words, Path(held) / f"{name}-{number}", cache))
    facts = {name: _facts(made) for name, made in starts.items()}
    return Result({name: [s.seconds for s in made] for name, made in starts.items()}, 0, facts, {})


def start(words: Sequence[str], out: Path, cache: Path) -> Start:
    """Train in a new process until the first step is written, and end it there.

    Raises:
        StartError: it ended before that.
    """
    events, log = out.with_suffix(".events"), out.with_suffix(".log")
    began, before = time.perf_counter(), _processor()
    with _process([*words, "--out", str(out)], events, log, cache) as process:
        while steps_of(out) == 0:
            if process.poll() is not None:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise StartError(f"it ended with {process.returncode} before its first step:\n{last}")
            time.sleep(0.005)
        seconds = time.perf_counter() - began
    heard = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    compiled = [event["seconds"] for event in heard if "seconds" in event]
    return Start(seconds, _processor() - before, len(compiled), len(heard) - len(compiled), sum(compiled))


@contextmanager
def _process(words: Sequence[str], events: Path, log: Path, cache: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `covey` with these words, in a process group of its own that ends with the block."""
    known = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment = with_python_path(known | {"COVEY_CACHE": str(cache)})
    command = [sys.executable, "-m", "benchmarks.starting", str(events), "train", *words]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _processor() -> float:
    """Return the processor seconds, on all cores, of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _facts(made: Sequence[Start]) -> dict[str, Any]:
    return {
        "processor_seconds": spread_of([s.processor for s in made]),
        "programs": made[-1].programs,
        "from_cache": made[-1].from_cache,
        "compile_seconds": spread_of([s.compile_seconds for s in made]),
    }


def _cache(folder: Path) -> Path:
    """Make a cache folder like the user's, but without compiled programs: models are found in it. Files are copied,
    since a checkpoint that is a link out of its folder is refused.
    """
    folder.mkdir()
    for there in cache_folder().iterdir() if cache_folder().is_dir() else ():
        if there.is_dir() and there.name != COMPILED:
            (folder / there.name).symlink_to(there)
        elif there.is_file():
            shutil.copy(there, folder)
    return folder


def _words(settings: Settings, folder: Path) -> list[str]:
    """Return a recipe and overrides, as `covey train` takes them."""
    if settings.size not in SIZES:
        return [settings.size, "--evaluation.prompts", "1", "--lora.rank", str(settings.lora), *settings.overrides]
    model, data, file = folder / "model", folder / "data.jsonl", folder / "recipe.yaml"
    write(model, _described(settings.shape.model), 1 / settings.shape.mean_length if settings.ragged else 0.0)
    rows = [{"prompt": " ".join(f"w{max(n, STOP + 1)}" for n in prompt)} for prompt in settings.prompts()]
    data.write_text("".join(json.dumps(row) + "\n" for row in 4 * rows))
    file.write_text(to_yaml(_recipe(settings, model, data)))
    return [str(file)]


def _recipe(settings: Settings, model: Path, data: Path) -> Recipe:
    shape = settings.shape
    return Recipe(
        name="startup",
        model=ModelOptions(str(model), lora=LoRAConfig(rank=settings.lora)),
        data=DataConfig("jsonl", str(data)),
        rewards=("benchmarks.peers.work:even_words",),
        rollout=RolloutConfig(
            max_prompt_length=shape.prompt_length, max_new_tokens=shape.max_new_tokens, slots=shape.slots
        ),
        grpo=GRPOConfig(num_generations=shape.samples),
        training=RLTrainingConfig(max_steps=100, prompts_per_step=shape.prompts),
        evaluation=EvalConfig(prompts=1),
    )


def _described(c: ModelConfig) -> dict[str, Any]:
    """Return the shape of a Llama under the names of its config.json."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
    }
