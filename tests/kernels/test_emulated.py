"""The Mosaic kernels as compiled for Hopper, executed by the emulator of tests/kernels/hopper.

Each case runs three times: with what is asynchronous done at random times, at the last legal moment
and at the first; shared memory starts as garbage. It is held to the float64 reference as every
implementation is. Needs the CUDA plugin and ptxas, no card.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kernels_pallas.paged_attention import mosaic_gpu
from scripts._attention_cases import GPU, IN_TILES, Case
from scripts._common import cannot_compile
from tests.kernels.hopper.block import TIMINGS
from tests.kernels.hopper.emulated import Emulated
from tests.kernels.suite import bounded, check

SECONDS = 600  # that a test may take, on a busy machine

needs_cuda = pytest.mark.skipif(
    cannot_compile("cuda") is not None, reason=str(cannot_compile("cuda"))
)
pytestmark = needs_cuda

CASES = {case.name: case for case in (*GPU, *IN_TILES)}


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process if a test takes too long."""
    with bounded(request, SECONDS):
        yield


def implementation(emulated: Emulated) -> Any:
    """Return mosaic_gpu's functions, with their kernels emulated."""

    def emulate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, options: Any, **own: Any) -> Any:
            with emulated.running():
                options = dataclasses.replace(options, interpret=False)
                return function(*args, options=options, **own)

        return run

    return SimpleNamespace(
        prepare=mosaic_gpu.prepare,
        prefill=emulate(mosaic_gpu.prefill),
        decode=emulate(mosaic_gpu.decode),
        pool_layout=mosaic_gpu.pool_layout,
    )


def check_emulated(case: Case, **own: Any) -> None:
    """Hold the emulated kernel of a case to the reference, under every timing."""
    emulated = Emulated(TIMINGS[0])
    for emulated.timing in TIMINGS:
        check(implementation(emulated), case, **own)


@pytest.mark.parametrize("name", ["decode_d64_p16_g2"])
def test_equals_the_reference(name: str) -> None:
    check_emulated(CASES[name])
