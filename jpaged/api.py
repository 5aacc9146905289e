"""generate, score and hidden: functions of (params, prompts) whose sessions are kept between calls.

Any thread may call: calls with the same arrays and arguments run in one batch, others take turns,
first come first served.
"""

from collections.abc import Sequence
from typing import Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged import kept
from jpaged.checks import is_scalar
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.forward import bind
from jpaged.models.pooling import Pooled
from jpaged.request.inputs import CallKeys, PromptsLike, SamplingParamsLike
from jpaged.request.outputs import RequestOutput
from jpaged.request.pooled import PoolHead, PoolOptions, States
from jpaged.request.scores import ScoreCalls, ScoreOptions, ScoreResult, Scores
from jpaged.search.beam import EarlyStopping
from jpaged.session import OnError
from jpaged.trainer import loaded_params
from jpaged.types import IntArrays, ModelLike, PyTree, Structured, Tokenizer

_keys = CallKeys(0)  # A new process draws the same: its first call without a seed has key 1.


def generate(
    params: PyTree,
    prompts: PromptsLike,
    sampling_params: SamplingParamsLike = None,
    *,
    config: ModelLike | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    seed: int | jax.Array | None = None,
    engine_config: EngineConfig | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Complete each prompt with these weights; outputs in the order of the prompts.

    params: what load_params returns, an nnx Module or State, a linen dict or a plain dict (raw
    trees need config=), or a checkpoint folder, which each call reads anew. prompts: str,
    list[int], 1-D array, {"prompt": ...} or {"prompt_token_ids": ...}, also with "images"; one or a
    list of them, mixed. sampling_params: one for all or one each; None is SamplingParams(). seed:
    with an int or a jax key the same call repeats its samples (pass the training step); None draws
    anew in each call. LLM.generate does the same. on_error: "raise" checks everything first, then
    raises GenerationError (with `.outputs`) once the others have finished; "return" puts each error
    into its own output. New params are new by the identity of their leaves: they are served at
    once, without a compile, and drop the prefix cache. lora: an adapter on top of the params (see
    docs/lora.md), one for all prompts or a list of one (or None) each: jpaged.Adapter, a tree
    of pairs (A, B), or a folder as PEFT writes it; new ones, too, are served at once. draft:
    Params of a smaller model that guesses ahead (see docs/speculation.md), where engine_config says
    speculative={"method": "draft"}; new ones, too, are served at once.
    """
    key = _keys.of(seed)
    with kept.session(params, config, mesh, engine_config, tokenizer, draft=draft) as s:
        return s.generate(
            prompts, sampling_params, key, lora=lora, on_error=on_error, use_tqdm=use_tqdm
        )


def beam_search(
    params: PyTree,
    prompts: PromptsLike,
    beam_width: int = 4,
    max_tokens: int | None = 16,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    *,
    config: ModelLike | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
    structured: Structured | None = None,
    on_error: OnError = "raise",
    use_tqdm: bool = False,
) -> list[RequestOutput]:
    """Return the beam_width likeliest completions of each prompt that a beam search finds, best
    first.

    Each has a `score`, its cumulative_logprob / len(token_ids) ** length_penalty: above 0 favours
    long ones. early_stopping: True stops at beam_width finished completions; False when no beam's
    score as of now beats the worst of them; "never" when none can. Candidates, order and scores are
    those of transformers' beam search. Beams share their blocks. Rows of beam_width a prompt; 2 *
    beam_width (more with several EOS ids) is at most max_logprobs. lora, draft: as in generate.
    structured: the form that completions have, as in SamplingParams; scores are under its masks
    then, and there may be fewer completions.
    """
    with kept.session(params, config, mesh, engine_config, tokenizer, draft=draft) as s:
        return s.beam_search(
            prompts,
            beam_width,
            max_tokens,
            length_penalty,
            early_stopping,
            structured,
            lora=lora,
            on_error=on_error,
            use_tqdm=use_tqdm,
        )


# Whoever asks for nothing more gets arrays, as ever.
@overload
def score(  # pyright: ignore[reportOverlappingOverload]
    params: PyTree,
    token_lists: PromptsLike,
    *,
    temperature: float = 1.0,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    return_greedy: bool = False,
    structured: Structured | None = None,
    prompt_lens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
    start: Sequence[int] | np.ndarray | None = None,
    top_k: None = None,
    at: None = None,
    entropy: Literal[False] = False,
    routed: IntArrays | None = None,
) -> list[np.ndarray] | tuple[list[np.ndarray], list[np.ndarray]]: ...


@overload
def score(
    params: PyTree,
    token_lists: PromptsLike,
    *,
    temperature: float = 1.0,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    return_greedy: bool = False,
    structured: Structured | None = None,
    prompt_lens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
    start: Sequence[int] | np.ndarray | None = None,
    top_k: int | None = None,
    at: IntArrays | None = None,
    entropy: bool = False,
    routed: IntArrays | None = None,
) -> list[Scores]: ...


def score(
    params: PyTree,
    token_lists: PromptsLike,
    *,
    temperature: float = 1.0,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    return_greedy: bool = False,
    structured: Structured | None = None,
    prompt_lens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
    start: Sequence[int] | np.ndarray | None = None,
    top_k: int | None = None,
    at: IntArrays | None = None,
    entropy: bool = False,
    routed: IntArrays | None = None,
) -> ScoreResult:
    """Return log p(token t+1 | tokens <= t) under log_softmax(logits / temperature), a float32
    array [T-1] for each sequence. No token is drawn.

    return_greedy: also bool [T-1] a sequence, whether token t+1 is the most likely one. structured,
    prompt_lens: the form that all have from prompt_lens[i] tokens on (see SamplingParams), under
    whose masks their tokens are then scored: the "processed" logprobs of a draw without filters,
    penalties, biases and min_tokens. RequestError for a text that is not of it. tokenizer: what
    the form's masks are made by; None takes that of the params' folder. lora, draft: as in
    generate.

    start: sequence i is scored from its token start[i] on, R = T - start[i] tokens (T - 1 from 0
    on). What comes before may be found in the prefix cache, and no logits are computed of it.

    With top_k, at or entropy it is a Scores a sequence that is returned, of arrays. top_k: the so
    many likeliest tokens of each row and their logprobs, up to 512. at: integers [R, K] for each
    sequence, up to 512 candidates a row whose logprobs are wanted. entropy: that of each row's
    distribution, over the whole vocabulary. Widths are compiled for 32, 128, 256 and 512, with and
    without `start` and entropy. RequestError with strict=True, which compiles none of them.

    routed: integers [T, L, A] for each sequence, the experts that its tokens take, as
    routed_experts of an output has them, in place of what the router chooses, which weighs them; -1
    where it chooses. It takes an engine with routed_experts=True, and compiles a step of its own.
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
    with kept.session(
        params,
        config,
        mesh,
        engine_config,
        tokenizer,
        draft=draft,
        any_tokenizer=tokenizer is None,
    ) as s:
        return s.score(token_lists, options, lora=lora)


def hidden(
    params: PyTree,
    token_lists: PromptsLike,
    *,
    max_len: int | None = None,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    lora: PyTree = None,
    draft: PyTree = None,
) -> list[jax.Array]:
    """Return the final hidden states of each sequence, [T, E] in the dtype of the params, of which
    `logits` makes logits. They stay on the devices of the params, a copy on each: nothing crosses
    the host.

    max_len: all are [max_len, E], with zeros after the last token, so that what is compiled for one
    serves all; a length for each sequence compiles anew for each. lora, draft: as in generate.
    RequestError with strict=True.
    """
    with kept.session(
        params, config, mesh, engine_config, None, draft=draft, any_tokenizer=True
    ) as s:
        return s.hidden(token_lists, max_len, lora=lora)


def pool(
    params: PyTree,
    token_lists: PromptsLike,
    *,
    head: PoolHead | None = None,
    at: States = "last",
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    lora: PyTree = None,
) -> list[np.ndarray]:
    """Return what a head makes of the hidden states of each sequence, float32: one row of it, or
    one for each token with at="all".

    head: an array [E, Y], of which each row [Y] is a product, accumulated in float32; an array [E]
    or [E, 1], which gives a number (a value head: [T] a sequence with at="all"); or a function that
    takes hidden states [R, E], padded to 32 rows or to a power of two, and returns R rows, such as
    a jitted one. None returns the hidden states themselves. at: "last" or "first", the state of
    that token; "mean" of all, in float32; "all". What comes before the last token may be found in
    the prefix cache. lora: as in generate. Raises RequestError.
    """
    with kept.session(params, config, mesh, engine_config, None, any_tokenizer=True) as s:
        return s.pooled(token_lists, PoolOptions(head=head, at=at), lora=lora)


def embed(
    params: PyTree,
    prompts: PromptsLike,
    *,
    pooling: Pooled | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    tokenizer: Tokenizer | None = None,
    lora: PyTree = None,
) -> np.ndarray:
    """Return one vector of each prompt, float32 [N, E].

    Where the params' folder has the files of sentence-transformers (modules.json), its pooling,
    dense layers and normalisation are the model's (ModelConfig.pooling); else it is the hidden
    state of the last token, of length 1. pooling, normalize: others than these. dimensions: the
    first so many numbers of each vector, which is normalised afterwards (arXiv:2205.13147). lora:
    as in generate. Raises RequestError.
    """
    with kept.session(
        params, config, mesh, engine_config, tokenizer, any_tokenizer=tokenizer is None
    ) as s:
        return s.embed(prompts, pooling, normalize, dimensions, lora=lora)


def classify(
    params: PyTree,
    prompts: PromptsLike,
    *,
    config: ModelLike | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    tokenizer: Tokenizer | None = None,
    lora: PyTree = None,
) -> np.ndarray:
    """Return the logits of each prompt's labels, float32 [N, labels], of a model with a head of
    labels (*ForSequenceClassification): the reward itself, of a reward model. They are made of the
    hidden state of the last token. lora: as in generate. Raises RequestError.
    """
    with kept.session(
        params, config, mesh, engine_config, tokenizer, any_tokenizer=tokenizer is None
    ) as s:
        return s.classify(prompts, lora=lora)


def logits(params: PyTree, hidden: jax.Array, *, config: ModelLike | None = None) -> jax.Array:
    """Return the logits, float32 [..., V], of hidden states [..., E]: what a draw sees, without
    temperature and filters; of a classifier, those of its labels. A pure function of jax,
    differentiable and to be called under jit, on as many states at a time as the logits have room
    for. An adapter of the head is not in it.

    params: Params, or any other tree with config= as in generate; under jit Params alone, which
    params_from makes. Raises ConfigError.
    """
    params = loaded_params("logits", params, config)
    return bind(params.config, dict(params)).logits(hidden)


def warmup(
    params: PyTree,
    max_prompt_len: int,
    max_tokens: int,
    batch: int,
    *,
    config: ModelLike | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    engine_config: EngineConfig | None = None,
    draft: PyTree = None,
    score: ScoreCalls | None = None,
    use_tqdm: bool = False,
) -> float:
    """Compile ahead all that generate and score will need, and size the pool; returns the seconds
    that it took. Not so `hidden`, whose first call compiles its own.

    batch: completions of one call, `n` of each prompt. Later calls with as many, of prompts and
    max_tokens up to these, with params of these shapes and the same keyword arguments, compile
    nothing. score: how `score` will be called if that is with top_k, at, entropy or start, as in
    LLM.warmup: {"top_k": 256, "start": True}. Raises CapacityError or ConfigError.
    """
    sizes = {"max_prompt_len": max_prompt_len, "max_tokens": max_tokens, "batch": batch}
    for name, value in sizes.items():
        if not is_scalar(value) or value < 1:
            raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")
    with kept.session(params, config, mesh, engine_config, tokenizer, draft=draft) as s:
        length, most, rows = int(max_prompt_len), int(max_tokens), int(batch)
        return s.warmup_for(length, most, rows, score, use_tqdm=use_tqdm)


def release(compiled: bool = False) -> None:
    """Free the pools and derived weights that generate and score keep between calls; executables
    too if `compiled`.
    """
    kept.release(compiled)
