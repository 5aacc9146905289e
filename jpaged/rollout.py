"""Rollout and AsyncRollout: the completions of many prompts as they end, until enough have; the
rest goes on another time.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Self

from jpaged.engine.sequence import Request
from jpaged.engine_thread import Delivery, EngineThread, News
from jpaged.errors import RequestError
from jpaged.request.outputs import RequestOutput
from jpaged.session import Job, Session

NO_REST = "rest: there once the rollout's loop, or its block, has ended"


class Groups:
    """The requests of a rollout, and what became of each. Once `enough` have ended without an
    error, the others are cut between two steps, whatever the consumer is at.

    A Taker: the engine's thread alone writes what is here, and calls `ring` after it. Nothing is
    taken away, so that an interrupt of who reads loses nothing.

    ended: outputs, or the errors that came in their place, in order. cut: outputs of the others.
    was_cut: nothing runs any more, and both are complete.
    """

    def __init__(
        self,
        session: Session,
        thread: EngineThread,
        jobs: list[Job],
        *,
        enough: int,
        ring: Callable[[], None],
    ):
        self._session, self._thread, self._ring = session, thread, ring
        self._enough = enough
        self.ended: list[News] = []
        self.cut: list[News] = []
        self.was_cut = False
        self._left: dict[int, Delivery] = {}  # those that run
        for index, job in enumerate(jobs):
            if isinstance(job, Request):
                self._left[index] = Delivery(job, self, index, None)
            else:
                self.ended.append((index, job))

    def start(self) -> None:
        """Run them; if this is interrupted, none is left behind."""
        running = list(self._left.values())
        if not running:
            self.was_cut = True
            return
        try:
            self._thread.add(running)
        except BaseException:
            self._thread.abort(running)
            raise

    def put(self, news: list[News]) -> None:
        """Take what has ended in a step; leave off once it is enough."""
        for index, item in news:
            self._left.pop(index, None)
            if self.was_cut or not self._enough:
                self.cut.append((index, item))
                continue
            self._enough -= isinstance(item, RequestOutput) and item.error is None
            self.ended.append((index, item))
        if not self._enough or not self._left:
            self.leave_off()
        else:
            self._ring()

    def leave_off(self) -> None:
        """Cut what still runs. Called in the engine's thread."""
        with self._session.at_rest():
            if self.was_cut:
                return
            left, self._left = list(self._left.values()), {}
            try:
                self.cut += self._thread.cut(self, left)
            finally:  # who waits must not wait for ever
                self.was_cut = True
        self._ring()

    def rest(self, num_yielded: int) -> list[RequestOutput]:
        """Return the outputs but for the first of those that ended, in the order of their prompts;
        none of those that failed.
        """
        rest: dict[int, RequestOutput] = {}
        for index, item in [*self.ended[num_yielded:], *self.cut]:
            if isinstance(item, RequestOutput) and item.error is None:
                item.index = index
                rest[index] = item
        return [rest[index] for index in sorted(rest)]


def _outcome(news: News, *, raises: bool) -> RequestOutput | BaseException:
    """Return an output, or the error that is to be raised in its place."""
    index, item = news
    if isinstance(item, BaseException):
        return item
    assert isinstance(item, RequestOutput)
    item.index = index
    return item.error if raises and item.error is not None else item


class Rollout:
    """Prompts that run inside a `with` block, and an iterator over their outputs in the order in
    which they end, each with all of its samples: see LLM.rollout. Made by it.

    Requests run from the block's beginning on, in the LLM's thread. Leaving the block cuts those
    that still run. An interrupt, wherever it falls, loses nothing: what the loop did not get is in
    `rest`.
    """

    def __init__(
        self,
        session: Session,
        thread: EngineThread,
        jobs: list[Job],
        *,
        enough: int,
        raises: bool,
    ):
        self._thread, self._raises = thread, raises
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung when there is something new
        ring = partial(self._bell.put, None)
        self._groups = Groups(session, thread, jobs, enough=enough, ring=ring)
        self._num_yielded = 0
        self._was_entered = self._is_over = False

    def __enter__(self) -> Self:
        if self._was_entered:
            raise RequestError("a rollout runs once: call LLM.rollout again")
        self._was_entered = True
        self._groups.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut what still runs, as the block's end does, and return once it is cut."""
        self._is_over = True
        if not self._groups.was_cut:
            self._thread.call(self._groups.leave_off).result()

    def __iter__(self) -> Self:
        if not self._was_entered:
            raise RequestError("a rollout runs in its block: with llm.rollout(...) as done: ...")
        return self

    def __next__(self) -> RequestOutput:
        groups = self._groups
        while not self._is_over:
            was_cut = groups.was_cut  # asked first: nothing ends after it
            if len(groups.ended) > self._num_yielded:
                item = _outcome(groups.ended[self._num_yielded], raises=self._raises)
                if isinstance(item, BaseException):
                    self._num_yielded += 1
                    raise item
                self._num_yielded += 1
                return item  # no interrupt falls between these two and the loop's variable
            if was_cut:
                self._is_over = True
            else:
                self._bell.get()
        raise StopIteration

    @property
    def rest(self) -> list[RequestOutput]:
        """The outputs that were not yielded, in the order of their prompts, but for those that
        failed: prompts of a later call, which goes on where they were cut. There once the loop has
        come to its end, or the block was left; RequestError before.
        """
        if not self._is_over:
            raise RequestError(NO_REST)
        self.close()  # where an interrupt fell into it
        return self._groups.rest(self._num_yielded)


class AsyncRollout:
    """The same for a task: an async iterator over the outputs of prompts in the order in which they
    end. Yielded by AsyncLLM.rollout, whose block's end closes it; made in an event loop.
    """

    def __init__(
        self,
        session: Session,
        thread: EngineThread,
        jobs: list[Job],
        *,
        enough: int,
        raises: bool,
    ):
        self._thread, self._raises = thread, raises
        self._loop, self._bell = asyncio.get_running_loop(), asyncio.Event()
        self._groups = Groups(session, thread, jobs, enough=enough, ring=self._ring)
        self._num_yielded = 0
        self._is_over = False

    def start(self) -> None:
        """Run its requests."""
        self._groups.start()

    def _ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            self._groups.leave_off()

    async def close(self) -> None:
        """Cut what still runs, as the block's end does, and return once it is cut."""
        self._is_over = True
        if not self._groups.was_cut:
            cut = asyncio.wrap_future(self._thread.call(self._groups.leave_off))
            await asyncio.shield(cut)  # a task that is cancelled here leaves nothing running

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        groups = self._groups
        while not self._is_over:
            self._bell.clear()
            was_cut = groups.was_cut  # asked first: nothing ends after it
            if len(groups.ended) > self._num_yielded:
                item = _outcome(groups.ended[self._num_yielded], raises=self._raises)
                self._num_yielded += 1
                if isinstance(item, BaseException):
                    raise item
                return item
            if was_cut:
                self._is_over = True
            else:
                await self._bell.wait()
        raise StopAsyncIteration

    @property
    def rest(self) -> list[RequestOutput]:
        """As that of Rollout."""
        if not self._is_over or not self._groups.was_cut:
            raise RequestError(NO_REST)
        return self._groups.rest(self._num_yielded)
