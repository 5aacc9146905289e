"""A replica on a Ray cluster: an actor with an LLM, or one actor on each of several hosts that
share an LLM; and the driver's view of it.
"""

import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jpaged import gpu_share
from jpaged.errors import CheckpointError
from jpaged.fleet.cluster import default_resources, devices_of, ray
from jpaged.fleet.router import Ask
from jpaged.llm import LLM
from jpaged.request.outputs import RequestOutput, failed
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnUpdate
from jpaged.types import PyTree

EXCHANGE_S = 0.1  # how long a replica steps before it reports
EXCHANGES = 2  # exchanges in flight at once, so that a replica never waits for the driver
MOST_STEPS = 100  # steps of an exchange at most, if the driver says how many


class Replica:
    """The code of an actor: one LLM, which it steps while the driver asks for it."""

    rank = 0  # its number among the actors of a replica; all do the same, and the first answers
    updates = 0  # of the weights, that its LLM does not know of
    fetched_bytes, fetch_s = 0, 0.0  # of weights in Ray objects

    def address(self) -> str:
        """Return the address at which the other actors of a replica can reach this one."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(
        self,
        model: str | None,
        seed: int,
        engine_config: dict[str, Any],
        adapters: Mapping[str, str],
        has_whole_gpus: bool,
        updates: int = 0,
        weights: Any = None,
        coordinator: str | None = None,
        hosts: int = 1,
        rank: int = 0,
    ) -> SamplingParams:
        """Load the model (None: the embedded one) and its adapters. Return its default
        SamplingParams.

        has_whole_gpus: whether nothing else runs on its GPUs. updates: how often the weights were
        updated before. weights: those that are served now, if they are not the model's: see
        `update_params`. coordinator: the first actor's address, if the devices of several actors
        share the model.
        """
        if has_whole_gpus:
            gpu_share.take_most()
        if model is None:
            from jpaged.demo import MODEL_PATH

            model = str(MODEL_PATH)
        self.rank, self.updates = rank, updates
        if coordinator is not None:
            jax.distributed.initialize(coordinator, hosts, rank)
        self._llm = LLM(model, seed=seed, **engine_config)
        for name, folder in adapters.items():
            self._llm.add_adapter(name, folder)
        if weights is not None:
            self.updates -= 1  # the LLM counts this one
            self.update_params(weights, "abort")
        return self._llm.default_sampling_params()

    def update_params(self, weights: Any, mode: OnUpdate) -> dict[str, Any]:
        """Serve these weights from now on: see LLM.update_params. Return the engine's stats.

        weights: a folder, of which each process reads what its devices serve; or a list of one Ray
        object, which holds a tree as LLM.update_params takes it, whose leaves may be Ray objects of
        an array each. CheckpointError where an object is lost.
        """
        self._llm.update_params(self._fetched(weights), mode=mode)
        return self._stats()

    def _fetched(self, weights: Any) -> PyTree:
        """Return weights with the values of Ray objects in their places; arrays of objects on this
        node are read where they lie, in shared memory.
        """
        if isinstance(weights, str):
            return weights
        began = time.perf_counter()
        try:
            tree = jax.tree.map(_value, ray.get(weights[0]))
        except ray.exceptions.RayError as e:
            raise CheckpointError(f"the weights' Ray object cannot be read: {e}") from None
        self.fetch_s += time.perf_counter() - began
        self.fetched_bytes += sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))
        return tree

    def _stats(self) -> dict[str, Any]:
        """Return the LLM's stats, with what was read of Ray objects among what was read."""
        stats: dict[str, Any] = dict(self._llm.stats())
        stats["weight_bytes_read"] = stats.get("weight_bytes_read", 0) + self.fetched_bytes
        stats["weight_read_s"] = stats.get("weight_read_s", 0.0) + self.fetch_s
        return stats

    def exchange(
        self,
        requests: list[tuple[str, Any, SamplingParams]],
        aborted: list[str],
        steps: int | None = None,
    ) -> tuple[list[RequestOutput], dict[str, Any]]:
        """Add these requests, abort those, and step for a moment. Return the outputs that finished,
        and the engine's stats.

        steps: the number of steps at most; all actors of a replica must take the same number. None:
        as many as the time allows.
        """
        ended = []
        for request_id in aborted:
            self._llm.abort(request_id)
        for request_id, prompt, params in requests:
            try:
                made: Any = prompt(self._llm) if callable(prompt) else prompt
                self._llm.add_request(made, params, request_id=request_id)
            except Exception as e:  # an error of one request must not end the replica
                ended.append(failed(request_id, e, prompt))
        until, taken = time.perf_counter() + EXCHANGE_S, 0
        while self._llm.has_unfinished() and (
            time.perf_counter() < until if steps is None else taken < steps
        ):
            ended += self._llm.step()
            taken += 1
        if self.rank:
            return [], {}
        for output in ended if self.updates else ():
            _count_from(output, self.updates)
        return ended, self._stats()


def _value(leaf: Any) -> Any:
    return ray.get(leaf) if isinstance(leaf, ray.ObjectRef) else leaf


def _count_from(output: RequestOutput, updates: int) -> None:
    """Count versions of weights as an LLM that had all updates: this one began after some."""
    if output.weight_version:  # else it never ran
        output.weight_version += updates
    for done in output.outputs:
        done.weight_versions = [
            span._replace(version=span.version + updates) for span in done.weight_versions
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How every replica is started. hosts: actors of a replica, one on each host. resources: what
    Ray reserves for each actor. adapters: the folder of each. updates: how often the weights were
    updated; they are those of `model` now, or `weights`, a list of one Ray object.
    """

    model: str | None
    seed: int
    engine_config: dict[str, Any]
    resources: Mapping[str, float]
    hosts: int = 1
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    updates: int = 0
    weights: list[Any] | None = None


@dataclasses.dataclass(eq=False)
class RayRequest:
    """A request, as a router sees it, and how many replicas died while they ran it."""

    request_id: str
    prompt: Any
    params: SamplingParams
    ask: Ask
    losses: int = 0


@dataclasses.dataclass(eq=False)
class Slot:
    """The driver's view of a replica. When one of its actors dies, new ones take the place of
    all.
    """

    number: int
    actors: list[Any] = dataclasses.field(default_factory=list)
    group: Any = None  # Ray's placement group of several actors
    starting: Any = None  # the call that loads the model, until it returns
    calls: list[Any] = dataclasses.field(default_factory=list)  # exchanges in flight, oldest first
    # Calls of the actors other than the first: they return nothing, unless an actor dies.
    others: list[Any] = dataclasses.field(default_factory=list)
    # Requests that this replica has and has not answered.
    requests: dict[str, RayRequest] = dataclasses.field(default_factory=dict)
    # Those of them that the next exchange sends.
    unsent: list[RayRequest] = dataclasses.field(default_factory=list)
    aborted: list[str] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    starts: int = 0  # starts since a request last finished here
    lives: int = 0  # starts in all

    @property
    def name(self) -> str:
        """Return what the router knows this life of the replica by."""
        return f"{self.number}.{self.lives}"

    @property
    def actor(self) -> Any:
        """Return the actor that answers; None if the replica is dead."""
        return self.actors[0] if self.actors else None

    @property
    def is_up(self) -> bool:
        return bool(self.actors) and self.starting is None

    @property
    def waits_for(self) -> list[Any]:
        """Return the calls whose results are awaited."""
        return [*(self.calls if self.starting is None else [self.starting]), *self.others]

    def start(self, launch: Launch) -> None:
        """Start new actors for this replica."""
        others = {k: v for k, v in launch.resources.items() if k not in ("CPU", "GPU")}
        options: dict[str, Any] = {
            "num_cpus": launch.resources.get("CPU", 0),
            "num_gpus": launch.resources.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,  # the driver starts new actors: it knows the old ones' requests
        }
        self.starts += 1
        self.lives += 1
        has_whole_gpus = launch.resources.get("GPU", 0) >= 1  # of a part, others have the rest
        args = (
            *(launch.model, launch.seed, launch.engine_config, launch.adapters),
            *(has_whole_gpus, launch.updates, launch.weights),
        )
        if launch.hosts == 1:
            self.actors = [ray.remote(Replica).options(**options).remote()]
            self.starting = self.actors[0].start.remote(*args)
            return
        bundles = [{k: v for k, v in launch.resources.items() if v}] * launch.hosts
        self.group = ray.util.placement_group(bundles, strategy="SPREAD")
        placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for rank in range(launch.hosts):
            place = placed(self.group, placement_group_bundle_index=rank)
            kind = ray.remote(Replica).options(**options, scheduling_strategy=place)
            self.actors.append(kind.remote())
        address = self.actors[0].address.remote()
        self.starting, *self.others = (
            actor.start.remote(*args, address, launch.hosts, rank)
            for rank, actor in enumerate(self.actors)
        )

    def stop(self) -> None:
        """End its actors. The caller takes care of its requests."""
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
        self.actors, self.group, self.starting = [], None, None
        self.calls, self.others, self.stats = [], [], {}
        self.requests, self.unsent, self.aborted = {}, [], []

    def send(self) -> None:
        """Begin another exchange if there is anything to do and few are in flight."""
        while len(self.calls) < EXCHANGES and (self.requests or self.aborted):
            requests = [(r.request_id, r.prompt, r.params) for r in self.unsent]
            args = (requests, self.aborted)
            if len(self.actors) > 1:
                args = (*args, self._steps())
            call, *others = (actor.exchange.remote(*args) for actor in self.actors)
            self.calls.append(call)
            self.others += others
            self.unsent, self.aborted = [], []

    def _steps(self) -> int:
        """Return about how many steps fit into the time of an exchange."""
        taken = self.stats.get("host_time_s", 0.0) + self.stats.get("device_time_s", 0.0)
        if not taken:
            return 1
        return max(1, min(MOST_STEPS, int(EXCHANGE_S * self.stats["dispatches"] / taken)))


def launch_of(
    model: str | Path | None,
    seed: int,
    engine_config: dict[str, Any],
    resources: Mapping[str, float] | None,
    hosts: int | None,
    adapters: Mapping[str, str | Path] | None,
) -> Launch:
    """Return how to start replicas. If resources or hosts are None, they follow from this cluster
    and from the devices of an engine.
    """
    taken, most = default_resources(devices_of(engine_config)) if not resources else (resources, 1)
    return Launch(
        model=None if model is None else str(Path(model).resolve()),
        seed=seed,
        engine_config=engine_config,
        resources=dict(taken),
        hosts=hosts or most,
        adapters={name: str(Path(folder).resolve()) for name, folder in (adapters or {}).items()},
    )
