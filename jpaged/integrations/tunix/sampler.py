"""JPagedSampler: the Sampler that tunix's distributed rollout worker draws from.

    llm = jpaged.LLM(model, params=params, mesh=mesh)
    RolloutManager(sampler=JPagedSampler(llm, read_weights=...), tokenizer=..., chat_parser=...)

The protocol is tunix.experimental.rollout.sampler.Sampler, of google-tunix 0.1.8.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jpaged.errors import ConfigError, RequestError
from jpaged.integrations.seeds import stable_seed
from jpaged.integrations.tunix.drawing import Drawing
from jpaged.llm import LLM
from jpaged.request.inputs import Chat, PromptLike, may_have_images
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnUpdate
from jpaged.types import PyTree

try:
    from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
        LoadInfo,
        SamplingRequest,
        SamplingResponse,
        WeightSyncRequest,
    )
    from tunix.experimental.rollout.sampler import (  # pyright: ignore[reportMissingImports]
        SamplingParams as Controls,
    )
except ImportError as e:
    raise ImportError(
        "jpaged.integrations.tunix.sampler needs tunix.experimental.rollout, which google-tunix "
        "has from 0.1.8 on"
    ) from e

# Names of its RolloutRequest.generation_kwargs that are not those of its SamplingParams.
OTHER_NAMES = {"max_generation_steps": "max_tokens", "max_tokens_to_generate": "max_tokens"}


class JPagedSampler:
    """tunix's Sampler over an LLM. Every request joins one batch with all others of the LLM, and a
    task that is cancelled aborts its requests.

    llm: has the weights, the mesh and the bound of the context. tokenizer: Hugging Face,
    sentencepiece or tunix's adapter, whose pad and EOS ids differ; None takes the LLM's.
    read_weights: returns what LLM.update_params takes, given what weight_sync was asked with: of
    the trainer's module in this process, or of where the request says that the weights are. mode:
    what becomes of requests that run when weights are published (see LLM.update_params). keep_eos:
    whether EOS stays in the tokens, as in JPagedRollout. eos_tokens: None takes the tokenizer's.

    Weights come in two steps, as tunix's coordinator asks: `weight_sync` reads them while the old
    ones serve, `post_weight_sync` publishes them between two steps of the engine. A round that is
    given up after `weight_sync` changes nothing. Raises ConfigError.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        tokenizer: Any = None,
        read_weights: Callable[[Any], PyTree] | None = None,
        mode: OnUpdate = "recompute",
        keep_eos: bool = True,
        eos_tokens: Sequence[int] | None = None,
        server_id: str = "jpaged",
    ):
        tokenizer = llm.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ConfigError("JPagedSampler needs a tokenizer: pass tokenizer=")
        self.llm, self.server_id = llm, server_id
        self._drawing = Drawing.of(tokenizer, keep_eos=keep_eos)
        self._read_weights = read_weights
        self._mode: OnUpdate = mode
        self._eos_tokens = None if eos_tokens is None else list(eos_tokens)
        # Policy versions, by the version that the LLM gives to the same weights.
        self._policies: dict[int, int] = {llm.weight_version: 0}
        self._staged: tuple[int, PyTree] | None = None
        self._syncs: dict[str, str] = {}  # what became of each by its request_id

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that serve, as tunix counts them."""
        return self._policies[self.llm.weight_version]

    def initialize(self) -> None:
        """Do nothing: the LLM was ready when it was made."""

    async def start(self, **kwargs: Any) -> bool:
        """Return True: requests are taken from the start."""
        _refuse("start", kwargs)
        return True

    async def stop(self, **kwargs: Any) -> bool:
        """Close the LLM: requests that run end with an error."""
        _refuse("stop", kwargs)
        await asyncio.to_thread(self.llm.close)
        return True

    async def pause(self, **kwargs: Any) -> bool:
        """Have the device do nothing until `resume`; requests wait."""
        _refuse("pause", kwargs)
        await asyncio.to_thread(self.llm.pause)
        return True

    async def resume(self, **kwargs: Any) -> bool:
        """Go on after `pause`."""
        _refuse("resume", kwargs)
        self.llm.resume()
        return True

    async def get_mesh(self, **kwargs: Any) -> Mesh | AbstractMesh | None:
        """Return the mesh that serves; None is one device."""
        _refuse("get_mesh", kwargs)
        return self.llm.session.served.placement.mesh

    async def sample(
        self,
        sampling_requests: SamplingRequest | Sequence[SamplingRequest] | Any,
        **kwargs: Any,
    ) -> SamplingResponse | list[SamplingResponse]:
        """Return a completion of each request: a list for a sequence of them, else one response.

        A prompt is text, token ids or a list of messages, which the tokenizer's chat template
        renders, and which may have images where the LLM takes them. Every request has its own
        controls. kwargs: tunix's generation_kwargs, which are the controls of requests without
        sampling_params; of those with some, what they have was made of them already, and
        return_logprobs alone is read here. `seed` and the request_id together choose the sample, so
        that the members of a group differ. Logprobs are as JPagedRollout's.
        metadata["policy_versions"]: (version, start, end), the tokens that each policy drew. Raises
        RequestError for a prompt that cannot run, and for return_logits and beam_size, which there
        are none of.
        """
        if sampling_requests is None:
            raise RequestError("sampling_requests=None: pass a SamplingRequest or several")
        alone = not _are_several(sampling_requests)
        requests = [sampling_requests] if alone else list(sampling_requests)
        tasks = [asyncio.ensure_future(self._answer(x, kwargs)) for x in requests]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # an error of one of them is the error of all
            for task in tasks:
                task.cancel()
        return answers[0] if alone else answers

    async def _answer(self, request: Any, kwargs: Mapping[str, Any]) -> SamplingResponse:
        prompt, name, controls = request, "", None
        if isinstance(request, SamplingRequest):
            prompt, name, controls = request.prompt, request.request_id, request.sampling_params
        controls = _controls(kwargs) if controls is None else controls
        for field in ("return_logits", "beam_size"):
            if value := getattr(controls, field):
                raise RequestError(f"{field}={value!r}: JPagedSampler does not support it")
        ready = self._prompt(prompt)
        if may_have_images(ready):
            ready = await asyncio.to_thread(self.llm.session.inputs.prompt, ready)
        future = self.llm.submit(ready, self._sampling_params(controls, name))
        output = await asyncio.wrap_future(future)
        (completion,) = output.outputs
        drawn = self._drawing.drawn(completion)
        count = len(drawn.tokens)
        versions = [
            (self._policies.get(version, version), start, min(end, count))
            for version, start, end in completion.weight_versions
            if start < count
        ]
        asked = controls.return_logprobs or kwargs.get("return_logprobs", False)
        return SamplingResponse(
            request_id=name,
            text=drawn.text,
            prompt_token_ids=np.array(output.prompt_token_ids, np.int32),
            token_ids=drawn.tokens,
            logprobs=drawn.logprobs if asked else None,
            finish_reason=completion.finish_reason or "",
            metadata={"policy_versions": versions},
        )

    def _prompt(self, prompt: Any) -> PromptLike:
        if isinstance(prompt, str):
            return self._drawing.token_ids(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return Chat(messages=list(prompt))
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"prompt {prompt!r}: must be text, token ids or a list of messages")
        return [int(id) for id in ids]

    def _sampling_params(self, controls: Controls, name: str) -> SamplingParams:
        seed = None if controls.seed is None else int(controls.seed)
        return self._drawing.sampling_params(
            max_tokens=controls.max_tokens,
            temperature=controls.temperature,
            top_p=controls.top_p,
            top_k=controls.top_k,
            eos_tokens=self._eos_tokens,
            seed=stable_seed(seed, name) if name and seed is not None else seed,
        )

    async def bind_weight_sync(self, **kwargs: Any) -> None:
        """Do nothing: read_weights needs no transport. kwargs are a transport's."""

    async def get_weight_sync_metadata(self, **kwargs: Any) -> Any:
        """Return the weights that serve as jax.ShapeDtypeStructs with their shardings, in jpaged's
        tree. kwargs are a transport's.
        """
        params = self.llm.session.served.params
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {} if params is None else dict(params),
        )

    async def pre_weight_sync(self, sync_request: Any = None, *, metadata: Any = None) -> bool:
        """Begin a round: what an earlier one read and did not publish is dropped. The old weights
        serve on; a round that is given up here needs nothing undone.
        """
        self._staged = None
        return True

    async def weight_sync(self, sync_request: Any = None, *, metadata: Any = None) -> int:
        """Read new weights, and return their policy version: the request's, or the next one. The
        old ones serve on. sync_request: a WeightSyncRequest or WeightSyncMetadata, which tunix
        passes as metadata too. Raises ConfigError without read_weights.
        """
        if self._read_weights is None:
            raise ConfigError("weight_sync: pass read_weights= to JPagedSampler")
        request = next((x for x in (sync_request, metadata) if x is not None), None)
        request = WeightSyncRequest() if request is None else request
        name = getattr(request, "request_id", "")
        self._syncs[name] = "RUNNING"
        try:
            weights = await asyncio.to_thread(self._read_weights, request)
        except BaseException:
            self._syncs[name] = "FAILED"
            raise
        named = (getattr(request, x, 0) for x in ("policy_version", "new_policy_version"))
        version = next((x for x in named if x), self.policy_version + 1)
        self._staged = version, weights
        self._syncs[name] = "SUCCESS"
        return version

    async def post_weight_sync(self, sync_request: Any = None, *, metadata: Any = None) -> bool:
        """Publish the weights that `weight_sync` has read. RequestError if it has read none. Where
        that fails they are still there, and it can be asked again.
        """
        if self._staged is None:
            raise RequestError("post_weight_sync: no weight_sync came before it")
        await asyncio.to_thread(self._publish, self._staged)
        return True

    def _publish(self, staged: tuple[int, PyTree]) -> None:
        version, weights = staged
        self.llm.update_params(weights, mode=self._mode)
        self._policies[self.llm.weight_version] = version
        if self._staged is staged:
            self._staged = None

    async def get_transfer_status(self, req_id: str, **kwargs: Any) -> str:
        """Return "RUNNING", "SUCCESS" or "FAILED", of the weight_sync with this request_id;
        RequestError if there was none.
        """
        _refuse("get_transfer_status", kwargs)
        if req_id not in self._syncs:
            raise RequestError(f"req_id={req_id!r}: there was no weight_sync of this id")
        return self._syncs[req_id]

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int], **kwargs: Any
    ) -> bool:
        """Return False: keys and values stay where they are, and the target computes its own."""
        return False

    async def get_load_info(self, **kwargs: Any) -> LoadInfo:
        """Return how many sequences wait and run, and the share of the cache that is in use."""
        _refuse("get_load_info", kwargs)
        stats: Any = await asyncio.to_thread(self.llm.stats)
        return LoadInfo(
            num_requests_waiting=stats["sequences_waiting"],
            num_requests_running=stats["sequences_running"],
            kv_cache_usage_perc=stats["blocks_in_use"] / max(stats["num_blocks"], 1),
        )


def _are_several(requests: Any) -> bool:
    """Return whether this is a sequence of requests: a list of messages or of token ids is one."""
    if not isinstance(requests, list | tuple):
        return False
    return not requests or not isinstance(requests[0], Mapping | int | np.integer)


def _controls(kwargs: Mapping[str, Any]) -> Controls:
    """Return generation_kwargs as controls; RequestError for a name that is none."""
    known = {field.name for field in dataclasses.fields(Controls)}
    settings = {OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if unknown := sorted(set(settings) - known):
        raise RequestError(f"{unknown[0]}={settings[unknown[0]]!r}: sample has no such control")
    return Controls(**settings)


def _refuse(method: str, kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"{method} has no argument {next(iter(kwargs))!r}")
