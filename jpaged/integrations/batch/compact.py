"""IdSet: a set of millions of ids in a few bytes each, where a Python set would take a hundred."""

import numpy as np
import xxhash

FEWEST = 1 << 12  # fewer new digests than this are not merged into the sorted array


class IdSet:
    """A set of strings by their 128-bit digests. They are sorted, at 16 bytes each; the newest
    eighth waits in a Python set to be merged.

    Two strings with the same xxh3_128 digest would be taken for one: among a billion ids the
    probability is about 10^-21.
    """

    def __init__(self) -> None:
        self._sorted = np.empty(0, "S16")
        self._new: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._new)

    def add(self, text: str) -> bool:
        """Add a string. Return whether it was new."""
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
