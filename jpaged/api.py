"""generate and score: functions of (params, prompts) whose engines are kept between calls."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.engine.beam import EarlyStopping
from jpaged.engine.sampling_params import SamplingParams
from jpaged.llm import LLM
from jpaged.outputs import RequestOutput
from jpaged.prompts import as_key, as_list
from jpaged.runtime.weights import as_params

MAX_ENGINES = 2
_engines: OrderedDict[Any, LLM] = OrderedDict()  # least recently used first


def generate(
    params: Any,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    config: Any = None,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    seed: int | jax.Array = 0,
    engine_config: EngineConfig | None = None,
    on_error: Literal["raise", "return"] = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Complete each prompt with these weights; outputs in the order of the prompts.

    params: what load_params returns, an nnx Module or State, a linen dict or a plain dict (raw trees need config=).
    prompts: str, list[int], 1-D array, {"prompt": ...} or {"prompt_token_ids": ...}; one or a list of them, mixed.
    sampling_params: one for all or one each; None is SamplingParams(). seed: int or jax key; the same call repeats
    itself. on_error: "raise" checks everything first, then raises GenerationError (with `.outputs`) once the others
    have finished; "return" puts each error into its own output. New params are new by the identity of their leaves:
    they are served at once, without a compile, and drop the prefix cache.
    """
    with _serving(params, config, tokenizer, mesh, engine_config) as llm:
        return llm._generate(as_list(prompts), sampling_params, as_key(seed), on_error, use_tqdm, grow=True)


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
    on_error: Literal["raise", "return"] = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """The beam_width likeliest completions of each prompt that a beam search finds, best first.

    Each has a `score`, its cumulative_logprob / len(token_ids) ** length_penalty: above 0 favours long ones.
    early_stopping: True stops at beam_width finished completions; False when no beam's score as of now beats the worst
    of them; "never" when none can. Candidates, order and scores are those of transformers' beam search. Beams share
    their blocks. Rows of beam_width a prompt; 2 * beam_width (more with several EOS ids) is at most max_logprobs.
    """
    with _serving(params, config, tokenizer, mesh, engine_config) as llm:
        how = (beam_width, max_tokens, length_penalty, early_stopping)
        return llm._beam_search(prompts, how, on_error, use_tqdm, grow=True)


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
    """log p(token t+1 | tokens <= t) under log_softmax(logits / temperature): one float32 [T-1] a sequence.

    return_greedy: also bool [T-1] a sequence, whether token t+1 is the most likely one.
    """
    with _serving(params, config, None, mesh, engine_config) as llm:
        return llm._score(token_lists, temperature, return_greedy, grow=True)


def release(compiled: bool = False) -> None:
    """Free the pools and derived weights that generate and score keep between calls; executables too if `compiled`."""
    for llm in _engines.values():
        llm._release()
    if compiled:
        _engines.clear()


@contextlib.contextmanager
def _serving(
    params: Any, config: Any, tokenizer: Any, mesh: Mesh | None, engine_config: EngineConfig | None
) -> Iterator[LLM]:
    """The engine kept for params of this form, or a new one in place of the least recently used, with them bound."""
    own = as_params(params, config)
    engine_config = EngineConfig() if engine_config is None else engine_config
    form = tuple((x.shape, str(x.dtype), getattr(x, "sharding", None)) for x in jax.tree.leaves(own))
    tokens = own.source if tokenizer is None else id(tokenizer)
    key = (own.config, own.config.eos_token_ids, engine_config, mesh, form, tokens)
    llm = _engines.get(key)
    if llm is None:
        llm = LLM.__new__(LLM)
        llm._setup(own, engine_config, tokenizer, mesh, 0)
        while len(_engines) >= MAX_ENGINES:
            _engines.popitem(last=False)
        _engines[key] = llm
    _engines.move_to_end(key)
    try:
        llm._bind(own)
        yield llm
    finally:
        llm._unbind()
