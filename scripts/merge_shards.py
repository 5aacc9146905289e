"""Merge the shards of a batch run: `jpaged merge`, of a checkout."""

import sys

from jpaged.cli.merge import main

if __name__ == "__main__":
    sys.exit(main(prog="merge_shards"))
