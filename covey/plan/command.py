"""Execute `covey plan` once its words are parsed. JAX is imported only after its environment is set."""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from covey.config import recipe
from covey.display import make_console
from covey.errors import CoveyError
from covey.plan.machines import Target

if TYPE_CHECKING:
    from covey.plan.lengths import Lengths
    from covey.plan.memory import Outline  # late in what follows: it needs JAX
    from covey.plan.plan import Load

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


def plan(
    source: str,
    settings: Sequence[str],
    target: Target,
    *,
    prompt: int | None = None,
    completions: Sequence[int] = (),
    samples: Path | None = None,
    as_json: bool = False,
    here: bool = False,
    quick: bool = False,
    advise: bool = False,
    price: float | None = None,
) -> None:
    """Print the plan of the recipe `source` for `target`.

    Args:
        settings: changes of the recipe, as on the command line.
        prompt, completions, samples: expected lengths, as for `expected_lengths`.
        as_json: print one line of JSON instead of tables.
        here: also run two steps on this machine, and print measured beside predicted memory.
        quick: print the outline, and compile nothing.
        advise: print the meshes of these devices instead, the fastest first.
        price: of an hour of one device, if the cost of the run is to be told.

    Raises:
        CoveyError: see `plan.make_plan`; or `here` for devices that are not this machine's.
    """
    if here and target.platform != "cpu":
        raise CoveyError(f"--here measures this machine, and --on names {target.name}", fix="leave out --on")
    prepare_environment(target)

    from covey.plan.lengths import expected_lengths

    def load(more: Sequence[str]) -> recipe.Recipe | recipe.SFTRecipe:
        return recipe.load_any(source, [*settings, *more])

    ready = load(())
    if quick:
        _outline(ready, target, as_json)
        return
    lengths = expected_lengths(ready, prompt, completions, samples)
    if advise:
        _advise(load, target, lengths, as_json)
    else:
        _plan(load, ready, target, lengths, as_json=as_json, here=here, price=price)


def _outline(ready: recipe.Recipe | recipe.SFTRecipe, target: Target, as_json: bool) -> None:
    """Print the outline of a run, for which nothing is compiled."""
    from covey.plan import memory
    from covey.plan.plan import outline_for

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
    from covey.plan import here as measuring
    from covey.plan import table
    from covey.plan.cost import cost_of
    from covey.plan.plan import make_plan

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
    from covey.plan import advise

    console = Console(stderr=True)
    with console.status("") as status:
        advice = advise.advise(load, target, partial(_tell, console, status), lengths)
    if as_json:
        print(json.dumps({"on": target.name, "meshes": advise.as_json(advice)}))
    else:
        advise.show(advice, make_console())


def _show_first(status: Status, outline: "Outline") -> None:
    """Print an outline while the status is stopped, which would redirect it."""
    from covey.plan.memory import show

    status.stop()
    show(outline, make_console())
    status.start()


def prepare_environment(target: Target) -> None:
    """Set the variables with which JAX compiles for `target`, before it is imported.

    Programs are not kept on disk, so that seconds and memory are those of a first run.
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
