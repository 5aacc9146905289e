"""AsyncLLM: the face of one model for programs that run in an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.checks import check_whole
from jpaged.config import EngineConfig, EngineFields
from jpaged.engine.keys import Key, fold_in
from jpaged.engine.origin import Origin
from jpaged.engine.types import Report
from jpaged.engine_thread import Coming, Delivery, Inbox
from jpaged.errors import ConfigError
from jpaged.images.limits import ImageLimits
from jpaged.llm import LLM
from jpaged.models.config import ModelConfig
from jpaged.models.pooling import Pooled
from jpaged.request.inputs import (
    Chat,
    PromptLike,
    PromptsLike,
    SamplingParamsLike,
    match_sampling_params,
    may_have_images,
)
from jpaged.request.outputs import CompletionChunk, LiveCompletions, RequestOutput
from jpaged.request.pooled import PoolHead, PoolOptions, States
from jpaged.request.scores import ScoreOptions, ScoreResult
from jpaged.rollout import AsyncRollout
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnError, OnPause, OnUnfinished, OnUpdate, Session
from jpaged.types import IntArrays, Messages, ModelLike, PyTree, Structured, Tokenizer

PROMPT_THREADS = 4  # that render and tokenize; the tokenizer lets go of Python's lock meanwhile
IMAGE_THREADS = 8  # that wait for the images of prompts, so that those of text need not


class AsyncLLM:
    """A model that any number of tasks generate with at once, of one event loop or of several.

    model: an LLM, which from then on is this object's alone, or what LLM takes, with its settings;
    seed None is LLM's own.
    One thread steps the engine. A task that is cancelled, or a stream that is closed, aborts its
    request. Raises what LLM raises, and ConfigError for an LLM with unfinished requests.
    """

    def __init__(
        self,
        model: ModelLike | PyTree | LLM,
        *,
        params: PyTree = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
        seed: int | jax.Array | None = None,
        **engine_config: Unpack[EngineFields],
    ):
        if isinstance(model, LLM):
            settings = {"params": params, "tokenizer": tokenizer, "mesh": mesh, "seed": seed}
            passed = [name for name, value in settings.items() if value is not None]
            if passed := [*passed, *engine_config]:
                raise ConfigError(f"{min(passed)!r}: an LLM that is made has its settings already")
            llm = model
        else:
            seed = 0 if seed is None else seed
            llm = LLM(
                model, params=params, tokenizer=tokenizer, mesh=mesh, seed=seed, **engine_config
            )
        self._llm = llm
        if llm.has_unfinished():
            raise ConfigError("this LLM has unfinished requests: finish or abort them first")
        if llm.tokenizer is not None:
            # Once before the threads: the first call may change settings of the tokenizer.
            llm.tokenizer.encode("a")
        self._prompts = ThreadPoolExecutor(PROMPT_THREADS, "jpaged-prompts")
        self._with_images = ThreadPoolExecutor(IMAGE_THREADS, "jpaged-prompts-images")
        self._thread = llm.engine_thread("AsyncLLM")

    async def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[CompletionChunk]:
        """Yield the completions of one prompt in pieces, which add up to those of LLM.generate with
        the same seed. The prompt may have any form that LLM.generate takes. Raises the request's
        error.
        """
        async with self.run([prompt], sampling_params, streaming=True) as inbox:
            while True:
                for _, item in await inbox.take():
                    if not isinstance(item, CompletionChunk):
                        _checked(item)
                        return
                    yield item

    async def complete(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Return the completions of one prompt once they have ended. Raises the request's error."""
        async with self.run([prompt], sampling_params) as inbox:
            return _checked((await inbox.take())[0][1])

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> AsyncIterator[CompletionChunk]:
        """Answer one conversation, a list of {"role", "content"}, in pieces. sampling_params None
        generates up to the end of the context.
        """
        chat = Chat(messages=messages, template_kwargs=chat_template_kwargs)
        return self.generate(chat, sampling_params or SamplingParams(max_tokens=None))

    @contextlib.asynccontextmanager
    async def run(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParamsLike,
        *,
        streaming: bool = False,
        coming: Coming | None = None,
        origin: Origin | None = None,
        keys: Sequence[Key] | None = None,
    ) -> AsyncIterator[Inbox]:
        """Run a request of each prompt inside the block, as one call of LLM.generate; yields what
        they answer to. Each comes to its output, or to an error; streaming: its pieces come first.
        coming: what `expect` returned before they were made. origin: who asks, by which they
        take turns with others; None takes its turns with all who name none. keys: what each prompt
        draws from where it has no seed; None: keys of this call.
        """
        self._thread.check()
        session, loop = self._llm.session, asyncio.get_running_loop()
        asked = match_sampling_params(sampling_params, len(prompts))
        if keys is None:
            key = self._llm.keys.next()
            keys = [fold_in(key, index) for index in range(len(prompts))]
        build = partial(session.request, streaming=streaming, origin=origin)
        jobs: list[Delivery] = []
        inbox = Inbox()
        with contextlib.closing(coming or self.expect()) as coming:
            for index, (prompt, one, drawn) in enumerate(zip(prompts, asked, keys, strict=True)):
                threads = self._with_images if may_have_images(prompt) else self._prompts
                request = await loop.run_in_executor(threads, build, prompt, one, drawn)
                live = LiveCompletions([request], self.tokenizer) if streaming else None
                jobs.append(Delivery(request, inbox, index, live))
                inbox.requests.append(request)
            self._thread.add(jobs)
        try:
            yield inbox
        finally:
            self._thread.abort(jobs)

    @contextlib.asynccontextmanager
    async def rollout(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike = None,
        *,
        enough: int,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
    ) -> AsyncIterator[AsyncRollout]:
        """Complete prompts until `enough` of them have ended, each with all of its samples; with
        the tokens of LLM.rollout, and to be used as that is:

            async with llm.rollout(prompts, sampling, enough=64) as done:
                async for group in done:
                    ...

        `done.rest` has the outputs of the other prompts, which as prompts of a later call go on.
        """
        self._thread.check()
        session, key = self._llm.session, self._llm.keys.of(seed)
        make = partial(session.completions, prompts, sampling_params, key, on_error)
        many = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        threads = self._with_images if any(map(may_have_images, many)) else self._prompts
        jobs = await asyncio.get_running_loop().run_in_executor(threads, make)
        check_whole("enough", enough, 1, len(jobs))
        raises = on_error == "raise"
        done = AsyncRollout(session, self._thread, jobs, enough=int(enough), raises=raises)
        try:
            done.start()
            yield done
        finally:
            await done.close()

    def expect(self) -> Coming:
        """Have a step after a pause, or behind prompts, wait a moment for a request that is on its
        way, until it is run, or what this returns is closed.
        """
        return Coming(self._thread)

    async def call[T, *Args](self, function: Callable[[LLM, *Args], T], *args: *Args) -> T:
        """Call function(LLM, *args) between two steps, while nothing else touches the LLM, for
        example to reset the prefix cache. Return what it returns, or raise what it raises.
        """
        return await asyncio.wrap_future(self._thread.call(function, self._llm, *args))

    async def update_params(
        self,
        params: PyTree,
        *,
        mode: OnUpdate = "refuse",
        donate: bool = False,
        draft: PyTree = None,
    ) -> None:
        """Serve these weights from now on: see LLM.update_params. Other tasks go on meanwhile."""
        update = partial(self._llm.update_params, mode=mode, donate=donate, draft=draft)
        await self._beside(update, params)

    async def pause(self, *, mode: OnPause = "keep") -> None:
        """Have the device do nothing until `resume`: see LLM.pause. Requests wait."""
        await self._beside(partial(self._llm.pause, mode=mode))

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._llm.resume()

    @property
    def is_paused(self) -> bool:
        """Whether it is between `pause` and `resume`."""
        return self._llm.is_paused

    @contextlib.asynccontextmanager
    async def paused(self, *, mode: OnPause = "keep") -> AsyncIterator[None]:
        """Pause inside the block: the device is the caller's."""
        await self.pause(mode=mode)
        try:
            yield
        finally:
            self._llm.resume()

    async def sleep(self, *, mode: OnUnfinished = "refuse") -> None:
        """Free pool and weights' copies until `wake`: see LLM.sleep."""
        await self._beside(partial(self._llm.sleep, mode=mode))

    async def wake(self) -> None:
        """Serve again: see LLM.wake."""
        await self._beside(self._llm.wake)

    async def score(
        self,
        token_lists: PromptsLike,
        *,
        temperature: float = 1.0,
        return_greedy: bool = False,
        structured: Structured | None = None,
        prompt_lens: Sequence[int] | None = None,
        start: Sequence[int] | np.ndarray | None = None,
        top_k: int | None = None,
        at: IntArrays | None = None,
        entropy: bool = False,
        routed: IntArrays | None = None,
    ) -> ScoreResult:
        """Return the scores of sequences, in one batch with what runs: see LLM.score."""
        options = ScoreOptions(
            temperature=temperature,
            return_greedy=return_greedy,
            structured=structured,
            prompt_lens=prompt_lens,
            start=start,
            top_k=top_k,
            at=at,
            entropy=entropy,
            routed=routed,
        )
        return await self._beside(self._llm.session.score, token_lists, options)

    async def hidden(
        self, token_lists: PromptsLike, *, max_len: int | None = None
    ) -> list[jax.Array]:
        """Return the final hidden states of each sequence, on the device: see LLM.hidden."""
        return await self._beside(self._llm.session.hidden, token_lists, max_len)

    async def pool(
        self,
        token_lists: PromptsLike,
        *,
        head: PoolHead | None = None,
        at: States = "last",
    ) -> list[np.ndarray]:
        """Return what a head makes of the hidden states of each sequence: see jpaged.pool."""
        options = PoolOptions(head=head, at=at)
        return await self._beside(self._llm.session.pooled, token_lists, options)

    async def embed(
        self,
        prompts: PromptsLike,
        *,
        pooling: Pooled | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Return one vector of each prompt, float32 [N, E]: see jpaged.embed."""
        embed = self._llm.session.embed
        return await self._beside(embed, prompts, pooling, normalize, dimensions)

    async def classify(self, prompts: PromptsLike) -> np.ndarray:
        """Return the logits of each prompt's labels, float32 [N, labels]: see jpaged.classify."""
        return await self._beside(self._llm.session.classify, prompts)

    async def add_adapter(self, name: str, source: PyTree) -> int:
        """Serve an adapter to prompts that name it; return its version: see LLM.add_adapter."""
        return await self._beside(self._llm.add_adapter, name, source)

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it go on."""
        await self._beside(self._llm.remove_adapter, name)

    @property
    def weight_version(self) -> int:
        """How many distinct params this LLM has served."""
        return self._llm.weight_version

    async def _beside[T, *Args](self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Call a function in another thread, while this one's steps go on."""
        self._thread.check()
        return await asyncio.to_thread(function, *args)

    async def prepare[T, *Args](self, function: Callable[[LLM, *Args], T], *args: *Args) -> T:
        """Call function(LLM, *args) in one of the threads that render and tokenize, while the
        engine steps. The function may read the tokenizer and the settings alone.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompts, function, self._llm, *args)

    def limit_images(self, limits: ImageLimits) -> None:
        """Read images of prompts within these limits from now on, in place of EngineConfig's."""
        if (images := self._llm.session.inputs.images) is not None:
            images.limits = limits

    def stats(self) -> Report:
        """Return LLM.stats as it was a moment ago."""
        return self._thread.stats

    @property
    def error(self) -> BaseException | None:
        """What the engine's thread died of: nothing runs any more. None while it lives."""
        return self._thread.error

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that prompts can name."""
        return frozenset(self._llm.session.served.adapters.named)

    @property
    def session(self) -> Session:
        """What this object's LLM holds of the model."""
        return self._llm.session

    @property
    def engine_config(self) -> EngineConfig:
        return self._llm.engine_config

    @property
    def all_rows(self) -> int:
        """Sequences that run at once."""
        return self._llm.engine_config.all_rows

    @property
    def model_config(self) -> ModelConfig:
        return self._llm.model_config

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        return self._llm.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json."""
        return self._llm.default_sampling_params()

    async def close(self) -> None:
        """End every request with an error, and free pool, weights and executables."""
        await asyncio.to_thread(self._thread.close)
        self._prompts.shutdown(wait=False)
        self._with_images.shutdown(wait=False)
        self._llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _checked(item: object) -> RequestOutput:
    """Return an output without an error; raise that of any other, or the exception that came."""
    if isinstance(item, BaseException):
        raise item
    assert isinstance(item, RequestOutput)
    if item.error is not None:
        raise item.error
    return item
