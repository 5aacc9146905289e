"""Device: what the engine needs of the device side; the runner is one, and so is a test's mock."""

from typing import Protocol

import numpy as np

from jpaged.engine.cache.kinds import GroupSize, Replay
from jpaged.engine.packing import Batch
from jpaged.engine.plan import StepResult
from jpaged.engine.shapes import DecodeShape, StepShapes
from jpaged.engine.types import BlockData, BlocksHandle, StepHandle


class Device(Protocol):
    """One device program over the pools of one or several replicas."""

    @property
    def kv_groups(self) -> tuple[GroupSize, ...]:
        """The blocks of each group of layers, in the pool of one replica."""
        ...

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Return the buckets to run in place of these: the same ones, or larger ones that give the
        same results.
        """
        ...

    def steps_at_once(self, bucket: DecodeShape) -> int:
        """Return how many of its steps a decode that draws would run in one dispatch now."""
        ...

    def dispatch(self, batch: Batch) -> StepHandle:
        """Start a step, all but a draw that is a step of its own, and return a handle at once."""
        ...

    def draw(self, handle: StepHandle, masks_SW: np.ndarray | None = None) -> StepHandle:
        """Start the draw of a dispatched step that leaves it to another step. masks_SW: those of a
        draw under masks (see engine.masks). Returns its new handle.
        """
        ...

    def fetch(self, handle: StepHandle) -> list[StepResult]:
        """Wait for a step and return the result of each replica."""
        ...

    def replay(self, handle: StepHandle, rounds: list[list[list[Replay]]]) -> None:
        """Write the states of a step with guesses, a round after the other: the replays of each
        replica that do not read what another of the same round writes.
        """
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether what was read of one replica can be written to any other."""
        ...

    def read_blocks(self, block_ids: list[list[int]], replica: int = 0) -> BlocksHandle:
        """Start to copy blocks of each group to the host, as they are after the steps dispatched
        so far, and return a handle at once.
        """
        ...

    def fetch_blocks(self, handle: BlocksHandle) -> list[list[BlockData]]:
        """Wait for blocks that are being read. Returns the data of each, by group."""
        ...

    def write_blocks(
        self, blocks: list[list[BlockData]], block_ids: list[list[int]], replica: int = 0
    ) -> None:
        """Write data that fetch_blocks returned into these blocks of each group before the next
        step.
        """
        ...

    def recover(self) -> None:
        """Make the device state usable again after an exception, wherever it was raised."""
        ...
