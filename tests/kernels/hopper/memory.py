"""Global memory, and the shared memory of a thread block as its two proxies see it.

Ordinary loads and stores go through the generic proxy, TMA and wgmma through the async one. What a
thread has stored is there for the async proxy only after the thread's own `fence.proxy.async`; what
TMA has written is there for both, since whoever reads it waits for a barrier first.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from tests.kernels.hopper.host import Descriptor

SHARED_BASE = 1024  # an address; what swizzles count from has to be a whole 1024
GLOBAL_BASE = 1 << 40
GAP = 1 << 20  # bytes between arrays, so that an index past one's end does not reach the next
CHUNK = 16  # bytes: what swizzles move, and the unit of all strides that TMA takes


class Fault(Exception):
    """What the hardware would not do, or what would go wrong there."""


class GlobalMemory:
    """Copies of the arrays of a call at addresses of their own; results are read from them."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = [np.ascontiguousarray(array).copy() for array in arrays]
        self.bytes = [array.reshape(-1).view(np.uint8) for array in self.arrays]
        self.addresses, address = [], GLOBAL_BASE
        for array in self.arrays:
            self.addresses.append(address)
            address += -(-(array.nbytes + GAP) // 256) * 256

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        """Return `count` neighbouring elements from each address, [addresses, count]."""
        view, index = self._elements(addresses, dtype, count)
        return view[index]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store values [addresses, count] from each address on."""
        view, index = self._elements(addresses, values.dtype, values.shape[1])
        view[index] = values

    def write(self, address: int, data: np.ndarray) -> None:
        """Store bytes that lie side by side."""
        self.store(np.array([address]), data[None])

    def _elements(
        self, addresses: np.ndarray, dtype: np.dtype, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        start = int(addresses[0])
        number = max((i for i, base in enumerate(self.addresses) if base <= start), default=-1)
        if number < 0:
            raise Fault(f"address {start:#x} is not in global memory")
        offsets = addresses - self.addresses[number]
        size = dtype.itemsize
        if (offsets < 0).any() or (offsets + count * size > self.bytes[number].size).any():
            raise Fault(f"an access outside of array {number}, from byte {offsets.max()}")
        if (offsets % (count * size if size > 1 else 1)).any():
            raise Fault(f"an access to {count * size} bytes that is not aligned")
        view = self.bytes[number].view(dtype)
        return view, (offsets // size)[:, None] + np.arange(count)


class SharedMemory:
    """Shared memory from SHARED_BASE on; `generic` and `asynchronous` hold its bytes by address.

    Both begin as garbage, which differs between them.
    """

    def __init__(self, size: int, garbage: np.ndarray) -> None:
        self.end = SHARED_BASE + size
        room = -(-self.end // CHUNK) * CHUNK
        self.generic, self.asynchronous = garbage[:room].copy(), garbage[-room:].copy()

    @staticmethod
    def garbage_size(size: int) -> int:
        """Return how many bytes of garbage the constructor takes."""
        return 2 * (SHARED_BASE + size + CHUNK)

    def load(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        """Return `count` neighbouring elements from each address, [addresses, count]."""
        return self.generic.view(dtype)[self._elements(addresses, dtype, count)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store values [addresses, count] from each address on, for the generic proxy alone."""
        index = self._elements(addresses, values.dtype, values.shape[1])
        self.generic.view(values.dtype)[index] = values

    def fence(self, addresses: np.ndarray, size: int) -> None:
        """Show the async proxy `size` bytes from each address on, as they are now."""
        index = (addresses[:, None] + np.arange(size)).ravel()
        self.asynchronous[index] = self.generic[index]

    def write(self, index: np.ndarray, chunks: np.ndarray) -> None:
        """Write chunks [n, CHUNK] at multiples of CHUNK, as TMA does, for both proxies."""
        for memory in (self.generic, self.asynchronous):
            memory.reshape(-1, CHUNK)[index] = chunks

    def check(self, first: int, end: int) -> None:
        if first < SHARED_BASE or end > self.end:
            raise Fault(f"bytes {first} to {end} are not all in shared memory")

    def _elements(self, addresses: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        size = dtype.itemsize
        self.check(int(addresses.min()), int(addresses.max()) + count * size)
        if (addresses % (count * size)).any():
            raise Fault(f"an access to {count * size} bytes that is not aligned")
        return (addresses // size)[:, None] + np.arange(count)


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Return where a byte address lies under a swizzle of so many bytes."""
    if swizzle <= 16:
        return address
    return address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4)


class Window:
    """What a TMA copy by one descriptor moves, in chunks of CHUNK bytes."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        row = descriptor.window[-1] * descriptor.itemsize
        self.bytes = math.prod(descriptor.window) * descriptor.itemsize
        *outer, _ = descriptor.window
        grid = np.indices((*outer, row // CHUNK)).reshape(len(descriptor.window), -1)
        grid[-1] *= CHUNK // descriptor.itemsize
        self.position = grid  # [axis, chunk], in elements

    def load(
        self, source: GlobalMemory, start: Sequence[int], memory: SharedMemory, address: int
    ) -> None:
        """Copy the window at coordinates `start`, slowest axis first; zeros where it leaves the
        array.
        """
        index, inside = self._chunks(start)
        chunks = source.bytes[self.descriptor.array].reshape(-1, CHUNK)
        moved = np.where(inside[:, None], chunks[np.where(inside, index, 0)], 0)
        memory.write(self._places(memory, address), moved.astype(np.uint8))

    def store(
        self, target: GlobalMemory, start: Sequence[int], memory: SharedMemory, address: int
    ) -> None:
        """Copy the other way; what leaves the array is dropped."""
        index, inside = self._chunks(start)
        moved = memory.asynchronous.reshape(-1, CHUNK)[self._places(memory, address)]
        target.bytes[self.descriptor.array].reshape(-1, CHUNK)[index[inside]] = moved[inside]

    def _chunks(self, start: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return each chunk's number in the array, and whether it is inside."""
        position = self.position + np.array(start)[:, None]
        sizes, strides = (
            np.array(x)[:, None] for x in (self.descriptor.sizes, self.descriptor.strides)
        )
        inside = ((position >= 0) & (position < sizes)).all(axis=0)
        first = (position * strides).sum(axis=0) * self.descriptor.itemsize
        if (first % CHUNK).any():
            raise Fault("a TMA window from the middle of 16 bytes on, which is not emulated")
        return first // CHUNK, inside

    def _places(self, memory: SharedMemory, address: int) -> np.ndarray:
        if address % 128:
            raise Fault(f"TMA at shared address {address}, which is not a whole 128 bytes")
        memory.check(address, address + self.bytes)
        linear = np.arange(0, self.bytes, CHUNK) + address
        return swizzled(linear, self.descriptor.swizzle) // CHUNK


def matrix(memory: SharedMemory, descriptor: int, rows: int, *, transposed: bool) -> np.ndarray:
    """Return the bits [rows, 16] of a wgmma operand of 16-bit numbers by its descriptor.

    transposed: rows are the fast axis in memory, else the 16 columns.
    """
    fields = [((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32)]
    start, leading, stride = fields
    swizzle = (0, 128, 64, 32)[descriptor >> 62]
    if swizzle == 0:
        raise Fault("a wgmma operand without a swizzle")
    if (descriptor >> 49) & 7:
        raise Fault("a wgmma operand with a base offset")
    address = swizzled(
        start + _operand_offsets(rows, swizzle, leading, stride, transposed), swizzle
    )
    memory.check(int(address.min()), int(address.max()) + 2)
    return memory.asynchronous.view(np.uint16)[address // 2]


@functools.cache
def _operand_offsets(
    rows: int, swizzle: int, leading: int, stride: int, transposed: bool
) -> np.ndarray:
    row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
    if not transposed:
        return row // 8 * stride + row % 8 * swizzle + column * 2
    span = swizzle // 2
    return row // span * leading + column // 8 * stride + column % 8 * swizzle + row % span * 2
