"""Turns: which phase the next step takes."""

from collections.abc import Sequence as List
from typing import Protocol

from jpaged.engine.plan import Phase

# Steps of one phase in a row while there is work for the other: bounds the gap between two tokens
# of a row, and how long a prompt waits. Among several replicas a prefill that waits for company
# costs a few rows some steps; one that does not wait costs every other replica a step.
MOST_IN_A_ROW: dict[Phase, int] = {"prefill": 4, "decode": 3}


class Replica(Protocol):
    """What a replica has work for: engine.scheduler.Scheduler."""

    @property
    def can_prefill(self) -> bool: ...

    @property
    def can_decode(self) -> bool: ...

    @property
    def can_join(self) -> bool: ...


class Turns:
    """Chooses the phase of each step for replicas that take their steps together."""

    def __init__(self) -> None:
        self._last: Phase = "prefill"  # the last phase that went while there was work for both
        self._in_a_row = 0
        self._is_contested = False  # whether there is work for both now

    def order(self, replicas: List[Replica]) -> tuple[Phase, Phase]:
        """Return the phase to plan first, and the one to plan where nothing comes of it.

        First comes the phase that most replicas have work for, a prefill where as many have work
        for either, unless it went too often in a row.
        """
        prefill = sum(replica.can_prefill for replica in replicas)
        decode = sum(replica.can_decode for replica in replicas)
        joins = all(replica.can_join for replica in replicas)  # then neither phase waits
        self._is_contested = bool(prefill and decode and not joins)
        prefill_first = prefill > 0 if joins or not decode else prefill >= decode
        if self._is_contested and self._in_a_row >= MOST_IN_A_ROW[self._last]:
            prefill_first = self._last == "decode"
        return ("prefill", "decode") if prefill_first else ("decode", "prefill")

    def take(self, phase: Phase) -> None:
        """Count a step of this phase, the one that was planned after `order`."""
        if not self._is_contested:
            self._in_a_row = 0
        else:
            self._in_a_row = self._in_a_row + 1 if phase == self._last else 1
            self._last = phase
