"""Measure what it takes a cache line to go from one core to another and back, halved: it tells
whether two cores share a die, which a virtual machine does not say and which may change while it
runs. It imports nothing but the standard library.

    python scripts/_handoff.py        # prints {"handoff_ns": 430.0}, null if it cannot be told

Two processes on a core each count up in turns in memory that they share. Python's own loop is in
the figure too, so that one die and two give some 160 and 450 ns (on a Zen 3, where the same in C
took 216 to 242 on two); `ONE_DIE_NS` parts them.
"""

import json
import mmap
import os
import signal
import statistics
import sys
import time
from types import FrameType

TURNS, BATCHES = 2000, 15
ONE_DIE_NS = 300  # and less: the cores share a die
MOST_S = 3  # neither process waits longer for the other


def handoff_ns(cores: tuple[int, int]) -> float:
    """Return the nanoseconds from a write on one core to its being seen on the other: the median of
    batches of turns.
    """
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    line = memoryview(shared).cast("Q")
    total = TURNS * BATCHES
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(MOST_S)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(MOST_S)  # a child inherits none
            os.sched_setaffinity(0, cores[1:])
            for turn in range(1, 2 * total, 2):
                while line[0] != turn:
                    pass
                line[0] = turn + 1
        finally:
            os._exit(0)
    batches, turn = [], 1
    try:
        os.sched_setaffinity(0, cores[:1])
        for _ in range(BATCHES):
            began = time.perf_counter_ns()
            for _ in range(TURNS):
                line[0] = turn
                while line[0] != turn + 1:
                    pass
                turn += 2
            batches.append((time.perf_counter_ns() - began) / (2 * TURNS))
    finally:
        signal.alarm(0)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return statistics.median(batches)


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main() -> int:
    cores = sorted(os.sched_getaffinity(0))
    try:
        measured = handoff_ns((cores[0], cores[1])) if len(cores) > 1 else None
    except TimeoutError:  # other work has one of the cores
        measured = None
    print(json.dumps({"handoff_ns": measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
