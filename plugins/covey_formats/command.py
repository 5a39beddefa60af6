"""Execute `covey export` and `covey push`, and describe the commands of this package. Nothing here imports JAX."""

import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Literal

from covey.cli.checks import check_source
from covey.cli.commands import JSON, Command, Option
from covey.cli.parse import Line, build_settings
from covey.config import recipe
from covey.config.base import Config
from covey.display import echo
from covey.errors import CoveyError
from covey.files import has_file
from covey.monitor.run_files import RunFile, run_files
from covey_report.run_files import REPORT

TYPES = ("float32", "bfloat16")
"""Types of weights in every format that has them merged."""
QUANTISED = re.compile(r"i?q\d\w*", re.IGNORECASE)
"""Pattern of llama.cpp's names of quantised types: q4_k_m, iq3_xs."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ExportOptions(Config):
    """Settings of `covey export` and `covey push`."""

    format: Literal["hf", "peft", "gguf"] = "hf"
    """hf: a Hugging Face folder, adapters merged. peft: the adapters alone. gguf: one file for llama.cpp, adapters
    merged.
    """
    dtype: str | None = None
    """Type of the weights written: float32 or bfloat16, or q8_0 for gguf; that of the run when not set."""
    shard_size: str = "5GB"
    """hf: largest size of a file of weights: 500MB, 5GB, or a number of bytes."""

    @property
    def shard_bytes(self) -> int:
        """Return `shard_size` in bytes.

        Raises:
            CoveyError: it is not a size.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", self.shard_size.strip(), re.IGNORECASE)
        size = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
        if size < 1:
            raise CoveyError(f"--shard-size is {self.shard_size!r}", want="bytes, as in 500MB or 5GB")
        return size

    def check_dtype(self) -> None:
        """Check that the format can hold the type.

        Raises:
            CoveyError: it cannot.
        """
        types = (*TYPES, *(("q8_0",) if self.format == "gguf" else ()))
        if self.format == "peft" and self.dtype:
            raise CoveyError("--dtype has no meaning for adapters: they are written in float32", fix="leave it out")
        if self.dtype is not None and self.dtype not in types:
            quantised = self.format == "gguf" and QUANTISED.fullmatch(self.dtype) is not None
            raise CoveyError(
                f"--dtype is {self.dtype!r}" + ", which Covey does not write" * quantised,
                want=f"for --format {self.format} one of: {', '.join(types)}",
                fix=f"--dtype bfloat16, then llama.cpp's own: llama-quantize model.gguf OUT.gguf {self.dtype.upper()}"
                if quantised
                else "",
            )


def export(line: Line) -> None:
    """Execute `covey export RUN_OR_MODEL --out FOLDER [settings]`."""
    (source,), options = line.arguments, build_settings(ExportOptions, line)
    if "--out" not in line.options:
        raise CoveyError("no folder is given to export to", want=line.command.synopsis)
    options.check_dtype()
    shard_bytes = options.shard_bytes
    check_source(source)
    from covey.parallel import processes
    from covey_formats import export as exporting

    with processes.start():
        exporting.export(source, Path(line.options["--out"]).expanduser(), options.format, options.dtype, shard_bytes)


def push(line: Line) -> int:
    """Execute `covey push RUN hf:org/name`: publish the run after asking. Return 0, or 2 if the user said no.

    Raises:
        CoveyError: it is no run with a checkpoint, the question cannot be asked, or the hub refuses.
    """
    run, target = Path(line.arguments[0]), re.fullmatch(r"hf:([\w.-]+/[\w.-]+)", line.arguments[1], re.ASCII)
    if not target:
        raise CoveyError(f"{line.arguments[1]!r} names no repository", want="hf:org/name", fix=line.command.usage[0])
    options = build_settings(ExportOptions, line)
    options.check_dtype()
    shard_bytes = options.shard_bytes
    recipe.require_run(run)
    check_source(str(run))
    records = records_of(run, line.options)
    for text in describe(run, target[1], records, options.format):
        echo(text)
    if "--yes" not in line.options and not _agrees():
        echo("nothing was published")
        return 2
    from covey_formats.export import publish  # late: it needs JAX

    publish(
        run,
        target[1],
        [file.name for file in records],
        "--private" in line.options,
        options.format,
        options.dtype,
        shard_bytes,
    )
    return 0


def records_of(run: Path, switches: Container[str]) -> list[RunFile]:
    """Return the files of the run that are published with the model; the report is written anew.

    Raises:
        ResumeError: one of them is a link.
    """
    published = {
        "always": True,
        "unless --no-report": "--no-report" not in switches,
        "with --samples": "--samples" in switches,
        "never": False,
    }
    files = [file for file in run_files() if published[file.publish]]
    return [file for file in files if has_file(run, file.name) or file.name == REPORT]


def describe(run: Path, repository: str, records: Sequence[RunFile], form: str) -> list[str]:
    """Return lines that name the files to be published and their contents."""
    lines = [f"{run} would be published as hf:{repository}", f"  the trained model ({form}) and its card README.md"]
    lines += [f"  {file.name}: {file.content}" for file in records]
    data = [file.name for file in records if file.publish != "always"]
    if data:
        lines.append(f"text of your data and of the model becomes public, in {' and '.join(data)}")
        lines.append("  --no-report leaves the report out")
    return lines


def _agrees() -> bool:
    if not sys.stdin.isatty():
        raise CoveyError("nobody is there to be asked whether to publish this", fix="--yes, if that is meant")
    try:
        return input("publish this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


EXPORT = Command(
    "export", "covey_formats.command:export", "RUN_OR_MODEL --out FOLDER",
    "write it for transformers, PEFT or llama.cpp",
    """\
Writes a model for others to use: a Hugging Face folder with the adapters merged, a PEFT adapter, or a GGUF file.
What was written is read back, and its logits are compared with those of the model, before it is put in place.""",
    """\
examples
  covey export runs/quickstart-1 --out exported
  covey export runs/quickstart-1 --out exported --dtype bfloat16 --shard-size 2GB
  covey export runs/gsm8k-smollm2-1 --out adapter --format peft
  covey export smollm2-135m --out for-llama-cpp --format gguf --dtype q8_0""",
    options=(Option("--out", "FOLDER", "folder to write: a new or an empty one. No file is ever replaced"),),
    settings=(ExportOptions,),
    follows="chat",
)  # fmt: skip

PUSH = Command(
    "push", "covey_formats.command:push", "RUN hf:org/name", "publish a run on the Hugging Face hub",
    """\
Publishes a run on the Hugging Face hub: the trained model with its card, recipe.yaml, metrics.jsonl, summary.json and
report.html. The report holds prompts, so text of your data, and completions of the model: all of it is published. It
says so and asks first. It needs the extra 'hub' and a login (hf auth login).""",
    """\
examples
  covey push runs/quickstart-1 hf:me/covey-quickstart --private
  covey push runs/quickstart-1 hf:me/covey-quickstart --yes --no-report --format peft""",
    least=2,
    most=2,
    options=(
        Option("--yes", help="do not ask, as scripts need it"),
        Option("--private", help="make the repository private, if it is new"),
        Option("--samples", help="publish samples.jsonl too: every completion, with its prompt"),
        Option("--no-report", help="do not publish report.html"),
    ),
    settings=(ExportOptions,),
    follows="compare",
)  # fmt: skip

MODELS = Command(
    "models", "covey_formats.models:models", "[SOURCE]", "the known models, or the facts of one",
    """\
Lists models that are known by name: family, number of weights, licence, chat template, tools, whether it was trained
here, and the memory that training needs at least. With a source (a folder, a .gguf file, hf:org/name, a run) it tells
the facts of that model, from its config and its tokenizer.""",
    """\
examples
  covey models
  covey models smollm2-135m
  covey models runs/quickstart-1 --json""",
    least=0,
    options=(JSON,),
    follows="recipes",
)  # fmt: skip
