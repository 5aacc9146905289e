"""Embeddings in place of tokens: those of real tokens give what the tokens give, through chunks,
hits, forks, preemption, snapshots and meshes; and other embeddings share nothing.

Within one engine that is to the bit here, where all its steps are of one size. Engines with pools
of other sizes, or without one, run other programs, which XLA may compile to other orders of sums:
there tokens are equal, and logprobs to 1e-5.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import (
    LLM,
    CapacityError,
    ConfigError,
    EmbeddingSpan,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from jpaged.models.layers.attention import AttentionConfig
from tests.tiny import (
    CONFIG,
    CROWDED,
    ENGINE,
    assert_idle,
    compiles,
    config,
    make_params,
    make_prompts,
)

PARAMS = make_params(0)
TABLE = np.asarray(PARAMS["embed"]["weight"])
WITH = dataclasses.replace(ENGINE, max_embeddings=16)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=8, ignore_eos=True)
PLACEHOLDER = 3


def embedded(prompt: Sequence[int], *spans: tuple[int, int], table: Any = TABLE) -> dict[str, Any]:
    """The prompt with placeholders, and embeddings of its tokens, in these spans."""
    ids = np.array(prompt)
    embeddings = {start: table[ids[start:end]] for start, end in spans}
    for start, end in spans:
        ids[start:end] = PLACEHOLDER
    return {"prompt_token_ids": ids.tolist(), "embeddings": embeddings}


def numbers(outputs: Sequence[jpaged.RequestOutput]) -> list[Any]:
    """The tokens and the bits of their logprobs."""
    return [
        [(c.token_ids, c.token_logprobs.tobytes()) for c in output.outputs] for output in outputs
    ]


def assert_near(outputs: Sequence[jpaged.RequestOutput], wanted: list[Any]) -> None:
    """The tokens of `numbers`, and their logprobs to 1e-5: those of another program."""
    for found, expected in zip(numbers(outputs), wanted, strict=True):
        for (tokens, logprobs), (others, theirs) in zip(found, expected, strict=True):
            assert tokens == others
            ours, theirs = (np.frombuffer(x, np.float32) for x in (logprobs, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def llm_of(**changes: Any) -> LLM:
    return LLM(PARAMS, **vars(dataclasses.replace(WITH, **changes)))


@functools.cache
def wanted(prompts: tuple[tuple[int, ...], ...], asked: str = "greedy", **changes: Any) -> Any:
    """What the tokens themselves give, each prompt by itself."""
    llm = llm_of(**changes)
    params = {"greedy": GREEDY, "drawn": DRAWN}[asked]
    found = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        found += numbers(llm.generate([list(prompt)], params, use_tqdm=False))
    llm.close()
    return found


LONG, SHORT, EVEN = make_prompts(41, 7, 16)
SPANS = {
    "one": [(4, 9)],
    "from the first": [(0, 6), (20, 33)],
    "to the last": [(30, 41)],
    "side by side": [(3, 9), (9, 17), (17, 18)],
    "all": [(0, 41)],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return llm_of()


@pytest.mark.parametrize("name", SPANS)
def test_embeddings_of_tokens_give_what_the_tokens_give(llm: LLM, name: str) -> None:
    """41 tokens in chunks of 16, which cut spans anywhere, the pool of 16 rows too."""
    llm.reset_prefix_cache()
    outputs = llm.generate([embedded(LONG, *SPANS[name])], GREEDY, use_tqdm=False)
    assert numbers(outputs) == wanted((tuple(LONG),))
    assert_idle(llm)


def test_a_pool_of_few_rows_cuts_chunks(llm: LLM) -> None:
    few = llm_of(max_embeddings=3)
    outputs = few.generate([embedded(LONG, (2, 30)), embedded(SHORT, (1, 6))], GREEDY)
    assert_near(outputs, wanted((tuple(LONG), tuple(SHORT))))
    stats = few.stats()
    assert stats["embedded_tokens"] == 28 + 5 and stats["prefill_steps"] >= 11


def test_prompts_with_and_without_share_steps(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompts = [embedded(LONG, (5, 25)), SHORT, embedded(EVEN, (0, 16)), LONG]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = wanted((tuple(LONG), tuple(SHORT), tuple(EVEN), tuple(LONG)))
    assert numbers(outputs) == expected


def test_text_is_that_of_an_engine_without_a_pool() -> None:
    plain = LLM(PARAMS, **vars(ENGINE))
    outputs = plain.generate([LONG, SHORT], GREEDY, use_tqdm=False)
    assert_near(outputs, wanted((tuple(LONG), tuple(SHORT))))


def test_text_has_its_bits_in_company_of_embeddings(llm: LLM) -> None:
    """In the same rows of the same steps."""
    llm.reset_prefix_cache()
    alone = llm.generate([SHORT], GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    together = llm.generate([SHORT, embedded(LONG, (5, 25))], GREEDY, use_tqdm=False)
    assert numbers(together[:1]) == numbers(alone)


@pytest.mark.parametrize("shared", range(0, 41, 4))
def test_hits_at_each_block(llm: LLM, shared: int) -> None:
    """The second prompt has the first one's tokens up to `shared`; blocks are of 4 tokens."""
    llm.reset_prefix_cache()
    other = [*LONG[:shared], *[(t + 1) % 96 for t in LONG[shared:]]]
    spans = [(2, 19), (22, 37)]
    first, second = embedded(LONG, *spans), embedded(other, *spans)
    llm.generate([first], GREEDY, use_tqdm=False)
    (output,) = llm.generate([second], GREEDY, use_tqdm=False)
    # A span is shared whole or not at all: its digest is of all its rows.
    split = [start for start, end in spans if start < shared < end]
    known = min([shared, *split]) // 4 * 4
    assert output.num_cached_tokens == min(known, 40), (output.num_cached_tokens, known)
    assert numbers([output]) == wanted((tuple(other),))


def test_equal_spans_hit_and_others_do_not(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()["embedded_tokens"]
    prompt = embedded(LONG, (4, 20))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    (again,) = llm.generate([embedded(LONG, (4, 20))], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 40 and numbers([again]) == wanted((tuple(LONG),))
    assert llm.stats()["embedded_tokens"] == before + 16  # those of a hit are not computed
    # Equal placeholders, another image; the same one a token later; tokens that it hides.
    changed = dict(prompt, embeddings={4: TABLE[LONG[4:20]] * 0.5})
    (other,) = llm.generate([changed], GREEDY, use_tqdm=False)
    assert other.num_cached_tokens == 4
    moved = dict(prompt, embeddings={4: TABLE[LONG[4:19]], 19: TABLE[LONG[19:20]]})
    (cut,) = llm.generate([moved], GREEDY, use_tqdm=False)
    assert cut.num_cached_tokens == 4 and numbers([cut]) == wanted((tuple(LONG),))
    plain = {"prompt_token_ids": prompt["prompt_token_ids"]}
    (hidden,) = llm.generate([plain], GREEDY, use_tqdm=False)
    assert hidden.num_cached_tokens == 4
    assert len({bytes(x.outputs[0].token_logprobs) for x in (again, other, hidden)}) == 3


def test_a_digest_names_what_the_numbers_are_of(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids, rows = embedded(LONG, (4, 20))["prompt_token_ids"], TABLE[LONG[4:20]]

    def ask(digest: Any, rows: Any = rows) -> int:
        span = EmbeddingSpan(rows, digest=digest)
        prompt = {"prompt_token_ids": ids, "embeddings": {4: span}}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    assert [ask(b"cat"), ask("cat"), ask("cat", rows + 1)] == [0, 40, 40]
    assert [ask("dog"), ask(None)] == [4, 4]


def test_samples_are_forks(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()["embedded_tokens"]
    outputs = llm.generate([embedded(LONG, (4, 31))], DRAWN, use_tqdm=False)
    assert numbers(outputs) == wanted((tuple(LONG),), "drawn")
    assert llm.stats()["embedded_tokens"] == before + 27


def test_equal_prompts_of_one_plan_are_forks(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.stats()["embedded_tokens"]
    same, other = embedded(SHORT, (1, 5)), embedded(SHORT, (1, 5), table=2 * TABLE)
    first, second, third = llm.generate([same, same, other], GREEDY, use_tqdm=False)
    assert numbers([first]) == numbers([second]) == wanted((tuple(SHORT),))
    assert numbers([third]) != numbers([first])
    assert llm.stats()["embedded_tokens"] == before + 8


def test_beams(llm: LLM) -> None:
    llm = llm_of(max_num_seqs=8, max_logprobs=12)
    settings: dict[str, Any] = {"beam_width": 3, "max_tokens": 6}
    (tokens,) = llm.beam_search([LONG], **settings, use_tqdm=False)
    llm.reset_prefix_cache()
    (spans,) = llm.beam_search([embedded(LONG, (3, 28))], **settings, use_tqdm=False)
    assert [c.token_ids for c in spans.outputs] == [c.token_ids for c in tokens.outputs]
    assert [c.score for c in spans.outputs] == [c.score for c in tokens.outputs]


def test_score_and_hidden(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = embedded(LONG, (3, 28))
    ids = prompt["prompt_token_ids"]
    (tokens,) = np.asarray(llm.score([LONG]))
    (spans,) = np.asarray(llm.score([prompt]))
    # What is scored is the next token: a placeholder in place of one that embeddings stand for.
    same = [i for i in range(40) if ids[i + 1] == LONG[i + 1]]
    assert len(same) >= 15 and tokens[same].tobytes() == spans[same].tobytes()
    (a,), (b,) = llm.hidden([LONG]), llm.hidden([prompt])
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    asked = dataclasses.replace(GREEDY, prompt_logprobs=1)
    assert_near(llm.generate([prompt], asked, use_tqdm=False), wanted((tuple(LONG),)))


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_preempted_rows_go_on(swap: float) -> None:
    """The pool holds a part of the rows; recomputed or swapped in, the tokens are the same."""
    prompts = make_prompts(20, 23, 26, 21)
    settings = vars(dataclasses.replace(CROWDED, swap_space_gib=swap, max_embeddings=16))
    llm = LLM(PARAMS, **settings)
    spans = [embedded(prompt, (1, len(prompt) - 2)) for prompt in prompts]
    asked = dataclasses.replace(GREEDY, max_tokens=16, logprobs=None)
    outputs = llm.generate(spans, asked, use_tqdm=False)
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["preemptions_swapped" if swap else "preemptions_recomputed"] > 0
    llm.reset_prefix_cache()  # the same rows are preempted, at the same tokens
    assert numbers(outputs) == numbers(llm.generate(prompts, asked, use_tqdm=False))
    assert_idle(llm)


def test_snapshots_and_resumed_outputs(llm: LLM) -> None:
    llm.reset_prefix_cache()
    request_id = llm.add_request(embedded(LONG, (4, 37)), GREEDY)
    llm.step()  # the first chunk of it
    snapshot = llm.snapshot()
    for _ in range(2):
        llm.restore(snapshot)
        done = []
        while llm.has_unfinished():
            done += llm.step()
        assert numbers(done) == wanted((tuple(LONG),))
        assert done[0].request_id == request_id
    llm.reset_prefix_cache()
    llm.add_request(embedded(LONG, (4, 37)), GREEDY, request_id="cut")
    for _ in range(6):
        llm.step()
    cut = llm.abort("cut")
    assert cut is not None and 0 < len(cut.outputs[0].token_ids) < 8
    assert cut.embeddings is not None and list(cut.embeddings) == [4]
    llm.reset_prefix_cache()
    (whole,) = llm.generate([cut], GREEDY, use_tqdm=False)
    ((tokens, logprobs),) = wanted((tuple(LONG),))[0]
    assert whole.outputs[0].token_ids == tokens
    # Tokens that were drawn before are computed side by side now.
    expected = np.frombuffer(logprobs, np.float32)
    np.testing.assert_allclose(whole.outputs[0].token_logprobs, expected, atol=1e-5)


def test_other_faces(llm: LLM) -> None:
    prompt = embedded(LONG, (4, 37))
    expected = wanted((tuple(LONG),))[0][0][0]
    assert llm.submit(prompt, GREEDY).result().outputs[0].token_ids == expected
    chunks = list(llm.stream([prompt], GREEDY))
    assert [t for c in chunks for t in c.token_ids_delta] == expected
    settings: dict[str, Any] = {"config": CONFIG, "engine_config": WITH}
    (output,) = jpaged.generate(PARAMS, [prompt], GREEDY, **settings)
    assert output.outputs[0].token_ids == expected

    async def ask() -> list[int]:
        engine = jpaged.AsyncLLM(PARAMS, **vars(WITH))
        tokens = [t async for c in engine.generate(prompt, GREEDY) for t in c.token_ids_delta]
        await engine.close()
        return tokens

    assert asyncio.run(ask()) == expected


@pytest.mark.parametrize("changes", [{"mixed": True}, {"decode_steps": 3}, {"deterministic": True}])
def test_other_steps(changes: dict[str, Any]) -> None:
    if "deterministic" in changes:
        changes |= {"token_buckets": None, "seq_buckets": None}
    llm = llm_of(**changes)
    prompts, spans = [LONG, SHORT, EVEN], [(6, 38), (2, 5), (0, 9)]
    tokens = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    asked = [embedded(p, s) for p, s in zip(prompts, spans, strict=True)]
    found = llm.generate(asked, GREEDY, use_tqdm=False)
    assert [x[0][0] for x in numbers(found)] == [x[0][0] for x in numbers(tokens)]
    if "deterministic" in changes:  # wherever a row stands, and whatever stands beside it
        assert numbers(found) == numbers(tokens)
        llm.reset_prefix_cache()
        mixed = llm.generate([asked[0], SHORT, asked[2]], GREEDY, use_tqdm=False)
        assert numbers(mixed) == numbers(tokens)


def test_guesses_from_the_text() -> None:
    texts = [[*prompt, *prompt, *prompt[:-2]] for prompt in make_prompts(5, 7)]
    asked = dataclasses.replace(GREEDY, max_tokens=28, logprobs=None)
    guess = {"method": "ngram", "num_tokens": 3, "adaptive": False}
    llm, plain = llm_of(speculative=guess), llm_of()
    prompts = [embedded(text, (2, 6)) for text in texts] + texts
    found = llm.generate(prompts, asked, use_tqdm=False)
    expected = plain.generate(prompts, asked, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert llm.stats()["drafted_tokens"] > 0


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_meshes(data: int, tensor: int) -> None:
    llm = llm_of(data_parallel_size=data, tensor_parallel_size=tensor)
    prompts = make_prompts(9, 41, 23, 33)
    tokens = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    spans = [embedded(prompt, (2, len(prompt) - 1)) for prompt in prompts]
    found = llm.generate([*spans], GREEDY, use_tqdm=False)
    assert numbers(found) == numbers(tokens)
    (again,) = llm.generate([spans[1]], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 40


def test_nothing_compiles_once_warm() -> None:
    """No write, chunk or place of spans compiles after the warm-up; strict engines take them."""
    llm = llm_of(strict=True)
    with compiles() as names:
        llm.generate([embedded(LONG, (4, 37)), SHORT, embedded(EVEN, (1, 2))], GREEDY)
    assert names == []
    buckets = {(b.phase, b.tokens, b.rows, b.features) for b in llm.buckets()}
    plain = LLM(PARAMS, **vars(dataclasses.replace(WITH, strict=True, max_embeddings=0)))
    assert buckets == {(b.phase, b.tokens, b.rows, b.features) for b in plain.buckets()}


def test_jax_arrays_and_other_floats(llm: LLM) -> None:
    rows = jnp.asarray(TABLE[LONG[4:20]])
    prompt = embedded(LONG, (4, 20)) | {"embeddings": {4: rows}}
    llm.reset_prefix_cache()
    assert numbers(llm.generate([prompt], GREEDY)) == wanted((tuple(LONG),))
    # float64 that rounds to these floats; the caller's array may change meanwhile.
    doubled = np.array(rows, np.float64)
    prompt["embeddings"] = {4: doubled}
    llm.reset_prefix_cache()
    llm.add_request(prompt, GREEDY)
    doubled[:] = 0
    done = []
    while llm.has_unfinished():
        done += llm.step()
    assert numbers(done) == wanted((tuple(LONG),))


def seeing(**changes: Any) -> LLM:
    """A model whose layers, with a window of 9 and without one, see images whole."""
    model = config(sliding_windows=(9, None))
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mixer, AttentionConfig)
        mixer = dataclasses.replace(layer.mixer, sees_images=True)
        layers.append(dataclasses.replace(layer, mixer=mixer))
    params = make_params(0, dataclasses.replace(model, layers=tuple(layers)))
    return LLM(params, **vars(dataclasses.replace(WITH, **changes)))


def with_images(prompt: Sequence[int], *grids: tuple[int, tuple[int, int, int]]) -> dict[str, Any]:
    spans = {}
    for start, grid in grids:
        end = start + grid[0] * grid[1] * grid[2]
        spans[start] = EmbeddingSpan(TABLE[list(prompt[start:end])], grid=grid)
    return {"prompt_token_ids": list(prompt), "embeddings": spans}


def test_images_whose_tokens_see_each_other_are_not_cut() -> None:
    """Chunks of 16 tokens end before an image that they do not hold; a hit may lie in one."""
    prompt = with_images(LONG, (5, (1, 3, 4)), (17, (1, 2, 5)), (30, (1, 1, 11)))
    whole = seeing(max_num_batched_tokens=64, token_buckets=(64,), max_embeddings=64)
    (expected,) = whole.generate([prompt], GREEDY, use_tqdm=False)
    llm = seeing()
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    tokens = expected.outputs[0].token_ids
    assert output.outputs[0].token_ids == tokens
    np.testing.assert_allclose(
        output.outputs[0].token_logprobs, expected.outputs[0].token_logprobs, atol=1e-5
    )
    assert llm.stats()["prefill_steps"] == 4  # [0, 5), [5, 17), [17, 30), [30, 41)
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 40 and again.outputs[0].token_ids == tokens
    # The same numbers as text, and the tokens themselves, have another answer, and no hit of these.
    text = dict(prompt, embeddings={k: v.embeddings for k, v in prompt["embeddings"].items()})
    plain, ids = llm.generate([text, LONG], GREEDY, use_tqdm=False)
    assert plain.num_cached_tokens == ids.num_cached_tokens == 4
    assert numbers([plain]) == numbers([ids]) and plain.outputs[0].token_ids != tokens


def test_an_image_that_no_step_holds_is_refused() -> None:
    llm = seeing()
    big = with_images(LONG, (5, (1, 4, 5)))
    with pytest.raises(CapacityError, match=r"20 tokens, .* raise max_embeddings=16 or max_num_b"):
        llm.generate([big], GREEDY, use_tqdm=False)
    mixed = seeing(mixed=True)  # eight rows may decode beside it
    with pytest.raises(CapacityError, match="12 tokens"):
        mixed.generate([with_images(LONG, (5, (1, 3, 4)))], GREEDY, use_tqdm=False)
    (output,) = mixed.generate([with_images(LONG, (5, (1, 2, 4)))], GREEDY, use_tqdm=False)
    assert output.error is None


def test_a_kernel_sees_images_as_xla_does() -> None:
    """That of TPUs, interpreted, in whose steps what is prepared and what is attended see them."""
    asked = dataclasses.replace(GREEDY, max_tokens=1)
    prompts = [with_images(EVEN, (2, (1, 3, 4))), EVEN]
    names: tuple[Any, ...] = ("tpu", "xla")
    found, wanted = (seeing(attention=x).generate(prompts, asked, use_tqdm=False) for x in names)
    assert numbers(wanted[:1]) != numbers(wanted[1:])
    assert_near(found, numbers(wanted))


ROWS = TABLE[:5]
BAD: list[tuple[Any, str]] = [
    ({2: ROWS[:, :31]}, r"embeddings at 2 are \[5, 31\]: must be \[n, 32\]"),
    ({2: ROWS[0]}, r"are \[32\]"),
    ({2: ROWS[:0]}, r"are \[0, 32\]"),
    ({37: ROWS}, "5 embeddings at 37: the prompt has 41 tokens"),
    ({-1: ROWS}, "embeddings at -1"),
    ({"2": ROWS}, "embeddings at '2'"),
    ({2: ROWS, 6: ROWS}, "embeddings at 6: the span before them ends at 7"),
    ({2: np.where(np.arange(32) == 3, np.nan, ROWS)}, "not all are finite"),
    ({2: np.full((5, 32), np.inf, np.float32)}, "not all are finite"),
    ({2: ROWS.astype(np.int32)}, "array of int32; pass a numpy or jax array of floats"),
    ({2: ROWS.tolist()}, "of type list"),
    (ROWS, "embeddings of type ndarray: pass a dict"),
    ({2: EmbeddingSpan(ROWS, grid=(1, 2, 2))}, r"grid=\(1, 2, 2\) of embeddings at 2: must hold 5"),
    ({2: EmbeddingSpan(ROWS, grid=(5, 1))}, r"grid=\(5, 1\)"),  # pyright: ignore
    ({2: EmbeddingSpan(ROWS, grid=(-1, 1, -5))}, r"grid=\(-1, 1, -5\)"),
    ({2: EmbeddingSpan(ROWS, deepstack=ROWS[None])}, "this model adds nothing after its layers"),
    ({2: EmbeddingSpan(ROWS, digest=7)}, "digest=7"),  # pyright: ignore
]


@pytest.mark.parametrize(("embeddings", "message"), BAD)
def test_bad_embeddings_are_that_requests_error(llm: LLM, embeddings: Any, message: str) -> None:
    bad = {"prompt_token_ids": LONG, "embeddings": embeddings}
    with pytest.raises(RequestError, match=message):
        llm.generate([bad], GREEDY, use_tqdm=False)
    good, failed = llm.generate([SHORT, bad], GREEDY, on_error="return", use_tqdm=False)
    assert good.error is None and isinstance(failed.error, RequestError)
    assert_idle(llm)


def test_what_they_need(llm: LLM) -> None:
    with pytest.raises(RequestError, match="without 'prompt_token_ids'"):
        llm.generate([{"prompt": "text", "embeddings": {0: ROWS}}], GREEDY)
    plain = LLM(PARAMS, **vars(ENGINE))
    prompt = {"prompt_token_ids": LONG, "embeddings": {0: ROWS}}
    with pytest.raises(RequestError, match=r"5 embeddings .* max_embeddings=0"):
        plain.generate([prompt], GREEDY)
    (failed,) = plain.generate([prompt], GREEDY, on_error="return")
    assert isinstance(failed.error, RequestError)
    assert failed.error.rule == "embeddings_need_a_pool"
    with pytest.raises(ConfigError, match="max_embeddings=-1"):
        llm_of(max_embeddings=-1)
    draft = {"method": "draft", "model": PARAMS}
    with pytest.raises(UnsupportedError, match="reads tokens alone") as refused:
        LLM(PARAMS, **dict(vars(WITH), speculative=draft))
    assert refused.value.rule == "guesses_of_models_read_tokens"
    empty = {"prompt_token_ids": SHORT, "embeddings": {}}
    assert numbers(llm.generate([empty], GREEDY)) == wanted((tuple(SHORT),))
    with pytest.raises(CapacityError, match="prompt of 64 tokens"):
        llm.generate([{"prompt_token_ids": [1] * 64, "embeddings": {0: ROWS}}], GREEDY)


def test_steps_of_engines_without_a_pool_are_as_before() -> None:
    """Neither a section nor an argument more."""
    plain, pooled = LLM(PARAMS, **vars(ENGINE)), llm_of()
    texts = []
    for llm in (plain, pooled):
        llm.generate([SHORT], GREEDY, use_tqdm=False)
        compiled = llm.session.runner.compiled
        shapes = [shape for shape in compiled.seconds if not isinstance(shape, str)]
        prefill = next(shape for shape in shapes if shape.phase == "prefill")
        texts.append(compiled.lower(prefill).as_text())
    assert texts[0].count("tensor<16x1x32xf32>") == 0 < texts[1].count("tensor<1x16x1x32xf32>")
