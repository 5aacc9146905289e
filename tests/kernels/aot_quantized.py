"""What XLA makes of products with weights in 8 and 4 bits, compiled for a chip that is not there.

    python -m tests.kernels.aot_quantized cuda sm_90a
    python -m tests.kernels.aot_quantized tpu v5e:2x2

compiles, of each form, the product of 16 rows with a weight of 6144 x 1024 (an FFN of Qwen3-0.6B)
and prints a JSON line: bytes of temporaries, how many instructions write the widened weight to
memory, and how many products are of fp8 by fp8. "control" writes it by order; "fp8 by fp8" is the
product of 704 rows where tensor cores can do that. For CUDA then 32 tokens through 4 of 32 experts
(a layer of GPT-OSS 20B), by Mosaic, by Triton and in tiles by XLA, and how many loops ask the host.
"""

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.layers.mlp import gated
from jpaged.models.quantized import FORMS, MXFP4, QuantizedWeight, quantized
from kernels_pallas.experts import mosaic_gpu, tiles, triton
from kernels_pallas.experts.interface import ExpertWeights
from scripts._common import absent_device, stay_on_cpu

N, E, ROWS = 6144, 1024, 16
PLAIN = ("int8", "fp8", "int4")
NAMES = (*PLAIN, "fp8 by fp8", "fp8 in blocks", "int4 with zeros", "control")


def weight(name: str) -> QuantizedWeight:
    """The shapes of a weight in a form."""
    form = FORMS[name.split()[0] if name != "control" else "int8"]
    plain = jax.ShapeDtypeStruct((N, E), jnp.bfloat16)
    made = jax.eval_shape(lambda x: quantized(x, form, 1), plain)
    scales: Any = jax.ShapeDtypeStruct((N, E // 128), jnp.float32)
    if "blocks" in name:
        return QuantizedWeight(
            values=made.values, scales=scales, form=form, num_outputs=1, dtype=made.dtype
        )
    if "zeros" in name:
        parts = {"values": made.values, "scales": scales, "zeros": scales}
        return QuantizedWeight(**parts, form=form, num_outputs=1, dtype=made.dtype)
    return made


def product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    return w.linear(x, in_fp8=len(x) > ROWS).astype(x.dtype)


def control(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    wide = jax.lax.optimization_barrier(w.whole().astype(x.dtype))
    return jax.lax.dot_general(x, wide, (((1,), (1,)), ((), ())))


def written(hlo: str) -> list[str]:
    """Instructions outside fusions that give as many numbers of 16 or 32 bits as the weight has."""
    found, is_fused = [], False
    for line in hlo.splitlines():
        if line.endswith("{"):
            is_fused = "fused" in line or "fusion" in line
        result = re.match(
            r"\s*(?:ROOT )?%?[\w.\-]+ = (bf16|f16|f32)\[([\d,]*)\]\S* ([\w\-]+)\(", line
        )
        if is_fused or result is None or result[3] in ("parameter", "bitcast"):
            continue
        if math.prod(int(n) for n in result[2].split(",") if n) >= N * E:
            found.append(line.strip())
    return found


def in_fp8(hlo: str) -> int:
    """Products in a module, both sides of which are fp8 as they come."""
    computations = re.findall(r"^%([^\n]*)\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    fused = (
        head.count(": f8e4m3fn[") == 2 and " dot(" in body and " convert(" not in body
        for head, body in computations
    )
    return sum(fused) + hlo.count('custom_call_target="__cublas$lt$matmul$f8"')


def _at(where: Any, x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def compiled(platform: str, chip: str, function: Any, *args: Any) -> Any:
    with absent_device(platform, chip) as device:
        where = jax.sharding.SingleDeviceSharding(device)
        placed = jax.tree.map(functools.partial(_at, where), args)
        return jax.jit(function).trace(*placed).lower().compile()


def mixture(form: str) -> tuple[Any, ...]:
    """The shapes of 32 tokens, their choices, and experts in a form."""
    X, width, T, A = 32, 2880, 32, 4

    def held(*shape: int) -> QuantizedWeight:
        if form != "mxfp4":
            plain = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            return jax.eval_shape(lambda x: quantized(x, form, len(shape) - 1), plain)
        parts: Any = {"values": jax.ShapeDtypeStruct((*shape[:-1], width // 2), jnp.uint8)}
        parts["scales"] = jax.ShapeDtypeStruct((*shape[:-1], width // 32), jnp.float32)
        outputs, dtype = len(shape) - 1, jnp.dtype(jnp.bfloat16)
        return QuantizedWeight(**parts, form=MXFP4, num_outputs=outputs, dtype=dtype)

    weights = ExpertWeights(
        gate_up=held(X, 2, width, width), gate_up_bias=None, down=held(X, width, width)
    )
    kinds = ((T, width), jnp.bfloat16), ((T, A), jnp.int32), ((T, A), jnp.float32)
    return *(jax.ShapeDtypeStruct(*kind) for kind in kinds), weights


def facts(platform: str, chip: str) -> Iterator[dict[str, Any]]:
    for name in NAMES:
        rows = 704 if name == "fp8 by fp8" else ROWS
        args = jax.ShapeDtypeStruct((rows, E), jnp.bfloat16), weight(name)
        function = control if name == "control" else product
        yield {"form": name} | found_in(compiled(platform, chip, function, *args))
    modules = {"mosaic_gpu": mosaic_gpu, "triton": triton, "tiles": tiles}
    ways = {name: module.experts for name, module in modules.items() if platform == "cuda"}
    for form, (way, experts) in itertools.product(("mxfp4", "int8", "fp8", "int4"), ways.items()):
        function = functools.partial(experts, glu=functools.partial(gated, "silu"))
        made = compiled(platform, chip, function, *mixture(form))
        yield {"form": f"experts in {form}, {way}"} | found_in(made)


def found_in(program: Any) -> dict[str, int]:
    hlo = program.as_text()
    return {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "written": len(written(hlo)),
        "in_fp8": in_fp8(hlo),
        "loops": len(re.findall(r" while\(", hlo)),
    }


if __name__ == "__main__":
    stay_on_cpu()
    for fact in facts(*sys.argv[1:]):
        print(json.dumps(fact), flush=True)
