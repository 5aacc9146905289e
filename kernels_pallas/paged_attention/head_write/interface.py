"""What every implementation of `write_heads` takes."""

import dataclasses

import jax.numpy as jnp

from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import PoolLayout, plain_pool_layout


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """The root mean square norms of queries and keys, over D.

    has_offset: the factor is (1 + scale). in_f32: the scale is applied in f32, before x is rounded;
    otherwise after.
    """

    eps: float
    has_offset: bool = False
    in_f32: bool = False


def refused(shapes: Shapes, layout: PoolLayout) -> str | None:
    """Return why no such kernel can write a pool of a layout, or None: they are made for pools
    without padding whose values have the dtype of the product.
    """
    if shapes.scaled:
        return shapes.scaled
    if jnp.dtype(shapes.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {jnp.dtype(shapes.dtype)}"
    plain = plain_pool_layout(shapes.num_kv_heads, shapes.head_dim)
    if (layout.rows, layout.width) != (plain.rows, plain.width):
        return "a pool with padding"
    return None
