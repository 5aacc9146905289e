"""Time the engine: `jpaged bench`, of a checkout."""

import sys

from jpaged.cli.bench import main

if __name__ == "__main__":
    sys.exit(main(prog="bench"))
