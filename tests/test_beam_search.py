"""Beam search: transformers' own beams and scores, from tests/golden/beams.json."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

import jpaged
from jpaged import EngineConfig, Params, RequestOutput
from tests.golden.reference import BeamCase, load, load_beams

# Blocks of 4 tokens: beams part in the middle of blocks, and share those before it. One prefill and one decode shape.
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


def calls() -> list[list[BeamCase]]:
    """Each case alone, and all that agree in their settings. Sorted, for jpaged keeps the engines of few eos ids."""
    groups: dict[tuple[object, ...], list[BeamCase]] = {}
    for case in load_beams():
        groups.setdefault(settings(case), []).append(case)
    alone = [[case] for group in groups.values() for case in group]
    together = [group for group in groups.values() if len(group) > 1]
    return sorted(alone + together, key=lambda cases: (cases[0].config, cases[0].eos_token_ids))


@pytest.fixture(scope="module")
def params_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Params]:
    """Params of a golden model by name, loaded once."""
    return functools.cache(lambda name: jpaged.load_params(load(name).write(tmp_path_factory.mktemp(name))))


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
        assert beam.token_logprobs.dtype == np.float32 and beam.token_logprobs.shape == (len(beam.token_ids),)
        assert beam.cumulative_logprob == pytest.approx(float(beam.token_logprobs.sum()), rel=0, abs=1e-4)
        assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** case.length_penalty)


@pytest.mark.parametrize("cases", calls(), ids=label)
def test_equals_transformers(params_of: Callable[[str], Params], cases: list[BeamCase]) -> None:
    """Several prompts twice as well: then there are more beams than rows, and some searches wait for others."""
    params = params_of(cases[0].config)
    for batch in [cases] if len(cases) == 1 else [cases, cases * 2]:
        outs = search(params, [case.prompt for case in batch], batch[0])
        for out, case in zip(outs, batch, strict=True):
            check(out, case)
