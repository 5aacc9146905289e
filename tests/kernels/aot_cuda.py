"""Lowering and compiling the Mosaic GPU kernels for Hopper on a machine without one.

Lowering needs jax alone. Compiling needs the CUDA plugin's packages and a ptxas, not a device. As a
program, with MOSAIC_GPU_DUMP_TO naming an empty folder, it compiles ALL and prints what
each takes; then CONTROLS, kernels that are broken on purpose, so that what is read of the others is
known to show it. Names in its command line: these alone; "-" reads names from standard input, one a
line, so that who asks gets them one by one.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from kernels_pallas.experts.widened_product import Weight, grouped_product
from kernels_pallas.paged_attention import mosaic_gpu
from kernels_pallas.paged_attention.head_write import HeadNorm
from kernels_pallas.paged_attention.head_write import mosaic_gpu as head_write
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.mosaic_gpu import decode_kernel, prefill_kernel
from kernels_pallas.paged_attention.pool_layout import ScaledPool
from kernels_pallas.vocab_tiles import mosaic_gpu as vocab_tiles
from scripts._common import H200, absent_devices, hopper
from tests.kernels import ptx
from tests.kernels.hopper.host import broken_rules, read_launch
from tests.kernels.hopper.program import parse, unordered_products

# name: head dim, block size, query heads, KV heads, options, whether there are sinks or ends
KERNELS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "decode_d64_g2": (64, 64, 8, 4, {"splits": 1}),
    "decode_d64_g2_splits": (64, 64, 8, 4, {"splits": 4}),
    "decode_d128_g2": (128, 64, 16, 8, {"splits": 1}),
    "decode_d128_g2_splits": (128, 64, 16, 8, {"splits": 4}),
    "decode_d128_g4_p16": (128, 16, 32, 8, {"splits": 2}),
    "decode_d128_g8_window": (128, 128, 8, 1, {"splits": 2, "window": 1000}),
    "decode_d64_g8_sinks_window": (64, 64, 64, 8, {"splits": 1, "window": 128, "sinks": 1}),
    "decode_d256_g4_cap": (256, 64, 8, 2, {"splits": 4, "soft_cap": 50.0}),
    "decode_d64_g32_splits": (64, 64, 32, 1, {"splits": 2}),
    "decode_d64_g64_splits": (64, 64, 64, 1, {"splits": 2}),
    "decode_d64_g16_int8_splits": (64, 64, 16, 1, {"splits": 2, "kv_dtype": jnp.int8}),
    "decode_d64_g32_int8_splits": (64, 64, 32, 1, {"splits": 2, "kv_dtype": jnp.int8}),
    "decode_d128_g16_int8": (128, 64, 32, 2, {"splits": 1, "kv_dtype": jnp.int8}),
    "decode_d128_g24_fp8_splits": (
        *(128, 64, 24, 1),
        {"splits": 2, "kv_dtype": jnp.float8_e4m3fn},
    ),
    "decode_d128_g32_int8_splits": (128, 64, 32, 1, {"splits": 2, "kv_dtype": jnp.int8}),
    "decode_d128_g64_int8_splits": (128, 64, 64, 1, {"splits": 2, "kv_dtype": jnp.int8}),
    "decode_d64_g2_int8": (64, 64, 8, 4, {"splits": 1, "kv_dtype": jnp.int8}),
    "decode_d128_g2_int8": (128, 64, 16, 8, {"splits": 1, "kv_dtype": jnp.int8}),
    "decode_d128_g2_int8_splits": (128, 64, 16, 8, {"splits": 4, "kv_dtype": jnp.int8}),
    "decode_d128_g4_fp8": (128, 128, 32, 8, {"splits": 2, "kv_dtype": jnp.float8_e4m3fn}),
    "decode_d256_g4_int8_cap": (
        *(256, 64, 8, 2),
        {"splits": 4, "soft_cap": 50.0, "kv_dtype": jnp.int8},
    ),
    "prefill_d64_g2": (64, 64, 8, 4, {}),
    "prefill_d64_g7_p8": (64, 8, 7, 1, {}),
    "prefill_d64_g8_sinks": (64, 64, 64, 8, {"sinks": 1}),
    "prefill_d64_g8_sinks_window": (64, 64, 64, 8, {"window": 128, "sinks": 1}),
    "prefill_d128_g2": (128, 64, 16, 8, {}),
    "prefill_d128_g4_p16": (128, 16, 32, 8, {}),
    "prefill_d128_g8_window": (128, 128, 8, 1, {"window": 1000}),
    "prefill_d128_g4_cap": (128, 64, 32, 8, {"soft_cap": 50.0}),
    "prefill_d128_g4_window_cap": (128, 64, 32, 8, {"window": 1000, "soft_cap": 50.0}),
    "prefill_d64_g2_int8": (64, 64, 8, 4, {"kv_dtype": jnp.int8}),
    "prefill_d128_g2_int8": (128, 64, 16, 8, {"kv_dtype": jnp.int8}),
    "prefill_d128_g4_fp8_window": (
        *(128, 128, 32, 8),
        {"window": 1000, "kv_dtype": jnp.float8_e4m3fn},
    ),
    "prefill_d256_g4_int8_cap": (256, 64, 8, 2, {"soft_cap": 50.0, "kv_dtype": jnp.int8}),
    "prefill_d256_g4": (256, 64, 8, 2, {}),
    "prefill_d256_g4_window": (256, 64, 8, 2, {"window": 1000}),
    "prefill_d256_g4_window_cap": (256, 256, 8, 2, {"window": 1000, "soft_cap": 50.0}),
    # As Gemma 3's layers have them, and Gemma 4's with a window.
    "prefill_d256_g2_images": (256, 64, 16, 8, {"ends": True}),
    "prefill_d256_g2_images_window": (256, 64, 16, 8, {"window": 1024, "ends": True}),
    "prefill_d128_g5_images_window": (128, 16, 5, 1, {"window": 1024, "ends": True}),
    "prefill_d128_g4_int8_images_window": (
        *(128, 64, 32, 8),
        {"window": 1024, "ends": True, "kv_dtype": jnp.int8},
    ),
}
# name: form, rows of a tile, inputs, outputs, scales of an output, whether there are zeros
EXPERTS: dict[str, tuple[str, int, int, int, int, bool]] = {
    "experts_int8": ("int8", 16, 2048, 1536, 1, False),
    "experts_int8_many": ("int8", 128, 2048, 1536, 1, False),
    "experts_int8_groups_many": ("int8", 128, 2048, 1536, 16, False),
    "experts_fp8": ("fp8", 8, 2048, 1536, 1, False),
    "experts_fp8_blocks": ("fp8", 16, 768, 2048, 6, False),
    "experts_fp8_blocks_many": ("fp8", 128, 7168, 4096, 56, False),
    "experts_int4": ("int4", 16, 2048, 1536, 64, False),
    "experts_int4_many": ("int4", 64, 7168, 4096, 224, False),
    "experts_int4_zeros": ("int4", 64, 2048, 1536, 16, True),
    "experts_mxfp4": ("mxfp4", 16, 2880, 2880, 90, False),
    "experts_mxfp4_many": ("mxfp4", 128, 2880, 5760, 90, False),
}
# What writes heads before attention: head dim, rotated dimensions, query heads of a KV head.
HEADS: dict[str, tuple[int, int, int]] = {
    "heads_d64_g7": (64, 0, 7),
    "heads_d128_g2": (128, 128, 2),
    "heads_d256_g4": (256, 128, 4),
}
# What reads logits: their number.
LOGITS: dict[str, int] = {"logits_151936": 151936}
ALL = (*KERNELS, *EXPERTS, *HEADS, *LOGITS)
MASKS = ("window", "soft_cap", "ends")
# name: a kernel, what is replaced in which module, by what
CONTROLS: dict[str, tuple[str, Any, str, Any]] = {
    "control_no_fences": ("prefill_d128_g2", plgpu, "commit_smem", lambda: None),
    "control_too_many_registers": ("prefill_d128_g2", prefill_kernel, "COPYING", 32),
}


def kernel(name: str) -> tuple[Any, ...]:
    """One of KERNELS and the shapes of its arguments: 32 rows, 2048 packed tokens, 4 layers of 1000
    blocks. Or one of EXPERTS: 40 tiles of 16 experts. Or one of HEADS: 2048 tokens. Or one of
    LOGITS: 32 rows.
    """
    if name in EXPERTS:
        return _experts(*EXPERTS[name])
    if name in HEADS:
        return _heads(*HEADS[name])
    if name in LOGITS:
        z, row = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((32, LOGITS[name]), (32,)))
        return functools.partial(vocab_tiles.read_tiles, tile=vocab_tiles.TILE), z, row, row, row
    D, P, H, K, more = KERNELS[name]
    shape, i32 = jax.ShapeDtypeStruct, jnp.int32
    pool: Any = shape((4 * 1000, P, 2 * K, D), more.get("kv_dtype", jnp.bfloat16))
    if "kv_dtype" in more:
        pool = ScaledPool(pool, shape((4 * 1000, 2 * K, P), jnp.float32), slots_last=True)
    tables = (
        pool,
        shape((), i32),
        shape((32, 32), i32),
        shape((32,), i32),
    )
    splits = {"splits": more["splits"]} if "splits" in more else {}
    masks = {key: value for key, value in more.items() if key in MASKS}
    attention = AttentionOptions(scale=D**-0.5, **masks)
    options = Options(attention=attention, num_layers=4, interpret=False)
    if name.startswith("decode"):
        function = functools.partial(mosaic_gpu.decode, options=options, **splits)
        args = shape((32, H, D), jnp.bfloat16), *tables
    else:
        function = functools.partial(mosaic_gpu.prefill, options=options)
        args = shape((2048, H, D), jnp.bfloat16), *tables, shape((33,), i32)
    if "ends" in more:
        return lambda *a: function(*a[:-1], ends_T=a[-1]), *args, shape((2048,), i32)
    if "sinks" not in more:
        return function, *args
    return lambda *a: function(*a[:-1], sinks_H=a[-1]), *args, shape((H,), jnp.bfloat16)


def _experts(
    form: str, rows: int, inputs: int, outputs: int, scales: int, has_zeros: bool
) -> tuple[Any, ...]:
    X, tiles, shape = 16, 40, jax.ShapeDtypeStruct
    in_4_bits = form in ("int4", "mxfp4")
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(form, jnp.uint8)
    of_groups: Any = shape((X, outputs, scales), jnp.float32)

    def product(x: Any, values: Any, expert_I: Any, count_1: Any, scales: Any, *zeros: Any) -> Any:
        weight = Weight(form, values, scales, *(zeros or (None,)))
        return grouped_product(x, weight, expert_I=expert_I, count_1=count_1, rows=rows)

    return (
        product,
        shape((tiles * rows, inputs), jnp.bfloat16),
        shape((X, outputs, inputs // (2 if in_4_bits else 1)), dtype),
        shape((tiles,), jnp.int32),
        shape((1,), jnp.int32),
        *(of_groups,) * (2 if has_zeros else 1),
    )


def _heads(D: int, rotated: int, G: int) -> tuple[Any, ...]:
    """Return the writing of 2048 tokens of 4 KV heads to blocks of 64, with norms of heads."""

    def run(qkv: Any, pool: Any, layer: Any, slots: Any, scales: Any, *rotation: Any) -> Any:
        more: dict[str, Any] = {"rotation": rotation or None, "num_layers": 4}
        norm = HeadNorm(1e-6)
        return head_write.write_heads(qkv, pool, layer, slots, scales=scales, norm=norm, **more)

    shape, bf16, T, K = jax.ShapeDtypeStruct, jnp.bfloat16, 2048, 4
    angles = shape((T, rotated // 2), jnp.float32)
    return (
        run,
        shape((T, K, G + 2, D), bf16),
        shape((4 * 1000, 64, 2 * K, D), bf16),
        shape((), jnp.int32),
        shape((T,), jnp.int32),
        (shape((D,), bf16),) * 2,
        *((angles,) * 2 if rotated else ()),
    )


def blocks_on_an_sm(name: str) -> int:
    """Return how many thread blocks of one of ALL are to fit on an SM at once."""
    if not name.startswith("decode"):
        return 1
    D, _, H, K, more = KERNELS[name]
    return decode_kernel.resident(D, H // K, in_8_bits="kv_dtype" in more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes of spills and of shared memory,
    seconds to compile.

    pool: registers that a thread block is launched with. asked: that its warpgroups ask for.
    fences: between proxies. unfenced: places that may read what lacks one (tests/kernels/ptx.py).
    unordered: wgmma whose registers may have been written since the last wgmma.fence. serialized:
    whether ptxas says that it lets wgmma wait for each other. descriptors: of TMA; broken_rules:
    those of the hardware that they break.
    """

    registers: int
    pool: int
    asked: int
    fences: int
    unfenced: int
    spills: int
    shared_memory: int
    unordered: int
    serialized: bool
    descriptors: int
    broken_rules: list[str]
    seconds: float


def lower(function: Callable[..., Any], *args: Any, device: tuple[str, int] = H200) -> str:
    """StableHLO of a function of ShapeDtypeStructs for CUDA, kernels included."""
    with hopper(device):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def compile_kernel(function: Callable[..., Any], *args: Any, dump: Path) -> Resources:
    """Compiles a function that holds one Mosaic kernel for sm_90a and reads what the dump says of
    it.

    MOSAIC_GPU_DUMP_TO has to name the folder `dump` since before jax was imported.
    """
    assert os.environ.get("MOSAIC_GPU_DUMP_TO") == str(dump)
    for file in dump.iterdir():
        file.unlink()
    sharding = SingleDeviceSharding(absent_devices("cuda", "sm_90a")[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    start = time.perf_counter()
    with hopper():
        jax.jit(function).trace(*placed).lower().compile()
    seconds = time.perf_counter() - start
    (ptxas,) = (file.read_text() for file in dump.glob("*.ptxas"))
    (resources,) = (file.read_text() for file in dump.glob("*.resources.txt"))
    (code,) = (file.read_text() for file in dump.glob("*.ptx"))
    (passes,) = (file.read_text() for file in dump.glob("*.mlir-passes.log"))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", ptxas))
    pool = -(-registers // 8) * 8 * ptx.threads(code)  # a warp gets them by 256
    descriptors = [
        descriptor
        for argument in read_launch(passes).arguments
        if isinstance(argument, tuple)
        for descriptor in argument
    ]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas)
    return Resources(
        registers=registers,
        pool=pool,
        asked=ptx.asked_registers(code) or pool,
        fences=ptx.fences(code),
        unfenced=len(ptx.unfenced(code)),
        spills=sum(int(n) for n in spills),
        shared_memory=max(int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", resources)),
        unordered=len(unordered_products(parse(code))),
        serialized="serialized" in ptxas,
        descriptors=len(descriptors),
        broken_rules=sorted({rule for x in descriptors for rule in broken_rules(x)}),
        seconds=round(seconds, 1),
    )


def report(name: str) -> None:
    """Print what one of ALL or CONTROLS takes, as JSON."""
    broken, dump = CONTROLS.get(name), Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    how = contextlib.nullcontext() if broken is None else mock.patch.object(*broken[1:])
    with how:
        function, *args = kernel(name if broken is None else broken[0])
        jax.clear_caches()
        found = compile_kernel(function, *args, dump=dump)
    print(json.dumps({"name": name} | dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    # kernel_report names the chip too.
    names = [arg for arg in sys.argv[1:] if not arg.startswith("sm_")]
    for name in map(str.strip, sys.stdin) if names == ["-"] else names or (*ALL, *CONTROLS):
        report(name)
