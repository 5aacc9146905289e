"""A fleet on Ray Serve: it starts, watches, replaces, adds and removes replicas, and brings calls
to them; which replica gets a request is our router's choice, in the place that Serve has for one.
"""

import asyncio
import dataclasses
import importlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from jpaged import gpu_share
from jpaged.checkpoint.hub import local_folder
from jpaged.config import ROWS, EngineFields
from jpaged.errors import ConfigError, JpagedError
from jpaged.fleet.cluster import connect, default_resources, devices_of, ray
from jpaged.fleet.face import FleetLLM, LostReplica, first_served
from jpaged.fleet.facts import fixed_facts
from jpaged.fleet.registry import FLEETS, Fleet
from jpaged.fleet.replica import (
    Description,
    EngineDied,
    FleetReplica,
    Job,
    Piece,
    Served,
)
from jpaged.fleet.router import Ask, Router, RouterSettings
from jpaged.llm import LLM

try:
    serve: Any = importlib.import_module("ray.serve")
    serve_config: Any = importlib.import_module("ray.serve.config")
    serve_exceptions: Any = importlib.import_module("ray.serve.exceptions")
except ImportError as e:
    raise ImportError(
        f"a server of replicas needs Ray Serve: pip install 'jpaged[ray]'; {e}"
    ) from e

log = logging.getLogger("jpaged")
NAME = "jpaged"  # of the application and its deployment
ROUTER = "jpaged.fleet.serve_router.FleetRequestRouter"
HEALTH_PERIOD_S = 2.0  # between two questions whether a replica's engine lives
HEALTH_TIMEOUT_S = 30.0
MOST_OF_A_REPLICA = 2  # times its rows: requests that it has at once, so that a row is filled soon


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How every replica begins. has_whole_gpus: whether nothing else runs on its GPUs."""

    model: str
    seed: int
    engine_config: dict[str, Any]
    served: Served
    has_whole_gpus: bool
    warms_up: bool


class ServedEngine:
    """The code of a replica of Ray Serve: one FleetReplica under the name that Serve gives it."""

    def __init__(self, launch: Launch):
        if launch.has_whole_gpus:
            gpu_share.take_most()
        llm = LLM(launch.model, seed=launch.seed, **launch.engine_config)
        if launch.warms_up:
            llm.warmup(use_tqdm=False)
        name = serve.get_replica_context().replica_id.unique_id
        facts = Description(
            model=llm.model_config, engine=llm.engine_config, fixed=fixed_facts(llm)
        )
        self._facts, self._replica = facts, FleetReplica(name, llm, launch.served)

    async def answer(self, ask: Ask, job: Job) -> AsyncIterator[Piece]:
        """See FleetReplica.answer. ask: is for the router."""
        async for piece in self._replica.answer(job):
            yield piece

    async def call(self, ask: Ask | None, method: str, *args: Any) -> tuple[str, Any]:
        """Call a method of the FleetReplica; return its name and what the call returns or raises,
        as a value: what Ray raises is the death of a replica.
        """
        try:
            return self._replica.name, await getattr(self._replica, method)(*args)
        except EngineDied:
            raise
        except Exception as e:
            return self._replica.name, e

    async def describe(self) -> Description:
        return self._facts

    def check_health(self) -> None:
        """Raise where the engine has died: Serve then starts another replica in this one's
        place.
        """
        self._replica.check()

    async def __del__(self) -> None:
        if (replica := getattr(self, "_replica", None)) is not None:
            await replica.close()


class RayReplicas:
    """The replicas of a deployment of ServedEngine. owns_ray: whether Ray ends with them."""

    def __init__(self, handle: Any, router: Router, *, owns_ray: bool):
        self.router, self._handle, self._owns_ray = router, handle, owns_ray
        self._answers = handle.options(method_name="answer", stream=True)

    async def answer(self, ask: Ask, job: Job) -> AsyncGenerator[Piece]:
        sent: Any = job
        if job.prompt.spans is not None:  # megabytes, which would hold up the event loop
            sent = await asyncio.to_thread(ray.put, job)
        name, stream = None, self._answers.remote(ask, sent)
        is_over = False
        try:
            async for piece in stream:
                name = piece.replica
                yield piece
            is_over = True
        except Exception as e:
            is_over = True
            raise self._told(e, name) from e
        finally:
            if not is_over:
                stream.cancel()

    async def one(self, ask: Ask, method: str, *args: Any) -> Any:
        try:
            _, result = await self._handle.call.remote(ask, method, *args)
        except Exception as e:
            raise self._told(e, None) from e
        if isinstance(result, Exception):
            raise result
        return result

    async def all(self, method: str, *args: Any) -> dict[str, Any]:
        results = await self._handle.broadcast("call", None, method, *args).results_async(
            return_exceptions=True
        )
        return dict(
            (f"lost {i}", self._told(x, None)) if isinstance(x, BaseException) else x
            for i, x in enumerate(results)
        )

    def _told(self, error: BaseException, name: str | None) -> BaseException:
        """Return LostReplica for what Ray raises where a replica has died, else the error."""
        cause: Any = error
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = getattr(error, "cause", error)
        gone = (
            ray.exceptions.RayActorError,
            ray.exceptions.ActorUnavailableError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.ObjectLostError,
            serve_exceptions.ReplicaUnavailableError,
            EngineDied,
        )
        if not isinstance(cause, gone):
            return cause
        is_dead = isinstance(cause, ray.exceptions.ActorDiedError | EngineDied)
        reason = " ".join(str(cause).split())[:300]
        return LostReplica(name if is_dead else None, f"{type(cause).__name__}: {reason}")

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """End the deployment, and Ray if this object's maker began it."""
        FLEETS.pop(NAME, None)
        if not ray.is_initialized():
            return
        serve.delete(NAME)
        if self._owns_ray:
            serve.shutdown()
            ray.shutdown()


def start_fleet(
    model: str | Path,
    *,
    replicas: int = 1,
    min_replicas: int | None = None,
    max_replicas: int | None = None,
    address: str = "local",
    resources: Mapping[str, float] | None = None,
    adapters: Mapping[str, str] | None = None,
    router: RouterSettings | None = None,
    seed: int = 0,
    warms_up: bool = False,
    drain_s: float = 30.0,
    max_retries: int = 3,
    **engine_config: Unpack[EngineFields],
) -> FleetLLM:
    """Start replicas of a model on a Ray cluster; return their face once they run.

    model: a folder that every node can read, or a name of the Hub. replicas: to begin with.
    min_replicas, max_replicas: between which Serve's autoscaling keeps their number, by the
    requests that each has at once, its rows; None of both: it stays. address: "local" starts Ray on
    this machine; else a cluster's, as in ray.init. resources: what Ray reserves for each; None: as
    many GPUs as its devices, or a host's TPU chips, where the cluster has them, else a CPU.
    drain_s: how long a replica that is removed may finish what it runs. max_retries: how often a
    request is run again whose replica has died. Raises ConfigError.
    """
    least, most = _bounds(replicas, min_replicas, max_replicas)
    folder = local_folder(model)
    owns_ray = connect(address, most)
    try:
        if resources is None:
            resources, hosts = default_resources(devices_of(engine_config))
            if hosts > 1:
                raise ConfigError(
                    f"a replica of a server is on one host, and this one needs {hosts}: choose a "
                    "smaller tensor_parallel_size"
                )
        rows = (engine_config.get("max_num_seqs") or ROWS) * (
            engine_config.get("data_parallel_size") or 1
        )
        launch = Launch(
            model=str(folder),
            seed=seed,
            engine_config={**engine_config},
            served=first_served(adapters or {}),
            has_whole_gpus=resources.get("GPU", 0) >= 1,
            warms_up=warms_up,
        )
        others = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
        scaling: dict[str, Any] = {"num_replicas": replicas}
        if most > least:
            scaling = {
                "autoscaling_config": serve_config.AutoscalingConfig(
                    min_replicas=least,
                    initial_replicas=replicas,
                    max_replicas=most,
                    target_ongoing_requests=rows,
                )
            }
        chooser = Router(router)
        FLEETS[NAME] = Fleet(chooser)
        deployment = serve.deployment(
            name=NAME,
            max_ongoing_requests=MOST_OF_A_REPLICA * rows,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=drain_s,
            request_router_config=serve_config.RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs={"name": NAME}
            ),
            ray_actor_options={
                "num_cpus": resources.get("CPU", 0),
                "num_gpus": resources.get("GPU", 0),
                "resources": others,
            },
            **scaling,
        )(ServedEngine)
        serve.start(proxy_location=serve_config.ProxyLocation.Disabled)
        handle = serve.run(deployment.bind(launch), name=NAME, route_prefix=None)
        described = handle.describe.remote().result()
        chosen = RayReplicas(handle, chooser, owns_ray=owns_ray)
        return FleetLLM(
            chosen,
            described,
            folder,
            adapters=adapters,
            seed=seed,
            max_retries=max_retries,
        )
    except BaseException as e:
        FLEETS.pop(NAME, None)
        if owns_ray:
            ray.shutdown()
        if isinstance(e, JpagedError) or not isinstance(e, Exception):
            raise
        said = " ".join(str(e).split())
        raise ConfigError(f"the replicas cannot be started: {said[-1000:]}") from e


def _bounds(replicas: int, least: int | None, most: int | None) -> tuple[int, int]:
    least, most = replicas if least is None else least, replicas if most is None else most
    if not 1 <= least <= replicas <= most:
        raise ConfigError(
            f"replicas={replicas}, min_replicas={least}, max_replicas={most}: must be in the order "
            "1 <= min_replicas <= replicas <= max_replicas"
        )
    return least, most
