"""FairLock: a lock that threads get in the order in which they ask for it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


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
        self._lock: Any = threading.RLock()  # Any: typeshed does not know `_is_owned`
        self._swap = threading.Lock()  # of `_last`
        self._last = threading.Lock()  # the place of the thread that asked last

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return self._lock._is_owned()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it inside the block; a thread that holds it already goes on at once."""
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
