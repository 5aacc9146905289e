"""The routers of this process by name: Ray Serve copies the class that asks them by value, with all
that its module holds, so they stand apart from it.
"""

import time

from jpaged.fleet.router import Ask, Router

DEAD_S = 30.0  # for which a replica that has died is not sent to, whoever still lists it


class Fleet:
    """A router, and the replicas that are known to have died."""

    def __init__(self, router: Router):
        self.router = router
        self._died: dict[str, float] = {}

    def died(self, name: str) -> None:
        """Send nothing more to a replica."""
        now = time.monotonic()
        self._died = {n: at for n, at in self._died.items() if now - at < DEAD_S} | {name: now}
        self.router.remove(name)

    def ranked(self, ask: Ask, names: dict[str, object]) -> list[str]:
        """Return which of these replicas are to get a request, the best first, and count it at the
        first. names: those that Ray says run.
        """
        alive = {name for name in names if name not in self._died}
        if len(alive) != len(self.router.replicas) or not alive.issuperset(self.router.replicas):
            self.router.keep(alive)
        ranked = self.router.ranked(ask)
        if ranked:
            self.router.sent(ask, ranked[0])
        return ranked

    def runs(self, names: list[str]) -> None:
        """Take which replicas run."""
        self.router.keep([name for name in names if name not in self._died])


FLEETS: dict[str, Fleet] = {}
