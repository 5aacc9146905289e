"""generate and score: functions of (params, prompts) whose sessions are kept between calls.

Any thread may call; the calls of a process take turns, first come first served.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.calls import Calls, OnError, SamplingParamsLike
from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, ConfigError
from jpaged.fair_lock import FairLock
from jpaged.request.outputs import RequestOutput
from jpaged.request.prompts import CallKeys, as_list
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.step_table import warmup as compile_table
from jpaged.runtime.weights import as_params
from jpaged.search.beam import EarlyStopping
from jpaged.session import Session, adapted

MAX_ENGINES = 2
_kept: OrderedDict[Any, Calls] = OrderedDict()  # least recently used first; none that is in use
_keys = CallKeys(0)  # A new process draws the same: its first call without a seed has key 1.
_turns = FairLock()  # of a whole call: its weights are bound, and only one call's can be


def generate(
    params: Any,
    prompts: Any,
    sampling_params: SamplingParamsLike = None,
    *,
    config: Any = None,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    seed: int | jax.Array | None = None,
    engine_config: EngineConfig | None = None,
    lora: Any = None,
    draft: Any = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Complete each prompt with these weights; outputs in the order of the prompts.

    params: what load_params returns, an nnx Module or State, a linen dict or a plain dict (raw
    trees need config=), or a checkpoint folder, which each call reads anew. prompts: str,
    list[int], 1-D array, {"prompt": ...} or {"prompt_token_ids": ...}; one or a list of them,
    mixed. sampling_params: one for all or one each; None is SamplingParams(). seed: with an int or
    a jax key the same call repeats its samples (pass the training step); None draws anew in each
    call. LLM.generate does the same. on_error: "raise" checks everything first, then raises
    GenerationError (with `.outputs`) once the others have finished; "return" puts each error into
    its own output. New params are new by the identity of their leaves: they are served at once,
    without a compile, and drop the prefix cache. lora: an adapter on top of the params
    (see docs/lora.md), one for all prompts or a list of one (or None) each: jpaged.Adapter, a tree
    of pairs (A, B), or a folder as PEFT writes it; new ones, too, are served at once. draft:
    Params of a smaller model that guesses ahead (see docs/speculation.md), where engine_config says
    speculative={"method": "draft"}; new ones, too, are served at once.
    """
    key = _keys.of(seed)
    with _serving(params, config, mesh, engine_config, tokenizer, draft=draft) as calls:
        prompts = adapted(calls.session, as_list(prompts), lora)
        makes = calls.completions(prompts, sampling_params, key)
        return calls.complete(makes, on_error, use_tqdm)


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
    lora: Any = None,
    draft: Any = None,
    structured: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """The beam_width likeliest completions of each prompt that a beam search finds, best first.

    Each has a `score`, its cumulative_logprob / len(token_ids) ** length_penalty: above 0 favours
    long ones. early_stopping: True stops at beam_width finished completions; False when no beam's
    score as of now beats the worst of them; "never" when none can. Candidates, order and scores are
    those of transformers' beam search. Beams share their blocks. Rows of beam_width a prompt; 2 *
    beam_width (more with several EOS ids) is at most max_logprobs. lora, draft: as in generate.
    structured: the form that completions have, as in SamplingParams; scores are under its masks
    then, and there may be fewer completions.
    """
    how = (beam_width, max_tokens, length_penalty, early_stopping, structured)
    with _serving(params, config, mesh, engine_config, tokenizer, draft=draft) as calls:
        prompts = adapted(calls.session, as_list(prompts), lora)
        return calls.complete(calls.beam_searches(prompts, *how), on_error, use_tqdm)


def score(
    params: Any,
    token_lists: Any,
    *,
    temperature: float = 1.0,
    config: Any = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    return_greedy: bool = False,
    structured: Mapping[str, Any] | None = None,
    prompt_lens: List[int] | None = None,
    tokenizer: Any = None,
    lora: Any = None,
    draft: Any = None,
) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]:
    """log p(token t+1 | tokens <= t) under log_softmax(logits / temperature): one float32 [T-1] a
    sequence.

    return_greedy: also bool [T-1] a sequence, whether token t+1 is the most likely one. structured,
    prompt_lens: the form that all have from prompt_lens[i] tokens on (see SamplingParams), under
    whose masks their tokens are then scored: the "processed" logprobs of a draw without filters,
    penalties, biases and min_tokens. RequestError for a text that is not of it. tokenizer: what
    the form's masks are made by; None takes that of the params' folder. lora, draft: as in
    generate.
    """
    is_any = tokenizer is None
    how = (params, config, mesh, engine_config, tokenizer)
    with _serving(*how, any_tokenizer=is_any, draft=draft) as calls:
        token_lists = adapted(calls.session, as_list(token_lists), lora)
        return calls.score(token_lists, temperature, return_greedy, structured, prompt_lens)


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
    draft: Any = None,
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
    with _serving(params, config, mesh, engine_config, tokenizer, draft=draft) as calls:
        began, session, length = time.perf_counter(), calls.session, max_prompt_len + max_tokens
        if length > (limit := calls.processor.max_model_len):
            raise CapacityError(
                f"max_prompt_len + max_tokens = {length} is beyond max_model_len={limit}"
            )
        session.reserve([-(-length // session.engine_config.block_size)] * batch)
        compile_table(session.runner.steps, tokens=batch * length, rows=batch, use_tqdm=use_tqdm)
        session.runner.allocate(full=True)
        session.runner.adapters.allocate()
        return time.perf_counter() - began


def release(compiled: bool = False) -> None:
    """Free the pools and derived weights that generate and score keep between calls; executables
    too if `compiled`.
    """
    with _turns.held():
        for calls in _kept.values():
            calls.session.release()
        if compiled:
            _kept.clear()


def kept_sessions() -> list[Session]:
    """What is kept between calls now, the session of the latest call last: to look into."""
    with _turns.held():
        return [calls.session for calls in _kept.values()]


@contextlib.contextmanager
def _serving(
    params: Any,
    config: Any,
    mesh: Mesh | None,
    engine_config: EngineConfig | None,
    tokenizer: Any = None,
    any_tokenizer: bool = False,
    draft: Any = None,
) -> Iterator[Calls]:
    """The session kept for params of this form, or a new one in place of the least recently used;
    these params, and those of a draft model, are bound to it for one call.

    Other threads wait. A call that this thread makes inside the block (a tokenizer's, say) finds
    another session: one that is in use is not among the kept ones.
    """
    with _turns.held():
        engine_config = EngineConfig() if engine_config is None else engine_config
        if isinstance(params, str | Path):
            mesh = serving_mesh(engine_config, mesh)
            params = load_params(params, mesh=mesh)
        own = as_params(params, config)
        guesses = None if draft is None else as_params(draft)
        form = tuple(
            (x.shape, str(x.dtype), getattr(x, "sharding", None))
            for x in jax.tree.leaves((own, guesses))
        )
        tokens = own.source if tokenizer is None else id(tokenizer)
        drafts = None if guesses is None else guesses.config
        key = (own.config, own.config.eos_token_ids, engine_config, mesh, form, drafts, tokens)
        if any_tokenizer and key not in _kept:
            key = next((other for other in reversed(_kept) if other[:-1] == key[:-1]), key)
        calls = _kept.pop(key, None)
        while len(_kept) >= MAX_ENGINES:
            _kept.popitem(last=False)
        if calls is None:
            session = Session(own, engine_config, mesh, grows=True, draft=guesses)
            calls = Calls(session, tokenizer, own.source)
        try:
            calls.session.bind(own, draft=guesses)
            yield calls
        finally:
            calls.session.unbind()
            # An interrupt of the call's own clearing up may have left requests: the next call's
            # session must have none.
            if not (calls.session.has_pool and calls.session.engine.has_unfinished()):
                _kept[key] = calls
                _kept.move_to_end(key)
                while len(_kept) > MAX_ENGINES:
                    _kept.popitem(last=False)
