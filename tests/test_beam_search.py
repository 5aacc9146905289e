"""Beam search: transformers' own beams and scores, from tests/golden/beams.json; and beams beside
other requests.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jpaged
from jpaged import (
    LLM,
    CapacityError,
    EngineConfig,
    Params,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from tests.golden.reference import BeamCase, load, load_beams
from tests.text_model import make_tokenizer
from tests.tiny import (
    CROWDED,
    EOS,
    ROOMY,
    assert_idle,
    assert_same,
    compile_cache,
    compiles,
    dense_greedy,
    dense_logprobs,
    make_params,
    make_prompts,
)

# Blocks of 4 tokens: beams part in the middle of blocks, and share those before it. One prefill and
# one decode shape.
ENGINE = EngineConfig(
    block_size=4,
    max_num_seqs=8,
    max_model_len=128,
    max_num_batched_tokens=64,
    num_blocks=128,
    token_buckets=(64,),
    seq_buckets=(8,),
)


def label(cases: list[BeamCase]) -> str:
    case, prompts = cases[0], "+".join(str(len(case.prompt)) for case in cases)
    family, eos = case.config.split("_")[0], "+".join(map(str, case.eos_token_ids))
    how = f"width{case.beam_width}-penalty{case.length_penalty}-{case.early_stopping}"
    return f"{family}-prompt{prompts}-{how}-max{case.max_tokens}-eos{eos}"


def settings(case: BeamCase) -> tuple[object, ...]:
    """All but the prompt: cases that agree in it can share a call."""
    how = (case.beam_width, case.max_tokens, case.length_penalty, str(case.early_stopping))
    return (case.config, *how, tuple(case.eos_token_ids))


# An engine is made for each set of eos ids. These have all kinds of early_stopping and lengths of
# penalty between them.
QUICK = [
    ("qwen3_g2_d32_tied", (104,)),
    ("llama_g4_d64_llama3", (68,)),
    ("mistral_g4_d128_window", (120,)),
]


def calls() -> list[Any]:
    """Each case alone, and all that agree in their settings. Sorted, for jpaged keeps the engines
    of few eos ids.
    """
    groups: dict[tuple[object, ...], list[BeamCase]] = {}
    for case in load_beams():
        groups.setdefault(settings(case), []).append(case)
    alone = [[case] for group in groups.values() for case in group]
    together = [group for group in groups.values() if len(group) > 1]
    every = sorted(alone + together, key=lambda cases: (cases[0].config, cases[0].eos_token_ids))
    quick = [(cases[0].config, tuple(cases[0].eos_token_ids)) in QUICK for cases in every]
    assert {c[0].early_stopping for c, is_quick in zip(every, quick, strict=True) if is_quick} == {
        True,
        False,
        "never",
    }
    slow = pytest.mark.slow
    return [
        pytest.param(c, id=label(c), marks=() if q else slow)
        for c, q in zip(every, quick, strict=True)
    ]


@pytest.fixture(scope="module", autouse=True)
def _only_our_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the same shapes load the same compiled steps."""
    jpaged.release(compiled=True)
    with compile_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield
    jpaged.release(compiled=True)


@pytest.fixture(scope="module")
def params_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Params]:
    """Params of a golden model by name, loaded once."""
    return functools.cache(
        lambda name: jpaged.load_params(load(name).write(tmp_path_factory.mktemp(name)))
    )


def search(params: Params, prompts: list[list[int]], case: BeamCase) -> list[RequestOutput]:
    """Our beams of each prompt, with the settings of a case."""
    return jpaged.beam_search(
        params,
        prompts,
        case.beam_width,
        case.max_tokens,
        case.length_penalty,
        case.early_stopping,
        config=dataclasses.replace(params.config, eos_token_ids=tuple(case.eos_token_ids)),
        engine_config=ENGINE,
    )


def check(out: RequestOutput, case: BeamCase) -> None:
    """transformers' beams, in its order, and with numbers that fit each other."""
    assert out.prompt_token_ids == case.prompt
    assert [beam.token_ids for beam in out.outputs] == case.beams
    assert [beam.score for beam in out.outputs] == pytest.approx(case.scores, rel=0, abs=1e-4)
    assert [beam.index for beam in out.outputs] == list(range(case.beam_width))
    for beam in out.outputs:
        ended = beam.token_ids[-1] in case.eos_token_ids
        assert beam.finish_reason == ("stop" if ended else "length")
        assert beam.token_logprobs.dtype == np.float32 and beam.token_logprobs.shape == (
            len(beam.token_ids),
        )
        assert beam.cumulative_logprob == pytest.approx(
            float(beam.token_logprobs.sum()), rel=0, abs=1e-4
        )
        assert beam.score == pytest.approx(
            beam.cumulative_logprob / len(beam.token_ids) ** case.length_penalty
        )


@pytest.mark.parametrize("cases", calls())
def test_equals_transformers(params_of: Callable[[str], Params], cases: list[BeamCase]) -> None:
    """Several prompts twice as well: then there are more beams than rows, and some searches wait
    for others.
    """
    params = params_of(cases[0].config)
    for batch in [cases] if len(cases) == 1 else [cases, cases * 2]:
        outs = search(params, [case.prompt for case in batch], batch[0])
        for out, case in zip(outs, batch, strict=True):
            check(out, case)


# A tiny model of our own, in one LLM

SWAP = dataclasses.replace(CROWDED, swap_space_gib=0.01)
PROMPTS = make_prompts(9, 17, 5, 14, seed=30)


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module")
def one_llm(params: Params) -> Iterator[LLM]:
    llm = LLM(params, **vars(ROOMY))
    yield llm
    llm.close()


@pytest.fixture
def llm(one_llm: LLM) -> Iterator[LLM]:
    """With nothing cached; a test must leave it idle."""
    one_llm.reset_prefix_cache()
    yield one_llm
    assert_idle(one_llm)


def beams(llm: LLM, prompts: Any, *how: Any, **options: Any) -> list[RequestOutput]:
    return llm.beam_search(prompts, *how, use_tqdm=False, **options)


BAD = [
    ((0,), r"beam_width=0: must be at least 1"),
    ((-3,), r"beam_width=-3: must be"),
    ((2.5,), r"beam_width=2\.5: must be an integer"),
    ((True,), r"beam_width=True: must be an integer"),
    ((13,), r"beam_width=13 is above max_num_seqs=12"),
    ((7,), r"beam_width=7 with 1 EOS ids looks at 14 candidates a beam: raise max_logprobs=12"),
    ((4, 0), r"max_tokens=0: must be at least 1"),
    ((4, 1.5), r"max_tokens=1\.5: must be an integer"),
    ((4, 8, float("nan")), r"length_penalty=nan: must be a finite number between"),
    ((4, 8, float("inf")), r"length_penalty=inf: must be"),
    ((4, 8, "1"), r"length_penalty='1': must be"),
    ((4, 8, 1.0, "maybe"), r"early_stopping='maybe': must be True, False or 'never'"),
    ((4, 8, 1.0, None), r"early_stopping=None: must be"),
]


@pytest.mark.parametrize("how, message", BAD, ids=[str(how) for how, _ in BAD])
def test_bad_arguments(llm: LLM, how: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match="request 0: " + message):
        beams(llm, PROMPTS[:2], *how)
    outputs = beams(llm, PROMPTS[:2], *how, on_error="return")
    assert len(outputs) == 2
    for out in outputs:
        assert isinstance(out.error, RequestError) and out.outputs[0].finish_reason == "error"
        with pytest.raises(RequestError, match=message):
            raise out.error


@pytest.mark.parametrize("like_true", [1, np.True_], ids=["1", "np.True_"])
def test_early_stopping_like_true(llm: LLM, like_true: Any) -> None:
    """It means True, or is refused; it is not taken for False."""
    prompt = llm.session.inputs.prompt(PROMPTS[0])
    search = llm.session.builder.beam_search(prompt, 2, 8, 1.0, True)
    assert search.early_stopping is True
    try:
        search = llm.session.builder.beam_search(
            llm.session.inputs.prompt(PROMPTS[0]), 2, 8, 1.0, like_true
        )
    except RequestError:
        return
    assert search.early_stopping is True


def test_bad_prompts(llm: LLM) -> None:
    """Each fails alone."""
    bad = [[], [97], {"prompt_token_ids": [1], "cache_salt": 5}, list(range(64)), "text"]
    for prompt in bad:
        with pytest.raises(RequestError, match=r"request 1: "):
            beams(llm, [PROMPTS[0], prompt], 2, 4)
    outputs = beams(llm, [PROMPTS[0], *bad], 2, 4, on_error="return")
    assert [type(out.error) for out in outputs] == [
        type(None),
        *[RequestError] * 3,
        CapacityError,
        RequestError,
    ]
    assert_same(outputs[:1], beams(llm, PROMPTS[0], 2, 4))
    assert beams(llm, [], 2) == []
    with pytest.raises(RequestError, match=r"on_error='skip': must be 'raise' or 'return'"):
        beams(llm, PROMPTS, 2, on_error="skip")


def test_width_one_is_greedy(llm: LLM, params: Params) -> None:
    """Where nothing ends early; the scores are of the dense model's logprobs."""
    outputs = beams(llm, PROMPTS, 1, 10)
    expected = [dense_greedy(params, prompt, 10) for prompt in PROMPTS]
    assert all(EOS not in tokens for tokens in expected)
    assert [[beam.token_ids for beam in out.outputs] for out in outputs] == [
        [tokens] for tokens in expected
    ]
    for prompt, tokens, out in zip(PROMPTS, expected, outputs, strict=True):
        dense = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1][range(10), tokens]
        np.testing.assert_allclose(out.outputs[0].token_logprobs, dense, atol=1e-4)
        assert out.outputs[0].score == pytest.approx(dense.mean(), abs=1e-4)


def test_every_beam_is_scored_truly(llm: LLM, params: Params) -> None:
    """Wider is no worse, all beams differ, and each has the dense model's logprobs: its KV was its
    own.
    """
    for prompt in PROMPTS:
        narrow, wide = (beams(llm, prompt, width, 9)[0].outputs for width in (1, 5))
        assert (
            wide[0].score is not None
            and narrow[0].score is not None
            and wide[0].score >= narrow[0].score - 1e-5
        )
        assert len({tuple(beam.token_ids) for beam in wide}) == 5
        assert [beam.score for beam in wide] == sorted(
            (beam.score or 0.0 for beam in wide), reverse=True
        )
        for beam in wide:
            tokens = beam.token_ids
            dense = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1][
                range(len(tokens)), tokens
            ]
            np.testing.assert_allclose(beam.token_logprobs, dense, atol=1e-4)


SAMPLING = [
    SamplingParams(
        temperature=2.0, seed=1, max_tokens=18, ignore_eos=True, n=2, presence_penalty=1.0
    ),
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=2.0, seed=2, max_tokens=18, ignore_eos=True),
]


def test_beside_ordinary_requests(llm: LLM) -> None:
    """Neither changes the other; the requests end while the search runs, and wait for `step`."""
    expected_beams = beams(llm, PROMPTS[:2], 4, 24)
    expected = llm.generate(PROMPTS[1:], SAMPLING, use_tqdm=False)
    ids = [llm.add_request(prompt, p) for prompt, p in zip(PROMPTS[1:], SAMPLING, strict=True)]
    for _ in range(3):
        assert llm.step() == []
    assert_same(beams(llm, PROMPTS[:2], 4, 24), expected_beams)
    found: dict[str, RequestOutput] = {}
    while llm.has_unfinished():
        found |= {out.request_id: out for out in llm.step()}
    assert_same([found[i] for i in ids], expected)


@pytest.mark.parametrize("settings", [CROWDED, SWAP], ids=["recompute", "swap"])
def test_preempted_beams(params: Params, llm: LLM, settings: EngineConfig) -> None:
    """Searches that wait for each other's blocks, beside other requests, end as if they had been
    alone.
    """
    expected_beams = [beams(llm, prompt, 4, 16)[0] for prompt in PROMPTS]
    expected = llm.generate(PROMPTS[1:], SAMPLING, use_tqdm=False)
    crowded = LLM(params, **vars(settings))
    ids = [crowded.add_request(prompt, p) for prompt, p in zip(PROMPTS[1:], SAMPLING, strict=True)]
    assert_same(beams(crowded, PROMPTS, 4, 16), expected_beams)
    found: dict[str, RequestOutput] = {}
    while crowded.has_unfinished():
        found |= {out.request_id: out for out in crowded.step()}
    assert_same([found[i] for i in ids], expected)
    stats = crowded.stats()
    assert stats["preemptions_swapped" if settings is SWAP else "preemptions_recomputed"] > 0
    assert (stats["swap_in_bytes"] > 0) == (settings is SWAP) and stats["copied_blocks"] > 0
    assert_idle(crowded)
    crowded.close()


def test_blocks_held(params: Params) -> None:
    """Four beams of a 40-token prompt: its blocks once, and at most half of what four rows apart
    would take.
    """
    llm = LLM(params, **vars(ROOMY))
    (prompt,) = make_prompts(40, seed=31)
    (out,) = beams(llm, prompt, 4, 16)
    assert len(out.outputs) == 4 and out.error is None
    peak = llm.stats()["peak_blocks_in_use"]
    dense = 4 * -(-(40 + 16) // 4)
    print(
        f"width 4, prompt of 40 tokens, 16 more: {peak} blocks at the peak, {dense} for rows apart"
    )
    assert 14 <= peak <= dense / 2
    assert_idle(llm)
    llm.close()


def test_beams_that_do_not_fit_at_once(params: Params, llm: LLM) -> None:
    """The pool holds 20 blocks, four beams 12 + 4 * 4 in the end: they take turns."""
    (long,) = make_prompts(50, seed=32)
    expected = [beams(llm, prompt, 4, 14)[0] for prompt in (PROMPTS[0], long)]
    crowded = LLM(params, **vars(CROWDED))
    assert_same(beams(crowded, [PROMPTS[0], long], 4, 14), expected)
    assert len(expected[1].outputs[3].token_ids) == 14 and crowded.stats()["preemptions"] > 0
    assert_idle(crowded)
    crowded.close()


@pytest.mark.slow
def test_a_search_that_outgrows_the_pool_fails_alone(params: Params, llm: LLM) -> None:
    small = LLM(params, **vars(dataclasses.replace(CROWDED, num_blocks=8)))
    good, bad = beams(small, [PROMPTS[2], PROMPTS[1]], 4, 20, on_error="return")
    assert isinstance(bad.error, CapacityError) and "raise num_blocks" in str(bad.error)
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) >= 12
    assert_same([good], beams(llm, PROMPTS[2], 4, 20))
    assert_idle(small)
    small.close()


@pytest.mark.own_steps
def test_nothing_compiles_for_another_search(llm: LLM) -> None:
    beams(llm, PROMPTS, 2, 12)
    with compiles() as names:
        beams(llm, PROMPTS[::-1], 6, 12, -1.0, "never")
        beams(llm, {"prompt_token_ids": PROMPTS[0], "cache_salt": "a"}, 3, 5, 0.0, True)
    assert names == []


def test_text(params: Params) -> None:
    """Each beam's own, without the EOS."""
    llm = LLM(params, tokenizer=make_tokenizer(), **vars(ROOMY))
    prompts = ["def f(x):", {"prompt": "some text"}, PROMPTS[0]]
    outputs = beams(llm, prompts, 3, 12)
    assert [out.prompt for out in outputs] == ["def f(x):", "some text", None]
    found = [beam for out in outputs for beam in out.outputs]
    assert {beam.finish_reason for beam in found} <= {"stop", "length"}
    for beam in found:
        tokens = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        assert beam.text == "".join(chr(32 + token) for token in tokens)
    assert_idle(llm)
    llm.close()
