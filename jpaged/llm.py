"""LLM: the face of one model that is kept: prompts in bulk, one by one, as a stream."""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.checkpoint.load import read_params
from jpaged.checks import check_whole
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig, EngineFields, check_fields
from jpaged.engine.keys import fold_in
from jpaged.engine.sequence import Request
from jpaged.engine.types import Report
from jpaged.engine_thread import Answer, EngineThread
from jpaged.errors import RequestError
from jpaged.models.params import Params
from jpaged.models.pooling import Pooled
from jpaged.request.inputs import (
    CallKeys,
    Chat,
    PromptLike,
    PromptsLike,
    SamplingParamsLike,
    as_chats,
)
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.pooled import PoolHead, PoolOptions, States
from jpaged.request.scores import ScoreCalls, ScoreOptions, ScoreResult, Scores
from jpaged.rollout import Rollout
from jpaged.runtime.choices import interleaves_on
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.processes import count_of
from jpaged.runtime.step_table import BucketReport
from jpaged.runtime.weights import as_params
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import EarlyStopping
from jpaged.session import OnError, OnPause, OnUnfinished, OnUpdate, Session, Snapshot
from jpaged.types import IntArrays, Messages, ModelLike, PyTree, Structured, Tokenizer


class LLM:
    """A model ready to generate.

    model: a checkpoint folder or OWNER/NAME of the Hugging Face Hub; or, with `params`, what
    describes them (ModelConfig, Hugging Face config dict, folder); or Params. tokenizer: None takes
    the source folder's, when first needed. mesh: where to serve; None is data_parallel_size *
    tensor_parallel_size devices, or the params' mesh. seed: int or jax key, from which calls
    without a seed of theirs draw, each anew. The rest are EngineConfig's fields; ConfigError names
    the nearest one to a name that is none. session holds weights and pool. Raises CheckpointError,
    ConfigError.

    Any thread may call any method: tokens are as if alone, and the requests of all run in one
    batch, which one of the threads that wait steps for all. What changes the LLM as a whole
    (update_params, sleep, snapshot, close, ...) waits for calls of `generate`, `chat`,
    `beam_search` and `score`, and these for it, first come first served.
    """

    def __init__(
        self,
        model: ModelLike | PyTree,
        *,
        params: PyTree = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
        seed: int | jax.Array = 0,
        **engine_config: Unpack[EngineFields],
    ):
        self.keys = CallKeys(seed)  # before weights are read: a bad seed is an error
        config, draft = _engine_config(engine_config)
        weights, mesh = _weights(model, params, config, mesh)
        self.session = Session(weights, config, mesh, tokenizer, grows=False, draft=draft)
        self.model_config, self.engine_config = weights.config, self.session.engine_config
        self._thread: EngineThread | None = None  # from the first submit on
        self._making_thread = threading.Lock()
        self.session.served.bind(weights)
        self.session.pool.start()

    def generate(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike = None,
        *,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts. See jpaged.generate.

        A RequestOutput is a prompt too: what was cut (by abort, rollout, ...) goes on at its next
        token, as if it had not been, and what had ended stays as it is.

        seed: int or jax key; the same call repeats itself, with the tokens of jpaged.generate.
        None draws anew in each call.
        """
        key = self.keys.of(seed)
        return self.session.generate(
            prompts, sampling_params, key, on_error=on_error, use_tqdm=use_tqdm
        )

    def submit(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        seed: int | jax.Array | None = None,
    ) -> Future[RequestOutput]:
        """Queue one prompt, which a thread of this LLM steps in one batch with all other requests;
        return the future of its output, with the tokens of `generate` by the same seed.

        The future has the error of a prompt that cannot run, or of a request that failed. `cancel`
        aborts it until it is done. ConfigError for an LLM that is closed.
        """
        key, asked, answer = self.keys.of(seed), sampling_params or SamplingParams(), Answer()
        thread = self.engine_thread()
        thread.check()
        try:
            request = self.session.request(prompt, asked, fold_in(key, 0))
            if error := self.session.pool.misfit(request):
                raise error
        except RequestError as e:
            answer.put([(0, e)])
        else:
            thread.submit(request, answer)
        return answer.future

    def as_completed(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike = None,
        *,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
    ) -> Iterator[RequestOutput]:
        """Complete each prompt, with the tokens of `generate` by the same seed; yield the outputs
        in the order in which they end, while the others go on. `index` of each is the place of its
        prompt. Leaving the loop aborts the rest.

        on_error: "raise" raises the error of a prompt that cannot run before anything runs, and
        that of a request that fails in its place, which aborts the rest; "return" yields outputs
        that have it.
        """
        jobs = self.session.completions(prompts, sampling_params, self.keys.of(seed), on_error)
        return self._as_completed(jobs, on_error)

    def _as_completed(
        self, jobs: Sequence[Request | RequestOutput], on_error: OnError
    ) -> Iterator[RequestOutput]:
        thread, answers = self.engine_thread(), [Answer(raises=on_error == "raise") for _ in jobs]
        index_of = {answer.future: index for index, answer in enumerate(answers)}
        ended: SimpleQueue[Future[RequestOutput]] = SimpleQueue()
        try:
            for job, answer in zip(jobs, answers, strict=True):
                answer.future.add_done_callback(ended.put)
                if isinstance(job, RequestOutput):
                    answer.put([(0, job)])
                else:
                    thread.submit(job, answer)
            for _ in jobs:
                future = ended.get()
                output = future.result()
                output.index = index_of[future]
                yield output
        finally:
            for answer in answers:
                answer.future.cancel()

    def rollout(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike = None,
        *,
        enough: int,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
    ) -> Rollout:
        """Complete prompts until `enough` of them have ended, each with all of its samples; with
        the tokens of `generate` by the same seed. To be used as

            with llm.rollout(prompts, sampling, enough=64) as done:
                for group in done:
                    ...

        which yields exactly `enough` RequestOutputs, in the order in which they end; fewer where
        others failed. `done.rest` has the outputs of the other prompts: as prompts of a later call
        they go on where they were cut, those that have ended meanwhile as they are.

        enough: from 1 to the number of prompts. on_error: as in as_completed; an output with an
        error does not count.
        """
        jobs = self.session.completions(prompts, sampling_params, self.keys.of(seed), on_error)
        check_whole("enough", enough, 1, len(jobs))
        raises = on_error == "raise"
        return Rollout(self.session, self.engine_thread(), jobs, enough=int(enough), raises=raises)

    def engine_thread(self, face: str = "LLM") -> EngineThread:
        """Return the thread that steps what nobody waits for in a call, which runs from the first
        time on until the LLM is closed or gone. face: the class that its errors name.
        """
        with self._making_thread:
            if self._thread is None:
                mesh = self.session.served.placement.mesh
                check_combination(Facts(processes=count_of(mesh), has_thread=True))
                self._thread = EngineThread(self.session, face)
                weakref.finalize(self, self._thread.stop).atexit = False
                self._thread.start()
            return self._thread

    def beam_search(
        self,
        prompts: PromptsLike,
        beam_width: int = 4,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        *,
        structured: Structured | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the beam_width likeliest completions of each prompt: see jpaged.beam_search."""
        return self.session.beam_search(
            prompts,
            beam_width,
            max_tokens,
            length_penalty,
            early_stopping,
            structured,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapter: str | None = None,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or each of a list, by the chat
        template. sampling_params None generates up to the end of the context. adapter: its name.
        seed: as in generate.
        """
        chats = as_chats(
            messages,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            adapter=adapter,
        )
        sampling_params = sampling_params or SamplingParams(max_tokens=None)
        return self.generate(
            chats, sampling_params, seed=seed, on_error=on_error, use_tqdm=use_tqdm
        )

    def stream(
        self,
        prompts: PromptsLike,
        sampling_params: SamplingParamsLike = None,
        *,
        seed: int | jax.Array | None = None,
    ) -> Iterator[CompletionChunk]:
        """Yield the completions in pieces, which add up to those of `generate` with the same seed.
        Closing the iterator aborts the rest.
        """
        return self.session.stream(prompts, sampling_params, self.keys.of(seed))

    # Whoever asks for nothing more gets arrays, as ever.
    @overload
    def score(  # pyright: ignore[reportOverlappingOverload]
        self,
        token_lists: PromptsLike,
        *,
        temperature: float = 1.0,
        return_greedy: bool = False,
        structured: Structured | None = None,
        prompt_lens: Sequence[int] | None = None,
        start: Sequence[int] | np.ndarray | None = None,
        top_k: None = None,
        at: None = None,
        entropy: Literal[False] = False,
        routed: IntArrays | None = None,
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]: ...

    @overload
    def score(
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
    ) -> list[Scores]: ...

    def score(
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
        """Return log p(token t+1 | tokens <= t) of sequences, and more of each distribution if that
        is asked for: see jpaged.score.
        """
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
        return self.session.score(token_lists, options)

    def hidden(self, token_lists: PromptsLike, *, max_len: int | None = None) -> list[jax.Array]:
        """Return the final hidden states of each sequence, on the device: see jpaged.hidden."""
        return self.session.hidden(token_lists, max_len)

    def pool(
        self,
        token_lists: PromptsLike,
        *,
        head: PoolHead | None = None,
        at: States = "last",
    ) -> list[np.ndarray]:
        """Return what a head makes of the hidden states of each sequence: see jpaged.pool."""
        return self.session.pooled(token_lists, PoolOptions(head=head, at=at))

    def embed(
        self,
        prompts: PromptsLike,
        *,
        pooling: Pooled | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Return one vector of each prompt, float32 [N, E]: see jpaged.embed."""
        return self.session.embed(prompts, pooling, normalize, dimensions)

    def classify(self, prompts: PromptsLike) -> np.ndarray:
        """Return the logits of each prompt's labels, float32 [N, labels]: see jpaged.classify."""
        return self.session.classify(prompts)

    def add_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt and return its id; RequestError at once if it can never run, or if an
        unfinished request has the request_id.
        """
        asked, key = sampling_params or SamplingParams(), fold_in(self.keys.next(), 0)
        request = self.session.request(prompt, asked, key)
        return self.session.add(request, request_id=request_id)

    def step(self) -> list[RequestOutput]:
        """Take one step of the engine; return what has finished of add_request's, [] when idle."""
        return self.session.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request of add_request now; return what it had generated, or None when no
        unfinished one has this id.
        """
        return self.session.abort(request_id)

    def has_unfinished(self) -> bool:
        """Return whether `step` has anything left to do or to return."""
        return self.session.has_unfinished()

    def render_chat(
        self,
        messages: Messages,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of one conversation, as `chat` renders it. Those of images are among
        them, and as a prompt they take the same images beside them: {"prompt_token_ids": ids,
        "images": images}. A part of type "image" without one leaves the template's placeholder.
        """
        chat = Chat(
            messages=messages,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.session.inputs.conversation(chat, needs_sources=False)[0]

    def update_params(
        self,
        params: PyTree,
        *,
        mode: OnUpdate = "refuse",
        donate: bool = False,
        draft: PyTree = None,
    ) -> None:
        """Serve these weights from now on, of any form that LLM takes, or those of a checkpoint
        folder; other objects than before drop the prefix cache.

        mode: what becomes of unfinished requests. "refuse" waits for the calls of other threads,
        then raises RequestError if there are any. "abort" ends them. "wait" steps them to their
        end, and admits no new one before the weights are there. "keep": their next token is drawn
        by the new weights over the keys and values that there are. "recompute": these are computed
        again too, so that later logprobs are those of `score` by the new weights. Either way, a
        prompt that is being scored is scored anew, and weight_versions of each completion say
        which weights drew what. donate: the old arrays are deleted, whoever holds them, but those
        shared. draft: a draft model's.
        """
        self.session.update_params(params, mode=mode, donate=donate, draft=draft)

    def pause(self, *, mode: OnPause = "keep") -> None:
        """Have the device do nothing until `resume`: once this returns, no step runs, and calls of
        other threads wait. mode: "keep" leaves unfinished requests as they are, "wait" steps them
        to their end first and admits no new one, "abort" ends them. Requests can be added and
        aborted meanwhile, weights updated; what would wait for a step in this thread raises
        RequestError.
        """
        self.session.pause(mode)

    def resume(self) -> None:
        """Go on after `pause`, from any thread."""
        self.session.resume()

    @property
    def is_paused(self) -> bool:
        """Whether it is between `pause` and `resume`."""
        return self.session.stepping.is_paused

    @contextlib.contextmanager
    def paused(self, *, mode: OnPause = "keep") -> Iterator[None]:
        """Pause inside the block: the device is the caller's."""
        self.pause(mode=mode)
        try:
            yield
        finally:
            self.resume()

    def add_adapter(self, name: str, source: PyTree) -> int:
        """Serve an adapter (see docs/lora.md) to prompts that name it. Return its version."""
        return self.session.served.add_adapter(name, source)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it go on. RequestError for an unknown name."""
        self.session.served.adapters.remove(name)

    def sleep(self, *, mode: OnUnfinished = "refuse") -> None:
        """Free the pool, its prefixes and weights made for serving until `wake`; mode: as above.
        The params stay, since they are the caller's; update_params may be called meanwhile.
        """
        self.session.sleep(mode)

    def wake(self) -> None:
        """Serve again; CapacityError where the memory is not there: then it sleeps on."""
        self.session.wake()

    def snapshot(self) -> Snapshot:
        """Return the unfinished requests, their KV and randomness, to `restore` any number of
        times. Costs a copy of the blocks in use, on the host. Prefixes that no request holds are
        left out.
        """
        with self.session.alone():
            return self.session.snapshot(self.keys.count)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this LLM: stepping gives the same tokens again. What was added
        since is gone. A stream that is open ends with RequestError: `step` returns its requests if
        the snapshot has them. RequestError for one of another LLM or of other weights.
        """
        with self.session.alone():
            self.session.restore(snapshot)
            self.keys.count = snapshot.num_calls

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.session.reset_prefix_cache()

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json."""
        return self.session.inputs.default_sampling_params()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        return whole(self.session.inputs.tokenizer)

    @property
    def weight_version(self) -> int:
        """How many distinct params this LLM has served."""
        return self.session.served.weights.version

    def stats(self) -> Report:
        """Return totals since the start: tokens, steps, seconds, compiles, transfers, blocks."""
        return self.session.report()

    def buckets(self) -> list[BucketReport]:
        """Return every shape of a step: how often it ran, its padding, and its cost to compile."""
        return self.session.buckets()

    def warmup(self, *, score: ScoreCalls | None = None, use_tqdm: bool = True) -> float:
        """Compile every shape of `buckets` now, in parallel threads; returns seconds.

        score: how `score` will be called if that is with top_k, at, entropy or start, whose steps
        are no shapes of `buckets`: {"top_k": 256, "start": True}, or {"at": 32}, the number of
        candidates a row. Else its first call compiles its own, as `hidden` always does.
        """
        return self.session.warmup(score, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End every request and free pool, weights and executables; of no use afterwards."""
        if self._thread is not None:
            self._thread.close()
        self.session.close()


def _weights(
    model: ModelLike | PyTree, params: PyTree, config: EngineConfig, mesh: Mesh | None
) -> tuple[Params, Mesh | None]:
    """Return the params, and where to serve them, as far as that is known before they are."""
    if params is not None:
        return as_params(params, model), mesh
    if not isinstance(model, str | Path):
        return as_params(model), mesh
    mesh = serving_mesh(config, mesh)
    quantization = None if mesh else config.quantization

    def interleaves(dtype: np.dtype) -> bool:
        return mesh is None and interleaves_on(jax.devices()[0], dtype, config)

    params = read_params(
        model,
        dtype=config.dtype,
        mesh=mesh,
        quantization=quantization,
        interleaves=interleaves,
        images=config.images,
    )
    return params, mesh


def _engine_config(fields: EngineFields) -> tuple[EngineConfig, Params | None]:
    """Return the config of these fields, and the weights that `speculative` has as its model."""
    check_fields(fields)
    settings: dict[str, Any] = {**fields}
    asked, draft = settings.get("speculative"), None
    if isinstance(asked, Mapping) and not isinstance(asked.get("model"), str | Path | None):
        rest = {name: value for name, value in asked.items() if name != "model"}
        settings, draft = settings | {"speculative": rest}, as_params(asked["model"])
    return EngineConfig(**settings), draft
