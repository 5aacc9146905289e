"""Calls: what every face does with a session: prompts to requests, run them, collect or stream."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from jpaged.engine.keys import Key, fold_in
from jpaged.engine.origin import Origin
from jpaged.engine.sequence import Request
from jpaged.errors import CapacityError, GenerationError, RequestError
from jpaged.request.collect import LiveCompletions, collect, failed, scores
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.processor import Processor
from jpaged.request.prompts import as_list, match_sampling_params
from jpaged.request.sampling_params import SamplingParams
from jpaged.session import Session

SamplingParamsLike = SamplingParams | List[SamplingParams] | None
OnError = Literal["raise", "return"]
OnUnfinished = Literal["refuse", "abort"]
Make = partial[Request]  # its first argument is the prompt
Job = Request | RequestOutput  # the output is that of a request which cannot run


class Calls:
    """What can be asked of one session. Each face decides on the keys and on when to step.

    ready: outputs of requests that ended while another call was stepping the engine; `step` returns
    them. tokenizer: None takes that of `source`, the weights' folder.
    """

    def __init__(self, session: Session, tokenizer: Any, source: Path | None):
        self.session = session
        self.processor = Processor(session.model_config, session.engine_config, tokenizer, source)
        self.processor.adapters = session.adapters.named
        self.ready: list[RequestOutput] = []

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
        pending = {request.request_id for request in requests}
        with tqdm(total=len(requests), unit="req", disable=not use_tqdm) as progress:
            try:
                for request in requests:
                    self.add(request)
                while pending:
                    ended = self._step_for(pending)
                    pending -= ended
                    progress.update(len(ended))
            except BaseException:
                for request_id in pending:
                    self.session.engine.abort(request_id)
                raise

    def _stream(self, requests: list[Request]) -> Iterator[CompletionChunk]:
        engine = self.session.engine
        live = LiveCompletions(requests, self.processor.tokenizer)
        try:
            for request in requests:
                self.add(request)
            while running := live.requests:
                if any(engine.requests.get(r.request_id) is not r for r in running):
                    raise RequestError(
                        "the stream's requests are gone: the LLM was restored to a snapshot"
                    )
                self._step_for({r.request_id for r in running})
                yield from live.take()
        finally:
            for request in live.requests:
                if engine.requests.get(request.request_id) is request:
                    engine.abort(request.request_id)

    # One request at a time

    def add(self, request: Request) -> str:
        """Queue a request and return its id; CapacityError where no pool of this size can hold its
        prompt.
        """
        if error := self._misfit(request):
            raise error
        request.weight_version = self.session.weights.version
        self.session.check_awake()
        self.session.engine.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; every output that nobody has had yet."""
        self._step_for(frozenset())
        return self.take_ready()

    def take_ready(self) -> list[RequestOutput]:
        """Outputs that nobody has had yet."""
        ready, self.ready = self.ready, []
        return ready

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output, or None when no unfinished request has this id."""
        request = self.session.engine.abort(request_id)
        return None if request is None else self.output(request)

    def finish(self, mode: OnUnfinished) -> None:
        """Have no unfinished requests: refuse where there are any, or abort them."""
        if mode not in ("refuse", "abort"):
            raise RequestError(f"mode={mode!r}: must be 'refuse' or 'abort'")
        unfinished = list(self.session.engine.requests)
        if unfinished and mode == "refuse":
            raise RequestError(
                f"{len(unfinished)} requests are unfinished: finish them, or pass mode='abort'"
            )
        for request_id in unfinished:
            output = self.abort(request_id)
            self.ready += [output] if output is not None else []

    def output(self, request: Request) -> RequestOutput:
        """What became of a request that has ended; its sequences are let go of."""
        return collect(request, self.processor.tokenizer)

    def _step_for(self, mine: set[str] | frozenset[str]) -> set[str]:
        """One step; the ids among `mine` that ended. The others that ended are `ready`."""
        ended = self.session.step()
        self.ready += [self.output(r) for r in ended if r.request_id not in mine]
        return {r.request_id for r in ended} & mine

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
