"""Whole, a tensor of ours that is made of another project's by a function, where no name map can
say what its axes are.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Whole:
    """One of our tensors that no name map describes. paths: of what it is made of. make: a function
    of our shape, a size, and their arrays. size: known to the config alone. shapes: of their
    arrays, where not every shape that `make` takes is right.
    """

    paths: tuple[str, ...]
    make: Callable[..., jax.Array]
    size: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()


def reshaped(shape: tuple[int, ...], _: int, x: jax.Array) -> jax.Array:
    """Return the same numbers in our shape."""
    return x.reshape(shape)


def of_kernel(shape: tuple[int, ...], _: int, kernel: jax.Array) -> jax.Array:
    """Return the kernel of a convolution [frames and sides of a patch, channels, W] as the weight
    of a product [W, C], whose inputs are in order of channels, frames, rows and columns.
    """
    return jnp.moveaxis(kernel, (-1, -2), (0, 1)).reshape(shape)


def with_axes_first(shape: tuple[int, ...], _: int, table: jax.Array) -> jax.Array:
    """Return tables of positions [N, 2, W] as [2, N, W]."""
    return jnp.swapaxes(table, 0, 1).reshape(shape)


def joined_heads(
    shape: tuple[int, ...], _: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Return queries, keys and values [W, H, D] as [3, H, D, W]; biases [H, D] as [3, H, D]."""
    return jnp.stack([jnp.moveaxis(x, 0, -1) if x.ndim == 3 else x for x in (q, k, v)])
