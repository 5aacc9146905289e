"""Pulse: keeps a quiet stream of events alive, so that no proxy or client takes it for dead."""

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jpaged.openai.server.wire import Exchange


class Pulse:
    """Inside the block, writes a comment to a stream that has begun, whenever nothing was written
    to it for `every_s` to twice `every_s` seconds. None: never. It takes one timer a stream, and
    nothing for a piece of it.
    """

    def __init__(self, exchange: "Exchange", every_s: float | None):
        self._exchange, self._every_s = exchange, every_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._every_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._beat)

    def _beat(self) -> None:
        exchange = self._exchange
        if exchange.is_quiet and exchange.status is not None:
            exchange.ping()
        exchange.is_quiet = True
        self._wait()
