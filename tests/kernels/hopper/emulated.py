"""Calls of Mosaic kernels, compiled for Hopper and executed by the emulator."""

import contextlib
import dataclasses
import itertools
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

from scripts._common import absent_devices, hopper
from tests.kernels.hopper.block import ThreadBlock, Timing
from tests.kernels.hopper.host import Launch, read_launch
from tests.kernels.hopper.memory import GlobalMemory
from tests.kernels.hopper.program import parse

KERNEL = plgpu.kernel  # which an Emulated stands for while it runs
UNWRITTEN = 0xFF  # bytes of results before a kernel writes them: NaN in any float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel as it was compiled for sm_90a: its PTX, its launch, ptxas' registers a thread, and
    the shapes of its results.
    """

    ptx: str
    launch: Launch
    registers: int
    results: tuple[jax.ShapeDtypeStruct, ...]


def compile_call(function: Callable[..., Any], *args: Any) -> Compiled:
    """Compile a function that holds one Mosaic kernel, of arrays or their shapes."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = f"call_{uuid.uuid4().hex}"  # which no cache has: it would write nothing
    sharding = SingleDeviceSharding(absent_devices("cuda", "sm_90a")[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with tempfile.TemporaryDirectory() as folder, hopper(), _compiling(folder):
        traced = jax.jit(call).trace(*placed)
        traced.lower().compile()
        dumped = {file.name.partition(".")[2]: file for file in Path(folder).iterdir()}
        report = dumped["ptxas"].read_text()
        return Compiled(
            ptx=dumped["ptx"].read_text(),
            launch=read_launch(dumped["mlir-passes.log"].read_text()),
            registers=max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
            results=tuple(
                jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(traced.out_info)
            ),
        )


@contextlib.contextmanager
def _compiling(folder: str) -> Iterator[None]:
    """Have compilers write what they make to a folder."""
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit(False):
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        yield


def execute(compiled: Compiled, arrays: list[np.ndarray], timing: Timing) -> list[np.ndarray]:
    """Return the arrays of a call after a launch, thread block after thread block, and its results.
    An array changes where the call has a reference to it.
    """
    room = [
        np.full(x.size * x.dtype.itemsize, UNWRITTEN, np.uint8).view(x.dtype).reshape(x.shape)
        for x in compiled.results
    ]
    memory = GlobalMemory([*arrays, *room])
    program = parse(compiled.ptx)
    block = ThreadBlock(program, compiled.launch, memory, timing, compiled.registers)
    x, y, z = compiled.launch.grid
    for k, j, i in itertools.product(range(z), range(y), range(x)):
        block.run((i, j, k))
    return memory.arrays


class Emulated:
    """An implementation's functions with their kernels emulated; what is around them runs as it is.

    change: applied to a kernel's PTX, to break it on purpose. A kernel is compiled at the first
    call with arrays of its shapes; later ones take what it became: `compiled`, in order of calls.
    """

    def __init__(self, timing: Timing, change: Callable[[str], str] = lambda text: text) -> None:
        self.timing, self.change = timing, change
        self.compiled: dict[str, Compiled] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block, Mosaic kernels that are called on the CPU are emulated."""
        with mock.patch.object(plgpu, "kernel", self._kernel), jax.disable_jit():
            yield

    def _kernel(self, body: Callable[..., None], **settings: Any) -> Callable[..., Any]:
        """Stand for plgpu.kernel."""

        def call(*args: Any) -> Any:
            shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype), (args, settings["out_type"])))
            leaves, structure = jax.tree.flatten(args)
            refs = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Ref)}

            def of_leaves(*leaves: Any) -> Any:
                held = [jax.new_ref(x) if i in refs else x for i, x in enumerate(leaves)]
                return plgpu.kernel(body, **settings)(*jax.tree.unflatten(structure, held))

            leaves = [x[...] if i in refs else x for i, x in enumerate(leaves)]
            if shapes not in self.compiled:
                with mock.patch.object(plgpu, "kernel", KERNEL):
                    self.compiled[shapes] = compile_call(of_leaves, *leaves)
            compiled = self.compiled[shapes]
            changed = dataclasses.replace(compiled, ptx=self.change(compiled.ptx))
            after = execute(changed, [np.asarray(x) for x in leaves], self.timing)
            for i, ref in refs.items():
                ref[...] = jnp.asarray(after[i])
            results = after[len(leaves) :]
            treedef = jax.tree.structure(settings["out_type"])
            return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in results])

        return call
