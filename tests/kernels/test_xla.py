"""The XLA implementation under the shared suite, and the edges that its own tiling makes."""

import dataclasses

import numpy as np
import pytest

from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.cases import DECODE, PREFILL, Case
from tests.kernels.suite import PagedAttentionSuite, build, call, check


class TestXla(PagedAttentionSuite):
    implementation = xla


@pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=str)
def test_nothing_to_do(case: Case) -> None:
    """Padding rows only: no work item exists, zeros come out."""
    inputs = build(case)
    idle = dataclasses.replace(inputs, context_lens=0 * inputs.context_lens)
    if inputs.query_starts is not None:
        idle = dataclasses.replace(idle, query_starts=0 * inputs.query_starts)
    result = np.asarray(call(xla, case, idle))
    assert result.shape == inputs.q.shape and not result.any()


def test_one_row_fills_many_iterations() -> None:
    """One long row among short ones: its tiles spread over iterations, and its partial results meet again."""
    check(xla, Case(name="skewed", contexts=(3, 0, 0, 4000, 0, 1, 0, 65), P=16, D=16, num_layers=1, layer=0))


def test_one_prompt_of_many_query_tiles() -> None:
    check(xla, Case(name="long", contexts=(520, 0), queries=(520, 0), H=2, K=1, D=16, P=16, sliding_window=130))


@pytest.mark.parametrize("sliding_window", [None, 50])
def test_prefill_of_a_query_is_bitwise_the_same_in_any_batch(sliding_window: int | None) -> None:
    """Whole, in chunks, alone or among others (at one padded shape): what deterministic serving will rest on."""
    T, S, contexts = 160, 4, (120, 90)
    case = Case(name="batches", contexts=contexts, queries=contexts, P=16, sliding_window=sliding_window)
    inputs = build(case, poison=False)
    first = (0, 120)  # each row's first packed token in `inputs`

    def run(*rows: tuple[int, int, int]) -> dict[tuple[int, int], np.ndarray]:
        """rows: (row, context, queries). Results by (row, position)."""
        asked = [(row, p) for row, context, queries in rows for p in range(context - queries, context)]
        q = np.zeros((T, case.H, case.D), np.float32)
        q[: len(asked)] = [inputs.q[first[row] + p] for row, p in asked]
        batch = dataclasses.replace(
            inputs,
            q=q,
            block_table=np.stack([inputs.block_table[rows[i][0] if i < len(rows) else 0] for i in range(S)]),
            context_lens=np.array([context for _, context, _ in rows] + [0] * (S - len(rows)), np.int32),
            query_starts=np.cumsum([0, *(n for *_, n in rows), *[0] * (S - len(rows))]).astype(np.int32),
        )
        return dict(zip(asked, np.asarray(call(xla, case, batch)), strict=False))

    whole = run((0, 120, 120))
    for other in (run((1, 90, 90), (0, 120, 37)), run((0, 120, 1), (1, 60, 3)), run((0, 70, 70), (1, 90, 5))):
        shared = whole.keys() & other.keys()
        assert shared and all(np.array_equal(whole[k], other[k]) for k in shared)
