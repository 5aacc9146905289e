"""How a token's keys and values lie in the pool of one device.

Shapes: L layers, N pool blocks, P block size, K KV heads, D head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """How a token's keys and values lie in a pool [L*N, P, rows, width]: K0, V0, K1, V1, ..., each
    padded to `head_width`, one beside the other in a row of the pool where they fit.
    """

    rows: int
    width: int
    head_width: int

    def pack(self, kv_2KD: Array) -> Array:
        """Keys and values [..., 2K, D] (K0, V0, K1, V1, ...) as [..., rows, width], padded with
        zeros.
        """
        *lead, K2, _ = kv_2KD.shape
        kv = pad(kv_2KD, (*lead, K2, self.head_width)).reshape(*lead, -1, self.width)
        return pad(kv, (*lead, self.rows, self.width))


def plain_pool_layout(num_kv_heads: int, head_dim: int) -> PoolLayout:
    """A row a key and a row a value, without padding."""
    return PoolLayout(rows=2 * num_kv_heads, width=head_dim, head_width=head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledPool:
    """Keys and values in 8 bits, each the product of its D values and one scale.

    values [L*N, P, 2K, D], int8 or float8_e4m3fn; scales [L*N, P, 2K], f32. It stands where a pool
    of one array can.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.values.dtype


LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # that a value may be, by its dtype


def scaled(kv: Array, dtype: Any) -> ScaledPool:
    """Keys and values [..., 2K, D] in 8 bits, to the nearest value: a scale takes the largest of D
    to the largest value. Zeros have a scale of 1; what is not finite shows in its scale.
    """
    kv = kv.astype(jnp.float32)
    top = jnp.max(jnp.abs(kv), axis=-1) / LARGEST[jnp.dtype(dtype).name]
    scales = jnp.where(top == 0, jnp.float32(1), top)
    values = kv / scales[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        values = jnp.round(values)
    return ScaledPool(values.astype(dtype), scales)


def pad(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros at the end of each axis that is shorter."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
