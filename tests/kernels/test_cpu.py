"""The C++ kernels of the CPU: paged attention under the shared suite, products against float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_cpu import paged_attention
from kernels_cpu.library import unavailable
from kernels_cpu.linear import NativeProducts, linear
from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes
from scripts._attention_cases import (
    DECODE,
    GPU,
    LATENT_IN_8_BITS,
    NARROW_IN_8_BITS,
    PREFILL,
    SCALED,
    Case,
)
from tests.kernels.suite import PagedAttentionSuite, build, call, check_bits_in_any_batch

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)

# What its own paths add: rows enough that heads go together, groups that are no multiple of a
# register tile, head dimensions of more than one, one tile after another of which the next row's is
# fetched ahead.
OWN = (
    Case(
        name="decode_many_rows_g5",
        contexts=tuple(37 * i % 190 for i in range(40)),
        P=16,
        H=20,
        K=4,
        D=96,
    ),
    Case(
        name="decode_many_rows_g3_window",
        contexts=tuple(range(1, 700, 29)),
        P=64,
        H=6,
        D=64,
        sliding_window=130,
    ),
    Case(name="decode_skewed", contexts=(3, 0, 0, 2000, 0, 1, 0, 65), P=16, num_layers=1, layer=0),
    Case(name="prefill_g50", contexts=(70, 130), queries=(3, 130), H=50, K=1),
    Case(
        name="prefill_g5",
        contexts=(90, 0, 300),
        queries=(90, 0, 211),
        P=64,
        H=10,
        D=96,
        sliding_window=100,
    ),
)

# Every case of any implementation, in bf16, where the head dimension is a multiple of 32.
CASES = [
    dataclasses.replace(case, dtype="bfloat16")
    for case in {c.name: c for c in (*DECODE, *PREFILL, *GPU, *OWN)}.values()
    if case.D % 32 == 0
]


class TestPagedAttention(PagedAttentionSuite):
    implementation = paged_attention
    cases = CASES
    plain_cases = (CASES[0], next(c for c in CASES if c.queries is not None))

    @pytest.mark.parametrize("sliding_window", [None, 50])
    def test_a_querys_bits_do_not_depend_on_its_batch(self, sliding_window: int | None) -> None:
        check_bits_in_any_batch(
            paged_attention, dtype="bfloat16", D=64, sliding_window=sliding_window
        )

    def test_nor_do_those_of_latents(self) -> None:
        """Their query heads are cut into parts by the number of rows."""
        check_bits_in_any_batch(
            paged_attention, dtype="bfloat16", H=20, K=1, D=96, V=64, latent=True
        )


# In 8 bits: the shared cases, and its own paths.
IN_8_BITS = (
    *SCALED,
    *NARROW_IN_8_BITS,
    *(case for case in LATENT_IN_8_BITS if case.D % 32 == 0),
    *(
        dataclasses.replace(PREFILL[-1], name=f"images_{kv_dtype}", kv_dtype=kv_dtype)
        for kv_dtype in ("int8", "float8_e4m3fn")
    ),
    *(
        dataclasses.replace(c, dtype="bfloat16", kv_dtype=d)
        for c, d in zip(OWN, ["int8", "float8_e4m3fn"] * 3, strict=False)
    ),
)


class TestScaled(PagedAttentionSuite):
    implementation = paged_attention
    cases = IN_8_BITS
    plain_cases = (SCALED[0], SCALED[3])

    def test_a_querys_bits_do_not_depend_on_its_batch(self) -> None:
        check_bits_in_any_batch(paged_attention, dtype="bfloat16", D=64, kv_dtype="int8")


@pytest.mark.parametrize("scale", [0.0, -0.125, float("nan")])
def test_a_scale_that_is_not_above_0_is_an_error(scale: float) -> None:
    """Tiles of AMX take the maximum of scores before they scale them."""
    options = Options(attention=AttentionOptions(scale=scale), num_layers=1, num_kv_heads=1)
    shapes = Shapes(num_heads=1, num_kv_heads=1, head_dim=32, block_size=16, dtype=jnp.bfloat16)
    reason = paged_attention.unsupported(shapes, options.attention, None)
    assert reason is not None and f"scale {scale}" in reason
    q, pool = jnp.ones((1, 1, 32), jnp.bfloat16), jnp.ones((1, 16, 2, 32), jnp.bfloat16)
    table, contexts = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*scale {scale:.6f}"):
        paged_attention.decode(q, pool, 0, table, contexts, options=options).block_until_ready()


DECODES = [c for c in (*CASES, *IN_8_BITS) if c.queries is None]


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decode_has_the_bits_of_prefill(case: Case) -> None:
    """So has a token its bits whether it was drawn or is scored."""
    inputs = build(case)
    starts = np.arange(len(case.contexts) + 1, dtype=np.int32)
    packed = dataclasses.replace(inputs, query_start_loc=starts)
    queries = dataclasses.replace(case, queries=(1,) * len(case.contexts))
    one, many = call(paged_attention, case, inputs), call(paged_attention, queries, packed)
    assert np.array_equal(one, many)


LONG = {
    "plain": {"H": 4, "K": 2},
    "many_heads": {"H": 20, "K": 2},
    "window": {"H": 4, "K": 2, "sliding_window": 400},
    "sinks": {"H": 4, "K": 2, "sinks": True},
    "latent": {"H": 20, "K": 1, "D": 96, "V": 64, "latent": True},
    "int8": {"H": 4, "K": 2, "kv_dtype": "int8"},
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_row_has_its_bits_alone(kind: str) -> None:
    """Threads share its context where it is alone, and take rows where there are many."""
    contexts = (700, 300, 640, 1, 513, 512, 257, 90)
    case = Case(name=kind, contexts=contexts, P=16, dtype="bfloat16", **({"D": 64} | LONG[kind]))
    inputs = build(case)
    together = call(paged_attention, case, inputs)
    for row in (0, 4, 5):
        only = {
            name: getattr(inputs, name)[row : row + 1]
            for name in ("q", "block_table", "context_lens")
        }
        alone = dataclasses.replace(case, contexts=contexts[row : row + 1])
        result = call(paged_attention, alone, dataclasses.replace(inputs, **only))
        assert np.array_equal(result[0], together[row])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("decode_bf16", "prefill_bf16")], ids=str
)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_nan_that_is_seen_shows(case: Case, part: str) -> None:
    """Broken weights must not look like an answer."""
    inputs = build(case, poison=False)
    row = next(r for r, n in enumerate(case.contexts) if n == 28)
    block = case.layer * (len(inputs.pool) // case.num_layers) + inputs.block_table[row, 1]
    inputs.pool[block, 3, 0 if part == "key" else 1] = np.nan  # position 11, first KV head
    result = np.asarray(call(paged_attention, case, inputs))
    last = row if inputs.query_start_loc is None else inputs.query_start_loc[row + 1] - 1
    assert (
        np.isnan(result[last, : case.H // case.K]).all()
        and not np.isnan(result[last, case.H // case.K :]).any()
    )
    assert not np.isnan(
        np.delete(result, slice(last - (0 if inputs.query_start_loc is None else 27), last + 1), 0)
    ).any()


@pytest.mark.parametrize("case", [c for c in SCALED if c.kv_dtype == "int8"], ids=str)
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_so_does_one_in_8_bits(case: Case, part: str) -> None:
    """NaN of a query, or of the scale of a key or a value, of the last token of a row. That of a
    value may show in what the row's other tokens attend to.
    """
    inputs = build(case, poison=False)
    row = max(r for r, n in enumerate(case.contexts) if n > 0 and case.query_lens[r] > 0)
    last = row if inputs.query_start_loc is None else inputs.query_start_loc[row + 1] - 1
    if part == "query":
        inputs.q[last, -1, 3] = np.nan
        broken = slice(case.H - 1, None)
    else:
        blocks = len(inputs.pool.values) // case.num_layers
        position = case.contexts[row] - 1
        block = case.layer * blocks + inputs.block_table[row, position // case.P]
        inputs.pool.scales[block, position % case.P, -2 if part == "key" else -1] = np.nan
        broken = slice(case.H - case.H // case.K, None)  # of the last KV head
    result = np.asarray(call(paged_attention, case, inputs)).astype(np.float32)
    assert np.isnan(result[last, broken]).all()
    result[
        slice(last + 1 - case.query_lens[row], last + 1) if part == "value" else last, broken
    ] = 0
    assert not np.isnan(result).any()


def arrays(T: int, N: int, E: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(T + N)
    x, weight = rng.standard_normal((T, E)), rng.standard_normal((N, E)) / E**0.5
    return x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)


# Rows and columns that fill tiles of 4 x 6, 3 x 3 or 32 x 32 and that do not, one of everything;
# more rows than are few, and more than one thread packs.
SHAPES = [
    (1, 2, 32),
    (3, 4, 64),
    (4, 6, 96),
    (8, 14, 512),
    (33, 50, 160),
    (127, 12, 64),
    (300, 26, 128),
    (50, 70, 64),
    (16, 32, 32),
    (150, 8, 2048),
]


@pytest.mark.parametrize(("T", "N", "E"), SHAPES)
def test_linear(T: int, N: int, E: int) -> None:
    x, weight = arrays(T, N, E)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    result = linear(x, weight, T)
    assert result.dtype == jnp.float32 and np.abs(result - exact).max() < 1e-5
    assert np.array_equal(linear(x, weight, T, jnp.bfloat16), result.astype(jnp.bfloat16))


def test_padding_costs_nothing_and_is_zero() -> None:
    x, weight = arrays(70, 20, 64)
    whole = np.asarray(linear(x, weight, 70))
    x[41:] = np.nan
    for count in (0, 1, 41):
        assert np.array_equal(linear(x, weight, count)[:count], whole[:count])
        assert not np.asarray(linear(x, weight, count))[count:].any()


@pytest.mark.parametrize("E", [96, 2048])
def test_a_rows_bits_do_not_depend_on_the_others(E: int) -> None:
    x, weight = arrays(150, 20, E)
    whole = np.asarray(linear(x, weight, 150))
    for rows in (slice(0, 1), slice(3, 10), slice(140, 150), slice(5, 140)):
        assert np.array_equal(linear(x[rows], weight, len(x[rows])), whole[rows])


def test_what_is_supported() -> None:
    x, weight = map(jnp.asarray, arrays(4, 6, 64))
    supported = NativeProducts(most_rows=None).supported
    assert supported(x, weight) and not supported(x[:, :40], weight[:, :40])
    assert not supported(x[None], weight) and not supported(x.astype(jnp.float32), weight)
    for most, expected in ((0, False), (3, False), (4, True)):
        assert NativeProducts(most_rows=most).supported(x, weight) == expected
