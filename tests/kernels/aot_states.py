"""Layers that keep a state or latents, compiled for chips that are not there.

    python -m tests.kernels.aot_states cuda sm_90a
    python -m tests.kernels.aot_states tpu v5e:2x2

compiles one layer's step and its chunks of a prompt over a donated pool, and prints a JSON line for
each: instructions that would copy the pool, bytes of temporaries, those that have to be moved, and
on CUDA the loops and branches at which the host waits for the card (asked), and of our kernel
registers and bytes that it spills, by ptxas (0 where there is none). The control does not donate
its pool. Names in the command line: these alone. The exit status is 1 where a pool is copied
that is not known to be, or one that is known is not.
"""

import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Iterator

import jax
from jax.sharding import SingleDeviceSharding

from jpaged.runtime.compiled_steps import compile_step
from scripts._common import absent_device, stay_on_cpu
from scripts._state_calls import FULL, StateCall, calls
from tests.hlo import pool_copies
from tests.kernels.aot_decode import asked
from tests.kernels.noting_ptxas import Notes, noting

CONTROL = "control, not donated"
PROGRAMS: dict[str, StateCall] = calls(FULL, interpret=False)
PROGRAMS[CONTROL] = PROGRAMS["delta step, xla"]
# As ptxas names those of states.
KERNELS = ("gated_delta_step", "gated_delta_chunks", "mamba2_step", "mamba2_chunks")
XLA_LATENTS = ("latents step, xla", "latents prompts, xla")


def is_copied(platform: str, name: str) -> bool:
    """Return whether a program copies its pool: the control, and on TPUs XLA's latents, which reads
    a block of slots as one row; the kernel there reads them as they lie.
    """
    return name == CONTROL or (platform == "tpu" and name in XLA_LATENTS)


def programs_of(platform: str) -> list[str]:
    """Return the names of what compiles for a platform."""
    others = "tpu" if platform == "cuda" else "triton"
    return [name for name in PROGRAMS if not name.endswith(others)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiled program takes; see the module."""

    name: str
    pool_copies: int
    temporary_bytes: int
    moved: int
    asked: int
    registers: int
    spills: int


def compiled(platform: str, chip: str, name: str, notes: Notes) -> Compiled:
    call = PROGRAMS[name]
    pool, rest = jax.eval_shape(call.values)
    with absent_device(platform, chip) as device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        where = SingleDeviceSharding(device)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (pool, *rest)
        )
        donated = () if name == CONTROL else (0,)
        program = jax.jit(functools.partial(call.run), donate_argnums=donated)  # traced anew
        made = compile_step(program.trace(*placed).lower(), platform)
    text, memory = made.as_text(), made.memory_analysis()
    assert text is not None and memory is not None
    taken = [x for kernel, x in notes.taken().items() if kernel in KERNELS]
    return Compiled(
        name=name,
        pool_copies=len(pool_copies(text, pool.size)),
        temporary_bytes=memory.temp_size_in_bytes,
        moved=call.moved,
        asked=asked(text) if platform == "cuda" else 0,
        registers=max((x.registers for x in taken), default=0),
        spills=sum(x.spills for x in taken),
    )


def main(platform: str, chip: str, names: list[str]) -> Iterator[Compiled]:
    with noting() as notes:
        for name in names or programs_of(platform):
            yield compiled(platform, chip, name, notes)


if __name__ == "__main__":
    stay_on_cpu()
    good = True
    for made in main(sys.argv[1], sys.argv[2], sys.argv[3:]):
        print(json.dumps(dataclasses.asdict(made)), flush=True)
        good &= (made.pool_copies > 0) == is_copied(sys.argv[1], made.name)
    sys.exit(0 if good else 1)
