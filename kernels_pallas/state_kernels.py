"""What kernels of layers with a state have in common, by Triton: they read states from slots of the
pool and write them to slots, in place; and CPUs interpret them.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.packed_rows import PackedRows


def interpreted_on_cpu(
    kernel: Callable[..., tuple[Array, Array]], *args: Array | PackedRows
) -> tuple[Array, Array]:
    """Return what kernel(*args, interpret=...) does, which is interpreted where it runs on CPU."""
    compiled, interpreted = (functools.partial(kernel, interpret=x) for x in (False, True))
    return lax.platform_dependent(*args, cpu=interpreted, default=compiled)


def load_state(pool_ref, slot: Array, index: tuple[Array, ...], begins: Array) -> Array:
    """Return what a slot of the pool holds at an index of its state; zeros for a slot past the end
    of the pool, or where `begins`, a scalar, is false.
    """
    at, is_slot = _at(pool_ref, slot, index)
    return plgpu.load(at, mask=_masked(index, begins & is_slot), other=0.0)


def store_state(pool_ref, slot: Array, index: tuple[Array, ...], state: Array, ends: Array) -> None:
    """Write a state to an index of a slot, unless that lies past the end of the pool, or `ends`, a
    scalar, is false.
    """
    at, is_slot = _at(pool_ref, slot, index)
    plgpu.store(at, state, mask=_masked(index, ends & is_slot))


def _at(pool_ref, slot: Array, index: tuple[Array, ...]):
    slots = pool_ref.shape[0]
    return pool_ref.at[jnp.minimum(slot, slots - 1), *index], slot < slots


def _masked(index: tuple[Array, ...], does: Array) -> Array:
    return jnp.broadcast_to(does, jnp.broadcast_shapes(*(x.shape for x in index)))
