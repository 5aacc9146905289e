"""How a token's keys and values lie in the pool of one device.

Shapes: L layers, N pool blocks, P block size, K KV heads, D head dim.
"""

import dataclasses

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


def pad(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros at the end of each axis that is shorter."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
