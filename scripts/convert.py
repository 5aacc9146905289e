"""Convert a Hugging Face folder to an Orbax one: `jpaged convert`, of a checkout."""

import sys

from jpaged.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(prog="convert"))
