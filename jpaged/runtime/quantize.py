"""Quantise: plain weights on the devices that serve them -> 8 or 4 bits, one after another."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.param_spec import ParamSpec
from jpaged.models.quantized import (
    Form,
    QuantizedWeight,
    is_quantized,
    partition,
    quantized,
)
from jpaged.models.served import Change, served_form
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

    def kept(
        self, weight: QuantizedWeight, dtype: Any, split: PartitionSpec
    ) -> QuantizedWeight | None:
        """A weight that comes in its form where and as it is served; None where it is so already.
        ConfigError where its groups do not split.
        """
        targets = jax.tree.map(self.where.sharding, partition(weight, split))
        parts = zip(jax.tree.leaves(weight), jax.tree.leaves(targets), strict=True)
        if weight.dtype == dtype and all(
            isinstance(x, jax.Array) and x.sharding.is_equivalent_to(to, x.ndim) for x, to in parts
        ):
            return None
        try:
            placed: QuantizedWeight = jax.device_put(weight, targets)
        except ValueError as e:
            raise ConfigError(
                f"a weight of {weight.shape} in {weight.form} with scales of "
                f"{weight.scales.shape} does not split by {split}: fewer devices, or "
                "load_params(..., dequantize=True)"
            ) from e
        return dataclasses.replace(placed, dtype=jnp.dtype(dtype))

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


def check_kept(spec: ParamSpec, weight: QuantizedWeight, change: Change, form: Any) -> None:
    """ConfigError unless a weight that comes in its form can be served in it, which is `form`."""
    is_rearranged = change.repeats > 1 or bool(change.rows)
    check_combination(
        Facts(
            weight=spec.at(spec.name),
            form=weight.form,
            served_form=str(form),
            is_rearranged=is_rearranged,
        )
    )


@jax.jit
def _all_finite(scales: list[Array]) -> Array:
    return jnp.stack([jnp.isfinite(x).all() for x in scales])


def _are_finite(scales: list[Array]) -> list[bool]:
    return jax.device_get(_all_finite(scales)).tolist()


def one_by_one(quantization: Form) -> Callable[[ParamSpec, Any, ModelConfig], Any]:
    """For load_params(each=): a parameter on one device in the form that it is served in, so that
    no two plain ones are held.
    """
    make = jax.jit(quantized, static_argnames=("form", "num_outputs"), donate_argnums=0)

    def each(spec: ParamSpec, leaf: Any, model: ModelConfig) -> Any:
        form = None if is_quantized(leaf) else served_form(spec, model, quantization)
        if form is None:
            return leaf
        with warnings.catch_warnings():  # the plain one's memory is of no use to the new one
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return jax.block_until_ready(make(leaf, form=form, num_outputs=len(spec.sides[0])))

    return each
