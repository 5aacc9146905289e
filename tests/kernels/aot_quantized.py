"""What XLA makes of products with weights in 8 and 4 bits, compiled for a chip that is not there.

    python -m tests.kernels.aot_quantized cuda sm_90a
    python -m tests.kernels.aot_quantized tpu v5e:2x2

compiles, of each form, the product of 16 rows with a weight of 6144 x 1024 (an FFN of Qwen3-0.6B)
and prints a JSON line: bytes of temporaries, how many instructions write the widened weight to
memory, and how many products are of fp8 by fp8. "control" writes it by order; "fp8 by fp8" is the
product of 704 rows where tensor cores can do that.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.quantized import Form, QuantizedWeight, quantized
from scripts._common import absent_device, stay_on_cpu

N, E, ROWS = 6144, 1024, 16
FORMS: tuple[Form, ...] = ("int8", "fp8", "int4")
NAMES = (*FORMS, "fp8 by fp8", "fp8 in blocks", "int4 with zeros", "control")


def weight(name: str) -> QuantizedWeight:
    """The shapes of a weight in a form."""
    form: Any = name.split()[0] if name != "control" else "int8"
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


def facts(platform: str, chip: str) -> Iterator[dict[str, Any]]:
    for name in NAMES:
        with absent_device(platform, chip) as device:
            where = jax.sharding.SingleDeviceSharding(device)
            rows = 704 if name == "fp8 by fp8" else ROWS
            args = (jax.ShapeDtypeStruct((rows, E), jnp.bfloat16), weight(name))
            placed = jax.tree.map(functools.partial(_at, where), args)
            function = control if name == "control" else product
            compiled: Any = jax.jit(function).trace(*placed).lower().compile()
        yield {
            "form": name,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "written": len(written(compiled.as_text())),
            "in_fp8": in_fp8(compiled.as_text()),
        }


if __name__ == "__main__":
    stay_on_cpu()
    for fact in facts(*sys.argv[1:]):
        print(json.dumps(fact), flush=True)
