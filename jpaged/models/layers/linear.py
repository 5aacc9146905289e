"""Linear: a product with a weight, whatever its form; and StepContext, how a step multiplies."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jpaged.models.layers.arithmetic import Function, apply_by_xla, rounded
from jpaged.models.layers.low_rank import AdapterTable, Adder, ExpertLowRank, LowRank
from jpaged.models.param_spec import MeshAxis, Parameter
from jpaged.models.quantized import QuantizedWeight
from kernels_cpu.mlp import Matrix
from kernels_pallas.experts.interface import ExpertWeights, Glu
from kernels_pallas.gated_delta import interface as gated_delta
from kernels_pallas.mamba2 import interface as mamba2
from kernels_pallas.packed_rows import PackedRows


class Products(Adder, Protocol):
    """A module that multiplies by a weight as it lies, better than XLA for some shapes.

    activations: what x becomes in products with weights in 8 and 4 bits (see models.quantized).
    """

    @property
    def activations(self) -> str: ...

    def supported(self, x: Array | jax.ShapeDtypeStruct, weight: Array, /) -> bool:
        """Return whether it is the better one for x [T, E] and weight [N, E]."""
        ...

    def linear(self, x: Array, weight: Array, count: Any, dtype: DTypeLike, /) -> Array:
        """x times weight transposed, [T, N] in dtype, accumulated in f32.

        count: the rows of x that are real; the others are padding whose results may be anything.
        """
        ...

    def multiplies(self, form: str, width: int, /) -> bool:
        """Return whether `quantized` takes weights in the form of this name, of `width` inputs."""
        ...

    def interleaves(self, form: str, outputs: int, /) -> bool:
        """Return whether `quantized` takes interleaved weights in the form of this name (see
        WeightForm), of so many outputs.
        """
        ...

    def quantized(
        self,
        x: Array,
        values: Array,
        scales: Array,
        zeros: Any,
        form: str,
        count: Any,
        dtype: DTypeLike,
        interleaved: bool = False,
        /,
    ) -> Array:
        """x [T, E] in bf16 times the weight that values, scales and zeros [N, ...] stand for,
        transposed, [T, N] in dtype; see models/quantized.py.
        """
        ...

    def norms(self, x: Array, scale: Array, /) -> bool:
        """Return whether `normed` takes x [T, E] and the scale [E] of a norm."""
        ...

    def normed(
        self,
        x: Array,
        added: Array | None,
        scale: Array,
        count: Any,
        eps: float,
        has_offset: bool,
        in_f32: bool,
        /,
    ) -> tuple[Array, Array]:
        """Return x [T, E] with what is added to it (None: x), and what RMSNorm does of that; eps,
        has_offset and in_f32: of NormConfig.
        """
        ...

    def apply(self, name: Function, x: Array, /) -> Array:
        """Return a function of f32 x of any shape; the bits of a result depend on its number
        alone.
        """
        ...

    def activates(self, activation: str, /) -> bool:
        """Return whether `mlp` and `activated` have the activation of this name."""
        ...

    def mlp(
        self,
        x: Array,
        gate_up: Matrix,
        down: Matrix,
        activation: str,
        count: Any,
        dtype: DTypeLike,
        /,
    ) -> Array:
        """Return down times the activation of gate times up, [T, N] in dtype: what the products
        with `activated` between them give, to the bit.
        """
        ...

    def activated(self, gate_up: Array, activation: str, count: Any, /) -> Array:
        """Return the activation of gates times up of f32 [T, 2, F], in bf16 [T, F]."""
        ...


class ExpertProducts(Protocol):
    """A module of kernels_pallas.experts."""

    def experts(
        self, x: Array, chosen: Array, weight: Array, weights: ExpertWeights, glu: Glu, /
    ) -> Array:
        """Return for each row the weighted sum of its experts' outputs, f32."""
        ...


class DeltaRule(Protocol):
    """A module of kernels_pallas.gated_delta."""

    def prefill(
        self,
        q_THD: Array,
        k_THD: Array,
        v_THD: Array,
        g_THC: Array,
        beta_TH: Array,
        pool: Array,
        rows: PackedRows,
        /,
    ) -> tuple[Array, Array]:
        """Return o of every token, and the pool with the states after each row."""
        ...

    def decode(
        self,
        q_SHD: Array,
        k_SHD: Array,
        v_SHD: Array,
        g_SHC: Array,
        beta_SH: Array,
        pool: Array,
        rows: PackedRows,
        /,
    ) -> tuple[Array, Array]:
        """Return the same of one token a row."""
        ...

    def scratch_bytes(self, shapes: gated_delta.Shapes, num_decays: int, num_rows: int, /) -> int:
        """Return the bytes that either takes beside what it is given and returns."""
        ...


class Scan(Protocol):
    """A module of kernels_pallas.mamba2."""

    def prefill(
        self,
        x_THP: Array,
        g_TH: Array,
        b_TGN: Array,
        c_TGN: Array,
        pool: Array,
        rows: PackedRows,
        /,
    ) -> tuple[Array, Array]:
        """Return y of every token, and the pool with the states after each row."""
        ...

    def decode(
        self,
        x_SHP: Array,
        g_SH: Array,
        b_SGN: Array,
        c_SGN: Array,
        pool: Array,
        rows: PackedRows,
        /,
    ) -> tuple[Array, Array]:
        """Return the same of one token a row."""
        ...

    def scratch_bytes(self, shapes: mamba2.Shapes, num_rows: int, /) -> int:
        """Return the bytes that either takes beside what it is given and returns."""
        ...


class GroupAttention(Protocol):
    """A module of attention within groups of patches."""

    def supported(self, q: Array, /) -> bool:
        """Return whether it takes queries of this dtype."""
        ...

    def attend(
        self, q_NHD: Array, k_NKD: Array, v_NKV: Array, groups_GN: Array, scale: float, /
    ) -> Array:
        """Return what models.vision.parts.attend does; zeros for padding."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a step knows of its rows and how it multiplies; all at their defaults in training.

    num_rows: int32 scalar, how many rows of x [T, E] are real before the padding; None is all.
    slot_T: int32, the slot of each row's adapter, past the last slot where it has none; None where
    no row has any. adapters: the tables of weights that have adapters, by the names of the weights:
    in a layer those within the layer. max_len: tokens that a sequence may have; None is as many as
    are at hand. products: a module that multiplies where it supports the shapes; None is XLA alone,
    and can be differentiated. experts: a module that multiplies by the experts of a mixture; None
    computes all of them, and can be differentiated. delta: a module of the gated delta rule; None
    is XLA's. scan: a module of Mamba-2's scan; None is XLA's. group_attention: a module of
    attention in a vision tower; None is XLA's, and can be differentiated. tensor_axis: the mesh
    axis (or axes) of axis_size devices that hold shares of the weights, inside shard_map; None
    where each holds all. data_axes: those that replicas lie along. in_order: a row's bits do not
    depend on which devices have which of its experts. in_fp8: XLA has tensor cores for products of
    fp8 by fp8.
    """

    num_rows: Array | None = None
    slot_T: Array | None = None
    adapters: Mapping[str, AdapterTable] | None = None
    max_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    products: Products | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertProducts | None = dataclasses.field(default=None, metadata={"static": True})
    delta: DeltaRule | None = dataclasses.field(default=None, metadata={"static": True})
    scan: Scan | None = dataclasses.field(default=None, metadata={"static": True})
    group_attention: GroupAttention | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    tensor_axis: MeshAxis | None = dataclasses.field(default=None, metadata={"static": True})
    axis_size: int = dataclasses.field(default=1, metadata={"static": True})
    data_axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})
    in_fp8: bool = dataclasses.field(default=False, metadata={"static": True})

    def in_layer(self, index: int) -> Self:
        """Return the same with the adapters of one layer."""
        if self.adapters is None:
            return self
        prefix = f"layers.{index}."
        tables = {
            name.removeprefix(prefix): table
            for name, table in self.adapters.items()
            if name.startswith(prefix)
        }
        return dataclasses.replace(self, adapters=tables)

    def low_rank(self, name: str) -> LowRank | None:
        """Return what the rows' adapters have for a weight; None where no row has any for it."""
        if self.adapters is None or self.slot_T is None or name not in self.adapters:
            return None
        return self.adapters[name].rows(self.slot_T)

    def expert_low_rank(self, name: str) -> ExpertLowRank | None:
        """Return the same for the weight of experts."""
        if self.adapters is None or self.slot_T is None or name not in self.adapters:
            return None
        return self.adapters[name].expert_rows(self.slot_T)

    def count(self, x: Array) -> Any:
        """Return how many rows of x are real."""
        return x.shape[0] if self.num_rows is None else self.num_rows

    def apply(self, name: Function, x: Array) -> Array:
        """Return a function of the numbers x, f32 of any shape."""
        return (apply_by_xla if self.products is None else self.products.apply)(name, x)

    def axis_over(self, size: int | None) -> MeshAxis | None:
        """Return the mesh axis that splits an axis of this size; None where none does."""
        return None if size is None or size % self.axis_size else self.tensor_axis

    def gathered(self, x: Array, size: int) -> Array:
        """Return the whole of a last axis of this size, of which x [...] has a device's share where
        the mesh splits it.
        """
        axis = self.axis_over(size)
        return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)

    def share(self, x: Array) -> Array:
        """Return this device's share of the last axis of x [...], which every device has whole."""
        axis, size = self.axis_over(x.shape[-1]), x.shape[-1] // self.axis_size
        if axis is None:
            return x
        first = jax.lax.axis_index(axis) * size
        return jax.lax.dynamic_slice_in_dim(x, first, size, axis=x.ndim - 1)

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

    weight: None in a head that is tied to the embedding, which lends its own. name: under which a
    step may have adapters for it. split: the size of the axis of the inputs that a mesh splits
    where it divides, so that the devices' partial results are summed; None: no mesh does.
    """

    weight: Array | QuantizedWeight | None
    bias: Array | None = None
    name: str = dataclasses.field(default="", metadata={"static": True})
    num_outputs: int = dataclasses.field(default=1, metadata={"static": True})
    split: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, weight: Parameter, bias: Parameter | None = None) -> Self:
        """Return the product with a weight."""
        spec = weight.spec
        outputs, inputs = spec.sides
        return cls(
            weight=weight.value,
            bias=None if bias is None else bias.value,
            name=spec.short_name,
            num_outputs=len(outputs),
            split=spec.shape_of(spec.split)[0] if spec.split in inputs else None,
        )

    def __call__(
        self,
        x: Array,
        step: StepContext,
        dtype: DTypeLike | None = None,
        *,
        is_partial: bool = False,
    ) -> Array:
        """Accumulated in f32 and rounded once, at the end, to dtype (None is x's). is_partial: what
        devices have is not summed here, but by the caller.
        """
        assert self.weight is not None, "a tied head is lent the embedding's"
        dtype = x.dtype if dtype is None else dtype
        outputs = self.weight.shape[: self.num_outputs]
        sum_over = None if is_partial else step.axis_over(self.split)
        adapters = step.low_rank(self.name)
        is_last = self.bias is None and sum_over is None and adapters is None
        wanted = dtype if is_last else jnp.float32
        if isinstance(self.weight, QuantizedWeight):
            y = self._quantized(x, self.weight.matrix(), wanted, step)
        else:
            y = step.product(x, self.weight.reshape(math.prod(outputs), -1), wanted)
        if adapters is not None:
            y = adapters.added(y, x, step.product, step.products, step.count(x))
        if sum_over is not None:
            y = jax.lax.psum(y, sum_over)
        y = y.reshape(*x.shape[:-1], *outputs)
        if self.bias is not None:
            y = y + self.bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + outputs)
        return y if is_last else rounded(y, dtype)

    def alone(
        self, x: Array | jax.ShapeDtypeStruct, step: StepContext, *, is_partial: bool = False
    ) -> Matrix | None:
        """Return the matrix by which a step's module of products multiplies x [T, inputs], where
        that is all there is to do: without a bias, adapters, or a sum over devices; else None.
        """
        sum_over = None if is_partial else step.axis_over(self.split)
        is_more = self.bias is not None or sum_over is not None
        if step.products is None or is_more or step.low_rank(self.name) is not None:
            return None
        assert self.weight is not None, "a tied head is lent the embedding's"
        if isinstance(self.weight, QuantizedWeight):
            return self._multiplied(x, self.weight.matrix(), step)
        matrix = self.weight.reshape(math.prod(self.weight.shape[: self.num_outputs]), -1)
        return Matrix(matrix) if step.products.supported(x, matrix) else None

    @staticmethod
    def _multiplied(
        x: Array | jax.ShapeDtypeStruct, weight: QuantizedWeight, step: StepContext
    ) -> Matrix | None:
        """Return what the module of products takes of a weight; None where XLA multiplies by it."""
        products, form = step.products, weight.form.name
        if products is None or x.dtype != jnp.bfloat16:
            return None
        if not products.multiplies(form, x.shape[-1]):
            return None
        if weight.form.interleaved and not products.interleaves(form, weight.shape[0]):
            weight = weight.in_rows()
        return Matrix(weight.values, weight.scales, weight.zeros, form, weight.form.interleaved)

    def _quantized(
        self, x: Array, weight: QuantizedWeight, dtype: DTypeLike, step: StepContext
    ) -> Array:
        taken = self._multiplied(x, weight, step)
        if taken is None:
            return weight.linear(x, in_fp8=step.in_fp8).astype(dtype)
        assert step.products is not None and taken.scales is not None
        rows = x.reshape(-1, x.shape[-1])
        parts = (taken.values, taken.scales, taken.zeros, taken.form)
        return step.products.quantized(rows, *parts, step.count(rows), dtype, taken.interleaved)
