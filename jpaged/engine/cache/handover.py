"""Handover: requests whose blocks are written through end once their blocks are where others find
them, so that whoever reads an answer may ask another engine to go on from it.
"""

import dataclasses
import time
from collections.abc import Iterable

from jpaged.engine.cache.block_files import BlockKey
from jpaged.engine.cache.disk import Disk
from jpaged.engine.sequence import Request

MOST_S = 10.0  # a request is held back at most
LOOK_S = 0.005  # a wait for writes keeps the engine no longer from what others ask of it


@dataclasses.dataclass
class Held:
    """A request that has ended. unwritten: what was to be written then, its blocks among it, and
    still is. until: when it is held back no longer.
    """

    request: Request
    unwritten: set[BlockKey]
    until: float


class Handover:
    """The requests of one engine that have ended and are held back. late: how many had to go before
    all of their blocks were written.
    """

    def __init__(self, disk: Disk):
        self._disk = disk
        self._held: list[Held] = []
        self.late = 0

    def split(
        self, ended: Iterable[Request], unwritten: set[BlockKey]
    ) -> tuple[list[Request], list[Request]]:
        """Return those of these requests that may go, and those that are held back. unwritten: what
        is to be written now.
        """
        now, before = time.monotonic(), {id(held.request): held for held in self._held}
        ready, self._held = list[Request](), []
        for request in ended:
            held = before.get(id(request)) or Held(request, set(unwritten), now + MOST_S)
            held.unwritten &= unwritten
            if held.unwritten and now < held.until:
                self._held.append(held)
                continue
            self.late += bool(held.unwritten)
            ready.append(request)
        return ready, [held.request for held in self._held]

    def wait(self) -> None:
        """Wait a moment for what is being written, if a request is held back for it."""
        if self._held:
            self._disk.wait(LOOK_S)
