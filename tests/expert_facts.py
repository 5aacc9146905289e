"""What passes between devices that share whole experts, from the compiled decode step.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 python -m tests.expert_facts 16 4

compiles the step of 16 replicas of 4 devices and prints one JSON object: how many operations pass
data between replicas by kind, what they give in bytes, and the bytes of experts on a device.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.engine.shapes import DecodeShape
from jpaged.models.forward import Forward
from jpaged.models.layers.experts import Experts
from jpaged.runtime.footprint import bytes_on_device, form_of
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from tests.tiny import config, engine

LAYERS, ROWS = 2, 8
OPERATION = re.compile(r"= (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all)(-start)?\(")
BYTES = {"f32": 4, "s32": 4, "bf16": 2}


def result_bytes(shapes: str) -> int:
    """Return the bytes of the arrays that an operation of HLO text gives."""
    found = re.findall(r"(f32|s32|bf16)\[([\d,]*)\]", shapes)
    sizes = [(BYTES[name], [int(n) for n in dims.split(",") if n]) for name, dims in found]
    return sum(width * int(np.prod(dims)) for width, dims in sizes)


def main(replicas: int, share: int) -> None:
    model = config(
        num_heads=8,
        num_kv_heads=8,
        head_dim=16,
        num_layers=LAYERS,
        vocab_size=512,
        num_experts=replicas * share * 2,
        experts_per_token=2,
        expert_size=32,
        family="qwen3_moe",
        norm_topk_prob=True,
    )
    mesh = Mesh(np.array(jax.devices()).reshape(replicas, share), ("data", "tp"))
    where = Placement(mesh=mesh, axis="tp", device=jax.devices()[0], expert_parallel=True)
    settings = engine(num_blocks=64, data_parallel_size=replicas).resolve(model)
    form = form_of(where.served(model), where, jnp.float32)
    assert isinstance(form, Forward)
    runner = Runner(model, settings, where, form)
    step = DecodeShape(rows=ROWS, tables=1, blocks=16)
    text = runner.compiled.lower(step).compile().as_text()
    passed: dict[str, list[int]] = {}
    for line in text.splitlines():
        operation = OPERATION.search(line)
        if operation and "'data'}" in line.replace('"', "'"):
            passed.setdefault(operation[2], []).append(result_bytes(operation[1]))
    experts = [x.ffn for x in form.layers if isinstance(x.ffn, Experts)]
    weights = [(x.gate_up, x.down) for x in experts]
    every = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
    facts = {
        "layers": LAYERS,
        "over_replicas": {name: len(sizes) for name, sizes in passed.items()},
        "bytes_over_replicas": {name: sum(sizes) for name, sizes in passed.items()},
        "weights_of_experts": bytes_on_device(weights),
        "weights_of_all_experts": every,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
