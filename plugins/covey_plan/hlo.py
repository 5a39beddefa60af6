"""Reading of optimised HLO text, `compiled.as_text()`: each instruction with its bytes and the loops around it.

XLA's `cost_analysis` counts the body of a loop once and names no collective. Here a program is walked from its entry
through loops, conditionals, calls and asynchronous wrappers, so that an instruction in a loop is known to be in it, and
how often it runs. Instructions inside fusions are left out: they have no buffers of their own. Collectives are not: the
compiler for TPUs puts one that runs beside other work into a chain of fusions, where it counts once. It writes a
reduce-scatter as a fusion of its own, of an all-reduce and a slice, for which the device waits.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

KERNELS = ("tpu_custom_call", "triton_kernel_call", "__gpu$xla.gpu.triton")
"""Targets of the custom calls that run a kernel of Pallas."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1, "all-reduce": 2}
"""Number of times that each collective sends its data around a ring; others send it once to one device."""

SCATTER_FUSION = "all-reduce-scatter"
"""Beginning of the name of the computation that is a reduce-scatter on TPUs."""


Loops = tuple[int | None, ...]
"""Trip counts of the loops around an instruction, outermost first; None where the program computes it."""


@dataclass(frozen=True)
class Instruction:
    """An instruction at one place of a program.

    Attributes:
        opcode: opcode; of an asynchronous pair the first half alone appears, without its `-start`.
        shapes: types of its results, such as `bf16[2,1024]`.
        bytes: size of its results or of its operands, whichever is larger, on one device.
        loops: trip counts of the loops around it.
        cycles: the compiler's estimate for one execution; 0 where it gives none, as for kernels.
        kernel: whether it calls a kernel of Pallas, which has no estimate.
        asynchronous: whether it runs at the same time as other instructions.
        group: number of devices that a collective connects; None where its text does not say.
    """

    opcode: str
    shapes: tuple[str, ...]
    bytes: int
    loops: Loops
    cycles: int = 0
    kernel: bool = False
    asynchronous: bool = False
    group: int | None = None

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a collective over a ring of its group: (n - 1)/n of what is gathered, scattered
        or exchanged, and twice that of what is summed on all devices; all of it where the group is not known.
        """
        share = 1 - 1 / self.group if self.group and self.opcode in RING_PASSES else 1.0
        return round(self.bytes * share * RING_PASSES.get(self.opcode, 1))

    @property
    def hops(self) -> int:
        """Number of devices that the data of a collective passes, one after the other, if a ring runs in both
        directions; 1 where the group is not known.
        """
        return RING_PASSES.get(self.opcode, 1) * math.ceil((self.group or 2) / 2)

    @property
    def executions(self) -> int:
        """Number of times it runs in a call of the program; loops of unknown length count once."""
        return math.prod(trips or 1 for trips in self.loops)


@dataclass(frozen=True)
class _Line:
    name: str
    type: str
    opcode: str
    rest: str


class Program:
    """The optimised HLO of one program.

    Args:
        text: what `compiled.as_text()` returns.
    """

    def __init__(self, text: str):
        self._computations, self._entry = _parse(text)

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Instructions of the program, each once for every place from which its computation is called."""
        return list(self._walk(self._entry, ()))

    def collectives(self) -> list[Instruction]:
        """Return the collectives, in program order."""
        return self.of(*COLLECTIVES)

    def of(self, *opcodes: str) -> list[Instruction]:
        """Return the instructions with one of `opcodes`, in program order."""
        return [instruction for instruction in self.instructions if instruction.opcode in opcodes]

    def _walk(self, computation: str, loops: Loops) -> Iterator[Instruction]:
        lines = self._computations[computation]
        types, chains = _types(lines), set()
        for line in lines:
            if not line.opcode.endswith("-done"):
                yield _instruction(line, types, loops)
            scatters = any(name.startswith(SCATTER_FUSION) for name in _attributes(line, "calls"))
            for fused, inside in self._fused_collectives(line):
                channel = re.search(r"channel_id=(\d+)", fused.rest)
                if channel is None or channel[1] not in chains:
                    yield _fused(_instruction(fused, inside, loops), scatters)
                chains |= {channel[1]} if channel else set()
            inner = (*loops, self._trip_count(line)) if line.opcode == "while" else loops
            for called in _called(line):
                yield from self._walk(called, inner)

    def _fused_collectives(self, line: _Line) -> Iterator[tuple[_Line, dict[str, str]]]:
        """Yield the collectives in a fusion, and in the fusions that it contains, with the types around each."""
        for name in _attributes(line, "calls") if line.opcode == "fusion" else ():
            lines = self._computations.get(name, [])
            for inner in lines:
                if inner.opcode.removesuffix("-start") in COLLECTIVES:
                    yield inner, _types(lines)
                yield from self._fused_collectives(inner)

    def _trip_count(self, line: _Line) -> int | None:
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line.rest)
        return int(known[1]) if known else _bound(self._computations[_attributes(line, "condition")[0]])


def shape_bytes(shape: str) -> int:
    """Return the size of an array type, or of all arrays of a tuple type.

    >>> shape_bytes("bf16[2,1024]{1,0:T(8,128)(2,1)}"), shape_bytes("(f32[], s4[3])"), shape_bytes("token[]")
    (4096, 6, 0)
    """
    return sum(
        -(-math.prod(int(size) for size in sizes.split(",") if size) * BITS[dtype] // 8)
        for dtype, sizes in re.findall(r"\b(\w+)\[([0-9,]*)\]", shape)
        if dtype in BITS
    )


def _parse(text: str) -> tuple[dict[str, list[_Line]], str]:
    computations: dict[str, list[_Line]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if line and not line[0].isspace() and (head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif parsed := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
            lines.append(_Line(parsed[1], *_split_type(parsed[2])))
    return computations, entry


def _split_type(text: str) -> tuple[str, str, str]:
    """Split the right-hand side of an instruction into its type, its opcode and the rest."""
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    end = next((i for i, depth in enumerate(depths) if depth == 0 and text[i] == " "), len(text))
    opcode, _, rest = text[end + 1 :].partition("(")
    return text[:end], opcode, rest


def _bound(condition: list[_Line]) -> int | None:
    """Return n of a loop's condition `i < n`. It is the number of iterations, since the loops that JAX makes count from
    0; XLA for TPUs does not state it otherwise.
    """
    constants = {line.name: int(n[1]) for line in condition if (n := re.match(r"(\d+)\)", _of(line, "constant")))}
    compare = "".join(_of(line, "compare") for line in condition)
    operands = re.match(r"%[\w.\-]+, %([\w.\-]+)\)", compare)
    return constants.get(operands[1]) if operands and "direction=LT" in compare else None


def _of(line: _Line, opcode: str) -> str:
    return line.rest if line.opcode == opcode else ""


def _called(line: _Line) -> list[str]:
    """Return the computations that an instruction runs as part of the program."""
    match line.opcode:
        case "while":
            return _attributes(line, "condition") + _attributes(line, "body")
        case "conditional":
            return _attributes(line, "branch_computations", "true_computation", "false_computation")
        case "call":
            return _attributes(line, "to_apply")
        case "async-start":
            return _attributes(line, "calls")
        case _:
            return []


def _types(lines: list[_Line]) -> dict[str, str]:
    return {line.name: line.type for line in lines}


def _attributes(line: _Line, *names: str) -> list[str]:
    values = re.findall(rf"\b(?:{'|'.join(names)})=(\{{[^{{}}]*\}}|%?[\w.\-]+)", line.rest)
    return [name for value in values for name in re.findall(r"[\w.\-]+", value)]


def _instruction(line: _Line, types: dict[str, str], loops: Loops) -> Instruction:
    operands = re.findall(r"%([\w.\-]+)", line.rest.partition(")")[0])
    shapes = re.findall(r"\b\w+\[[0-9,]*\]", line.type)
    if line.opcode.endswith("-start") and line.opcode != "all-reduce-start":
        shapes = shapes[len(operands) :]  # the first are the operands again
    size = max(sum(map(shape_bytes, shapes)), sum(shape_bytes(types.get(name, "")) for name in operands))
    opcode = line.opcode.removesuffix("-start")
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line.rest)
    return Instruction(
        opcode,
        tuple(shapes),
        size,
        loops,
        int(cycles[1]) if cycles else 0,
        opcode == "custom-call"
        and re.search(f'custom_call_target="({"|".join(map(re.escape, KERNELS))})"', line.rest) is not None,
        line.opcode.endswith("-start"),
        _group(line.rest) if opcode in COLLECTIVES else None,
    )


def _fused(collective: Instruction, scatters: bool) -> Instruction:
    """Return a collective that was found in a fusion as what it does; see `SCATTER_FUSION`."""
    return replace(collective, opcode="reduce-scatter") if scatters else replace(collective, asynchronous=True)


def _group(attributes: str) -> int | None:
    """Return the size of a collective's groups, in any of the three forms in which XLA writes them.

    >>> _group("replica_groups={{0,2},{1,3}}"), _group("replica_groups=[2,4]<=[8]"), _group("replica_groups={}")
    (2, 4, None)
    >>> _group("replica_groups=mesh['x'=2,'y'=4] {'x','y'}")
    8
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\[\]]*)\] \{([^{}]*)\}", attributes):
        sizes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in named[2].split(","))
    return None


_BY_BITS = {1: "pred", 4: "s4 u4 f4e2m1fn", 8: "s8 u8 f8e4m3fn f8e5m2", 16: "s16 u16 bf16 f16", 32: "s32 u32 f32"}
_BY_BITS |= {64: "s64 u64 f64 c64", 128: "c128"}
BITS = {dtype: max(bits, 8) if dtype == "pred" else bits for bits, names in _BY_BITS.items() for dtype in names.split()}
"""Bits of an element of each type."""
