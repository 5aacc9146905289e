"""Placer: Weights to the arrays that steps take, where and as they are served.

This is the one place that moves, casts, splits and quantises weights. `jax.device_put` between two
shardings of several devices goes through the host where no device holds the wanted slice, and the
source then keeps the whole host copy for as long as it lives. A compiled identity with
out_shardings does it by collectives instead. It takes arrays on the target's own devices in their
order, so others are brought there first.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.quantized import (
    QuantizedWeight,
    WeightForm,
    is_quantized,
    partition,
    quantized,
)
from jpaged.models.served import in_order
from jpaged.models.weight import Change, Weight
from jpaged.runtime.processes import put


class Placer:
    """Places Weights by a function from PartitionSpecs to shardings (None: jax's default device).

    Compiled functions are kept, one for each change, form and sharding, so that weights of a new
    version compile nothing.
    """

    def __init__(self, sharding: Callable[[PartitionSpec], Sharding | None]):
        self._sharding = sharding
        self._functions: dict[tuple[Any, ...], Any] = {}

    def is_placed(self, weight: Weight) -> bool:
        """Return whether the source is already what is served."""
        source = weight.source
        if is_quantized(source):
            is_ready = source.dtype == weight.wanted_dtype
            is_ready &= source.form.interleaved == _is_interleaved(weight)
            return is_ready and all(_lies(x, to) for x, to in self._parts(weight))
        if weight.is_stored or weight.form is not None or weight.change.is_needed(source):
            return False
        return _lies(source, self._sharding(weight.split))

    def __call__(self, weight: Weight) -> Array | QuantizedWeight:
        """Return the array of a weight, which is its source itself where that is placed already.

        What was read from files, or is quantised here, is on the devices when this returns: of
        buffers on the host and of plain copies that are made to be quantised only one is held.
        ConfigError where the weight does not split, CheckpointError where its files are damaged.
        """
        if self.is_placed(weight):
            return weight.source
        target = self._sharding(weight.split)
        if weight.is_stored:
            if target is not None and not target.is_fully_addressable:
                # Each process reads its own shares, one time for all devices that hold the same.
                read = functools.cache(weight.read_share)
                made = jax.make_array_from_callback(weight.spec.shape, target, read)
                weight = dataclasses.replace(weight, source=made)
            else:
                weight = weight.read()
        weight.check()
        if is_quantized(weight.source):
            interleaved = _is_interleaved(weight)
            if weight.source.form.interleaved and not interleaved:
                weight = dataclasses.replace(weight, source=_in_rows(weight.source))
            kept = self._kept(weight)
            return _interleaved(kept) if interleaved and not kept.form.interleaved else kept
        plain = self._plain(weight, target)
        return plain if weight.form is None else self._quantized(plain, weight)

    def check_finite(self, weights: Iterable[Weight], placed: Iterable[Any]) -> None:
        """ConfigError that names the first quantised weight with a value that is not finite."""
        scales = [
            (weight.name, array.scales)
            for weight, array in zip(weights, placed, strict=True)
            if is_quantized(array)
        ]
        if not scales:
            return
        finite = jax.device_get(_all_finite([x for _, x in scales])).tolist()
        for (name, _), is_finite in zip(scales, finite, strict=True):
            if not is_finite:
                raise ConfigError(
                    f"{name} holds a value that is not finite, which quantization= cannot take"
                )

    def _parts(self, weight: Weight) -> list[tuple[Any, Sharding | None]]:
        """Return values, scales and zeros of a quantised source, each with its sharding."""
        specs = partition(weight.source, weight.split)
        pairs = zip(jax.tree.leaves(weight.source), jax.tree.leaves(specs), strict=True)
        return [(x, self._sharding(spec)) for x, spec in pairs]

    def _kept(self, weight: Weight) -> QuantizedWeight:
        """Return a quantised source in its form, where it is served."""
        source, parts = weight.source, self._parts(weight)
        divides = all(to is None or _divides(to, x.shape) for x, to in parts)
        sizes = f"{source.shape} with scales of {source.scales.shape}"
        uneven = "" if divides else f"{sizes} does not split by {weight.split}"
        facts = Facts(weight=weight.name, form=source.form.name, uneven_split=uneven)
        check_combination(facts)
        moved = [x if _lies(x, to) else self._moved(x, None, to) for x, to in parts]
        placed = jax.tree.unflatten(jax.tree.structure(source), jax.block_until_ready(moved))
        return dataclasses.replace(placed, dtype=weight.wanted_dtype)

    def _plain(self, weight: Weight, target: Sharding | None) -> Array:
        """Return plain values cast, repeated, padded and split as they are served."""
        change, source = weight.change, weight.source
        if _lies(source, target) and not change.is_needed(source):
            return source
        if weight.is_buffer and not change.is_needed(source):
            return jax.block_until_ready(jax.device_put(source, target))
        return self._moved(source, change, target)

    def _quantized(self, plain: Array, weight: Weight) -> QuantizedWeight:
        """Return plain values, which lie where they are served, in a form."""
        form, num_outputs, split = weight.form, weight.num_outputs, weight.split
        assert form is not None
        key = (plain.shape, plain.dtype, form, num_outputs, split)
        if key not in self._functions:
            make = functools.partial(quantized, form=form, num_outputs=num_outputs)
            specs = partition(jax.eval_shape(make, plain), split)
            targets = jax.tree.map(self._sharding, specs)
            self._functions[key] = jax.jit(make, out_shardings=targets)
        return jax.block_until_ready(self._functions[key](plain))

    def _moved(self, source: Any, change: Change | None, target: Sharding | None) -> Any:
        """Return an array changed, with this sharding."""
        if not isinstance(source, jax.Array):
            made = source if change is None else change(np.asarray(source))
            return jax.device_put(made) if target is None else put(made, target)
        assert target is not None, "only what is read from files goes to the default device"
        here = source.sharding
        if here.is_fully_addressable and not target.is_fully_addressable:
            # Each process holds the whole array and gives its own shares of it.
            whole = np.asarray(source)
            return put(whole if change is None else change(whole), target)
        if _order(here) == _order(target):
            return self._changed(source, change, target)
        if not isinstance(here, NamedSharding) or here.num_devices == 1:
            # Cut on its one device. Of several devices without a mesh only jax knows the order.
            return jax.device_put(self._function(change, here)(source), target)
        if isinstance(target, NamedSharding) and here.device_set == target.device_set:
            # Another order of the same devices: each share goes to the device at its own index.
            devices = np.array(_order(target)).reshape(here.mesh.axis_sizes)
            grid = Mesh(devices, here.mesh.axis_names)
            turned = jax.device_put(source, NamedSharding(grid, here.spec))
            return self._changed(turned, change, target)
        # Other devices: gathered whole where it is, and cut there. One array at a time.
        if not here.is_fully_replicated:
            source = self._function(None, NamedSharding(here.mesh, PartitionSpec()))(source)
        shards = sorted(source.addressable_shards, key=lambda s: s.device not in target.device_set)
        return jax.block_until_ready(self._moved(shards[0].data, change, target))

    def _changed(self, array: Array, change: Change | None, target: Sharding) -> Any:
        """Return an array, which is on the target's devices, changed. A new shape is made where
        the array is, as long as that divides: XLA would gather the whole for both at once.
        """
        shape = array.shape if change is None else jax.eval_shape(change, array).shape
        if shape == array.shape or not _divides(array.sharding, shape):
            return self._function(change, target)(array)
        return self._function(None, target)(self._function(change, array.sharding)(array))

    def _function(self, change: Change | None, target: Sharding) -> Any:
        key = (change, target)
        if key not in self._functions:
            self._functions[key] = jax.jit(change or _identity, out_shardings=target)
        return self._functions[key]


def _is_interleaved(weight: Weight) -> bool:
    """Return whether a quantised source is to lie interleaved."""
    form: WeightForm = weight.source.form
    if weight.keeps_order:
        return form.interleaved and weight.interleaved
    return in_order(form, weight.spec, weight.interleaved).interleaved


_interleaved, _in_rows = jax.jit(QuantizedWeight.interleaved), jax.jit(QuantizedWeight.in_rows)


@jax.jit
def _all_finite(scales: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in scales])


def _lies(x: Any, target: Sharding | None) -> bool:
    """Return whether an array has a sharding already."""
    if target is None or not isinstance(x, jax.Array):
        return False
    return x.sharding.is_equivalent_to(target, x.ndim)


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _identity(array: Any) -> Any:
    return array


def _order(sharding: Sharding) -> tuple[Any, ...] | None:
    """Return the devices in their order; None where only jax knows it."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat) if isinstance(sharding.mesh, Mesh) else None
    if isinstance(sharding, SingleDeviceSharding):
        return tuple(sharding.device_set)
    return None
