"""python -m jpaged.openai MODEL: see jpaged.openai.server.run."""

import sys

from jpaged.openai.server.run import main

if __name__ == "__main__":
    sys.exit(main())
