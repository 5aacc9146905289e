"""A run over a batch file: keep a window of requests in the engine, write what finishes, lose
nothing.
"""

import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Literal

from jpaged.errors import JpagedError
from jpaged.integrations.batch.answers import ErrorStyle, answer_line, error_line
from jpaged.integrations.batch.intake import Intake, Line, ReadAhead
from jpaged.integrations.batch.journal import Existing, Journal, Writer, to_read
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.manifest import write_json
from jpaged.integrations.batch.progress import Progress
from jpaged.integrations.batch.source import BatchError, Source
from jpaged.integrations.batch.stats import SAMPLES, BatchStats

OK, FATAL, FAILED_LINES, HOPELESS, BROKEN_PIPE = (
    0,
    1,
    2,
    3,
    141,
)  # exit statuses; 128 + its number after a signal
ENOUGH_LINES = 100  # before an error rate says anything
POLL_S = 0.2  # how often a run that waits for its input looks whether it is to stop
LAST_MOMENT_S = 1.0  # after the grace period, for a step that does not return
Ending = Literal["complete", "stopped", "hopeless"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, where its answers go, and when to stop.

    output: None prints to read, "-" writes JSONL to stdout. window: requests in the engine at once.
    grace: seconds that running requests have after a signal. max_error_rate: failed by answered
    lines above which the run ends. again: the command line that resumes it.
    """

    output: str | None
    existing: Existing = "refuse"
    retry_failed: bool = False
    ordered: bool = False
    window: int = 1024
    grace: float = 30.0
    max_error_rate: float | None = None
    error_style: ErrorStyle = "openai"
    shard: tuple[int, int] | None = None
    summary: str | None = None
    again: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return self.output not in (None, "-")


class Interrupts:
    """SIGINT and SIGTERM inside the block: the first asks the run to end, the second ends it with
    KeyboardInterrupt.

    If the run has not ended `grace` seconds after the first, `late` is called in a thread of its
    own.
    """

    def __init__(self, grace: float, late: Callable[[], None] = lambda: None):
        self._grace, self._late = grace, late
        self._old: dict[int, Any] = {}
        self.signal: int | None = None
        self._deadline = 0.0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def is_late(self) -> bool:
        return self.signal is not None and time.monotonic() >= self._deadline

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._deadline = number, time.monotonic() + self._grace
        said = (
            f"serve_batch: finishing what runs, at most {self._grace:g} s; a second "
            "signal stops at once\n"
        )
        os.write(2, said.encode())  # not print: its lock may be held by what was interrupted
        self._timer = threading.Timer(self._grace + LAST_MOMENT_S, self._late)
        self._timer.daemon = True
        self._timer.start()


class Run:
    """One run's loop. Its counters are in `stats`."""

    def __init__(
        self, llm: Any, writer: Writer, stats: BatchStats, *, job: Job, interrupts: Interrupts
    ):
        self.llm, self.writer, self.stats, self.job, self.interrupts = (
            llm,
            writer,
            stats,
            job,
            interrupts,
        )
        self._pending: dict[str, tuple[BatchRequest, float]] = {}

    def serve(self, intake: Intake, reader: ReadAhead, progress: Progress) -> Ending:
        """Answer lines until there are no more, or the run is to stop: then what runs is finished
        first.

        An ordered run also stops reading while 8 windows of lines wait for one that is slow: memory
        stays bounded.
        """
        pending, window = self._pending, self.job.window
        while True:
            while len(pending) < window and self.writer.held < 8 * window and not self._must_stop:
                line = reader.next(wait=None if pending else POLL_S)
                if line is None:
                    break
                self._admit(line)
            if pending and self.interrupts.is_late:
                return self._cut_off()
            if pending:
                self._step()
            self.writer.flush()
            self.stats.total, self.stats.total_is_exact = intake.total()
            if not pending and reader.ended:
                return "complete"
            if not pending and self._must_stop:
                return "stopped" if self.interrupts.signal is not None else "hopeless"
            self.stats.running = len(pending)
            progress.update(self.llm)

    def _cut_off(self) -> Ending:
        """End what runs; it is not answered."""
        for request_id in self._pending:
            self.llm.abort(request_id)
        self._pending.clear()
        return "stopped"

    @property
    def _must_stop(self) -> bool:
        return self.interrupts.signal is not None or self._is_hopeless

    @property
    def _is_hopeless(self) -> bool:
        here, most = self.stats.ok + self.stats.failed, self.job.max_error_rate
        return most is not None and here >= ENOUGH_LINES and self.stats.failed > most * here

    def _admit(self, line: Line) -> None:
        request = line.request
        self.writer.begin(request.number)
        self.stats.ignored.update(request.ignored)
        if line.error is not None:
            self._fail(request, line.error)
            return
        try:
            began, request_id = time.perf_counter(), f"line-{request.number}"
            is_remote = getattr(
                self.llm, "is_remote", False
            )  # then the engine's own process makes the prompt
            prompt = request.prompt_for if is_remote else request.prompt_for(self.llm)
            self._pending[self.llm.add_request(prompt, request.params, request_id=request_id)] = (
                request,
                began,
            )
        except Exception as e:  # whatever one line provokes is that line's error
            self._fail(request, e)

    def _step(self) -> None:
        finished = self.llm.step()
        if not finished and not self.llm.has_unfinished():
            raise BatchError(f"the engine is idle with {len(self._pending)} requests unanswered")
        for output in finished:
            request, began = self._pending.pop(output.request_id)
            if output.error is not None:
                self._fail(request, output.error)
            elif all(
                done.finish_reason != "abort" for done in output.outputs
            ):  # what was cut off is not done
                try:
                    line = answer_line(request, output)
                except Exception as e:
                    self._fail(request, e)
                    continue
                self.stats.add(output, time.perf_counter() - began)
                self.writer.write(request, line)
                if len(self.stats.samples) < SAMPLES:
                    self.stats.samples.append(to_read(request, line).decode())

    def _fail(self, request: BatchRequest, error: BaseException | str) -> None:
        self.stats.fail(request.number, error)
        self.writer.write(request, error_line(request, error, self.job.error_style))


def run_batch(
    job: Job,
    source: Source,
    manifest: Mapping[str, Any],
    make_llm: Callable[[], Any],
    make_settings: Callable[[Any], Settings],
    *,
    stats: BatchStats | None = None,
    stdout: IO[bytes] | None = None,
) -> int:
    """Everything from an opened source to the exit status. stdout: where answers go that go to no
    file.

    stats: counters to count in, for whoever watches them from outside; they begin when the engine
    is there. Nothing of an output file is changed before that. Raises BatchError (with what is
    answered already, and how to resume, in its message) and OSError where the output cannot be
    written.
    """
    journal = (
        Journal(job.output, manifest, _grows(source))
        if job.is_file and job.output is not None
        else None
    )
    try:
        if journal is not None:
            journal.open(job.existing, retry_failed=job.retry_failed)
        llm = make_llm()
        settings = make_settings(llm)
        file = (stdout or sys.stdout.buffer) if journal is None else journal.begin()
        return _run(
            job, source, journal, file, llm, settings, BatchStats() if stats is None else stats
        )
    finally:
        if journal is not None:
            journal.close()


def _grows(source: Source) -> str | None:
    return source.path if "bytes" in source.identity() else None


def _run(
    job: Job,
    source: Source,
    journal: Journal | None,
    file: IO[bytes],
    llm: Any,
    settings: Settings,
    stats: BatchStats,
) -> int:
    found = None if journal is None or not journal.is_regular else journal.found
    stats.began, stats.began_at = time.perf_counter(), time.time()
    if found is not None:
        stats.earlier_ok, stats.earlier_failed = (
            len(found.done) - len(found.failed),
            len(found.failed),
        )
    stats.watch(llm)
    intake = Intake(source, settings, shard=job.shard, found=found)
    writer = Writer(file, readable=job.output is None, ordered=job.ordered, found=found)
    progress = Progress(_progress_mode(job), stats)
    reader = ReadAhead(intake, job.window)

    def answered() -> str:
        """What there is of a run that does not reach its end, and how to go on."""
        text = f"{stats.done if found is None else len(found.done)} lines were answered"
        return f"{text} in {job.output}; to go on: {shlex.join(job.again)}" if job.is_file else text

    def stopped() -> int:
        print(f"serve_batch: interrupted: {answered()}", file=sys.stderr, flush=True)
        return 128 + (interrupts.signal or signal.SIGINT)

    # A device that does not return is left as it is: what was answered is in the file.
    with Interrupts(job.grace, lambda: os._exit(stopped())) as interrupts:
        try:
            ending = Run(llm, writer, stats, job=job, interrupts=interrupts).serve(
                intake, reader, progress
            )
            writer.flush(everything=True)
            if journal is not None:
                complete = ending == "complete" and reader.error is None
                journal.finish(
                    complete=complete,
                    lines=intake.seen,
                    ordered=job.ordered,
                    source=source.identity(),
                )
        except OSError:
            raise
        except KeyboardInterrupt:
            writer.flush(everything=True)
            return stopped()
        except Exception as e:
            writer.flush(everything=True)
            raise BatchError(f"the run stopped: {sentence(e)} ({answered()})") from e
        finally:
            reader.close()
            progress.close()
    stats.ended = time.perf_counter()
    stats.watch(llm)
    print(stats.table(), file=sys.stderr if job.output == "-" else sys.stdout, flush=True)
    if (
        summary := job.summary or (f"{job.output}.summary.json" if found is not None else None)
    ) is not None:
        write_json(
            summary, {"status": ending if reader.error is None else "input error", **stats.record()}
        )
    if reader.error is not None:
        raise BatchError(
            f"cannot read the input any further: {sentence(reader.error)} ({answered()})"
        )
    if ending == "stopped":
        return stopped()
    if ending == "hopeless":
        seen = (
            f"{stats.failed} of {stats.ok + stats.failed} lines failed, above "
            f"--max-error-rate {job.max_error_rate}"
        )
        print(f"serve_batch: {seen}: {answered()}", file=sys.stderr)
        return HOPELESS
    return FAILED_LINES if stats.all_failed else OK


def _progress_mode(job: Job) -> Literal["bar", "lines", "none"]:
    terminal = sys.stderr.isatty()
    if job.output is None and terminal and sys.stdout.isatty():
        return "none"  # answers and a bar would overwrite each other
    return "bar" if terminal else "lines"


def sentence(error: BaseException) -> str:
    """An error in one line: our own as they are, others with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return text if isinstance(error, JpagedError | OSError) else f"{type(error).__name__}: {text}"
