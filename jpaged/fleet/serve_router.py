"""The router of a fleet as Ray Serve calls it: this module is copied into whichever process sends
requests to a deployment.
"""

import importlib
from typing import Any

from jpaged.fleet import registry
from jpaged.fleet.router import Ask, Router

_router: Any = importlib.import_module("ray.serve.request_router")
RequestRouter: Any = _router.RequestRouter


class FleetRequestRouter(RequestRouter):
    """Asks the Router that this process has for the deployment; in a process that has none, one of
    its own.
    """

    def initialize_state(self, name: str) -> None:
        """Find the router. name: of the fleet, in `registry`."""
        self._fleet = registry.FLEETS.setdefault(name, registry.Fleet(Router()))

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas that may take a request, each a rank of its own, the best first."""
        named = {r.replica_id.unique_id: r for r in candidate_replicas}
        args = [] if pending_request is None else pending_request.args
        if args and isinstance(args[0], Ask):
            ask: Any = args[0]
        else:  # whose prompt is not known, such as a first look at a deployment
            return [list(candidate_replicas)]
        ranked = self._fleet.ranked(ask, named)
        return [[named[name]] for name in ranked if name in named]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count a request where it went: the first rank may have been full."""
        args = pending_request.args
        if args and isinstance(args[0], Ask):
            self._fleet.router.sent(args[0], replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._fleet.died(replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._fleet.runs([r.replica_id.unique_id for r in replicas])
