"""FleetLLM: the face of a fleet for a server: what AsyncLLM is for one engine."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jpaged.async_llm import IMAGE_THREADS, PROMPT_THREADS
from jpaged.config import EngineConfig
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.cache.prefix_cache import chain_hash
from jpaged.engine.keys import Key, fold_in
from jpaged.engine.origin import Origin
from jpaged.engine.sequence import Request
from jpaged.engine.types import Report as Stats
from jpaged.engine_thread import Coming, Inbox
from jpaged.errors import ConfigError, ReplicaError, RequestError
from jpaged.fleet.passed_on import PassedOn
from jpaged.fleet.replica import Changed, Description, Job, Piece, Served, adapter_salt
from jpaged.fleet.router import Ask, Router
from jpaged.fleet.totals import Totals
from jpaged.images.limits import ImageLimits
from jpaged.models.config import ModelConfig
from jpaged.request.embeddings import as_mapping
from jpaged.request.images import PromptImages
from jpaged.request.inputs import (
    CallKeys,
    Inputs,
    PromptLike,
    SamplingParamsLike,
    match_sampling_params,
    may_have_images,
)
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.prompt_reader import PromptReader
from jpaged.runtime.image_rows import most_image_tokens
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnPause, OnUpdate

log = logging.getLogger("jpaged")
EMPTY_S = 60.0  # for which a fleet may be without a replica before it counts as dead


class LostReplica(Exception):
    """A replica has died, or its engine. name: None where none was reached."""

    def __init__(self, name: str | None, reason: str):
        super().__init__(reason)
        self.name = name


class Replicas(Protocol):
    """The replicas of a fleet, and the router among them, which knows those that run."""

    router: Router

    def answer(self, ask: Ask, job: Job) -> AsyncGenerator[Piece]:
        """Run a job at the replica that the router chooses; see FleetReplica.answer. Raises
        LostReplica, and ReplicaError where none runs for long.
        """
        ...

    async def one(self, ask: Ask, method: str, *args: Any) -> Any:
        """Call a method of the replica that the router chooses. Raises as `answer`, and what it
        raises.
        """
        ...

    async def all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of every replica that runs; return what each returns or raises."""
        ...

    async def close(self) -> None:
        """End all replicas."""
        ...


class FrontModel(PromptReader):
    """What a fleet's front knows of its model. fixed: what GET /status says of it.

    folder: of config, tokenizer and generation_config, on this machine; None: there are none. It
    also says how images are prepared, which the front does: ConfigError where it does not.
    """

    def __init__(self, described: Description, folder: Path | None):
        self.fixed = described.fixed
        self.adapters: dict[str, AdapterVersion] = {}
        model, config = described.model, described.engine
        images = None
        if config.images and model.vision is not None:
            most = most_image_tokens(model.vision, config)
            images = PromptImages(folder, model.vision, config, most=most)
        inputs = Inputs(model, config.max_model_len or 0, None, folder, self.adapters, images)
        super().__init__(model, config, inputs)


class FleetLLM:
    """Answers by the replicas of a fleet as AsyncLLM does by its engine. With the same seed it
    draws what that draws, whichever replicas run it.

    replicas: those, which end with this object. described: of any of them, which are alike. folder:
    of the model, on this machine, None as in FrontModel. adapters: the folders by name that
    replicas began with; see `first_served`. max_retries: how often a request is run again whose
    replica has died.

    What a client has of an answer stays as it is: a replica that goes on with it begins with the
    tokens that were sent. Images of prompts are read and made into patches here, once for whichever
    replicas run a prompt, and their digests are part of what the router knows of it.
    """

    def __init__(
        self,
        replicas: Replicas,
        described: Description,
        folder: Path | None,
        *,
        adapters: Mapping[str, str] | None = None,
        seed: int | jax.Array = 0,
        max_retries: int = 3,
    ):
        self.replicas, self.router = replicas, replicas.router
        self.front = FrontModel(described, folder)
        self._keys, self._max_retries = CallKeys(seed), max_retries
        self._folder = None if folder is None else str(folder)
        self._served = first_served(adapters or {})
        self._take_adapters()
        self._numbers = itertools.count(len(self._served.adapters) + 1)  # of adapters
        self._serials, self._versions = itertools.count(1), itertools.count(2)
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, "jpaged-prompts")
        self._with_images = ThreadPoolExecutor(IMAGE_THREADS, "jpaged-prompts-images")
        self._name, self._calls = secrets.token_hex(8), itertools.count()
        self._changing = asyncio.Lock()
        self._running = set[asyncio.Task[None]]()
        self._unfinished = set[_Run]()
        self._goes_on: asyncio.Event | None = None  # set but while it is paused
        self._paused, self._is_closed = False, False
        self._totals = Totals()
        self._lost = self._retried = 0
        self._empty_since: float | None = None
        if self.front.tokenizer is not None:
            self.front.tokenizer.encode("a")  # once before the threads: see AsyncLLM

    # Requests

    @contextlib.asynccontextmanager
    async def run(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParamsLike,
        *,
        streaming: bool = False,
        coming: Coming | None = None,
        origin: Origin | None = None,
    ) -> AsyncIterator[Inbox]:
        """Run a request of each prompt inside the block: see AsyncLLM.run. coming: what `expect`
        returned, which ends here.
        """
        self._check()
        if coming is not None:
            coming.close()
        key, asked = self._keys.next(), match_sampling_params(sampling_params, len(prompts))
        inbox, loop = Inbox(), asyncio.get_running_loop()
        jobs = list[tuple[Job, Ask, Request]]()
        for index, (prompt, one) in enumerate(zip(prompts, asked, strict=True)):
            args = (prompt, one, fold_in(key, index), streaming, origin)
            threads = self._with_images if may_have_images(prompt) else self._threads
            jobs.append(await loop.run_in_executor(threads, self._job, *args))
            inbox.requests.append(jobs[-1][2])
        runs = [_Run(job, ask, request) for job, ask, request in jobs]
        for index, one in enumerate(runs):
            task = asyncio.create_task(self._answered(index, one, inbox))
            one.task = task
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            self._unfinished.add(one)
        try:
            yield inbox
        finally:
            self._unfinished.difference_update(runs)
            for one in runs:
                if not one.is_over and one.task is not None:  # else only its report is to come
                    one.task.cancel()

    def _job(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        key: Key,
        streaming: bool,
        origin: Origin | None,
    ) -> tuple[Job, Ask, Request]:
        """Return what a replica gets of a prompt, what a router does, and the request as an engine
        would have it, which nobody runs. Raises RequestError.
        """
        ready = self.front.inputs.prompt(prompt)
        request = self.front.builder.completion(
            ready, params, key, streaming=streaming, origin=origin
        )
        job = Job(
            prompt=dataclasses.replace(ready, adapter=None),
            adapter=None if ready.adapter is None else ready.adapter.name,
            params=params,
            key=key,
            streaming=streaming,
            origin=origin,
            served=self._served,
            router=self._name,
        )
        seq, size = request.sequences[0], self.front.engine_config.block_size or 1
        count = (len(seq) - 1) // size if params.prompt_logprobs is None else 0
        ask = Ask(
            call="",
            tokens=len(seq),
            keys=[chain_hash(seq, i, size) for i in range(count)],
            ends=range(size, size * count + 1, size),
            session=None if origin is None else origin.session,
        )
        return job, ask, request

    async def _answered(self, index: int, run: "_Run", inbox: Inbox) -> None:
        """Have a request answered by any replica, and put what comes of it into the inbox."""
        job, request = run.job, run.request
        passed, prompt, spans = PassedOn(job.params), job.prompt, job.prompt.spans

        def end(item: RequestOutput | BaseException) -> None:
            if not run.is_over:
                run.is_over = True
                self._unfinished.discard(run)
                inbox.put([(index, item)])

        for losses in itertools.count():
            await self._may_go_on()
            ask = dataclasses.replace(run.ask, call=f"{self._name} {next(self._calls)}")
            current = dataclasses.replace(
                job, prompt=prompt, served=self._served, unsure=self.router.unsure
            )
            try:
                async for item in self._items(ask, current):
                    if isinstance(item, CompletionChunk):
                        fresh = passed.fresh(item)
                        if fresh is not None:
                            _note(request, fresh)
                            inbox.put([(index, fresh)])
                        continue
                    if isinstance(item, RequestOutput):
                        item = dataclasses.replace(
                            item,
                            request_id=request.request_id,
                            embeddings=None if spans is None else as_mapping(spans),
                        )
                    end(item)
                if run.is_over:
                    return
                raise LostReplica(None, "its answer stopped before its end")
            except LostReplica as e:
                if run.is_over:
                    return
                self._lost += 1
                log.warning("a replica was lost under a request: %s", e)
                if losses >= self._max_retries:
                    said = f"its replica died each of the {losses + 1} times that it ran; the last "
                    return end(ReplicaError(f"{said}time: {e}"))
                self._retried += 1
                passed.restart()
                prompt = passed.continued(job.prompt)
            except Exception as e:  # that request's
                return end(e)

    async def _items(self, ask: Ask, job: Job) -> AsyncIterator[Any]:
        """Yield what a replica answers to a job, and tell the router what becomes of it."""
        has_begun = False
        try:
            async with contextlib.aclosing(self.replicas.answer(ask, job)) as pieces:
                async for piece in pieces:
                    if piece.items and not has_begun:
                        has_begun = True
                        self.router.begun(ask.call)
                    for item in piece.items:
                        yield item
                    if piece.report is not None:
                        self.router.report(piece.replica, piece.report)
        except LostReplica as e:
            if e.name is not None:
                self.router.remove(e.name)
            raise
        finally:
            self.router.ended(ask.call)

    async def _one(self, method: str, prompts: list[PromptLike], *args: Any) -> Any:
        """Call a method of some replica with prompts; again where it dies."""
        self._check()
        loop = asyncio.get_running_loop()
        for place, prompt in enumerate(prompts):
            if may_have_images(prompt):
                ready = loop.run_in_executor(self._with_images, self._with_read_images, prompt)
                prompts[place] = await ready
        for losses in itertools.count():
            await self._may_go_on()
            tokens = sum(len(p) for p in prompts if isinstance(p, list))
            ask = Ask(call=f"{self._name} {next(self._calls)}", tokens=tokens)
            try:
                return await self.replicas.one(ask, method, self._served, prompts, *args)
            except LostReplica as e:
                if e.name is not None:
                    self.router.remove(e.name)
                self._lost += 1
                if losses >= self._max_retries:
                    said = f"its replica died each of the {losses + 1} times that it ran"
                    raise ReplicaError(f"{said}; the last time: {e}") from e
                self._retried += 1
            finally:
                self.router.ended(ask.call)

    def _with_read_images(self, prompt: PromptLike) -> PromptLike:
        """Return a prompt whose images are patches, in a form that any replica takes."""
        ready = self.front.inputs.prompt(prompt)
        made: dict[str, Any] = {"prompt_token_ids": list(ready.ids)}
        if ready.spans is not None:
            made["embeddings"] = as_mapping(ready.spans)
        if ready.salt is not None:
            made["cache_salt"] = ready.salt
        if ready.adapter is not None:
            made["adapter"] = ready.adapter.name
        return made

    async def embed(
        self,
        prompts: Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> np.ndarray:
        """Return one vector of each prompt: see AsyncLLM.embed."""
        options = {"dimensions": dimensions, "normalize": normalize}
        return await self._one("embed", [*prompts], options)

    async def classify(self, prompts: Sequence[PromptLike]) -> np.ndarray:
        """Return the logits of each prompt's labels: see AsyncLLM.classify."""
        return await self._one("classify", [*prompts])

    def expect(self) -> Coming:
        """Return what stands for a request that is on its way."""
        return Coming(self)

    def count_coming(self, change: int) -> None:
        """Do nothing: no step waits for what is on its way to a fleet."""

    async def prepare[T, *Args](self, function: Callable[[Any, *Args], T], *args: *Args) -> T:
        """Call function(FrontModel, *args) in one of the threads that render and tokenize."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, self.front, *args)

    def limit_images(self, limits: ImageLimits) -> None:
        """Read images of prompts within these limits from now on, in place of EngineConfig's."""
        if (images := self.front.inputs.images) is not None:
            images.limits = limits

    # The whole fleet

    @property
    def weight_version(self) -> int:
        """How many weights the fleet has served."""
        return self._served.version

    @property
    def is_paused(self) -> bool:
        """Whether it is between `pause` and `resume`."""
        return self._paused

    async def pause(self, *, mode: OnPause = "keep") -> None:
        """Have no replica take a step until `resume`, and send no more requests: see LLM.pause."""
        async with self._changing:
            self._gate().clear()
            self._paused = True
            _raise_first(await self.replicas.all("pause", mode))

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with self._changing:
            _raise_first(await self.replicas.all("resume"))
            self._paused = False
            self._gate().set()

    async def update_params(
        self, params: str | Path, *, mode: OnUpdate = "refuse"
    ) -> dict[str, Any]:
        """Have every replica serve the weights of a folder, which all of them can read, and those
        that start later too: see LLM.update_params. Return "replicas", the "seconds" of the slowest
        and the "bytes" that all have read.

        Where any of them cannot, all go on with the weights that they had, and its error is raised.
        Replicas that die meanwhile are no error.
        """
        folder = str(Path(params).expanduser().absolute())
        async with self._changing:
            if mode == "refuse" and self._unfinished:
                count = len(self._unfinished)
                raise RequestError(f"{count} requests are unfinished: pass a mode, or wait")
            if mode == "wait" and self._paused:
                raise RequestError("the fleet is paused: its requests can end after resume()")
            before = self._served
            if before.weights is None:  # so that there is a way back
                before = dataclasses.replace(before, weights=self._folder)
            version = next(self._versions)
            # Requests sent from now on run on the new weights, at replicas that start now too.
            async with self._held(mode):
                served = dataclasses.replace(
                    before, serial=next(self._serials), weights=folder, version=version
                )
                results = await self.replicas.all("serve", served, mode)
                errors = [x for x in results.values() if isinstance(x, Exception)]
                if faults := [e for e in errors if not isinstance(e, LostReplica)]:
                    back = dataclasses.replace(before, serial=next(self._serials))
                    self._served = back
                    await self.replicas.all("serve", back, "keep")
                    raise faults[0]
                self._served = served
            changed = [x for x in results.values() if isinstance(x, Changed)]
            return {
                "replicas": len(changed),
                "seconds": round(max((x.seconds for x in changed), default=0.0), 3),
                "bytes": sum(x.num_bytes for x in changed),
            }

    @contextlib.asynccontextmanager
    async def _held(self, mode: OnUpdate) -> AsyncIterator[None]:
        """Inside the block no request is sent where an update waits for those that run."""
        if mode != "wait":
            yield
            return
        self._gate().clear()
        try:
            yield
        finally:
            self._gate().set()

    async def add_adapter(self, name: str, source: str | Path) -> int:
        """Serve the adapter of a folder at every replica; return its number. See
        LLM.add_adapter.
        """
        number, folder = next(self._numbers), str(Path(source).expanduser().absolute())
        async with self._changing:
            await self._change({**self._served.adapters, name: (folder, number)})
        return number

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter at every replica. RequestError for an unknown name."""
        async with self._changing:
            adapters = dict(self._served.adapters)
            if adapters.pop(name, None) is None:
                raise RequestError(f"adapter {name!r} is unknown")
            await self._change(adapters)

    async def _change(self, adapters: Mapping[str, tuple[str, int]]) -> None:
        before = self._served
        served = dataclasses.replace(before, serial=next(self._serials), adapters=adapters)
        results = await self.replicas.all("serve", served, "keep")
        errors = [x for x in results.values() if isinstance(x, Exception)]
        if faults := [e for e in errors if not isinstance(e, LostReplica)]:
            self._served = dataclasses.replace(before, serial=next(self._serials))
            await self.replicas.all("serve", self._served, "keep")
            raise faults[0]
        self._served = served
        self._take_adapters()

    def _take_adapters(self) -> None:
        """Let prompts name the adapters that the fleet serves."""
        self.front.adapters.clear()
        for name, (_, number) in self._served.adapters.items():
            self.front.adapters[name] = AdapterVersion(
                name=name,
                version=number,
                rank=1,
                data=None,
                shared_salt=adapter_salt(name, number),
            )

    async def gather(self) -> dict[str, Stats]:
        """Ask every replica for its stats() of now; return them by its name."""
        results = await self.replicas.all("stats")
        stats = {name: x for name, x in results.items() if isinstance(x, dict)}
        self._totals.take(stats)
        return stats

    def stats(self) -> Stats:
        """Return LLM.stats() as if the fleet were one engine, as `gather` last saw it: totals count
        replicas that are gone too. With them go the router's figures, "replicas_lost" and
        "requests_retried".
        """
        lost = {"replicas_lost": self._lost, "requests_retried": self._retried}
        return self._totals.summed() | self.router.stats() | lost

    @property
    def error(self) -> BaseException | None:
        """What the fleet has died of: it has had no replica for EMPTY_S. None while it lives."""
        if self.router.replicas:
            self._empty_since = None
            return None
        now = time.monotonic()
        self._empty_since = now if self._empty_since is None else self._empty_since
        if now - self._empty_since < EMPTY_S:
            return None
        return ReplicaError(f"no replica has run for {EMPTY_S:g} s")

    @property
    def is_ready(self) -> bool:
        """Whether any replica runs."""
        return bool(self.router.replicas)

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that prompts can name."""
        return frozenset(self.front.adapters)

    @property
    def engine_config(self) -> EngineConfig:
        """That of one replica."""
        return self.front.engine_config

    @property
    def model_config(self) -> ModelConfig:
        return self.front.model_config

    @property
    def all_rows(self) -> int:
        """Sequences that run at once, on the replicas that run now."""
        return self.front.engine_config.all_rows * max(len(self.router.replicas), 1)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder, or None."""
        return self.front.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json."""
        return self.front.default_sampling_params()

    async def close(self) -> None:
        """End every request with an error, and all replicas."""
        self._is_closed = True
        for task in list(self._running):
            task.cancel()
        await self.replicas.close()
        self._threads.shutdown(wait=False)
        self._with_images.shutdown(wait=False)
        if self.front.inputs.images is not None:
            self.front.inputs.images.close()

    def _check(self) -> None:
        if self._is_closed:
            raise ConfigError("this FleetLLM is closed")

    def _gate(self) -> asyncio.Event:
        """Return the event that is set while requests may be sent, made in the loop that asks."""
        if self._goes_on is None:
            self._goes_on = asyncio.Event()
            self._goes_on.set()
        return self._goes_on

    async def _may_go_on(self) -> None:
        await self._gate().wait()


@dataclasses.dataclass(eq=False)
class _Run:
    """A request that a task has answered. is_over: whether its output was handed over."""

    job: Job
    ask: Ask
    request: Request
    task: asyncio.Task[None] | None = None
    is_over: bool = False


def first_served(adapters: Mapping[str, str]) -> Served:
    """Return what replicas serve that begin with these adapters, of a folder each."""
    numbered = {
        name: (str(Path(folder).expanduser().absolute()), number)
        for number, (name, folder) in enumerate(adapters.items(), 1)
    }
    return Served(adapters=numbered)


def _note(request: Request, chunk: CompletionChunk) -> None:
    """Have a request that nobody runs here show the tokens that came of it."""
    seq = request.sequences[chunk.index]
    for token, logprob in zip(chunk.token_ids_delta, chunk.token_logprobs_delta, strict=True):
        seq.append(token, logprob, 0)


def _raise_first(results: Mapping[str, Any]) -> None:
    """Raise the first error that is not the death of a replica."""
    for result in results.values():
        if isinstance(result, Exception) and not isinstance(result, LostReplica):
            raise result
