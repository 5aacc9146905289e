"""Heads normed, rotated and written in one C++ call, against the layers' own definitions."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_cpu import head_write
from kernels_cpu.library import unavailable
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import plain_pool_layout
from kernels_pallas.paged_attention.tpu import pool_layout as padded
from tests.kernels.test_head_write import PLAIN, Case, build, check
from tests.kernels.test_kv_write import L

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)
QWEN3 = Case("qwen3", T=37, D=64, R=64, norm=PLAIN)
CASES = (
    QWEN3,
    Case("gemma3", D=32, R=32, norm=(True, True)),
    Case("an offset in 16 bits", T=5, D=128, R=128, norm=(True, False)),
    Case("llama", T=37, G=4, D=64, R=64),
    Case("phi3", G=3, D=96, R=72),
    Case("smollm3 without rope", T=3, D=32, R=0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_what_the_layers_do(case: Case) -> None:
    check(head_write, case, "bfloat16", interpret=False)


@pytest.mark.parametrize("layer", [0, L - 1])
def test_each_layer(layer: int) -> None:
    check(head_write, QWEN3, "bfloat16", layer, interpret=False)


def written(case: Case, rows: slice) -> tuple[Any, Any]:
    given = build(case, "bfloat16")
    how = given.how | {"interpret": False}
    if (turn := how.get("rotation")) is not None:
        how["rotation"] = turn[0][rows], turn[1][rows]
    pool, slots = jnp.asarray(given.pool), jnp.asarray(given.slots[rows])
    q, pool = head_write.write_heads(given.qkv[rows], pool, 1, slots, **how)
    return np.asarray(q), np.asarray(pool)


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    """Nor on how many threads there are work for: prefill and decode write the same."""
    case = dataclasses.replace(QWEN3, T=37, K=8, G=4, D=128, R=128)
    q, pool = written(case, slice(None))
    for rows in (slice(3, 4), slice(5, 12), slice(36, 37)):
        some_q, some_pool = written(case, rows)
        assert np.array_equal(some_q, q[rows])
        before = np.asarray(build(case, "bfloat16").pool)
        changed = some_pool != before
        assert np.array_equal(some_pool[changed], pool[changed])


@pytest.mark.parametrize(
    ("own", "layout", "reason"),
    [
        ({}, plain_pool_layout, None),
        ({"dtype": jnp.float32}, plain_pool_layout, "only bfloat16"),
        ({"head_dim": 80}, plain_pool_layout, "only multiples of 32"),
        ({"kv_dtype": jnp.int8}, plain_pool_layout, "with scales"),
        ({"head_dim": 96}, padded, "padding"),
    ],
)
def test_unsupported(own: dict[str, Any], layout: Any, reason: str | None) -> None:
    given = {"dtype": jnp.bfloat16, "head_dim": 64, "block_size": 16} | own
    shapes = Shapes(num_heads=4, num_kv_heads=2, **given)
    found = head_write.unsupported(shapes, layout(2, given["head_dim"]), None)
    assert found is None if reason is None else reason in str(found)


def test_widths_that_are_not_the_pools() -> None:
    given = build(QWEN3, "bfloat16")
    pool, slots = jnp.asarray(given.pool)[:, :, :2], jnp.asarray(given.slots)
    how = given.how | {"interpret": False}
    with pytest.raises(Exception, match="heads of other widths"):
        head_write.write_heads(given.qkv, pool, 1, slots, **how)
    scales = given.how["scales"][0][:32], given.how["scales"][1]
    with pytest.raises(Exception, match="one number a dimension"):
        head_write.write_heads(
            given.qkv, jnp.asarray(given.pool), 1, slots, **how | {"scales": scales}
        )
