"""Experts on CUDA cards by Pallas' Triton backend: a grouped product for weights in any form.

Rows are sorted by expert, and a program multiplies a tile of one expert's rows by a tile of its
outputs. Weights in 8 and 4 bits are read as they are stored and become bf16 in registers; no
widened weight is ever written. Scales of outputs multiply the product, in f32; scales of groups
multiply the weights, which are then rounded to bf16.

Shapes: P rows, X experts, O outputs; I tiles of R rows each; of a step, N outputs and C places of
the last axis of values, which are inputs, or in 4 bits pairs of them.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.e4m3 import e4m3_to_f32
from kernels_pallas.experts import tiles
from kernels_pallas.experts.interface import ExpertWeights, Glu, Shapes, grouped_experts
from kernels_pallas.experts.row_tiles import tile_rows, tile_table
from kernels_pallas.implementation import before_ampere

FEW, MANY = 16, 128  # rows of a tile
OUT, IN = 128, 64  # outputs of a tile, and places of values in a step
NIBBLE_BLOCK = 32  # inputs in 16 bytes of 4-bit numbers: their first half in the low bits


class Parts(NamedTuple):
    """A weight of experts as [X, outputs, places]. form: a name in DECODERS; None for an array."""

    form: str | None
    values: Array
    scales: Array | None
    zeros: Array | None


def unsupported(shapes: Shapes, device: Any) -> str | None:
    """Return why these shapes cannot run on a device, or None. device None: any device."""
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {shapes.dtype}: only bfloat16 and float16"
    return before_ampere(device)


def experts(
    x_TE: Array,
    chosen_TA: Array,
    weight_TA: Array,
    weights: ExpertWeights,
    glu: Glu,
    *,
    interpret: bool = False,
) -> Array:
    """Compute the experts of each token; see kernels_pallas.experts."""
    sizes = [part.size for part in jax.tree.leaves((weights.gate_up, weights.down))]
    if any(2**31 <= size <= 2**32 for size in sizes):  # Pallas counts them in signed 32 bits
        return tiles.experts(x_TE, chosen_TA, weight_TA, weights, glu)
    known = [_form(weight) in (None, *DECODERS) for weight in (weights.gate_up, weights.down)]
    if not all(known):
        return tiles.experts(x_TE, chosen_TA, weight_TA, weights, glu)
    product = functools.partial(_product, interpret=interpret)
    return grouped_experts(product, x_TE, chosen_TA, weight_TA, weights, glu)


def _product(x: Array, weights: Any, sizes_X: Array, *, interpret: bool) -> Array:
    """Return f32 [P, outputs] of rows x [P, inputs]; sizes_X: number of rows of each expert."""
    parts = _parts(weights)
    outputs, rows = parts.values.shape[1], tile_rows(x.shape[0], len(sizes_X), FEW, MANY)
    table = tile_table(sizes_X, x.shape[0], rows)
    is_packed = parts.values.shape[2] < x.shape[1]
    xs = _halves(x) if is_packed else (x,)
    kernel = functools.partial(
        _kernel, form=parts.form, rows=rows, count=len(xs), has_zeros=parts.zeros is not None
    )
    return pl.pallas_call(
        kernel,
        grid=(table[0].size, pl.cdiv(outputs, OUT)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4 if rows <= 64 else 8, num_stages=3),
        name="expert_product",
    )(*table, *xs, *(part for part in parts[1:] if part is not None))


def _parts(weights: Any) -> Parts:
    if isinstance(weights, Array):
        return Parts(None, weights.reshape(len(weights), -1, weights.shape[-1]), None, None)
    values = weights.values.reshape(weights.shape[0], -1, weights.values.shape[-1])
    scales = weights.scales.reshape(*values.shape[:2], -1)
    zeros = None if weights.zeros is None else weights.zeros.reshape(scales.shape)
    if values.dtype == jnp.float8_e4m3fn:  # not every card can convert it
        values = lax.bitcast_convert_type(values, jnp.int8)
    return Parts(_form(weights), values, scales, zeros)


def _form(weight: Any) -> str | None:
    """Return the name of a weight's form; None for an array."""
    return None if isinstance(weight, Array) else weight.form.name


def _halves(x: Array) -> tuple[Array, Array]:
    """Split x [P, inputs] into the inputs of the low halves of the bytes and of the high ones."""
    groups = x.reshape(len(x), -1, 2, NIBBLE_BLOCK // 2)
    return groups[:, :, 0].reshape(len(x), -1), groups[:, :, 1].reshape(len(x), -1)


def _kernel(
    expert_ref,
    first_ref,
    end_ref,
    *refs,
    form: str | None,
    rows: int,
    count: int,
    has_zeros: bool,
):
    *x_refs, values_ref = refs[: count + 1]
    *more, out_ref = refs[count + 1 :]
    tile, block = pl.program_id(0), pl.program_id(1)
    expert, (num_experts, outputs, width) = expert_ref[tile], values_ref.shape

    @pl.when(expert < num_experts)
    def _():
        row_R, out_N = first_ref[tile] + jnp.arange(rows), block * OUT + jnp.arange(OUT)
        real_R, here_N = (row_R < end_ref[tile])[:, None], (out_N < outputs)[:, None]
        groups = more[0].shape[2] if more else 1
        size = width // groups  # places of a group
        # Of a step: whole groups, or a part of one.
        taken = IN if groups == 1 or IN % size == 0 else math.gcd(IN, size)

        def of_groups(ref, step):
            count = max(taken // size, 1)
            group_G = lax.div(step * taken, size) + jnp.arange(count)
            source = ref.at[expert, out_N[:, None], group_G[None, :]]
            x_NG = plgpu.load(source, mask=here_N & (group_G < groups)[None, :], other=0.0)
            spread = jnp.broadcast_to(x_NG[:, :, None], (OUT, count, taken // count))
            return spread.reshape(OUT, taken)

        def body(step, acc):
            at_C = step * taken + jnp.arange(taken)
            real_C = (at_C < width)[None, :]
            source = values_ref.at[expert, out_N[:, None], at_C[None, :]]
            none = jnp.zeros((), values_ref.dtype)
            numbers = _numbers(plgpu.load(source, mask=here_N & real_C, other=none), form)
            scales = of_groups(more[0], step) if groups > 1 else None
            zeros = of_groups(more[1], step) if has_zeros else None
            for x_ref, w_NC in zip(x_refs, numbers, strict=True):
                if zeros is not None:
                    w_NC = w_NC - zeros
                if scales is not None:
                    w_NC = w_NC * scales
                x_RC = plgpu.load(
                    x_ref.at[row_R[:, None], at_C[None, :]], mask=real_R & real_C, other=0.0
                )
                acc = acc + plgpu.dot(x_RC, w_NC.astype(x_RC.dtype).T)
            return acc

        acc = lax.fori_loop(0, pl.cdiv(width, taken), body, jnp.zeros((rows, OUT), jnp.float32))
        if more and groups == 1:
            scale_N = plgpu.load(more[0].at[expert, out_N, 0], mask=out_N < outputs, other=0.0)
            acc = acc * scale_N[None, :]
        mask_RN = real_R & (out_N < outputs)[None, :]
        plgpu.store(out_ref.at[row_R[:, None], out_N[None, :]], acc, mask=mask_RN)


def _numbers(values: Array, form: str | None) -> list[Array]:
    """Return the f32 numbers that values stand for before their zeros and scales.

    A byte of 4-bit numbers gives two arrays: the low halves, then the high halves.
    """
    return [values] if form is None else DECODERS[form](values)


def _int8(values: Array) -> list[Array]:
    return [values.astype(jnp.float32)]


def _fp8(values: Array) -> list[Array]:
    return [e4m3_to_f32(values.astype(jnp.int32), lax.bitcast_convert_type)]


def _bit_halves(values: Array) -> list[Array]:
    bits = values.astype(jnp.int32)
    return [bits & 15, bits >> 4]


def _int4(values: Array) -> list[Array]:
    return [half.astype(jnp.float32) - 8 for half in _bit_halves(values)]


def _mxfp4(values: Array) -> list[Array]:
    return [_e2m1_to_f32(half) for half in _bit_halves(values)]


def _e2m1_to_f32(bits: Array) -> Array:
    """Return the f32 values of mxfp4's numbers, whose bits are float16's but for the bias."""
    short = ((bits & 8) << 12 | (bits & 7) << 9).astype(jnp.uint16)
    return lax.bitcast_convert_type(short, jnp.float16).astype(jnp.float32) * 16384.0


# By the form's name; weights in other forms go through `tiles`.
DECODERS = {"int8": _int8, "int4": _int4, "fp8": _fp8, "mxfp4": _mxfp4}
