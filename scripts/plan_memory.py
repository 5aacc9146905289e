"""Say how a device's memory is divided: `jpaged plan`, of a checkout."""

import sys

from jpaged.cli.plan import main

if __name__ == "__main__":
    sys.exit(main(prog="plan_memory"))
