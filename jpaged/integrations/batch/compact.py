"""A set of millions of ids in a few bytes each, where Python's own would take a hundred."""

import numpy as np
import xxhash

FEWEST = 1 << 12  # digests that are worth sorting in


class IdSet:
    """Strings by their 128-bit digests: sorted, 16 bytes each, and the newest eighth in a Python
    set until they are sorted in.

    A false hit takes two strings of one xxh3_128 digest: among a billion ids about one chance in
    10^21.
    """

    def __init__(self) -> None:
        self._sorted = np.empty(0, "S16")
        self._new: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._new)

    def add(self, text: str) -> bool:
        """Return whether it was not there yet."""
        digest = xxhash.xxh3_128_digest(text.encode(errors="surrogatepass"))
        place = int(self._sorted.searchsorted(digest))
        there = self._sorted[place : place + 1].tobytes()
        if digest in self._new or there == digest:
            return False
        self._new.add(digest)
        if len(self._new) > max(FEWEST, len(self._sorted) // 8):
            new = np.fromiter(self._new, "S16", len(self._new))
            self._sorted = np.concatenate([self._sorted, new])
            self._sorted.sort()
            self._new = set()
        return True
