"""Holdings: what a replica says of the prefixes that it holds, in few bytes, to routers that may
miss some of it.

A prefix of whole blocks is known by the chained hash of its last block (see engine/cache), which
holds the salt, the adapter, the images and all tokens before. A replica counts the versions of its
set. A report is what has come and gone since the version that this router was last told of, or all
of it. The router sees by the number whether it has missed a report, and by `life` whether the
replica has begun anew.
"""

import collections
import dataclasses
import secrets
from collections.abc import Iterable

MOST_KEYS = 1 << 16  # that a replica tells of: half a MiB
MOST_CHANGES = 64  # versions that are kept for routers that are behind
MOST_ROUTERS = 16  # whose last versions are remembered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a replica holds. life: a number that no other life of it has. version: of its set now.
    since: the version of which `added` and `dropped` are the changes; None: `added` is all of it.
    shift: only keys whose lowest `shift` bits are 0 are told of, so that a large set stays small.
    """

    life: int
    version: int
    since: int | None
    shift: int = 0
    added: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()


class Holdings:
    """The replica's side. most: keys that it tells of at most."""

    def __init__(self, most: int = MOST_KEYS):
        self._most = most
        self._life, self._version, self._shift = secrets.randbits(63), 0, 0
        self._held: frozenset[int] = frozenset()
        self._changes = collections.deque[tuple[frozenset[int], frozenset[int]]]()
        self._last: collections.OrderedDict[str, int] = collections.OrderedDict()  # by router

    def update(self, keys: Iterable[int]) -> None:
        """Take what is held now."""
        held, shift = frozenset(keys), 0
        sampled = held
        while len(sampled) > self._most:
            shift += 1
            sampled = frozenset(key for key in sampled if not key & ((1 << shift) - 1))
        if shift == self._shift and sampled == self._held:
            return
        added, dropped = sampled - self._held, self._held - sampled
        if shift != self._shift:
            self._changes.clear()  # who is behind is told all
        else:
            self._changes.append((added, dropped))
            if len(self._changes) > MOST_CHANGES:
                self._changes.popleft()
        self._held, self._shift = sampled, shift
        self._version += 1

    def report(self, router: str, *, whole: bool = False) -> Report | None:
        """Return what a router has not been told yet; None where there is nothing. whole: all."""
        since = None if whole else self._last.get(router)
        if since == self._version:
            return None
        self._last[router] = self._version
        self._last.move_to_end(router)
        if len(self._last) > MOST_ROUTERS:
            self._last.popitem(last=False)
        life, version, shift = self._life, self._version, self._shift
        if since is None or self._version - since > len(self._changes):
            return Report(life=life, version=version, since=None, shift=shift, added=self._held)
        added, dropped = set[int](), set[int]()
        for come, gone in list(self._changes)[since - self._version :]:
            dropped = (dropped - come) | gone
            added = (added - gone) | come
        return Report(
            life=life,
            version=version,
            since=since,
            shift=shift,
            added=frozenset(added),
            dropped=frozenset(dropped),
        )
