"""LLM: one model with its frontend, engine and runner."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine, EngineState
from jpaged.engine.keys import Key, fold_in
from jpaged.engine.sequence import Request
from jpaged.errors import CapacityError, ConfigError, GenerationError, RequestError
from jpaged.models.params import Params
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.processor import Chat, Processor
from jpaged.request.prompts import as_key, as_list, match_params
from jpaged.request.sampling_params import SamplingParams
from jpaged.runtime.compiled_steps import use_compilation_cache
from jpaged.runtime.footprint import plan_pool
from jpaged.runtime.runner import BucketReport, Runner
from jpaged.runtime.weights import DONATED, ServingWeights, as_params, is_deleted, placement
from jpaged.search.beam import EarlyStopping

Make = functools.partial[Any]  # makes a request, whose first argument is the prompt
SamplingParamsLike = SamplingParams | List[SamplingParams] | None
OnError = Literal["raise", "return"]
# The host plans and packs the next dispatch while the device works on the last one.
DISPATCHES_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An LLM's requests at one moment, for `restore`. Opaque."""

    owner: object
    engine: EngineState
    ready: tuple[RequestOutput, ...]
    calls: int
    weight_version: int


class LLM:
    """A model ready to generate.

    model: a checkpoint folder; or, with `params`, what describes them (ModelConfig, Hugging Face
    config dict, folder); or Params themselves. tokenizer: a transformers tokenizer; None takes the
    source folder's, loaded when first needed. mesh: where to serve; None is the mesh of the params'
    own shardings. seed: int or jax key. The rest are EngineConfig's fields. Raises CheckpointError
    or ConfigError.
    """

    def __init__(
        self,
        model: Any,
        *,
        params: Any = None,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        seed: int | jax.Array = 0,
        **engine_config: Any,
    ):
        known = [f.name for f in dataclasses.fields(EngineConfig)]
        if unknown := sorted(set(engine_config) - set(known)):
            raise ConfigError(
                f"{unknown[0]!r} is not a setting of LLM; EngineConfig has {', '.join(known)}"
            )
        config = EngineConfig(**engine_config)
        if params is not None:
            loaded = as_params(params, model)
        elif isinstance(model, str | Path):
            loaded = load_params(model, dtype=config.dtype, mesh=mesh)
        else:
            loaded = as_params(model)
        self._setup(loaded, config, tokenizer, mesh, seed)
        self._bind(loaded)
        self._start(self._most_blocks())

    def _setup(
        self, params: Params, config: EngineConfig, tokenizer: Any, mesh: Mesh | None, seed: Any
    ) -> None:
        """Everything that needs the params' form but not the arrays."""
        self.model_config = params.config
        # num_blocks may stay None: the pool is sized when it is made.
        self.engine_config = config.resolve(params.config)
        use_compilation_cache(config.compilation_cache_dir)
        self._placement = placement(params, config, mesh)
        self._weights = ServingWeights(self._placement, config.dtype)
        self._processor = Processor(self.model_config, self.engine_config, tokenizer, params.source)
        self._key = as_key(seed)
        self._calls = 0
        self._ready: list[RequestOutput] = []  # ended while another caller was stepping the engine
        self._params: Params | None = None
        self._asleep = False
        self._cached_version = 0  # weight version that the prefix cache is of
        self._engine: Engine | None = None
        self._runner: Runner | None = None

    # Many prompts at once

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParamsLike = None,
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts. See jpaged.generate for the
        forms and errors.
        """
        return self._complete(self._makes(prompts, sampling_params), on_error, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        beam_width: int = 4,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The beam_width likeliest completions of each prompt, best first: see
        jpaged.beam_search.
        """
        how = (beam_width, max_tokens, length_penalty, early_stopping)
        makes = [
            functools.partial(self._processor.beam_search, prompt, *how)
            for prompt in as_list(prompts)
        ]
        return self._complete(makes, on_error, use_tqdm)

    def chat(
        self,
        messages: List[Any],
        sampling_params: SamplingParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, by the
        tokenizer's chat template.

        sampling_params None generates up to the end of the context.
        """
        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "template_kwargs": chat_template_kwargs,
        }
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        chats = [
            Chat(messages=m, continue_final_message=continue_final_message, **how)
            for m in conversations
        ]
        if sampling_params is None:
            sampling_params = SamplingParams(max_tokens=None)
        return self.generate(chats, sampling_params, on_error=on_error, use_tqdm=use_tqdm)

    def stream(
        self, prompts: Any, sampling_params: SamplingParamsLike = None
    ) -> Iterator[CompletionChunk]:
        """Yield each completion in pieces; text deltas add up to generate's text. Closing it aborts
        the rest.
        """
        jobs = self._admit(self._makes(prompts, sampling_params, streaming=True), "raise")
        return self._stream([job for job in jobs if isinstance(job, Request)])

    def score(
        self, token_lists: Any, *, temperature: float = 1.0, return_greedy: bool = False
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
        """log p(token t+1 | tokens <= t) of given sequences: see jpaged.score."""
        if temperature == 0:
            raise RequestError(
                "temperature=0: a greedy distribution has no log-probabilities; pass a positive one"
            )
        params = SamplingParams(
            temperature=temperature, prompt_logprobs=0, logprobs_mode="tempered"
        )
        params.validate(self.engine_config, self.model_config.vocab_size)
        requests, limit = [], self._processor.max_model_len
        for i, token_list in enumerate(as_list(token_lists)):
            _, ids = self._processor.tokens(token_list)
            if len(ids) > limit:
                raise CapacityError(
                    f"sequence {i} of {len(ids)} tokens is longer than max_model_len={limit}"
                )
            requests.append(Request([self._processor.sequence(ids, params, score_only=True)]))
        self._reserve(requests)
        # One token alone predicts nothing.
        self._run([r for r in requests if r.sequences[0].prompt_len > 1], use_tqdm=False)
        rows = [
            [top[0] for top in r.sequences[0].prompt_logprobs[1:] if top is not None]
            for r in requests
        ]
        logprobs = [np.array([logprob for _, logprob, _ in row], np.float32) for row in rows]
        if not return_greedy:
            return logprobs
        return logprobs, [np.array([rank == 1 for *_, rank in row], bool) for row in rows]

    # One request at a time

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt and return its id; `step` runs it. Raises RequestError at once if it can
        never run.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self._processor.request(prompt, params, fold_in(self._call_key(), 0), request_id)
        self._add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the requests that finished. [] when idle."""
        self._step_for(frozenset())
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; what it had generated, or None when no unfinished request has this
        id.
        """
        request = self._running_engine().abort(request_id)
        return None if request is None else self._processor.output(request)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._ready) or self._running_engine().has_unfinished()

    def render_chat(
        self, messages: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None, **how: bool
    ) -> list[int]:
        """Token ids of one conversation; `how`: add_generation_prompt, continue_final_message."""
        return self._processor.render(
            Chat(messages=messages, template_kwargs=chat_template_kwargs, **how)
        )

    # Weights, cache, settings

    def update_params(
        self, params: Any, *, mode: Literal["refuse", "abort"] = "refuse", donate: bool = False
    ) -> None:
        """Serve these weights from now on; the same objects keep the prefix cache, any others drop
        it.

        Refused with RequestError while requests are unfinished, unless mode="abort" ends them
        first. donate: the old weights are given up: their arrays are deleted, whoever holds them,
        except those that the new ones share.
        """
        fresh = as_params(params, None if isinstance(params, Params) else self.model_config)
        if fresh.config != self.model_config:
            raise ConfigError(
                f"params of another architecture: {fresh.config} is not {self.model_config}"
            )
        self._weights.check_dtypes(fresh)
        self._finish(mode)
        if donate:
            kept = {id(leaf) for leaf in jax.tree.leaves(fresh)}
            for leaf in jax.tree.leaves(self._params):
                if isinstance(leaf, jax.Array) and id(leaf) not in kept and not leaf.is_deleted():
                    leaf.delete()
        self._bind(fresh)

    def sleep(self, *, mode: Literal["refuse", "abort"] = "refuse") -> None:
        """Give the device's memory to others until `wake`: the pool, its prefixes, and weights made
        for serving.

        The params themselves stay, since they are the caller's; so do compiled steps. Refused while
        requests are unfinished, unless mode="abort" ends them first. update_params may be called
        meanwhile.
        """
        self._finish(mode)
        self._free()
        self._asleep = True

    def wake(self) -> None:
        """Allocate the pool again and serve; CapacityError where the memory is not there: then it
        sleeps on.
        """
        runner = self._running_runner()
        if not self._asleep or self._params is None:
            return
        self._asleep = False
        try:
            self._bind(self._params)
            runner.allocate()
        except BaseException:
            self._free()
            self._asleep = True
            raise

    def snapshot(self) -> Snapshot:
        """The unfinished requests, their KV and their randomness, as a value that `restore` takes
        any number of times.

        Costs a copy of the blocks in use, on the host. Cached prefixes that no request holds are
        not in it.
        """
        engine = self._running_engine()
        return Snapshot(
            engine.identity, engine.snapshot(), tuple(self._ready), self._calls, self.weight_version
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this LLM: what was added since is gone, and stepping gives the
        same tokens again.

        Raises RequestError for one of another LLM or of other weights.
        """
        engine = self._awake()
        if snapshot.owner is not engine.identity:
            raise RequestError("snapshot of another LLM, or of a pool that has since been replaced")
        if (taken := snapshot.weight_version) != self.weight_version:
            raise RequestError(
                f"snapshot of weight version {taken}: its KV is not that of {self.weight_version}"
            )
        engine.restore(snapshot.engine)
        self._ready, self._calls = list(snapshot.ready), snapshot.calls

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._running_engine().reset_prefix_cache()

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        return self._processor.default_sampling_params()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        return self._processor.tokenizer

    @property
    def weight_version(self) -> int:
        """How many distinct params this LLM has served."""
        return self._weights.version

    def stats(self) -> dict[str, Any]:
        """Totals since the start: tokens, steps, seconds, compiles and the buckets compiled,
        transfers, blocks.
        """
        engine, runner = self._running_engine(), self._running_runner()
        return {**engine.report(), **runner.report(), "weight_version": self.weight_version}

    def buckets(self) -> list[BucketReport]:
        """Every shape that a step can have: how often it ran, its padding, and what it cost to
        compile.
        """
        return self._running_runner().buckets()

    def warmup(self, *, use_tqdm: bool = True) -> float:
        """Compile every shape of `buckets` now, in parallel threads, so that none is met later;
        returns seconds.
        """
        self._awake()
        return self._running_runner().warmup(use_tqdm=use_tqdm)

    def close(self) -> None:
        """End every request and free pool, weights and executables; the object is of no use
        afterwards.
        """
        self._engine = self._runner = self._params = None
        self._ready, self._asleep = [], False
        self._weights.release()

    # Weights and engine

    def _finish(self, mode: str) -> None:
        """Have no unfinished requests: refuse where there are any, or abort them."""
        if mode not in ("refuse", "abort"):
            raise RequestError(f"mode={mode!r}: must be 'refuse' or 'abort'")
        engine = self._running_engine()
        if engine.has_unfinished() and mode == "refuse":
            raise RequestError(
                f"{len(engine.requests)} requests are unfinished: finish them, or pass mode='abort'"
            )
        for request_id in list(engine.requests):
            output = self.abort(request_id)
            self._ready += [output] if output is not None else []

    def _free(self) -> None:
        """Free the pool, the cached prefixes in it and the derived weights; compiled steps stay."""
        self._weights.release()
        if self._engine is not None and self._runner is not None:
            self._engine.reset_prefix_cache()
            self._runner.release()
            self._runner.params = None

    def _bind(self, params: Params) -> None:
        """Serve these params from the next step on, or once awake."""
        if not self._asleep:
            self._weights.update(params)
        self._params = params
        if self._asleep:
            return
        if self._engine is not None and self._runner is not None:
            self._runner.params = self._weights.tree(params)
            if self._cached_version != self._weights.version:
                self._engine.reset_prefix_cache()
                self._cached_version = self._weights.version

    def _start(self, num_blocks: int) -> None:
        """Make the engine over a pool of so many blocks."""
        assert self._params is not None
        config = dataclasses.replace(self.engine_config, num_blocks=num_blocks)
        tree = self._weights.tree(self._params)
        runner = Runner(self.model_config, config, self._placement, tree["embed"]["weight"].dtype)
        runner.params = tree
        if config.strict:
            runner.warmup()
            runner.seal()
        # A step of pinned shape takes its tokens from the host, so it waits for them.
        depth = 1 if config.deterministic else DISPATCHES_IN_FLIGHT
        self._runner, self._engine = runner, Engine(config, runner, depth=depth)
        self._cached_version = self._weights.version

    def _reserve(self, requests: list[Request]) -> None:
        """Make room for these requests: this pool is of one size from the start."""

    def _most_blocks(self) -> int:
        """Blocks of the default pool, which is also as far as a pool grows."""
        if self.engine_config.num_blocks is not None:
            return self.engine_config.num_blocks
        assert self._params is not None
        tree, held = (
            self._weights.tree(self._params),
            0 if self._runner is None else self._runner.pool_bytes,
        )
        return plan_pool(
            self.model_config, self.engine_config, self._placement, tree, freed=held
        ).num_blocks

    def _running_engine(self) -> Engine:
        if self._engine is None or self._params is None:
            raise ConfigError("this LLM is closed")
        return self._engine

    def _awake(self) -> Engine:
        if self._asleep:
            raise ConfigError("this LLM sleeps: call wake() first")
        return self._running_engine()

    def _running_runner(self) -> Runner:
        self._running_engine()
        assert self._runner is not None
        return self._runner

    # Running

    def _makes(self, prompts: Any, sampling_params: Any, *, streaming: bool = False) -> list[Make]:
        """What makes the request of each prompt, once called; the forms of both lists are checked
        here.
        """
        prompts, key = as_list(prompts), self._call_key()
        pairs = zip(prompts, match_params(sampling_params, len(prompts)), strict=True)
        make = functools.partial(self._processor.request, streaming=streaming)
        return [
            functools.partial(make, prompt, params, fold_in(key, i))
            for i, (prompt, params) in enumerate(pairs)
        ]

    def _admit(self, makes: list[Make], on_error: str) -> list[Request | RequestOutput]:
        """The Request of each prompt that can run, the failed output (or its error, raised) of each
        that cannot.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error={on_error!r}: must be 'raise' or 'return'")
        jobs: list[Request | RequestOutput] = []
        for i, make in enumerate(makes):
            try:
                jobs.append(make())
            except RequestError as e:
                if on_error == "raise":
                    raise type(e)(f"request {i}: {e}") from e
                jobs.append(self._processor.failed(e, make.args[0], []))
        return jobs

    def _complete(self, makes: list[Make], on_error: str, use_tqdm: bool) -> list[RequestOutput]:
        """Admit, run and collect."""
        jobs = self._admit(makes, on_error)
        self._reserve([job for job in jobs if isinstance(job, Request)])
        for i, job in enumerate(jobs):
            if on_error == "return" and isinstance(job, Request) and (error := self._misfit(job)):
                jobs[i] = self._processor.failed(error, job.prompt, job.sequences[0].token_ids)
        self._run([job for job in jobs if isinstance(job, Request)], use_tqdm)
        outputs = [self._processor.output(job) if isinstance(job, Request) else job for job in jobs]
        failures = [(i, out.error) for i, out in enumerate(outputs) if out.error is not None]
        if failures and on_error == "raise":
            i, error = failures[0]
            said = f"{len(failures)} of {len(outputs)} requests failed; request {i}: {error}"
            raise GenerationError(said, outputs) from error
        return outputs

    def _misfit(self, request: Request) -> CapacityError | None:
        """What is wrong with a prompt that the whole pool cannot hold."""
        blocks, length = self._running_engine().scheduler.blocks, request.sequences[0].prompt_len
        if blocks.blocks_for(length) <= blocks.num_blocks:
            return None
        pool = f"the KV pool of {blocks.num_blocks} blocks of {blocks.block_size}"
        return CapacityError(
            f"prompt of {length} tokens does not fit {pool}: shorten it or raise num_blocks"
        )

    def _add(self, request: Request) -> None:
        if error := self._misfit(request):
            raise error
        request.weight_version = self.weight_version
        self._awake().add(request)

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until these requests have ended; on any exception none of them is left behind."""
        pending = {request.request_id for request in requests}
        with tqdm(total=len(requests), unit="req", disable=not use_tqdm) as progress:
            try:
                for request in requests:
                    self._add(request)
                while pending:
                    ended = self._step_for(pending)
                    pending -= ended
                    progress.update(len(ended))
            except BaseException:
                for request_id in pending:
                    self._running_engine().abort(request_id)
                raise

    def _step_for(self, mine: set[str] | frozenset[str]) -> set[str]:
        """One step; the ids among `mine` that ended. Others that ended wait for the caller of
        `step`.
        """
        try:
            ended = self._running_engine().step()
        except RuntimeError as e:
            if any(is_deleted(leaf) for leaf in jax.tree.leaves(self._params)):
                raise ConfigError(
                    f"params hold a deleted array: {DONATED} Pass new ones to update_params"
                ) from e
            raise
        self._ready += [
            self._processor.output(request) for request in ended if request.request_id not in mine
        ]
        return {request.request_id for request in ended} & mine

    def _stream(self, requests: list[Request]) -> Iterator[CompletionChunk]:
        live = [(i, seq) for i, request in enumerate(requests) for seq in request.sequences]
        sent = {seq: seq.prompt_len for _, seq in live}
        engine = self._running_engine()
        try:
            for request in requests:
                self._add(request)
            while live:
                if any(engine.requests.get(seq.request_id) is not seq.request for _, seq in live):
                    raise RequestError(
                        "the stream's requests are gone: the LLM was restored to a snapshot"
                    )
                self._step_for({seq.request_id for _, seq in live})
                for i, seq in list(live):
                    if seq.finish_reason is not None:
                        live.remove((i, seq))
                        if seq.text is not None:
                            seq.text.finish()
                    if seq.error is not None:
                        raise seq.error
                    if len(seq) > sent[seq] or seq.finish_reason is not None:
                        yield CompletionChunk(
                            request_index=i,
                            index=seq.index,
                            token_ids_delta=seq.token_ids[sent[seq] :],
                            text_delta=None if seq.text is None else seq.text.take_delta(),
                            finish_reason=seq.finish_reason,
                        )
                        sent[seq] = len(seq)
        finally:
            for _, seq in live:
                if engine.requests.get(seq.request_id) is seq.request:
                    engine.abort(seq.request_id)

    def _call_key(self) -> Key:
        self._calls += 1
        return fold_in(self._key, self._calls)
