"""A fleet in this process: FleetReplicas over small engines, or over anything that answers, which
die when they are told to.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

from jpaged.fleet.face import LostReplica
from jpaged.fleet.replica import Job, Piece
from jpaged.fleet.router import Ask, Router


class LocalReplicas:
    """The Replicas of a FleetLLM. make: returns a new replica of a name. dies_after: returns after
    how many pieces the replica of a job dies, or None.
    """

    def __init__(
        self,
        make: Callable[[str], Any],
        count: int,
        router: Router | None = None,
        dies_after: Callable[[Job], int | None] = lambda job: None,
    ):
        self.router, self._make, self._dies_after = router or Router(seed=0), make, dies_after
        self.alive: dict[str, Any] = {}
        self.dead: list[Any] = []
        self.homes: list[str] = []  # of all jobs, in order
        self._number = 0
        for _ in range(count):
            self.start()

    def start(self) -> str:
        """Start one more replica, and return its name."""
        self._number += 1
        name = f"replica {self._number}"
        self.alive[name] = self._make(name)
        self.router.add(name)
        return name

    def kill(self, name: str) -> None:
        """End a replica: whatever it has to say is not heard. Another takes its place."""
        if name in self.alive:
            self.dead.append(self.alive.pop(name))
            self.start()

    def _chosen(self, ask: Ask) -> str:
        self.router.keep(list(self.alive))
        name = self.router.choose(ask)
        self.homes.append(name)
        return name

    async def answer(self, ask: Ask, job: Job) -> AsyncGenerator[Piece]:
        name = self._chosen(ask)
        dies_after, count = self._dies_after(job), 0
        async for piece in self.alive[name].answer(job):
            if dies_after is not None and count >= dies_after:
                self.kill(name)
            if name not in self.alive:
                raise LostReplica(name, "killed")
            yield piece
            count += bool(piece.items)
        if name not in self.alive:
            raise LostReplica(name, "killed")

    async def one(self, ask: Ask, method: str, *args: Any) -> Any:
        name = self._chosen(ask)
        result = await getattr(self.alive[name], method)(*args)
        if name not in self.alive:
            raise LostReplica(name, "killed")
        return result

    async def all(self, method: str, *args: Any) -> dict[str, Any]:
        async def told(name: str, replica: Any) -> tuple[str, Any]:
            try:
                return name, await getattr(replica, method)(*args)
            except Exception as e:
                return name, e

        return dict(await asyncio.gather(*(told(*item) for item in list(self.alive.items()))))

    async def close(self) -> None:
        for replica in [*self.alive.values(), *self.dead]:
            await replica.close()


class Killer:
    """Kills a random replica now and then while a block runs."""

    def __init__(self, replicas: LocalReplicas, every_s: float, seed: int = 0):
        self._replicas, self._every_s, self._rng = replicas, every_s, random.Random(seed)
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._every_s)
            self._replicas.kill(self._rng.choice(sorted(self._replicas.alive)))
            self.count += 1
