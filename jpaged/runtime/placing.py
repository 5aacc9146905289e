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
    INTERLEAVED,
    QuantizedWeight,
    Quantizer,
    WeightForm,
    is_quantized,
    partition,
    quantized,
)
from jpaged.models.served import in_order
from jpaged.models.weight import HUGE_PAGE, Change, Weight, aligned
from jpaged.runtime.processes import put
from kernels_cpu import library, quantize

PIECE_BYTES = 4 << 20  # of plain rows that are read and quantised at a time


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
            if _is_large(weight, target):
                return self._quantized_in_pieces(weight, target)
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
        if weight.form is None:
            return plain
        made = self._quantized(plain, weight)
        del plain
        is_ours = weight.is_buffer and _is_one_cpu(target)
        return jax.tree.map(_on_huge_pages, made) if is_ours else made

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
            kernel = _quantizer(self._sharding(split))
            make = functools.partial(quantized, form=form, num_outputs=num_outputs, kernel=kernel)
            specs = partition(jax.eval_shape(make, plain), split)
            targets = jax.tree.map(self._sharding, specs)
            self._functions[key] = jax.jit(make, out_shardings=targets)
        return jax.block_until_ready(self._functions[key](plain))

    def _quantized_in_pieces(self, weight: Weight, target: Sharding | None) -> QuantizedWeight:
        """Read a matrix some rows at a time and return it in its form: it is never held plain.

        XLA's f32 copies of an embedding would be the peak of a whole start. The last piece begins
        where it is as long as the others, so that one function serves all.
        """
        form, spec, dtype = weight.form, weight.spec, weight.wanted_dtype
        assert form is not None
        (N, E), rows = spec.shape, _rows_of_a_piece(weight)
        make = functools.partial(quantized, form=form, num_outputs=1, kernel=_quantizer(target))
        whole = jax.eval_shape(make, jax.ShapeDtypeStruct((N, E), dtype))
        parts, structure = jax.tree.flatten(whole)
        buffers = [aligned(part.shape, part.dtype) for part in parts]
        key = (rows, E, dtype, form)
        if key not in self._functions:
            self._functions[key] = jax.jit(make)
        for first in [*range(0, N - rows, rows), N - rows]:
            plain = weight.read_share((slice(first, first + rows), slice(0, E)))
            made = self._functions[key](plain)
            for buffer, part in zip(buffers, jax.tree.leaves(made), strict=True):
                buffer[first : first + rows] = np.asarray(part)
        placed = jax.block_until_ready(jax.device_put(buffers, target))
        return jax.tree.unflatten(structure, placed)

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


def _is_large(weight: Weight, target: Sharding | None) -> bool:
    """Return whether a stored matrix is quantised in pieces: one that is plain in its files, goes
    to one CPU and takes several pieces.
    """
    if weight.form is None or len(weight.spec.shape) != 2 or weight.num_outputs != 1:
        return False
    is_plain = all(piece.quantized is None for piece in weight.source)
    return _is_one_cpu(target) and is_plain and _rows_of_a_piece(weight) < weight.spec.shape[0]


def _is_one_cpu(target: Sharding | None) -> bool:
    """Return whether arrays with this sharding lie on one CPU."""
    devices = jax.devices()[:1] if target is None else list(target.device_set)
    return len(devices) == 1 and devices[0].platform == "cpu"


def _quantizer(target: Sharding | None) -> Quantizer | None:
    """Return the kernel that quantises what has this sharding; None is XLA."""
    return quantize if _is_one_cpu(target) and library.unavailable() is None else None


def _on_huge_pages(array: Array) -> Array:
    """Return an array of a CPU, a large one in memory of huge pages: XLA's own has small ones."""
    if array.nbytes < HUGE_PAGE:
        return array
    buffer = aligned(array.shape, array.dtype)
    buffer[...] = np.asarray(array)
    return jax.block_until_ready(jax.device_put(buffer, array.sharding))


def _rows_of_a_piece(weight: Weight) -> int:
    """Return how many rows are quantised at a time: whole groups of interleaved ones."""
    row = weight.spec.shape[1] * weight.wanted_dtype.itemsize
    return max(PIECE_BYTES // row // INTERLEAVED, 1) * INTERLEAVED


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
