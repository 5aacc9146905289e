"""Convert a Hugging Face folder to an Orbax one:

jpaged convert HF_FOLDER OUT [--dtype bfloat16] [--dequantize]
"""

import os
import sys

# Nothing is computed, and an accelerator's memory would only limit the size.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jpaged.checkpoint import load_params, save_params
from jpaged.checkpoint.orbax import check_new
from jpaged.cli.models import ITEMSIZE
from jpaged.errors import JpagedError
from jpaged.flags import Parser


def make_parser(prog: str = "jpaged convert") -> Parser:
    """Return the parser of `jpaged convert`."""
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("folder", metavar="HF_FOLDER", help="folder with config.json and safetensors files")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--dtype", choices=ITEMSIZE, help="cast to this; default: as stored")
    add("--dequantize", action="store_true", help="weights in 8 or 4 bits become plain ones")
    return parser


def main(argv: list[str] | None = None, prog: str = "jpaged convert") -> int:
    """Convert. Returns the exit status: 0 when OUT is complete, 1 after one sentence on stderr."""
    args = make_parser(prog).parse_args(argv)
    try:
        check_new(args.out)  # before minutes of reading
        params = load_params(args.folder, dtype=args.dtype, dequantize=args.dequantize)
        save_params(params, args.out)
    except JpagedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    print(f"{params} -> {args.out}")
    return 0
