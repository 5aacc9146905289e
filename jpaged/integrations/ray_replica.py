"""A replica on a Ray cluster: an actor with an LLM, or one on each of several hosts that share it;
and how the driver sees it.
"""

import dataclasses
import importlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.llm import LLM
from jpaged.request.outputs import RequestOutput, failed
from jpaged.sampling_params import SamplingParams

try:
    # To type checkers `import ray` is the module beside this one.
    ray: Any = importlib.import_module("ray")
except ImportError as e:
    raise ImportError("jpaged.integrations.ray_llm needs Ray: pip install 'jpaged[ray]'") from e

EXCHANGE_S = 0.1  # how long a replica steps before it reports
EXCHANGES = 2  # under way at once, so that a replica never waits for the driver
MOST_STEPS = 100  # of an exchange where the driver says how many


class Replica:
    """What runs in an actor: one LLM, stepped while the driver asks."""

    rank = 0  # among the actors of a replica, which all do the same; the first one answers

    def address(self) -> str:
        """Return where the other actors of a replica can meet this one."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(
        self,
        model: str | None,
        seed: int,
        engine_config: dict[str, Any],
        adapters: Mapping[str, str],
        coordinator: str | None = None,
        hosts: int = 1,
        rank: int = 0,
    ) -> SamplingParams:
        """Load the model (None: the embedded one) and its adapters; its default sampling params.

        coordinator: the first actor's address, where the model lies over the devices of several.
        """
        if model is None:
            from jpaged.demo import MODEL_PATH

            model = str(MODEL_PATH)
        self.rank = rank
        if coordinator is not None:
            jax.distributed.initialize(coordinator, hosts, rank)
        self._llm = LLM(model, seed=seed, **engine_config)
        for name, folder in adapters.items():
            self._llm.add_adapter(name, folder)
        return self._llm.default_sampling_params()

    def exchange(
        self,
        requests: list[tuple[str, Any, SamplingParams]],
        aborted: list[str],
        steps: int | None = None,
    ) -> tuple[list[RequestOutput], dict[str, Any]]:
        """Take these requests, drop those, step for a moment: the requests that finished, and the
        engine's stats.

        steps: so many at most, since all actors of a replica must take as many; None: as many as
        the moment holds.
        """
        ended = []
        for request_id in aborted:
            self._llm.abort(request_id)
        for request_id, prompt, params in requests:
            try:
                made: Any = prompt(self._llm) if callable(prompt) else prompt
                self._llm.add_request(made, params, request_id=request_id)
            except Exception as e:  # whatever one request provokes is that request's error
                ended.append(failed(request_id, e, prompt))
        until, taken = time.perf_counter() + EXCHANGE_S, 0
        while self._llm.has_unfinished() and (
            time.perf_counter() < until if steps is None else taken < steps
        ):
            ended += self._llm.step()
            taken += 1
        return (ended, self._llm.stats()) if self.rank == 0 else ([], {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How every replica is started. hosts: actors of a replica, one on each. resources: that Ray
    sets aside for each actor. adapters: the folder of each.
    """

    model: str | None
    seed: int
    engine_config: dict[str, Any]
    resources: Mapping[str, float]
    hosts: int = 1
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Job:
    """A request and how many replicas were lost with it."""

    request_id: str
    prompt: Any
    params: SamplingParams
    losses: int = 0


@dataclasses.dataclass(eq=False)
class Slot:
    """A replica as the driver sees it; the actors in it are replaced when one of them dies."""

    number: int
    actors: list[Any] = dataclasses.field(default_factory=list)
    group: Any = None  # Ray's placement group of several actors
    starting: Any = None  # the call that loads the model, until it has
    calls: list[Any] = dataclasses.field(default_factory=list)  # exchanges under way, oldest first
    # What the other actors than the first do: nothing comes of it unless one of them dies.
    others: list[Any] = dataclasses.field(default_factory=list)
    # Handed to this replica and not answered.
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    # Those of them that go with the next exchange.
    unsent: list[Job] = dataclasses.field(default_factory=list)
    aborted: list[str] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    starts: int = 0  # since a request last came to its end here

    @property
    def actor(self) -> Any:
        """The one that answers; None where the replica is gone."""
        return self.actors[0] if self.actors else None

    @property
    def is_up(self) -> bool:
        return bool(self.actors) and self.starting is None

    @property
    def waits_for(self) -> list[Any]:
        """The calls whose results are awaited."""
        return [*(self.calls if self.starting is None else [self.starting]), *self.others]

    def start(self, launch: Launch) -> None:
        """Put new actors into it."""
        others = {k: v for k, v in launch.resources.items() if k not in ("CPU", "GPU")}
        options: dict[str, Any] = {
            "num_cpus": launch.resources.get("CPU", 0),
            "num_gpus": launch.resources.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,  # new actors are started here, which knows what the old ones had
        }
        self.starts += 1
        args = (launch.model, launch.seed, launch.engine_config, launch.adapters)
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
        """End its actors; what it had is left to the caller."""
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
        self.actors, self.group, self.starting = [], None, None
        self.calls, self.others, self.stats = [], [], {}
        self.jobs, self.unsent, self.aborted = {}, [], []

    def send(self) -> None:
        """Another exchange, as long as there is anything to do and few are under way."""
        while len(self.calls) < EXCHANGES and (self.jobs or self.aborted):
            requests = [(job.request_id, job.prompt, job.params) for job in self.unsent]
            args = (requests, self.aborted)
            if len(self.actors) > 1:
                args = (*args, self._steps())
            call, *others = (actor.exchange.remote(*args) for actor in self.actors)
            self.calls.append(call)
            self.others += others
            self.unsent, self.aborted = [], []

    def _steps(self) -> int:
        """About as many steps as an exchange has time for."""
        taken = self.stats.get("host_time_s", 0.0) + self.stats.get("device_time_s", 0.0)
        if not taken:
            return 1
        return max(1, min(MOST_STEPS, int(EXCHANGE_S * self.stats["dispatches"] / taken)))


def devices_of(engine_config: Mapping[str, Any]) -> int:
    """Return how many devices an engine with these settings takes."""
    sizes = ("data_parallel_size", "tensor_parallel_size")
    data, tensor = (engine_config.get(name) or getattr(EngineConfig, name) or 1 for name in sizes)
    return data * tensor


def default_resources(devices: int) -> tuple[dict[str, float], int]:
    """Return what each actor of a replica of so many devices takes of this cluster, and how many
    actors: GPUs, or all TPU chips of a host, where there are any, on as many hosts as that takes;
    else a CPU. ConfigError where they do not divide over hosts.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in ("GPU", "TPU"):
        most = int(max((node.get(name, 0) for node in nodes), default=0))
        if not most:
            continue
        if devices <= most:
            return {name: devices if name == "GPU" else most}, 1
        if devices % most:
            raise ConfigError(
                f"a replica of {devices} devices does not divide over hosts of {most} {name}s: "
                "change data_parallel_size or tensor_parallel_size"
            )
        return {name: most}, devices // most
    return {"CPU": 1}, 1


def launch_of(
    model: str | Path | None,
    seed: int,
    engine_config: dict[str, Any],
    resources: Mapping[str, float] | None,
    hosts: int | None,
    adapters: Mapping[str, str | Path] | None,
) -> Launch:
    """Return how to start replicas; resources and hosts None are what this cluster and the devices
    that an engine takes come to.
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
