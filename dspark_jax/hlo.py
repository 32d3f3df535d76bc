"""What one call of a compiled program moves, read off its HLO text: bytes over links by kind, bytes of memory.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

import collections
import dataclasses
import re

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 1, "u4": 1, "c64": 8,
}  # fmt: skip
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "iota", "broadcast", "opt-barrier",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("),")[0])


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes a device and call: sent over links, by kind of collective, and read from or written to main memory."""

    collectives: dict[str, int]
    memory: int


def size(shape: str, fast_memory: bool = True) -> int:
    """Bytes of a shape or tuple of shapes as HLO writes it; without `fast_memory` only of what lies in main memory."""
    total = 0
    for kind, sizes, layout in _SHAPE.findall(shape):
        if not fast_memory and re.search(r"S\([1-9]\)", layout):
            continue
        count = 1
        for part in filter(None, sizes.split(",")):
            count *= int(part)
        total += count * _BYTES.get(kind, 0)
    return total


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head[1]
            computations[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(_Instruction(*found.groups()))
    return computations, entry


def _trip_count(condition: list[_Instruction]) -> int:
    """How often a counted loop runs: the bound that its condition compares with."""
    constants = [int(i.rest.split(")")[0]) for i in condition if i.op == "constant" and i.shape.startswith("s32[]")]
    return max(constants, default=1)


def _runs(computations: dict[str, list[_Instruction]], entry: str) -> tuple[dict[str, int], set[str]]:
    """How often each computation runs, and which are the inside of a fusion."""
    runs: collections.Counter[str] = collections.Counter({entry: 1})
    fused: set[str] = set()
    # Computations come after those that they call, so walking backwards meets every caller first.
    for name in reversed(list(computations)):
        for instruction in computations[name]:
            called = _CALLED.findall(instruction.rest)
            called += [part.strip().lstrip("%") for b in _BRANCHES.findall(instruction.rest) for part in b.split(",")]
            times = runs[name]
            if instruction.op == "while":
                condition = re.search(r"condition=%?([\w.\-]+)", instruction.rest)
                times *= _trip_count(computations.get(condition[1], [])) if condition else 1
            for callee in called:
                runs[callee] += times
                if instruction.op != "while" and (instruction.op not in ("call", "conditional") or name in fused):
                    fused.add(callee)
    return runs, fused


def _group_size(instruction: _Instruction, devices: int) -> int:
    """Devices that exchange with each other in a collective."""
    rest = instruction.rest
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        result = 1
        for axis in re.findall(r"'([^']+)'", mesh[2]):
            result *= int(axes[axis])
        return result
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    return devices


def _sent(instruction: _Instruction, kind: str, devices: int) -> int:
    """Bytes each device sends in a ring: all others' shares of a gather or scatter, twice that of a reduction."""
    count = _group_size(instruction, devices)
    parts = [size(f"{k}[{s}]") for k, s, _ in _SHAPE.findall(instruction.shape)]
    result = max(parts, default=0) if instruction.op.endswith("-start") else sum(parts)
    whole = result * count if kind == "reduce-scatter" else result
    if kind == "collective-permute":
        return result
    return int(whole * (count - 1) / count) * (2 if kind == "all-reduce" else 1)


def _sliced(body: list[_Instruction]) -> dict[int, int]:
    """Parameters of a fusion that it reads a slice of, or writes a slice of in place: their number and those bytes."""
    by_name = {i.name: i for i in body}
    found: dict[int, int] = {}
    for parameter in body:
        if parameter.op != "parameter":
            continue
        users = [i for i in body if parameter.name in i.operands]
        part = 0
        for user in users:
            if user.op in ("dynamic-slice", "gather", "slice"):
                part += size(user.shape)
            elif user.op == "dynamic-update-slice" and user.operands[0] == parameter.name:
                update = by_name.get(user.operands[1])
                part += size(update.shape) if update else 0
            else:
                break
        else:
            if users:
                found[int(parameter.rest.split(")")[0])] = part
    return found


def _moved(instruction: _Instruction, shapes: dict[str, str], computations: dict[str, list[_Instruction]]) -> int:
    """Bytes of main memory that one instruction reads and writes."""
    if instruction.op in _FREE or instruction.op.endswith("-done"):
        return 0
    operands = instruction.operands
    if instruction.op == "dynamic-update-slice":
        return 2 * size(shapes.get(operands[1], ""), False)
    result = size(instruction.shape, False)
    if instruction.op in ("dynamic-slice", "gather", "slice"):
        return 2 * result
    called = _CALLED.search(instruction.rest)
    body = computations.get(called[1], []) if called and instruction.op == "fusion" else []
    sliced = _sliced(body)
    if any(i.op == "dynamic-update-slice" and size(i.shape) == size(instruction.shape) for i in body):
        result = min(result, sum(sliced.values()) or result)  # written in place
    read = 0
    for number, name in enumerate(operands):
        whole = size(shapes.get(name, ""), False)
        read += min(whole, sliced.get(number, whole))
    return read + result


def traffic(text: str, devices: int) -> Traffic:
    """Counts a compiled module's text, for one of `devices`."""
    computations, entry = _parse(text)
    runs, fused = _runs(computations, entry)
    collectives: collections.Counter[str] = collections.Counter()
    memory = 0
    for name, body in computations.items():
        shapes = {instruction.name: instruction.shape for instruction in body}
        for instruction in body:
            kind = instruction.op.removesuffix("-start")
            if kind in _COLLECTIVES:
                collectives[kind] += runs[name] * _sent(instruction, kind, devices)
            if name not in fused:
                memory += runs[name] * _moved(instruction, shapes, computations)
    return Traffic({kind: collectives[kind] for kind in _COLLECTIVES}, memory)
