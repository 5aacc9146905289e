"""ReadAhead: requests that wait for blocks of theirs to be read from files, before they queue."""

import dataclasses
import time
from collections.abc import Iterable, Iterator

from jpaged.engine.cache.content import Content
from jpaged.engine.cache.costs import Costs
from jpaged.engine.cache.disk import LOOK_S as MOST_LOOK_S
from jpaged.engine.cache.disk import Disk, Fetch, Look
from jpaged.engine.cache.prefix_cache import Match, PrefixCache
from jpaged.engine.cache.tiers import TieredStore
from jpaged.engine.sequence import Request, Status
from jpaged.engine.types import Report

READ_BYTES = 1 << 30  # of blocks read for requests that do not run yet; one request may have more
LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.25, 30.0
LOOK_S = 0.005  # a wait for files keeps the engine no longer from what others ask of it


@dataclasses.dataclass
class Waiting:
    """A request that waits for its blocks. replica: that it was placed at. until: when it goes on
    without what is not there. fetch: None while there is no memory for it. look: while it is not
    known what there is of the contents in `asked`, which it keeps until then.
    """

    request: Request
    replica: int
    cache: PrefixCache
    until: float
    fetch: Fetch | None = None
    look: Look | None = None
    asked: list[Content] = dataclasses.field(default_factory=list)


class ReadAhead:
    """The requests of one engine whose blocks are read, in order of arrival: each queues when its
    blocks are there or its patience ends, whatever is there then. What was read is held until the
    request runs. fetches, late: how many there were, and how many whose patience ended.
    """

    def __init__(self, store: TieredStore, costs: Costs):
        self.store, self._costs = store, costs
        self._waiting: dict[str, Waiting] = {}
        self._queued: list[Waiting] = []  # what was read for them is held
        self.fetches = self.late = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def disk(self) -> Disk:
        return self.store.disk

    def begin(self, request: Request, replica: int, cache: PrefixCache) -> bool:
        """Start to read what a request needs from files; return whether it is to wait for it."""
        if self.disk.is_stuck:
            return False
        waiting = Waiting(request, replica, cache, 0.0)
        if self.disk.files.asks_ahead:
            return self._begin_look(waiting)
        return self._begin_fetch(waiting)

    def _begin_look(self, waiting: Waiting) -> bool:
        """Start to ask which blocks of a request there are; return whether it is to wait for it."""
        seq, cache = waiting.request.sequences[0], waiting.cache
        contents = cache.contents_of(seq, most=seq.next_read)
        is_here = cache.match(seq, most=seq.next_read).num_blocks == len(contents)
        if is_here and not self.store.writes_through:
            return False
        groups = range(self.store.num_groups)
        waiting.look = self.disk.look((content, g) for content in contents for g in groups)
        if waiting.look is None:
            return False
        waiting.asked, waiting.until = contents, time.monotonic() + MOST_LOOK_S
        self._waiting[waiting.request.request_id] = waiting
        return True

    def _begin_fetch(self, waiting: Waiting) -> bool:
        """Start to read what a request needs and what there is; return whether it is to wait for
        it.
        """
        request, cache = waiting.request, waiting.cache
        seq, queued = request.sequences[0], self.disk.reading_bytes
        match = cache.match(seq, most=seq.next_read, in_files=True, queued_bytes=queued)
        if not [slot for slots in match.slots for slot in slots.values() if slot.data is None]:
            return False
        size = sum([self.disk.codec.stored_bytes(x.group) for s in match.slots for x in s.values()])
        saved = self._costs.prefill.seconds(match.num_blocks * cache.block_size) or 0.0
        patience = max(4 * self._costs.fetch_seconds(size, size, queued), saved, LEAST_PATIENCE_S)
        if self._costs.disk.per_second is None:
            patience = MOST_PATIENCE_S
        waiting.until = time.monotonic() + min(patience, MOST_PATIENCE_S)
        self._waiting[request.request_id] = waiting
        self.fetches += 1
        self._start(waiting, match)
        return True

    def take_ready(self) -> Iterator[tuple[Request, int]]:
        """Yield the requests that are to queue now, with their replicas."""
        return self._take(may_wait=True)

    def take_all(self) -> Iterator[tuple[Request, int]]:
        """Yield all requests that wait, with their replicas: they wait no longer."""
        for waiting in self._waiting.values():
            waiting.until = 0.0
        return self._take(may_wait=False)

    def _take(self, *, may_wait: bool) -> Iterator[tuple[Request, int]]:
        """Yield the requests whose blocks are there or whose patience has ended. may_wait: whether
        one that has learnt what there is may wait for it, however long the engine's last step kept
        it from looking at the answer.
        """
        now = time.monotonic()
        for request_id, waiting in list(self._waiting.items()):
            if waiting.look is not None:
                if not waiting.look.done.is_set() and now < waiting.until:
                    continue
                is_known, waiting.look = waiting.look.done.is_set(), None
                self.late += not is_known
                if not is_known or not may_wait or not self._begin_fetch(waiting):
                    del self._waiting[request_id]
                    yield waiting.request, waiting.replica
                    continue
            if waiting.fetch is None and now < waiting.until and not self._start(waiting):
                continue
            if waiting.fetch is not None and not waiting.fetch.is_done:
                if now < waiting.until:
                    continue
                self.late += 1
            del self._waiting[request_id]
            if waiting.fetch is not None:
                self._queued.append(waiting)
            yield waiting.request, waiting.replica

    def wait(self) -> None:
        """Wait a moment for the first of them."""
        first = next(iter(self._waiting.values()))
        if first.look is not None:
            first.look.done.wait(LOOK_S)
        elif first.fetch is None:
            time.sleep(LOOK_S)
        else:
            first.fetch.wait(LOOK_S)

    def release_running(self) -> None:
        """Let go of what was read for requests that run by now, or never will."""
        if self._queued:
            kept = list[Waiting]()
            for waiting in self._queued:
                assert waiting.fetch is not None
                if waiting.request.sequences and _waits(waiting.request):
                    kept.append(waiting)
                else:
                    self.store.release(waiting.fetch)
            self._queued = kept

    def remove(self, request: Request) -> None:
        """Let go of a request that ends, if it waits here."""
        waiting = self._waiting.get(request.request_id)
        if waiting is not None and waiting.request is request:
            del self._waiting[request.request_id]
            if waiting.fetch is not None:
                self.store.release(waiting.fetch)

    def clear(self) -> None:
        """Forget all: whoever has the requests queues them."""
        for waiting in (*self._waiting.values(), *self._queued):
            if waiting.fetch is not None:
                self.store.release(waiting.fetch)
        self._waiting.clear()
        self._queued.clear()

    def requests(self) -> Iterable[Request]:
        """Return the requests that wait."""
        return [waiting.request for waiting in self._waiting.values()]

    def report(self) -> Report:
        """Return how many requests waited for files, and how many longer than was worth it."""
        return {"store_fetches": self.fetches, "store_late": self.late}

    def _start(self, waiting: Waiting, match: Match | None = None) -> bool:
        """Start the reads of a request if there is memory for what they bring; return whether that
        is so. match: what there is; None looks again.
        """
        seq, held = waiting.request.sequences[0], self.store.read_bytes
        if match is None:
            match = waiting.cache.match(seq, most=seq.next_read, in_files=True)
        slots = sorted(
            [(entry, slot) for slots in match.slots for entry, slot in slots.items()],
            key=lambda pair: pair[0],
        )
        size = sum([self.disk.codec.stored_bytes(x.group) for _, x in slots if x.data is None])
        if held and held + size > READ_BYTES:
            return False
        waiting.fetch = self.store.fetch(slots)
        return True


def _waits(request: Request) -> bool:
    return request.sequences[0].status is Status.WAITING
