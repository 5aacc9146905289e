"""Answer a file of prompts: `jpaged batch`, of a checkout. docs/batch.md describes it."""

import sys

from jpaged.integrations.batch.command import main

if __name__ == "__main__":
    sys.exit(main(prog="serve_batch"))
