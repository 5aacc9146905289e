"""SharedRunner: the runner of one process of several that share a model."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.engine.packing import Batch
from jpaged.engine.shapes import StepShapes
from jpaged.models.config import ModelConfig
from jpaged.runtime.choices import Choices
from jpaged.runtime.memory import explained
from jpaged.runtime.mesh import Placement
from jpaged.runtime.processes import Peers
from jpaged.runtime.runner import DraftOf, Handle, Runner
from jpaged.runtime.transfers import SharedTransfers


class SharedRunner(Runner):
    """A Runner that compares each step with its peers', and waits for them no longer than
    peer_timeout_s: PeerError then. Blocks go to each process's own host memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        placement: Placement,
        params: Any,
        draft: DraftOf | None = None,
        choices: Choices | None = None,
    ):
        super().__init__(model, config, placement, params, draft, choices)
        assert isinstance(placement.mesh, Mesh)
        self.peers = Peers(placement.mesh, config.peer_timeout_s)
        self.transfers = SharedTransfers(placement, self.peers)

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Themselves: which steps are compiled may differ between processes."""
        return buckets

    def dispatch(self, batch: Batch) -> Handle:
        """Start a step that all processes start: see Runner.dispatch. What is compiled for it is
        not waited for as for a peer.
        """

        def dispatch() -> Handle:
            counts = [part.counts for part in batch.each]
            loads = [(at, x.name, x.version) for part in batch.each for at, x in part.loads]
            said = repr((batch.bucket, batch.sample, counts, loads)).encode()
            copies = b"" if batch.copies is None else batch.copies.tobytes()
            compared = self.peers.compare(batch.packed.tobytes(), copies, said)
            return dataclasses.replace(started(batch), compared=compared)

        started = super().dispatch
        with explained(self.config):
            self._prepare(batch)
        return self.peers.call(dispatch, "dispatching a step")

    def draw(self, handle: Handle, masks_SW: np.ndarray) -> Handle:
        """Each process makes the same masks of the same tokens; those are compared."""
        started = super().draw
        return self.peers.call(lambda: started(handle, masks_SW), "dispatching a draw")

    def _fetch(self, handle: Handle) -> list[np.ndarray]:
        def fetch() -> list[np.ndarray]:
            assert handle.compared is not None
            self.peers.check(handle.compared)
            return fetched(handle)

        fetched = super()._fetch
        return self.peers.call(fetch, "waiting for a step")
