"""Timeline: the values of a run's counters over time, in bounded memory."""

import itertools
import time
from collections.abc import Sequence


class Timeline:
    """Samples of growing counters. When there are more than `most`, every second one is dropped and
    the interval doubles.

    names: of the counters. times: seconds since the run began, one for each row of `rows`.
    """

    def __init__(self, names: Sequence[str], *, most: int = 400, every_s: float = 0.25):
        self.names, self._most, self._every_s = tuple(names), most, every_s
        self.times: list[float] = []
        self.rows: list[tuple[float, ...]] = []
        self._began = time.perf_counter()

    def add(self, values: Sequence[float], *, at: float | None = None, last: bool = False) -> None:
        """Note the counters' values now, or at a time. A sample too soon after the last is dropped,
        unless it is the `last` one.
        """
        at = time.perf_counter() - self._began if at is None else at
        if self.times and not last and at - self.times[-1] < self._every_s:
            return
        self.times.append(at)
        self.rows.append(tuple(values))
        if len(self.times) > self._most:
            self.times, self.rows = self.times[::2], self.rows[::2]
            self._every_s *= 2

    def rates(self, *, points: int = 120) -> tuple[list[float], dict[str, list[float]]]:
        """Return (edges, name -> rate per second between consecutive edges), merged to at most
        `points` intervals.
        """
        stride = max(-(-(len(self.times) - 1) // points), 1)
        kept = sorted({*range(0, len(self.times), stride), len(self.times) - 1} - {-1})
        edges, rates = [self.times[i] for i in kept], {name: list[float]() for name in self.names}
        for a, b in itertools.pairwise(kept):
            seconds = max(self.times[b] - self.times[a], 1e-9)
            for k, name in enumerate(self.names):
                rates[name].append(max(self.rows[b][k] - self.rows[a][k], 0) / seconds)
        return edges, rates
