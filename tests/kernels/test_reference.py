"""The reference against a dense softmax written apart; the suite's checks against implementations
that are wrong.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from kernels_pallas.paged_attention import reference
from scripts._attention_cases import DECODE, PREFILL, Case
from tests.kernels.suite import CASES, build, call, check


def right(age: np.ndarray, position: np.ndarray, case: Case) -> np.ndarray:
    return (age >= 0) & (age < (case.sliding_window or age.max() + 1))


def dense(
    case: Case,
    values: Literal["random", "coded"] = "random",
    *,
    visible: Callable[[np.ndarray, np.ndarray, Case], np.ndarray] = right,
    spread: Callable[..., np.ndarray] = np.repeat,
    scale: float = 1.0,
    has_sinks: bool = True,
    more: int = 0,
) -> np.ndarray:
    """Whole score matrices with masks, in float64, over blocks laid end to end; the options are
    there to get it wrong.

    visible(age, position, case) [queries, context + 1]: age is how many tokens the key is older
    than the query, and the last key is one past the context. spread gives each query head its KV
    head. has_sinks: False leaves them out. more: tokens after an image that its tokens see, too.
    """
    inputs = build(case, values=values, poison=False)
    N = inputs.pool.shape[0] // case.num_layers
    _, of_value = case.options.attention.places(case.D)
    width = case.options.attention.value_width(case.D)
    out = np.zeros((*inputs.q.shape[:2], width))
    start = 0
    for row, (context, queries) in enumerate(zip(case.contexts, case.query_lens, strict=True)):
        rows = slice(row, row + queries) if case.queries is None else slice(start, start + queries)
        start += queries
        blocks = [inputs.pool[case.layer * N + b] for b in (*inputs.block_table[row], 0)]
        kv = (
            np.concatenate(blocks)[: context + 1]
            .astype(np.float64)
            .reshape(context + 1, case.K, -1)
        )
        kv = spread(kv.transpose(1, 0, 2), case.H // case.K, 0)
        k, v = kv[..., : case.D], kv[..., of_value]
        scores = (
            np.einsum("qhd,hkd->hqk", inputs.q[rows].astype(np.float64), k)
            * scale
            / np.sqrt(case.D)
        )
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        position = np.arange(context + 1)[None, :]
        age = (context - queries + np.arange(queries))[:, None] - position
        weights = np.zeros(scores.shape)
        if queries:
            seen = visible(age, position, case) != 0
            for of_row, first, end in case.images:
                of_image = (age + position >= first) & (age + position < end) & (of_row == row)
                seen = seen | (of_image & (age < 0) & (position < end + more))
            weights = np.exp(scores) * seen
        sink = 0.0
        if inputs.sinks is not None and has_sinks:
            sink = np.exp(inputs.sinks.astype(np.float64))[:, None, None]
        weights /= np.maximum(weights.sum(-1, keepdims=True) + sink, 1e-300)
        out[rows] = np.einsum("hqk,hkd->qhd", weights, v)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_a_dense_softmax(case: Case) -> None:
    exact = call(reference, case, build(case), exact=True)
    assert np.abs(exact - dense(case)).max() < 1e-12
    check(reference, case)


def test_cases_cover_what_they_should() -> None:
    for cases in (DECODE, PREFILL):
        assert {c.H // c.K for c in cases} >= {1, 2, 4, 7, 8}
        assert {c.dtype for c in cases} == {"float32", "bfloat16"}
        assert {c.P for c in cases} >= {1, 4, 64, 256}
        assert any(c.sliding_window for c in cases) and any(c.soft_cap for c in cases)
        assert any(c.sinks for c in cases)
        assert {1, cases[0].P - 1, cases[0].P, cases[0].P + 1, 0} <= set(cases[0].contexts)


def fake(case: Case, values: Any, **options: Any) -> Any:
    """An implementation that knows only this call: the dense result, rounded to the case's
    dtype.
    """
    result = dense(case, values, **options).astype(build(case).q.dtype)
    return SimpleNamespace(prefill=lambda *a, **k: result, decode=lambda *a, **k: result)


WRONG_MASK = {
    "zeros": lambda age, position, case: 0 * age,
    "first page dropped": lambda age, position, case: (age == 0) | (age > 0) & (position >= case.P),
    "later page dropped": lambda age, position, case: (
        (age == 0) | (age > 0) & (position // case.P != 7)
    ),
    "one token dropped": lambda age, position, case: (age == 0) | (age > 0) & (position != 66),
    "first token dropped": lambda age, position, case: (age == 0) | (age > 0) & (position > 0),
    "itself unseen": lambda age, position, case: age > 0,
    "one token too many": lambda age, position, case: age >= -1,
}
WRONG_SCORES = {
    "head order": {"spread": lambda x, n, axis: np.tile(x, (n, 1, 1))},
    "scale": {"scale": 1.05},
}
SINKS = [case for case in CASES if case.sinks]
SOME = [*DECODE[:2], *PREFILL[:2]]


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("values", ["random", "coded"])
def test_checks_accept_what_is_right(values: Any, case: Case) -> None:
    check(fake(case, values), case, values)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize("name", WRONG_MASK)
def test_checks_reject_a_wrong_mask(name: str, values: Any, case: Case) -> None:
    with pytest.raises(AssertionError):
        check(fake(case, values, visible=WRONG_MASK[name]), case, values)


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("name", WRONG_SCORES)
def test_checks_reject_wrong_scores(name: str, case: Case) -> None:
    with pytest.raises(AssertionError):
        check(fake(case, "random", **WRONG_SCORES[name]), case)


@pytest.mark.parametrize("case", SINKS, ids=str)
def test_checks_reject_sinks_left_out(case: Case) -> None:
    with pytest.raises(AssertionError):
        check(fake(case, "random", has_sinks=False), case)


@pytest.mark.parametrize("case", [case for case in CASES if case.images], ids=str)
@pytest.mark.parametrize("by", [-1, 1])
def test_checks_reject_the_end_of_an_image_off_by_one(by: int, case: Case) -> None:
    check(fake(case, "coded"), case, "coded")
    with pytest.raises(AssertionError):
        check(fake(case, "coded", more=by), case, "coded")


@pytest.mark.parametrize("case", [DECODE[3], PREFILL[4]], ids=str)
@pytest.mark.parametrize("by", [-1, 1])
def test_checks_reject_a_window_off_by_one(by: int, case: Case) -> None:
    assert case.sliding_window is not None
    with pytest.raises(AssertionError):
        check(
            fake(
                case,
                "random",
                visible=lambda age, position, case: (age >= 0) & (age < case.sliding_window + by),
            ),
            case,
        )
