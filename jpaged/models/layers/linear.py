"""Linear: a product with a weight, whatever its form, who multiplies and how it is split."""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.layers.low_rank import AdapterRows, Adder, LowRank
from jpaged.models.params import MeshAxis
from jpaged.models.quantized import QuantizedWeight
from kernels_pallas.experts.interface import ExpertWeights, Glu


class Products(Adder, Protocol):
    """A module that multiplies by a weight as it lies, better than XLA for some shapes."""

    @property
    def activations(self) -> str:
        """What x becomes beside weights of int8 and int4: see models.quantized."""
        ...

    def supported(self, x: Array, weight: Array, /) -> bool:
        """Whether it is the better one for x [T, E] and weight [N, E]."""
        ...

    def linear(self, x: Array, weight: Array, count: Any, dtype: DTypeLike, /) -> Array:
        """x times weight transposed, [T, N] in dtype, accumulated in f32.

        count: the rows of x that are real; the others are padding whose results may be anything.
        """
        ...

    def quantized(
        self, x: Array, values: Array, scales: Array, zeros: Any, form: str, count: Any, /
    ) -> Array:
        """x [T, E] in bf16 times the weight that values, scales and zeros [N, ...] stand for,
        transposed, [T, N] in f32; see models/quantized.py.
        """
        ...


class ExpertProducts(Protocol):
    """A module of kernels_pallas.experts."""

    def experts(
        self, x: Array, chosen: Array, weight: Array, weights: ExpertWeights, glu: Glu, /
    ) -> Array:
        """Of each row the weighted sum of what its experts give, f32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What a step that serves says of its products; all at their defaults in training.

    num_rows: int32 scalar, how many rows of x [T, E] are real before the padding; None is all.
    max_len: tokens that a sequence may have; None is as many as are at hand.
    products: who multiplies where it can; None is XLA alone, and can be differentiated.
    experts: who multiplies by the experts of a mixture; None computes all of them, and can be
    differentiated. tensor_axis: the mesh axis (or axes) of axis_size devices that hold shares of
    the weights, inside shard_map; None where each holds all. adapters: of the rows; None where no
    row has any. in_fp8: XLA has tensor cores for products of fp8 by fp8.
    """

    num_rows: Array | None = None
    max_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    products: Products | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertProducts | None = dataclasses.field(default=None, metadata={"static": True})
    tensor_axis: MeshAxis | None = dataclasses.field(default=None, metadata={"static": True})
    axis_size: int = dataclasses.field(default=1, metadata={"static": True})
    adapters: AdapterRows | None = None
    in_fp8: bool = dataclasses.field(default=False, metadata={"static": True})

    def count(self, x: Array) -> Any:
        """How many rows of x are real."""
        return x.shape[0] if self.num_rows is None else self.num_rows

    def product(self, x: Array, weight_NE: Array, dtype: DTypeLike) -> Array:
        """x [..., E] times the weight transposed, accumulated in f32."""
        if self.products is not None and self.products.supported(x, weight_NE):
            return self.products.linear(x, weight_NE, self.count(x), dtype)
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        y = jax.lax.dot_general(x, weight_NE, contract, preferred_element_type=jnp.float32)
        return y.astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """x [..., inputs] to [..., *outputs]: weight [*outputs, *inputs], bias [*outputs] or None.

    sum_over: the mesh axis whose devices each hold a share of the inputs, so that their partial
    results are summed; None where this device has all of them. adapters: what rows of x add to the
    product, or None.
    """

    weight: Array | QuantizedWeight
    bias: Array | None
    serving: Serving
    adapters: LowRank | None = None
    num_outputs: int = dataclasses.field(metadata={"static": True})
    sum_over: MeshAxis | None = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array, dtype: DTypeLike | None = None) -> Array:
        """Accumulated in f32 and rounded once, at the end, to dtype (None is x's)."""
        dtype = x.dtype if dtype is None else dtype
        outputs = self.weight.shape[: self.num_outputs]
        is_last = self.bias is None and self.sum_over is None and self.adapters is None
        wanted = dtype if is_last else jnp.float32
        if isinstance(self.weight, QuantizedWeight):
            y = self._quantized(x, self.weight.matrix(), wanted)
        else:
            y = self.serving.product(x, self.weight.reshape(math.prod(outputs), -1), wanted)
        if self.adapters is not None:
            how = (self.serving.product, self.serving.products, self.serving.count(x))
            y = self.adapters.added(y, x, *how)
        if self.sum_over is not None:
            y = jax.lax.psum(y, self.sum_over)
        y = y.reshape(*x.shape[:-1], *outputs)
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + outputs)
        return y.astype(dtype)

    def _quantized(self, x: Array, weight: QuantizedWeight, dtype: DTypeLike) -> Array:
        products = self.serving.products
        if products is None or x.dtype != jnp.bfloat16:
            return weight.linear(x, in_fp8=self.serving.in_fp8).astype(dtype)
        rows = x.reshape(-1, x.shape[-1])
        parts = (weight.values, weight.scales, weight.zeros, weight.form)
        return products.quantized(rows, *parts, self.serving.count(rows)).astype(dtype)
