"""The gated delta rule and the short convolution: every implementation against one token at a time
in float64. What must not be read is NaN.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import row_chunks, short_conv, state_kernels
from kernels_pallas.gated_delta import IMPLEMENTATIONS, reference, triton, xla
from kernels_pallas.gated_delta.interface import Shapes
from kernels_pallas.gated_delta.xla import CHUNK
from kernels_pallas.packed_rows import PackedRows
from tests.kernels import aot_cuda
from tests.kernels.bounds import again, over

HK, HV, DK, DV, SLOTS = 2, 6, 16, 64, 9  # DV: two programs of a step's kernel
LENGTHS = [65, 0, 1, 64, 63, 130, 0]
STARTS = [0, 5, 191, 0, 64, 70, 0]  # position of each row's first token
SHAPES = Shapes(num_key_heads=HK, num_value_heads=HV, key_dim=DK, value_dim=DV)


class Case(NamedTuple):
    """q, k, v, g and beta of packed tokens, a pool and the rows."""

    tokens: tuple[np.ndarray, ...]
    pool: np.ndarray
    rows: PackedRows


def rows_of(lengths: list[int], starts: list[int]) -> PackedRows:
    """Rows that read slots from the end of the pool down, where they do not begin, and write slots
    from 0 on; the third row writes the slot that it reads.
    """
    loc = np.concatenate([[0], np.cumsum(lengths)])
    count = np.arange(len(lengths))
    read = np.where(np.array(starts) > 0, SLOTS - 1 - count % 4, SLOTS)
    write = np.where(count == 2, read, count)
    return rows_at(loc, starts, read, write)


def rows_at(*places: Any) -> PackedRows:
    """Rows of query_start_loc, starts, and slots read and written."""
    arrays: list[Any] = [np.asarray(x, np.int32) for x in places]
    return PackedRows(*arrays)


def slots_read(rows: PackedRows) -> set[int]:
    """The slots that rows with tokens read."""
    read, lengths = np.asarray(rows.read_S), np.asarray(rows.lengths_S)
    return set(read[(read < SLOTS) & (lengths > 0)].tolist())


def make(
    lengths: list[int], starts: list[int], padding: int, keys: str = "random", channels: int = 1
) -> Case:
    rng, rows = np.random.default_rng(7), rows_of(lengths, starts)
    total = sum(lengths)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = unit(total, HK, DK) * DK**-0.5, unit(total, HK, DK)
    g, beta = -rng.exponential(0.3, (total, HV, channels)), rng.uniform(0, 1, (total, HV))
    g[3::40] = -50.0  # a token that forgets all before it
    g[70:90, :, ::3] = -5.0  # as much as a chunk of 64 may not divide by
    if keys == "equal":  # the case in which an inverse by products of powers overflows
        k[:], g[:], beta[:] = k[0] + 1e-4 * k, -1e-4, 0.999
    v = rng.standard_normal((total, HV, DV))
    tokens = tuple(
        np.concatenate([x, np.full((padding, *x.shape[1:]), np.nan)]).astype(np.float32)
        for x in (q, k, v, g, beta)
    )
    pool = np.full((SLOTS, HV, DK, DV), np.nan, np.float32)
    for slot in slots_read(rows):
        pool[slot] = rng.standard_normal(pool.shape[1:])
    return Case(tokens, pool, rows)


def steps(channels: int) -> Case:
    """A token a row, one of which is not kept, and two empty rows."""
    case = make([1, 1, 1, 1, 0, 0], [0, 5, 191, 63, 64, 0], padding=2, channels=channels)
    write = np.where(np.arange(6) == 3, SLOTS, case.rows.write_S)
    return case._replace(rows=case.rows._replace(write_S=write))


def check(case: Case, o: Any, pool: Any, tolerance: float = 1e-5) -> None:
    """o and all of the pool are the definition's, NaN where that is."""
    q, k, v, g, beta = case.tokens
    wanted = reference.prefill(q, k, v, g, beta, case.pool, case.rows, exact=True)
    wanted_o, wanted_pool = wanted
    np.testing.assert_allclose(o, wanted_o, atol=tolerance * np.abs(wanted_o).max(), rtol=0)
    largest = np.nanmax(np.abs(wanted_pool))
    np.testing.assert_allclose(pool, wanted_pool, atol=tolerance * largest, rtol=0)


def runnable(name: str) -> Any:
    """The module of a name; the test is skipped where it cannot run."""
    module = IMPLEMENTATIONS[name].module()
    if (reason := module.unsupported(SHAPES, jax.devices()[0])) is not None:
        pytest.skip(reason)
    return module


def prefill(name: str, case: Case) -> Any:
    return compiled(name)(*case.tokens, case.pool, case.rows)


@functools.cache
def compiled(name: str) -> Any:
    return jax.jit(runnable(name).prefill)


CHANNELS = pytest.mark.parametrize("channels", [1, DK], ids=["by head", "by channel"])


@CHANNELS
@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_prefill_is_the_definition(name: str, keys: str, channels: int) -> None:
    case = make(LENGTHS, STARTS, padding=13, keys=keys, channels=channels)
    check(case, *prefill(name, case))


@CHANNELS
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_decode_is_the_definition(name: str, channels: int) -> None:
    case = steps(channels)
    check(case, *jax.jit(runnable(name).decode)(*case.tokens, case.pool, case.rows))


# What reads and writes slots says, and a mistake in its place.
SLOT_MISTAKES = {
    "a row begins with what lies in a slot": ("begins & is_slot", "begins"),
    "what is kept nowhere is written": ("ends & is_slot", "ends"),
    "an empty row writes": ("ends & is_slot", "is_slot"),
}
# What the kernel of a step says.
STEP_MISTAKES = {
    "all columns are those of the first program": ("part * columns + jnp", "jnp"),
    "value heads take key heads by turns": ("lax.div(head, Hv // Hk)", "lax.rem(head, Hk)"),
    "all channels decay as one": ("g_ref.shape[2] > 1", "g_ref.shape[2] < 1"),
}


@pytest.mark.parametrize("mistake", [*SLOT_MISTAKES, *STEP_MISTAKES])
def test_a_mistake_in_a_step_fails(mistake: str) -> None:
    case = steps(DK)
    if mistake in SLOT_MISTAKES:
        module = over(triton, again(state_kernels, *SLOT_MISTAKES[mistake]))
    else:
        module = again(triton, *STEP_MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check(case, *jax.jit(module.decode)(*case.tokens, case.pool, case.rows))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@CHANNELS
def test_a_step_is_one_kernel_on_cuda(channels: int) -> None:
    """XLA's reads the rows' states and writes them as arrays of their own."""
    case = steps(channels)
    args = (*case.tokens, case.pool, case.rows)
    states = f"tensor<{len(case.rows.start_S)}x{HV}x{DK}x{DV}xf32>"
    assert states in aot_cuda.lower(xla.decode, *args)
    text = aot_cuda.lower(triton.decode, *args)
    assert text.count("@__gpu$xla.gpu.triton(") == 1 and states not in text


@CHANNELS
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bits_do_not_depend_on_the_batch_or_on_where_a_step_begins(
    name: str, channels: int
) -> None:
    # All of one shape: compiled once.
    whole = make([150, 0], [0, 0], padding=10, channels=channels)
    o, pool = prefill(name, whole)
    # The same tokens in two steps, cut at the end of a chunk, the second beside another row.
    first = tuple(np.concatenate([x[:CHUNK], x[150:], x[:86]]) for x in whole.tokens)
    o_first, pool_first = prefill(name, Case(first, whole.pool, rows_of([CHUNK, 0], [0, 0])))
    other = make([74, 0], [9, 0], padding=0, channels=channels)
    states = np.where(np.isnan(other.pool), 0, other.pool)
    states[5] = np.asarray(pool_first)[0]
    second = tuple(
        np.concatenate([theirs, ours[CHUNK:150]])
        for theirs, ours in zip(other.tokens, whole.tokens, strict=True)
    )
    rows = rows_at([0, 74, 160], [9, CHUNK], [8, 5], [2, 1])
    o_second, pool_second = prefill(name, Case(second, states, rows))
    np.testing.assert_array_equal(np.concatenate([o_first[:CHUNK], o_second[74:]]), o[:150])
    np.testing.assert_array_equal(np.asarray(pool_second)[1], np.asarray(pool)[0])


@CHANNELS
@pytest.mark.parametrize(
    "name", [x for x in IMPLEMENTATIONS if IMPLEMENTATIONS[x].is_batch_invariant()]
)
def test_bits_do_not_depend_on_any_cut(name: str, channels: int) -> None:
    """A prompt in one step, and token after token beside another row."""
    whole = make([9, 3], [0, 0], padding=0, channels=channels)
    o, pool = prefill(name, whole)
    states, outputs = whole.pool, []
    for t in range(9):
        at = [t, 9 + min(t, 2)]
        one = Case(
            tuple(x[at] for x in whole.tokens),
            states,
            rows_of([1, 1], [t, 0])._replace(
                read_S=np.array([0 if t else SLOTS, SLOTS], np.int32),
                write_S=np.array([0, 1], np.int32),
            ),
        )
        step = jax.jit(runnable(name).decode)
        o_one, states = step(*one.tokens, one.pool, one.rows)
        outputs.append(o_one[0])
    np.testing.assert_array_equal(np.stack(outputs), o[:9])
    np.testing.assert_array_equal(np.asarray(states)[0], np.asarray(pool)[0])


@CHANNELS
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_the_dense_form_is_the_definition(tokens: int, channels: int) -> None:
    cases = [
        make([tokens], [0], padding=0, keys=keys, channels=channels) for keys in ("random", "equal")
    ]
    batch = [np.stack(pair) for pair in zip(*(case.tokens for case in cases), strict=True)]
    zeros = np.zeros((2, HV, DK, DV), np.float32)
    o, state = jax.jit(xla.dense)(*batch, zeros)
    for i, case in enumerate(cases):
        pool = case.pool.copy()
        pool[0] = state[i]
        check(case, o[i], pool)


@CHANNELS
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_chunks_and_steps_are_lowered_for_chips(platform: str, channels: int) -> None:
    case = make([1, 1, 1, 0], [0, 5, 9, 0], padding=1, channels=channels)
    args = (*case.tokens, case.pool, case.rows)
    for form in (xla.prefill, xla.decode):
        module = jax.export.export(jax.jit(form), platforms=[platform])(*args)
        assert module.platforms == (platform,) and "dot_general" in module.mlir_module()


@CHANNELS
def test_the_dense_form_can_be_differentiated(channels: int) -> None:
    case = make([90], [0], padding=0, channels=channels)
    tokens = [
        jnp.asarray(x[:, :HK] if i > 2 else x[:, :HK, :8] if i == 2 else x)
        for i, x in enumerate(case.tokens)
    ]

    def one_by_one(*tokens: Any) -> Any:
        def step(state: Any, token: Any) -> Any:
            q, k, v, g, beta = token
            state = state * jnp.exp(g)[:, :, None]
            change = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * change[:, None, :]
            return state, jnp.einsum("hkv,hk->hv", state, q)

        return jnp.sum(jax.lax.scan(step, jnp.zeros((HK, DK, 8)), tokens)[1] ** 2)

    wanted = jax.jit(jax.grad(one_by_one, argnums=(0, 1, 2, 3, 4)))(*tokens)

    def in_chunks(*tokens: Any) -> Any:
        q, k, v, g, beta = (x[None] for x in tokens)
        return jnp.sum(xla.dense(q, k, v, g, beta, jnp.zeros((1, HK, DK, 8)))[0] ** 2)

    got = jax.jit(jax.grad(in_chunks, argnums=(0, 1, 2, 3, 4)))(*tokens)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def conv_by_loops(x: np.ndarray, weight: np.ndarray, pool: np.ndarray, rows: PackedRows) -> Any:
    """The definition of the short convolution, in float64."""
    taps, y, after = weight.shape[1], np.zeros(x.shape), pool.copy()
    for s in range(len(rows.start_S)):
        begin, end = rows.query_start_loc_S1[s], rows.query_start_loc_S1[s + 1]
        if begin == end:
            continue
        held = rows.read_S[s] < len(pool)
        history = pool[rows.read_S[s]] if held else np.zeros((taps - 1, x.shape[1]))
        inputs = np.concatenate([history, x[begin:end]]).astype(np.float64)
        for t in range(end - begin):
            y[begin + t] = np.sum(inputs[t : t + taps] * weight.T, axis=0)
        after[rows.write_S[s]] = inputs[end - begin :]
    return y, after


@pytest.mark.parametrize("taps", [2, 4])
def test_the_short_convolution_is_its_definition(taps: int) -> None:
    rng, channels = np.random.default_rng(taps), 5
    lengths = [1, 0, 2, 3, 4, 9, 0]
    rows, total = rows_of(lengths, STARTS), sum(lengths)
    x = rng.standard_normal((total + 3, channels)).astype(np.float32)
    x[total:] = np.nan
    weight = rng.standard_normal((channels, taps)).astype(np.float32)
    pool = np.full((SLOTS, taps - 1, channels), np.nan, np.float32)
    for slot in slots_read(rows):
        pool[slot] = rng.standard_normal(pool.shape[1:])
    wanted_y, wanted_pool = conv_by_loops(x, weight, pool, rows)
    y, after = jax.jit(short_conv.packed)(x, weight, pool, rows)
    np.testing.assert_allclose(y[:total], wanted_y[:total], atol=1e-5)
    np.testing.assert_array_equal(after, wanted_pool)
    # One token a row: decode.
    ones = rows_of([1, 1, 1, 0], [0, 5, 9, 4])
    pool = rng.standard_normal(pool.shape).astype(np.float32)
    wanted_y, wanted_pool = conv_by_loops(x[:4], weight, pool, ones)
    y, after = jax.jit(short_conv.decode)(x[:4], weight, pool, ones)
    np.testing.assert_allclose(y[:3], wanted_y[:3], atol=1e-5)
    np.testing.assert_array_equal(after, wanted_pool)


MUTATIONS = {
    "a row begins with the state of the row before it": ("chunks_of", "is_first_N", jnp.zeros_like),
    "a row's state is that before its last chunk": ("chunks_of", "is_last_N", lambda x: x & False),
    "the state does not decay over a chunk": ("_within", "decay", jnp.ones_like),
    "channels decay in another order": ("_scores_by_channel", "to_last", lambda x: x[..., ::-1]),
    "value heads take key heads backwards": ("_within", "queries", lambda x: x[:, ::-1]),
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
    channels = DK if function == "_scores_by_channel" else 1
    case = make([65, 0, 70], [0, 3, 70], padding=5, channels=channels)
    with pytest.raises(AssertionError):
        check(case, *jax.jit(lambda *x: xla.prefill(*x))(*case.tokens, case.pool, case.rows))


def test_a_chunk_is_inverted_without_a_loop() -> None:
    """A GPU would be launched for each turn of a loop; and the result is the inverse."""
    below = np.tril(np.random.default_rng(1).uniform(-0.3, 0.3, (2, 3, CHUNK, CHUNK)), -1)
    found = xla._inverse(jnp.asarray(below, jnp.float32))
    exact = np.linalg.inv(np.eye(CHUNK) + below)
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()
    traced = str(jax.make_jaxpr(xla._inverse)(found))
    assert "dot_general" in traced and "while" not in traced and "scan" not in traced
