"""Compiled kernels of the device at hand against the float64 reference, as a program.

    python -m tests.kernels.on_device mosaic_gpu decode --out FOLDER [--dry]

checks one phase of one implementation, and writes what it finds of each case to FOLDER as it goes
(see scripts/gpu_jobs.py: what the file has is not done again). --dry: fewer and smaller cases, on
any backend. --only: cases by name. scripts/gpu_check.py runs it for each phase of each
implementation, in a process each.
"""

import argparse
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from scripts._attention_cases import (
    DECODE,
    DEVICE,
    DEVICE_IN_8_BITS,
    DEVICE_LATENTS,
    GPU,
    IN_TILES,
    PREFILL,
    SANITIZED,
    SCALED,
    Case,
)
from scripts.gpu_jobs import add_case_flags, run_chosen
from tests.kernels.suite import check

LIMIT = 40  # seconds of a case, its compile included
DRY = (*(*GPU, *DECODE, *PREFILL)[::9], *(case for case in GPU if case.name in SANITIZED))


def hold(implementation: Any, case: Case, **own: Any) -> dict[str, Any]:
    """Random values, then those that tell positions apart."""
    for values in ("random", "coded"):
        try:
            check(implementation, case, values, **own)
        except AssertionError as e:
            said = (str(e).splitlines() or [""])[0]
            return {"wrong": f"{values}: {said}"}
    return {"right": True}


def checks(name: str, phase: str, *, dry: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """By the name of a case, long ones first: they tell most. Long contexts of decode are split in
    any way, where the implementation splits.
    """
    implementation = importlib.import_module(f"kernels_pallas.paged_attention.{name}")
    has_splits = "splits" in inspect.signature(implementation.decode).parameters
    found = {}
    others = (*SCALED[::6], IN_TILES[0])
    if not dry:
        others = (*DEVICE_LATENTS, *DEVICE_IN_8_BITS, *SCALED, *IN_TILES)
    taken = [
        c for c in others if implementation.unsupported(c.shapes, c.options.attention, None) is None
    ]
    for case in (*(DRY if dry else (*DEVICE, *GPU)), *taken):
        if (case.queries is None) != (phase == "decode"):
            continue
        is_long = case in (*DEVICE, *DEVICE_LATENTS, *DEVICE_IN_8_BITS)
        splits = (None, 1, 2) if phase == "decode" and is_long and has_splits else (None,)
        for number in splits:
            own = {} if number is None else {"splits": number}
            key = f"{name} {case.name}" + "".join(f" splits={n}" for n in own.values())
            found[key] = functools.partial(hold, implementation, case, **own)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("implementation")
    parser.add_argument("phase", choices=("decode", "prefill"))
    add_case_flags(parser)
    args = parser.parse_args(argv)
    cases = checks(args.implementation, args.phase, dry=args.dry)
    run_chosen(args, f"checks_{args.implementation}_{args.phase}", cases, LIMIT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
