"""generate and score: functions of (params, prompts) whose engines are kept between calls."""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig
from jpaged.engine.keys import Key
from jpaged.engine.sequence import Request
from jpaged.errors import CapacityError, ConfigError
from jpaged.llm import LLM, OnError, SamplingParamsLike
from jpaged.models.params import Params
from jpaged.request.outputs import RequestOutput
from jpaged.request.prompts import as_key
from jpaged.runtime.weights import as_params
from jpaged.search.beam import EarlyStopping

log = logging.getLogger("jpaged")

MAX_ENGINES = 2
_engines: OrderedDict[Any, "KeptLLM"] = OrderedDict()  # least recently used first


def generate(
    params: Any,
    prompts: Any,
    sampling_params: SamplingParamsLike = None,
    *,
    config: Any = None,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    seed: int | jax.Array = 0,
    engine_config: EngineConfig | None = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Complete each prompt with these weights; outputs in the order of the prompts.

    params: what load_params returns, an nnx Module or State, a linen dict or a plain dict (raw
    trees need config=), or a checkpoint folder, which each call reads anew. prompts: str,
    list[int], 1-D array, {"prompt": ...} or {"prompt_token_ids": ...}; one or a list of them,
    mixed. sampling_params: one for all or one each; None is SamplingParams(). seed: int or jax key;
    the same call repeats itself. on_error: "raise" checks everything first, then raises
    GenerationError (with `.outputs`) once the others have finished; "return" puts each error into
    its own output. New params are new by the identity of their leaves: they are served at once,
    without a compile, and drop the prefix cache.
    """
    with _serving(params, config, mesh, engine_config, tokenizer, seed) as llm:
        return llm.generate(prompts, sampling_params, on_error=on_error, use_tqdm=use_tqdm)


def beam_search(
    params: Any,
    prompts: Any,
    beam_width: int = 4,
    max_tokens: int | None = 16,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    *,
    config: Any = None,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """The beam_width likeliest completions of each prompt that a beam search finds, best first.

    Each has a `score`, its cumulative_logprob / len(token_ids) ** length_penalty: above 0 favours
    long ones. early_stopping: True stops at beam_width finished completions; False when no beam's
    score as of now beats the worst of them; "never" when none can. Candidates, order and scores are
    those of transformers' beam search. Beams share their blocks. Rows of beam_width a prompt; 2 *
    beam_width (more with several EOS ids) is at most max_logprobs.
    """
    with _serving(params, config, mesh, engine_config, tokenizer) as llm:
        how = (beam_width, max_tokens, length_penalty, early_stopping)
        return llm.beam_search(prompts, *how, on_error=on_error, use_tqdm=use_tqdm)


def score(
    params: Any,
    token_lists: Any,
    *,
    temperature: float = 1.0,
    config: Any = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    return_greedy: bool = False,
) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
    """log p(token t+1 | tokens <= t) under log_softmax(logits / temperature): one float32 [T-1] a
    sequence.

    return_greedy: also bool [T-1] a sequence, whether token t+1 is the most likely one.
    """
    with _serving(params, config, mesh, engine_config, any_tokenizer=True) as llm:
        return llm.score(token_lists, temperature=temperature, return_greedy=return_greedy)


def warmup(
    params: Any,
    max_prompt_len: int,
    max_tokens: int,
    batch: int,
    *,
    config: Any = None,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    use_tqdm: bool = False,
) -> float:
    """Compile ahead all that generate and score will need, and size the pool; returns the seconds
    that it took.

    batch: completions of one call, `n` of each prompt. Later calls with as many, of prompts and
    max_tokens up to these, with params of these shapes and the same keyword arguments, compile
    nothing. Raises CapacityError or ConfigError.
    """
    sizes = {"max_prompt_len": max_prompt_len, "max_tokens": max_tokens, "batch": batch}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")
    with _serving(params, config, mesh, engine_config, tokenizer) as llm:
        return llm.warmup_for(max_prompt_len + max_tokens, batch, use_tqdm=use_tqdm)


def release(compiled: bool = False) -> None:
    """Free the pools and derived weights that generate and score keep between calls; executables
    too if `compiled`.
    """
    for llm in _engines.values():
        llm.release()
    if compiled:
        _engines.clear()


class KeptLLM(LLM):
    """An LLM kept between calls: it holds the caller's weights only during one, and its pool grows
    with the calls.
    """

    def __init__(self, params: Params, config: EngineConfig, tokenizer: Any, mesh: Mesh | None):
        self._setup(params, config, tokenizer, mesh, 0)

    @contextlib.contextmanager
    def serving(self, params: Params, seed: Any) -> Iterator["KeptLLM"]:
        """These params for one call; copies of them that were made for serving stay."""
        try:
            self._key = as_key(seed)
            self._bind(params)
            yield self
        finally:
            self._params = None
            if self._runner is not None:
                self._runner.params = None

    def warmup_for(self, length: int, batch: int, *, use_tqdm: bool) -> float:
        """Compile what so many completions of so many tokens, prompts included, can need; seconds
        that it took.
        """
        began, limit = time.perf_counter(), self.engine_config.max_model_len
        assert limit is not None
        if length > limit:
            raise CapacityError(
                f"max_prompt_len + max_tokens = {length} is beyond max_model_len={limit}"
            )
        self._hold([-(-length // self.engine_config.block_size)] * batch)
        runner = self._running_runner()
        runner.warmup(tokens=batch * length, rows=batch, use_tqdm=use_tqdm)
        runner.allocate(full=True)
        return time.perf_counter() - began

    def release(self) -> None:
        """Free what is kept on the device between calls; compiled steps stay."""
        self._free()

    def _call_key(self) -> Key:
        return self._key  # the same call repeats itself

    def _reserve(self, requests: list[Request]) -> None:
        """Start with, or grow to, a pool that holds these requests at full length: a power of two,
        or num_blocks.
        """
        self._hold(
            [
                n
                for request in requests
                for n in request.blocks_needed(self.engine_config.block_size)
            ]
        )

    def _hold(self, sizes: list[int]) -> None:
        """Have a pool for sequences of so many blocks each, of which max_num_seqs run at once."""
        needed = max(sum(sorted(sizes, reverse=True)[: self.engine_config.max_num_seqs]), 8)
        held = 0 if self._engine is None else self._engine.scheduler.blocks.num_blocks
        if held and (needed <= held or self.engine_config.num_blocks is not None):
            return
        blocks = self._most_blocks()
        if self.engine_config.num_blocks is None:
            blocks = min(1 << (needed - 1).bit_length(), blocks)
        if blocks > held:
            if held:
                log.info(
                    "the KV pool grows from %d to %d blocks: steps compile again", held, blocks
                )
            self._start(blocks)


def _serving(
    params: Any,
    config: Any,
    mesh: Mesh | None,
    engine_config: EngineConfig | None,
    tokenizer: Any = None,
    seed: int | jax.Array = 0,
    any_tokenizer: bool = False,
) -> contextlib.AbstractContextManager["KeptLLM"]:
    """The engine kept for params of this form, or a new one in place of the least recently used,
    with them bound.
    """
    if isinstance(params, str | Path):
        params = load_params(params, mesh=mesh)
    own = as_params(params, config)
    engine_config = EngineConfig() if engine_config is None else engine_config
    form = tuple(
        (x.shape, str(x.dtype), getattr(x, "sharding", None)) for x in jax.tree.leaves(own)
    )
    tokens = own.source if tokenizer is None else id(tokenizer)
    key = (own.config, own.config.eos_token_ids, engine_config, mesh, form, tokens)
    if any_tokenizer and key not in _engines:
        key = next((other for other in reversed(_engines) if other[:-1] == key[:-1]), key)
    if key not in _engines:
        llm = KeptLLM(own, engine_config, tokenizer, mesh)
        while len(_engines) >= MAX_ENGINES:
            _engines.popitem(last=False)
        _engines[key] = llm
    _engines.move_to_end(key)
    return _engines[key].serving(own, seed)
