"""RayLLM: engines on a Ray cluster behind LLM's own add_request and step, so that one loop serves a
file with either.

Each replica is an actor with an LLM, or one on each of several hosts that share it. The driver
knows which requests a replica has; when it dies they go to others. Needs Ray: pip install
'jpaged[ray]'.
"""

import collections
import dataclasses
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from jpaged.config import EngineConfig
from jpaged.engine_fields import EngineFields
from jpaged.errors import ConfigError, JpagedError, PeerError, ReplicaError, RequestError
from jpaged.integrations.ray_replica import (
    Job,
    Launch,
    Slot,
    launch_of,
    ray,
)
from jpaged.integrations.seeds import stable_seed
from jpaged.request.outputs import RequestOutput, failed
from jpaged.sampling_params import SamplingParams

# What stats() of a replica says that is no total: of now, or a ratio.
OF_NOW = ("blocks_in_use", "num_blocks", "host_blocks_in_use", "host_blocks")
NOT_TOTALS = (*OF_NOW, "block_bytes", "weight_version", "padding_waste", "prefix_hit_rate")
NOT_TOTALS += ("data_parallel_size",)


class Queue:
    """Requests that wait for a replica, those that were lost with one before the others.

    capacity: that a replica is given at most. max_retries: how often a request is run again.
    """

    def __init__(self, capacity: int, max_retries: int):
        self.capacity, self.max_retries = capacity, max_retries
        self.again, self.new = collections.deque[Job](), collections.deque[Job]()

    def remove(self, job: Job | None) -> None:
        for queue in (self.again, self.new):
            if job in queue:
                queue.remove(job)

    def hand_out(self, up: list[Slot]) -> None:
        """Give requests to the replicas that have the fewest."""
        losses = {slot: max((job.losses for job in slot.jobs.values()), default=0) for slot in up}
        for queue in (self.again, self.new):
            while queue:
                job = queue[0]
                free = [s for s in up if len(s.jobs) < self._group(max(losses[s], job.losses))]
                if not free:
                    break
                slot = min(free, key=lambda s: len(s.jobs))
                slot.jobs[job.request_id] = queue.popleft()
                slot.unsent.append(job)
                losses[slot] = max(losses[slot], job.losses)

    def _group(self, losses: int) -> int:
        """Return how many requests may share a replica with one that was lost so often: all at
        first, one at the last try.
        """
        return max(1, round(self.capacity ** (1 - losses / max(self.max_retries, 1))))


class RayLLM:
    """Replicas of one model on a Ray cluster, as far as they can be one LLM: add_request, step,
    abort, stats.

    model: a folder that every node can read, None is the embedded model. address: "local" starts
    Ray on this machine; else a cluster's, as for ray.init. replicas: how many engines, each on
    data_parallel_size * tensor_parallel_size devices. hosts: of each, with an actor on every one;
    None is as many as its devices take. resources: what Ray sets aside for each actor, such as
    {"GPU": 1} or {"TPU": 4}; None is as many GPUs as it has devices or a host's TPU chips where the
    cluster has them, else a CPU. max_retries: how often a request is run again when its replica
    dies, and a replica started again that answers nothing. adapters: the folder of each that
    prompts may name. The rest are EngineConfig's fields.

    A request that kills engines is found without its neighbours: after each loss requests run in
    smaller groups, at the last try alone. Raises ConfigError or CheckpointError for what would fail
    on every replica, ReplicaError when none can be kept up.
    """

    is_remote = True  # prompts are rendered and tokenized best where they run

    def __init__(
        self,
        model: str | Path | None,
        *,
        address: str = "local",
        replicas: int = 1,
        seed: int = 0,
        hosts: int | None = None,
        resources: Mapping[str, float] | None = None,
        max_retries: int = 3,
        start_timeout_s: float = 900.0,
        adapters: Mapping[str, str | Path] | None = None,
        **engine_config: Unpack[EngineFields],
    ):
        check_counts(replicas=(replicas, 1), max_retries=(max_retries, 0), hosts=(hosts, 1))
        self._seed = seed
        # More than run at once, so that a row that frees is filled at once; what waits here is for
        # whoever is free.
        self._queue = Queue(2 * rows_of(engine_config), max_retries)
        self._ready: list[RequestOutput] = []
        self._unfinished: dict[str, Job] = {}
        self._ids = itertools.count()
        self._past = collections.Counter[str]()  # totals of the replicas that are gone
        self._losses = self._retried = 0
        self._defaults: SamplingParams | None = None
        self._owns_ray = connect(address, replicas * (hosts or 1))
        self._slots = [Slot(number) for number in range(replicas)]
        try:
            self._launch = launch_of(model, seed, {**engine_config}, resources, hosts, adapters)
            for slot in self._slots:
                slot.start(self._launch)
            self._wait_for_first(start_timeout_s)
        except BaseException:
            self.close()
            raise

    # What LLM has

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt and return its id. A request that can never run is an output with its
        error.

        prompt: what LLM takes; or a function that makes it of the replica's LLM, which leaves that
        work to the replica.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if request_id is None:
            fresh_ids = map(str, self._ids)
            request_id = next(name for name in fresh_ids if name not in self._unfinished)
        if request_id in self._unfinished:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if params.seed is None:  # the same whichever replica runs it, and how often
            seed = stable_seed(self._seed, f"request {request_id}")
            params = dataclasses.replace(params, seed=seed)
        self._unfinished[request_id] = job = Job(request_id, prompt, params)
        self._queue.new.append(job)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Hand out what waits, wait a moment for news of the replicas; the requests that finished.
        [] when idle.
        """
        up = [slot for slot in self._slots if slot.is_up]
        self._queue.hand_out(up)
        for slot in up:
            slot.send()
        owners = {ref: slot for slot in self._slots for ref in slot.waits_for}
        if owners and self._unfinished and not self._ready:
            done, _ = ray.wait([*owners], num_returns=1, timeout=1.0)
            done, _ = (
                ray.wait([*owners], num_returns=len(owners), timeout=0) if done else (done, [])
            )
            for ref in done:
                self._receive(owners[ref], ref)
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_id: str) -> None:
        """End a request now; what it had generated stays behind. One that is unknown is left
        alone.
        """
        job = self._unfinished.pop(request_id, None)
        self._queue.remove(job)
        for slot in self._slots:
            if slot.jobs.pop(request_id, None) is not None:
                if job in slot.unsent:
                    slot.unsent.remove(job)
                else:
                    slot.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._unfinished or self._ready)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        assert self._defaults is not None
        return self._defaults

    def stats(self) -> dict[str, Any]:
        """LLM's figures, totals and blocks added up over the replicas, those that are gone too; and
        how many are up.
        """
        lost = {"replicas_lost": self._losses, "requests_retried": self._retried}
        return summed(self._past, self._slots) | lost

    def close(self) -> None:
        """End every request and every replica, and Ray itself where this object started it."""
        for slot in self._slots:
            slot.stop()
        self._slots, self._unfinished = [], {}
        if self._owns_ray:
            ray.shutdown()

    # Replicas

    def _wait_for_first(self, timeout_s: float) -> None:
        """Wait until one replica is up, the others may follow."""
        until = time.perf_counter() + timeout_s
        while self._defaults is None:
            starting = {ref: slot for slot in self._slots for ref in slot.waits_for}
            left = max(until - time.perf_counter(), 0)
            done, _ = ray.wait([*starting], num_returns=1, timeout=left)
            if not done:
                raise ConfigError(none_up(timeout_s, self._launch))
            self._receive(starting[done[0]], done[0])

    def _receive(self, slot: Slot, ref: Any) -> None:
        """Take in the result of a call, or that its replica is gone."""
        if ref not in slot.waits_for:
            return  # of an actor that another of its calls showed to be dead
        try:
            result = ray.get(ref)
        except ray.exceptions.RayError as e:
            cause = e.cause if isinstance(e, ray.exceptions.RayTaskError) else e
            is_own = isinstance(cause, JpagedError) and not isinstance(cause, PeerError)
            if slot.starting is not None and is_own:
                raise cause from None  # the model or the settings: every replica would say the same
            return self._lost(slot, cause)
        if ref in slot.others:
            slot.others.remove(ref)
            return
        if slot.starting is not None:
            slot.starting, self._defaults = None, result
            return
        slot.calls.remove(ref)
        outputs, slot.stats = result
        for output in outputs:
            if slot.jobs.pop(output.request_id, None) is not None:  # else it was aborted meanwhile
                del self._unfinished[output.request_id]
                self._ready.append(output)
                slot.starts = 0

    def _lost(self, slot: Slot, cause: BaseException) -> None:
        """A replica died, or its engine raised: another takes its place, its requests are run
        again.
        """
        self._losses += 1
        self._past.update(totals(slot.stats))
        jobs, unsent = list(slot.jobs.values()), set(slot.unsent)
        slot.stop()
        for job in jobs:
            job.losses += job not in unsent
            if job.losses <= self._queue.max_retries:
                self._retried += job not in unsent
                self._queue.again.append(job)
                continue
            del self._unfinished[job.request_id]
            slot.starts = 0
            self._ready.append(given_up(job, cause))
        if slot.starts <= self._queue.max_retries:
            slot.start(self._launch)
        elif all(other.actor is None for other in self._slots):
            starts = f"{slot.starts} starts in a row came to nothing"
            raise ReplicaError(
                f"no replica can be kept up: {starts}; the last: {_one_line(cause)}"
            ) from cause


def check_counts(**counts: tuple[int | None, int]) -> None:
    """ConfigError for a count that is below its least."""
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least}")


def rows_of(engine_config: Mapping[str, Any]) -> int:
    """Return how many sequences an engine with these settings runs at once."""
    rows = engine_config.get("max_num_seqs", EngineConfig.max_num_seqs)
    return rows * (engine_config.get("data_parallel_size") or 1)


def connect(address: str, actors: int) -> bool:
    """Connect this process to Ray, unless it is; whether that was done here."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address == "local":
        settings |= {"include_dashboard": False, "num_cpus": max(actors, 2)}
    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**settings)
    except Exception as e:
        raise ConfigError(f"cannot reach Ray at {address!r}: {e}") from e
    if threading.current_thread() is threading.main_thread():
        # Ray puts its own there, which ends the program at once.
        signal.signal(signal.SIGTERM, before)
    return True


def none_up(seconds: float, launch: Launch) -> str:
    """Return what to say when no replica came up: what each asks for, and what Ray has."""
    asked = ", ".join(f"{name}={count:g}" for name, count in launch.resources.items())
    asked += f" on each of {launch.hosts} hosts" if launch.hosts > 1 else ""
    resources = sorted(ray.cluster_resources().items())
    there = ", ".join(f"{k}={v:g}" for k, v in resources if ":" not in k)
    return f"no replica was up after {seconds:g} s: each asks for {asked}; Ray has {there}"


def summed(past: Mapping[str, Any], slots: list[Slot]) -> dict[str, Any]:
    """LLM.stats() of replicas and of what is past, as if of one; and how many are up."""
    total: dict[str, Any] = dict(past)
    for stats in (slot.stats for slot in slots):
        for name in totals(stats) | {name: stats[name] for name in OF_NOW if name in stats}:
            total[name] = total.get(name, 0) + stats[name]
    # They compile side by side.
    compiled = (slot.stats.get("compile_time_s", 0.0) for slot in slots)
    total["compile_time_s"] = max(compiled, default=0.0)
    computed = total.get("prefill_tokens", 0) + total.get("decode_tokens", 0)
    padded, prompt = total.get("padded_tokens"), total.get("prompt_tokens")
    total["padding_waste"] = 1 - computed / padded if padded else 0.0
    total["prefix_hit_rate"] = total.get("cached_tokens", 0) / prompt if prompt else 0.0
    total["replicas"] = sum(slot.is_up for slot in slots)
    return total


def totals(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of LLM.stats() that only grow."""
    return {k: v for k, v in stats.items() if type(v) in (int, float) and k not in NOT_TOTALS}


def given_up(job: Job, cause: BaseException) -> RequestOutput:
    """The output of a request that is not tried again."""
    said = f"its replica was lost each of the {job.losses} times that it ran; the last time: "
    return failed(job.request_id, ReplicaError(said + _one_line(cause)), job.prompt)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text if len(text) <= 300 else f'{text[:200]} ... {text[-95:]}'}"
    )
