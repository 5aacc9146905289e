"""The XLA implementation under the shared suite, and the edges that its own tiling makes."""

import dataclasses

import numpy as np
import pytest

from kernels_pallas.paged_attention import xla
from scripts._attention_cases import (
    DECODE,
    LATENT_IN_8_BITS,
    NARROW_IN_8_BITS,
    PREFILL,
    SCALED,
    Case,
)
from tests.kernels.suite import PagedAttentionSuite, build, call, check, check_bits_in_any_batch


class TestXla(PagedAttentionSuite):
    implementation = xla


class TestScaled(PagedAttentionSuite):
    implementation = xla
    cases = (
        *SCALED,
        *NARROW_IN_8_BITS,
        *LATENT_IN_8_BITS,
        *(dataclasses.replace(c, name=c.name + "_f32", dtype="float32") for c in SCALED),
    )
    plain_cases = (SCALED[0], SCALED[3])


@pytest.mark.parametrize(
    ("contexts", "queries", "window", "dtype"),
    [
        ((1, 0, 65, 130, 8), (1, 0, 65, 130, 8), None, "float32"),
        ((1, 0, 65, 230, 8), (1, 0, 65, 230, 8), 21, "float32"),
        ((70, 9, 200), (3, 9, 65), None, "float32"),  # the ends of sequences
        ((70, 9, 200), (3, 9, 65), 33, "bfloat16"),
    ],
)
def test_queries_that_see_both_ways(
    contexts: tuple[int, ...], queries: tuple[int, ...], window: int | None, dtype: str
) -> None:
    check(
        xla,
        Case(
            name="both ways",
            contexts=contexts,
            queries=queries,
            sliding_window=window,
            causal=False,
            extra_tokens=5,
            dtype=dtype,
        ),
    )


@pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=str)
def test_nothing_to_do(case: Case) -> None:
    """Padding rows only: no work item exists, zeros come out."""
    inputs = build(case)
    idle = dataclasses.replace(inputs, context_lens=0 * inputs.context_lens)
    if inputs.query_start_loc is not None:
        idle = dataclasses.replace(idle, query_start_loc=0 * inputs.query_start_loc)
    result = np.asarray(call(xla, case, idle))
    assert result.shape == inputs.q.shape and not result.any()


def test_one_row_fills_many_iterations() -> None:
    """One long row among short ones: its tiles spread over iterations, and its partial results meet
    again.
    """
    check(
        xla,
        Case(
            name="skewed", contexts=(3, 0, 0, 4000, 0, 1, 0, 65), P=16, D=16, num_layers=1, layer=0
        ),
    )


def test_one_prompt_of_many_query_tiles() -> None:
    check(
        xla,
        Case(
            name="long",
            contexts=(520, 0),
            queries=(520, 0),
            H=2,
            K=1,
            D=16,
            P=16,
            sliding_window=130,
        ),
    )


@pytest.mark.parametrize("sliding_window", [None, 50])
def test_prefill_of_a_query_is_bitwise_the_same_in_any_batch(sliding_window: int | None) -> None:
    check_bits_in_any_batch(xla, sliding_window=sliding_window)
