"""How replicas on a Ray cluster are placed, and what passes between driver and actors, over a Ray
that is a few lists: what each is asked, and who dies, is seen and said here.
"""

import collections
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jpaged.fleet
import jpaged.integrations
from jpaged import (
    CheckpointError,
    ConfigError,
    PeerError,
    RequestError,
    SamplingParams,
    WeightSpan,
)
from jpaged.request.outputs import RequestOutput, completion

MODULES = ("jpaged.integrations.ray_replica", "jpaged.integrations.ray_llm")
CLUSTER = "jpaged.fleet.cluster"


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class Ref:
    """A call's result, there at once."""

    def __init__(self, value: Any, error: Exception | None = None):
        self.value, self.error = value, error


class ObjectRef(Ref):
    """What is in Ray's store."""


class Actor:
    """One that runs its calls as they come; `options` are what Ray was asked for it."""

    def __init__(self, made: Any, options: dict[str, Any]):
        self.made, self.options, self.calls, self.is_dead = made, options, [], False

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda *args: self._run(name, args))

    def _run(self, name: str, args: tuple[Any, ...]) -> Ref:
        args = tuple(x.value if isinstance(x, Ref) else x for x in args)
        self.calls.append((name, args))
        if self.is_dead:
            return Ref(None, RayError("the actor died"))
        try:
            return Ref(getattr(self.made, name)(*args))
        except Exception as e:
            return Ref(None, RayTaskError(e))


class Ray(types.ModuleType):
    """As much of Ray as RayLLM uses."""

    def __init__(self, *nodes: dict[str, float]):
        super().__init__("ray")
        self.hosts, self.actors, self.groups = nodes, list[Actor](), list[Any]()
        self.exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.ObjectRef, self.put = ObjectRef, ObjectRef
        self.util = types.SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.1",
            placement_group=self._group,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=types.SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                    group,
                    placement_group_bundle_index,
                )
            ),
        )

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((tuple(map(tuple, map(dict.items, bundles))), strategy))
        return self.groups[-1]

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Resources": node, "Alive": True} for node in self.hosts]

    def remote(self, kind: type) -> Any:
        def options(**asked: Any) -> Any:
            def remote() -> Actor:
                self.actors.append(Actor(kind(), asked))
                return self.actors[-1]

            return types.SimpleNamespace(remote=remote)

        return types.SimpleNamespace(options=options)

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[Any, Any]:
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(self, actor: Actor) -> None:
        actor.is_dead = True


class EchoLLM:
    """Ends a request after three steps. meets: the calls of jax.distributed.initialize."""

    fails: Any = None  # raised by the next step of any

    def __init__(self, model: Any, *, seed: int, **engine_config: Any):
        self.engine_config, self.left = engine_config, dict[str, int]()
        self.adapters = dict[str, str]()
        self.dispatches = 0
        self.weights, self.version, self.modes = str(model), 1, list[str]()

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def add_adapter(self, name: str, folder: str) -> None:
        self.adapters[name] = folder

    def update_params(self, weights: Any, *, mode: str) -> None:
        if isinstance(weights, str) and weights.endswith("missing"):
            raise CheckpointError(f"{weights}: no such folder")
        self.weights, self.version = weights, self.version + 1
        self.modes.append(mode)

    def add_request(self, prompt: Any, params: SamplingParams, *, request_id: str) -> None:
        self.left[request_id] = 3

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[RequestOutput]:
        if (error := EchoLLM.fails) is not None:
            EchoLLM.fails = None
            raise error
        self.dispatches += 1
        self.left = {name: count - 1 for name, count in self.left.items()}
        ended = [name for name, count in self.left.items() if not count]
        for name in ended:
            del self.left[name]
        made = {"prompt": None, "prompt_token_ids": [], "weight_version": self.version}
        return [
            RequestOutput(
                request_id=name,
                outputs=[completion(0, [1], [0.0], "length", versions=[self.version])],
                **made,
            )
            for name in ended
        ]

    def stats(self) -> dict[str, Any]:
        times = {"host_time_s": 0.01 * self.dispatches, "device_time_s": 0.0}
        return {"dispatches": self.dispatches, "data_parallel_size": 2, **times}


@pytest.fixture
def meets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of jax.distributed.initialize."""
    found: list[Any] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: found.append(args))
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function of nodes that makes a Ray of them, and RayLLM over it."""

    def make(*nodes: dict[str, float]) -> tuple[Ray, Any]:
        ray = Ray(*nodes)
        monkeypatch.setitem(sys.modules, "ray", ray)
        for name in (CLUSTER, *MODULES):
            monkeypatch.delitem(sys.modules, name, raising=False)
        replica, llm = (importlib.import_module(name) for name in MODULES)
        monkeypatch.setattr(replica, "LLM", EchoLLM)
        return ray, llm.RayLLM

    EchoLLM.fails = None
    yield make
    for name in MODULES:
        if sys.modules.pop(name, None) is not None:
            delattr(jpaged.integrations, name.rpartition(".")[2])
    if sys.modules.pop(CLUSTER, None) is not None:
        delattr(jpaged.fleet, "cluster")


EIGHT = {"GPU": 8.0, "CPU": 64.0}
PLACES: dict[str, Any] = {  # nodes, settings, and what each actor takes, and how many there are
    "one GPU": ((EIGHT,), {}, ("GPU", 1), 1),
    "two GPUs": ((EIGHT,), {"tensor_parallel_size": 2}, ("GPU", 2), 1),
    "replicas in it": (
        (EIGHT,),
        {"data_parallel_size": 2, "tensor_parallel_size": 4},
        ("GPU", 8),
        1,
    ),
    "two hosts": ((EIGHT, EIGHT), {"tensor_parallel_size": 16}, ("GPU", 8), 2),
    "a TPU's chips": (({"TPU": 4.0},) * 2, {"tensor_parallel_size": 2}, ("TPU", 4), 1),
    "a slice": (({"TPU": 4.0},) * 2, {"tensor_parallel_size": 8}, ("TPU", 4), 2),
    "CPUs": (({"CPU": 4.0},), {"tensor_parallel_size": 2}, ("CPU", 1), 1),
    "said": (({"CPU": 4.0},), {"hosts": 2, "resources": {"CPU": 2}}, ("CPU", 2), 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_asked_of_ray(place: str, cluster: Any, meets: list[Any]) -> None:
    nodes, settings, (name, count), hosts = PLACES[place]
    ray, kind = cluster(*nodes)
    llm = kind(None, replicas=2, **settings)
    assert len(ray.actors) == 2 * hosts
    for actor in ray.actors:
        asked = actor.options
        numbers = {"CPU": asked["num_cpus"], "GPU": asked["num_gpus"], **asked["resources"]}
        assert {k: v for k, v in numbers.items() if v} == {name: count}
        assert ("scheduling_strategy" in asked) == (hosts > 1)
    bundle = ((name, count),)
    assert ray.groups == [((bundle,) * hosts, "SPREAD")] * (2 if hosts > 1 else 0)
    if hosts > 1:
        places = [actor.options["scheduling_strategy"] for actor in ray.actors]
        assert places == [(group, rank) for group in ray.groups for rank in range(hosts)]
        assert [args[1:] for args in meets] == [(hosts, rank) for rank in range(hosts)] * 2
        assert all(args[0].startswith("10.0.0.1:") for args in meets)
    else:
        assert not meets
    llm.close()
    assert all(actor.is_dead for actor in ray.actors) and not ray.groups


def test_adapters_are_on_every_replica(cluster: Any, meets: list[Any], tmp_path: Path) -> None:
    ray, kind = cluster(EIGHT, EIGHT)
    llm = kind(None, replicas=2, hosts=2, adapters={"sql": tmp_path / "x" / ".."}, max_loras=1)
    assert len(ray.actors) == 4
    for actor in ray.actors:
        assert actor.made._llm.adapters == {"sql": str(tmp_path)}
        assert actor.made._llm.engine_config == {"max_loras": 1}
    llm.close()


def test_devices_that_do_not_divide(cluster: Any) -> None:
    ray, kind = cluster(EIGHT, EIGHT)
    with pytest.raises(ConfigError, match="12 devices does not divide over hosts of 8 GPUs"):
        kind(None, tensor_parallel_size=12)
    assert not ray.actors
    with pytest.raises(ConfigError, match="hosts=0: must be at least 1"):
        kind(None, hosts=0)


def finish(llm: Any) -> collections.Counter[str]:
    ended: collections.Counter[str] = collections.Counter()
    while llm.has_unfinished():
        ended.update(out.request_id for out in llm.step())
    return ended


def test_all_actors_of_a_replica_do_the_same(cluster: Any, meets: list[Any]) -> None:
    """The same calls, with as many steps; the first one's answers are those that count."""
    ray, kind = cluster(EIGHT, EIGHT)
    llm = kind(None, tensor_parallel_size=16, max_num_seqs=4)
    for i in range(20):
        llm.add_request("a", request_id=f"r{i}")
    assert finish(llm) == collections.Counter(f"r{i}" for i in range(20))
    first, second = ([c for c in a.calls if c[0] == "exchange"] for a in ray.actors)
    assert first == second and len(first) > 1
    steps = [args[2] for _, args in first]
    assert steps[0] == 1 and steps[-1] == 10, "0.1 s of steps of 10 ms"
    assert meets and llm.stats()["replicas"] == 1
    llm.close()


def test_new_weights_on_every_replica(cluster: Any, tmp_path: Path) -> None:
    """Under what runs, on all actors, and on a replica that is started in the place of one that
    died, which counts their versions as the others do.
    """
    ray, kind = cluster(EIGHT)
    llm = kind("old", replicas=2)
    names = [llm.add_request("a") for _ in range(4)]
    with pytest.raises(RequestError, match="4 requests are unfinished"):
        llm.update_params(tmp_path)
    with pytest.raises(RequestError, match="mode='kept'"):
        llm.update_params(tmp_path, mode="kept")
    with pytest.raises(CheckpointError, match="no such folder"):
        llm.update_params(tmp_path / "missing", mode="keep")
    llm.update_params(tmp_path, mode="keep")
    assert [a.made._llm.weights for a in ray.actors] == [str(tmp_path)] * 2
    assert [a.made._llm.modes for a in ray.actors] == [["keep"]] * 2
    ray.actors[0].is_dead = True
    llm.update_params(tmp_path / "newest", mode="recompute")
    ended = collections.Counter(finish(llm))
    assert ended == collections.Counter(names) and len(ray.actors) == 3
    assert [a.made._llm.weights for a in ray.actors[1:]] == [str(tmp_path / "newest")] * 2
    assert [a.made._llm.version for a in ray.actors[1:]] == [3, 1]
    for _ in range(4):
        llm.add_request("a")
    outs = list[RequestOutput]()
    while llm.has_unfinished():
        outs += llm.step()
    assert [out.weight_version for out in outs] == [3] * 4
    assert [out.outputs[0].weight_versions for out in outs] == [[WeightSpan(3, 0, 1)]] * 4
    llm.close()


def test_new_weights_from_rays_store(cluster: Any) -> None:
    """A tree is put there once, and read by every replica, a later one too; objects may stand in
    the place of its leaves. One that is lost changes nothing.
    """
    ray, kind = cluster(EIGHT)
    llm = kind("old", replicas=2)
    tree = {"a": jax.numpy.arange(4.0), "b": np.ones(2, np.float32)}
    llm.update_params(tree)
    first, second = (actor.made._llm.weights for actor in ray.actors)
    assert first["a"].tolist() == [0, 1, 2, 3] and first["a"] is second["a"]
    assert not isinstance(first["a"], jax.Array), "in host memory, for other processes"
    stats = llm.stats()
    assert stats["weight_bytes_read"] == 2 * 24 and stats["weight_read_s"] >= 0
    lost = ObjectRef(None, RayError("its owner died"))
    for weights in (lost, ray.put({"a": lost})):
        with pytest.raises(CheckpointError, match="its owner died"):
            llm.update_params(weights)
    ref = ray.put({"a": ray.put(np.full(3, 7.0)), "b": np.zeros(2)})
    llm.update_params(ref, mode="keep")
    assert [actor.made._llm.weights["a"].tolist() for actor in ray.actors] == [[7.0] * 3] * 2
    ray.actors[0].is_dead = True
    for _ in range(4):
        llm.add_request("a")
    outs = list[RequestOutput]()
    while llm.has_unfinished():
        outs += llm.step()
    assert ray.actors[2].made._llm.weights["a"].tolist() == [7.0] * 3
    assert [out.weight_version for out in outs] == [3] * 4, "as replicas that had both updates"
    llm.update_params("/newest", mode="keep")
    ray.actors[2].is_dead = True
    llm.add_request("a")
    llm.add_request("a")
    finish(llm)
    assert ray.actors[3].made._llm.weights == "/newest", "a folder in its place"
    llm.close()


def test_nobody_steps_in_a_pause(cluster: Any) -> None:
    ray, kind = cluster(EIGHT)
    llm = kind("folder", replicas=2)
    names = [llm.add_request("a") for _ in range(4)]
    llm.step()
    llm.pause()
    calls = [len(actor.calls) for actor in ray.actors]
    with pytest.raises(RequestError, match="paused"):
        llm.step()
    names.append(llm.add_request("a"))
    assert [len(actor.calls) for actor in ray.actors] == calls
    llm.resume()
    assert set(finish(llm)) <= set(names) and not llm.has_unfinished()
    llm.close()


def test_own_ids_are_no_callers(cluster: Any, meets: list[Any]) -> None:
    """A caller that counts as the cluster does keeps its names, and is not in its way."""
    _, kind = cluster(EIGHT, EIGHT)
    llm = kind(None, tensor_parallel_size=16, max_num_seqs=4)
    names = [llm.add_request("a", request_id=str(i)) for i in range(4)]
    names += [llm.add_request("a") for _ in range(4)]
    assert len(set(names)) == 8
    assert finish(llm) == collections.Counter(names)
    llm.close()


@pytest.mark.parametrize("dying", [0, 1])
def test_an_actor_that_dies_takes_its_replica_along(
    dying: int, cluster: Any, meets: list[Any]
) -> None:
    ray, kind = cluster(EIGHT, EIGHT)
    llm = kind(None, tensor_parallel_size=16)
    llm.add_request("a", request_id="r")
    ray.actors[dying].is_dead = True
    assert finish(llm) == {"r": 1}
    assert all(actor.is_dead for actor in ray.actors[:2]) and len(ray.actors) == 4
    assert len(ray.groups) == 1, "the first one's was given back"
    stats = llm.stats()
    assert stats["replicas_lost"] == 1 and stats["requests_retried"] == 1 and len(meets) == 4
    llm.close()


def test_a_peer_that_is_gone_is_no_fault_of_the_settings(
    cluster: Any, meets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a replica starts, a ConfigError ends the run, and a PeerError starts it again."""
    ray, kind = cluster(EIGHT, EIGHT)
    errors: list[Exception] = [PeerError("gone")]

    def start(*args: Any, **how: Any) -> Any:
        if errors:
            raise errors.pop()
        return EchoLLM(*args, **how)

    monkeypatch.setattr(sys.modules[MODULES[0]], "LLM", start)
    llm = kind(None, tensor_parallel_size=16)
    assert llm.stats()["replicas_lost"] == 1 and len(ray.actors) == 4
    llm.close()
    errors.append(ConfigError("no such model"))
    with pytest.raises(ConfigError, match="no such model"):
        kind(None, tensor_parallel_size=16)
    assert all(actor.is_dead for actor in ray.actors) and meets


def test_priorities_reach_the_replicas_in_their_order(cluster: Any) -> None:
    """A value that is no integer waits as 0 does: the replica that gets it says what is wrong."""
    ray, RayLLM = cluster({"CPU": 4.0})
    llm = RayLLM("folder", replicas=1, max_num_seqs=1)
    bad: Any = "high"
    asked = [("a", 5), ("b", 0), ("c", -3), ("d", 0), ("e", bad)]
    for name, priority in asked:
        llm.add_request([1], SamplingParams(priority=priority), request_id=name)
    while llm.has_unfinished():
        llm.step()
    sent = [
        (name, params.priority)
        for call, args in ray.actors[0].calls
        if call == "exchange"
        for name, _, params in args[0]
    ]
    llm.close()
    assert sent == [("c", -3), ("b", 0), ("d", 0), ("e", bad), ("a", 5)]
