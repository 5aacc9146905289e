"""From the source to requests: skips what is not this run's to answer, parses the rest, a bounded
way ahead.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator

from jpaged.integrations.batch.compact import IdSet
from jpaged.integrations.batch.lines import BatchRequest, Settings, identify
from jpaged.integrations.batch.rows import Found
from jpaged.integrations.batch.source import LineError, Source

PIPE_WAIT_S = 0.05
AHEAD_BYTES = 64 << 20
LAST_LINE_S = 2.0  # to parse what was read already; a thread that waits for its input is left alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line that this run answers: its request as far as it could be read, and what is wrong
    with it.
    """

    request: BatchRequest
    raw: bytes
    error: Exception | None = None


class Intake:
    """Iterates a source once: `lines` yields what is to be answered, in the order of the input.

    shard: (i, N) takes the lines whose number - 1 leaves i when divided by N. earlier: rows of an
    output that is resumed; its lines are skipped. Ids are compared over the whole input, skipped
    lines and other shards too: a line is a duplicate in a resumed or sharded run exactly if it is
    one in an undisturbed one. A line's id counts even where something else is wrong with the line.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        *,
        shard: tuple[int, int] | None = None,
        earlier: Found | None = None,
    ):
        self._source, self._settings, self._shard = source, settings, shard or (0, 1)
        self._found = earlier or Found("")
        self._ids = IdSet()
        self.seen = 0  # lines of this shard so far, those that are skipped too
        self.ended = False

    def lines(self) -> Generator[Line]:
        """Raises whatever reading raises, and BatchError where the input is not the one that was
        answered.
        """
        for number, raw in self._source:
            mine = (number - 1) % self._shard[1] == self._shard[0]
            self.seen += mine
            if mine and number not in self._found:
                yield self._parse(number, raw)
            elif isinstance(raw, bytes) and not self._source.text:
                request_id = identify(raw, number)
                if request_id is not None:
                    self._ids.add(str(request_id))
                if mine:
                    self._found.check_id(number, request_id)
        self.ended = True

    def total(self) -> tuple[int | None, bool]:
        """Return how many lines this shard has, and whether that is exact: else by the share of the
        bytes that was read.
        """
        if self.ended:
            return self.seen, True
        if (known := self._source.total()) is not None:
            return len(range(self._shard[0], known, self._shard[1])), True
        if not (fraction := self._source.fraction()):
            return None, False
        return max(round(self.seen / fraction), self.seen), False

    def _parse(self, number: int, raw: bytes | LineError) -> Line:
        request = BatchRequest(number=number)
        if isinstance(raw, LineError):
            return Line(request=request, raw=b"", error=raw)
        error: Exception | None = None
        try:
            request.parse(raw, self._settings)
        except Exception as e:  # whatever one line provokes is that line's error
            error = e
        if request.id is not None and not self._ids.add(str(request.id)):
            message = f"id {request.id!r} is an earlier line's"
            error = LineError(message, param="custom_id", code="duplicate_id")
        return Line(request=request, raw=raw, error=error)


class ReadAhead:
    """Lines of an intake, read by a thread so that a slow pipe never holds the engine up.

    At most `lines` of them wait, of AHEAD_BYTES in all (or one that is larger).
    """

    def __init__(self, intake: Intake, lines: int):
        self._intake, self._most = intake, lines
        self._queue: collections.deque[Line] = collections.deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._patience = PIPE_WAIT_S
        self._read_all = False
        self.error: Exception | None = None  # why the input could not be read to its end
        # A daemon: what waits for a silent pipe must not hold the exit up.
        self._thread = threading.Thread(target=self._read, name="jpaged reader", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come; `error` says if that is the input's end."""
        with self._changed:
            return self._read_all and not self._queue

    def next(self, *, wait: float | None = None) -> Line | None:
        """Return the next line; None at the end, or when none came in `wait` seconds.

        Without `wait`, a pipe that was not slow last time gets a moment, so that the engine's first
        batches are full.
        """
        deadline = time.monotonic() + (self._patience if wait is None else wait)
        with self._changed:
            while not self._queue:
                left = deadline - time.monotonic()
                if self._read_all or left <= 0:
                    self._patience = 0.0001
                    return None
                self._changed.wait(left)
            line = self._queue.popleft()
            self._bytes -= len(line.raw)
            self._patience = PIPE_WAIT_S
            self._changed.notify_all()
            return line

    def close(self) -> None:
        """Read no further, and see a line through that is being parsed: a thread that the
        interpreter's exit finds inside pydantic's compiled code aborts the process.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(LAST_LINE_S)

    def _read(self) -> None:
        try:
            with contextlib.closing(self._intake.lines()) as lines:
                for line in lines:
                    with self._changed:
                        while not self._closed and self._queue and self._is_full(line):
                            self._changed.wait()
                        if self._closed:
                            return
                        self._queue.append(line)
                        self._bytes += len(line.raw)
                        self._changed.notify_all()
        except Exception as e:  # handed over: the run ends once what is running has
            self.error = e
        finally:
            with self._changed:
                self._read_all = True
                self._changed.notify_all()

    def _is_full(self, line: Line) -> bool:
        return len(self._queue) >= self._most or self._bytes + len(line.raw) > AHEAD_BYTES
