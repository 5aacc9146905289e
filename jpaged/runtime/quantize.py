"""Quantise: plain weights on the devices that serve them -> 8 or 4 bits, one after another."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jpaged.errors import ConfigError
from jpaged.models.params import ParamSpec
from jpaged.models.quantized import Form, QuantizedWeight, partition, quantized
from jpaged.runtime.mesh import Placement


class Quantize:
    """Compiled functions, one a shape and form; arrays of new versions find them again."""

    def __init__(self, where: Placement):
        self.where = where
        self._functions: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, weight: Array, form: Form, spec: ParamSpec, split: PartitionSpec
    ) -> QuantizedWeight:
        """A weight that lies as it is served, in a form. It returns when that is there, so that of
        the plain copies that are made to be quantised no two are held.
        """
        key = (weight.shape, weight.dtype, form, len(spec.sides[0]), split)
        if key not in self._functions:
            make = functools.partial(quantized, form=form, num_outputs=len(spec.sides[0]))
            shapes = jax.eval_shape(make, weight)
            targets = jax.tree.map(self.where.sharding, partition(shapes, split))
            self._functions[key] = jax.jit(make, out_shardings=targets)
        return jax.block_until_ready(self._functions[key](weight))

    def check(self, specs: Iterable[ParamSpec], made: Iterable[Any]) -> None:
        """ConfigError that names the first weight with a value that is not finite."""
        scales = [
            (spec, weight.scales)
            for spec, weight in zip(specs, made, strict=True)
            if isinstance(weight, QuantizedWeight)
        ]
        if not scales:
            return
        for (spec, _), is_finite in zip(scales, _are_finite([x for _, x in scales]), strict=True):
            if not is_finite:
                raise ConfigError(
                    f"{spec.at(spec.name)} holds a value that is not finite, which quantization= "
                    "cannot take"
                )


@jax.jit
def _all_finite(scales: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in scales])


def _are_finite(scales: list[Array]) -> list[bool]:
    return jax.device_get(_all_finite(scales)).tolist()
