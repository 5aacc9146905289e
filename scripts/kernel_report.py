"""Compile for chips that are not there, and print what the compilers say: no GPU or TPU is needed.

    python scripts/kernel_report.py cuda     # needs the CUDA plugin: pip install -e '.[cuda]'
    python scripts/kernel_report.py tpu      # needs libtpu: pip install libtpu

First every kernel alone (cuda: registers, spills and shared memory; tpu: whether the pool stays in
place), then the whole prefill and decode steps of Qwen3-0.6B: compile seconds, temporary bytes, and
the instructions that would copy the pool, of which there must be none; a decode step that does not
donate its pool is the control, and must have some.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHIPS = {"cuda": ("sm_90a",), "tpu": ("v5e:2x2", "v6e:2x2")}
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
}
BLOCKS = 300  # of the pool in the steps


def kernels(platform: str, chip: str) -> None:
    """One line a kernel, each compiled by a module of the tests in a process of its own."""
    with tempfile.TemporaryDirectory() as dump:
        module = (
            ["-m", "tests.kernels.aot_cuda"]
            if platform == "cuda"
            else ["-m", "tests.kernels.aot_tpu", chip]
        )
        environment = os.environ | QUIET | {"MOSAIC_GPU_DUMP_TO": dump}
        run = subprocess.Popen(
            [sys.executable, *module], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                print(
                    f"{chip:<10}{found.pop('name'):<30}",
                    *(f"{k} {_short(v)}" for k, v in found.items()),
                    flush=True,
                )
        if run.wait():
            raise SystemExit(f"{' '.join(module)} failed")


@contextlib.contextmanager
def target(platform: str, chip: str) -> Iterator[Any]:
    """A device of the chip; lowering inside takes it for the one at hand."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    if platform == "cuda":
        from tests.kernels import aot_cuda

        target_config = aot_cuda.TARGET
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology="1x1x1", target_config=target_config
        )
        with aot_cuda.hopper():
            yield topology.devices[0]
        return
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    mesh = Mesh(np.array(devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield devices[0]


def abstract_params(model: Any, dtype: str, sharding: Any) -> Any:
    """The parameter tree of a model in shapes alone."""
    import jax

    from jpaged.models.params import param_shapes

    def leaf(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return jax.tree.map(leaf, param_shapes(model), is_leaf=lambda node: isinstance(node, tuple))


def steps(platform: str, chip: str) -> bool:
    """A line for each step of Qwen3-0.6B, as the engine would compile it; whether all is as it must
    be.
    """
    import jax
    import jax.numpy as jnp
    from bench import MODELS

    from jpaged.config import EngineConfig
    from jpaged.engine.buckets import Bucket
    from jpaged.runtime.runner import Placement, Runner
    from tests.hlo import pool_copies

    model, good = MODELS["0.6b"], True
    config = EngineConfig(max_model_len=4096, max_num_seqs=256, num_blocks=BLOCKS).resolve(model)
    M = config.max_blocks_per_seq
    prefill = Bucket(phase="prefill", tokens=8192, rows=64, blocks=M)
    decode = Bucket(phase="decode", tokens=256, rows=256, blocks=M)
    with target(platform, chip) as device:
        placement = Placement(mesh=None, axis=None, device=device)
        runner = Runner(model, config, placement, jnp.bfloat16)
        runner.params = abstract_params(model, "bfloat16", placement.replicated)
        jit = jax.jit
        loop = dataclasses.replace(decode, steps=8)
        cases = {
            "prefill": prefill,
            "decode": decode,
            "decode, 8 a dispatch": loop,
            "control, not donated": decode,
        }
        for name, bucket in cases.items():
            is_control = name.startswith("control")
            if is_control:
                jax.jit = lambda f, *, donate_argnums=(), **how: jit(f, **how)  # pyright: ignore[reportAttributeAccessIssue]
            try:
                began = time.perf_counter()
                compiled = runner.lower(bucket).compile()
                seconds = time.perf_counter() - began
            finally:
                jax.jit = jit
            copies = len(pool_copies(compiled.as_text(), math.prod(runner.layout.shape)))
            memory = compiled.memory_analysis()
            good &= (copies > 0) == is_control
            figures = (
                f"pool_copies {copies}  temporary_bytes {memory.temp_size_in_bytes}  "
                f"seconds {seconds:.1f}"
            )
            title = f"step {name} {bucket.tokens}x{bucket.rows}"
            print(f"{chip:<10}{title:<36}{runner.kernel.name}  {figures}", flush=True)
    return good


def _short(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("platform", choices=CHIPS)
    parser.add_argument("--only", choices=("kernels", "steps"), help="one of the two tables")
    args = parser.parse_args(argv)
    os.environ |= QUIET
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    from tests.kernels import aot_cuda, aot_tpu

    reason = aot_cuda.missing() if args.platform == "cuda" else aot_tpu.without_libtpu()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 1
    good = True
    for chip in CHIPS[args.platform]:
        if args.only != "steps":
            kernels(args.platform, chip)
        if args.only != "kernels":
            good &= steps(args.platform, chip)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
