"""Rollout: the completions of many prompts as they end, until enough have; the rest goes on another
time.
"""

from queue import SimpleQueue
from typing import Self

from jpaged.engine.sequence import Request
from jpaged.engine_thread import Delivery, EngineThread, News
from jpaged.errors import RequestError
from jpaged.request.outputs import RequestOutput
from jpaged.session import Job, Session


class Rollout:
    """Prompts that run inside a `with` block, and an iterator over their outputs in the order in
    which they end, each with all of its samples: see LLM.rollout. Made by it.

    Requests run from the block's beginning on, in the LLM's thread. Once `enough` have ended
    without an error the others are cut between two steps, whatever the consumer is at. Leaving the
    block cuts them too.

    A Taker: what it has beside the queue is touched at rest only.
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
        self._session, self._thread = session, thread
        self._jobs, self._enough, self._raises = jobs, enough, raises
        self._ended: SimpleQueue[News | None] = SimpleQueue()  # None comes after the last one
        self._left: dict[int, Delivery] = {}  # those that run
        self._unused: dict[int, RequestOutput] = {}  # that are for `rest`
        self._was_entered = self._was_cut = self._is_over = False

    def __enter__(self) -> Self:
        if self._was_entered:
            raise RequestError("a rollout runs once: call LLM.rollout again")
        self._was_entered = True
        with self._session.at_rest():
            for index, job in enumerate(self._jobs):
                if isinstance(job, Request):
                    self._left[index] = Delivery(job, self, index, None)
                else:
                    self._ended.put((index, job))
            running = list(self._left.values())
            if not running:
                self._leave_off()
        self._thread.add(running)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._was_cut:
            self._thread.call(self._leave_off).result()
        while not self._ended.empty():
            if (news := self._ended.get()) is not None:
                self._keep(*news)
        self._is_over = True

    def __iter__(self) -> Self:
        if not self._was_entered:
            raise RequestError("a rollout runs in its block: with llm.rollout(...) as done: ...")
        return self

    def __next__(self) -> RequestOutput:
        if not self._is_over:
            if (news := self._ended.get()) is not None:
                return self._yielded(*news)
            self._is_over = True
        raise StopIteration

    @property
    def rest(self) -> list[RequestOutput]:
        """The outputs that were not yielded, in the order of their prompts, but for those that
        failed: prompts of a later call, which goes on where they were cut. There once the loop has
        come to its end, or the block was left; RequestError before.
        """
        if not self._is_over:
            raise RequestError("rest: there once the rollout's loop, or its block, has ended")
        return [self._unused[index] for index in sorted(self._unused)]

    def put(self, news: list[News]) -> None:
        """Take what has ended in a step; leave off once it is enough."""
        for index, item in news:
            self._left.pop(index, None)
            if self._was_cut or not self._enough:
                self._keep(index, item)
                continue
            self._enough -= isinstance(item, RequestOutput) and item.error is None
            self._ended.put((index, item))
        if not self._enough or not self._left:
            self._leave_off()

    def _leave_off(self) -> None:
        """Cut what still runs."""
        with self._session.at_rest():
            if self._was_cut:
                return
            self._was_cut = True
            left, self._left = list(self._left.values()), {}
            try:
                for index, item in self._thread.cut(self, left):
                    self._keep(index, item)
            finally:  # an interrupt may fall here, and who waits must not wait for ever
                self._ended.put(None)

    def _keep(self, index: int, item: object) -> None:
        if isinstance(item, RequestOutput) and item.error is None:
            item.index = index
            self._unused[index] = item

    def _yielded(self, index: int, item: object) -> RequestOutput:
        """Return an output, or raise the error that came in its place."""
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, RequestOutput)
        if self._raises and item.error is not None:
            raise item.error
        item.index = index
        return item
