"""The whole steps of Qwen3-0.6B, as the engine would compile them, for a chip that is not there.

    python -m tests.kernels.aot_steps tpu v5e:2x2
    python -m tests.kernels.aot_steps tpu v5e:2x4 8 4     # 8 chips share the model, 4 layers of it
    python -m tests.kernels.aot_steps tpu v5e:2x4 2x4 4   # two replicas of 4 chips
    python -m tests.kernels.aot_steps cuda sm_90a 8 4
    python -m tests.kernels.aot_steps cuda sm_90a 1 4 int8    # keys and values in 8 bits

compiles prefill and decode and prints a JSON line for each: compile seconds, bytes of temporaries
and weights on a chip, what passes between chips, and how many instructions would copy the pool.
There must be none, but in the control, a decode step that does not donate its pool; and nothing may
pass but sums and gathers; else the exit status is 1.
"""

import dataclasses
import json
import sys
import time
from typing import Any
from unittest import mock

import jax

from jpaged.config import EngineConfig
from jpaged.engine.shapes import DecodeShape, PrefillShape
from jpaged.models.forward import Forward
from jpaged.models.served import served_config
from jpaged.runtime.compiled_steps import compile_step
from jpaged.runtime.footprint import bytes_on_device, form_of
from jpaged.runtime.mesh import asked_shape, serving_mesh
from jpaged.runtime.runner import Placement, Runner
from scripts._common import MODELS, absent_mesh, stay_on_cpu
from tests.hlo import collectives, pool_copies

BLOCKS = (
    300  # of a chip's pool in 28 layers: more than the memory on the chip, where XLA would keep it
)
CONTROL = "control, not donated"
JIT = jax.jit


def not_donated(function: Any, *, donate_argnums: Any = (), **how: Any) -> Any:
    return JIT(function, **how)


def main(
    platform: str, chip: str, count: str = "1", layers: str = "28", kv_dtype: Any = None
) -> int:
    stay_on_cpu()
    model, good = dataclasses.replace(MODELS["0.6b"], num_layers=int(layers)), True
    *replicas, share = map(int, count.split("x"))
    replicas = replicas[0] if replicas else 1
    blocks = BLOCKS * share * 28 // int(layers)
    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "num_blocks": blocks}
    sizes |= {
        "kv_cache_dtype": kv_dtype,
        "data_parallel_size": replicas,
        "tensor_parallel_size": share,
    }
    config = EngineConfig(**sizes).resolve(model)
    M = config.max_blocks_per_seq
    prefill = PrefillShape(tokens=8192, rows=64, tables=1, blocks=M)
    decode = DecodeShape(rows=256, tables=1, blocks=M)
    loop = dataclasses.replace(decode, steps=8)
    cases = {"prefill": prefill, "decode": decode, "decode, 8 a dispatch": loop, CONTROL: decode}
    with absent_mesh(platform, chip, asked_shape(config)) as devices:
        mesh = serving_mesh(config, None, devices)
        axis = None if share == 1 else "tp"
        placement = Placement(mesh=mesh, axis=axis, device=devices[0])
        params = form_of(served_config(model, placement.axis_size), placement, "bfloat16")
        assert isinstance(params, Forward)
        runner = Runner(model, config, placement, params)
        (pool,) = runner.pools
        for name, bucket in cases.items():
            began = time.perf_counter()
            with mock.patch.object(jax, "jit", not_donated if name == CONTROL else JIT):
                compiled = compile_step(runner.compiled.lower(bucket), platform)
            text = compiled.as_text()
            parts = jax.tree.leaves(pool.of_rows(pool.shape[0]))  # scales too, in 8 bits
            sizes_of_parts = [part.size // placement.axis_size for part in parts]
            copies = sum(len(pool_copies(text, size)) for size in sizes_of_parts)
            always, sometimes = collectives(text)
            good &= set(always | sometimes) <= {"all-reduce", "all-gather"}
            good &= (copies > 0) == (name == CONTROL)
            found = {
                "name": f"step {name} {bucket.tokens}x{bucket.rows}",
                "kernel": None if pool.kernel is None else pool.kernel.name,
                "pool_copies": copies,
                "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "weight_bytes": bytes_on_device(params),
                "collectives": always,
                "in_branches": sometimes,
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(found), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
