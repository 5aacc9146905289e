"""A thread block: its warps, what they wait for, and the asynchronous work that they start.

Warps take turns, and started work (TMA copies, wgmma) is done at times that a `Timing` chooses
among those that are legal. So a wait that is missing shows: as a wrong result, as a register that
is read while wgmma still writes it, or as a deadlock. What is not modelled: memory that a warp sees
in another order than it was written in, time, and lanes of a warp that part at a branch, which is a
Fault.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

import numpy as np

from tests.kernels.hopper.host import DESCRIPTOR_BYTES, Launch
from tests.kernels.hopper.lanes import LANES, Registers, compile_lanes, source
from tests.kernels.hopper.memory import (
    GLOBAL_BASE,
    SHARED_BASE,
    Fault,
    GlobalMemory,
    SharedMemory,
    Window,
    matrix,
)
from tests.kernels.hopper.program import Instruction, Program, never_written, operand_list

DESCRIPTORS = 1 << 50  # the address of a launch's TMA descriptors
WARPGROUP = 4  # warps


class Deadlock(Fault):
    """All warps wait, and nothing that was started can still wake one."""


@dataclasses.dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


@dataclasses.dataclass
class Work:
    """Something asynchronous that a warp has started. group: None until it is committed to one."""

    kind: str  # "load" | "store" | "wgmma"
    warp: "Warp"
    do: Callable[[], None]
    group: int | None = None


class Warp:
    """32 threads in step: their registers, what they wait for, and their place in the program.

    last: the place of the instruction that ran last.
    """

    def __init__(self, number: int, registers: Registers, pool: int) -> None:
        self.number, self.registers, self.pool = number, registers, pool
        self.place, self.last, self.is_done = 0, 0, False
        self.may_go: Callable[[], bool] | None = None  # None if it waits for nothing
        self.unfenced: list[tuple[np.ndarray, int]] = []  # stores: addresses and bytes at each
        # Groups of wgmma that are not waited for, the registers of each product, and of all.
        self.products: list[tuple[int, frozenset[str]]] = []
        self.in_flight: frozenset[str] = frozenset()
        self.groups = {"store": 0, "wgmma": 0}

    @property
    def is_ready(self) -> bool:
        return not self.is_done and (self.may_go is None or self.may_go())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """When warps run and started work is done.

    is_random: work is done now and then. Else it is done when no warp can run, stores last; of the
    kinds `at_once`, before any warp runs on. last_warp_first: of the warps that can run the last
    one does, which is of a warpgroup that copies or widens; else any. nan: garbage in shared memory
    is NaN; else random.
    """

    name: str
    is_random: bool = False
    at_once: tuple[str, ...] = ()
    last_warp_first: bool = False
    nan: bool = False

    def __str__(self) -> str:
        return self.name


RANDOM = Timing(name="random", is_random=True)
LATE = Timing(name="late", nan=True)
# Tiles are written over as soon as barriers let them be, and read as late as they may be.
AHEAD = Timing(name="ahead", at_once=("load",), last_warp_first=True)
TIMINGS = (RANDOM, LATE, AHEAD)

Run = Callable[[Warp], None]


class ThreadBlock:
    """One thread block of a launch at a time; `run` starts another."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        timing: Timing,
        registers_a_thread: int,
    ) -> None:
        self.program, self.launch, self.memory, self.timing = program, launch, memory, timing
        self.registers_a_thread = registers_a_thread
        self.literals: Registers = {}
        (self._descriptors, descriptors), *more = (
            (i, value) for i, value in enumerate(launch.arguments) if isinstance(value, tuple)
        )
        assert not more
        self.unwritten = sorted(x for x in never_written(program) if x.startswith("%rs"))
        self.windows = [Window(descriptor) for descriptor in descriptors]
        self.compiled = [self._compile(i) for i in program.instructions]
        self.is_wgmma = ["wgmma" in i.opcode for i in program.instructions]

    def run(self, index: tuple[int, int, int]) -> None:
        """Run the thread block of this index in the grid (x, y, z) to its end."""
        self.rng = random.Random(f"{self.timing} {index}")
        size = self.launch.shared_memory
        count = SharedMemory.garbage_size(size)
        noise = np.random.default_rng(index).integers(0, 256, count, np.uint8)
        garbage = np.full(count, 0xFF, np.uint8) if self.timing.nan else noise
        self.shared = SharedMemory(size, garbage)
        self.barriers: dict[int, Barrier] = {}
        # Who waits at named barriers, the registers for answers there, and what a warp says.
        self.named: dict[int, list[tuple[Warp, str | None, bool]]] = {}
        self.work: list[Work] = []
        self.started: set[str] = set()  # kinds of work, so far
        self.free_registers = 0  # of the block's, a thread's at a time
        self.leader = self.rng.randrange(LANES)  # that elect.sync chooses
        self.warps = [
            Warp(number, self._registers(number, index), self.registers_a_thread)
            for number in range(self.launch.threads // LANES)
        ]
        with np.errstate(all="ignore"):
            while any(not warp.is_done for warp in self.warps):
                self._step()
        if self.work:
            kinds = sorted({work.kind for work in self.work})
            raise Fault(f"a thread block ends while asynchronous work is under way: {kinds}")

    # ---- the order of events ----

    def _step(self) -> None:
        """Let a warp go on for some instructions, or do something that was started."""
        ready = [warp for warp in self.warps if warp.is_ready]
        first = self._first_work()
        if not ready and not first:
            raise Deadlock(f"warps wait for ever: {self._state()}")
        if due := self._due(first, is_idle=not ready):
            self._do(self.rng.choice(due))
            return
        warp = ready[-1] if self.timing.last_warp_first else self.rng.choice(ready)
        warp.may_go = None
        for _ in range(self.rng.choice((20, 100, 400))):
            place = warp.place
            if warp.in_flight and not self.is_wgmma[place]:
                touched = warp.in_flight & self.program.instructions[place].registers
                if touched:
                    raise Fault(
                        f"{self.program.instructions[place]}: wgmma still uses {sorted(touched)}"
                    )
            warp.place, warp.last = place + 1, place
            started = len(self.work)
            self.compiled[place](warp)
            if warp.is_done or warp.may_go is not None:
                break
            if any(work.kind in self.timing.at_once for work in self.work[started:]):
                break

    def _first_work(self) -> list[Work]:
        """Return the work that may be done next: the wgmma of a warp are done in order."""
        seen, first = set(), []
        for work in self.work:
            if work.kind != "wgmma":
                first.append(work)
            elif work.warp.number not in seen:
                seen.add(work.warp.number)
                first.append(work)
        return first

    def _due(self, first: list[Work], *, is_idle: bool) -> list[Work]:
        """Return the work one of which is done now. is_idle: whether no warp can run."""
        if self.timing.is_random:
            return first if is_idle or self.rng.random() < 0.3 else []
        if at_once := [work for work in first if work.kind in self.timing.at_once]:
            return at_once
        return ([work for work in first if work.kind != "store"] or first) if is_idle else []

    def _do(self, work: Work) -> None:
        self.work.remove(work)
        work.do()

    def _finish(self, warp: Warp, kind: str, pending: int) -> None:
        """Do all work of a warp but that of its last `pending` groups."""
        last = warp.groups[kind] - pending
        for work in [w for w in self.work if w.warp is warp and w.kind == kind]:
            if work.group is not None and work.group < last:
                self._do(work)

    def _start(self, kind: str, warp: Warp, do: Callable[[], None]) -> None:
        self.work.append(Work(kind, warp, do))
        self.started.add(kind)

    def _commit(self, warp: Warp, kind: str) -> None:
        for work in self.work:
            if work.warp is warp and work.kind == kind and work.group is None:
                work.group = warp.groups[kind]
        warp.groups[kind] += 1

    def _state(self) -> str:
        places = ((w.number, w.last) for w in self.warps if not w.is_done)
        return "; ".join(f"{n}: {self.program.instructions[place]}" for n, place in places)

    # ---- registers and addresses ----

    def _registers(self, warp: int, index: tuple[int, int, int]) -> Registers:
        """Return the registers that a warp starts with: literals, and special ones."""

        def same(value: int, dtype: type = np.uint32) -> np.ndarray:
            return np.full(LANES, value, dtype)

        special = {"%tid.x": np.arange(LANES, dtype=np.uint32) + np.uint32(warp * LANES)}
        for axis, here, size in zip("xyz", index, self.launch.grid, strict=True):
            special |= {f"%ctaid.{axis}": same(here), f"%nctaid.{axis}": same(size)}
        special |= {x: same(self.rng.randrange(1 << 16), np.uint16) for x in self.unwritten}
        special["__dynamic_shmem__0"] = same(SHARED_BASE, np.uint64)
        special[self.program.parameter + str(self._descriptors)] = same(DESCRIPTORS, np.uint64)
        return self.literals | special

    def _address(self, operand: str) -> Callable[[Registers], np.ndarray]:
        """Return what reads an operand [register + offset]."""
        match = re.fullmatch(r"\[\s*([%\w]+)\s*\+?(-?\s*\d+)?\s*\]", operand)
        if match is None:
            raise ValueError(f"no address: {operand!r}")
        name, offset = match[1], int(match[2] or 0)
        return lambda registers: registers[name].astype(np.int64) + offset

    def _value(self, operand: str, bits: int = 32) -> Callable[[Registers, int], int]:
        """Return what reads an operand of one lane."""
        key = source(operand, bits, self.literals)
        return lambda registers, lane: int(registers[key][lane])

    # ---- instructions ----

    def _compile(self, instruction: Instruction) -> Run:
        """Return what an instruction does to a warp whose place is already the next."""
        opcode = instruction.opcode
        if opcode.startswith("bra"):
            return self._branch(instruction)
        lanes = compile_lanes(instruction, self.literals)
        if lanes is not None:
            return _guarded_lanes(instruction, lanes)
        for prefix, make in self._kinds():
            if opcode.startswith(prefix):
                return _guarded(instruction, make(instruction))
        raise ValueError(f"no instruction of the emulator: {instruction}")

    def _kinds(self) -> Sequence[tuple[str, Callable[[Instruction], "Masked"]]]:
        return (
            ("ret", lambda _: self._return),
            ("exit", lambda _: self._return),
            ("ld.param", self._load_parameter),
            ("ld.", self._load),
            ("st.", self._store),
            ("stmatrix", self._store_matrix),
            ("ldmatrix", self._load_matrix),
            ("elect.sync", self._elect),
            ("fence.proxy.async", lambda _: self._fence),
            ("fence.mbarrier_init", lambda _: _nothing),
            ("prefetch.tensormap", lambda _: _nothing),
            ("mbarrier.init", self._init_barrier),
            ("mbarrier.arrive", self._arrive),
            ("mbarrier.try_wait", self._wait_for_barrier),
            ("bar.sync", self._named_barrier),
            ("bar.red.or.pred", self._named_barrier),
            ("setmaxnreg", self._set_registers),
            ("cp.async.bulk.tensor", self._copy_window),
            ("cp.async.bulk.global", self._copy_bytes),
            ("cp.async.bulk.commit_group", lambda _: self._commit_stores),
            ("cp.async.bulk.wait_group", self._wait_for_stores),
            ("wgmma.mma_async", self._multiply),
            ("wgmma.fence", lambda _: _nothing),
            ("wgmma.commit_group", lambda _: self._commit_products),
            ("wgmma.wait_group", self._wait_for_products),
        )

    def _branch(self, instruction: Instruction) -> Run:
        target = self.program.labels[instruction.operands[0]]
        predicate, negated = instruction.predicate, instruction.negated

        def run(warp: Warp) -> None:
            if predicate is not None:
                mask = warp.registers[predicate] ^ negated
                if mask.any() != mask.all():
                    raise Fault(f"lanes part at {instruction}")
                if not mask[0]:
                    return
            warp.place = target

        return run

    def _return(self, warp: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise Fault("lanes end one by one")
        warp.is_done = True

    def _load_parameter(self, instruction: Instruction) -> "Masked":
        number = re.search(r"_param_(\d+)\]", instruction.operands[1])
        assert number is not None
        argument = self.launch.arguments[int(number[1])]
        assert isinstance(argument, int)
        address = np.full(LANES, self.memory.addresses[argument], np.uint64)
        target = instruction.operands[0]

        def run(warp: Warp, mask: np.ndarray) -> None:
            _put(warp, target, address, mask)

        return run

    def _load(self, instruction: Instruction) -> "Masked":
        parts = instruction.opcode.split(".")
        dtype, count = _vector(parts)
        address, targets = self._address(instruction.operands[1]), _targets(instruction)

        def run(warp: Warp, mask: np.ndarray) -> None:
            addresses = address(warp.registers)[mask]
            memory = self._memory_at(addresses, parts[1])
            values = np.zeros((LANES, count), dtype)
            values[mask] = memory.load(addresses, dtype, count)
            for i, target in enumerate(targets):
                _put(warp, target, _extended(values[:, i], target, parts[-1]), mask)

        return run

    def _store(self, instruction: Instruction) -> "Masked":
        parts = instruction.opcode.split(".")
        dtype, count = _vector(parts)
        address = self._address(instruction.operands[0])
        names = operand_list(instruction.operands[1].strip("{}"))
        keys = [source(name, max(16, dtype.itemsize * 8), self.literals) for name in names]

        def run(warp: Warp, mask: np.ndarray) -> None:
            addresses = address(warp.registers)[mask]
            values = np.stack([warp.registers[key][mask].astype(dtype) for key in keys], axis=1)
            memory = self._memory_at(addresses, parts[1])
            memory.store(addresses, values)
            if memory is self.shared:
                warp.unfenced.append((addresses, count * dtype.itemsize))

        return run

    def _memory_at(self, addresses: np.ndarray, space: str) -> GlobalMemory | SharedMemory:
        """Return the memory of addresses: that which an opcode names, or by the addresses."""
        is_global = bool(addresses[0] >= GLOBAL_BASE)
        if (space == "global" and not is_global) or (space == "shared" and is_global):
            raise Fault(f"address {int(addresses[0]):#x} is not in {space} memory")
        return self.memory if is_global else self.shared

    def _store_matrix(self, instruction: Instruction) -> "Masked":
        """stmatrix: lane 8j + r has the address of row r of matrix j, of 8 x 8 numbers."""
        address = self._address(instruction.operands[0])
        names = operand_list(instruction.operands[1].strip("{}"))
        transposed = ".trans" in instruction.opcode

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            addresses = address(warp.registers)[: 8 * len(names)]
            for j, name in enumerate(names):
                rows = np.ascontiguousarray(warp.registers[name]).view(np.uint16).reshape(8, 8)
                rows = np.ascontiguousarray(rows.T if transposed else rows)
                self.shared.store(addresses[8 * j : 8 * j + 8], rows)
            warp.unfenced.append((addresses, 16))

        return run

    def _load_matrix(self, instruction: Instruction) -> "Masked":
        address, names = self._address(instruction.operands[1]), _targets(instruction)
        transposed = ".trans" in instruction.opcode

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            addresses = address(warp.registers)
            for j, name in enumerate(names):
                rows = self.shared.load(addresses[8 * j : 8 * j + 8], np.dtype(np.uint16), 8)
                rows = np.ascontiguousarray(rows.T if transposed else rows)
                warp.registers[name] = rows.reshape(-1).view(np.uint32).copy()

        return run

    def _elect(self, instruction: Instruction) -> "Masked":
        target, predicate = instruction.operands[0].split("|")

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            warp.registers[target] = np.full(LANES, self.leader, np.uint32)
            warp.registers[predicate] = np.arange(LANES) == self.leader

        return run

    def _fence(self, warp: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise Fault("some lanes alone pass a fence")
        for addresses, size in warp.unfenced:
            self.shared.fence(addresses, size)
        warp.unfenced.clear()

    # ---- barriers and registers ----

    def _init_barrier(self, instruction: Instruction) -> "Masked":
        address = self._address(instruction.operands[0])
        count = self._value(instruction.operands[1])

        def run(warp: Warp, mask: np.ndarray) -> None:
            lane = _one_lane(mask, instruction)
            at, n = int(address(warp.registers)[lane]), count(warp.registers, lane)
            self.shared.check(at, at + 8)
            self.barriers[at] = Barrier(n, n)

        return run

    def _arrive(self, instruction: Instruction) -> "Masked":
        """mbarrier.arrive of a number, or of one with as many more bytes to expect."""
        address = self._address(instruction.operands[1])
        counts = self._value(instruction.operands[2]) if len(instruction.operands) > 2 else None
        expects = ".expect_tx" in instruction.opcode

        def run(warp: Warp, mask: np.ndarray) -> None:
            addresses = address(warp.registers)
            for lane in np.flatnonzero(mask).tolist():
                count = 1 if counts is None else counts(warp.registers, lane)
                barrier = self._barrier(int(addresses[lane]))
                barrier.bytes += count if expects else 0
                barrier.pending -= 1 if expects else count
                if barrier.pending < 0:
                    raise Fault(f"more arrivals than a barrier expects: {instruction}")
                _advance(barrier)

        return run

    def _barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise Fault(f"no barrier at shared address {address}")
        return self.barriers[address]

    def _wait_for_barrier(self, instruction: Instruction) -> "Masked":
        """mbarrier.try_wait, which stands in a loop: the warp goes on once it would succeed."""
        address = self._address(instruction.operands[1])
        parity, predicate = self._value(instruction.operands[2]), instruction.operands[0]

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            barrier = self._barrier(int(address(warp.registers)[0]))
            waited = parity(warp.registers, 0)
            warp.registers[predicate] = np.full(LANES, True)
            if barrier.phase % 2 == waited:
                warp.may_go = lambda: barrier.phase % 2 != waited

        return run

    def _named_barrier(self, instruction: Instruction) -> "Masked":
        """bar.sync, and bar.red.or.pred, of which all learn whether a predicate is true of any."""
        operands = instruction.operands
        answer, asked = None, None
        if instruction.opcode.startswith("bar.red"):
            answer, *operands, asked = operands
        number = self._value(operands[0])
        count = self._value(operands[1]) if len(operands) > 1 else None

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            n = number(warp.registers, 0)
            threads = self.launch.threads if count is None else count(warp.registers, 0)
            arrived = self.named.setdefault(n, [])
            arrived.append((warp, answer, asked is not None and bool(warp.registers[asked].any())))
            if not 0 <= n < 16 or threads % LANES or len(arrived) * LANES > threads:
                raise Fault(f"a named barrier {n} of {threads} threads")
            if len({register is None for _, register, _ in arrived}) > 1:
                raise Fault(f"a named barrier {n} where some ask and others do not")
            if len(arrived) * LANES == threads:
                del self.named[n]
                says = np.full(LANES, any(said for *_, said in arrived))
                for other, register, _ in arrived:
                    other.may_go = None
                    if register is not None:
                        other.registers[register] = says
            else:
                warp.may_go = lambda: False  # until the last one arrives

        return run

    def _set_registers(self, instruction: Instruction) -> "Masked":
        """setmaxnreg: give registers to the block's pool, or wait until it has enough."""
        count, increases = int(instruction.operands[0]), ".inc" in instruction.opcode
        if not 24 <= count <= 256 or count % 8:
            raise Fault(f"{instruction}: not 24 to 256 registers in whole eights")

        def run(warp: Warp, mask: np.ndarray) -> None:
            more = count - warp.pool

            def may_go() -> bool:
                return self.free_registers >= more * LANES

            if more < 0 if increases else more > 0:
                raise Fault(f"{instruction} from {warp.pool} registers")
            if may_go():
                self.free_registers -= more * LANES
                warp.pool = count
            else:
                warp.may_go, warp.place = may_go, warp.place - 1  # and again

        return run

    # ---- TMA ----

    def _copy_window(self, instruction: Instruction) -> "Masked":
        """cp.async.bulk.tensor, either way, of one lane."""
        loads = "mbarrier::complete_tx" in instruction.opcode
        shared_at, tensor_at = (0, 1) if loads else (1, 0)
        shared = self._address(instruction.operands[shared_at])
        descriptor, coordinates = operand_list(instruction.operands[tensor_at].strip()[1:-1])
        start = [self._value(name) for name in operand_list(coordinates.strip("{} "))]
        which = self._value(descriptor, 64)
        barrier_at = self._address(instruction.operands[2]) if loads else None

        def run(warp: Warp, mask: np.ndarray) -> None:
            lane, registers = _one_lane(mask, instruction), warp.registers
            number, rest = divmod(which(registers, lane) - DESCRIPTORS, DESCRIPTOR_BYTES)
            if rest or not 0 <= number < len(self.windows):
                raise Fault(f"no descriptor: {instruction}")
            window, address = self.windows[number], int(shared(registers)[lane])
            corner = [int(np.int32(np.uint32(x(registers, lane)))) for x in reversed(start)]
            if barrier_at is None:
                self._start(
                    "store",
                    warp,
                    lambda: window.store(self.memory, corner, self.shared, address),
                )
                return
            barrier = self._barrier(int(barrier_at(registers)[lane]))

            def load() -> None:
                window.load(self.memory, corner, self.shared, address)
                barrier.bytes -= window.bytes
                _advance(barrier)

            self._start("load", warp, load)

        return run

    def _copy_bytes(self, instruction: Instruction) -> "Masked":
        """cp.async.bulk of bytes to global memory, of one lane."""
        to, shared = (self._address(operand) for operand in instruction.operands[:2])
        size = self._value(instruction.operands[2])

        def run(warp: Warp, mask: np.ndarray) -> None:
            lane = _one_lane(mask, instruction)
            target, address, n = (
                int(to(warp.registers)[lane]),
                int(shared(warp.registers)[lane]),
                size(warp.registers, lane),
            )
            if target % 16 or address % 16 or n % 16:
                raise Fault(f"not whole 16 bytes: {instruction}")
            self.shared.check(address, address + n)

            def store() -> None:
                if n:
                    self.memory.write(target, self.shared.asynchronous[address : address + n])

            self._start("store", warp, store)

        return run

    def _commit_stores(self, warp: Warp, mask: np.ndarray) -> None:
        self._commit(warp, "store")

    def _wait_for_stores(self, instruction: Instruction) -> "Masked":
        """Wait until all but some groups are written; with .read this does no less."""
        pending = int(instruction.operands[0])
        return lambda warp, mask: self._finish(warp, "store", pending)

    # ---- wgmma ----

    def _multiply(self, instruction: Instruction) -> "Masked":
        """wgmma.mma_async of 64 rows, 16 of which are this warp's; A from shared memory or not."""
        shape = re.search(r"m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)$", instruction.opcode)
        if shape is None or shape[2] != shape[3]:
            raise ValueError(f"no wgmma of the emulator: {instruction}")
        columns, is_bf16 = int(shape[1]), shape[2] == "bf16"
        sums, a, b, accumulate, *flags = instruction.operands
        sum_names = operand_list(sums.strip("{}"))
        a_names = operand_list(a.strip("{}")) if a[0] == "{" else None
        signs, transposes = flags[:2], [flag == "1" for flag in flags[2:]]
        if signs != ["1", "1"] or len(transposes) != (2 if a_names is None else 1):
            raise ValueError(f"no wgmma of the emulator: {instruction}")
        of_a, of_b = (self._value(x, 64) if x[0] != "{" else None for x in (a, b))
        assert of_b is not None
        used = frozenset((*sum_names, *(a_names or ())))

        def run(warp: Warp, mask: np.ndarray) -> None:
            _whole(mask, instruction)
            registers = warp.registers
            at_a, at_b = (None if of_a is None else of_a(registers, 0)), of_b(registers, 0)
            scale = bool(registers[accumulate][0])

            def multiply() -> None:
                if at_a is None:
                    left = _fragment([registers[name] for name in a_names or ()])
                else:
                    first = 16 * (warp.number % WARPGROUP)
                    whole = matrix(self.shared, at_a, 64, transposed=transposes[0])
                    left = whole[first : first + 16]
                right = matrix(self.shared, at_b, columns, transposed=transposes[-1])
                product = _widened(left, is_bf16) @ _widened(right, is_bf16).T
                for name, part in zip(sum_names, _parts(product), strict=True):
                    before = registers[name].view(np.float32) if scale else np.float32(0)
                    registers[name] = (before + part).view(np.uint32)

            self._start("wgmma", warp, multiply)
            warp.products.append((warp.groups["wgmma"], used))
            warp.in_flight |= used

        return run

    def _commit_products(self, warp: Warp, mask: np.ndarray) -> None:
        self._commit(warp, "wgmma")

    def _wait_for_products(self, instruction: Instruction) -> "Masked":
        pending = int(instruction.operands[0])

        def run(warp: Warp, mask: np.ndarray) -> None:
            self._finish(warp, "wgmma", pending)
            last = warp.groups["wgmma"] - pending
            warp.products = [(group, used) for group, used in warp.products if group >= last]
            warp.in_flight = frozenset().union(*(used for _, used in warp.products))

        return run


Masked = Callable[[Warp, np.ndarray], None]  # what an instruction does to the lanes of a mask


def _guarded(instruction: Instruction, act: Masked) -> Run:
    """Return what an instruction does under its predicate."""
    predicate, negated = instruction.predicate, instruction.negated
    everyone = np.full(LANES, True)
    if predicate is None:
        return lambda warp: act(warp, everyone)

    def run(warp: Warp) -> None:
        mask = warp.registers[predicate] ^ negated
        if mask.any():
            act(warp, mask)

    return run


def _guarded_lanes(instruction: Instruction, compute: Callable[[Registers], None]) -> Run:
    """Return what an instruction that computes does under its predicate."""
    if instruction.predicate is None:
        return lambda warp: compute(warp.registers)
    targets = _targets(instruction)

    def act(warp: Warp, mask: np.ndarray) -> None:
        before = {target: warp.registers.get(target) for target in targets}
        compute(warp.registers)
        for target, old in before.items():
            if old is not None:
                warp.registers[target] = np.where(mask, warp.registers[target], old)

    return _guarded(instruction, act)


def _targets(instruction: Instruction) -> tuple[str, ...]:
    return operand_list(instruction.operands[0].split("|")[0].strip("{}"))


def _put(warp: Warp, target: str, value: np.ndarray, mask: np.ndarray) -> None:
    old = warp.registers.get(target)
    warp.registers[target] = value if old is None or mask.all() else np.where(mask, value, old)


def _vector(parts: list[str]) -> tuple[np.dtype, int]:
    """Return the type and number of the elements of a load or store by its opcode."""
    bits, count = int(parts[-1][1:]), {"v2": 2, "v4": 4}
    dtype = np.dtype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])
    return dtype, next((count[part] for part in parts if part in count), 1)


def _extended(values: np.ndarray, target: str, kind: str) -> np.ndarray:
    """Return loaded values at the width of the register that takes them."""
    name = re.match(r"%(rs|rd|r)\d", target)
    assert name is not None
    width = {"rs": np.uint16, "r": np.uint32, "rd": np.uint64}[name[1]]
    if kind[0] == "s":
        signed = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
        values = values.view(signed[values.itemsize * 8])
    return values.astype(width)


def _nothing(warp: Warp, mask: np.ndarray) -> None:
    """Do nothing: a hint, or an order that emulated memory always has."""


def _whole(mask: np.ndarray, instruction: Instruction) -> None:
    if not mask.all():
        raise Fault(f"some lanes alone: {instruction}")


def _one_lane(mask: np.ndarray, instruction: Instruction) -> int:
    lanes = np.flatnonzero(mask)
    if len(lanes) != 1:
        raise Fault(f"{len(lanes)} lanes: {instruction}")
    return int(lanes[0])


def _advance(barrier: Barrier) -> None:
    if barrier.pending == 0 and barrier.bytes == 0:
        barrier.phase += 1
        barrier.pending = barrier.count


_LANE = np.arange(LANES)


def _parts(product: np.ndarray) -> np.ndarray:
    """Return a warp's part [16, N] of a product as its registers have it, [N/2, lane]."""
    j = np.arange(product.shape[1] // 2)[:, None]
    row, column = 8 * (j // 2 % 2), 8 * (j // 4) + j % 2
    return product[_LANE // 4 + row, _LANE % 4 * 2 + column]


def _fragment(registers: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bits [16, 16] of A that four registers of a warp hold."""
    bits = np.zeros((16, 16), np.uint16)
    for q, register in enumerate(registers):
        pair = np.ascontiguousarray(register).view(np.uint16).reshape(LANES, 2)
        row, column = _LANE // 4 + 8 * (q % 2), _LANE % 4 * 2 + 8 * (q // 2)
        bits[row, column], bits[row, column + 1] = pair[:, 0], pair[:, 1]
    return bits


def _widened(bits: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Return 16-bit floats as f32."""
    if is_bf16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
