"""The TPU kernel under the shared suite, in the TPU interpreter twice: each way shows what the
other hides.

NAN fills memory with NaN and carries a copy out when it is waited for, so that a missing copy or
wait leaves NaN. RACES carries copies out at once and orders all reads and writes, so that a buffer
filled too early is a race.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_kernel

from kernels_pallas.e4m3 import e4m3_to_f32
from kernels_pallas.paged_attention import reference, tpu
from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes
from kernels_pallas.paged_attention.tpu import attention, kernel
from scripts._attention_cases import DECODE, PREFILL, Case
from scripts._common import CHIPS, cannot_compile
from tests.kernels import aot_tpu, jax_tpu
from tests.kernels.suite import CASES, PagedAttentionSuite, bounded, build, call, check

TIMEOUT = 240  # seconds that a test may take
NAN = pltpu.InterpretParams()
RACES = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process if a test takes too long; fails a test in which a race was found."""
    with bounded(request, TIMEOUT):
        yield
        try:
            assert not _race_found()
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def _race_found() -> bool:
    """jax 0.12 raises as well, 0.11 only notes it."""
    races = interpret_pallas_call.races
    return races is not None and races.races_found


class Interpreted:
    """`attend` under one interpreter, with tiles so small that small cases have many."""

    def __init__(self, interpret: pltpu.InterpretParams, module: Any = attention) -> None:
        self.interpret = interpret
        self.attend = jax.jit(module.attend, static_argnames=("options", "tiles"))

    def prepare(self, *args: Any, **how: Any) -> Any:
        return tpu.prepare(*args, **how)

    def prefill(
        self,
        q: Any,
        pool: Any,
        layer: Any,
        table: Any,
        contexts: Any,
        starts: Any,
        prepared: Any = None,
        *,
        options: Options,
        **sinks: Any,
    ) -> Any:
        assert prepared is None
        options = dataclasses.replace(options, interpret=self.interpret)
        tiles = (8, max(1, 32 // pool.shape[1]))
        rows = (table, contexts, starts)
        return self.attend(q, pool, layer, *rows, options=options, tiles=tiles, **sinks)

    def decode(self, q: Any, pool: Any, layer: Any, table: Any, contexts: Any, **how: Any) -> Any:
        starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
        o = self.prefill(q, pool, layer, table, contexts, starts, **how)
        return jnp.where((contexts > 0)[:, None, None], o, 0)


SOURCE = Path(attention.__file__).read_text()
JAX_SOURCE = Path(jax_tpu.__file__).read_text()
QUICK = ("decode", "decode_bf16", "decode_block256_g8_cap", "prefill", "prefill_block4_g4_window")
# One row a token is in place in bf16 alone.
SERVED = [dataclasses.replace(c, dtype="bfloat16") if c.latent else c for c in CASES]
AGAIN = [pytest.param(c, marks=() if c.name in QUICK else pytest.mark.slow) for c in SERVED]


class TestTpu(PagedAttentionSuite):
    implementation = Interpreted(NAN)
    cases = SERVED
    coded_cases = AGAIN


@pytest.mark.parametrize("case", AGAIN, ids=str)
def test_has_no_races(case: Case) -> None:
    check(Interpreted(RACES), case)


WINDOW = Case(
    name="window",
    contexts=(9, 45, 20),
    queries=(3, 27, 0),
    D=128,
    sliding_window=20,
    extra_tokens=2,
)
MORE = (
    WINDOW,
    Case(name="ratio_3", contexts=(9, 30), queries=(9, 14), H=9, K=3, D=64, dtype="bfloat16"),
    Case(name="ratio_5_cap", contexts=(1, 0, 40), H=10, K=2, D=128, dtype="bfloat16", soft_cap=5.0),
    Case(name="ratio_16", contexts=(17, 3), queries=(5, 2), H=16, K=1, D=256),
    Case(name="wide_heads_bf16", contexts=(17, 30), H=8, K=4, D=256, dtype="bfloat16"),
    Case(name="forks", contexts=(9, 0, 16, 33), queries=(2, 0, 0, 7), D=16),
)


@pytest.mark.parametrize("interpret", [NAN, RACES], ids=["nan", "races"])
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_shapes(case: Case, interpret: pltpu.InterpretParams) -> None:
    check(Interpreted(interpret), case)


# Keys and values in 8 bits: packed and padded heads, blocks that share lanes of scales and such as
# have their own, rows that see nothing.
IN_8_BITS = (
    Case(
        name="decode_int8",
        contexts=(1, 15, 0, 16, 17, 64, 150),
        H=8,
        K=4,
        D=64,
        P=16,
        dtype="bfloat16",
        kv_dtype="int8",
    ),
    Case(
        name="decode_fp8_sinks_window",
        contexts=(20, 0, 150),
        H=8,
        D=128,
        dtype="bfloat16",
        sliding_window=100,
        sinks=True,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="decode_f32_int8_cap",
        contexts=(127, 129, 300),
        D=80,
        P=128,
        soft_cap=3.0,
        kv_dtype="int8",
    ),
    Case(name="decode_k3_fp8", contexts=(9, 30), H=9, K=3, D=40, kv_dtype="float8_e4m3fn"),
    Case(
        name="prefill_int8_window",
        contexts=(9, 45, 20),
        queries=(3, 27, 0),
        D=128,
        sliding_window=20,
        extra_tokens=2,
        kv_dtype="int8",
    ),
    Case(
        name="prefill_fp8",
        contexts=(9, 150),
        queries=(9, 70),
        H=8,
        K=4,
        D=64,
        P=64,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
    ),
)


@pytest.mark.parametrize("interpret", [NAN, RACES], ids=["nan", "races"])
@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize("case", IN_8_BITS, ids=str)
def test_in_8_bits(case: Case, values: Any, interpret: pltpu.InterpretParams) -> None:
    check(Interpreted(interpret), case, values)


def test_every_float_of_8_bits() -> None:
    """NaN becomes 480, which the scale makes NaN."""
    bits = jnp.arange(256, dtype=jnp.uint8).astype(jnp.int8).reshape(2, 128)
    meant = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32))
    decode = jax.jit(functools.partial(e4m3_to_f32, bitcast=pltpu.bitcast))
    found = np.asarray(decode(bits.astype(jnp.int32)))
    assert np.array_equal(found, np.where(np.isnan(meant), np.copysign(480, meant), meant))


# A token in one row: latents in 8 bits, and the one KV head of a device whose values are narrower
# than its keys.
ONE_ROW = (
    Case(
        name="decode_latent_int8",
        contexts=(1, 17, 0, 66, 150),
        H=6,
        K=1,
        D=160,
        V=128,
        P=16,
        latent=True,
        dtype="bfloat16",
        kv_dtype="int8",
    ),
    Case(
        name="prefill_latent_fp8_cap",
        contexts=(9, 80),
        queries=(9, 33),
        H=16,
        K=1,
        D=160,
        V=128,
        P=16,
        latent=True,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
        soft_cap=3.0,
    ),
    Case(
        name="prefill_narrow_sinks_window",
        contexts=(9, 70, 20),
        queries=(9, 41, 0),
        H=4,
        K=1,
        D=96,
        V=64,
        P=16,
        dtype="bfloat16",
        sliding_window=30,
        sinks=True,
    ),
)


@pytest.mark.parametrize("interpret", [NAN, RACES], ids=["nan", "races"])
@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize("case", ONE_ROW, ids=str)
def test_tokens_of_one_row(case: Case, values: Any, interpret: pltpu.InterpretParams) -> None:
    check(Interpreted(interpret), case, values)


def test_a_step_multiplies_no_other_rows_heads() -> None:
    """A tile of a decode over latents is one row's heads, in whole tiles of bf16; a prompt's is
    filled to 512 rows of products. Of keys and values, whose heads are few, it is 8 rows' at least.
    """
    for H, decode, prefill in ((16, 1, 32), (128, 1, 4), (20, 4, 16), (7, 16, 64)):
        shapes = Shapes(
            dtype=jnp.bfloat16,
            head_dim=576,
            block_size=64,
            num_heads=H,
            num_kv_heads=1,
            num_rows=32,
        )
        pool: Any = jax.ShapeDtypeStruct((9, 64, 1, 640), jnp.bfloat16)
        sizes: Any = functools.partial(attention.tile_sizes, shapes, pool, latent=True)
        assert sizes(num_tokens=32) == (decode, 8) and sizes(num_tokens=4096) == (prefill, 8)
        assert attention.tile_sizes(shapes, pool, num_tokens=32)[0] == max(8, decode)


def test_one_row_is_cleared_by_halves_of_words() -> None:
    """Two tokens share a word of bf16: what is seen begins and ends at odd tokens too."""
    for context in (21, 22, 23):
        case = Case(
            name="odd",
            contexts=(context,),
            queries=(3,),
            K=1,
            D=40,
            V=32,
            latent=True,
            dtype="bfloat16",
            sliding_window=8,
        )
        check(Interpreted(NAN), case, "coded")


# Its table has more than the 128 blocks that a row of memory holds.
BLOCKS_OF_ONE = next(case for case in DECODE if case.name == "decode_block1_g1")
# The first tile is seen from its middle on, in a buffer that nothing was copied to before.
LATE = dataclasses.replace(WINDOW, name="late", contexts=(45,), queries=(1,))
# What is replaced, by what.
MUTATIONS = {
    "a page dropped": [
        ("lax.fori_loop(first, stop, block", "lax.fori_loop(first, jnp.maximum(stop - 1, 1), block")
    ],
    "mask too strict": [("is_seen = ahead <= r", "is_seen = ahead < r")],
    "images: the end unseen": [("ends[...][:, :1] - j * C", "ends[...][:, :1] - 1 - j * C")],
    "images: tiles after a query left out": [("jnp.maximum(end, base[2 + item])", "end")],
    "mask too loose": [("is_seen = ahead <= r", "is_seen = ahead <= r + G")],
    "window too long": [("ahead + sliding_window * G > r", "ahead + sliding_window * G + G > r")],
    "window starts late": [("(sliding_window - 1), 0)", "(sliding_window - 2), 0)")],
    "sees another row": [("(r >= (start_S1[row] - tile * B) * G)", "(r >= 0)")],
    "zeros": [("o[h] = (acc[h] /", "o[h] = (0 * acc[h] /")],
    "one buffer": [("lax.rem(turn[0], 2)", "0 * turn[0]"), ("1 - slot,", "slot,")],
    "keys and values swapped": [("(2 * h, 2 * h + 1)", "(2 * h + 1, 2 * h)")],
    "a wait missing": [('copy(item, j, slot, "wait")', "pass")],
    "unseen slots kept": [
        ("jnp.where(is_seen, part[...], jnp.zeros_like(part[...]))", "part[...]")
    ],
    "the end of what is seen kept": [("| (end < (j + 1) * C)", "")],
    "the start of what is seen kept": [("(begin > j * C) |", "")],
    "accumulator not rescaled": [("alpha[:, :1] * acc[h]", "acc[h]")],
    "another layer": [("base[0] + table", "table")],
    "the table of another item": [("tables[lax.rem(item, 2)", "tables[1 - lax.rem(item, 2)")],
    "a table not awaited": [('fetch(item + 1, "wait")', "pass")],
    "the end of a table": [("lax.div(u, 128), lax.rem(u, 128)", "0, lax.rem(u, 128)")],
    "8 bits: scales of another block": [("lane >= i * P", "lane > i * P")],
    "8 bits: scales of keys for values": [("2 * h + (latent is None)", "2 * h")],
    "8 bits: unseen scales kept": [
        ("jnp.where((token >= begin) & (token < end), x, jnp.zeros_like(x))", "x")
    ],
    "8 bits: scales of another tile": [("scales_of(slot, j", "scales_of(1 - slot, j")],
    "8 bits: a block not widened": [("lax.fori_loop(0, U, block", "lax.fori_loop(1, U, block")],
    "latents: an even token's half kept": [("(token, 0x0000FFFF)", "(begin, 0x0000FFFF)")],
    "latents: an odd token's half kept": [("(token + 1, 0xFFFF0000)", "(token, 0xFFFF0000)")],
    "latents in 8 bits: the latent's scale for both": [("by[i : i + 1] * scale", "by[:1] * scale")],
    "latents in 8 bits: the rotated key's scale for the value": [("2 * h + (latent is None)", "1")],
}
LATENT = Case(
    name="latent",
    contexts=(9, 46, 20),
    queries=(3, 27, 0),
    K=1,
    D=40,
    V=32,
    latent=True,
    dtype="bfloat16",
    extra_tokens=2,
)
IMAGES = Case(
    name="images",
    contexts=(9, 45, 20),
    queries=(9, 27, 0),
    D=128,
    images=((0, 1, 9), (1, 20, 43)),
    extra_tokens=2,
)
MUTATED = {
    "images": IMAGES,
    "8 bits": IN_8_BITS[4],
    "latents": LATENT,
    "latents in 8 bits": ONE_ROW[0],
}


@pytest.mark.parametrize(
    ("name", "interpret"),
    [*((name, NAN) for name in MUTATIONS), ("a wait missing", RACES)],
    ids=lambda x: x if isinstance(x, str) else x.dma_execution_mode,
)
def test_a_mutation_fails(name: str, interpret: pltpu.InterpretParams) -> None:
    source = Path(kernel.__file__).read_text()
    for old, new in MUTATIONS[name]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    wrong, mutant = types.ModuleType("wrong"), types.ModuleType("mutant")
    exec(compile(source, name, "exec"), wrong.__dict__)
    exec(SOURCE, mutant.__dict__)
    mutant.__dict__["kernel"] = wrong.kernel
    own = {"the end of a table": BLOCKS_OF_ONE, "the start of what is seen kept": LATE}
    case = MUTATED.get(name.partition(":")[0]) or own.get(name, WINDOW)
    try:
        check(Interpreted(interpret, mutant), case)
        failed = _race_found()
    except AssertionError:
        failed = True
    except jax.errors.JaxRuntimeError as error:
        failed = "race" in str(error).lower()
    pltpu.reset_tpu_interpret_mode_state()
    assert failed


@pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=str)
def test_nothing_to_do(case: Case) -> None:
    """Padding rows only: no item exists, zeros come out."""
    inputs = build(case)
    idle = dataclasses.replace(inputs, context_lens=0 * inputs.context_lens)
    if inputs.query_start_loc is not None:
        idle = dataclasses.replace(idle, query_start_loc=0 * inputs.query_start_loc)
    result = np.asarray(call(Interpreted(NAN), case, idle))
    assert result.shape == inputs.q.shape and not result.any()


@pytest.mark.parametrize(
    ("K", "D", "shape"), [(3, 40, (4, 128)), (1, 64, (2, 128)), (3, 80, (8, 128))]
)
def test_takes_a_padded_pool(K: int, D: int, shape: tuple[int, int]) -> None:
    """As an engine keeps it, with the interpreter and the tiles that the function picks."""
    case = Case(name="padded", contexts=(9, 0, 30), H=2 * K, K=K, D=D)
    inputs = build(case)
    pool = np.asarray(tpu.pool_layout(K, D).pack(jnp.asarray(inputs.pool)))
    assert pool.shape[2:] == shape
    result = call(tpu, case, dataclasses.replace(inputs, pool=pool), how={"num_kv_heads": K})
    assert np.array_equal(result, call(tpu, case, inputs))
    np.testing.assert_allclose(result, call(reference, case, inputs, exact=True), atol=1e-5)


def test_pool_rows() -> None:
    """Row counts that keep a pool in place: 2, 4 and multiples of 8, and one where that axis is
    left out; K and V of a head stay together.
    """
    rows = [tpu.pool_layout(K, 128).rows for K in (1, 2, 3, 4, 5, 8, 9)]
    assert rows == [2, 4, 8, 8, 16, 16, 24]
    widths = [tpu.pool_layout(1, D).width for D in (16, 64, 65, 128, 129, 256)]
    assert widths == [128, 128, 128, 128, 256, 256]
    kv = jnp.arange(1.0, 1 + 6 * 40).reshape(6, 40)
    packed = np.zeros((4, 2, 64), np.float32)
    packed[:3, :, :40] = kv.reshape(3, 2, 40)
    assert np.array_equal(tpu.pool_layout(3, 40).pack(kv), packed.reshape(4, 128))
    latent = tpu.pool_layout(1, 512, 64)
    assert (latent.rows, latent.width, latent.scales(64)) == (1, 640, (2, 128))
    assert [tpu.pool_layout(K, 192, 128).rows for K in (1, 2, 3)] == [1, 2, 4]
    wide = np.zeros((8, 128), np.float32)
    wide[:6, :80] = np.tile(kv, 2)
    assert np.array_equal(tpu.pool_layout(3, 80).pack(jnp.tile(kv, 2)), wide)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "dtype float16"),
        ({"H": 5}, "5 query heads over 2"),
        ({"P": 1024, "K": 16, "H": 16, "D": 128}, "vector memory"),
        ({"extra_blocks": 200_000}, "scalar memory"),
        ({"K": 1, "V": 48, "latent": True}, "in one row a token, in float32"),
        (
            {"K": 1, "V": 48, "latent": True, "dtype": "bfloat16", "P": 4},
            "blocks of 4: only in bfloat16, in blocks of whole 8s",
        ),
        (
            {"K": 1, "V": 48, "latent": True, "dtype": "bfloat16", "kv_dtype": "int8"},
            "int8 with scales, latents of 48: only multiples of 128",
        ),
        ({"kv_dtype": "int8"}, "int8 with scales, 2 KV heads of 64: two rows"),
        ({"kv_dtype": "int8", "P": 4, "D": 128}, "int8 with scales, block_size 4: only 8, 16"),
        ({"kv_dtype": "int8", "P": 192, "D": 128}, "int8 with scales, block_size 192: only 8, 16"),
    ],
)
@pytest.mark.parametrize("queries", [None, (3, 5)])
def test_refuses_with_the_reason(
    change: dict[str, Any], reason: str, queries: tuple[int, ...] | None
) -> None:
    case = Case(
        **{
            "name": "refused",
            "contexts": (5, 9),
            "queries": queries,
            "D": 64,
            "num_layers": 1,
            "layer": 0,
        }
        | change
    )
    with pytest.raises(NotImplementedError, match=reason):
        call(tpu, case, build(case))


def test_refuses_other_devices_and_pools() -> None:
    shapes = Shapes(dtype=jnp.bfloat16, head_dim=128, block_size=64, num_heads=8, num_kv_heads=4)
    v5 = types.SimpleNamespace(device_kind="TPU v5 lite")
    plain = AttentionOptions(scale=1.0)
    assert tpu.unsupported(shapes, plain, None) is tpu.unsupported(shapes, plain, v5) is None
    for device_kind in ("NVIDIA H200", "TPU v3"):
        device = types.SimpleNamespace(device_kind=device_kind)
        assert device_kind in (tpu.unsupported(shapes, plain, device) or "")
    case = Case(name="unpadded", contexts=(9,), D=80)
    with pytest.raises(NotImplementedError, match="pool"):
        call(tpu, case, build(case), how={"interpret": False})


class ByJax:
    """`jax_tpu` with jax's definition in the place of jax's kernel, which no interpreter runs.

    It checks what the kernel demands of its arguments. Slots that nobody should see hold large
    numbers instead of NaN, which the definition would multiply by zero.
    """

    def __init__(self, source: str) -> None:
        self.module = types.ModuleType("by_jax")
        exec(source, self.module.__dict__)
        self.module.__dict__["ragged_paged_attention"] = self.define

    def define(self, q: Any, pool: Any, *args: Any, **options: Any) -> Any:
        jax_kernel.dynamic_validate_inputs(q, pool, *args, **options)
        known = inspect.signature(jax_kernel.ref_ragged_paged_attention).parameters
        o = jax_kernel.ref_ragged_paged_attention(
            q, pool, *args, **{k: v for k, v in options.items() if k in known}
        )
        return jnp.pad(
            o, ((0, len(q) - len(o)), (0, 0), (0, 0)), constant_values=jnp.nan
        )  # left as they were

    def _run(self, name: str, q: Any, pool: Any, layer: int, *args: Any, options: Options) -> Any:
        arrays = [jnp.asarray(q), jnp.nan_to_num(jnp.asarray(pool), nan=100.0)]
        with jax.disable_jit():
            rest = map(jnp.asarray, args)
            return getattr(self.module, name)(*arrays, layer, *rest, options=options)

    def prefill(self, *args: Any, options: Options) -> Any:
        return self._run("prefill", *args, options=options)

    def decode(self, *args: Any, options: Options) -> Any:
        return self._run("decode", *args, options=options)


BY_JAX = (
    Case(name="decode", contexts=(7, 8, 0, 9), D=128),
    Case(
        name="decode_window_bf16",
        contexts=(19, 0, 41),
        K=4,
        P=20,
        D=128,
        sliding_window=25,
        dtype="bfloat16",
    ),
    Case(
        name="prefill",
        contexts=(9, 16, 0, 28, 0),
        queries=(9, 1, 0, 5, 0),
        D=128,
        extra_tokens=3,
        extra_blocks=0,
    ),
    Case(name="prefill_window", contexts=(20, 9), queries=(7, 2), K=1, D=256, sliding_window=5),
    Case(
        name="prefill_cap_bf16",
        contexts=(5, 30),
        queries=(0, 12),
        H=8,
        D=128,
        soft_cap=3.0,
        dtype="bfloat16",
    ),
)


@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize("case", BY_JAX, ids=str)
def test_jax_kernel_is_given_the_right_arguments(case: Case, values: Any) -> None:
    check(ByJax(JAX_SOURCE), case, values)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("block_table_SM + first_block,", "block_table_SM,", 0),
        ("jnp.maximum(context_lens_S, 1)", "jnp.maximum(context_lens_S - 1, 1)", 0),
        (
            "jnp.sum(starts_S < live,",
            "jnp.sum(starts_S < live - 5,",
            2,
        ),
        ("sm_scale=options.attention.scale,", "sm_scale=1.0,", 2),
        ("sliding_window=options.attention.window,", "", 3),
        ("soft_cap=options.attention.soft_cap,", "", 4),
        (
            "return jnp.where(live_T[:, None, None], o_THD.astype(q_THD.dtype), 0)",
            "return o_THD",
            2,
        ),
    ],
)
def test_wrong_arguments_for_jax_kernel_fail(old: str, new: str, case: int) -> None:
    assert JAX_SOURCE.count(old) == 1
    with pytest.raises(AssertionError):
        check(ByJax(JAX_SOURCE.replace(old, new)), BY_JAX[case])


@pytest.mark.parametrize("program", aot_tpu.PROGRAMS, ids=lambda program: program.name)
def test_lowers(program: aot_tpu.Program) -> None:
    assert aot_tpu.lower(program).count("tpu_custom_call") > 0


@pytest.mark.skipif(cannot_compile("tpu") is not None, reason=str(cannot_compile("tpu")))
@pytest.mark.parametrize("chip", CHIPS["tpu"])
def test_compiles_and_leaves_the_pool_in_place(chip: str) -> None:
    results = aot_tpu.compile_all(chip, timeout=TIMEOUT - 10)
    assert results.keys() == {program.name for program in aot_tpu.PROGRAMS}
    for program in aot_tpu.PROGRAMS:
        result = results[program.name]
        assert result["kernels"] == (1 if program.loop else aot_tpu.LAYERS)
        # The control: without donation the pool must be copied, once, and so must its scales.
        parts = 1 if program.kv_dtype is None else 2
        if program.is_offloaded and chip.startswith("tpu7x"):
            assert result["pool_copies"][0] > 1
            continue
        assert result["pool_copies"] == [0 if program.donate else 1] * parts, program.name
