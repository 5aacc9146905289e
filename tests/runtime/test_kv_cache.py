"""Moves of KV blocks, within the pool and to and from the host: what they write, and that they do
it in place.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.buckets import Bucket
from jpaged.runtime import kv_cache
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from tests.hlo import pool_copies
from tests.tiny import CONFIG, engine, make_params

LAYERS, BLOCKS, BLOCK = 3, 7, (4, 2, 8)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
DECODE = Bucket(phase="decode", tokens=8, rows=8, blocks=16)
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


@DTYPES
def test_through_the_runner(dtype: Any) -> None:
    """To the host and back, in sizes that are no power of two; what was read does not follow the
    pool.
    """
    runner = make_runner(BLOCKS, dtype)
    runner.allocate()
    pool = (
        jnp.arange(math.prod(runner.layout.shape), dtype=jnp.int32)
        .astype(dtype)
        .reshape(runner.layout.shape)
    )
    runner._pool = pool + jnp.zeros_like(pool)
    layers = np.asarray(pool.astype(jnp.float32)).reshape(CONFIG.num_layers, BLOCKS, -1)
    kept = runner.read_blocks([5, 2, 0])
    assert len(np.asarray(kept)) == CONFIG.num_layers * 4
    runner.write_blocks(kept, [1, -1, 6])
    runner.write_blocks(kept, [-1, 0, -1])
    expected = layers.copy()
    expected[:, [1, 6, 0]] = layers[:, [5, 0, 2]]
    found = np.asarray(runner._pool.astype(jnp.float32)).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)
    runner.write_blocks(kept, [5, 2, 0])
    expected[:, [5, 2, 0]] = layers[:, [5, 2, 0]]
    np.testing.assert_array_equal(
        np.asarray(runner._pool.astype(jnp.float32)).reshape(expected.shape), expected
    )
    assert runner.read_blocks([]) is None
    runner.write_blocks(None, [])


# In place


def make_runner(num_blocks: int, dtype: Any = jnp.float32) -> Runner:
    where = Placement(mesh=None, axis=None, device=jax.devices()[0])
    runner = Runner(CONFIG, engine(num_blocks=num_blocks).resolve(CONFIG), where, dtype)
    runner.params = dict(make_params(dtype=dtype))
    return runner


def in_place(compiled: Any, runner: Runner) -> tuple[list[str], bool]:
    """Pool-sized copies in the HLO, and whether temporaries and new outputs are smaller than the
    pool.
    """
    memory, pool_bytes = (
        compiled.memory_analysis(),
        runner.layout.block_bytes * runner.layout.num_blocks,
    )
    fresh = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return pool_copies(compiled.as_text(), math.prod(runner.layout.shape)), fresh < pool_bytes


def undonated(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda function, *, donate_argnums, **how: jit(function, **how))


@functools.cache
def decode_step(num_blocks: int) -> tuple[Any, Runner]:
    runner = make_runner(num_blocks)
    return runner.lower(DECODE).compile(), runner


def test_the_decode_step_copies_blocks_only() -> None:
    """Its copies of blocks are in the loop at its start, and the pool stays where it is."""
    compiled, runner = decode_step(MANY)
    assert "copy_blocks" in compiled.as_text()
    copies, is_small = in_place(compiled, runner)
    assert copies == [] and is_small


def test_temporaries_of_the_decode_step_do_not_depend_on_the_pool() -> None:
    sizes = [decode_step(n)[0].memory_analysis().temp_size_in_bytes for n in (127, MANY)]
    assert sizes[0] == sizes[1] > 0


@DTYPES
def test_copies_alone(dtype: Any) -> None:
    """Without a model around them: no array of the pool's size, of either dtype."""
    runner = make_runner(MANY, dtype)
    pool = jax.ShapeDtypeStruct(runner.layout.shape, dtype)
    copy = functools.partial(kv_cache.copy_blocks, num_layers=CONFIG.num_layers)
    arguments = (pool, jax.ShapeDtypeStruct((8, 2), jnp.int32))
    copies, is_small = in_place(jax.jit(copy, donate_argnums=0).lower(*arguments).compile(), runner)
    assert copies == [] and is_small
    copies, is_small = in_place(jax.jit(copy).lower(*arguments).compile(), runner)
    assert len(copies) == 1 and " copy(" in copies[0] and not is_small, (
        "the control: undonated, it must copy"
    )


@DTYPES
def test_write_blocks_in_place(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(MANY, dtype)
    copies, is_small = in_place(runner._move("write_blocks", 4), runner)
    assert copies == [] and is_small
    undonated(monkeypatch)
    runner = make_runner(MANY, dtype)
    copies, is_small = in_place(runner._move("write_blocks", 4), runner)
    assert len(copies) == 1 and " copy(" in copies[0] and not is_small, "the control"


def test_read_blocks_makes_its_blocks_only() -> None:
    runner = make_runner(MANY)
    copies, is_small = in_place(runner._move("read_blocks", 4), runner)
    assert copies == [] and is_small


@pytest.mark.slow
def test_without_donation_the_decode_step_copies_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    undonated(monkeypatch)
    runner = make_runner(MANY)
    copies, is_small = in_place(runner.lower(DECODE).compile(), runner)
    assert copies and " copy(" in copies[0] and not is_small
