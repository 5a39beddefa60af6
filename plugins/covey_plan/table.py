"""A plan as tables for the terminal, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from covey_plan.compiled import CompiledProgram
from covey_plan.hlo import Instruction, Loops
from covey_plan.memory import SYNC
from covey_plan.plan import Plan
from covey_plan.work import HOST_SLOT, HOST_TURN

SCHEMA = 2
"""Version of the JSON; a name in it is never given another meaning."""


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan in JSON's types: bytes, flops and seconds, all but totals of one device."""
    machine, groups = plan.machine, _groups(plan)
    measured: dict[str, float | None] = {program.name: program.seconds for program in reversed(plan.programs)}
    measured["score of the reference"] = measured.get("score")
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
            "completion_tokens_of": list(plan.lengths.completions),
            "lengths": plan.lengths.origin,
            "share_of_flops": machine.share,
            "share_of_bandwidth": machine.memory_share,
            "collective_seconds": machine.latency,
            "hop_seconds": machine.hop,
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
        "inventory": [entry._asdict() | {"compile_seconds": measured.get(entry.name)} for entry in plan.inventory],
        "phases": [
            {
                "name": time.phase.name, "flops": time.phase.flops, "bytes": time.phase.bytes,
                "link_bytes": time.link_bytes, "compute_seconds": time.compute, "memory_seconds": time.memory,
                "link_seconds": time.link, "bound": time.bound, "compiled_seconds": time.compiled,
                "expected_seconds": time.expected, "expected_parts": dict(time.parts),
            }
            for time in plan.phases
        ],
        "rollout": _rollout(plan),
        "step_seconds": {
            "roofline": sum(time.roofline for time in plan.phases),
            "expected": plan.step_seconds,
        },
        "sampling_ahead": None if plan.overlap is None else plan.overlap.to_json(),
        "compile_seconds": plan.compile_seconds,
        "tried": [asdict(trial) | {"settings": list(trial.settings)} for trial in plan.trials],
        "left_out": list(plan.not_counted),
    }  # fmt: skip


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """Return mesh and memory of each group of devices: the actor's, then the rollout's own."""
    meshes, process = {"actor": plan.mesh, "rollout": plan.rollout_mesh}, {"process": plan.process}
    return [
        {"role": role, "mesh": dict(meshes[role]),
         "parts": {part: size for part, size in {**process, **arrays.most()}.items() if size},
         "peak": peak, "left": round(plan.machine.memory - peak)}
        for role, arrays in plan.arrays._asdict().items()
        if arrays and (peak := plan.peak_of(arrays))
    ]  # fmt: skip


def _rollout(plan: Plan) -> dict[str, Any] | None:
    """Return the calls of the rollout of one process, and the longest completion, which decides when it ends."""
    schedule = next((time.phase.timeline for time in plan.phases if time.phase.timeline), None)
    if schedule is None:
        return None
    return {**asdict(schedule), "use": schedule.use, "longest": max(plan.lengths.completions)}


def _program(plan: Plan, program: CompiledProgram) -> dict[str, Any]:
    return {
        "name": program.name,
        "compile_seconds": program.seconds,
        "arguments": program.arguments,
        "results": program.results,
        "temporary": program.temporary,
        "refused": program.refused,
        "compiling": program.compiling,
        "peak": plan.process + plan.arrays.of(program.name).peak(program),
        "kernels": sum(program.kernels),
        "collectives": _by_loop(program.collectives),
    }


def _by_loop(collectives: Sequence[Instruction]) -> list[dict[str, Any]]:
    """Return the collectives of each kind in each loop: their number, and their bytes in a turn of the loop."""
    groups: dict[tuple[str, Loops, bool], list[Instruction]] = {}
    for one in collectives:
        groups.setdefault((one.opcode, one.loops, one.asynchronous), []).append(one)
    return [
        {
            "opcode": opcode, "loops": list(loops), "count": len(group),
            "bytes": sum(one.bytes for one in group), "sent": sum(one.sent for one in group),
            "asynchronous": asynchronous, "hops": sum(one.hops for one in group),
        }
        for (opcode, loops, asynchronous), group in groups.items()
    ]  # fmt: skip


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    rollout = f"; rollout {_mesh(plan.rollout_mesh)}" if plan.rollout_mesh else ""
    console.print(f"[bold]{plan.recipe}[/] on {plan.target.name} ({_mesh(plan.mesh)}{rollout})")
    for table in _tables(as_json(plan)):
        if table.row_count:
            console.print(table)
    for line in _assumptions(plan):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    _show_verdict(plan, console)


def _mesh(sizes: Mapping[str, int]) -> str:
    """Return a mesh in words.

    >>> _mesh({"data": 2, "fsdp": 1, "tp": 4})
    'data 2 × tp 4'
    """
    return " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one device"


def _tables(plan: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a plan in JSON's types; some may have no rows."""
    return [
        *(_memory(group, len(plan["devices"]) > 1) for group in plan["devices"]),
        _programs(plan),
        _inventory(plan["inventory"]),
        _phases(plan),
        _parts(plan["phases"]),
        _collectives(plan["programs"]),
    ]


def _memory(group: Mapping[str, Any], several: bool) -> Table:
    title = f"memory of a device of the {group['role']}" if several else "memory of a device"
    sizes = group["parts"] | ({"peak": group["peak"]} if several else {})
    return make_table([title, "GB"], [(part, _gb(size)) for part, size in sizes.items()])


def _programs(plan: Mapping[str, Any]) -> Table:
    """Return the table of programs; of programs with one name, the highest peak."""
    rows: dict[str, Sequence[str]] = {}
    for one in sorted(plan["programs"], key=lambda program: -program["peak"]):
        sizes = [_gb(one[key]) for key in ("temporary", "results", "peak")]
        rows.setdefault(one["name"], (one["name"], *sizes, f"{one['compile_seconds']:.1f}"))
    ordered = [rows[name] for name in dict.fromkeys(one["name"] for one in plan["programs"])]
    sync = [(SYNC, "", "", _gb(plan["sync"]["peak"]), "")] if plan["sync"] else []
    return make_table(["program", "temporary GB", "results GB", "peak GB", "compiled in s"], [*ordered, *sync])


def _inventory(entries: list[dict[str, Any]]) -> Table:
    seconds = ["" if (s := one["compile_seconds"]) is None else f"{s:.1f}" for one in entries]
    rows = [(one["name"], one["shape"] or "all weights", s) for one, s in zip(entries, seconds, strict=True)]
    return make_table([f"programs of a run: {len(entries)}", "shape", "compiled in s"], rows)


def _phases(plan: Mapping[str, Any]) -> Table:
    rows = [
        (
            phase["name"],
            *(f"{size:.3g}" for size in (phase["flops"] / 1e12, phase["bytes"] / 1e9, phase["link_bytes"] / 1e9)),
            f"{max(phase[f'{kind}_seconds'] for kind in ('compute', 'memory', 'link')):.3g}",
            phase["bound"],
            f"{phase['expected_seconds']:.3g}",
        )
        for phase in plan["phases"]
    ]
    roofline, expected = (f"{plan['step_seconds'][kind]:.3g}" for kind in ("roofline", "expected"))
    titles = ["phase of a step", "TFLOP", "GB read or written", "GB over links", "roofline s", "bound", "expected s"]
    return make_table(titles, [*rows, ("step", "", "", "", roofline, "", expected)])


def _parts(phases: list[dict[str, Any]]) -> Table:
    """Return the table of what the expected seconds of each phase are made of."""
    rows = [(phase["name"], part, f"{s:.3g}") for phase in phases for part, s in phase["expected_parts"].items()]
    return make_table(["expected seconds of", "part", "s"], rows)


def _collectives(programs: list[dict[str, Any]]) -> Table:
    rows = [
        (
            program["name"],
            f"{one['opcode']}, beside work" if one["asynchronous"] else one["opcode"],
            " × ".join("?" if n is None else str(n) for n in one["loops"]) or "none",
            str(one["count"]),
            f"{one['sent'] / 1e6:.3g}",
        )
        for program in programs
        for one in program["collectives"]
    ]
    return make_table(["collectives of", "kind", "loops", "number", "MB sent a turn"], rows)


def _assumptions(plan: Plan) -> Iterator[str]:
    """Yield the assumptions of a plan, one sentence in each line."""
    machine, lengths = plan.machine, plan.lengths
    yield (
        f"Assumed: prompts of {lengths.prompt} tokens, completions of {lengths.completion} in the mean and "
        f"{max(lengths.completions)} at most ({lengths.origin})."
    )
    if rollout := _rollout(plan):
        yield (
            f"Rollout: {rollout['steps']:,} decode steps in {rollout['chunks']:,} chunks until the longest completion "
            f"ends; {rollout['use']:.0%} of the slots' steps draw a token."
        )
    if any(time.compiled is not None for time in plan.phases):
        yield (
            "Expected seconds are the compiler's own estimates; attention kernels are charged from their flops, decode "
            "kernels from what they read."
        )
    if any(time.compiled is None for time in plan.phases):
        yield (
            f"Expected seconds assume {machine.share:.0%} of the peak flops and {machine.memory_share:.0%} of the "
            f"bandwidth where the compiler has no estimate."
        )
    if machine.latency:
        yield (
            f"A collective takes {machine.latency * 1e6:.0f} us before its first byte; the host, between two programs "
            f"of a rollout, {HOST_TURN * 1e3:.1f} ms and {HOST_SLOT * 1e6:.0f} us a slot, beside the next one."
        )
    yield f"Rates: {machine.source}."
    if plan.not_counted:
        yield f"Not counted: {', '.join(plan.not_counted)}."
    if plan.overlap is not None:
        yield plan.overlap.in_words()


def _show_verdict(plan: Plan, console: Console) -> None:
    memory = plan.machine.memory
    if plan.fits:
        console.print(f"[green]fits[/]: peak {_gb(plan.peak)} of {_gb(memory)} GB, {_gb(memory - plan.peak)} GB left")
        return
    console.print(f"[red]does not fit[/]: peak {_gb(plan.peak)} GB, and a device has {_gb(memory)} GB")
    for trial in plan.trials:
        fits = f"fits, {_gb(memory - trial.peak)} GB left" if trial.fits else "does not fit"
        console.print(f"  {' '.join(trial.settings)}: peak {_gb(trial.peak)} GB, {fits}", soft_wrap=True)
    if not plan.trials or not plan.trials[-1].fits:
        console.print("  no setting tried suffices: more devices are needed (--on, with --mesh.fsdp)", soft_wrap=True)


def make_table(titles: list[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with these titles of the columns; all but the first have numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, no_wrap=number == 0, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
