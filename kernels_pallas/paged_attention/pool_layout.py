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

    slots_last: of a pool in 8 bits, whether the scales of a block lie [scale of a token, slot] and
    not the other way round; there, slots are padded to whole `lanes`.
    """

    rows: int
    width: int
    head_width: int
    slots_last: bool = False
    lanes: int = 1

    def scales(self, block_size: int) -> tuple[int, int]:
        """The shape of a block's scales: one of each key and each value of each slot."""
        count = self.rows * (self.width // self.head_width)
        if not self.slots_last:
            return block_size, count
        return count, -(-block_size // self.lanes) * self.lanes

    def pack_scaled(self, pool: "ScaledPool") -> "ScaledPool":
        """A pool in 8 bits of the plain layout in this one, padded with zeros."""
        blocks, P, _ = pool.scales.shape
        scales = pool.scales.swapaxes(1, 2) if self.slots_last else pool.scales
        scales = pad(scales, (blocks, *self.scales(P)))
        return ScaledPool(self.pack(pool.values), scales, self.slots_last)

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

    values [L*N, P, 2K, D], int8 or float8_e4m3fn; scales [L*N, P, 2K], or [L*N, 2K, P] where
    slots_last, f32; `PoolLayout` says how either is padded. It stands where a pool of one array
    can.
    """

    values: Any
    scales: Any
    slots_last: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.values.dtype

    @property
    def scales_of_a_row(self) -> int:
        """Keys and values that lie beside each other in a row of the values."""
        return self.scales.shape[1 if self.slots_last else 2] // self.values.shape[2]


LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # that a value may be, by its dtype


def scaled(kv: Array, dtype: Any, parts: int = 1) -> ScaledPool:
    """Keys and values [..., 2K, D] in 8 bits, to the nearest value: a scale takes the largest of D
    to the largest value. Zeros have a scale of 1; what is not finite shows in its scale. parts: of
    a row that has so many keys and values beside each other, with a scale each.
    """
    *lead, rows, width = kv.shape
    kv = kv.astype(jnp.float32).reshape(*lead, rows * parts, width // parts)
    top = jnp.max(jnp.abs(kv), axis=-1) / LARGEST[jnp.dtype(dtype).name]
    scales = jnp.where(top == 0, jnp.float32(1), top)
    values = kv / scales[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        values = jnp.round(values)
    return ScaledPool(values.reshape(*lead, rows, width).astype(dtype), scales)


def slots_last_layout(num_kv_heads: int, head_dim: int) -> PoolLayout:
    """The plain one, in 8 bits with the scales of a key, or a value, of a block side by side."""
    plain = plain_pool_layout(num_kv_heads, head_dim)
    return dataclasses.replace(plain, slots_last=True)


def pad(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros at the end of each axis that is shorter."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
