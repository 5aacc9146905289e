"""Moves of KV blocks, within the pool and to and from the host: what they write, and that they do
it in place.
"""

import ctypes
import dataclasses
import functools
import math
import mmap
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from jpaged.engine.shapes import DecodeShape
from jpaged.models.forward import bind
from jpaged.models.kv_groups import KVGroup
from jpaged.models.record import Field, Record
from jpaged.runtime import kv_cache
from jpaged.runtime.kv_cache import PoolSpec
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from kernels_cpu import library
from tests.hlo import forbid_donation, in_place, pool_copies, whole
from tests.tiny import CONFIG, config, engine, make_params

LAYERS, BLOCKS, BLOCK = 3, 7, (4, 2, 8)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
DECODE = DecodeShape(rows=8, tables=1, blocks=16)
# An odd number of blocks, so large that no other array of a step has as many elements, or is as
# large.
MANY = 8191

copy_blocks = jax.jit(functools.partial(kv_cache.copy_blocks, num_layers=LAYERS))
read_blocks = jax.jit(functools.partial(kv_cache.read_blocks, num_layers=LAYERS))
write_blocks = jax.jit(functools.partial(kv_cache.write_blocks, num_layers=LAYERS))


def make_pool(dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((LAYERS * BLOCKS, *BLOCK))
    return jnp.asarray(values, dtype)


def by_block(pool: jax.Array) -> np.ndarray:
    """[L, N, P, 2K, D], in float32 (which holds every bfloat16)."""
    return np.asarray(pool.astype(jnp.float32)).reshape(LAYERS, BLOCKS, *BLOCK).copy()


def copied(pool: jax.Array, pairs: list[tuple[int, int]]) -> np.ndarray:
    """The definition: one pair after the other, until one of equal blocks."""
    blocks = by_block(pool)
    for source, target in pairs:
        if source == target:
            break
        blocks[:, target] = blocks[:, source]
    return blocks


@DTYPES
@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 4), (2, 5), (1, 6), (0, 0)],  # several, one source twice
        [
            (0, 1),
            (2, 0),
            (1, 3),
            (3, 6),
        ],  # a block is read after it was written, and written after it was read
        [(6, 0), (2, 2), (1, 3), (4, 5)],  # a pair of equal blocks ends the list
        [(3, 3), (1, 2), (4, 5), (0, 6)],
        [(0, 0)] * 4,  # what padding holds
    ],
    ids=["several", "chain", "ended", "ended at once", "none"],
)
def test_copy_blocks(dtype: Any, pairs: list[tuple[int, int]]) -> None:
    pool = make_pool(dtype)
    found = copy_blocks(pool, jnp.asarray(pairs, jnp.int32))
    assert found.dtype == dtype and found.shape == pool.shape
    np.testing.assert_array_equal(by_block(found), copied(pool, pairs))


def test_copy_blocks_as_often_as_not() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        pairs = rng.integers(0, BLOCKS, (8, 2)).tolist()
        pool = make_pool(seed=int(rng.integers(100)))
        np.testing.assert_array_equal(
            by_block(copy_blocks(pool, jnp.asarray(pairs, jnp.int32))), copied(pool, pairs)
        )


@DTYPES
def test_out_and_in_again(dtype: Any) -> None:
    """Blocks go to other places of another pool; ids of -1 write nothing, and all else stays."""
    pool, other = make_pool(dtype), make_pool(dtype, seed=1)
    sources = jnp.asarray([3, 0, 6, -1], jnp.int32)
    targets = jnp.asarray([1, -1, 0, -1], jnp.int32)
    blocks = read_blocks(pool, sources)
    assert blocks.dtype == dtype and blocks.shape == (LAYERS * 4, *BLOCK)
    expected = by_block(other)
    expected[:, [1, 0]] = by_block(pool)[:, [3, 6]]
    np.testing.assert_array_equal(by_block(write_blocks(other, targets, blocks)), expected)
    back = write_blocks(jnp.zeros_like(pool), jnp.asarray([3, 0, 6, -1], jnp.int32), blocks)
    whole = np.zeros_like(expected)
    whole[:, [3, 0, 6]] = by_block(pool)[:, [3, 0, 6]]
    np.testing.assert_array_equal(by_block(back), whole)


def test_nothing_to_write() -> None:
    pool = make_pool()
    nowhere = jnp.full(2, -1, jnp.int32)
    np.testing.assert_array_equal(write_blocks(pool, nowhere, jnp.ones((LAYERS * 2, *BLOCK))), pool)
    assert jnp.isfinite(read_blocks(pool, nowhere)).all()


@pytest.mark.parametrize("windows", [(), (None, 7)], ids=["one group", "two groups"])
@DTYPES
def test_through_the_runner(dtype: Any, windows: tuple[int | None, ...]) -> None:
    """Each group's blocks to the host and back, in numbers that are no power of two; what was read
    does not follow the pools.
    """
    runner = make_runner(BLOCKS, dtype, windows=windows)
    runner.allocate()
    assert runner._state is not None
    pools = tuple(
        {"kv": jnp.arange(math.prod(p.shape), dtype=jnp.int32).astype(dtype).reshape(p.shape) + at}
        for at, p in enumerate(runner.pools)
    )
    runner._state = dataclasses.replace(runner._state, kv=pools)
    groups = range(len(runner.pools))

    def found() -> list[np.ndarray]:
        """[L, N, block] of each group."""
        assert runner._state is not None
        values = [np.asarray(pool["kv"].astype(jnp.float32)) for pool in runner._state.kv]
        layers = [pool.num_layers for pool in runner.pools]
        return [x.reshape(n, BLOCKS, -1).copy() for x, n in zip(values, layers, strict=True)]

    # Other blocks of the second group: none at all for the last of these moves.
    sources = [[5, 2, 0], [4, 1, 3]][: len(groups)]
    targets = [[1, 4, 6], [0, 2, 5]][: len(groups)]
    before, expected = found(), found()
    kept = runner.fetch_blocks(runner.read_blocks(sources))
    for blocks, pool in zip(kept, runner.pools, strict=True):
        assert [len(block["kv"]) for block in blocks] == [pool.num_layers] * 3
    up = runner.transfers.ups
    runner.write_blocks(kept, targets)
    assert runner.transfers.ups == up + 2 * len(groups), "the blocks and their places, a group"
    for group in groups:
        for source, target in zip(sources[group], targets[group], strict=True):
            expected[group][:, target] = before[group][:, source]
    np.testing.assert_equal(found(), expected)
    runner.write_blocks(kept, sources)
    for group in groups:
        expected[group][:, sources[group]] = before[group][:, sources[group]]
    np.testing.assert_equal(found(), expected)
    nothing: list[list[int]] = [[] for _ in groups]
    assert runner.fetch_blocks(runner.read_blocks(nothing)) == nothing
    runner.write_blocks(nothing, nothing)
    np.testing.assert_equal(found(), expected)


# In place


def make_runner(
    num_blocks: int,
    dtype: Any = jnp.float32,
    windows: tuple[int | None, ...] = (),
    **changes: Any,
) -> Runner:
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    model = config(sliding_windows=windows)
    settings = engine(num_blocks=num_blocks, **changes).resolve(model)
    return Runner(model, settings, where, bind(model, make_params(0, model, dtype)))


@functools.cache
def decode_step(num_blocks: int) -> tuple[Any, Runner]:
    runner = make_runner(num_blocks)
    return runner.compiled.lower(DECODE).compile(), runner


def test_the_decode_step_copies_nothing() -> None:
    """No block either: the pool stays where it is."""
    compiled, runner = decode_step(MANY)
    assert "copy_blocks" not in compiled.as_text()
    copies, is_small = in_place(compiled, runner.pools)
    assert copies == [] and is_small


def test_blocks_are_copied_in_place_in_every_group() -> None:
    """Blocks alone, however many are to be copied; the rows that there can be are its one shape."""
    runner = make_runner(MANY, windows=(3, None))
    copy = runner.compiled.copy_blocks()
    copies, is_small = in_place(copy, runner.pools)
    assert copies == [] and is_small and runner.compiled.copy_blocks() is copy
    assert "copy_blocks" in runner.compiled.seconds


@pytest.mark.own_steps
@pytest.mark.parametrize("donates", [True, False], ids=["donated", "the control"])
@pytest.mark.parametrize("what", ["decode", "copy_blocks", "write_blocks"])
def test_no_field_of_a_record_is_copied(
    what: str, donates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values in 8 bits, and their scales: each in its place, or each copied."""
    runner = make_runner(MANY, kv_cache_dtype="int8", attention="xla")
    if not donates:
        forbid_donation(monkeypatch)
    assert [list(whole(pool)) for pool in runner.pools] == [["kv", "scales"]]
    if what == "decode":
        compiled = runner.compiled.lower(DECODE).compile()
    elif what == "copy_blocks":
        compiled = runner.compiled.copy_blocks()
    else:
        compiled = runner.compiled.move("write_blocks", 0, 4)
    for field in whole(runner.pools[0]).values():
        copies = pool_copies(compiled.as_text(), math.prod(field.shape))
        assert (copies == []) == donates, copies


STATE = Record(
    fields=(Field("state", (4, 8, 16), split=0, dtype=jnp.float32), Field("conv", (6, 3), split=0)),
    per="block",
)
# Of no kernel of attention: each field is an array of the pool.
WHOLE = Record(fields=(Field("summary", (36,)), Field("index", (8,), dtype=jnp.int8)))


def pool_of(record: Record, window: int | None, num_blocks: int, shards: int = 1) -> PoolSpec:
    """The pool of three layers that keep a record without keys and values."""
    group = KVGroup(layers=(0, 2, 5), record=record, window=window, num_heads=4)
    (any_kernel,) = {pool.kernel for pool in make_runner(BLOCKS).pools}
    return PoolSpec(
        group=group,
        kernel=any_kernel,
        num_blocks=num_blocks,
        block_size=4,
        dtype=jnp.dtype(jnp.bfloat16),
        shards=shards,
    )


def test_a_record_is_kept_once_a_block_or_once_a_token() -> None:
    """A state with its convolution's inputs, and a summary beside index keys: shapes, and bytes of
    a device, where what is split is halved and what is not lies whole.
    """
    state, kept_whole = (pool_of(*kept, BLOCKS, shards=2) for kept in ((STATE, 2), (WHOLE, None)))
    shapes = {name: (x.shape, str(x.dtype)) for name, x in whole(state).items()}
    assert shapes == {"state": ((21, 4, 8, 16), "float32"), "conv": ((21, 6, 3), "bfloat16")}
    shapes = {name: (x.shape, str(x.dtype)) for name, x in whole(kept_whole).items()}
    assert shapes == {"summary": ((21, 4, 36), "bfloat16"), "index": ((21, 4, 8), "int8")}
    assert state.block_bytes == 3 * (4 * 4 * 8 * 16 + 2 * 6 * 3) == 2 * state.device_block_bytes
    assert kept_whole.block_bytes == 3 * 4 * (2 * 36 + 8) == kept_whole.device_block_bytes
    assert state.size.num_blocks == BLOCKS and state.size.window == 2


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("record", [STATE, WHOLE], ids=["state", "whole"])
def test_blocks_of_any_record_are_moved(record: Record, devices: int) -> None:
    """Copied within the pool, read, and written elsewhere, on the devices that share it."""
    spec = pool_of(record, None, BLOCKS, shards=devices)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0])
    shardings, rng = spec.shardings(where), np.random.default_rng(0)
    values = {
        name: rng.integers(-99, 99, x.shape).astype(x.dtype) for name, x in whole(spec).items()
    }
    pool = jax.device_put(values, shardings)
    for field in record.fields:
        share = pool[field.name].addressable_shards[0].data.size
        split = devices if field.split is not None else 1
        assert share * split == values[field.name].size, field.name
    outs = {"donate_argnums": 0, "out_shardings": shardings}
    copy = jax.jit(functools.partial(kv_cache.copy_blocks, num_layers=LAYERS), **outs)
    pool = copy(pool, jnp.asarray([[1, 4], [4, 6], [0, 0]], jnp.int32))
    blocks = read_blocks(pool, jnp.asarray([6, 2], jnp.int32))
    write = jax.jit(functools.partial(kv_cache.write_blocks, num_layers=LAYERS), **outs)
    pool = write(pool, jnp.asarray([0, -1], jnp.int32), blocks)
    for name, before in values.items():
        found = np.asarray(pool[name]).reshape(LAYERS, BLOCKS, *before.shape[1:])
        expected = before.reshape(found.shape).copy()
        expected[:, [4, 6, 0]] = expected[:, [1]]
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("what", ["copy_blocks", "write_blocks"])
@pytest.mark.parametrize("record", [STATE, WHOLE], ids=["state", "whole"])
def test_no_pool_of_any_record_is_copied(record: Record, what: str) -> None:
    """Each field is updated in place, and copied where it may not be: the control."""
    spec = pool_of(record, None, MANY)
    function = functools.partial(getattr(kv_cache, what), num_layers=LAYERS)
    args: list[Any] = [whole(spec), jax.ShapeDtypeStruct((4, 2), jnp.int32)]
    if what == "write_blocks":
        args[1:] = [jax.ShapeDtypeStruct((4,), jnp.int32), spec.of_rows(4 * LAYERS)]
    for donated in ((), (0,)):
        text = jax.jit(function, donate_argnums=donated).lower(*args).compile().as_text()
        assert text is not None
        for name, field in whole(spec).items():
            copies = pool_copies(text, math.prod(field.shape))
            assert (copies == []) == bool(donated), (name, copies)


@pytest.mark.middle
def test_temporaries_of_the_decode_step_do_not_depend_on_the_pool() -> None:
    sizes = [decode_step(n)[0].memory_analysis().temp_size_in_bytes for n in (127, MANY)]
    assert sizes[0] == sizes[1] > 0


@DTYPES
def test_copies_alone(dtype: Any) -> None:
    """Without a model around them: no array of the pool's size, of either dtype."""
    (spec,) = make_runner(MANY, dtype).pools
    pool = jax.ShapeDtypeStruct(spec.shape, dtype)
    copy = functools.partial(kv_cache.copy_blocks, num_layers=CONFIG.num_layers)
    arguments = (pool, jax.ShapeDtypeStruct((8, 2), jnp.int32))
    donated, kept = (
        jax.jit(copy, donate_argnums=argnums).lower(*arguments).compile() for argnums in (0, ())
    )
    copies, is_small = in_place(donated, [spec])
    assert copies == [] and is_small
    copies, is_small = in_place(kept, [spec])
    assert len(copies) == 1 and " copy(" in copies[0] and not is_small, (
        "the control: undonated, it must copy"
    )


@pytest.mark.own_steps
@DTYPES
def test_write_blocks_in_place(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every group, into its own pool."""
    runner = make_runner(MANY, dtype, windows=(3, None))
    assert runner.pools[0].num_blocks < MANY == runner.pools[1].num_blocks
    copies, is_small = in_place(runner.compiled.move("write_blocks", 1, 4), runner.pools[1:])
    assert copies == [] and is_small
    copies, is_small = in_place(runner.compiled.move("write_blocks", 0, 4), runner.pools[:1])
    assert copies == []
    forbid_donation(monkeypatch)
    runner = make_runner(MANY, dtype)
    copies, is_small = in_place(runner.compiled.move("write_blocks", 0, 4), runner.pools)
    assert len(copies) == 1 and " copy(" in copies[0] and not is_small, "the control"


def test_read_blocks_makes_its_blocks_only() -> None:
    runner = make_runner(MANY)
    copies, is_small = in_place(runner.compiled.move("read_blocks", 0, 4), runner.pools)
    assert copies == [] and is_small


@pytest.mark.slow
@pytest.mark.own_steps
def test_without_donation_the_decode_step_copies_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_donation(monkeypatch)
    runner = make_runner(MANY)
    copies, is_small = in_place(runner.compiled.lower(DECODE).compile(), runner.pools)
    assert copies and " copy(" in copies[0] and not is_small


def resident(array: jax.Array) -> int:
    """Bytes of an array's whole pages that are in memory."""
    page = mmap.PAGESIZE
    begin = -(-array.unsafe_buffer_pointer() // page) * page
    count = (array.unsafe_buffer_pointer() + array.nbytes - begin) // page
    pages = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * page), pages) == 0
    return page * sum(x & 1 for x in pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's mincore")
def test_a_pool_takes_no_memory_before_it_is_used() -> None:
    """Also where memory that held something else is used again, and after steps it was donated
    to.
    """
    if reason := library.unavailable():
        pytest.skip(reason)
    place = SingleDeviceSharding(jax.devices()[0])
    shape, huge = (2 * kv_cache.LAZY_BYTES // 4, 1), 2 << 20
    pool = kv_cache.zeros(shape, jnp.float32, place)
    assert resident(pool) < huge
    here = pool.unsafe_buffer_pointer()
    write = jax.jit(lambda x, i: x.at[i].set(3.0), donate_argnums=0)
    for i in range(3):
        pool = write(pool, i)
    assert pool.unsafe_buffer_pointer() == here, "it was copied"
    assert 0 < resident(pool) <= huge
    assert float(pool.sum()) == 9.0
    plain = jnp.zeros(shape, jnp.float32).block_until_ready()  # the control
    assert resident(plain) > plain.nbytes - huge
    small = kv_cache.zeros((1000,), jnp.bfloat16, place)
    assert not np.asarray(small, np.float32).any()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's mincore")
def test_the_first_blocks_take_one_huge_page_a_layer() -> None:
    """Not another one, most of which holds the last blocks of the layer before."""
    if reason := library.unavailable():
        pytest.skip(reason)
    place, layers, block, huge = SingleDeviceSharding(jax.devices()[0]), 8, 128 << 10, 2 << 20
    rows = 2 * kv_cache.LAZY_BYTES // block
    pool = kv_cache.zeros((rows, block), jnp.int8, place, num_layers=layers)
    write = jax.jit(lambda x, i: x.at[i * (rows // layers)].set(1), donate_argnums=0)
    for layer in range(layers):
        pool = write(pool, layer)
    jax.block_until_ready(pool)
    assert layers * block <= resident(pool) <= layers * (huge + block)
    assert int(pool.astype(jnp.int32).sum()) == layers * block
