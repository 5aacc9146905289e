"""RayLLM: engines on a Ray cluster behind LLM's own add_request and step, so that one loop serves a
file with either.

Each replica is an actor with an LLM. The driver knows which requests a replica has; when it dies
they go to others. Needs Ray: pip install 'jpaged[ray]'.
"""

import collections
import dataclasses
import importlib
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, JpagedError, ReplicaError, RequestError
from jpaged.integrations.seeds import stable_seed
from jpaged.llm import LLM
from jpaged.request.collect import completion
from jpaged.request.outputs import RequestOutput
from jpaged.request.sampling_params import SamplingParams

try:
    # To type checkers `import ray` is the module beside this one.
    ray: Any = importlib.import_module("ray")
except ImportError as e:
    raise ImportError("jpaged.integrations.ray_llm needs Ray: pip install 'jpaged[ray]'") from e

EXCHANGE_S = 0.1  # how long a replica steps before it reports
EXCHANGES = 2  # under way at once, so that a replica never waits for the driver
# What stats() of a replica says that is no total: of now, or a ratio.
OF_NOW = ("blocks_in_use", "num_blocks", "host_blocks_in_use", "host_blocks")
NOT_TOTALS = (*OF_NOW, "block_bytes", "weight_version", "padding_waste", "prefix_hit_rate")


class Replica:
    """What runs in an actor: one LLM, stepped while the driver asks."""

    def start(self, model: str | None, seed: int, engine_config: dict[str, Any]) -> SamplingParams:
        """Load the model (None: the embedded one); its default sampling params."""
        if model is None:
            from jpaged.demo import MODEL_PATH

            model = str(MODEL_PATH)
        self._llm = LLM(model, seed=seed, **engine_config)
        return self._llm.default_sampling_params()

    def exchange(
        self, requests: list[tuple[str, Any, SamplingParams]], aborted: list[str]
    ) -> tuple[list[RequestOutput], dict[str, Any]]:
        """Take these requests, drop those, step for a moment: the requests that finished, and the
        engine's stats.
        """
        ended = []
        for request_id in aborted:
            self._llm.abort(request_id)
        for request_id, prompt, params in requests:
            try:
                made = prompt(self._llm) if callable(prompt) else prompt
                self._llm.add_request(made, params, request_id=request_id)
            except Exception as e:  # whatever one request provokes is that request's error
                ended.append(failed(request_id, prompt, e))
        until = time.perf_counter() + EXCHANGE_S
        while self._llm.has_unfinished() and time.perf_counter() < until:
            ended += self._llm.step()
        return ended, self._llm.stats()


@dataclasses.dataclass(eq=False)
class Job:
    """A request and how many replicas were lost with it."""

    request_id: str
    prompt: Any
    params: SamplingParams
    losses: int = 0


@dataclasses.dataclass(eq=False)
class Slot:
    """A replica as the driver sees it; the actor in it is replaced when it dies."""

    number: int
    actor: Any = None
    starting: Any = None  # the call that loads the model, until it has
    calls: list[Any] = dataclasses.field(default_factory=list)  # exchanges under way, oldest first
    # Handed to this replica and not answered.
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    # Those of them that go with the next exchange.
    unsent: list[Job] = dataclasses.field(default_factory=list)
    aborted: list[str] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    starts: int = 0  # since a request last came to its end here

    @property
    def is_up(self) -> bool:
        return self.actor is not None and self.starting is None

    @property
    def waits_for(self) -> list[Any]:
        """The calls whose results are awaited."""
        return self.calls if self.starting is None else [self.starting]


class RayLLM:
    """Replicas of one model on a Ray cluster, as far as they can be one LLM: add_request, step,
    abort, stats.

    model: a folder that every node can read, None is the embedded model. address: "local" starts
    Ray on this machine; else a cluster's, as for ray.init. replicas: how many engines. resources:
    what Ray sets aside for each, such as {"GPU": 1} or {"TPU": 4}; None is a GPU or a host's TPU
    chips where the cluster has them, else a CPU. max_retries: how often a request is run again when
    its replica dies, and a replica started again that answers nothing. The rest are EngineConfig's
    fields.

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
        resources: Mapping[str, float] | None = None,
        max_retries: int = 3,
        start_timeout_s: float = 900.0,
        **engine_config: Any,
    ):
        for name, value, least in (("replicas", replicas, 1), ("max_retries", max_retries, 0)):
            if value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        self._model = None if model is None else str(Path(model).resolve())
        self._seed, self._engine_config, self._max_retries = seed, engine_config, max_retries
        # More than run at once, so that a row that frees is filled at once; what waits here is for
        # whoever is free.
        self._capacity = 2 * engine_config.get("max_num_seqs", EngineConfig.max_num_seqs)
        self._waiting, self._again = collections.deque[Job](), collections.deque[Job]()
        self._ready: list[RequestOutput] = []
        self._unfinished: dict[str, Job] = {}
        self._ids = itertools.count()
        self._past = collections.Counter[str]()  # totals of the replicas that are gone
        self._losses = self._retried = 0
        self._defaults: SamplingParams | None = None
        self._owns_ray = connect(address, replicas)
        self._resources = dict(resources or default_resources())
        self._slots = [Slot(number) for number in range(replicas)]
        try:
            for slot in self._slots:
                self._start(slot)
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
        request_id = str(next(self._ids)) if request_id is None else request_id
        if request_id in self._unfinished:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if params.seed is None:  # the same whichever replica runs it, and how often
            params = dataclasses.replace(
                params, seed=stable_seed(self._seed, f"request {request_id}")
            )
        self._unfinished[request_id] = job = Job(request_id, prompt, params)
        self._waiting.append(job)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Hand out what waits, wait a moment for news of the replicas; the requests that finished.
        [] when idle.
        """
        self._hand_out()
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
        for queue in (self._waiting, self._again):
            if job in queue:
                queue.remove(job)
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
        total: dict[str, Any] = dict(self._past)
        for stats in (slot.stats for slot in self._slots):
            for name in totals(stats) | {name: stats[name] for name in OF_NOW if name in stats}:
                total[name] = total.get(name, 0) + stats[name]
        # They compile side by side.
        total["compile_time_s"] = max(
            (slot.stats.get("compile_time_s", 0.0) for slot in self._slots), default=0.0
        )
        computed, padded = (
            (total.get("prefill_tokens", 0) + total.get("decode_tokens", 0)),
            total.get("padded_tokens"),
        )
        prompt, cached = total.get("prompt_tokens"), total.get("cached_tokens", 0)
        total["padding_waste"] = 1 - computed / padded if padded else 0.0
        total["prefix_hit_rate"] = cached / prompt if prompt else 0.0
        total["replicas"] = sum(slot.is_up for slot in self._slots)
        return total | {"replicas_lost": self._losses, "requests_retried": self._retried}

    def close(self) -> None:
        """End every request and every replica, and Ray itself where this object started it."""
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        self._slots, self._unfinished = [], {}
        if self._owns_ray:
            ray.shutdown()

    # Replicas

    def _start(self, slot: Slot) -> None:
        """Put a new actor into a slot."""
        others = {k: v for k, v in self._resources.items() if k not in ("CPU", "GPU")}
        actor = ray.remote(Replica).options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            resources=others,
            max_restarts=0,  # a new actor is started here, which knows what the old one had
        )
        slot.actor, slot.starts = actor.remote(), slot.starts + 1
        slot.starting = slot.actor.start.remote(self._model, self._seed, self._engine_config)

    def _wait_for_first(self, timeout_s: float) -> None:
        """Wait until one replica is up, the others may follow."""
        until = time.perf_counter() + timeout_s
        while self._defaults is None:
            starting = {slot.starting: slot for slot in self._slots if slot.starting is not None}
            done, _ = ray.wait(
                [*starting], num_returns=1, timeout=max(until - time.perf_counter(), 0)
            )
            if not done:
                asked = ", ".join(f"{name}={count:g}" for name, count in self._resources.items())
                there = ", ".join(
                    f"{k}={v:g}" for k, v in sorted(ray.cluster_resources().items()) if ":" not in k
                )
                raise ConfigError(
                    f"no replica was up after {timeout_s:g} s: each asks for {asked}; Ray "
                    f"has {there}"
                )
            self._receive(starting[done[0]], done[0])

    def _receive(self, slot: Slot, ref: Any) -> None:
        """Take in the result of a call, or that its replica is gone."""
        if ref not in slot.waits_for:
            return  # of an actor that another of its calls showed to be dead
        try:
            result = ray.get(ref)
        except ray.exceptions.RayError as e:
            cause = e.cause if isinstance(e, ray.exceptions.RayTaskError) else e
            if slot.starting is not None and isinstance(cause, JpagedError):
                raise cause from None  # the model or the settings: every replica would say the same
            self._lost(slot, cause)
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
        ray.kill(slot.actor)
        for job in slot.jobs.values():
            job.losses += job not in slot.unsent
            if job.losses <= self._max_retries:
                self._retried += job not in slot.unsent
                self._again.append(job)
                continue
            said = (
                f"its replica was lost each of the {job.losses} times that it ran; the "
                f"last time: {_one_line(cause)}"
            )
            del self._unfinished[job.request_id]
            slot.starts = 0
            self._ready.append(failed(job.request_id, job.prompt, ReplicaError(said)))
        slot.actor, slot.starting, slot.calls, slot.jobs, slot.unsent, slot.aborted = (
            None,
            None,
            [],
            {},
            [],
            [],
        )
        slot.stats = {}
        if slot.starts <= self._max_retries:
            self._start(slot)
        elif all(other.actor is None for other in self._slots):
            starts = f"{slot.starts} starts in a row came to nothing"
            raise ReplicaError(
                f"no replica can be kept up: {starts}; the last: {_one_line(cause)}"
            ) from cause

    # Requests

    def _hand_out(self) -> None:
        """Give requests to the replicas that have the fewest, and every replica that has any
        another exchange.
        """
        up = [slot for slot in self._slots if slot.is_up]
        losses = {slot: max((job.losses for job in slot.jobs.values()), default=0) for slot in up}
        for queue in (self._again, self._waiting):
            while queue:
                job = queue[0]
                free = [s for s in up if len(s.jobs) < self._group(max(losses[s], job.losses))]
                if not free:
                    break
                slot = min(free, key=lambda s: len(s.jobs))
                slot.jobs[job.request_id] = queue.popleft()
                slot.unsent.append(job)
                losses[slot] = max(losses[slot], job.losses)
        for slot in up:
            while len(slot.calls) < EXCHANGES and (slot.jobs or slot.aborted):
                requests = [(job.request_id, job.prompt, job.params) for job in slot.unsent]
                slot.calls.append(slot.actor.exchange.remote(requests, slot.aborted))
                slot.unsent, slot.aborted = [], []

    def _group(self, losses: int) -> int:
        """How many requests may share a replica with one that was lost so often: all at first, one
        at the last try.
        """
        return max(1, round(self._capacity ** (1 - losses / max(self._max_retries, 1))))


def connect(address: str, replicas: int) -> bool:
    """Connect this process to Ray, unless it is; whether that was done here."""
    if ray.is_initialized():
        return False
    how: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    if address == "local":
        how |= {"include_dashboard": False, "num_cpus": max(replicas, 2)}
    before = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**how)
    except Exception as e:
        raise ConfigError(f"cannot reach Ray at {address!r}: {e}") from e
    if threading.current_thread() is threading.main_thread():
        # Ray puts its own there, which ends the program at once.
        signal.signal(signal.SIGTERM, before)
    return True


def default_resources() -> dict[str, float]:
    """What a replica takes of this cluster: a GPU, else all TPU chips of one host, else a CPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("GPU") for node in nodes):
        return {"GPU": 1}
    chips = max((node.get("TPU", 0) for node in nodes), default=0)
    return {"TPU": chips} if chips else {"CPU": 1}


def totals(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of LLM.stats() that only grow."""
    return {k: v for k, v in stats.items() if type(v) in (int, float) and k not in NOT_TOTALS}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text if len(text) <= 300 else f'{text[:200]} ... {text[-95:]}'}"
    )


def failed(request_id: str, prompt: Any, error: Exception) -> RequestOutput:
    """The output of a request that never ran to its end."""
    text = prompt if isinstance(prompt, str) else None
    ended = [completion(0, [], [], "error", text=None)]
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=[], outputs=ended, error=error
    )
