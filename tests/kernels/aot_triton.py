"""The Triton kernels compiled for cards that are not there, each in the shared memory that it has.

    python -m tests.kernels.aot_triton            # all cards
    python -m tests.kernels.aot_triton sm_89 sm_120

prints a JSON line for each card and kernel: seconds, and why XLA refused it, which is null. The
exit status is 1 where it refused one, or took "control", which wants more shared memory than any
card has.
"""

import dataclasses
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jpaged.models.layers.mlp import gated
from kernels_pallas import row_thresholds
from kernels_pallas.experts import triton as experts
from kernels_pallas.paged_attention import triton
from kernels_pallas.paged_attention.head_write import HeadNorm
from kernels_pallas.paged_attention.head_write.triton import write_heads
from kernels_pallas.paged_attention.interface import AttentionOptions, Options
from kernels_pallas.paged_attention.pool_layout import ScaledPool
from kernels_pallas.vocab_tiles.triton import read_tiles
from scripts._common import CARDS, absent_device, stay_on_cpu
from scripts._state_calls import FULL, calls
from tests.kernels.aot_quantized import mixture

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*sizes: int, dtype: Any = I32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention(
    phase: str, D: int, G: int, kv_dtype: Any = None, window: int | None = None, ends: bool = False
) -> Call:
    """Attention of 4 KV heads of G query heads each: 16 rows, or 512 tokens."""
    asked = AttentionOptions(scale=0.1, window=window, ends=ends)
    options = Options(attention=asked, num_layers=2, interpret=False)
    pool: Any = shape(200, 64, 8, D, dtype=kv_dtype or BF16)
    if kv_dtype is not None:
        pool = ScaledPool(pool, shape(200, 8, 64, dtype=F32), slots_last=True)
    starts = () if phase == "decode" else (shape(17),)
    q = shape(16 if phase == "decode" else 512, 4 * G, D, dtype=BF16)
    function: Any = functools.partial(getattr(triton, phase), options=options)
    args = (q, pool, shape(), shape(16, 40), shape(16), *starts)
    if ends:
        return lambda *a: function(*a[:-1], ends_T=a[-1]), (*args, shape(512))
    return function, args


def latents(phase: str, H: int, kv_dtype: Any = None) -> Call:
    """Latents of 512 with rotated keys of 64, as DeepSeek's, of H query heads."""
    attention = AttentionOptions(scale=0.1, value_dim=512, latent=True)
    options = Options(attention=attention, num_layers=2, interpret=False)
    pool: Any = shape(200, 64, 1, 576, dtype=kv_dtype or BF16)
    if kv_dtype is not None:
        pool = ScaledPool(pool, shape(200, 2, 64, dtype=F32), slots_last=True, key_width=512)
    starts = () if phase == "decode" else (shape(17),)
    q = shape(16 if phase == "decode" else 512, H, 576, dtype=BF16)
    function = functools.partial(getattr(triton, phase), options=options)
    return function, (q, pool, shape(), shape(16, 40), shape(16), *starts)


def step(name: str) -> Call:
    """A layer's step over the states of rows, by its kernel."""
    call = calls(FULL)[f"{name}, triton"]
    pool, rest = jax.eval_shape(call.values)
    return call.run, (pool, *rest)


def heads_written() -> Call:
    """What prepares attention in a layer of Qwen3-0.6B."""
    norm = HeadNorm(1e-6)

    def run(qkv: Any, pool: Any, layer: Any, slots: Any, scales: Any, rotation: Any) -> Any:
        more: dict[str, Any] = {"scales": scales, "norm": norm, "rotation": rotation}
        return write_heads(qkv, pool, layer, slots, num_layers=2, **more)

    scales, angles = (shape(128, dtype=BF16),) * 2, (shape(64, 64, dtype=F32),) * 2
    qkv, pool = shape(64, 8, 4, 128, dtype=BF16), shape(200, 64, 16, 128, dtype=BF16)
    return run, (qkv, pool, shape(), shape(64), scales, angles)


def vocabulary(function: Callable[..., Any], *rows: Any) -> Call:
    """A reading of 64 rows of logits."""
    z = shape(64, 151936, dtype=F32)
    return functools.partial(function, tile=32), (z, *(shape(64, dtype=d) for d in rows))


def experts_in(form: str) -> Call:
    return functools.partial(experts.experts, glu=functools.partial(gated, "silu")), mixture(form)


def too_large() -> Call:
    """A product whose sides fill more than a card's shared memory."""

    def kernel(a_ref: Any, b_ref: Any, o_ref: Any) -> None:
        o_ref[...] = plgpu.dot(a_ref[...], b_ref[...])

    a, b = shape(64, 2048, dtype=BF16), shape(2048, 64, dtype=BF16)
    out = jax.ShapeDtypeStruct((64, 64), F32)
    params = plgpu.CompilerParams(num_warps=4, num_stages=1)
    return pl.pallas_call(kernel, out_shape=out, compiler_params=params), (a, b)


CONTROL = "control"
KERNELS: dict[str, Call] = {
    **{
        f"{phase} D{D} G{G}": attention(phase, D, G)
        for phase in ("decode", "prefill")
        for D, G in ((64, 7), (128, 2), (256, 4))
    },
    "decode int8": attention("decode", 128, 2, jnp.int8),
    "prefill images": attention("prefill", 128, 2, ends=True),
    "prefill images window": attention("prefill", 256, 2, window=1024, ends=True),
    "prefill int8": attention("prefill", 128, 2, jnp.int8),
    "prefill fp8": attention("prefill", 128, 2, jnp.float8_e4m3fn),
    "decode latents H16": latents("decode", 16),
    "decode latents H128": latents("decode", 128),
    "prefill latents H20": latents("prefill", 20),
    "decode latents int8": latents("decode", 16, jnp.int8),
    "prefill latents int8": latents("prefill", 16, jnp.int8),
    "delta step": step("delta step"),
    "KDA step": step("KDA step"),
    "Mamba-2 step": step("Mamba-2 step"),
    "write_heads": heads_written(),
    "read_tiles": vocabulary(read_tiles, F32, F32, F32),
    "row_thresholds": vocabulary(row_thresholds.row_thresholds, F32, F32, F32, I32, F32, jnp.bool_),
    **{f"experts {form}": experts_in(form) for form in ("int8", "int4", "fp8", "mxfp4")},
    CONTROL: too_large(),
}


def kernels_of(chip: str) -> list[str]:
    """Return the kernels that serve on a card: fp8 attention from Ada on."""
    return [name for name in KERNELS if chip != "sm_80" or name != "prefill fp8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of compiling a kernel for a card. refused: why XLA did not, or None."""

    chip: str
    name: str
    seconds: float
    refused: str | None


def compiled(chip: str, name: str) -> Compiled:
    function, args = KERNELS[name]
    began, refused = time.perf_counter(), None
    with absent_device("cuda", chip) as device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        where = jax.sharding.SingleDeviceSharding(device)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args
        )
        try:
            jax.jit(lambda *a: function(*a)).trace(*placed).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            refused = str(error).splitlines()[0]
    seconds = round(time.perf_counter() - began, 1)
    return Compiled(chip=chip, name=name, seconds=seconds, refused=refused)


def main(chips: list[str]) -> Iterator[Compiled]:
    for chip in chips or CARDS:
        for name in kernels_of(chip):
            yield compiled(chip, name)


if __name__ == "__main__":
    stay_on_cpu()
    good = True
    for made in main(sys.argv[1:]):
        print(json.dumps(dataclasses.asdict(made)), flush=True)
        good &= (made.refused is not None) == (made.name == CONTROL)
    sys.exit(0 if good else 1)
