"""Turns the lines of a source into requests: skips lines that this run need not answer, and parses
the others a bounded number of lines ahead.
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
LAST_LINE_S = (
    2.0  # seconds to finish parsing a line; a thread that waits for input is not waited for
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line that this run answers: its request as far as it could be read, and its error if there
    is one.
    """

    request: BatchRequest
    raw: bytes
    error: Exception | None = None


class Intake:
    """Iterates a source once: `lines` yields the lines to answer, in the order of the input.

    shard: (i, N) takes the lines for which number - 1 has the remainder i modulo N. earlier: the
    rows of an output that is resumed; their lines are skipped. Ids are compared over the whole
    input, including skipped lines and other shards, so that a line is a duplicate in a resumed or
    sharded run exactly if it is one in a single whole run. The id of a line counts even if the line
    has another error.
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
        self.seen = 0  # lines of this shard so far, including skipped ones
        self.ended = False

    def lines(self) -> Generator[Line]:
        """Yield the lines. Raises the errors of reading, and BatchError if the input is not the one
        that the earlier output answered.
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
        """Return the number of lines of this shard, and whether it is exact or estimated from the
        bytes read so far.
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
        except Exception as e:  # an error of one line must not end the run
            error = e
        if request.id is not None and not self._ids.add(str(request.id)):
            message = f"id {request.id!r} is the id of an earlier line"
            error = LineError(message, param="custom_id", code="duplicate_id")
        return Line(request=request, raw=raw, error=error)


class ReadAhead:
    """Reads lines of an intake in a thread, so that a slow pipe never delays the engine.

    At most `lines` of them wait, with at most AHEAD_BYTES in all (or one larger line).
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
        # A daemon thread: waiting for a silent pipe must not delay the exit.
        self._thread = threading.Thread(target=self._read, name="jpaged reader", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether no further line will come; `error` says whether reading failed."""
        with self._changed:
            return self._read_all and not self._queue

    def next(self, *, wait: float | None = None) -> Line | None:
        """Return the next line; None at the end, or if none arrives within `wait` seconds.

        Without `wait`, a pipe that was fast last time gets a moment, so that the first batches of
        the engine are full.
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
        """Stop reading, and let the line that is being parsed finish: if the interpreter exits
        while a thread is in pydantic's compiled code, the process aborts.
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
        except Exception as e:  # passed on: the run ends once the running requests have ended
            self.error = e
        finally:
            with self._changed:
                self._read_all = True
                self._changed.notify_all()

    def _is_full(self, line: Line) -> bool:
        return len(self._queue) >= self._most or self._bytes + len(line.raw) > AHEAD_BYTES
