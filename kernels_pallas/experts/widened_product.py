"""A grouped product with weights in 8 and 4 bits on Hopper, in Pallas Mosaic GPU.

A wgmma mixes no types, and takes its first operand from registers. So the weight is the first
operand: a warpgroup loads its numbers, makes bf16 of them, scaled if scales are of groups, and
multiplies. The 64 rows of a wgmma are outputs then, and its columns are tokens, of which 8 are
enough: a tile of rows can be as short as an expert's tokens are few. The product comes out
transposed, and is stored from registers, whole 32 bytes of a row at a time.

Rows come in tiles of one expert each (`row_tiles.whole_tiles`). As many thread blocks as the card
holds go through items, which are blocks of outputs of a tile. One warpgroup copies the weight as it
lies and the rows, some inputs at a time, through a ring in shared memory. Two compute. Before its
first product of an item a warpgroup turns over the scales of groups of its outputs: [S, outputs] in
shared memory is what it can load an output a row of registers.

Shapes: X experts, R rows, N outputs, K inputs, W places of an output's numbers (K, or in 4 bits K /
2), S of its scales, I tiles, B rows of a tile, C places of a step.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from kernels_pallas.paged_attention.common import multiprocessors
from kernels_pallas.paged_attention.mosaic_gpu.pieces import SMEM_BYTES, WGMMA, drain, tiled_smem

OUT = 64  # outputs of a product, the rows of a wgmma
PLACES = (64, 32)  # that are widened at a time, columns of a tile in shared memory
COMPUTING = 2  # warpgroups that compute
# Registers of a thread of those, and of the one that copies: 384 threads start with 168.
REGISTERS, COPYING = 240, 24
FEWEST_STAGES, MOST_STAGES = 4, 8
MOST_PLACES = {1: 128, 2: 96}  # of a step, by the numbers that a place holds
SMALLEST_PIECE = 16  # places that share a scale
COLUMNS = 8  # of scales that are turned over at a time: the unit of a layout
NIBBLE_BLOCK = 32  # inputs in 16 bytes of 4-bit numbers: their first half in the low bits
FORMS = ("int8", "fp8", "int4", "mxfp4")


class Weight(NamedTuple):
    """A weight of experts: values [X, N, W], scales f32 [X, N, S], zeros as scales, or None. form:
    the name of its form.
    """

    form: str
    values: Array
    scales: Array
    zeros: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a thread block takes: outputs of an item, places of a step and of a tile in shared
    memory, stages of the ring.
    """

    outputs: int
    places: int
    columns: int
    stages: int


def refused(weight: Weight, rows: int, inputs: int) -> str | None:
    """Return why a weight of so many inputs cannot be multiplied by tiles of so many rows, or
    None.
    """
    (_, N, W), S = weight.values.shape, weight.scales.shape[2]
    if weight.form not in FORMS:
        return f"the form {weight.form}"
    if weight.values.size >= 2**31:
        return f"{weight.values.size} places, of which there may be {2**31 - 1}"
    if W % PLACES[-1] or N % OUT or N < COMPUTING * OUT:
        whole = (
            f"only whole {OUT} outputs, {COMPUTING * OUT} or more, and whole {PLACES[-1]} places"
        )
        return f"{N} outputs of {W} places: {whole}"
    if weight.zeros is not None and S == 1 and inputs == W:
        return "zeros beside one scale of an output"
    if (S > 1 or inputs > W) and (W % S or W // S % SMALLEST_PIECE):
        return f"{S} scales for {W} places: only for whole {SMALLEST_PIECE}"
    if _sizes(weight, rows, inputs) is None:
        return f"{S} scales of an output leave no room in shared memory"
    return None


def _sizes(weight: Weight, rows: int, inputs: int) -> Sizes | None:
    """Return what a thread block takes; None if nothing fits in shared memory."""
    (_, N, W), S = weight.values.shape, weight.scales.shape[2]
    numbers = inputs // W  # of a place
    columns = next(x for x in PLACES if W % x == 0)
    scales = 0 if S == 1 and numbers == 1 else S * 4 * (1 if weight.zeros is None else 2)
    # Many outputs for many rows, so that a byte that is copied is used often; steps as long as
    # several of them fit, since each begins and ends with a barrier.
    for strips in (2, 1) if rows > 32 and N % (2 * COMPUTING * OUT) == 0 else (1,):
        outputs = COMPUTING * strips * OUT
        most = MOST_PLACES[numbers] // columns * columns
        for places in range(most, 0, -columns):
            stage = outputs * places + rows * places * numbers * 2
            stages = min((SMEM_BYTES - 2048 - outputs * scales) // stage, MOST_STAGES)
            if W % places == 0 and stages >= FEWEST_STAGES:
                return Sizes(outputs=outputs, places=places, columns=columns, stages=stages)
    return None


def grouped_product(
    x_RK: Array,
    weight: Weight,
    *,
    expert_I: Array,
    count_1: Array,
    rows: int,
    thread_blocks: int | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Array:
    """Return f32 [R, N]: rows [i * B, (i + 1) * B) of bf16 times the weight of expert_I[i], for i
    less than count_1; other rows are not written. The weight must not be `refused`.

    rows: B, a multiple of 8, to 128. thread_blocks: how many share the items; None chooses.
    """
    form, values_XNW, scales_XNS, zeros_XNS = weight
    (R, K), (_, N, W), S, B = x_RK.shape, values_XNW.shape, scales_XNS.shape[2], rows
    sizes, dtype = _sizes(weight, rows, K), x_RK.dtype
    assert sizes is not None and refused(weight, rows, K) is None and dtype == jnp.bfloat16
    halves, C, stages = K // W, sizes.places, sizes.stages
    columns = sizes.columns  # of a tile
    steps, outs, strips = W // C, pl.cdiv(N, sizes.outputs), sizes.outputs // (COMPUTING * OUT)
    in_groups = S > 1 or halves == 2
    group = W // S  # places that share a scale
    piece = math.gcd(group, columns)
    blocks = min(thread_blocks or multiprocessors(), len(expert_I) * outs)
    x = x_RK[None]
    if halves == 2:
        x, values_XNW = _in_halves(x_RK), lax.bitcast_convert_type(values_XNW, jnp.int8)
    scales = (scales_XNS,) if zeros_XNS is None else (scales_XNS, zeros_XNS)

    def kernel(expert_ref, count_ref, x_ref, values_ref, scale_refs, out_ref, buffers, barriers):
        (w_sm, x_sm, scale_sms), (full, empty) = buffers, barriers
        block, warpgroup = (lax.axis_index(name) for name in ("block", "warpgroup"))
        my_turns = pl.cdiv(jnp.maximum(count_ref[0] * outs - block, 0), jnp.int32(blocks))

        def item_of(turn):
            """Return a turn's tile of rows and its expert, and the first of its outputs."""
            item = turn * blocks + block
            tile, nth = lax.div(item, jnp.int32(outs)), lax.rem(item, jnp.int32(outs))
            # The last ones end with the row: some are computed twice.
            return tile, expert_ref[tile], jnp.minimum(nth * sizes.outputs, N - sizes.outputs)

        def stage_of(turn, i):
            return lax.rem(turn * steps + i, jnp.int32(stages))

        @pl.when(warpgroup < COMPUTING)
        def _():
            plgpu.set_max_registers(REGISTERS, action="increase")
            first_strip = warpgroup * strips  # of OUT outputs each

            def scale_of(sm, strip, place):
                """Return the scales of outputs for a piece of places, [OUT, piece]."""
                source = sm.at[first_strip + strip, lax.div(place, jnp.int32(group))]
                x = plgpu.load(source, layout=WGMMA.reduce(1))
                return lax.broadcast_in_dim(x, (OUT, piece), [0])

            def scaled(numbers, strip, place, unit):
                """Return f32 numbers in units of `unit`, [OUT, columns], scaled and rounded."""
                pieces = []
                for begin in range(0, columns, piece):
                    part = numbers[:, begin : begin + piece]
                    if zeros_XNS is not None:
                        part = part - scale_of(scale_sms[1], strip, place + begin) * (1 / unit)
                    scale = scale_of(scale_sms[0], strip, place + begin) * unit
                    pieces.append((part * scale).astype(dtype))
                return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]

            @pl.loop(0, my_turns)
            def _(turn):
                tile, expert, first = item_of(turn)

                def outputs_of(strip):
                    return pl.ds(first + (first_strip + strip) * OUT, OUT)

                if in_groups:
                    # A warp loads what it has stored itself; its lanes wait for each other here.
                    plgpu.commit_smem()
                    for ref, sm in zip(scale_refs, scale_sms, strict=True):
                        for strip in range(strips):
                            source = ref.at[expert, outputs_of(strip)]
                            _turn_over(source, sm.at[first_strip + strip])
                    plgpu.commit_smem()

                def step(i, accs):
                    stage, accs = stage_of(turn, i), [*accs]
                    plgpu.barrier_wait(full.at[stage])
                    for strip in range(strips):
                        here = pl.ds((first_strip + strip) * OUT, OUT)
                        for c in range(C // columns):
                            tile_sm = w_sm.at[stage, c, here]
                            held = plgpu.load(tile_sm, layout=plgpu.Layout.WGMMA_UPCAST_2X)
                            held, place = plgpu.layout_cast(held, WGMMA), i * C + c * columns
                            numbers, unit = _numbers(held, form, interpret)
                            for half, w in enumerate(numbers):
                                if in_groups:
                                    w = scaled(w.astype(jnp.float32), strip, place, unit)
                                here_sm = pl.ds(c * columns, columns)
                                part_sm = x_sm.at[stage * halves + half, :, here_sm]
                                accs[strip] = _add_product(
                                    accs[strip], w.astype(dtype), part_sm, interpret
                                )
                    plgpu.barrier_arrive(empty.at[stage])
                    return tuple(accs)

                zero = plgpu.layout_cast(jnp.zeros((OUT, B), jnp.float32), WGMMA)
                accs = lax.fori_loop(0, steps, step, (zero,) * strips)
                for strip, acc in enumerate(accs):
                    if not in_groups:
                        source = scale_refs[0].at[expert, outputs_of(strip), 0]
                        scale = plgpu.load(source, layout=WGMMA.reduce(1), optimized=False)
                        acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
                    to = out_ref.at[pl.ds(tile * B, B), outputs_of(strip)].transpose((1, 0))
                    acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.store(to, acc, optimized=False)

        @pl.when(warpgroup == COMPUTING)
        def _():
            plgpu.set_max_registers(COPYING, action="decrease")

            @pl.loop(0, my_turns)
            def _(turn):
                tile, expert, first = item_of(turn)
                outputs = pl.ds(first, sizes.outputs)

                @pl.loop(0, steps)
                def _(i):
                    stage = stage_of(turn, i)
                    was_used = turn * steps + i >= stages
                    pl.when(was_used)(lambda: plgpu.barrier_wait(empty.at[stage]))
                    for c in range(C // columns):
                        places = pl.ds(i * C + c * columns, columns)
                        source = values_ref.at[expert, outputs, places]
                        plgpu.copy_gmem_to_smem(source, w_sm.at[stage, c], full.at[stage])
                    for half in range(halves):
                        source = x_ref.at[half, pl.ds(tile * B, B), pl.ds(i * C, C)]
                        to = x_sm.at[stage * halves + half]
                        plgpu.copy_gmem_to_smem(source, to, full.at[stage])

            drain(my_turns * steps, stages, empty)

    barriers = functools.partial(plgpu.Barrier, num_barriers=stages)
    of_scales = plgpu.SMEM((COMPUTING * strips, S, OUT), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((R, N), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=(
            (
                tiled_smem(
                    (stages, C // columns, sizes.outputs, columns), values_XNW.dtype, columns
                ),
                tiled_smem((stages * halves, B, C), dtype, columns),
                tuple(of_scales for _ in (scales if in_groups else ())),
            ),
            (
                barriers(num_arrivals=C // columns + halves),
                barriers(num_arrivals=COMPUTING),
            ),
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )(expert_I, count_1, x, values_XNW, scales)


def _in_halves(x_RK: Array) -> Array:
    """Return [2, R, W]: inputs of the numbers in the low halves of bytes, and in the high ones."""
    blocks = x_RK.reshape(len(x_RK), -1, 2, NIBBLE_BLOCK // 2)
    return jnp.moveaxis(blocks, 2, 0).reshape(2, len(x_RK), -1)


def _turn_over(ref, sm) -> None:
    """Copy scales [OUT, S] from global memory to shared memory as [S, OUT]."""
    _, S = ref.shape
    if S < COLUMNS:
        for column in range(S):
            x = plgpu.load(ref.at[:, column], layout=WGMMA.reduce(1), optimized=False)
            plgpu.store(sm.at[column], x, optimized=False)
        return

    @pl.loop(0, pl.cdiv(S, COLUMNS))
    def _(i):
        # The last ones end with the row: some are copied twice.
        columns = pl.ds(jnp.minimum(i * COLUMNS, S - COLUMNS), COLUMNS)
        x = plgpu.load(ref.at[:, columns], layout=WGMMA, optimized=False)
        x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.store(sm.at[columns].transpose((1, 0)), x, optimized=False)


def _numbers(held, form: str, interpret: Any) -> tuple[tuple[Any, ...], float]:
    """Return the numbers of places, of each half of a byte in 4 bits, and the unit that they count.

    held: [OUT, columns of a tile], in 4 bits as int8.
    """
    if form in ("int8", "fp8"):
        return (held.astype(jnp.bfloat16 if form == "int8" else jnp.float32),), 1
    unit = 1 if form == "int4" else 2.0**14
    if interpret:
        bits = held.astype(jnp.int32)
        return tuple(_nibbles(half, form) for half in (bits & 15, (bits >> 4) & 15)), unit
    result = plgpu.ShapeDtypeStruct(held.shape, jnp.dtype(jnp.float16), layout=WGMMA)
    decode = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(result, result))
    return decode(functools.partial(_decode, form=form))(held), unit


def _nibbles(bits, form: str):
    """Return the numbers of half bytes in units of `_numbers`."""
    if form == "int4":
        return (bits - 8).astype(jnp.float16)
    # float16 has the bits of these numbers, but for the exponent's bias.
    short = ((bits & 8) << 12 | (bits & 7) << 9).astype(jnp.int16)
    return lax.bitcast_convert_type(short, jnp.float16)


# What makes two numbers each of two bytes in $2: of their low halves $0, of the high ones $1.
DECODE = {
    # 1024 + n is a number of float16 that ends with the bits of n.
    "int4": """
        prmt.b32 bytes, $2, 0, 0x4140;
        and.b32 $0, bytes, 0x000f000f;
        shr.u32 bytes, bytes, 4;
        and.b32 $1, bytes, 0x000f000f;
        or.b32 $0, $0, 0x64006400;
        or.b32 $1, $1, 0x64006400;
        mov.b32 size, 0x64086408;
        sub.f16x2 $0, $0, size;
        sub.f16x2 $1, $1, size;
    """,
    "mxfp4": """
        prmt.b32 bytes, $2, 0, 0x1404;
        shl.b32 sign, bytes, 4;
        shl.b32 size, bytes, 1;
        and.b32 sign, sign, 0x80008000;
        and.b32 size, size, 0x0e000e00;
        or.b32 $0, sign, size;
        shr.u32 size, bytes, 3;
        and.b32 sign, bytes, 0x80008000;
        and.b32 size, size, 0x0e000e00;
        or.b32 $1, sign, size;
    """,
}


def _decode(_, held, *, form: str):
    """Return two arrays of float16, of the low and of the high halves of bytes."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    nothing = llvm.mlir_undef(ir.VectorType.get((1,), i16))
    both = llvm.StructType.get_literal([i32, i32])
    code = "{ .reg .b32 bytes, sign, size;" + DECODE[form] + "}"
    halves = [np.empty_like(held.registers) for _ in range(2)]
    for place, register in np.ndenumerate(held.registers):
        two = utils.bitcast(register, ir.VectorType.get((1,), i16))
        word = utils.bitcast(utils.vector_concat([two, nothing]), i32)
        made = llvm.inline_asm(both, [word], code, "=r,=r,r")
        for nth, half in enumerate(halves):
            half[place] = utils.bitcast(llvm.extractvalue(i32, made, [nth]), pair)
    return tuple(
        mgpu.FragmentedArray(_registers=half, _layout=held.layout, _is_signed=None)
        for half in halves
    )


def _add_product(acc, w, x_sm, interpret: Any):
    """Return acc + w . x transposed, [OUT, B]."""
    if interpret:  # the interpreter knows wgmma neither on registers nor into a given accumulator
        acc = acc + jnp.dot(w, x_sm[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this plain read before the copy that refills the stage
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, w, x_sm.transpose((1, 0)))

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]
