"""The Mosaic GPU kernels without a GPU: the shared suite interpreted under race detection, lowered
for CUDA, compiled for sm_90a.
"""

import dataclasses
import functools
import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import (
    interpret_pallas_call as interpreter,  # jax has no public name for it
)
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.interface import AttentionOptions, Options, Shapes
from kernels_pallas.paged_attention.mosaic_gpu import decode_kernel, prefill_kernel
from kernels_pallas.paged_attention.mosaic_gpu.decode_kernel import split_count
from kernels_pallas.paged_attention.mosaic_gpu.pieces import work_item
from scripts._attention_cases import GPU, IN_TILES, Case
from scripts._common import cannot_compile
from tests.kernels import aot_cuda
from tests.kernels.suite import PagedAttentionSuite, bounded, build, call, check, prepared

SECONDS = 120  # that a test may take: a deadlock in a kernel would otherwise never end
COMPILING = 240  # seconds for a kernel, on a busy machine
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

PLAIN = AttentionOptions(scale=1.0)
SUPPORTED = Shapes(dtype=jnp.bfloat16, head_dim=128, block_size=64, num_heads=16, num_kv_heads=8)

DECODE, PREFILL = (
    [case for case in GPU if (case.queries is None) == is_decode] for is_decode in (True, False)
)


def _without_races(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function interpreted; each call fails if a race was found in it."""

    def run(*args: Any, options: Options, **own: Any) -> Any:
        options = dataclasses.replace(options, interpret=INTERPRET)
        result = jax.block_until_ready(function(*args, options=options, **own))
        assert isinstance(result, Tracer) or not interpreter.get_races().races_found
        return result

    return run


INTERPRETED = SimpleNamespace(
    prepare=mosaic_gpu.prepare,
    prefill=_without_races(mosaic_gpu.prefill),
    decode=_without_races(mosaic_gpu.decode),
    pool_layout=mosaic_gpu.pool_layout,
)


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process if a test takes too long, and leaves the interpreter as it was."""
    with bounded(request, COMPILING + 60 if "compiler" in request.fixturenames else SECONDS):
        yield
        interpreter.reset_gpu_interpret_mode_state()


class TestMosaicGpu(PagedAttentionSuite):
    implementation = INTERPRETED
    cases = GPU
    plain_cases = (DECODE[3], PREFILL[-1])
    plain_splits = 1  # how many there are otherwise follows from the table's width


@pytest.mark.parametrize(
    "splits",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
def test_any_number_of_splits(splits: int) -> None:
    """With five, some have no tiles."""
    check(INTERPRETED, DECODE[0], splits=splits)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "splits"),
    [
        pytest.param(8, 4, 2, marks=pytest.mark.middle),
        pytest.param(8, 4, 1, marks=pytest.mark.slow),
        pytest.param(16, 16, 2, marks=pytest.mark.slow),
    ],
)
def test_heads_whose_queries_come_together(heads: int, kv_heads: int, splits: int) -> None:
    """Eight rows of queries are copied, of several KV heads, each of which takes its own."""
    case = Case(name="shared", contexts=(70, 5), H=heads, K=kv_heads, P=16, D=64, dtype="bfloat16")
    check(INTERPRETED, case, splits=splits)


# More tiles than the ring has stages, a short row between long ones, padding: (splits, thread
# blocks) such that a block has one turn, two, many.
LONG = Case(
    name="long",
    contexts=(600, 40, 0, 470, 64),
    H=2,
    K=1,
    P=64,
    D=64,
    dtype="bfloat16",
    num_layers=1,
    layer=0,
)


@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize(
    ("splits", "thread_blocks"),
    [
        (1, 5),
        (1, 3),
        (2, 1),
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_thread_blocks_take_turns(splits: int, thread_blocks: int, values: Any) -> None:
    check(INTERPRETED, LONG, values, splits=splits, thread_blocks=thread_blocks)


@pytest.mark.parametrize("thread_blocks", [1, 2])
def test_thread_blocks_of_prefill_take_turns(thread_blocks: int) -> None:
    """Three tiles, of which the last is padding."""
    case = dataclasses.replace(LONG, contexts=(300, 70), queries=(40, 20), extra_tokens=5)
    check(INTERPRETED, case, "coded", thread_blocks=thread_blocks)


@pytest.mark.parametrize(("items", "blocks"), [(7, 3), (1, 1), (264, 132), (300, 132)])
def test_thread_blocks_share_the_items(items: int, blocks: int) -> None:
    """Each item is somebody's; at any time neighbours read neighbouring items, which are a row's
    heads; and nobody has the first, which are the longest, of two turns.
    """
    turns = -(-items // blocks)
    taken = [[work_item(turn, block, blocks) for block in range(blocks)] for turn in range(turns)]
    assert sorted(x for turn in taken for x in turn) == list(range(turns * blocks))
    for turn, of_turn in enumerate(taken):
        assert all(abs(a - b) == 1 for a, b in itertools.pairwise(of_turn))
        assert of_turn[0] == turn * blocks + (blocks - 1 if turn % 2 else 0)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "context", "slots", "expected"),
    [
        (8, 8, 8192, 132, 2),  # 128 thread blocks of 132, where 5 would be three waves
        (1, 1, 32768, 132, 128),  # a card for one KV head
        (1, 8, 32768, 132, 16),
        (256, 8, 1024, 132, 1),
        (20, 8, 8192, 132, 4),  # 640 of 660, where 160 are two waves of which one is almost idle
        (8, 8, 8192, 264, 4),
        (1, 8, 64, 132, 1),  # nothing to split
    ],
)
def test_splits_fill_the_last_wave(
    rows: int, kv_heads: int, context: int, slots: int, expected: int
) -> None:
    assert split_count(rows * kv_heads, -(-context // 64), slots) == expected


@pytest.mark.parametrize("window", [None, 100])
def test_splits_are_of_what_is_seen(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the table's width, or of a window's tiles: it may begin within one."""
    asked = []

    def note(items: int, tiles: int, slots: int) -> int:
        asked.append((items, tiles, slots))
        return 1

    monkeypatch.setattr(decode_kernel, "split_count", note)
    i32, q = jnp.int32, jax.ShapeDtypeStruct((3, 4, 64), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((30, 64, 4, 64), jnp.bfloat16)
    table, contexts = jax.ShapeDtypeStruct((3, 40), i32), jax.ShapeDtypeStruct((3,), i32)
    options = Options(attention=AttentionOptions(scale=0.1, window=window), interpret=False)
    function = functools.partial(mosaic_gpu.decode.__wrapped__, options=options)  # pyright: ignore
    aot_cuda.lower(function, q, pool, 0, table, contexts)
    assert asked == [(6, 40 if window is None else 3, 264)]


def test_prefill_has_the_heads_of_a_tile_side_by_side() -> None:
    places = [prefill_kernel.tile_and_part(jnp.int32(item), 4) for item in range(8)]
    assert places == [(tile, part) for tile in range(2) for part in range(4)]


@pytest.mark.parametrize("rows", [16, 256])
def test_prefill_fills_the_card_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows the padded step has."""
    grids = []
    launch = prefill_kernel.launch

    def note(*args: Any, grid: dict[str, int], **how: Any) -> Any:
        grids.append(grid)
        return launch(*args, grid=grid, **how)

    monkeypatch.setattr(prefill_kernel, "launch", note)
    function, q, pool, layer, *_ = aot_cuda.kernel("prefill_d64_g2")
    shapes = (rows, 32), (rows,), (rows + 1,)
    tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    unjitted = functools.partial(mosaic_gpu.prefill.__wrapped__, **function.keywords)  # pyright: ignore
    aot_cuda.lower(unjitted, q, pool, layer, *tables)
    assert grids == [{"block": 132}]


@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 6, 8, 16, 64)]
)
def test_decode_group_sizes(group: int) -> None:
    check(
        INTERPRETED, Case(name="group", contexts=(70, 5), H=2 * group, P=16, D=64, dtype="bfloat16")
    )


@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 8)]
)
def test_prefill_group_sizes(group: int) -> None:
    check(
        INTERPRETED,
        Case(
            name="group", contexts=(70,), queries=(66,), H=2 * group, P=16, D=64, dtype="bfloat16"
        ),
    )


@pytest.mark.parametrize("group", [1, 2])
def test_tiles_cover_each_token_once(group: int) -> None:
    lens, contexts = np.array([1, 0, 64, 65, 0, 129, 200]), np.array([7, 9, 64, 100, 0, 129, 333])
    starts, tokens = np.concatenate([[0], np.cumsum(lens)]), int(lens.sum()) + 70
    tiles = mosaic_gpu.prepare(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(contexts, jnp.int32),
        num_tokens=tokens,
        shapes=dataclasses.replace(SUPPORTED, num_heads=group, num_kv_heads=1),
        window=None,
    )
    table, count = np.asarray(tiles.table_A5), int(tiles.count_1[0])
    assert not table[count:, 2].any()
    seen = []
    for row, token, queries, position, context in table[:count]:
        assert 0 < queries <= (128 if group == 1 else 64)
        seen += range(token, token + queries)
        if row < len(lens):
            assert starts[row] <= token and token + queries <= starts[row + 1]
            assert context == contexts[row] and position == contexts[row] - starts[row + 1] + token
        else:
            assert token >= starts[-1] and context == 0
    assert sorted(seen) == list(range(tokens))


# 20 tiles, and at this head_dim fewer stages, so that they are used again.
LONG_IN_8_BITS = dataclasses.replace(LONG, D=128, kv_dtype="int8")


@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize("case", IN_TILES, ids=str)
def test_in_8_bits(case: Case, values: Any) -> None:
    check(INTERPRETED, case, values)


@pytest.mark.parametrize("values", ["random", "coded"])
@pytest.mark.parametrize(("splits", "thread_blocks"), [(1, 3), (2, 1)])
def test_thread_blocks_take_turns_in_8_bits(splits: int, thread_blocks: int, values: Any) -> None:
    check(INTERPRETED, LONG_IN_8_BITS, values, splits=splits, thread_blocks=thread_blocks)


# Scores of later tiles are far above the maximum of some queries, and below that of others.
SHARP = dataclasses.replace(LONG, contexts=(400, 70), H=3, sharpness=8.0)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_maximum_rises_in_later_tiles(kv_dtype: str | None) -> None:
    check(INTERPRETED, dataclasses.replace(SHARP, kv_dtype=kv_dtype), splits=1)


# Mutations: each has to fail, or the checks above prove nothing.

SMALL_DECODE = Case(name="decode", contexts=(150, 40), H=2, K=1, P=16, D=64, dtype="bfloat16")
SMALL_PREFILL = Case(
    name="prefill", contexts=(150,), queries=(40,), H=2, K=1, P=16, D=64, dtype="bfloat16"
)


def _changed(**changes: Callable[[Any], Any]) -> Any:
    """The implementation called with other arguments, by their names."""

    def wrap(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        def mutant(*args: Any, options: Options) -> Any:
            named = dict(zip(names, args, strict=True))
            named |= {name: change(named[name]) for name, change in changes.items()}
            return function(*named.values(), options=options)

        return mutant

    names = ("q", "pool", "layer", "table", "contexts")
    return SimpleNamespace(
        decode=wrap(INTERPRETED.decode, *names),
        prefill=wrap(INTERPRETED.prefill, *names, "query_start_loc"),
    )


def _swap_keys_and_values(pool: np.ndarray) -> np.ndarray:
    return pool.reshape(*pool.shape[:2], -1, 2, pool.shape[3])[:, :, :, ::-1].reshape(pool.shape)


def _drop_a_block(table: np.ndarray) -> np.ndarray:
    return np.concatenate([table[:, :1], table[:, :1], table[:, 2:]], axis=1)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_nothing_changed_passes(case: Case) -> None:
    check(INTERPRETED, case)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(_changed(pool=_swap_keys_and_values), id="keys and values swapped"),
        pytest.param(_changed(table=_drop_a_block), id="a page dropped"),
        pytest.param(_changed(contexts=lambda x: x - 1), id="the last token unseen"),
        pytest.param(_changed(contexts=lambda x: x + 1), id="a token too many"),
        pytest.param(_changed(layer=lambda x: x - 1), id="another layer"),
    ],
)
def test_wrong_arguments_fail(case: Case, mutant: Any) -> None:
    with pytest.raises(AssertionError):
        check(mutant, case, "coded" if case.queries is None else "random")


def test_zeros_fail() -> None:
    def zeros(q: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        return 0 * q

    with pytest.raises(AssertionError):
        check(SimpleNamespace(decode=zeros), SMALL_DECODE)


@pytest.mark.parametrize("change", ["a tile less", "causal mask off by one"])
def test_wrong_tiles_fail(change: str) -> None:
    inputs = build(SMALL_PREFILL)
    tiles = prepared(mosaic_gpu, SMALL_PREFILL, inputs)
    wrong = tiles._replace(count_1=tiles.count_1 - 1)
    if change != "a tile less":
        wrong = tiles._replace(table_A5=tiles.table_A5.at[:, 3].add(1))
    check(INTERPRETED, SMALL_PREFILL, prepared=tiles)
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_PREFILL, prepared=wrong)


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Replaces a function that the kernels use; nothing compiled with or without it is used on the
    other side.
    """
    functions = (mosaic_gpu.decode, mosaic_gpu.prefill)

    def replace(name: str, value: Any) -> None:
        users = [m for m in (decode_kernel, prefill_kernel) if hasattr(m, name)]
        assert users and all(callable(getattr(m, name)) for m in users)
        for module in users:
            monkeypatch.setattr(module, name, value)
        for function in functions:
            function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    yield replace
    for function in functions:
        function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_split_ignored_fails(mutate: Callable[[str, Any], None]) -> None:
    combine = decode_kernel.combine
    mutate("combine", lambda o, lse, sinks: combine(o[:, :-1], lse[:, :-1], sinks))
    with pytest.raises(AssertionError):
        check(INTERPRETED, SMALL_DECODE, splits=2)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_unseen_values_let_through_fail(case: Case, mutate: Callable[[str, Any], None]) -> None:
    mutate("zero_unseen", lambda *_: None)
    with pytest.raises(AssertionError):
        check(INTERPRETED, case)


@pytest.mark.parametrize("case", [SMALL_DECODE, SMALL_PREFILL], ids=str)
def test_a_stage_refilled_too_early_is_a_race(
    case: Case, mutate: Callable[[str, Any], None]
) -> None:
    """The ring with the wait for a free stage after the copies into it."""

    def stream(pool_ref, base, table_ref, context, head, first, count, done, ring):
        (_, C, _), P = ring.tiles.shape, pool_ref.shape[1]

        @pl.loop(0, count)
        def _(i):
            for j in range(0, C, P):
                src = pool_ref.at[
                    base + table_ref[jnp.minimum(((first + i) * C + j) // P, context // P)], :, head
                ]
                plgpu.copy_gmem_to_smem(src, ring.tiles.at[0, pl.ds(j, P)], ring.full.at[i])

    mutate("stream_tiles", stream)
    splits = {"splits": 1} if case.queries is None else {}
    how = {"interpret": INTERPRET}
    try:  # jax 0.11 only notes a race, later versions raise
        jax.block_until_ready(call(mosaic_gpu, case, build(case), how=how, **splits))
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
    else:
        assert interpreter.get_races().races_found


# What is replaced, in which file, by what; what has to notice.
G4K2, G3K2 = (next(c for c in GPU if c.name == n) for n in ("prefill_g4_k2", "decode_g3_k2"))
TWO_TILES = dataclasses.replace(SMALL_PREFILL, contexts=(150, 20), queries=(40, 20))
ENDS = next(case for case in GPU if case.name == "prefill_d128_p8_g1_window")
IMAGE = Case(
    name="image",
    contexts=(150,),
    queries=(150,),
    H=2,
    K=1,
    P=16,
    D=64,
    dtype="bfloat16",
    images=((0, 30, 149),),
)
SOURCES = {
    "splits rounded down": (
        *("decode_kernel", "share = pl.cdiv(tiles, jnp.int32(X))", "share = tiles // X"),
        *(SMALL_DECODE, {"splits": 2}),
    ),
    "a turn left out": (
        *("pieces", "(last >= items)", "(last >= items - 1)"),
        *(SMALL_DECODE, {"splits": 1, "thread_blocks": 1}),
    ),
    "a turn too many": (
        *("pieces", "(last >= items)", "(last > items)"),
        *(LONG, {"splits": 1, "thread_blocks": 3}),
    ),
    "queries of another turn": (
        *("decode_kernel", "(tile, q_sm.at[place])", "(tile, q_sm.at[0])"),
        *(SMALL_DECODE, {"splits": 1, "thread_blocks": 1}),
    ),
    "results overwritten": (
        *("decode_kernel", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass"),
        *(SMALL_DECODE, {"splits": 1, "thread_blocks": 1}),
    ),
    "another KV head of decode": (
        *("decode_kernel", "table_ref.at[row], context, head)", "table_ref.at[row], context, 0)"),
        *(G3K2, {}),
    ),
    "results of another head": (
        *("decode_kernel", "pl.ds(head * G, G)", "pl.ds(head, G)", G3K2, {}),
    ),
    "another KV head of prefill": (
        *("prefill_kernel", "lax.div(head, jnp.int32(H // K))", "lax.div(head, 2)", G4K2, {}),
    ),
    "the table read past its end by decode": (
        *("pieces", "jnp.minimum(lax.div(slot + j, jnp.int32(P)), last)"),
        *("lax.div(slot + j, jnp.int32(P))", G3K2, {}),
    ),
    "the table read past its end by prefill": (
        *("pieces", "jnp.minimum(lax.div(slot + j, jnp.int32(P)), last)"),
        *("lax.div(slot + j, jnp.int32(P))", G4K2, {}),
    ),
    "slots before a window": (
        *("decode_kernel", "(slot >= low) & (slot < high)", "(slot < high)"),
        *(DECODE[1], {}),
    ),
    "slots after a context": (
        *("decode_kernel", "(slot >= low) & (slot < high)", "(slot >= low)"),
        *(SMALL_DECODE, {}),
    ),
    "results as they were before a maximum rose": (
        *("decode_forms", "return scaled_acc, m_new", "return acc, m_new", SHARP, {"splits": 1}),
    ),
    "weights of a tile twice in their sum": (
        *("decode_forms", "totals - p, 0.0)", "totals, 0.0)", SHARP, {"splits": 1}),
    ),
    "weights of another tile": (
        *("decode_forms", "            store(p_new)\n", "", SHARP, {"splits": 1}),
    ),
    "8 bits: scales of values for keys": (
        *("decode_kernel", "ring.scales.at[stage, x]", "ring.scales.at[stage, 1]"),
        *(IN_TILES[0], {}),
    ),
    "8 bits: scales of another head": (
        *("pieces", "pl.ds(2 * head, 2)", "pl.ds(0, 2)", IN_TILES[0], {}),
    ),
    "8 bits: scales of another part of a block": (
        *("pieces", "pl.ds(2 * head, 2), part]", "pl.ds(2 * head, 2), pl.ds(0, C)]"),
        *(IN_TILES[1], {}),
    ),
    "8 bits: unseen scales kept": (
        *("pieces", "jnp.where((slot >= begin) & (slot < end), scales, 0.0)", "scales"),
        *(IN_TILES[0], {}),
    ),
    "8 bits: a stage given back too early": (
        *("pieces", "    plgpu.commit_smem()\n\n\ndef zero_unseen", "\n\ndef zero_unseen"),
        *(LONG_IN_8_BITS, {"splits": 1, "thread_blocks": 1}),
    ),
    "results of prefill overwritten": (
        *("prefill_kernel", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass"),
        *(TWO_TILES, {"thread_blocks": 1}),
    ),
    "keys before a window": (
        *("prefill_kernel", "seen &= key > query - window", "pass", ENDS, {}),
    ),
    "the end of an image unseen": (*("prefill_kernel", "ends_Q - 1)", "ends_Q - 2)", IMAGE, {}),),
    "tiles after a query left out": (
        *("prefill_kernel", "if ahead is None else ahead[0][tile]", ""),
        *(IMAGE, {}),
    ),
    "keys after a query": (
        *("prefill_kernel", "seen = key <= query", "seen = key <= query + 1"),
        *(SMALL_PREFILL, {}),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_mutation_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a wrong result, a race, or a read outside of an array."""
    file, old, new, case, own = SOURCES[name]
    mutants = {}
    for at in ("pieces", "decode_forms", "decode_kernel", "prefill_kernel"):  # later ones import it
        source = Path(decode_kernel.__file__).with_name(f"{at}.py").read_text()
        if at == file:
            assert source.count(old) == 1
            source = source.replace(old, new)
        mutants[at] = ModuleType(at)
        monkeypatch.setitem(sys.modules, f"{mosaic_gpu.__name__}.{at}", mutants[at])
        exec(compile(source, f"{at}, {name}", "exec"), mutants[at].__dict__)
    mutant = SimpleNamespace(
        decode=_without_races(mutants["decode_kernel"].decode),
        prefill=_without_races(mutants["prefill_kernel"].prefill),
        pool_layout=mosaic_gpu.pool_layout,
    )
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as failed:
        for values in ("random", "coded"):
            check(mutant, case, values, **own)
    if not isinstance(failed.value, AssertionError):
        assert "RACE" in str(failed.value) or "Out-of-bounds" in str(failed.value)


# Without interpretation.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 20}, "block_size 20"),
        ({"block_size": 192}, "block_size 192"),
        ({"num_heads": 12}, "12 query heads"),
        ({"num_heads": 130, "num_kv_heads": 2}, "130 query heads"),
        ({"kv_dtype": jnp.int8, "block_size": 32}, "with scales, block_size 32: only 64 and mul"),
    ],
)
def test_unsupported_says_why(change: dict[str, Any], reason: str) -> None:
    shapes = dataclasses.replace(SUPPORTED, **change)
    assert reason in str(mosaic_gpu.unsupported(shapes, PLAIN, None))


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_other_cards_are_not_supported(capability: str) -> None:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    reason = mosaic_gpu.unsupported(SUPPORTED, PLAIN, device)
    assert f"compute capability {capability}" in str(reason)


def test_supported() -> None:
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert mosaic_gpu.unsupported(SUPPORTED, PLAIN, hopper) is None
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"dtype": jnp.float16},
        {"block_size": 256},
        {"num_heads": 56},
        {"kv_dtype": jnp.int8},
        {"kv_dtype": jnp.float8_e4m3fn, "block_size": 128},
    )
    for change in changes:
        shapes = dataclasses.replace(SUPPORTED, **change)
        assert mosaic_gpu.unsupported(shapes, PLAIN, None) is None
    narrow = AttentionOptions(scale=1.0, value_dim=64)
    assert "value_dim=64" in str(mosaic_gpu.unsupported(SUPPORTED, narrow, None))


@pytest.mark.parametrize("queries", [None, (9,)])
def test_unsupported_raises(queries: tuple[int, ...] | None) -> None:
    case = Case(name="f32", contexts=(9,), queries=queries)
    with pytest.raises(NotImplementedError, match="float32"):
        call(mosaic_gpu, case, build(case))


@pytest.mark.parametrize("name", aot_cuda.ALL)
def test_lowers_for_cuda(name: str) -> None:
    assert "mosaic_gpu" in aot_cuda.lower(*aot_cuda.kernel(name))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a function from the name of a kernel to what aot_cuda prints of it. In one process of
    its own: the folder that the compiler reports to has to be known before jax is imported.
    """
    folder, root = tmp_path_factory.mktemp("dump"), Path(__file__).parents[2]
    environment = os.environ | {
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is found there is not reported
    }
    command = [sys.executable, "-m", "tests.kernels.aot_cuda", "-"]
    messages = folder.with_name("messages")
    with (
        messages.open("w") as stderr,
        subprocess.Popen(
            command,
            env=environment,
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None

        def compiled(name: str) -> Any:
            assert child.stdin is not None and child.stdout is not None
            print(name, file=child.stdin, flush=True)
            is_there, *_ = select.select([child.stdout], [], [], COMPILING)
            line = child.stdout.readline() if is_there else ""
            assert line, f"{name}: nothing in {COMPILING} s: {messages.read_text()[-3000:]}"
            return json.loads(line)

        try:
            yield compiled
        finally:
            child.kill()


@pytest.fixture(scope="module", params=aot_cuda.ALL)
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Return the name of a kernel; pytest runs the tests of one after each other."""
    return request.param


@pytest.fixture(scope="module")
def compiled(kernel_name: str, compiler: Callable[[str], Any]) -> dict[str, Any]:
    """Return what aot_cuda prints of a kernel."""
    result = compiler(kernel_name)
    assert result["name"] == kernel_name
    return result


needs_cuda = pytest.mark.skipif(
    cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda"))
)


@pytest.mark.slow
@needs_cuda
class TestCompiledForHopper:
    def test_spills(self, compiled: dict[str, Any]) -> None:
        assert compiled["spills"] == 0

    def test_no_warpgroup_waits_for_registers(self, compiled: dict[str, Any]) -> None:
        """They ask for no more than the thread block was launched with, and it can be launched."""
        assert compiled["asked"] <= compiled["pool"] <= 65536

    def test_as_many_blocks_fit_on_an_sm_as_decode_counts_on(
        self, kernel_name: str, compiled: dict[str, Any]
    ) -> None:
        """Their registers and shared memory, of which a block takes 1 KiB for itself."""
        blocks = aot_cuda.blocks_on_an_sm(kernel_name)
        assert compiled["pool"] * blocks <= 65536
        assert (compiled["shared_memory"] + 1024) * blocks <= 228 << 10

    def test_tma_takes_its_descriptors(self, kernel_name: str, compiled: dict[str, Any]) -> None:
        """Mosaic's runtime ends the process at the first call if a rule is broken. Decode's results
        are whole rows side by side, which may be copied without a descriptor.
        """
        of_two = kernel_name in aot_cuda.EXPERTS or kernel_name.startswith("decode")
        least = 2 if of_two else 1 if kernel_name in aot_cuda.LOGITS else 3
        assert compiled["descriptors"] >= least and not compiled["broken_rules"]

    def test_products_are_ordered_and_wait_for_none(self, compiled: dict[str, Any]) -> None:
        """Registers are fenced before wgmma takes them, and ptxas does not have it wait in turn."""
        assert compiled["unordered"] == 0 and not compiled["serialized"]

    def test_what_is_stored_is_fenced(self, kernel_name: str, compiled: dict[str, Any]) -> None:
        """Before wgmma or TMA reads it, or another warpgroup is told of it."""
        experts = aot_cuda.EXPERTS.get(kernel_name)
        if experts is not None:  # those with scales of outputs store nothing there
            least = 2 if experts[-2] > 1 else 0
        else:
            least = 2 if kernel_name in aot_cuda.KERNELS else 1
        assert compiled["unfenced"] == 0 and compiled["fences"] >= least

    @pytest.mark.parametrize("control", aot_cuda.CONTROLS)
    def test_controls(self, control: str, compiler: Callable[[str], Any]) -> None:
        result = compiler(control)
        if control == "control_no_fences":
            assert result["unfenced"] > 0
        else:
            assert result["asked"] > result["pool"]
