"""Compile for chips that are not there, and print what the compilers say: no GPU or TPU is needed.

    python scripts/kernel_report.py cuda     # needs the CUDA plugin: pip install -e '.[cuda]'
    python scripts/kernel_report.py tpu      # needs libtpu: pip install libtpu

The tests' own programs run, each in a process: first every kernel alone (tests/kernels/aot_cuda.py:
registers, spills and shared memory; aot_tpu.py: whether the pool stays in place), then the whole
prefill and decode steps of Qwen3-0.6B (aot_steps.py): compile seconds, temporary bytes, and the
instructions that would copy the pool, of which there must be none; a decode step that does not
donate its pool is the control, and must have some. For a GPU also how many graphs and kernels a
decode step is launched with (aot_decode.py). Exit status 1 if that is not so.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import _common as common


def run(chip: str, *program: str) -> bool:
    """Print a line for each JSON line that a program of the tests prints. Return whether it ended
    well.
    """
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as dump:
        quiet = common.LIBTPU | {"JAX_PLATFORMS": "cpu"}
        if program[0].endswith("aot_cuda"):  # which reads there what the compiler says of a kernel
            quiet["MOSAIC_GPU_DUMP_TO"] = dump
        paths = {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        options = {"cwd": root, "env": os.environ | quiet | paths, "text": True}
        command = [sys.executable, "-m", *program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    record = json.loads(line)
                    name = f"{chip:<10}{record.pop('name'):<36}"
                    figures = (f"{k} {v}" for k, v in record.items())
                    print(name, *figures, sep="  ", flush=True)
    return process.returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("kernel_report", __doc__)
    parser.add_argument("platform", choices=common.CHIPS)
    parser.add_argument("--only", choices=("kernels", "steps"), help="one of the two tables")
    args = parser.parse_args(argv)
    if (reason := common.cannot_compile(args.platform)) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 1
    good = True
    for chip in common.CHIPS[args.platform]:
        if args.only != "steps":
            good &= run(chip, f"tests.kernels.aot_{args.platform}", chip)
        if args.only != "kernels":
            good &= run(chip, "tests.kernels.aot_steps", args.platform, chip)
            if args.platform == "cuda":
                good &= run(chip, "tests.kernels.aot_decode")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
