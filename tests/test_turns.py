"""FairLock and Turns: one thread or group at a time, in the order in which they asked, whatever
interrupts one. Stepping: the role of one thread, whatever interrupts it.
"""

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from jpaged import turns
from jpaged.turns import FairLock, Stepping, Turns
from tests.interrupts import interrupt_at

SECONDS = 60.0  # after which a thread that should have ended hangs


def start(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread waits for ever"


def queue_up(lock: FairLock, work: Callable[[], Any]) -> threading.Thread:
    """A thread that does some work in the lock; it has asked for it when this returns."""

    def hold() -> None:
        with lock.held():
            work()

    last = lock._last
    thread = start(hold)
    while lock._last is last:
        pass
    return thread


def test_first_come_first_served() -> None:
    lock, order = FairLock(), []
    with lock.held():
        threads = [queue_up(lock, lambda i=i: order.append(i)) for i in range(16)]
    with lock.held():  # asked for at once, and yet after all of them
        order.append("again")
    join(*threads)
    assert order == [*range(16), "again"]


def test_one_at_a_time() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with lock.held():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                with lock.held():  # re-entrant
                    assert lock.is_mine
                inside[0] -= 1
            assert not lock.is_mine

    join(*[start(work) for _ in range(8)])
    assert most == [1]


def test_an_exception_inside_releases_it() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock.held(), lock.held():
        _ = 1 // 0
    assert not lock.is_mine
    join(start(lambda: lock.held().__enter__()))


def interrupt_main() -> None:
    """As Ctrl-C does, also while the main thread waits."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def interrupted(work: Callable[[], Any], by: threading.Thread) -> None:
    """Do some work again and again until a thread interrupts it."""
    # A job that a shell has put in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        by.start()
        while True:
            work()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    join(by)


def test_interrupts_of_who_takes_it_leave_it_free() -> None:
    lock, ended = FairLock(), threading.Event()
    turns = [0, 0]

    def hold(i: int) -> None:
        with lock.held(), lock.held():
            turns[i] += 1

    def other() -> None:
        while not ended.is_set():
            hold(1)

    thread = start(other)
    for i in range(150):
        interrupted(lambda: hold(0), by=threading.Timer(1e-3 + 1e-5 * i, interrupt_main))
        assert not lock.is_mine
        before = turns[1]
        join(queue_up(lock, lambda: None))
        while turns[1] == before:
            assert thread.is_alive()
    ended.set()
    join(thread)
    assert turns[0] > 0


def test_an_interrupt_of_who_waits_lets_nobody_in() -> None:
    """The main thread stands between one that holds the lock and one that waits."""
    for _ in range(3):
        lock, release, holds = FairLock(), threading.Event(), list[str]()
        is_held = threading.Event()

        def hold(is_held: threading.Event = is_held, release: threading.Event = release) -> None:
            is_held.set()
            release.wait(SECONDS)

        first = queue_up(lock, hold)
        assert is_held.wait(SECONDS)  # else the last thread may get past it
        behind: list[threading.Thread] = []

        def come(
            lock: FairLock = lock,
            place: Any = lock._last,
            behind: list[threading.Thread] = behind,
            holds: list[str] = holds,
        ) -> None:
            while lock._last is place:
                pass  # until the main thread is in the queue
            behind.append(queue_up(lock, lambda: holds.append("last")))
            interrupt_main()

        def wait(lock: FairLock = lock) -> None:
            with lock.held():
                raise AssertionError("two threads hold it")

        interrupted(wait, by=threading.Thread(target=come, daemon=True))
        time.sleep(0.01)
        assert not holds and not lock.is_mine
        release.set()
        join(first, *behind)
        assert holds == ["last"]


class Waiting:
    """A Waiter that counts how often it was woken."""

    requests = True

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def ask_in_vain(
    stepping: Stepping, waiter: Waiting, asked: threading.Event, leaves: threading.Event
) -> None:
    """Ask for a role that another thread has, and wait beside it."""
    with stepping.role(waiter) as has:
        assert not has
        asked.set()
        leaves.wait(SECONDS)


def test_an_interrupt_anywhere_gives_up_the_role() -> None:
    """And what it leaves behind stands in nobody's way."""
    place, was_interrupted, inside = 0, True, 0
    while was_interrupted:
        was_interrupted, stepping, second = False, Stepping(), Waiting()
        try:
            with interrupt_at(place, turns), stepping.role(Waiting()) as has:
                inside += has
        except KeyboardInterrupt:
            was_interrupted = True
        assert not stepping.is_mine
        with stepping.role(Waiting()) as has:
            assert has and stepping.is_mine
            with stepping.role(Waiting()) as has_again:
                assert has_again

            asked, leaves = threading.Event(), threading.Event()
            thread = start(partial(ask_in_vain, stepping, second, asked, leaves))
            assert asked.wait(SECONDS)
        assert second.woken == 1
        leaves.set()
        join(thread)
        assert not stepping._waiting
        place += 1
    assert place > 8 and inside > 1


@pytest.mark.parametrize("kind", [FairLock, Turns])
def test_an_interrupt_anywhere_releases_it(kind: type[FairLock] | type[Turns]) -> None:
    place, was_interrupted, inside = 0, True, 0
    lock = kind()
    while was_interrupted:
        was_interrupted = False
        try:
            with interrupt_at(place, turns), lock.held():
                inside += 1
        except KeyboardInterrupt:
            was_interrupted = True
        assert not lock.is_mine

        join(start(lambda: lock.held().__enter__()))
        place += 1
    assert place > 4 and inside > 1
