"""Execute `covey plan`: what a run needs on a machine that need not be there. JAX comes after its environment."""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from covey.cli.checks import check_source
from covey.cli.commands import JSON, Command, Option
from covey.cli.parse import Line, is_count
from covey.config import recipe
from covey.display import make_console
from covey.errors import CoveyError
from covey_plan.machines import EXAMPLES, Target, parse_target

if TYPE_CHECKING:
    from covey_plan.lengths import Lengths
    from covey_plan.memory import Outline  # late in what follows: it needs JAX
    from covey_plan.plan import Load

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
"""Variables with which libtpu compiles without asking for a TPU, beside another process that does. Without the last two
it reports that it could not find them; the type does not limit the topologies.
"""


COMMAND = Command(
    "plan", "covey_plan.command:plan", "NAME_OR_YAML", "what a run needs, on this or another machine",
    """\
Says what a run of a recipe needs, without its weights: memory by part, flops and bytes by phase, the least and the
expected seconds of a step, what moves between devices, and the first setting to change where it does not fit.
What follows from shapes alone is printed first: the arrays on a device, tokens of a step, checkpoints on the disk. Then
all programs of the run are compiled for the machine, which need not be there; a large model takes minutes.""",
    """\
examples
  covey plan quickstart
  covey plan quickstart --quick
  covey plan quickstart --here
  covey plan gsm8k-gemma2 --on v5e:2x2
  covey plan gsm8k-gemma2 --on h100:1 --mesh.tp 1 --model.source FOLDER
  covey plan gsm8k-gemma2 --on v5e:2x2 --samples runs/mine
  covey plan gsm8k-gemma2 --on v5e:2x2 --advise
  covey plan gsm8k-gemma2 --on h100:4 --price-per-hour 2.5
  covey plan sft-smollm2 --data.path mine.jsonl --lora.rank 0 --json

The settings are those of covey train and covey sft. Of the model only its config.json, its tokenizer and the names in
its files are read. docs/calibration.md holds plans against published runs.""",
    options=(
        Option(
            "--on",
            "MACHINE",
            "cpu (this one), v5e:2x4, v5p:2x2x2, v6e:2x4, h100:8, h200:8, b200:8, or h100:2x8 for two processes of 8. "
            "TPUs need the extra 'plan', GPUs the plugin for CUDA. The recipe's mesh has as many devices",
        ),
        JSON,
        Option("--quick", help="stop after what follows from shapes, and compile nothing"),
        Option(
            "--advise",
            help="plan every mesh of the machine's devices, and tell the settings of the fastest; as many "
            "compilations as there are meshes",
        ),
        Option("--here", help="run two steps too, and compare this machine's memory with the plan's"),
        Option("--prompt-tokens", "N", "mean length of a prompt; the longest allowed when not given"),
        Option(
            "--completion-tokens",
            "N",
            "mean length of a completion; 35 % of the longest allowed when not given. Any token may be the "
            "last with the same probability. With several numbers, lengths that are equally frequent",
        ),
        Option("--samples", "RUN", "take the lengths from a run folder, or from its samples.jsonl"),
        Option("--price-per-hour", "PRICE", "tell what the run costs, at this price of an hour of one device"),
    ),
    settings_of=("train", "sft"),
    values={"MACHINE": EXAMPLES},
)  # fmt: skip
DOCTOR = Command(
    "doctor", "covey_plan.doctor:doctor", "", "what this machine has, and what is missing",
    """\
Says what this machine has (Python, JAX and its devices, memory, disk, optional packages),
and how to get what is missing.""",
    least=0,
    most=0,
    follows="completion",
)  # fmt: skip


def plan(line: Line) -> None:
    """Execute `covey plan NAME_OR_YAML [--on MACHINE] [--advise] [--json] [--here] [--quick] [--price-per-hour X]
    [settings]`."""
    if len(chosen := [f for f in ("--quick", "--here", "--advise") if f in line.options]) > 1:
        raise CoveyError(" beside ".join(chosen), want="one of them", fix=f"leave {' and '.join(chosen[1:])} out")
    prompt, completions = line.whole_number("--prompt-tokens"), _whole_numbers(line, "--completion-tokens")
    samples = Path(line.options["--samples"]) if "--samples" in line.options else None
    if samples and completions:
        raise CoveyError("--samples beside --completion-tokens", want="one of them", fix="leave one of them out")
    price = _positive_number(line, "--price-per-hour")
    if price and (without := [flag for flag in ("--quick", "--advise") if flag in line.options]):
        raise CoveyError(
            f"--price-per-hour beside {without[0]}",
            want="a plan with the seconds of a step",
            fix=f"leave {without[0]} out",
        )
    target = parse_target(line.options.get("--on", "cpu"))
    if "--here" in line.options and target.platform != "cpu":
        raise CoveyError(f"--here measures this machine, and --on names {target.name}", fix="leave out --on")
    source, as_json = line.arguments[0], "--json" in line.options
    check_source(recipe.load_any(source, line.settings).model.source)
    prepare_environment(target)

    from covey_plan.lengths import expected_lengths

    def load(more: Sequence[str]) -> recipe.Recipe | recipe.SFTRecipe:
        return recipe.load_any(source, [*line.settings, *more])

    ready = load(())
    if "--quick" in line.options:
        _outline(ready, target, as_json)
        return
    lengths = expected_lengths(ready, prompt, completions, samples)
    if "--advise" in line.options:
        _advise(load, target, lengths, as_json)
    else:
        _plan(load, ready, target, lengths, as_json=as_json, here="--here" in line.options, price=price)


def _positive_number(line: Line, flag: str) -> float | None:
    """Return the value of the option `flag` as a number above 0; None if it is not given."""
    if (text := line.options.get(flag)) is None:
        return None
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise CoveyError(f"{flag} is {text!r}", want="a number above 0, as in 2.5")


def _whole_numbers(line: Line, flag: str) -> tuple[int, ...]:
    """Return the value of the option `flag` as whole numbers with commas between them; none if it is not given."""
    texts = line.options[flag].split(",") if flag in line.options else []
    if not all(map(is_count, texts)):
        want = "a whole number from 1 up, or several with commas between them"
        raise CoveyError(f"{flag} is {line.options[flag]!r}", want=want)
    return tuple(map(int, texts))


def _outline(ready: recipe.Recipe | recipe.SFTRecipe, target: Target, as_json: bool) -> None:
    """Print the outline of a run, for which nothing is compiled."""
    from covey_plan import memory
    from covey_plan.plan import outline_for

    outline = outline_for(ready, target)
    if as_json:
        print(json.dumps({"recipe": ready.name, "on": target.name, **memory.to_json(outline)}))
    else:
        memory.show(outline, make_console())


def _plan(
    load: "Load",
    ready: recipe.Recipe | recipe.SFTRecipe,
    target: Target,
    lengths: "Lengths",
    *,
    as_json: bool,
    here: bool,
    price: float | None,
) -> None:
    """Print the plan itself; arguments as for `plan`."""
    from covey_plan import here as measuring
    from covey_plan import table
    from covey_plan.cost import cost_of
    from covey_plan.plan import make_plan

    console = Console(stderr=True)
    with console.status("") as status:
        show_first = partial(_show_first, status) if not as_json else lambda first: None
        needs = make_plan(load, target, partial(_tell, console, status), lengths, show_first)
        figures = table.as_json(needs)
        cost = cost_of(needs, ready, price) if price else None
        figures |= {"cost": cost.to_json()} if cost else {}
        if here:
            _tell(console, status, "running two steps")
            figures["measured"] = measuring.measure(load(measuring.overrides(ready)))
    if as_json:
        print(json.dumps(figures))
        return
    table.show(needs, make_console())
    if cost:
        make_console().print(cost.in_words(), soft_wrap=True, highlight=False, markup=False)
    if here:
        measuring.show(figures, make_console())


def _advise(load: "Load", target: Target, lengths: "Lengths", as_json: bool) -> None:
    """Print the meshes of `target`, the fastest first."""
    from covey_plan import advise

    console = Console(stderr=True)
    with console.status("") as status:
        advice = advise.advise(load, target, partial(_tell, console, status), lengths)
    if as_json:
        print(json.dumps({"on": target.name, "meshes": advise.as_json(advice)}))
    else:
        advise.show(advice, make_console())


def _show_first(status: Status, outline: "Outline") -> None:
    """Print an outline while the status is stopped, which would redirect it."""
    from covey_plan.memory import show

    status.stop()
    show(outline, make_console())
    status.start()


def prepare_environment(target: Target) -> None:
    """Set the variables with which JAX compiles for `target`, before it is imported.

    Programs are not kept on disk, so that seconds and memory are measured as in a first run.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""}
    if target.platform == "tpu":
        os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}


def _tell(console: Console, status: Status, text: str) -> None:
    """Show the present phase: in place on a terminal, else as a line."""
    if console.is_terminal:
        status.update(text)
    else:
        console.print(text, soft_wrap=True, highlight=False, markup=False)
