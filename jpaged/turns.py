"""Who may use an engine, of threads that ask at once: FairLock, Turns of groups, and Stepping, the
role of the one that steps.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from jpaged.errors import ConfigError, RequestError

FORKED = "this LLM was made before the process was forked, and does not run here: make it anew"
LOOK_S = 0.1  # how long a thread waits to be woken before it looks by itself


num_forks = 0  # between this process and the one that imported this


def _count_fork() -> None:
    global num_forks
    num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class FairLock:
    """A re-entrant lock, first come first served.

    The queue is that of Craig, Landin and Hagersten ("Building FIFO and priority-queuing spin locks
    from atomic swap", 1993): a thread waits for the place of the one that asked before it.
    `threading.RLock` alone promises no order: a thread that asks again at once may always win.

    Every hold is a `with` of a lock in C, so an exception or a KeyboardInterrupt on any line, also
    while a thread waits, releases all that the thread has. Such a thread may let the next one past
    the queue early; the RLock still admits one thread only.
    """

    def __init__(self) -> None:
        self._forks = num_forks
        self._lock: Any = threading.RLock()  # Any: typeshed does not know `_is_owned`
        self._swap = threading.Lock()  # of `_last`
        self._last = threading.Lock()  # the place of the thread that asked last

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return self._lock._is_owned()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it inside the block; a thread that holds it already goes on at once. ConfigError in
        a fork of the process that made it, whose other threads are not there to release it.
        """
        if self._forks != num_forks:
            raise ConfigError(FORKED)
        if self._lock._is_owned():
            yield
            return
        place = threading.Lock()
        with place:
            with self._swap:
                before, self._last = self._last, place
            with before:
                pass  # every thread that asked earlier is done
            with self._lock:
                yield


class Turns:
    """A re-entrant lock of groups: threads of one group hold it together, and None is a group of
    one thread alone. First come first served: a thread waits for all of other groups that asked
    before it, and for none that asked after it.

    Whatever interrupts a thread on any line releases what it has, as in FairLock.
    """

    def __init__(self) -> None:
        self._swap = threading.Lock()  # of asking
        # The places of threads that hold it or wait, in the order in which they asked: locks that
        # are held meanwhile. An interrupted thread may leave one behind, free.
        self._places: dict[Any, object] = {}
        self._mine = threading.local()

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread holds it."""
        place = getattr(self._mine, "place", None)
        return place is not None and place._is_owned()

    @contextlib.contextmanager
    def held(self, group: object = None) -> Iterator[bool]:
        """Hold it inside the block, with others of this group; a thread that holds it already, as
        of any group, goes on at once. Yield whether it had not held it before.
        """
        mine = getattr(self._mine, "place", None)
        if mine is not None and mine._is_owned():
            yield False
            return
        place: Any = threading.RLock()  # Any: typeshed does not know `_is_owned`
        with place:
            try:
                with self._swap:
                    asked, self._places[place] = list(self._places.items()), group
                for before, other in asked:
                    if group is None or other != group:
                        with before:
                            pass  # it is done
                        self._places.pop(before, None)
                self._mine.place = place
                yield True
            finally:
                self._places.pop(place, None)


class Waiter(Protocol):
    """Who waits for requests, as Stepping knows it. Compared by identity."""

    @property
    def requests(self) -> object:
        """What has not come yet; false where all has."""
        ...

    @property
    def wake(self) -> Callable[[], None]:
        """What has it ask for the role again."""
        ...


class Holder(NamedTuple):
    """Who has a role, as long as `place` is held. thread: its identity."""

    place: threading.Lock
    thread: int


class Stepping:
    """The role of the thread that steps an engine. Of those that wait for their requests one has
    it, and steps for all; whose requests have ended hands it to another. `is_paused`: nobody steps.

    Whatever interrupts a thread on any line gives up its role, as in FairLock. An interrupt may
    fall before the next one is woken, so those who wait ask again every LOOK_S.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._swap = threading.Lock()  # of `_holder`
        self._holder = Holder(threading.Lock(), 0)
        # In the order in which they came, and what each holds meanwhile. An interrupted thread may
        # leave its waiter behind, with a free place.
        self._waiting: dict[Waiter, threading.Lock] = {}
        self._paused_by = 0  # the thread's identity
        self._resumed = threading.Event()

    @contextlib.contextmanager
    def role(self, waiter: Waiter) -> Iterator[bool]:
        """Yield whether this thread has the role inside the block. Where it has not, the waiter is
        woken once it can be had.
        """
        has, place = self.is_mine, threading.Lock()
        try:
            with place:
                self._waiting[waiter] = place
                if not has and not self.is_paused:
                    with self._swap:
                        if not self._holder.place.locked():
                            self._holder = Holder(place, threading.get_ident())
                    has = self._holder.place is place
                yield has and not self.is_paused
        finally:
            self._waiting.pop(waiter, None)
            if self._waiting and not self._holder.place.locked():
                self._wake_next()

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread has the role."""
        holder = self._holder
        return holder.thread == threading.get_ident() and holder.place.locked()

    def _wake_next(self) -> None:
        for waiter, place in list(self._waiting.items()):
            if not place.locked():
                self._waiting.pop(waiter, None)
            elif waiter.requests:
                waiter.wake()
                return

    def pause(self) -> None:
        """Have nobody step until `resume`; the engine is at rest, and this thread's."""
        self.is_paused, self._paused_by = True, threading.get_ident()
        self._resumed.clear()

    def resume(self) -> None:
        """Let those step who wait."""
        self.is_paused = False
        self._resumed.set()
        for waiter in list(self._waiting):
            waiter.wake()

    def check_not_mine(self) -> None:
        """RequestError where this thread has paused it, and would wait for itself."""
        if self.is_paused and self._paused_by == threading.get_ident():
            raise RequestError("this thread has paused the LLM: it can step after resume()")

    def wait_resumed(self) -> None:
        """Wait while it is paused by another thread; RequestError where this one has."""
        self.check_not_mine()
        while self.is_paused:
            self._resumed.wait(LOOK_S)
