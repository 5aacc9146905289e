"""PoolLayout: how a token's keys and values are laid out in the pool of one device.

Shapes: L layers, N pool blocks, P block size, K KV heads, D head dim, Dv width of a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """The layout of a token in a pool [L*N, P, rows, width].

    K0, V0, K1, V1, ... are each padded to `head_width`; as many as fit stand side by side in a row.
    Where values are of another width than keys, a row is one head instead: its key, which is
    `key_width` wide, its value, and padding; head_width is then that of the row. So is a row of
    latents: in place of the key a latent, in place of the value a rotated key.

    slots_last: in a pool of 8 bits, a block's scales are [scale of a token, slot] instead of [slot,
    scale of a token], with slots padded to whole `lanes`.
    """

    rows: int
    width: int
    head_width: int
    slots_last: bool = False
    lanes: int = 1
    key_width: int | None = None

    @property
    def vectors_a_row(self) -> int:
        """How many keys and values stand side by side in a row."""
        return 2 if self.key_width is not None else self.width // self.head_width

    def scales(self, block_size: int) -> tuple[int, int]:
        """Return the shape of a block's scales: one for each key and each value of each slot."""
        count = self.rows * self.vectors_a_row
        if not self.slots_last:
            return block_size, count
        return count, -(-block_size // self.lanes) * self.lanes

    def pack_scaled(self, pool: "ScaledPool") -> "ScaledPool":
        """Return a pool of 8 bits, given in the plain layout, in this one; padding is zero."""
        blocks, P, _ = pool.scales.shape
        scales = pool.scales.swapaxes(1, 2) if self.slots_last else pool.scales
        scales = pad(scales, (blocks, *self.scales(P)))
        return ScaledPool(self.pack(pool.values), scales, self.slots_last, self.key_width)

    def token(self, k_KD: Array, v_KD: Array) -> Array:
        """Return keys [..., K, D] and values [..., K, Dv] as [..., rows, width]."""
        if self.key_width is not None:
            return self.pack(jnp.concatenate([k_KD, v_KD], axis=-1))
        *lead, K, D = k_KD.shape
        return self.pack(jnp.stack([k_KD, v_KD], axis=-2).reshape(*lead, 2 * K, D))

    def pack(self, kv_2KD: Array) -> Array:
        """Return keys and values [..., 2K, D] (K0, V0, K1, V1, ...), or [..., K, D + Dv] where
        their widths differ, as [..., rows, width].

        Padding is zero.
        """
        if self.key_width is not None:
            return pad(kv_2KD, (*kv_2KD.shape[:-2], self.rows, self.width))
        *lead, K2, _ = kv_2KD.shape
        kv = pad(kv_2KD, (*lead, K2, self.head_width)).reshape(*lead, -1, self.width)
        return pad(kv, (*lead, self.rows, self.width))


def plain_pool_layout(num_kv_heads: int, head_dim: int, value_dim: int | None = None) -> PoolLayout:
    """Return the layout without padding: one row for each key and each value, or for each head
    where value_dim says that values are of another width.
    """
    if value_dim is not None:
        width = head_dim + value_dim
        return PoolLayout(rows=num_kv_heads, width=width, head_width=width, key_width=head_dim)
    return PoolLayout(rows=2 * num_kv_heads, width=head_dim, head_width=head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledPool:
    """A pool of keys and values in 8 bits: each vector is its D values times one scale.

    values [L*N, P, 2K, D], int8 or float8_e4m3fn; [L*N, P, K, D + Dv] where key_width is D. scales
    f32 [L*N, P, 2K], or [L*N, 2K, P] if slots_last. `PoolLayout` pads both. Functions take it in
    the place of a pool of one array.
    """

    values: Any
    scales: Any
    slots_last: bool = dataclasses.field(default=False, metadata={"static": True})
    key_width: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def scales_of_a_row(self) -> int:
        """The number of keys and values side by side in a row of the values."""
        return self.scales.shape[1 if self.slots_last else 2] // self.values.shape[2]


LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest value, by dtype


def scaled(kv: Array, dtype: Any, parts: int = 1, key_width: int | None = None) -> ScaledPool:
    """Return keys and values [..., 2K, D] in 8 bits, rounded to the nearest value.

    A scale maps the largest of D numbers to the largest value. Zeros have a scale of 1; numbers
    that are not finite make a scale that is not. parts: keys and values side by side in a row, each
    with its scale. key_width: a row [..., K, D + Dv] is a key of this width and a value.
    """
    if key_width is not None:
        k, v = (scaled(x, dtype) for x in (kv[..., :key_width], kv[..., key_width:]))
        scales = jnp.stack([k.scales, v.scales], axis=-1)
        scales = scales.reshape(*scales.shape[:-2], -1)
        values = jnp.concatenate([k.values, v.values], axis=-1)
        return ScaledPool(values, scales, key_width=key_width)
    *lead, rows, width = kv.shape
    kv = kv.astype(jnp.float32).reshape(*lead, rows * parts, width // parts)
    top = jnp.max(jnp.abs(kv), axis=-1) / LARGEST[jnp.dtype(dtype).name]
    scales = jnp.where(top == 0, jnp.float32(1), top)
    values = kv / scales[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        values = jnp.round(values)
    return ScaledPool(values.reshape(*lead, rows, width).astype(dtype), scales)


def slots_last_layout(num_kv_heads: int, head_dim: int, value_dim: int | None = None) -> PoolLayout:
    """Return the plain layout; in 8 bits, a block's scales of one key or value are contiguous."""
    plain = plain_pool_layout(num_kv_heads, head_dim, value_dim)
    return dataclasses.replace(plain, slots_last=True)


def pad(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x with zeros at the end of each axis that is shorter than in `shape`."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
