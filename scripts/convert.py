"""Convert a Hugging Face folder to an Orbax one:

python scripts/convert.py HF_FOLDER OUT [--dtype bfloat16] [--dequantize]
"""

import os
import sys

# Nothing is computed, and an accelerator's memory would only limit the size.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _common as common

from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.orbax import check_new
from jpaged.errors import JpagedError


def main(argv: list[str] | None = None) -> int:
    """Convert. Returns the exit status: 0 when OUT is complete, 1 after one sentence on stderr."""
    parser = common.make_parser("convert.py", __doc__)
    add = parser.add_argument
    add("folder", metavar="HF_FOLDER", help="folder with config.json and safetensors files")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--dtype", choices=common.ITEMSIZE, help="cast to this; default: as stored")
    add("--dequantize", action="store_true", help="weights in 8 or 4 bits become plain ones")
    args = parser.parse_args(argv)
    try:
        check_new(args.out)  # before minutes of reading
        params = load_params(args.folder, dtype=args.dtype, dequantize=args.dequantize)
        save_params(params, args.out)
    except JpagedError as e:
        print(f"convert.py: error: {e}", file=sys.stderr)
        return 1
    print(f"{params} -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
