"""An engine that draws what it is asked for at once: a stand-in for those of bench_peers.py. This
file is a driver, as theirs are.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from _peers_driver import Engine, New, Setup, serve


class StandIn:
    def __init__(self, setup: Setup):
        if setup.weights == "int4":
            raise RuntimeError("no int4 here")
        print("this is no answer")
        self.version, self.form = "1.0", f"{setup.weights} of {Path(setup.folder).name}"
        self.warmed = 0

    def warm(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> None:
        self.warmed = sum(map(len, prompts))

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        return [[self.warmed] * n for n in lengths]

    def stream(
        self, prompts: list[list[int]], lengths: list[int], temperature: float
    ) -> Iterator[New]:
        for step in range(max(lengths)):
            yield [(i, [self.warmed]) for i, n in enumerate(lengths) if step < n]


def make(setup: Setup) -> Engine:
    return StandIn(setup)


if __name__ == "__main__":
    sys.exit(serve(make))
