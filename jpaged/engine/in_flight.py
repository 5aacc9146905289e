"""InFlight: the steps that have been dispatched and not committed, oldest first."""

import dataclasses
from collections import deque
from collections.abc import Sequence as List
from typing import Any, NamedTuple

from jpaged.engine.cache.store import Move
from jpaged.engine.device import Device
from jpaged.engine.masks import masks_of
from jpaged.engine.packing import Batch
from jpaged.engine.plan import Plan
from jpaged.engine.queues import Queues
from jpaged.engine.stats import Stats


class Read(NamedTuple):
    """Blocks of one replica on their way to its store. handle: see Device.read_blocks."""

    replica: int
    moves: List[Move]
    handle: Any


@dataclasses.dataclass
class Dispatched:
    """A step, of a plan for each replica. rows: of a draw that waits for its masks, None where
    nothing waits. reads: of blocks that left the pools before it.
    """

    plans: List[Plan]
    handle: Any
    started: float
    rows: int | None
    reads: List[Read]


class InFlight:
    """Steps of one device. depth: how many there may be before the next. stats: the totals that
    making masks adds to.
    """

    def __init__(self, depth: int, stats: Stats):
        self.depth = depth
        self._stats = stats
        self._steps: deque[Dispatched] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_prefill(self) -> bool:
        """Whether the device is at, or comes to, one of prompts."""
        return any(plan.phase == "prefill" for step in self._steps for plan in step.plans)

    def clear(self) -> None:
        """Forget them: what they drew is never read."""
        self._steps.clear()

    def start(
        self,
        runner: Device,
        plans: List[Plan],
        batch: Batch,
        started: float,
        reads: List[Read] = (),
    ) -> None:
        """Dispatch a step, all but a draw under masks. reads: started just before it."""
        rows = batch.sample.rows if batch.sample is not None and batch.sample.masked else None
        self._steps.append(Dispatched(plans, runner.dispatch(batch), started, rows, reads))

    @property
    def is_full(self) -> bool:
        """Whether the oldest is to be committed before the next is dispatched: a draw that waits
        for its masks does so for the one before it.
        """
        waits = any(step.rows is not None for step in self._steps)
        return len(self._steps) >= (min(self.depth, 2) if waits else self.depth)

    def draw_oldest(self, runner: Device, queues: List[Queues]) -> None:
        """Start the draw of the oldest, if it waits for masks: all that came before it is
        committed, and the model runs meanwhile. queues: of each of its plans.
        """
        if self._steps and (rows := self._steps[0].rows) is not None:
            oldest = self._steps[0]
            with self._stats.masking():
                masks_SW = masks_of(list(zip(oldest.plans, queues, strict=True)), rows)
            oldest.handle, oldest.rows = runner.draw(oldest.handle, masks_SW), None

    def take_oldest(self, runner: Device, queues: List[Queues]) -> Dispatched:
        """The oldest, drawn, to be committed."""
        self.draw_oldest(runner, queues)
        return self._steps.popleft()
