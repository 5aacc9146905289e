"""LLM: the face of one model that is kept: prompts in bulk, one by one, as a stream."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.calls import Calls, OnError, OnUnfinished, SamplingParamsLike
from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.checkpoint.load import read_params
from jpaged.config import EngineConfig
from jpaged.engine.keys import fold_in
from jpaged.engine_fields import EngineFields, check_fields
from jpaged.models.params import Params
from jpaged.request.chat import Chat, as_chats
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.request.prompts import CallKeys, as_list
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.step_table import BucketReport, bucket_reports, warmup
from jpaged.runtime.weights import as_params
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import EarlyStopping
from jpaged.session import Session, Snapshot, accept_draft, add_adapter


class LLM:
    """A model ready to generate.

    model: a checkpoint folder or OWNER/NAME of the Hugging Face Hub; or, with `params`, what
    describes them (ModelConfig, Hugging Face config dict, folder); or Params. tokenizer: None takes
    the source folder's, when first needed. mesh: where to serve; None is data_parallel_size *
    tensor_parallel_size devices, or the params' mesh. seed: int or jax key, from which calls
    without a seed of theirs draw, each anew. The rest are EngineConfig's fields; ConfigError names
    the nearest one to a name that is none. session holds weights and pool. Raises CheckpointError,
    ConfigError.

    Any thread may call any method: tokens are as if alone. `generate`, `chat`, `beam_search`,
    `score` and what changes the LLM as a whole (update_params, sleep, snapshot, close, ...) take
    turns, first come first served. `stream`, `add_request`, `step`, `abort` and `stats` come in
    between two steps of another thread's call; their requests run beside its own.
    """

    def __init__(
        self,
        model: Any,
        *,
        params: Any = None,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        seed: int | jax.Array = 0,
        **engine_config: Unpack[EngineFields],
    ):
        config, draft = _engine_config(engine_config)
        weights, mesh = _weights(model, params, config, mesh)
        self.session = Session(weights, config, mesh, grows=False, draft=draft)
        self.calls = Calls(self.session, tokenizer, weights.source)
        self.model_config, self.engine_config = weights.config, self.session.engine_config
        self.keys = CallKeys(seed)
        self.session.bind(weights)
        self.session.start()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParamsLike = None,
        *,
        seed: int | jax.Array | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts. See jpaged.generate.

        seed: int or jax key; the same call repeats itself, with the tokens of jpaged.generate.
        None draws anew in each call.
        """
        makes = self.calls.completions(as_list(prompts), sampling_params, self.keys.of(seed))
        return self.calls.complete(makes, on_error, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        beam_width: int = 4,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        *,
        structured: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The beam_width likeliest completions of each prompt: see jpaged.beam_search."""
        how = (beam_width, max_tokens, length_penalty, early_stopping, structured)
        return self.calls.complete(self.calls.beam_searches(prompts, *how), on_error, use_tqdm)

    def chat(
        self,
        messages: List[Any],
        sampling_params: SamplingParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
        goes_on = {"continue_final_message": continue_final_message, "adapter": adapter}
        how = goes_on | {"add_generation_prompt": add_generation_prompt}
        chats = as_chats(messages, template_kwargs=chat_template_kwargs, **how)
        sampling_params = sampling_params or SamplingParams(max_tokens=None)
        return self.generate(
            chats, sampling_params, seed=seed, on_error=on_error, use_tqdm=use_tqdm
        )

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParamsLike = None,
        *,
        seed: int | jax.Array | None = None,
    ) -> Iterator[CompletionChunk]:
        """The completions in pieces, which add up to generate's with the same seed. Closing it
        aborts the rest.
        """
        prompts, key = as_list(prompts), self.keys.of(seed)
        makes = self.calls.completions(prompts, sampling_params, key, streaming=True)
        return self.calls.stream(makes)

    def score(
        self,
        token_lists: Any,
        *,
        temperature: float = 1.0,
        return_greedy: bool = False,
        structured: Mapping[str, Any] | None = None,
        prompt_lens: List[int] | None = None,
    ) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
        """log p(token t+1 | tokens <= t) of sequences: see jpaged.score."""
        return self.calls.score(
            as_list(token_lists), temperature, return_greedy, structured, prompt_lens
        )

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt and return its id; RequestError at once if it can never run, or if an
        unfinished request has the request_id.
        """
        asked, key = sampling_params or SamplingParams(), fold_in(self.keys.next(), 0)
        request = self.calls.processor.request(prompt, asked, key)
        return self.calls.add(request, request_id=request_id)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; return what has finished of add_request's. [] when idle."""
        return self.calls.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request of add_request now; return what it had generated, or None when no
        unfinished one has this id.
        """
        return self.calls.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        with self.calls.at_rest():
            return bool(self.calls.ready) or self.session.engine.has_unfinished()

    def render_chat(
        self,
        messages: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of one conversation, as `chat` renders it."""
        chat = Chat(
            messages=messages,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.calls.processor.render(chat)

    def update_params(
        self, params: Any, *, mode: OnUnfinished = "refuse", donate: bool = False, draft: Any = None
    ) -> None:
        """Serve these weights from now on; other objects than before drop the prefix cache. Refused
        with RequestError while requests are unfinished, unless mode="abort" ends them. donate: the
        old arrays are deleted, whoever holds them, but those shared. draft: a draft model's.
        """
        fresh, guesses = self.session.accept(params), accept_draft(self.session, draft)
        with self.calls.alone():
            self.calls.finish(mode)
            self.session.bind(fresh, donate=donate, draft=guesses)

    def add_adapter(self, name: str, source: Any) -> int:
        """Serve an adapter (see docs/lora.md) to prompts that name it; its version."""
        return add_adapter(self.session, name, source)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it go on. RequestError for an unknown name."""
        self.session.adapters.remove(name)

    def sleep(self, *, mode: OnUnfinished = "refuse") -> None:
        """Free the pool, its prefixes and weights made for serving until `wake`; mode: as above.
        The params stay, since they are the caller's; update_params may be called meanwhile.
        """
        with self.calls.alone():
            self.calls.finish(mode)
            self.session.sleep()

    def wake(self) -> None:
        """Serve again; CapacityError where the memory is not there: then it sleeps on."""
        with self.calls.alone():
            self.session.wake()

    def snapshot(self) -> Snapshot:
        """The unfinished requests, their KV and randomness, to `restore` any number of times.
        Costs a copy of the blocks in use, on the host. Prefixes that no request holds are left out.
        """
        with self.calls.alone():
            ready = tuple(self.calls.ready.values())
            return self.session.snapshot(ready=ready, num_calls=self.keys.count)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this LLM: stepping gives the same tokens again. What was added
        since is gone. A stream that is open ends with RequestError: `step` returns its requests if
        the snapshot has them. RequestError for one of another LLM or of other weights.
        """
        with self.calls.alone():
            self.calls.restore(snapshot)
            self.keys.count = snapshot.num_calls

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self.calls.at_rest():
            self.session.engine.reset_prefix_cache()

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        return self.calls.processor.default_sampling_params()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        return whole(self.calls.processor.tokenizer)

    @property
    def weight_version(self) -> int:
        """How many distinct params this LLM has served."""
        return self.session.weights.version

    def stats(self) -> dict[str, Any]:
        """Totals since the start: tokens, steps, seconds, compiles, transfers, blocks."""
        with self.calls.at_rest():
            return self.session.report()

    def buckets(self) -> list[BucketReport]:
        """Every shape of a step: how often it ran, its padding, and what it cost to compile."""
        with self.calls.at_rest():
            runner = self.session.runner
            return bucket_reports(runner.steps, runner.usage)

    def warmup(self, *, use_tqdm: bool = True) -> float:
        """Compile every shape of `buckets` now, in parallel threads; returns seconds."""
        with self.calls.whole_call():
            self.session.check_awake()
            return warmup(self.session.runner.steps, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End every request and free pool, weights and executables; of no use afterwards."""
        self.calls.close()


def _weights(
    model: Any, params: Any, config: EngineConfig, mesh: Mesh | None
) -> tuple[Params, Mesh | None]:
    """The params, and where to serve them, as far as that is known before they are."""
    if params is not None:
        return as_params(params, model), mesh
    if not isinstance(model, str | Path):
        return as_params(model), mesh
    mesh = serving_mesh(config, mesh)
    quantization = None if mesh else config.quantization
    params = read_params(model, dtype=config.dtype, mesh=mesh, quantization=quantization)
    return params, mesh


def _engine_config(fields: EngineFields) -> tuple[EngineConfig, Params | None]:
    """The config of these fields, and the draft model of `speculative` if that is weights."""
    check_fields(fields)
    settings: dict[str, Any] = {**fields}
    asked, draft = settings.get("speculative"), None
    if isinstance(asked, Mapping) and not isinstance(asked.get("model"), str | Path | None):
        rest = {name: value for name, value in asked.items() if name != "model"}
        settings, draft = settings | {"speculative": rest}, as_params(asked["model"])
    return EngineConfig(**settings), draft
