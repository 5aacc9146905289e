"""EngineThread: steps an engine for tasks of event loops, futures and rollouts, and hands each its
results.
"""

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from jpaged.engine.sequence import Request
from jpaged.errors import ConfigError, PeerError
from jpaged.request.outputs import CompletionChunk, LiveCompletions, RequestOutput, collect
from jpaged.session import Session
from jpaged.turns import FORKED, LOOK_S

log = logging.getLogger("jpaged")

# A step that raised is taken once more (the engine has queued again what ran); a second time in a
# row ends what runs with the error.
RETRIES = 1
STATS_S = 0.25  # how old the stats may be while it steps
# How long a step may wait for requests that are on their way, after a pause or while the device is
# at prompts: a step that begins with one of many costs as much as one with all of them.
GATHER_S = 0.02
COMING_S = 0.002  # how often it looks whether any still are
EXIT_S = 10.0  # how long the interpreter's end waits for a step

# A result: the index of the request, and a piece of it, its output when it has ended, or the error
# for which there is none.
News = tuple[int, CompletionChunk | RequestOutput | BaseException]
# Runs in the thread. Its argument is the error of a thread that has ended, else None.
Command = Callable[[BaseException | None], None]


class Inbox:
    """What one task of an event loop waits for. Made and used in that loop. requests: those whose
    results come here.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: list[Request] = []
        self._results: list[News] = []
        self._arrival: asyncio.Future[None] | None = None
        self._use: Callable[[list[News]], bool] | None = None

    async def take(self) -> list[News]:
        """Wait for a result, and return all that there are since the last time."""
        if not self._results:
            self._arrival = self.loop.create_future()
            await self._arrival
        news, self._results = self._results, []
        return news

    async def pass_on(self, use: Callable[[list[News]], bool]) -> list[News]:
        """Call `use` with the results of each step as they come, in the event loop and without a
        turn of the task, while it returns True. Return the results for which it returned False,
        which it has not used. What it raises is raised here.
        """
        if not self._results:
            self._arrival, self._use = self.loop.create_future(), use
            try:
                await self._arrival
            finally:
                self._use = None
        return await self.take()

    def put(self, news: list[News]) -> None:
        """Take these results of a step."""
        if self._use is not None and not self._results:
            try:
                if self._use(news):
                    return
            except Exception as e:  # it is the task's own
                self._use = None
                if self._arrival is not None and not self._arrival.done():
                    self._arrival.set_exception(e)
                return
        self._results += news
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Answer:
    """What waits in a future for the output of one request, or its error. raises: the error of an
    output is the future's; else the output is its result all the same.
    """

    def __init__(self, *, raises: bool = True):
        self.future: Future[RequestOutput] = Future()
        self._raises = raises

    def put(self, news: list[News]) -> None:
        """Resolve the future, unless it was cancelled."""
        for _, item in news:
            error = item if isinstance(item, BaseException) else None
            if isinstance(item, RequestOutput) and self._raises:
                error = item.error
            if not self.future.set_running_or_notify_cancel():
                return
            if error is not None:
                self.future.set_exception(error)
            elif isinstance(item, RequestOutput):
                self.future.set_result(item)


class Taker(Protocol):
    """What takes results where they come from: in the engine's thread, between two steps."""

    def put(self, news: list[News]) -> None:
        """Take these results of a step."""
        ...


class Delivery:
    """A request that runs for a task, a future or a rollout. index: its place among those that
    share the inbox. live: makes its pieces, where those are wanted.
    """

    def __init__(
        self, request: Request, inbox: Inbox | Taker, index: int, live: LiveCompletions | None
    ):
        self.request, self.inbox, self.index, self.live = request, inbox, index, live
        self.is_cut = False  # it is not to run any more

    def take(self) -> list[News]:
        """Return the pieces that are new. An error is left to the output."""
        if self.live is None:
            return []
        chunks, error = self.live.take_all()
        if error is not None:
            self.live = None  # its other completions are not worth more pieces
        return [(self.index, chunk) for chunk in chunks]


class CountsComing(Protocol):
    """What requests are on their way to."""

    def count_coming(self, change: int) -> None:
        """Count so many more of them."""
        ...


class Coming:
    """A request that is on its way, until it is added or given up."""

    def __init__(self, thread: CountsComing):
        self._thread = thread
        self._is_counted = True
        thread.count_coming(1)

    def close(self) -> None:
        """Stop waiting for it: the request was added, or was cancelled."""
        if self._is_counted:
            self._is_counted = False
            self._thread.count_coming(-1)


class EngineThread(threading.Thread):
    """Steps the engine of a session from `start` to `close`, while it has jobs and no other thread
    has the role (see Stepping, whose Waiter it is); the Owner of what it runs.

    What the steps of others bring is delivered all the same, and by this thread: no signal is
    handled in it, so that a KeyboardInterrupt, wherever it falls, loses no result and brings none
    twice. A thread that steps only notes what has ended, in one store into a dict; `_jobs` and
    `_results` are this thread's own.

    error: what it died of, None while it lives. stats: the session's report, a moment old.
    """

    def __init__(self, session: Session, face: str = "LLM"):
        super().__init__(name="jpaged-engine", daemon=True)
        self._session, self._face = session, face
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs: dict[Request, Delivery] = {}  # those that have not ended
        # Jobs that have ended and are not passed on yet, and the errors of those that were lost.
        self._over: dict[Request, Exception | None] = {}
        self._is_behind = False  # whether others have stepped since pieces were last passed on
        self._held: list[Delivery] = []  # until new requests are admitted again
        self._lock = threading.Lock()  # of _ended and _coming
        self._ended: BaseException | None = None
        self._coming = 0
        self._is_closing = False
        self._failures = 0  # steps in a row that raised
        self._results: dict[Inbox | Taker, list[News]] = {}  # since they were last delivered
        self.error: BaseException | None = None
        self.stats = session.report()
        self._stats_at = 0.0

    # Asked from other threads

    def check(self) -> None:
        """Raise what the thread has ended with, if it has; ConfigError in a forked process."""
        if self._ended is not None:
            raise self._ended
        if self.ident is not None and not self.is_alive() and not self._is_closing:
            raise ConfigError(FORKED)

    def add(self, jobs: list[Delivery]) -> None:
        """Run these; their results go to their inboxes."""

        def run(closed: BaseException | None) -> None:
            for job in jobs:
                self._add(job, closed)

        self._post(run)

    def submit(self, request: Request, answer: Answer) -> None:
        """Run a request whose output goes to the answer's future; `cancel` of that aborts it."""
        job = Delivery(request, answer, 0, None)

        def cancelled(future: Future[RequestOutput]) -> None:
            if future.cancelled():
                self.abort([job])

        answer.future.add_done_callback(cancelled)
        self.add([job])

    def count_coming(self, change: int) -> None:
        """Count so many more requests that are on their way."""
        with self._lock:
            self._coming += change

    def abort(self, jobs: list[Delivery]) -> None:
        """End those of them that still run, without a result."""

        def run(closed: BaseException | None) -> None:
            self._drop([job.request for job in jobs])

        # Without a lock: the collector of garbage, too, ends what asked for them. A thread that has
        # ended has none.
        self._commands.put(run)

    def call[T, *Args](self, function: Callable[[*Args], T], *args: *Args) -> Future[T]:
        """Call a function between two steps; return what it will return or raise."""
        future = Future[T]()

        def run(closed: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if closed is not None:
                    raise closed
                future.set_result(function(*args))
            except BaseException as e:  # raised where the result is asked for
                future.set_exception(e)

        self._post(run)
        return future

    def cut(self, taker: Taker, jobs: list[Delivery]) -> list[News]:
        """End those of a taker's jobs that have not ended; return what it was not given yet: the
        output of each of them, with what it had drawn. Called at rest, in this thread.
        """
        self._conclude_all()
        news = self._results.pop(taker, [])
        ended = {index for index, _ in news}
        for job in jobs:
            if job.index in ended:
                continue
            job.is_cut = True
            self._jobs.pop(job.request, None)
            self._session.discard([job.request])
            job.request.give_up()
            news.append((job.index, collect(job.request, self._session.inputs.tokenizer)))
            job.request.sequences = []
        return news

    def close(self) -> None:
        """End what runs with an error, and the thread; waits for it."""
        self.stop()
        if threading.current_thread() is not self:
            self.join()

    def stop(self) -> None:
        """Have the thread end soon. Takes no lock: the collector of garbage may call."""

        def run(closed: BaseException | None) -> None:
            self._is_closing = True

        self._commands.put(run)

    @property
    def requests(self) -> bool:
        """Whether anything runs for others."""
        return len(self._jobs) > len(self._over)

    def wake(self) -> None:
        self._commands.put(_nothing)

    def _post(self, command: Command) -> None:
        with self._lock:
            self.check()
            self._commands.put(command)

    # The thread

    def run(self) -> None:
        ending: BaseException = ConfigError(f"this {self._face} is closed")
        self._session.after_step = self._after_step
        try:
            while not self._is_closing:
                self._obey(wait=not self._jobs)
                self._publish()
                if self._jobs:
                    self._work()
        except BaseException as e:
            log.exception("the engine's thread has died")
            self.error = ending = e
        self._session.after_step = None
        with self._lock:
            self._ended = ending
        while not self._commands.empty():
            self._commands.get()(ending)
        with self._session.at_rest():
            self._conclude_all()
            for job in self._held:
                self._keep(job, [(job.index, ending)])
            if self.error is None:
                self._session.discard(self._jobs)
            self._fail(ending)
            self._deliver()

    def _work(self) -> None:
        """Step while there are jobs, unless another thread does or it is paused: then wait."""
        stepping = self._session.stepping
        with stepping.role(self) as steps:
            if not steps:
                self._obey(wait=True)  # it is woken when it may step
            while steps and self._jobs and not stepping.is_paused and not self._is_closing:
                self._step()
                self._publish()
                self._obey(wait=False)

    def _publish(self) -> None:
        with self._session.at_rest():
            self._pass_on()

    def _obey(self, *, wait: bool) -> None:
        """Run the commands that are there; with nothing else to do, wait for one."""
        if self._session.is_open:
            for job in list(self._held):
                self._held.remove(job)
                self._add(job, None)
        with self._session.at_rest():
            may_gather = not self._jobs or self._session.is_at_prompts()
            idle = not self._jobs and not self._held
        if wait and self._commands.empty():
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=None if idle else LOOK_S)(None)
        while not self._is_closing and not self._commands.empty():
            self._commands.get()(None)
        if may_gather and self._jobs:
            self._gather()

    def _gather(self) -> None:
        """Take in what is on its way, for a moment."""
        until = time.monotonic() + GATHER_S
        while (self._coming or not self._commands.empty()) and time.monotonic() < until:
            # A cancelled request sends no command, so look again soon.
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=COMING_S)(None)

    def _add(self, job: Delivery, closed: BaseException | None) -> None:
        if closed is None and not self._session.is_open:
            self._held.append(job)  # who keeps new requests out may wait for what runs here
            return
        with self._session.at_rest():
            try:
                if closed is not None:
                    raise closed
                if job.is_cut:
                    return
                self._jobs[job.request] = job
                self._session.add(job.request, self)
            except Exception as e:  # that request's own
                self._jobs.pop(job.request, None)
                self._keep(job, [(job.index, e)])

    def _step(self) -> None:
        try:
            self._session.advance()
        except PeerError:
            raise  # no step after it can succeed
        except Exception as e:
            self._failures += 1
            log.exception("a step failed, %d in a row", self._failures)
            if self._failures > RETRIES:
                with self._session.at_rest():
                    self._conclude_all()
                    self._session.discard(self._jobs)
                    self._fail(e)
            return
        self._failures = 0

    def _after_step(self) -> None:
        """Pass on what a step has brought; that of another thread's when this one comes to it."""
        if threading.get_ident() != self.ident:
            if not self._is_behind:
                self._commands.put(_nothing)
            self._is_behind = True
        else:
            self._is_behind = True
            self._pass_on()

    def ended(self, request: Request) -> None:
        """Note that a request has ended, whose last pieces and output are to be passed on."""
        self._note(request, None)

    def lost(self, request: Request, error: Exception) -> None:
        """Note that a request has left the engine with an error."""
        self._note(request, error)

    def _note(self, request: Request, error: Exception | None) -> None:
        if request not in self._jobs:
            return  # it is passed on already, or nobody's any more
        self._over[request] = error
        if threading.get_ident() != self.ident:
            self._commands.put(_nothing)  # it may wait for a command

    def _pass_on(self) -> None:
        """Hand over what the steps of any thread have brought."""
        self._look(often=self.requests)  # first: whoever gets the last result finds its step there
        self._conclude_all()
        if self._is_behind:
            self._is_behind = False
            for job in self._jobs.values():
                if news := job.take():
                    self._keep(job, news)
        self._deliver()

    def _conclude_all(self) -> None:
        """Take up the last pieces and the outputs of the requests that have ended."""
        for request, error in list(self._over.items()):
            job = self._jobs.pop(request)
            del self._over[request]
            if error is not None:
                self._keep(job, [(job.index, error)])
                continue
            try:
                self._keep(job, job.take())
                output = collect(request, self._session.inputs.tokenizer)
                self._keep(job, [(job.index, output)])
            except Exception as e:  # of its tokenizer, say: it is this request's own
                self._keep(job, [(job.index, e)])
            request.sequences = []  # each knows its request: without the cycle they are freed now

    def _fail(self, error: BaseException) -> None:
        """End all jobs with an error; those that the engine has are left to it."""
        for request in list(self._jobs):
            job = self._jobs.pop(request)
            self._keep(job, [(job.index, error)])

    def _drop(self, requests: list[Request]) -> None:
        """End those of them that still run, for nobody."""
        self._held = [job for job in self._held if job.request not in requests]
        with self._session.at_rest():
            running = [request for request in requests if request in self._jobs]
            self._session.discard(running)
            for request in running:
                del self._jobs[request]
                self._over.pop(request, None)

    def _keep(self, job: Delivery, news: list[News]) -> None:
        """Keep results for `_deliver`."""
        self._results.setdefault(job.inbox, []).extend(news)

    def _deliver(self) -> None:
        """Hand over the results that were kept, those of each event loop in one call."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, list[News]]]] = {}
        while self._results:  # one at a time: what one of them raises is not the others'
            inbox = next(iter(self._results))
            news = self._results.pop(inbox)
            if isinstance(inbox, Inbox):
                loops.setdefault(inbox.loop, []).append((inbox, news))
            else:
                inbox.put(news)
        for loop, results in loops.items():
            try:
                loop.call_soon_threadsafe(_put, results)
            except RuntimeError:  # closed: nobody waits there any more
                lost = {inbox for inbox, _ in results}
                self._drop([request for request, job in self._jobs.items() if job.inbox in lost])

    def _look(self, *, often: bool) -> None:
        """Renew the stats; every now and then while there is more to do."""
        now = time.monotonic()
        if not often or now - self._stats_at >= STATS_S:
            self._stats_at = now
            self.stats = self._session.report()


def _end_all() -> None:
    """Let no thread be inside a step when the interpreter ends under it."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EngineThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_S)


atexit.register(_end_all)


def _nothing(closed: BaseException | None) -> None:
    """Do nothing: the command wakes the thread."""


def _put(results: list[tuple[Inbox, list[News]]]) -> None:
    for inbox, news in results:
        inbox.put(news)
