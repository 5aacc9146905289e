"""Merge the shards of one batch run, in the order of the input.

    # answers.0-of-4.jsonl to answers.3-of-4.jsonl:
    jpaged merge answers.jsonl
    # or files by name:
    jpaged merge answers.jsonl part0.jsonl part1.jsonl

It refuses shards of different runs, a shard that is missing or unfinished (--partial merges what
there is), and an output that exists (--overwrite). The merged file has the manifest of an undivided
run, so jpaged batch --resume continues it. Exit status 0: merged; 2: merged, and some lines are
errors; 1: not merged.
"""

import os
import sys

from jpaged.flags import Parser
from jpaged.integrations.batch.merge import find_shards, merge
from jpaged.integrations.batch.source import BatchError


def make_parser(prog: str = "jpaged merge") -> Parser:
    """Return the parser of `jpaged merge`."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("output", help="the merged file")
    parser.add_argument(
        "shards", nargs="*", help="the files to merge (default: OUTPUT's, by their names)"
    )
    parser.add_argument(
        "--partial", action="store_true", help="merge what there is of an unfinished run"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def main(argv: list[str] | None = None, prog: str = "jpaged merge") -> int:
    """Merge. Return the exit status: 0, 1 or 2."""
    args = make_parser(prog).parse_args(argv)
    try:
        if os.path.exists(args.output) and not args.overwrite:
            raise BatchError(f"{args.output} exists: --overwrite replaces it")
        result = merge(args.shards or find_shards(args.output), args.output, partial=args.partial)
    except (BatchError, OSError) as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    print(f"{args.output}: {result['rows']} rows, {result['failed']} of them errors")
    for path in result["missing"]:
        print(f"missing: {path}")
    return 2 if result["failed"] else 0
