"""A run over a batch file: keeps a window of requests in the engine, writes what finishes, and
loses nothing.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from jpaged.errors import JpagedError, RequestError, UnsupportedError
from jpaged.integrations.batch.answers import ErrorStyle, answer_line, error_line, pooled_line
from jpaged.integrations.batch.intake import Intake, Line, ReadAhead
from jpaged.integrations.batch.journal import Existing, Journal, Stream, bytes_of, to_read
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.manifest import write_json
from jpaged.integrations.batch.progress import Progress
from jpaged.integrations.batch.source import BatchError, Source
from jpaged.integrations.batch.stats import SAMPLES, BatchStats, CutBy
from jpaged.openai.pooled import POOLED_URLS, Embedding, PooledRequest, Task
from jpaged.request.outputs import RequestOutput

# Exit statuses. After a signal it is 128 + the signal's number.
OK, FATAL, FAILED_LINES, HOPELESS, BROKEN_PIPE = 0, 1, 2, 3, 141
ENOUGH_LINES = 100  # lines before the rate of errors is judged
POLL_S = 0.2  # interval at which a run that waits for input checks whether it must stop
LOADERS, MOST_LOADING = 4, 8  # threads; lines whose images are decoded at once
LAST_MOMENT_S = 1.0  # seconds after the grace period for a step that does not return
Ending = Literal["complete", "stopped", "hopeless"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run does with its answers, and when it stops.

    output: None prints text for a person, "-" writes JSONL to stdout. window: requests in the
    engine at once. grace: seconds for running requests after a signal. max_error_rate: the share of
    failed lines above which the run ends. program: the
    name that messages begin with. again: the command line that resumes the run.
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
    program: str = "serve_batch"
    again: tuple[str, ...] = ()


class Interrupts:
    """Handles SIGINT and SIGTERM inside the block: the first signal asks the run to end, the second
    raises KeyboardInterrupt.

    If the run has not ended `grace` seconds after the first signal, a thread calls `late`.
    """

    def __init__(
        self, grace: float, late: Callable[[], None] = lambda: None, program: str = "serve_batch"
    ):
        self._grace, self._late, self._program = grace, late, program
        self._old: dict[int, Any] = {}
        self.signal: int | None = None
        self._deadline = 0.0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Interrupts":
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only the main thread may set handlers
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
        said = f"finishing requests, at most {self._grace:g} s; a second signal stops at once"
        # Not print: the interrupted code may hold its lock.
        os.write(2, f"{self._program}: {said}\n".encode())
        self._timer = threading.Timer(self._grace + LAST_MOMENT_S, self._late)
        self._timer.daemon = True
        self._timer.start()


class Pooled(NamedTuple):
    """A line of embeddings, scores or ranks that waits for the next call. began: when it came."""

    request: BatchRequest
    body: PooledRequest
    task: Task
    lists: list[list[int]]
    began: float


class Loading(NamedTuple):
    """A line whose images are being loaded. began: when it came. prompt: what comes of it."""

    request: BatchRequest
    began: float
    prompt: Future[Any]


class Run:
    """The loop of a run whose engine has been made. Its counters are in `stats`."""

    def __init__(
        self, llm: Any, options: RunOptions, journal: Journal, intake: Intake, stats: BatchStats
    ):
        self.llm, self.options, self.journal, self.intake = llm, options, journal, intake
        self.stats = stats
        self.progress = Progress(_progress_mode(options), stats)
        self.reader = ReadAhead(intake, options.window)
        # A step that does not return is abandoned: the file has all finished answers.
        self.interrupts = Interrupts(
            options.grace, lambda: os._exit(self.stopped()), options.program
        )
        self._pending: dict[str, tuple[BatchRequest, float]] = {}
        self._pooled: list[Pooled] = []
        self._loading: list[Loading] = []
        self._loaders = ThreadPoolExecutor(LOADERS, "jpaged-images")
        # Images of requests that wait for a row are kept in memory, unlike texts.
        self._most_with_images = max(1, options.window // 4)
        self._with_images: set[str] = set()  # ids of pending requests

    def serve(self) -> Ending:
        """Answer lines until there are no more, or until the run must stop: then requests in the
        engine are finished first.

        An ordered run also stops reading while 8 windows of lines wait behind a slow one, so that
        memory stays bounded.
        """
        pending, window, stats = self._pending, self.options.window, self.stats
        while True:
            while (
                len(pending) + len(self._pooled) + len(self._loading) < window
                and self.journal.held < 8 * window
                and self._has_room_for_images
                and not self._must_stop
            ):
                is_busy = pending or self._pooled or self._loading
                line = self.reader.next(wait=None if is_busy else POLL_S)
                if line is None:
                    break
                self._admit(line)
            if self._loading:
                self._take_loaded(wait=not pending and not self._pooled)
            if self._pooled:
                self._pool()
            if pending and self.interrupts.is_late:
                for request_id in pending:  # running requests are not answered
                    self.llm.abort(request_id)
                return "stopped"
            if pending:
                self._step()
            self.journal.flush()
            stats.total, stats.total_is_exact = self.intake.total()
            if not pending and not self._loading and self.reader.ended:
                return "complete"
            if not pending and self._must_stop:
                return "stopped" if self.interrupts.signal is not None else "hopeless"
            stats.running = len(pending)
            self.progress.update(self.llm)

    def answered(self) -> str:
        """Return a sentence about the answers of a run that did not finish, and how to resume
        it.
        """
        path = self.options.output
        if path in (None, "-"):
            return f"{self.stats.done} lines were answered"
        done = self.journal.found.answered if self.journal.is_regular else self.stats.done
        return f"{done} lines were answered in {path}; to resume: {shlex.join(self.options.again)}"

    def stopped(self) -> int:
        """Print that the run was stopped. Return the exit status."""
        said = f"{self.options.program}: interrupted: {self.answered()}"
        print(said, file=sys.stderr, flush=True)
        return 128 + (self.interrupts.signal or signal.SIGINT)

    def close(self) -> None:
        """End its threads and its line on the screen."""
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self.progress.close()

    @property
    def _must_stop(self) -> bool:
        return self.interrupts.signal is not None or self._is_hopeless

    @property
    def _is_hopeless(self) -> bool:
        here, most = self.stats.ok + self.stats.failed, self.options.max_error_rate
        return most is not None and here >= ENOUGH_LINES and self.stats.failed > most * here

    def _admit(self, line: Line) -> None:
        request = line.request
        self.journal.expect(request.number)
        self.stats.ignored.update(request.ignored)
        if line.error is not None:
            self._fail(request, line.error)
            return
        if request.pooled is not None:
            self._admit_pooled(request, request.pooled)
            return
        # The process of a remote engine makes the prompt.
        is_remote = getattr(self.llm, "is_remote", False)
        began = time.perf_counter()
        if request.has_images and not is_remote:
            prompt = self._loaders.submit(_with_its_images, request, self.llm)
            self._loading.append(Loading(request, began, prompt))
            return
        try:
            self._add(request, request.prompt_for if is_remote else request.prompt_for(self.llm))
        except Exception as e:  # an error of one line must not end the run
            self._fail(request, e)

    def _add(self, request: BatchRequest, prompt: Any, began: float | None = None) -> None:
        """Give the engine a request. began: when its line came, if not just now."""
        began = time.perf_counter() if began is None else began
        request_id = f"line-{request.number}"
        self.llm.add_request(prompt, request.params, request_id=request_id)
        self._pending[request_id] = request, began
        if request.has_images:
            self._with_images.add(request_id)

    @property
    def _has_room_for_images(self) -> bool:
        """Whether the next line may have images: few are decoded at once, and those of requests
        that wait in the engine are as many as it has rows.
        """
        waits = len(self._loading)
        return waits < MOST_LOADING and len(self._with_images) + waits < self._most_with_images

    def _take_loaded(self, *, wait: bool) -> None:
        """Give the engine the lines whose images are loaded, in the order of lines; drop all of
        them where the run must stop. wait: a moment, for the first one.
        """
        if self._must_stop:
            for one in self._loading:
                one.prompt.cancel()
            self._loading = []
            return
        if wait:
            futures.wait([self._loading[0].prompt], timeout=POLL_S)
        while self._loading and self._loading[0].prompt.done():
            request, began, prompt = self._loading.pop(0)
            try:
                self._add(request, prompt.result(), began)
            except Exception as e:  # an error of one line must not end the run
                self._fail(request, e)

    def _admit_pooled(self, request: BatchRequest, body: PooledRequest) -> None:
        """Keep a line of embeddings, scores or ranks for the next call, or fail it."""
        if getattr(self.llm, "is_remote", False):
            url = next(url for url, kind in POOLED_URLS.items() if isinstance(body, kind))
            self._fail(request, UnsupportedError(f"{url}: replicas on Ray do not answer it"))
            return
        try:
            began, inputs = time.perf_counter(), self.llm.session.inputs
            lists = body.token_lists(inputs)
            self._pooled.append(Pooled(request, body, body.task(inputs.model), lists, began))
        except Exception as e:  # an error of one line must not end the run
            self._fail(request, e)

    def _pool(self) -> None:
        """Answer the lines of embeddings, scores and ranks that are here, equal calls in one."""
        waiting, self._pooled = self._pooled, []
        calls: dict[tuple[Task, Embedding], list[Pooled]] = {}
        for one in waiting:
            calls.setdefault((one.task, one.body.asked), []).append(one)
        for (task, asked), members in calls.items():
            try:
                self._write_pooled(members, self._made(task, asked, members))
            except RequestError as e:
                if len(members) == 1:
                    self._fail(members[0].request, e)
                    continue
                for member in members:  # one of them is to blame, and is told so
                    self._pooled = [member]
                    self._pool()

    def _made(self, task: Task, asked: Embedding, members: list[Pooled]) -> np.ndarray:
        """Return what the model makes of the texts of lines."""
        prompts: list[Any] = []
        for member in members:
            prompts += member.body.prompts(member.lists, member.request.adapter)
        if task == "classify":
            return self.llm.classify(prompts)
        return self.llm.embed(prompts, dimensions=asked.dimensions, normalize=asked.normalize)

    def _write_pooled(self, members: list[Pooled], made: np.ndarray) -> None:
        first = 0
        for member in members:
            end = first + len(member.lists)
            line = pooled_line(member.request, member.task, made[first:end], member.lists)
            first = end
            tokens, latency = sum(map(len, member.lists)), time.perf_counter() - member.began
            self.stats.add_pooled(tokens, latency)
            self.journal.write(member.request, line)

    def _step(self) -> None:
        finished = self.llm.step()
        if not finished and not self.llm.has_unfinished():
            raise BatchError(f"the engine is idle with {len(self._pending)} requests unanswered")
        for output in finished:
            request, began = self._pending.pop(output.request_id)
            self._with_images.discard(output.request_id)
            if output.error is not None:
                self._fail(request, output.error)
            elif all(done.finish_reason != "abort" for done in output.outputs):
                self._answer(request, output, time.perf_counter() - began)

    def _answer(self, request: BatchRequest, output: RequestOutput, latency: float) -> None:
        try:
            line = answer_line(request, output)
        except Exception as e:
            self._fail(request, e)
            return
        self.stats.add(output, latency)
        self.stats.cut_by.update(_cut_by(request, output))
        self.journal.write(request, line)
        if len(self.stats.samples) < SAMPLES:
            self.stats.samples.append(to_read(request, line).decode())

    def _fail(self, request: BatchRequest, error: BaseException | str) -> None:
        self.stats.fail(request.number, error)
        self.journal.write(request, error_line(request, error, self.options.error_style))


def _with_its_images(request: BatchRequest, llm: Any) -> Any:
    """Return the prompt of a line, whose images have their final size then."""
    prompt = request.prompt_for(llm)
    assert request.body is not None
    request.body.forget_sources()
    return prompt


def run_batch(
    options: RunOptions,
    source: Source,
    manifest: Mapping[str, Any],
    make_llm: Callable[[], Any],
    make_settings: Callable[[Any], Settings],
    *,
    stats: BatchStats | None = None,
    stdout: Stream | None = None,
) -> int:
    """Run a batch file from an opened source. Return the exit status. stdout: the stream for
    answers if no file takes them.

    stats: counters that others may watch; they begin when the engine is ready, and nothing in an
    output file is changed before. Raises BatchError, whose message says what was answered and how
    to resume, and OSError if the output cannot be written.
    """
    stats = BatchStats() if stats is None else stats
    with contextlib.closing(Journal(options.output, manifest, ordered=options.ordered)) as journal:
        grows = source.path if "bytes" in source.identity() else None
        journal.open(options.existing, grows, retry_failed=options.retry_failed)
        llm = make_llm()
        settings = make_settings(llm)
        journal.begin(stdout or bytes_of(sys.stdout))
        stats.began, stats.began_at = time.perf_counter(), time.time()
        stats.earlier_failed = journal.found.failed
        stats.earlier_ok = journal.found.answered - stats.earlier_failed
        stats.earlier_errors = journal.found.errors()
        stats.watch(llm)
        intake = Intake(source, settings, shard=options.shard, earlier=journal.found)
        return _to_its_end(Run(llm, options, journal, intake, stats), source)


def _to_its_end(run: Run, source: Source) -> int:
    options, journal, stats, reader = run.options, run.journal, run.stats, run.reader
    with run.interrupts:
        try:
            ending = run.serve()
            journal.flush(everything=True)
            complete = ending == "complete" and reader.error is None
            journal.finish(complete=complete, lines=run.intake.seen, source=source.identity())
        except OSError:
            raise
        except KeyboardInterrupt:
            journal.flush(everything=True)
            return run.stopped()
        except Exception as e:
            journal.flush(everything=True)
            raise BatchError(f"the run stopped: {sentence(e)} ({run.answered()})") from e
        finally:
            reader.close()
            run.close()
    stats.ended = time.perf_counter()
    stats.watch(run.llm)
    print(stats.table(), file=sys.stderr if options.output == "-" else sys.stdout, flush=True)
    summary = options.summary
    if summary is None and journal.is_regular and options.output is not None:
        summary = summary_path(options.output)
    if summary is not None:
        status = ending if reader.error is None else "input error"
        write_json(summary, {"status": status, **stats.record()})
    if reader.error is not None:
        said = f"cannot read the input any further: {sentence(reader.error)}"
        raise BatchError(f"{said} ({run.answered()})")
    if ending == "stopped":
        return run.stopped()
    if ending == "hopeless":
        share = f"{stats.failed} of {stats.ok + stats.failed} lines failed"
        said = f"{share}, above --max-error-rate {options.max_error_rate}"
        print(f"{options.program}: {said}: {run.answered()}", file=sys.stderr)
        return HOPELESS
    return FAILED_LINES if stats.all_failed else OK


def summary_path(output: str) -> str:
    """Return where the figures of a run go that writes this file."""
    return f"{output}.summary.json"


def _cut_by(request: BatchRequest, output: RequestOutput) -> list[CutBy]:
    """Return whose limit ended each answer that has reached a limit of tokens."""
    most, body = request.params.max_tokens, request.body
    by: CutBy = "line" if body is not None and "max_tokens" in body.sampling() else "run"
    return [
        "context" if most is None or len(done.token_ids) < most else by
        for done in output.outputs
        if done.finish_reason == "length"
    ]


def _progress_mode(options: RunOptions) -> Literal["bar", "lines", "none"]:
    terminal = sys.stderr.isatty()
    if options.output is None and terminal and sys.stdout.isatty():
        return "none"  # answers and a progress bar would overwrite each other
    return "bar" if terminal else "lines"


def sentence(error: BaseException) -> str:
    """Return an error as one line: jpaged's own errors as they are, others with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return text if isinstance(error, JpagedError | OSError) else f"{type(error).__name__}: {text}"
