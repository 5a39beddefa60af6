"""A plan as a table for the terminal, and as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from covey.plan.compiled import CompiledProgram
from covey.plan.inventory import Entry
from covey.plan.memory import SYNC, Residents
from covey.plan.plan import Plan

SCHEMA = 1
"""Version of the JSON; a name in it is never given another meaning."""


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan in JSON's types: bytes, flops and seconds, all but totals of one device."""
    machine, groups = plan.machine, _groups(plan)
    return {
        "schema": SCHEMA,
        "recipe": plan.recipe,
        "on": plan.target.name,
        "mesh": dict(plan.mesh),
        "machine": {
            "flops": dict(machine.flops), "bandwidth": machine.bandwidth, "memory": machine.memory,
            "link": machine.link if machine.link < float("inf") else None, "source": machine.source,
        },
        "assumed": {
            "prompt_tokens": plan.lengths.prompt,
            "completion_tokens": plan.lengths.completion,
            "share_of_roofline": machine.share,
        },
        "memory": {
            "parts": groups[0]["parts"],
            "peak": plan.peak,
            "left": round(machine.memory - plan.peak),
        },
        "devices": groups,
        "fits": plan.fits,
        "programs": [_program(plan, program) for program in plan.programs],
        "sync": {"peak": plan.peaks[SYNC]} if SYNC in plan.peaks else None,
        "inventory": [
            {"name": one.name, "shape": one.shape, "compile_seconds": _measured(plan, one)} for one in plan.inventory
        ],
        "phases": [
            {
                "name": time.phase.name, "flops": time.phase.flops, "bytes": time.phase.bytes,
                "link_bytes": time.link_bytes, "compute_seconds": time.compute, "memory_seconds": time.memory,
                "link_seconds": time.link, "bound": time.bound, "compiled_seconds": time.compiled,
                "expected_seconds": time.expected,
            }
            for time in plan.phases
        ],
        "step_seconds": {
            "roofline": sum(time.roofline for time in plan.phases),
            "expected": sum(time.expected for time in plan.phases),
        },
        "compile_seconds": plan.compile_seconds,
        "tried": [{"settings": list(turn.settings), "peak": turn.peak, "fits": turn.fits} for turn in plan.turns],
        "left_out": list(plan.left_out),
    }  # fmt: skip


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """Return mesh and memory of each group of devices: those of the actor, then those of the rollout alone."""
    meshes = {"actor": plan.mesh, "rollout": plan.rollout_mesh}
    return [
        {"role": role, "mesh": dict(meshes[role]), "parts": _parts(plan.process, held), "peak": peak,
         "left": round(plan.machine.memory - peak)}
        for role, held in plan.residents._asdict().items()
        if held and (peak := plan.peak_of(held))
    ]  # fmt: skip


def _parts(process: int, held: Residents) -> dict[str, int]:
    return {part: size for part, size in {"process": process, **held.most()}.items() if size}


def _measured(plan: Plan, entry: Entry) -> float | None:
    """Return the seconds that a program of a run took to compile for this plan, which compiles the largest ones."""
    name = "score" if entry.name == "score of the reference" else entry.name
    return next((one.seconds for one in plan.programs if one.name == name), None)


def _program(plan: Plan, program: CompiledProgram) -> dict[str, Any]:
    return {
        "name": program.name,
        "compile_seconds": program.seconds,
        "arguments": program.arguments,
        "results": program.results,
        "temporary": program.temporary,
        "refused": program.refused,
        "compiling": program.compiling,
        "peak": plan.process + plan.residents.of(program.name).peak(program),
        "kernels": sum(program.kernels),
        "collectives": [
            {
                "opcode": one.opcode,
                "loops": list(one.loops),
                "count": one.count,
                "bytes": one.bytes,
                "sent": one.sent,
                "asynchronous": one.asynchronous,
            }
            for one in program.collectives
        ],
    }


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    found = as_json(plan)
    own = f"; rollout {_mesh(plan.rollout_mesh)}" if plan.rollout_mesh else ""
    console.print(f"[bold]{plan.recipe}[/] on {plan.target.name} ({_mesh(plan.mesh)}{own})")
    _show_memory(found, console)
    _show_inventory(found, console)
    _show_phases(found, console)
    _show_collectives(found, console)
    _show_assumptions(plan, console)
    _show_verdict(plan, console)


def _mesh(sizes: Mapping[str, int]) -> str:
    """Return a mesh in words.

    >>> _mesh({"data": 2, "fsdp": 1, "tp": 4})
    'data 2 × tp 4'
    """
    return " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one device"


def _show_memory(found: dict[str, Any], console: Console) -> None:
    for group in found["devices"]:
        of = f" of the {group['role']}" if len(found["devices"]) > 1 else ""
        parts = _table(f"memory of a device{of}", "GB")
        for part, size in group["parts"].items():
            parts.add_row(part, _gb(size))
        if of:
            parts.add_row("peak", _gb(group["peak"]))
        console.print(parts)
    programs = _table("program", "temporary GB", "results GB", "peak GB", "compiled in s")
    for one in _largest_by_name(found["programs"]):
        sizes = [_gb(one[key]) for key in ("temporary", "results", "peak")]
        programs.add_row(one["name"], *sizes, f"{one['compile_seconds']:.1f}")
    if found["sync"]:
        programs.add_row(SYNC, "", "", _gb(found["sync"]["peak"]), "")
    console.print(programs)


def _show_inventory(found: dict[str, Any], console: Console) -> None:
    entries = found["inventory"]
    table = _table(f"programs of a run: {len(entries)}", "shape", "compiled in s")
    for one in entries:
        seconds = one["compile_seconds"]
        table.add_row(one["name"], one["shape"] or "all weights", "" if seconds is None else f"{seconds:.1f}")
    if entries:
        console.print(table)


def _show_phases(found: dict[str, Any], console: Console) -> None:
    table = _table(
        "phase of a step", "TFLOP", "GB read or written", "GB over links", "roofline s", "bound", "expected s"
    )
    for phase in found["phases"]:
        roofline = max(phase[f"{of}_seconds"] for of in ("compute", "memory", "link"))
        sizes = [f"{phase['flops'] / 1e12:.3g}", f"{phase['bytes'] / 1e9:.3g}", f"{phase['link_bytes'] / 1e9:.3g}"]
        table.add_row(phase["name"], *sizes, _seconds(roofline), phase["bound"], _seconds(phase["expected_seconds"]))
    seconds = found["step_seconds"]
    table.add_row("step", "", "", "", _seconds(seconds["roofline"]), "", _seconds(seconds["expected"]))
    console.print(table)


def _show_collectives(found: dict[str, Any], console: Console) -> None:
    table = _table("collectives of", "kind", "loops", "number", "MB sent a turn")
    for program in found["programs"]:
        for one in program["collectives"]:
            loops = " × ".join("?" if n is None else str(n) for n in one["loops"]) or "none"
            kind = f"{one['opcode']}, beside work" if one["asynchronous"] else one["opcode"]
            table.add_row(program["name"], kind, loops, str(one["count"]), f"{one['sent'] / 1e6:.3g}")
    if table.row_count:
        console.print(table)


def _show_assumptions(plan: Plan, console: Console) -> None:
    machine, lengths = plan.machine, plan.lengths
    console.print(f"Assumed: prompts of {lengths.prompt} tokens, completions of {lengths.completion}.", soft_wrap=True)
    if any(time.compiled is not None for time in plan.phases):
        told = "Expected seconds are the compiler's own estimates; attention kernels are charged from their flops."
    else:
        told = f"Expected seconds assume {machine.share:.0%} of the roofline."
    console.print(told, soft_wrap=True)
    console.print(f"Rates: {machine.source}.", soft_wrap=True, highlight=False)
    if plan.left_out:
        console.print(f"Not counted: {', '.join(plan.left_out)}.", soft_wrap=True)


def _show_verdict(plan: Plan, console: Console) -> None:
    memory = plan.machine.memory
    if plan.fits:
        console.print(f"[green]fits[/]: peak {_gb(plan.peak)} of {_gb(memory)} GB, {_gb(memory - plan.peak)} GB left")
        return
    console.print(f"[red]does not fit[/]: peak {_gb(plan.peak)} GB, and a device has {_gb(memory)} GB")
    for turn in plan.turns:
        fits = f"fits, {_gb(memory - turn.peak)} GB left" if turn.fits else "does not fit"
        console.print(f"  {' '.join(turn.settings)}: peak {_gb(turn.peak)} GB, {fits}", soft_wrap=True)
    if not plan.turns or not plan.turns[-1].fits:
        console.print("  no setting tried suffices: more devices are needed (--on, with --mesh.fsdp)", soft_wrap=True)


def _largest_by_name(programs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for one in programs:
        if one["name"] not in found or one["peak"] > found[one["name"]]["peak"]:
            found[one["name"]] = one
    return list(found.values())


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"
