"""Session: runs the requests of one model: prompts to requests, their steps, outputs or streams.

Any thread may call. Who steps the engine does not matter: what a step brings goes to the owner of
each request.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jpaged.checks import check_choice, check_whole
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.engine import Engine, EngineState
from jpaged.engine.keys import Key, fold_in
from jpaged.engine.origin import Origin
from jpaged.engine.scoring import Scoring
from jpaged.engine.sequence import Request
from jpaged.engine.types import Report
from jpaged.errors import CapacityError, ConfigError, GenerationError, RequestError
from jpaged.models.params import Params
from jpaged.models.pooling import Pooled
from jpaged.request.build import Builder
from jpaged.request.images import PromptImages
from jpaged.request.inputs import (
    Inputs,
    Prompt,
    PromptLike,
    PromptsLike,
    SamplingParamsLike,
    as_list,
    match_sampling_params,
)
from jpaged.request.outputs import (
    CompletionChunk,
    LiveCompletions,
    RequestOutput,
    collect,
    failed,
)
from jpaged.request.pooled import (
    PoolOptions,
    embedding_options,
    mean_of,
    padded_len,
    rows_of,
    through,
)
from jpaged.request.scores import ScoreCalls, ScoreOptions, ScoreResult, scores_of, scoring_of
from jpaged.runtime.image_rows import most_image_tokens
from jpaged.runtime.runner import Runner
from jpaged.runtime.step_table import BucketReport, bucket_reports
from jpaged.runtime.step_table import warmup as compile_steps
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import EarlyStopping
from jpaged.served_model import ServedModel
from jpaged.served_pool import Pool
from jpaged.turns import LOOK_S, FairLock, Stepping, Turns
from jpaged.types import PyTree, Structured, Tokenizer

OnError = Literal["raise", "return"]
OnUnfinished = Literal["refuse", "abort"]
OnPause = Literal["keep", "wait", "abort"]
OnUpdate = Literal["refuse", "abort", "wait", "keep", "recompute"]
WAVE_STEPS = 16  # of full steps, whose hidden states are held at once
WHOLE_CALLS = "whole calls"  # the group of Turns in which they are
RESTORED = "the requests of this call are gone: the LLM was restored to a snapshot"
Job = Request | RequestOutput  # the output is that of a request which cannot run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The requests of an LLM at one moment, for `restore`. Opaque.

    owner: the identity of the engine, whose snapshot `engine` is. ready: outputs that `step` has
    not returned. num_calls: of the face, which draws its keys by their number.
    """

    owner: object
    weight_version: int
    engine: EngineState
    ready: tuple[RequestOutput, ...]
    num_calls: int


class Owner(Protocol):
    """Who gets what becomes of a request. Called between two steps, in the thread that stepped."""

    def ended(self, request: Request) -> None:
        """The request has ended. After an interrupt the same request may be passed again."""
        ...

    def lost(self, request: Request, error: Exception) -> None:
        """The request has left the engine unfinished, and why."""
        ...


class Pending:
    """The requests of one call, as long as they have not ended; an Owner, and the Waiter of the
    call. error: of a lost one.
    """

    def __init__(self, requests: Iterable[Request] = ()):
        self.requests = dict.fromkeys(requests)  # an ordered set
        self.error: Exception | None = None
        self.bell = threading.Event()  # rung to have the thread look again
        self.wake = self.bell.set

    def ended(self, request: Request) -> None:
        self.requests.pop(request, None)
        if not self.requests:
            self.bell.set()

    def lost(self, request: Request, error: Exception) -> None:
        self.error = error
        self.ended(request)


class Draining:
    """The Waiter of a thread that needs an engine without requests."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self.bell = threading.Event()
        self.wake = self.bell.set

    @property
    def requests(self) -> bool:
        """Whether any are left."""
        return not self._pool.is_idle


class Session:
    """What a face (LLM, generate) holds of one model: `served` has its weights, `pool` its engine,
    `inputs` and `builder` make its requests. A face decides on the keys and on when to step.

    params: tell form and place of the weights, which `served.bind` binds. config: as the caller
    wrote it. tokenizer: None takes that of the params' source folder. grows: calls make the pool
    and enlarge it; else `pool.start` makes it. draft: weights that guess for these. Raises
    ConfigError.

    Two locks, both first come first served. `whole_call` is for a call that runs until its requests
    have ended: such calls hold it together, and take turns with what needs the session `alone`,
    also with those of other sessions that are made with the same `turns`. `at_rest` is for the time
    between two steps, so that a call, a stream, `step`, `add` or `abort` of another thread comes in
    while a whole call runs. `stepping`: the role of the one thread that steps for all who wait.
    `drained` is for what needs an engine without requests.

    ready: outputs of requests that no call waits for, which `step` returns. after_step: what to
    call after each step, whoever took it; may be None.
    """

    def __init__(
        self,
        params: Params,
        config: EngineConfig,
        mesh: Mesh | None,
        tokenizer: Tokenizer | None = None,
        *,
        grows: bool,
        draft: Params | None = None,
        turns: Turns | None = None,
    ):
        self.served = ServedModel(params, config, mesh, grows=grows, draft=draft)
        self.pool = self.served.pool
        self.inputs = Inputs(
            self.served.model_config,
            self.engine_config.max_model_len or 0,
            tokenizer,
            params.source,
            self.served.adapters.named,
            self._image_reader(params.source),
        )
        self.builder = Builder(self.inputs, self.engine_config)
        self.ready: dict[object, RequestOutput] = {}  # by their requests
        self.after_step: Callable[[], None] | None = None
        self._turns, self._engine_lock = Turns() if turns is None else turns, FairLock()
        self._in_step = threading.Lock()
        self._gate = threading.Lock()  # held by a thread that keeps new requests out
        # Of each thread's whole call: the blocks of its sequences at full length.
        self._needs: dict[int, list[int]] = {}
        self.stepping = Stepping()
        self._owners: dict[Request, Owner] = {}  # of every request in the engine
        # Whether `_owners` and the engine are known to agree, and what runs knows its weights.
        self._is_settled = True
        # While weights are bound under what runs: the version before, and whether to recompute.
        self._renewal: tuple[int, bool] | None = None
        self._abandoned: deque[Request] = deque()  # of streams that were closed

    def _image_reader(self, folder: Path | None) -> PromptImages | None:
        """Return what reads the images of prompts; None where no prompt may have any."""
        vision, config = self.served.model_config.vision, self.engine_config
        if not config.images or vision is None:
            return None
        return PromptImages(folder, vision, config, most=most_image_tokens(vision, config))

    @property
    def engine_config(self) -> EngineConfig:
        """The resolved config; its num_blocks is None where the pool is sized when it is made."""
        return self.pool.config

    @property
    def engine(self) -> Engine:
        """What runs the requests; ConfigError where there is none."""
        return self.pool.engine

    @property
    def runner(self) -> Runner:
        """What holds the pool; ConfigError where there is none."""
        return self.pool.runner

    # Locks

    @contextlib.contextmanager
    def whole_call(self, *, alone: bool = False) -> Iterator[None]:
        """Inside the block no other thread has the session alone, nor a call by other weights.
        alone: nor any whole call.
        """
        if self._engine_lock.is_mine and not self._turns.is_mine:
            # To wait for a thread that waits for the engine would be to wait for ever.
            raise RequestError("this call came from inside a step: it can be made after the step")
        with self._turns.held(None if alone else WHOLE_CALLS):
            try:
                yield
            finally:
                self._needs.pop(threading.get_ident(), None)

    @contextlib.contextmanager
    def at_rest(self, *, admits: bool = False) -> Iterator[None]:
        """Inside the block the engine is between two steps, and this thread's. admits: new requests
        may be queued, also in view of a thread that drains it.
        """
        while True:
            with self._engine_lock.held():
                if self._in_step.locked():
                    raise RequestError(
                        "this call came from inside a step (of a tokenizer, say): it can be made "
                        "after the step"
                    )
                if self._abandoned or not self._is_settled:
                    self._settle()
                if not (admits and self._gate.locked()):
                    yield
                    return
            if self._engine_lock.is_mine or self.stepping.is_mine:
                admits = False  # who drains it waits for this thread
            else:
                with self._gate:
                    pass  # what drained it is done

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread is in a whole call or at the engine. While the session
        is paused whole calls cannot end, so only steps are kept out.
        """
        paused = self.stepping.is_paused
        with contextlib.nullcontext() if paused else self.whole_call(alone=True), self.at_rest():
            yield

    @contextlib.contextmanager
    def drained(self) -> Iterator[None]:
        """Inside the block the engine is at rest and no request is unfinished: before it, all are
        stepped to their end, and no new one is admitted. RequestError while it is paused.
        """
        with self.at_rest():
            if self.stepping.is_paused:
                raise RequestError("the LLM is paused: its requests can end after resume()")
        waiter = Draining(self.pool)
        with self._gate:
            while True:
                self.run((), waiter=waiter)
                with self.at_rest():
                    if not waiter.requests:
                        yield
                        return

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted at once."""
        return not self._gate.locked()

    # Many prompts at once

    def generate(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike,
        key: Key,
        *,
        lora: PyTree = None,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt: see jpaged.generate. Its randomness is that of `key` and its
        place.
        """
        with self.whole_call():
            jobs = self._completions(prompts, sampling_params, key, lora=lora, on_error=on_error)
            jobs = self._fitting(jobs, on_error)
            self.run(jobs, use_tqdm=use_tqdm)
        return self._outputs(jobs, on_error)

    def beam_search(
        self,
        prompts: PromptsLike,
        beam_width: int,
        max_tokens: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
        structured: Structured | None = None,
        *,
        lora: PyTree = None,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Find the likeliest completions of each prompt: see jpaged.beam_search."""
        with self.whole_call():
            prompts = as_list(prompts)
            adapters = self.served.adapters_of(lora, len(prompts), self.drained)
            jobs: list[Job] = []
            for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
                try:
                    search = self.builder.beam_search(
                        self.inputs.prompt(prompt, adapter),
                        beam_width,
                        max_tokens,
                        length_penalty,
                        early_stopping,
                        structured,
                    )
                    jobs.append(search)
                except RequestError as e:
                    jobs.append(self._refused(i, prompt, e, on_error))
            jobs = self._fitting(jobs, on_error)
            self.run(jobs, use_tqdm=use_tqdm)
        return self._outputs(jobs, on_error)

    def score(
        self, token_lists: PromptsLike, options: ScoreOptions, *, lora: PyTree = None
    ) -> ScoreResult:
        """Return the scores of sequences: see jpaged.score."""
        with self.whole_call():
            requests = self.builder.scores(self._sequences(token_lists, lora), options)
            self._fitting(requests, "raise")
            # One token alone predicts nothing.
            self.run([request for request in requests if _reads(request)])
        return options.returned(scores_of(requests))

    def hidden(
        self, token_lists: PromptsLike, max_len: int | None, *, lora: PyTree = None
    ) -> list[jax.Array]:
        """Return the hidden states of sequences, on the device: see jpaged.hidden."""
        with self.whole_call():
            prompts = self._sequences(token_lists, lora)
            if max_len is not None:
                longest = max([len(prompt.ids) for prompt in prompts], default=1)
                check_whole("max_len", max_len, longest)
            requests = self.builder.hidden(prompts)
            self._fitting(requests, "raise")
            self.run(requests)
            states: list[jax.Array] = []
            with self.at_rest():  # over several devices, programs must start in one order
                for request in requests:
                    scored = request.sequences[0].scored
                    assert scored is not None
                    length = request.sequences[0].prompt_len if max_len is None else int(max_len)
                    states.append(self.runner.join_states(scored.states, length))
                    scored.states.clear()  # a step's states go with the last sequence it read
        return states

    def pooled(
        self, token_lists: PromptsLike, options: PoolOptions, *, lora: PyTree = None
    ) -> list[np.ndarray]:
        """Return what is made of the hidden states of each sequence: see jpaged.pool."""
        options.check(self.inputs.model.hidden_size)
        made: list[np.ndarray] = []
        with self.whole_call():
            prompts = self._sequences(token_lists, lora)
            requests = self.builder.hidden(prompts, last=options.at == "last")
            self._fitting(requests, "raise")
            for some in self._waves(requests):
                self.run(some)
                with self.at_rest():
                    made += self._made_of_states(some, options)
        return made

    def embed(
        self,
        prompts: PromptsLike,
        pooling: Pooled | None,
        normalize: bool | None,
        dimensions: int | None,
        *,
        lora: PyTree = None,
    ) -> np.ndarray:
        """Return one vector of each prompt, [N, E]: see jpaged.embed."""
        config, size = self.inputs.model.pooling, self.inputs.model.hidden_size
        options = embedding_options(config, size, pooling, normalize, dimensions)
        vectors = self.pooled(prompts, options, lora=lora)
        width = size if config is None else config.width(size)
        return (
            np.stack(vectors) if vectors else np.zeros((0, options.dimensions or width), np.float32)
        )

    def classify(self, prompts: PromptsLike, *, lora: PyTree = None) -> np.ndarray:
        """Return the logits of the labels of each prompt, [N, Y]: see jpaged.classify."""
        if not (labels := self.inputs.model.num_labels):
            raise RequestError(
                "classify: this model has no head of labels (*ForSequenceClassification); "
                "pool(..., head=) takes one of yours"
            )
        rows = self.pooled(prompts, PoolOptions(of_model="score"), lora=lora)
        return np.stack(rows) if rows else np.zeros((0, labels), np.float32)

    def _waves(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Split requests so that the hidden states of each part have room: as many tokens as a few
        steps compute.
        """
        most = WAVE_STEPS * (self.engine_config.max_num_batched_tokens or 1)
        some, tokens = list[Request](), 0
        for request in requests:
            some.append(request)
            tokens += request.sequences[0].prompt_len
            if tokens >= most:
                yield some
                some, tokens = [], 0
        if some:
            yield some

    def _made_of_states(self, requests: list[Request], options: PoolOptions) -> list[np.ndarray]:
        """Return what is made of the hidden states of requests that have ended, and drop these."""
        states: list[tuple[jax.Array, int]] = []
        for request in requests:
            sequence = request.sequences[0]
            assert sequence.scored is not None
            length = sequence.scored.count
            joined = self.runner.join_states(sequence.scored.states, padded_len(length))
            sequence.scored.states.clear()
            if options.at == "mean":
                joined = mean_of(joined, length)
            elif options.at != "all":
                joined = joined[length - 1 if options.at == "last" else 0]
            states.append((joined, length))
        model = self.runner.params
        assert model is not None, "weights are bound during a call"
        if options.at == "all":
            return [rows_of(joined, length, options, model) for joined, length in states]
        vectors = [np.asarray(vector, np.float32) for vector, _ in states]
        return list(through(vectors, options, model))

    def _sequences(self, token_lists: PromptsLike, lora: PyTree) -> list[Prompt]:
        """Return the Prompts of sequences that are read and not continued."""
        token_lists = as_list(token_lists)
        adapters = self.served.adapters_of(lora, len(token_lists), self.drained)
        return [
            self.inputs.prompt(token_list, adapter, must_fit=False)
            for token_list, adapter in zip(token_lists, adapters, strict=True)
        ]

    def stream(
        self, prompts: PromptsLike, sampling_params: SamplingParamsLike, key: Key
    ) -> Iterator[CompletionChunk]:
        """Make the requests now; yield what each step adds to them. Closing it aborts the rest."""
        jobs = self._completions(prompts, sampling_params, key, streaming=True)
        return self._stream([job for job in jobs if isinstance(job, Request)])

    def request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams,
        key: Key,
        adapter: AdapterVersion | None = None,
        *,
        streaming: bool = False,
        origin: Origin | None = None,
    ) -> Request:
        """Return the request of one prompt, which `add` queues. Raises RequestError. See
        Inputs.prompt and Builder.completion.
        """
        return self.builder.completion(
            self.inputs.prompt(prompt, adapter),
            sampling_params,
            key,
            streaming=streaming,
            origin=origin,
        )

    def completions(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike,
        key: Key,
        on_error: OnError,
    ) -> list[Job]:
        """Return the request of each prompt that can run, and the failed output of each other; with
        "raise" raise the first error.
        """
        jobs = self._completions(prompts, sampling_params, key, on_error=on_error)
        return self._fitting(jobs, on_error)

    def _completions(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike,
        key: Key,
        *,
        lora: PyTree = None,
        on_error: OnError = "raise",
        streaming: bool = False,
    ) -> list[Job]:
        """Return the request of each prompt that can run, and the failed output of each other."""
        prompts = as_list(prompts)
        adapters = self.served.adapters_of(lora, len(prompts), self.drained)
        asked = match_sampling_params(sampling_params, len(prompts))
        jobs: list[Job] = []
        for i, prompt in enumerate(prompts):
            try:
                ready = self.inputs.prompt(prompt, adapters[i])
                drawn = fold_in(key, i)
                jobs.append(self.builder.completion(ready, asked[i], drawn, streaming=streaming))
            except RequestError as e:
                jobs.append(self._refused(i, prompt, e, on_error))
        return jobs

    def _fitting(self, jobs: Sequence[Job], on_error: OnError) -> list[Job]:
        """Have room for these requests at full length, where the pool grows; those whose prompts
        the whole pool cannot hold fail.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error={on_error!r}: must be 'raise' or 'return'")
        requests = [job for job in jobs if isinstance(job, Request)]
        if self.pool.grows:
            size = self.pool.config.block_size
            mine = [n for request in requests for n in request.blocks_needed(size)]
            self._needs[threading.get_ident()] = mine
            # Room beside the calls of other threads, too; a larger pool is another engine.
            if not self.pool.is_enough(list(itertools.chain(*self._needs.values()))):
                with self.drained():
                    self.pool.reserve(list(itertools.chain(*self._needs.values())))
        fitting: list[Job] = []
        for i, job in enumerate(jobs):
            if isinstance(job, Request) and (error := self.pool.misfit(job)):
                first = job.sequences[0]
                ids = first.token_ids[: first.prompt_len]
                job = self._refused(i, job.prompt, error, on_error, ids)
            fitting.append(job)
        return fitting

    def _refused(
        self,
        index: int,
        prompt: object,
        error: RequestError,
        on_error: OnError,
        token_ids: Sequence[int] = (),
    ) -> RequestOutput:
        """Return the output of a request that cannot run, or raise its error."""
        if on_error == "return":
            return failed(self.builder.new_id(), error, prompt, token_ids)
        raise type(error)(f"request {index}: {error}") from error

    def _outputs(self, jobs: list[Job], on_error: OnError) -> list[RequestOutput]:
        """Return the outputs of requests that have ended; GenerationError if one has failed and
        that is to be raised.
        """
        outputs: list[RequestOutput] = []
        for job in jobs:
            if isinstance(job, Request):
                outputs.append(collect(job, self.inputs.tokenizer))
                # Each sequence knows its request: without the cycle they are freed now.
                job.sequences = []
            else:
                outputs.append(job)
        for index, output in enumerate(outputs):
            output.index = index
        failures = [(i, out.error) for i, out in enumerate(outputs) if out.error is not None]
        if failures and on_error == "raise":
            i, error = failures[0]
            counted = f"{len(failures)} of {len(outputs)} requests failed"
            raise GenerationError(f"{counted}; request {i}: {error}", outputs) from error
        return outputs

    def run(
        self, jobs: Sequence[Job], *, waiter: Draining | None = None, use_tqdm: bool = False
    ) -> None:
        """Wait until these requests, whose prompts fit the pool, have ended, and step meanwhile
        unless another thread does; on any exception none of them is left behind. Jobs that are
        outputs have ended before. waiter: what else to wait for, with no jobs.
        """
        requests = [job for job in jobs if isinstance(job, Request)]
        pending = Pending(requests)
        until, stepping = waiter or pending, self.stepping
        with tqdm(total=len(requests), unit="req", disable=not use_tqdm) as progress:
            try:
                if requests:
                    with self.at_rest(admits=True):
                        self.served.check_awake()
                        for request in requests:
                            self._queue(request, pending)
                left = len(requests)
                while until.requests:
                    with stepping.role(until) as steps:
                        if not steps:
                            stepping.check_not_mine()
                            until.bell.wait(LOOK_S)
                            until.bell.clear()
                        while steps and until.requests and not stepping.is_paused:
                            with self.at_rest():
                                # Another thread's step may have been the last one.
                                if until.requests and not stepping.is_paused:
                                    self._advance()
                            progress.update(left - len(pending.requests))
                            left = len(pending.requests)
                    progress.update(left - len(pending.requests))
                    left = len(pending.requests)
                if pending.error is not None:
                    raise pending.error
            except BaseException:
                with self.at_rest():
                    self._discard(pending.requests)
                raise

    def _stream(self, requests: list[Request]) -> Iterator[CompletionChunk]:
        live, pending = LiveCompletions(requests, self.inputs.tokenizer), Pending(requests)
        try:
            with self.at_rest(admits=True):
                for request in requests:
                    self.add(request, pending)
            while live:
                with self.at_rest():  # and not while the consumer has a piece
                    if pending.error is not None:
                        raise pending.error
                    chunks, error = live.take_all()  # of a step that another thread took
                    if not chunks and error is None and not self.stepping.is_paused:
                        self._advance()
                        chunks, error = live.take_all()
                yield from chunks
                if error is not None:
                    raise error
                if not chunks and live:
                    self.stepping.wait_resumed()
        finally:
            # To wait for a lock here could be for ever: the collector of garbage, too, closes
            # streams, in any thread and on any line. The next that takes the engine ends them.
            self._abandoned.extend(pending.requests)

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
        with self.at_rest(admits=True):
            if error := self.pool.misfit(request):
                raise error
            self.served.check_awake()
            self._queue(request, self if owner is None else owner, rename=request_id is None)
        return request.request_id

    def _queue(self, request: Request, owner: Owner, *, rename: bool = True) -> None:
        """Give a request to the engine. rename: to an id that is not in use."""
        engine = self.pool.engine
        while rename and request.request_id in engine.requests:
            request.rename(self.builder.new_id())
        if not request.has_drawn:
            request.weight_version = self.served.weights.version
        self._is_settled = False  # until both have it
        engine.add(request)
        self._owners[request] = owner
        self._is_settled = True

    def step(self) -> list[RequestOutput]:
        """Take one step of the engine, after a pause; return every output that nobody has had
        yet.
        """
        while True:
            with self.at_rest():
                if not self.stepping.is_paused:
                    self._advance()
                    ready = list(self.ready.values())
                    self.ready.clear()
                    return ready
            self.stepping.wait_resumed()

    def advance(self) -> None:
        """Take one step of the engine unless it is paused; its results go to their owners."""
        with self.at_rest():
            if not self.stepping.is_paused:
                self._advance()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request that `step` would return; return its output, or None when no unfinished one
        has this id.
        """
        with self.at_rest():
            request = self.pool.engine.requests.get(request_id)
            if request is None or self._owners[request] is not self:
                return None
            self._discard([request])
            output = collect(request, self.inputs.tokenizer)
            request.sequences = []
            return output

    def discard(self, requests: Iterable[Request]) -> None:
        """End those of these requests that are unfinished; their owners are not called."""
        with self.at_rest():
            self._discard(requests)

    def has_unfinished(self) -> bool:
        """Return whether `step` has anything left to do or to return."""
        with self.at_rest():
            return bool(self.ready) or self.pool.engine.has_unfinished()

    def is_at_prompts(self) -> bool:
        """Return whether a step in flight has prompts, so that a moment's wait costs nothing."""
        with self.at_rest():
            return self.pool.engine.in_flight.has_prefill

    # The session as a whole

    def update_params(self, params: PyTree, *, mode: OnUpdate, donate: bool, draft: PyTree) -> None:
        """Serve these weights from now on: see LLM.update_params."""
        check_choice("mode", mode, OnUpdate)
        fresh, guesses = self.served.accept(params), self.served.accept_draft(draft)
        with self._between_requests(mode):
            if mode in ("keep", "recompute"):
                self._advance(drain=True)  # all that was drawn so far is of the old weights
            self._renewal = self.served.weights.version, mode == "recompute"
            self._is_settled = False  # until what runs knows of them
            self.served.bind(fresh, donate=donate, draft=guesses)
            self._renew()
            self._is_settled = True

    def _renew(self) -> None:
        """Have what runs go on under the weights that were bound since `_renewal` was noted."""
        if self._renewal is None:
            return
        (before, recompute), version = self._renewal, self.served.weights.version
        engine = self.pool.engine
        if version != before and engine.requests:
            engine.renew(recompute=recompute)
            for request in engine.requests.values():
                if not request.has_drawn:
                    request.weight_version = version
        self._renewal = None

    @contextlib.contextmanager
    def _between_requests(self, mode: OnUpdate | OnPause) -> Iterator[None]:
        """Inside the block the engine is at rest, and what runs is dealt with as `mode` says."""
        if mode == "refuse":
            with self.alone():
                self._finish("refuse")
                yield
        elif mode == "wait":
            with self.drained():
                yield
        else:
            with self.at_rest():
                if mode == "abort":
                    self._finish("abort")
                yield

    def pause(self, mode: OnPause) -> None:
        """Take no step until `resume`: see LLM.pause."""
        check_choice("mode", mode, OnPause)
        with self._between_requests(mode):
            self._advance(drain=True)
            self.stepping.pause()

    def resume(self) -> None:
        """Go on after a pause; nothing where there is none."""
        self.stepping.resume()

    def sleep(self, mode: OnUnfinished) -> None:
        """Free pool and weights' copies until `wake`: see LLM.sleep."""
        with self.alone() if mode == "refuse" else self.at_rest():
            self._finish(mode)
            self.served.sleep()

    def wake(self) -> None:
        """Serve again; CapacityError where the memory is not there: then it sleeps on."""
        with self.alone():
            self.served.wake()

    def snapshot(self, num_calls: int) -> Snapshot:
        """Return the unfinished requests and a copy of the blocks in use. num_calls: the face's."""
        with self.alone():
            engine, ready = self.pool.engine, tuple(self.ready.values())
            return Snapshot(
                owner=engine.identity,
                weight_version=self.served.weights.version,
                engine=engine.snapshot(),
                ready=ready,
                num_calls=num_calls,
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this session and these weights, RequestError for any other. Its
        requests are `step`'s; those of now are lost to their owners, who get an error.
        """
        with self.alone():
            self.served.check_awake()
            engine, version = self.pool.engine, self.served.weights.version
            if snapshot.owner is not engine.identity:
                raise RequestError(
                    "snapshot of another LLM, or of a pool that has since been replaced"
                )
            if (taken := snapshot.weight_version) != version:
                raise RequestError(
                    f"snapshot of weight version {taken}: its KV is not that of {version}"
                )
            self._is_settled = False
            engine.restore(snapshot.engine)
            for request, owner in list(self._owners.items()):
                owner.lost(request, RequestError(RESTORED))
                del self._owners[request]
            self.ready = {object(): output for output in snapshot.ready}
            self._settle()

    def close(self) -> None:
        """End every request, and free the model; of no use afterwards."""
        with self.alone():
            self._is_settled = False
            self.ready.clear()
            self.served.close()
            self._settle()
        if self.inputs.images is not None:
            self.inputs.images.close()

    def report(self) -> Report:
        """Return the totals of engine and device since the start, and the version of weights."""
        with self.at_rest():
            return self.pool.report() | self.served.report()

    def buckets(self) -> list[BucketReport]:
        """Return a report on every shape of a step: see LLM.buckets."""
        with self.at_rest():
            runner = self.pool.runner
            return bucket_reports(runner.compiled, runner.usage)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self.at_rest():
            self.pool.engine.reset_prefix_cache(files=True)

    def warmup(self, score: ScoreCalls | None, *, use_tqdm: bool) -> float:
        """Compile every step of the table; return the seconds that it took. score: also those of
        such calls.
        """
        scoring = self._scoring(score)
        with self.whole_call():
            self.served.check_awake()
            runner, began = self.pool.runner, time.perf_counter()
            compile_steps(runner.compiled, scoring=scoring, use_tqdm=use_tqdm)
            runner.compile_tower()
        return time.perf_counter() - began

    def warmup_for(
        self,
        max_prompt_len: int,
        max_tokens: int,
        batch: int,
        score: ScoreCalls | None,
        *,
        use_tqdm: bool,
    ) -> float:
        """Size the pool for calls of so many completions, and compile what they need: see
        jpaged.warmup.
        """
        scoring = self._scoring(score)
        began, length = time.perf_counter(), max_prompt_len + max_tokens
        if length > (limit := self.inputs.max_model_len):
            raise CapacityError(
                f"max_prompt_len + max_tokens = {length} is beyond max_model_len={limit}"
            )
        with self.whole_call(), self.drained():
            self.pool.reserve([-(-length // self.engine_config.block_size)] * batch)
            runner = self.pool.runner
            compile_steps(
                runner.compiled,
                tokens=batch * length,
                rows=batch,
                scoring=scoring,
                use_tqdm=use_tqdm,
            )
            runner.allocate(full=True)
            runner.adapters.allocate()
            runner.embeddings.allocate()
            runner.compile_tower()
        return time.perf_counter() - began

    def _scoring(self, score: ScoreCalls | None) -> Scoring | None:
        if score is None:
            return None
        check_combination(Facts(config=self.engine_config, scores_more=True))
        return scoring_of(score)

    # The session is the owner of the requests that no call waits for

    def ended(self, request: Request) -> None:
        """Keep the output for `step`."""
        if request not in self.ready:
            self.ready[request] = collect(request, self.inputs.tokenizer)
        request.sequences = []

    def lost(self, request: Request, error: Exception) -> None:
        """Do nothing: no call waits for the request."""

    # Between steps

    def _advance(self, *, drain: bool = False) -> None:
        """Take one step, or with `drain` wait for those in flight; the engine is at rest."""
        self._is_settled = False  # until all that ended is delivered
        with self._in_step:
            try:
                engine = self.pool.engine
                ended = engine.drain() if drain else engine.step()
            except (RuntimeError, ValueError) as e:
                self.served.check_alive(e)
                if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                    raise ConfigError(
                        "jax_disable_jit is on, and steps are compiled ahead: call jpaged inside "
                        "`with jax.disable_jit(False):`"
                    ) from e
                raise
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
            if self.pool.has_engine:
                self.pool.engine.remove(request)

    def _finish(self, mode: OnUnfinished) -> None:
        """Have no unfinished requests: refuse where there are any, or abort them."""
        check_choice("mode", mode, OnUnfinished)
        unfinished = list(self.pool.engine.requests.values())
        if unfinished and mode == "refuse":
            raise RequestError(
                f"{len(unfinished)} requests are unfinished: finish them, or pass mode='abort'"
            )
        self._is_settled = False  # until the owners know
        for request in unfinished:
            self.pool.engine.remove(request)
            self._deliver(request)
        self._is_settled = True

    def _settle(self) -> None:
        """End what closed streams have left; after a restore or an interrupt, finish an update of
        the weights, and deliver what owners have not got yet.
        """
        while self._abandoned:
            self._discard([self._abandoned[0]])
            self._abandoned.popleft()
        if self._is_settled:
            return
        if has_engine := self.pool.has_engine:
            self._renew()
        for request, owner in list(self._owners.items()):
            if has_engine and self.pool.engine.holds(request):
                continue
            if request.is_finished:
                owner.ended(request)
            elif has_engine:
                owner.lost(request, RequestError(RESTORED))
            else:
                owner.lost(request, ConfigError("this LLM is closed"))
            del self._owners[request]
        for request in self.pool.engine.requests.values() if has_engine else ():
            self._owners.setdefault(request, self)
        self._is_settled = True


def _reads(request: Request) -> bool:
    """Return whether a request of one sequence reads any position of it."""
    return request.sequences[0].next_read is not None
