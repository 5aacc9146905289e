"""Sets of millions of lines in a few bytes each, where Python's own would take a hundred."""

from array import array

import xxhash

SMALLEST = 1 << 10


class LineSet:
    """Line numbers: a bit each, up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def add(self, number: int) -> None:
        byte, bit = divmod(number, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits) // 8)))
        self._count += not self._bits[byte] >> bit & 1
        self._bits[byte] |= 1 << bit

    def __sub__(self, other: "LineSet") -> "LineSet":
        left = LineSet()
        cut = int.from_bytes(other._bits[: len(self._bits)], "little")
        bits = int.from_bytes(self._bits, "little")
        left._bits = bytearray((bits & ~cut).to_bytes(len(self._bits), "little"))
        left._count = (bits & ~cut).bit_count()
        return left

    def remove(self, number: int) -> None:
        if number in self:
            byte, bit = divmod(number, 8)
            self._bits[byte] &= ~(1 << bit)
            self._count -= 1


class IdSet:
    """Strings by their 128-bit digests, in a table with open addressing: 16 bytes a slot, two
    thirds full at most.

    A false hit takes two strings of one xxh3_128 digest: among a billion ids about one chance in
    10^21.
    """

    def __init__(self) -> None:
        self._low, self._high = _empty(SMALLEST), _empty(SMALLEST)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Whether it was not there yet."""
        digest = xxhash.xxh3_128_intdigest(text.encode(errors="surrogatepass"))
        low, high = digest & (1 << 64) - 1, digest >> 64 or 1  # both zero is an empty slot
        slot = self._slot(low, high)
        if self._high[slot]:
            return False
        self._low[slot], self._high[slot] = low, high
        self._count += 1
        if self._count * 3 > len(self._low) * 2:
            self._grow()
        return True

    def _slot(self, low: int, high: int) -> int:
        """Where the digest is, or the empty slot where it would be."""
        lows, highs, mask = self._low, self._high, len(self._low) - 1
        slot = low & mask
        while highs[slot] and (lows[slot] != low or highs[slot] != high):
            slot = slot + 1 & mask
        return slot

    def _grow(self) -> None:
        old = self._low, self._high
        self._low, self._high = _empty(2 * len(old[0])), _empty(2 * len(old[0]))
        for low, high in zip(*old, strict=True):
            if high:
                slot = self._slot(low, high)
                self._low[slot], self._high[slot] = low, high


def _empty(size: int) -> array:
    return array("Q", (0,)) * size
