"""Mamba-2's scan: every implementation against one token at a time in float64. What must not be
read is NaN.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import row_chunks, state_kernels
from kernels_pallas.mamba2 import IMPLEMENTATIONS, reference, triton, xla
from kernels_pallas.mamba2.interface import Shapes
from kernels_pallas.mamba2.xla import CHUNK
from kernels_pallas.packed_rows import PackedRows
from tests.kernels import aot_cuda
from tests.kernels.bounds import again, over
from tests.kernels.test_gated_delta import (
    LENGTHS,
    SLOT_MISTAKES,
    SLOTS,
    STARTS,
    rows_at,
    rows_of,
    slots_read,
)

H, G, P, N = 6, 2, 64, 16
SHAPES = Shapes(num_heads=H, num_groups=G, head_dim=P, state_dim=N)


class Case(NamedTuple):
    """x, g, b and c of packed tokens, a pool and the rows."""

    tokens: tuple[np.ndarray, ...]
    pool: np.ndarray
    rows: PackedRows


def make(lengths: list[int], starts: list[int], padding: int, seed: int = 7) -> Case:
    """Heads that forget within a token, and others that remember hundreds."""
    rng, rows = np.random.default_rng(seed), rows_of(lengths, starts)
    total = sum(lengths)
    g = -rng.exponential(1.0, (total, H)) * np.logspace(-4, 1, H)
    g[3::40] = -50.0  # a token that forgets all before it
    b, c = rng.standard_normal((2, total, G, N))
    x = rng.standard_normal((total, H, P))
    tokens = tuple(
        np.concatenate([part, np.full((padding, *part.shape[1:]), np.nan)]).astype(np.float32)
        for part in (x, g, b, c)
    )
    pool = np.full((SLOTS, H, P, N), np.nan, np.float32)
    for slot in slots_read(rows):
        pool[slot] = rng.standard_normal(pool.shape[1:])
    return Case(tokens, pool, rows)


def check(case: Case, y: Any, pool: Any) -> None:
    """y and all of the pool are the definition's, NaN where that is."""
    x, g, b, c = case.tokens
    wanted_y, wanted_pool = reference.prefill(x, g, b, c, case.pool, case.rows, exact=True)
    np.testing.assert_allclose(y, wanted_y, atol=1e-5 * np.abs(wanted_y).max(), rtol=0)
    largest = np.nanmax(np.abs(wanted_pool))
    np.testing.assert_allclose(pool, wanted_pool, atol=1e-5 * largest, rtol=0)


def runnable(name: str) -> Any:
    """The module of a name; the test is skipped where it cannot run."""
    module = IMPLEMENTATIONS[name].module()
    if (reason := module.unsupported(SHAPES, jax.devices()[0])) is not None:
        pytest.skip(reason)
    return module


def prefill(case: Case, name: str = "xla") -> Any:
    run = jax.jit(runnable(name).prefill)
    return run(*map(jnp.asarray, case.tokens), case.pool, case.rows)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_prefill_is_the_definition(name: str) -> None:
    case = make(LENGTHS, STARTS, padding=13)
    check(case, *prefill(case, name))


def steps() -> Case:
    """A token a row, one of which is not kept, and two empty rows."""
    case = make([1, 1, 1, 1, 0, 0], [0, 5, 191, 63, 64, 0], padding=2)
    write = np.where(np.arange(6) == 3, SLOTS, case.rows.write_S)
    return case._replace(rows=case.rows._replace(write_S=write))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_decode_is_the_definition(name: str) -> None:
    case = steps()
    check(case, *jax.jit(runnable(name).decode)(*case.tokens, case.pool, case.rows))


# What the kernel of a step says, and a mistake in its place.
STEP_MISTAKES = {
    "all rows of a state are those of the first program": ("part * block + jnp", "jnp"),
    "heads take groups by turns": ("lax.div(head, H // G)", "lax.rem(head, G)"),
    "padding has a result": ("jnp.where(is_token, y, 0.0)", "y"),
}


@pytest.mark.parametrize("mistake", [*SLOT_MISTAKES, *STEP_MISTAKES])
def test_a_mistake_in_a_step_fails(mistake: str) -> None:
    case = steps()
    if mistake in SLOT_MISTAKES:
        module = over(triton, again(state_kernels, *SLOT_MISTAKES[mistake]))
    else:
        module = again(triton, *STEP_MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check(case, *jax.jit(module.decode)(*case.tokens, case.pool, case.rows))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_step_is_one_kernel_on_cuda() -> None:
    """XLA's reads the rows' states and writes them as arrays of their own."""
    case = steps()
    args = (*case.tokens, case.pool, case.rows)
    states = f"tensor<{len(case.rows.start_S)}x{H}x{P}x{N}xf32>"
    assert states in aot_cuda.lower(xla.decode, *args)
    text = aot_cuda.lower(triton.decode, *args)
    assert text.count("@__gpu$xla.gpu.triton(") == 1 and states not in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"state_dim": 24}, "state_dim 24: only powers"), ({"head_dim": 8}, "head_dim 8")],
)
def test_what_is_no_power_of_two_is_left_to_xla(changes: dict[str, int], reason: str) -> None:
    assert triton.unsupported(SHAPES, None) is None
    found = triton.unsupported(dataclasses.replace(SHAPES, **changes), None)
    assert found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"state_dim": 24}, "state_dim 24: only multiples of 16"), ({"head_dim": 6}, "head_dim 6")],
)
def test_what_no_tile_divides_is_left_to_xla(changes: dict[str, int], reason: str) -> None:
    found = IMPLEMENTATIONS["native"].module().unsupported(SHAPES, jax.devices()[0])
    shapes = dataclasses.replace(SHAPES, **changes)
    assert IMPLEMENTATIONS["native"].module().unsupported(shapes, None).startswith(reason)
    assert found is None or "multiples" not in found
    assert not IMPLEMENTATIONS["xla"].is_batch_invariant()


def test_bits_of_single_tokens_are_those_of_many() -> None:
    """By the C++ kernel: cut anywhere, beside other rows."""
    assert (runnable("native").batch_invariant(), IMPLEMENTATIONS["native"].platforms) == (
        True,
        ("cpu",),
    )
    whole = make([70, 0], [0, 0], padding=0)
    y, pool = prefill(whole, "native")
    other = make([9, 0], [9, 0], padding=0, seed=8)
    states, at, found = np.where(np.isnan(other.pool), 0, other.pool), 0, []
    for length in (1, 1, 7, 1, 33, 1, 26):
        mine = (part[at : at + length] for part in whole.tokens)
        tokens = [np.concatenate(x) for x in zip(other.tokens, mine, strict=True)]
        rows = rows_at([0, 9, 9 + length], [9, at], [8, 5 if at else SLOTS], [2, 5])
        y_step, states = prefill(Case(tuple(tokens), np.asarray(states), rows), "native")
        found.append(np.asarray(y_step)[9:])
        at += length
    np.testing.assert_array_equal(np.concatenate(found), y)
    np.testing.assert_array_equal(np.asarray(states)[5], np.asarray(pool)[0])


def test_bits_do_not_depend_on_the_batch_or_on_the_chunk_where_a_step_begins() -> None:
    whole = make([150, 0], [0, 0], padding=10)  # all of one shape: compiled once
    y, pool = prefill(whole)
    # The same tokens in two steps, cut at the end of a chunk, the second beside another row.
    first = tuple(np.concatenate([x[:CHUNK], x[150:], x[:86]]) for x in whole.tokens)
    y_first, pool_first = prefill(Case(first, whole.pool, rows_of([CHUNK, 0], [0, 0])))
    other = make([74, 0], [9, 0], padding=0, seed=8)
    states = np.where(np.isnan(other.pool), 0, other.pool)
    states[5] = np.asarray(pool_first)[0]
    second = tuple(
        np.concatenate([theirs, ours[CHUNK:150]])
        for theirs, ours in zip(other.tokens, whole.tokens, strict=True)
    )
    rows = rows_at([0, 74, 160], [9, CHUNK], [8, 5], [2, 1])
    y_second, pool_second = prefill(Case(second, states, rows))
    np.testing.assert_array_equal(np.concatenate([y_first[:CHUNK], y_second[74:]]), y[:150])
    np.testing.assert_array_equal(np.asarray(pool_second)[1], np.asarray(pool)[0])


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_the_dense_form_is_the_definition(tokens: int) -> None:
    cases = [make([tokens], [0], padding=0, seed=seed) for seed in (1, 2)]
    batch = [np.stack(pair) for pair in zip(*(case.tokens for case in cases), strict=True)]
    y, state = jax.jit(xla.dense)(*map(jnp.asarray, batch), jnp.zeros((2, H, P, N)))
    for i, case in enumerate(cases):
        pool = case.pool.copy()
        pool[0] = state[i]
        check(case, y[i], pool)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_chunks_and_steps_are_lowered_for_chips(platform: str) -> None:
    case = make([1, 1, 1, 0], [0, 5, 9, 0], padding=1)
    args = (*case.tokens, case.pool, case.rows)
    for form in (xla.prefill, xla.decode):
        module = jax.export.export(jax.jit(form), platforms=[platform])(*args)
        assert module.platforms == (platform,) and "dot_general" in module.mlir_module()


def test_the_dense_form_can_be_differentiated() -> None:
    case = make([70], [0], padding=0)
    tokens = [jnp.asarray(x) for x in case.tokens]

    def one_by_one(*tokens: Any) -> Any:
        def step(state: Any, token: Any) -> Any:
            x, g, b, c = token
            b, c = (jnp.repeat(part, H // G, axis=0) for part in (b, c))
            state = state * jnp.exp(g)[:, None, None] + x[:, :, None] * b[:, None, :]
            return state, jnp.einsum("hpn,hn->hp", state, c)

        return jnp.sum(jax.lax.scan(step, jnp.zeros((H, P, N)), tokens)[1] ** 2)

    def in_chunks(*tokens: Any) -> Any:
        x, g, b, c = (part[None] for part in tokens)
        return jnp.sum(xla.dense(x, g, b, c, jnp.zeros((1, H, P, N)))[0] ** 2)

    both = (jax.jit(jax.grad(form, argnums=(0, 1, 2, 3))) for form in (in_chunks, one_by_one))
    for ours, theirs in zip(*(gradient(*tokens) for gradient in both), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


MUTATIONS = {
    "a row begins with the state of the row before it": ("chunks_of", "is_first_N", jnp.zeros_like),
    "a row's state is that before its last chunk": ("chunks_of", "is_last_N", lambda x: x & False),
    "the state does not decay over a chunk": ("_within", "decay", jnp.ones_like),
    "heads take groups backwards": ("_within", "queries", lambda x: x[:, ::-1]),
    "what comes of the state does not decay": ("_within", "grown", jnp.ones_like),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_fails_the_comparison(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, field, change = MUTATIONS[mutation]
    module = row_chunks if function == "chunks_of" else xla
    original = getattr(module, function)

    def wrong(*args: Any) -> Any:
        result = original(*args)
        if function == "chunks_of":
            chunks, *others = result
            return chunks._replace(**{field: change(getattr(chunks, field))}), *others
        return result._replace(**{field: change(getattr(result, field))})

    monkeypatch.setattr(module, function, wrong)
    case = make([65, 0, 70], [0, 3, 70], padding=5)
    with pytest.raises(AssertionError):
        check(case, *jax.jit(lambda *x: xla.prefill(*x))(*case.tokens, case.pool, case.rows))
