"""What the host does before a kernel starts, by running the host program that Mosaic compiles.

The program is read from the dump of MLIR passes, at the last one that still has its launch. It is
straight: constants, addresses of the call's arrays, small arrays of sizes and strides, calls that
encode TMA descriptors, one launch.
"""

import dataclasses
import re
from typing import Any

LAST_PASS = "IR Dump Before GpuLaunchLoweringPass"
DESCRIPTOR_BYTES = 128
# Bytes of an element, by Mosaic's numbers of types: i8, i16, i32, i64, f16, f32, bf16.
ITEMSIZE = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2}
SWIZZLES = (0, 16, 32, 64, 128)  # bytes; 0 and 16 leave everything in its place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A TMA descriptor: which array of the call it is of, and what a copy by it moves.

    sizes, strides (in elements) and window have the slowest axis first. swizzle is in bytes.
    """

    array: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    window: tuple[int, ...]
    swizzle: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel's grid (x, y, z), the threads of a block, bytes of dynamic shared memory, and
    arguments: the number of an array of the call, or all descriptors.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_memory: int
    arguments: tuple[int | tuple[Descriptor, ...], ...]


def broken_rules(descriptor: Descriptor) -> list[str]:
    """Return which rules of cuTensorMapEncodeTiled a descriptor breaks.

    Mosaic's runtime aborts the process where one is broken, at the kernel's first execution.
    """
    row = descriptor.window[-1] * descriptor.itemsize
    strides = [stride * descriptor.itemsize for stride in descriptor.strides[:-1]]
    rules = {
        "rank is 1 to 5": 1 <= len(descriptor.sizes) <= 5,
        "sizes are 1 to 2**32": all(1 <= size <= 2**32 for size in descriptor.sizes),
        "coordinates are int32": all(size < 2**31 for size in descriptor.sizes),
        "strides are whole 16 bytes": all(stride % 16 == 0 for stride in strides),
        "strides are less than 2**40 bytes": all(0 < stride < 2**40 for stride in strides),
        "the last stride is 1": descriptor.strides[-1] == 1,
        "a window is 1 to 256 wide": all(1 <= width <= 256 for width in descriptor.window),
        "a window's rows are whole 16 bytes": row % 16 == 0,
        "a window's rows fit the swizzle": descriptor.swizzle <= 16 or row <= descriptor.swizzle,
        "the swizzle is one of the hardware's": descriptor.swizzle in SWIZZLES,
    }
    return [rule for rule, holds in rules.items() if not holds]


def read_launch(passes: str) -> Launch:
    """Return the launch that the host program in a dump of MLIR passes ends with."""
    start = passes.index("func.func @", passes.index(LAST_PASS))
    host = _HostProgram(re.findall(r"%[\w$]+", passes[start : passes.index("\n", start)]))
    for line in passes[start:].splitlines()[1:]:
        line = re.sub(r"\s*loc\(.*", "", line.strip())
        if line == "return":
            break
        host.execute(line)
    if host.launch is None:
        raise ValueError("the host program has no launch")
    return host.launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Address:
    """An address: of the table of arrays, of an array, of a list of integers, of a descriptor."""

    base: Any
    offset: int = 0


class _HostProgram:
    """The values of a host program, by their names."""

    def __init__(self, parameters: list[str]) -> None:
        _, table = parameters[:2]  # a stream, and the addresses of the arrays
        self.values: dict[str, Any] = {table: _Address(base="arrays")}
        self.descriptors: dict[int, Descriptor] = {}
        self.launch: Launch | None = None

    def execute(self, line: str) -> None:
        if line.startswith("call @mosaic_gpu_init_tma_desc("):
            self._encode(self._names(line))
        elif line.startswith("gpu.launch_func"):
            self._start(line)
        elif line.startswith("memref.store"):
            value, array, index = self._names(line)
            values = self.values[array].base
            values[self.values[index]] = self.values[value]
        else:
            name, _, expression = line.partition(" = ")
            if not expression:
                raise ValueError(f"no statement of a host program: {line!r}")
            self.values[name] = self._evaluate(expression)

    def _names(self, text: str) -> list[str]:
        return re.findall(r"%[\w$]+", text)

    def _evaluate(self, expression: str) -> Any:
        operation, names = re.split(r"[ (]", expression)[0], self._names(expression)
        known = [self.values[name] for name in names if name in self.values]
        brackets = [int(n) for n in re.findall(r"\[(\d+)", expression)]
        match operation:
            case "llvm.mlir.constant":
                return int(expression[len("llvm.mlir.constant(") :].split()[0])
            case "llvm.mlir.undef" | "llvm.mlir.poison":
                return None
            case "memref.alloca":
                count = re.search(r"memref<(\d+)xi64>", expression)
                assert count is not None
                return _Address(base=[0] * int(count[1]))
            case "llvm.alloca":
                return _Address(base="descriptors")
            case "llvm.getelementptr":
                return dataclasses.replace(known[0], offset=brackets[0])
            case "llvm.load" if known[0].base == "arrays":
                return _Address(base=("array", known[0].offset))
            case "llvm.load":  # of all descriptors
                return tuple(self.descriptors[key] for key in sorted(self.descriptors))
            case "llvm.insertvalue":  # addresses make an array; its sizes are in its descriptor
                return known[0] if isinstance(known[0], _Address) else known[1]
            case "llvm.extractvalue":
                return known[0] if brackets == [1] else 0  # an address, or its offset
            case "llvm.mul":
                return known[0] * known[1]
            case "llvm.add":
                return known[0] if known[1] == 0 else known[0] + known[1]
        if operation in {
            "builtin.unrealized_conversion_cast",
            "memref.transpose",
            "memref.reinterpret_cast",
            "llvm.ptrtoint",
            "llvm.inttoptr",
        }:
            return known[0]
        raise ValueError(f"no operation of a host program: {expression!r}")

    def _encode(self, names: list[str]) -> None:
        place, base, dtype, rank, sizes, strides, swizzle, window = (
            self.values[name] for name in names
        )
        _, array = base.base
        assert len(sizes.base) == len(strides.base) == len(window.base) == rank
        self.descriptors[place.offset] = Descriptor(
            array=array,
            itemsize=ITEMSIZE[dtype],
            sizes=tuple(sizes.base),
            strides=tuple(strides.base),
            window=tuple(window.base),
            swizzle=swizzle,
        )

    def _start(self, line: str) -> None:
        match = re.search(
            r"blocks in \((.*?)\) threads in \((.*?)\).*dynamic_shared_memory_size (%\w+) "
            r"args\((.*)\)",
            line,
        )
        assert match is not None
        blocks, threads, (memory,), arguments = (
            [self.values[name] for name in self._names(text)] for text in match.groups()
        )
        assert threads[1:] == [1, 1]
        self.launch = Launch(
            grid=tuple(blocks),
            threads=threads[0],
            shared_memory=memory,
            arguments=tuple(
                value if isinstance(value, tuple) else value.base[1] for value in arguments
            ),
        )
