"""Calls: what every face does with a session: prompts to requests, run them, collect or stream.

Any thread may call. Who steps the engine does not matter: what a step brings goes to the owner of
each request.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from tqdm import tqdm

from jpaged.engine.keys import Key, fold_in
from jpaged.engine.origin import Origin
from jpaged.engine.sequence import Request
from jpaged.errors import CapacityError, ConfigError, GenerationError, RequestError
from jpaged.fair_lock import FairLock
from jpaged.request.collect import LiveCompletions, collect, failed, scores
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.processor import Processor
from jpaged.request.prompts import as_list, match_sampling_params
from jpaged.sampling_params import SamplingParams
from jpaged.session import Session, Snapshot

SamplingParamsLike = SamplingParams | List[SamplingParams] | None
OnError = Literal["raise", "return"]
OnUnfinished = Literal["refuse", "abort"]
Make = partial[Request]  # its first argument is the prompt
RESTORED = "the requests of this call are gone: the LLM was restored to a snapshot"
Job = Request | RequestOutput  # the output is that of a request which cannot run


class Owner(Protocol):
    """Who gets what becomes of a request. Called between two steps, in the thread that stepped."""

    def ended(self, request: Request) -> None:
        """The request has ended. After an interrupt the same request may be passed again."""
        ...

    def lost(self, request: Request, error: Exception) -> None:
        """The request has left the engine unfinished, and why."""
        ...


class Pending:
    """The requests of one call, as long as they have not ended; an Owner. error: of a lost one."""

    def __init__(self, requests: Iterable[Request]):
        self.requests = dict.fromkeys(requests)  # an ordered set
        self.error: Exception | None = None

    def ended(self, request: Request) -> None:
        self.requests.pop(request, None)

    def lost(self, request: Request, error: Exception) -> None:
        self.error = error
        self.requests.pop(request, None)


class Calls:
    """What can be asked of one session. Each face decides on the keys and on when to step.

    Two locks, both first come first served. `whole_call` is for a call that runs until its requests
    have ended: such calls take turns. `at_rest` is for the time between two steps, so that a
    stream, `step`, `add` or `abort` of another thread comes in while a whole call runs. To have
    whole calls share their steps, let them hold `whole_call` together; nothing else counts on
    their being alone.

    ready: outputs of requests that no call waits for, which `step` returns. tokenizer: None takes
    that of `source`, the weights' folder. after_step: what to call after each step, whoever took
    it; may be None.
    """

    def __init__(self, session: Session, tokenizer: Any, source: Path | None):
        self.session = session
        self.processor = Processor(session.model_config, session.engine_config, tokenizer, source)
        self.processor.adapters = session.adapters.named
        self.ready: dict[object, RequestOutput] = {}  # by their requests
        self.after_step: Callable[[], None] | None = None
        self._whole_calls, self._engine_lock = FairLock(), FairLock()
        self._in_step = threading.Lock()
        self._owners: dict[Request, Owner] = {}  # of every request in the engine
        self._is_settled = True  # whether `_owners` and the engine are known to agree
        self._abandoned: deque[Request] = deque()  # of streams that were closed

    # Locks

    @contextlib.contextmanager
    def whole_call(self) -> Iterator[None]:
        """Inside the block no other thread has a whole call."""
        if self._engine_lock.is_mine and not self._whole_calls.is_mine:
            # To wait for a thread that waits for the engine would be to wait for ever.
            raise RequestError("this call came from inside a step: it can be made after the step")
        with self._whole_calls.held():
            yield

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside the block the engine is between two steps, and this thread's."""
        with self._engine_lock.held():
            if self._in_step.locked():
                raise RequestError(
                    "this call came from inside a step (of a tokenizer, say): it can be made after "
                    "the step"
                )
            self._settle()
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread is in a whole call or at the engine."""
        with self.whole_call(), self.at_rest():
            yield

    # Many prompts at once

    def completions(
        self,
        prompts: list[Any],
        sampling_params: SamplingParamsLike,
        key: Key,
        *,
        streaming: bool = False,
        origin: Origin | None = None,
    ) -> list[Make]:
        """What makes the request of each prompt. Its randomness is that of `key` and its place.

        streaming, origin: as in Processor.request.
        """
        make, each = self.processor.request, match_sampling_params(sampling_params, len(prompts))
        how: Any = {"streaming": streaming, "origin": origin}
        return [
            partial(make, prompt, asked, fold_in(key, i), **how)
            for i, (prompt, asked) in enumerate(zip(prompts, each, strict=True))
        ]

    def beam_searches(self, prompts: Any, *how: Any) -> list[Make]:
        """What makes the search of each prompt; how: as in Processor.beam_search."""
        make: Any = self.processor.beam_search
        return [partial(make, prompt, *how) for prompt in as_list(prompts)]

    def complete(self, makes: list[Make], on_error: OnError, use_tqdm: bool) -> list[RequestOutput]:
        """Make the requests, run them to their ends and return an output of each."""
        with self.whole_call():
            jobs = self._admit(makes, on_error)
            self._reserve([job for job in jobs if isinstance(job, Request)])
            if on_error == "return":
                jobs = [self._failed_misfit(job) for job in jobs]
            self.run([job for job in jobs if isinstance(job, Request)], use_tqdm=use_tqdm)
        outputs = [self.output(job) if isinstance(job, Request) else job for job in jobs]
        failures = [(i, out.error) for i, out in enumerate(outputs) if out.error is not None]
        if failures and on_error == "raise":
            i, error = failures[0]
            said = f"{len(failures)} of {len(outputs)} requests failed; request {i}: {error}"
            raise GenerationError(said, outputs) from error
        return outputs

    def score(
        self,
        token_lists: list[Any],
        temperature: float,
        return_greedy: bool,
        structured: Mapping[str, Any] | None,
        prompt_lens: List[int] | None,
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
        """See jpaged.score."""
        with self.whole_call():
            requests = self.processor.scores(token_lists, temperature, structured, prompt_lens)
            self._reserve(requests)
            # One token alone predicts nothing.
            self.run([request for request in requests if request.sequences[0].prompt_len > 1])
        logprobs, greedy = scores(requests)
        return (logprobs, greedy) if return_greedy else logprobs

    def stream(self, makes: list[Make]) -> Iterator[CompletionChunk]:
        """Make the requests now; yield what each step adds to them. Closing it aborts the rest."""
        jobs = self._admit(makes, "raise")
        return self._stream([job for job in jobs if isinstance(job, Request)])

    def _admit(self, makes: list[Make], on_error: OnError) -> list[Job]:
        """The Request of each prompt that can run; of each other its failed output, or its error
        raised.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error={on_error!r}: must be 'raise' or 'return'")
        jobs: list[Job] = []
        for i, make in enumerate(makes):
            try:
                jobs.append(make())
            except RequestError as e:
                if on_error == "raise":
                    raise type(e)(f"request {i}: {e}") from e
                jobs.append(failed(self.processor.new_id(), e, make.args[0], []))
        return jobs

    def _reserve(self, requests: list[Request]) -> None:
        """Have room for these requests at full length, where the pool grows."""
        size = self.session.engine_config.block_size
        self.session.reserve(n for request in requests for n in request.blocks_needed(size))

    def run(self, requests: list[Request], *, use_tqdm: bool = False) -> None:
        """Step until these requests have ended; on any exception none of them is left behind."""
        pending = Pending(requests)
        with tqdm(total=len(requests), unit="req", disable=not use_tqdm) as progress:
            try:
                self._add_all(requests, pending)
                while left := len(pending.requests):
                    with self.at_rest():
                        if pending.requests:  # else another thread's step was the last one
                            self._advance()
                    progress.update(left - len(pending.requests))
                if pending.error is not None:
                    raise pending.error
            except BaseException:
                with self.at_rest():
                    self._discard(pending.requests)
                raise

    def _stream(self, requests: list[Request]) -> Iterator[CompletionChunk]:
        live, pending = LiveCompletions(requests, self.processor.tokenizer), Pending(requests)
        try:
            self._add_all(requests, pending)
            while live:
                with self.at_rest():  # and not while the consumer has a piece
                    if pending.error is not None:
                        raise pending.error
                    chunks, error = live.take_all()  # of a step that another thread took
                    if not chunks and error is None:
                        self._advance()
                        chunks, error = live.take_all()
                yield from chunks
                if error is not None:
                    raise error
        finally:
            # To wait for a lock here could be for ever: the collector of garbage, too, closes
            # streams, in any thread and on any line. The next that takes the engine ends them.
            self._abandoned.extend(pending.requests)

    def _add_all(self, requests: list[Request], owner: Owner) -> None:
        with self.at_rest():
            for request in requests:
                self.add(request, owner)

    # One request at a time

    def add(
        self, request: Request, owner: Owner | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id; CapacityError where no pool of this size can hold its
        prompt.

        owner: who gets what becomes of it; None leaves its output to `step`. request_id: the
        caller's, RequestError where it is in use; None is one that is not.
        """
        if request_id is not None:
            if not isinstance(request_id, str) or not request_id:
                raise RequestError(f"request_id={request_id!r}: must be a str that is not empty")
            request.rename(request_id)
        with self.at_rest():
            if error := self._misfit(request):
                raise error
            self.session.check_awake()
            engine = self.session.engine
            while request_id is None and request.request_id in engine.requests:
                request.rename(self.processor.new_id())
            request.weight_version = self.session.weights.version
            self._is_settled = False  # until both have it
            engine.add(request)
            self._owners[request] = self if owner is None else owner
            self._is_settled = True
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; every output that nobody has had yet."""
        with self.at_rest():
            self._advance()
            ready = list(self.ready.values())
            self.ready.clear()
            return ready

    def advance(self) -> None:
        """One step of the engine, whose results go to their owners."""
        with self.at_rest():
            self._advance()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request that `step` would return; its output, or None when no unfinished one has
        this id.
        """
        with self.at_rest():
            request = self.session.engine.requests.get(request_id)
            if request is None or self._owners[request] is not self:
                return None
            self._discard([request])
            return self.output(request)

    def discard(self, requests: Iterable[Request]) -> None:
        """End those of these requests that are unfinished; their owners hear nothing of it."""
        with self.at_rest():
            self._discard(requests)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot. Its requests are `step`'s; those of now are lost to their owners,
        who get an error.
        """
        with self.alone():
            self._is_settled = False
            self.session.restore(snapshot)
            for request, owner in list(self._owners.items()):
                owner.lost(request, RequestError(RESTORED))
                del self._owners[request]
            self.ready = {object(): output for output in snapshot.ready}
            self._settle()

    def close(self) -> None:
        """End every request, and the session; of no use afterwards."""
        with self.alone():
            self._is_settled = False
            self.ready.clear()
            self.session.close()
            self._settle()

    def finish(self, mode: OnUnfinished) -> None:
        """Have no unfinished requests: refuse where there are any, or abort them."""
        if mode not in ("refuse", "abort"):
            raise RequestError(f"mode={mode!r}: must be 'refuse' or 'abort'")
        unfinished = list(self.session.engine.requests.values())
        if unfinished and mode == "refuse":
            raise RequestError(
                f"{len(unfinished)} requests are unfinished: finish them, or pass mode='abort'"
            )
        for request in unfinished:
            self.session.engine.remove(request)
            self._deliver(request)

    def output(self, request: Request) -> RequestOutput:
        """What became of a request that has ended; its sequences are let go of."""
        output = collect(request, self.processor.tokenizer)
        # Each sequence knows its request: without the cycle they are freed now, by no collector.
        request.sequences = []
        return output

    # Calls is the owner of the requests that no call waits for

    def ended(self, request: Request) -> None:
        """Keep the output for `step`."""
        if request not in self.ready:
            self.ready[request] = collect(request, self.processor.tokenizer)
        request.sequences = []

    def lost(self, request: Request, error: Exception) -> None:
        """Nobody waits for it."""

    # Between steps

    def _advance(self) -> None:
        """One step; at rest."""
        self._is_settled = False  # until all that ended is delivered
        with self._in_step:
            ended = self.session.step()
        for request in ended:
            self._deliver(request)
        self._is_settled = True
        if self.after_step is not None:
            self.after_step()

    def _deliver(self, request: Request) -> None:
        """Give a request that has ended to its owner."""
        if (owner := self._owners.get(request)) is not None:
            owner.ended(request)
            del self._owners[request]

    def _discard(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self._owners.pop(request, None)
            if self.session.has_pool:
                self.session.engine.remove(request)

    def _settle(self) -> None:
        """End what closed streams have left; after a restore or an interrupt, deliver what owners
        have not got yet.
        """
        while self._abandoned:
            self._discard([self._abandoned[0]])
            self._abandoned.popleft()
        if self._is_settled:
            return
        has_pool = self.session.has_pool
        for request, owner in list(self._owners.items()):
            if has_pool and self.session.engine.holds(request):
                continue
            if request.is_finished:
                owner.ended(request)
            elif has_pool:
                owner.lost(request, RequestError(RESTORED))
            else:
                owner.lost(request, ConfigError("this LLM is closed"))
            del self._owners[request]
        for request in self.session.engine.requests.values() if has_pool else ():
            self._owners.setdefault(request, self)
        self._is_settled = True

    def _misfit(self, request: Request) -> CapacityError | None:
        """What is wrong with a prompt that the whole pool cannot hold."""
        engine, length = self.session.engine, request.sequences[0].prompt_len
        if engine.fits(length):
            return None
        pool = f"the KV pool of {engine.config.num_blocks} blocks of {engine.config.block_size}"
        return CapacityError(
            f"prompt of {length} tokens does not fit {pool}: shorten it or raise num_blocks"
        )

    def _failed_misfit(self, job: Job) -> Job:
        if not isinstance(job, Request) or not (error := self._misfit(job)):
            return job
        ids = job.sequences[0].token_ids
        return failed(self.processor.new_id(), error, job.prompt, ids)
