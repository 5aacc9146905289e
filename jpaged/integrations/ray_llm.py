"""RayLLM: engines on a Ray cluster with LLM's interface of add_request and step, so that the same
loop runs a batch file on either.

A replica is an actor with an LLM, or one actor on each of several hosts that share an LLM. The
driver knows the requests of every replica; when a replica dies, its requests go to others. It needs
Ray: pip install 'jpaged[ray]'.
"""

import bisect
import collections
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from jpaged.checks import check_choice, is_scalar
from jpaged.config import ROWS, EngineFields
from jpaged.engine.cache.prefix_cache import digest
from jpaged.errors import ConfigError, JpagedError, PeerError, ReplicaError, RequestError
from jpaged.fleet.cluster import connect, ray
from jpaged.fleet.router import Ask, Router, RouterSettings
from jpaged.fleet.totals import summed, totals
from jpaged.integrations.ray_replica import Launch, RayRequest, Slot, launch_of
from jpaged.integrations.seeds import stable_seed
from jpaged.request.inputs import Chat
from jpaged.request.outputs import RequestOutput, failed
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnUpdate
from jpaged.types import PyTree

PIECE = 64  # tokens of a leading part of a prompt that a router knows by its hash
CHARACTERS = 256  # the same of a text


class Queue:
    """Requests that wait for a replica. Those that were lost with one come first, then those of the
    lowest `priority`, in order of arrival.

    capacity: requests that a replica gets at most. max_retries: how often a request is run again.
    router: chooses a replica for each.
    """

    def __init__(self, capacity: int, max_retries: int, router: Router):
        self.capacity, self.max_retries, self.router = capacity, max_retries, router
        self.again, self.new = collections.deque[RayRequest](), collections.deque[RayRequest]()

    def add(self, request: RayRequest) -> None:
        """Let a new request wait behind those of its priority and of lower values."""
        bisect.insort(self.new, request, key=_priority)

    def remove(self, request: RayRequest | None) -> None:
        for queue in (self.again, self.new):
            if request in queue:
                queue.remove(request)

    def hand_out(self, up: list[Slot]) -> None:
        """Give requests to the replicas that the router chooses among those that may have more."""
        self.router.keep([slot.name for slot in up])
        losses = {slot: max((r.losses for r in slot.requests.values()), default=0) for slot in up}
        for queue in (self.again, self.new):
            while queue:
                request = queue[0]
                free = [
                    s for s in up if len(s.requests) < self._group(max(losses[s], request.losses))
                ]
                if not free:
                    break
                named = {slot.name: slot for slot in free}
                slot = named[self.router.choose(request.ask, named)]
                slot.requests[request.request_id] = queue.popleft()
                slot.unsent.append(request)
                losses[slot] = max(losses[slot], request.losses)

    def _group(self, losses: int) -> int:
        """Return how many requests may share a replica with one that was lost this often:
        `capacity` at first, one at the last try.
        """
        return max(1, round(self.capacity ** (1 - losses / max(self.max_retries, 1))))


class RayLLM:
    """Replicas of one model on a Ray cluster, with LLM's add_request, step, abort and stats.

    model: a folder that every node can read; None is the embedded model. address: "local" starts
    Ray on this machine; otherwise a cluster's address as in ray.init. replicas: the number of
    engines, each on data_parallel_size * tensor_parallel_size devices. hosts: hosts of a replica,
    with an actor on each; None takes as many as its devices need. resources: what Ray reserves for
    each actor, such as {"GPU": 1} or {"TPU": 4}; None reserves as many GPUs as it has devices, or a
    host's TPU chips, if the cluster has them, else a CPU. max_retries: how often a request is run
    again when its replica dies, and how often a replica is restarted without answering anything.
    adapters: the folder of each adapter that prompts may name. router: how a request's replica is
    chosen. All other arguments are EngineConfig's fields.

    Requests of a lower `priority` (of SamplingParams) go to a replica first, and run first there. A
    request that kills engines is found without harming others: after each loss
    requests run in smaller groups, and alone at the last try. Raises ConfigError or CheckpointError
    for faults that every replica would have, and ReplicaError when no replica can be kept running.
    """

    is_remote = True  # prompts are best rendered and tokenized where they run

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
        router: RouterSettings | None = None,
        **engine_config: Unpack[EngineFields],
    ):
        check_counts(replicas=(replicas, 1), max_retries=(max_retries, 0), hosts=(hosts, 1))
        self._seed = seed
        # More than run at once, so that a free row is filled at once. The others wait here for any
        # replica.
        self._router = Router(router, seed=seed)
        self._queue = Queue(2 * rows_of(engine_config), max_retries, self._router)
        self._ready: list[RequestOutput] = []
        self._unfinished: dict[str, RayRequest] = {}
        self._ids = itertools.count()
        self._past = collections.Counter[str]()  # totals of replicas that have died
        self._losses = self._retried = 0
        self._is_paused = False
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

    # LLM's interface

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt and return its id. A request that can never run becomes an output with
        its error.

        prompt: any form that LLM takes, or a function that makes it from the replica's LLM, so that
        the replica does that work.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if request_id is None:
            fresh_ids = map(str, self._ids)
            request_id = next(name for name in fresh_ids if name not in self._unfinished)
        if request_id in self._unfinished:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if params.seed is None:  # the tokens must be the same on any replica and in any retry
            seed = stable_seed(self._seed, f"request {request_id}")
            params = dataclasses.replace(params, seed=seed)
        request = RayRequest(request_id, prompt, params, ask_of(request_id, prompt))
        self._unfinished[request_id] = request
        self._queue.add(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Hand out waiting requests, wait a moment for results, and return the outputs that
        finished; [] when idle. RequestError while it is paused.
        """
        if self._is_paused:
            raise RequestError("the RayLLM is paused: its requests can end after resume()")
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
        """End a request now. Its tokens so far are lost. An unknown id is ignored."""
        request = self._unfinished.pop(request_id, None)
        self._queue.remove(request)
        self._router.ended(request_id)
        for slot in self._slots:
            if slot.requests.pop(request_id, None) is not None:
                if request in slot.unsent:
                    slot.unsent.remove(request)
                else:
                    slot.aborted.append(request_id)

    def update_params(self, weights: str | Path | PyTree, *, mode: OnUpdate = "refuse") -> None:
        """Have every replica serve these weights from its next step on, and those that start later
        too: see LLM.update_params. Returns once all have them.

        weights: a folder that all nodes can read, of which each process reads what its devices
        serve; or a tree in any form that LLM.update_params takes, or a Ray object of one, whose
        leaves may be Ray objects of an array each. A tree is put into Ray's store once; replicas
        read it where it lies. stats() has "weight_bytes_read" and "weight_read_s". mode: as there;
        "refuse" raises RequestError if any request is unfinished. Requests that no replica has yet
        run by the new weights. Versions of weights count the updates, from 1 on for those that it
        began with. Raises what reading the weights raises; all replicas go on with the old ones
        then.
        """
        check_choice("mode", mode, OnUpdate)
        if mode == "refuse" and self._unfinished:
            count = len(self._unfinished)
            raise RequestError(f"{count} requests are unfinished: finish them, or pass a mode")
        before = self._launch
        if isinstance(weights, str | Path):
            passed: Any = str(Path(weights).resolve())
            of_launch: dict[str, Any] = {"model": passed, "weights": None}
        else:  # in a list, so that the replica reads it, and says what is wrong with it
            is_object = isinstance(weights, ray.ObjectRef)
            passed = [weights if is_object else ray.put(_on_host(weights))]
            of_launch = {"weights": passed}
        self._launch = dataclasses.replace(before, updates=before.updates + 1, **of_launch)
        # After a replica's exchanges in flight, since an actor takes its calls in turn.
        calls = [(s, [a.update_params.remote(passed, mode) for a in s.actors]) for s in self._slots]
        for slot, refs in calls:
            for number, ref in enumerate(refs):
                try:
                    stats = ray.get(ref)
                except ray.exceptions.RayError as e:
                    cause = e.cause if isinstance(e, ray.exceptions.RayTaskError) else e
                    if isinstance(cause, JpagedError) and not isinstance(cause, PeerError):
                        self._launch = before  # the weights are at fault, on every replica
                        raise cause from None
                    self._lost(slot, cause)
                    break
                if number == 0:
                    slot.stats = stats

    def pause(self) -> None:
        """Have no replica take a step until `resume`: returns once those in flight have ended.
        Requests can be added and aborted meanwhile, weights updated (but by mode="wait", which
        steps).
        """
        self._is_paused = True
        while calls := [(slot, ref) for slot in self._slots for ref in slot.calls]:
            for slot, ref in calls:
                self._receive(slot, ref)

    def resume(self) -> None:
        """Go on after `pause`; nothing where there was none."""
        self._is_paused = False

    def has_unfinished(self) -> bool:
        return bool(self._unfinished or self._ready)

    def default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values of the checkpoint's generation_config.json."""
        assert self._defaults is not None
        return self._defaults

    def stats(self) -> dict[str, Any]:
        """Return LLM's figures, with totals and blocks added up over all replicas, including those
        that died, and the number of running replicas.
        """
        lost = {"replicas_lost": self._losses, "requests_retried": self._retried}
        total = summed(self._past, [slot.stats for slot in self._slots])
        total["replicas"] = sum(slot.is_up for slot in self._slots)
        return total | self._router.stats() | lost

    def close(self) -> None:
        """End every request and every replica, and Ray itself if this object started it."""
        for slot in self._slots:
            slot.stop()
        self._slots, self._unfinished = [], {}
        if self._owns_ray:
            ray.shutdown()

    # Replicas

    def _wait_for_first(self, timeout_s: float) -> None:
        """Wait until one replica is running; the others may follow."""
        until = time.perf_counter() + timeout_s
        while self._defaults is None:
            starting = {ref: slot for slot in self._slots for ref in slot.waits_for}
            left = max(until - time.perf_counter(), 0)
            done, _ = ray.wait([*starting], num_returns=1, timeout=left)
            if not done:
                raise ConfigError(none_up(timeout_s, self._launch))
            self._receive(starting[done[0]], done[0])

    def _receive(self, slot: Slot, ref: Any) -> None:
        """Take the result of a call, or note that its replica is dead."""
        if ref not in slot.waits_for:
            return  # another call has already shown this actor to be dead
        try:
            result = ray.get(ref)
        except ray.exceptions.RayError as e:
            cause = e.cause if isinstance(e, ray.exceptions.RayTaskError) else e
            is_own = isinstance(cause, JpagedError) and not isinstance(cause, PeerError)
            if slot.starting is not None and is_own:
                raise cause from None  # the model or the settings are at fault, on every replica
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
            if (
                slot.requests.pop(output.request_id, None) is not None
            ):  # else it was aborted meanwhile
                del self._unfinished[output.request_id]
                self._router.ended(output.request_id)
                self._ready.append(output)
                slot.starts = 0

    def _lost(self, slot: Slot, cause: BaseException) -> None:
        """Replace a replica that died or whose engine raised, and run its requests again."""
        self._losses += 1
        self._past.update(totals(slot.stats))
        requests, unsent = list(slot.requests.values()), set(slot.unsent)
        self._router.remove(slot.name)
        slot.stop()
        for request in requests:
            request.losses += request not in unsent
            if request.losses <= self._queue.max_retries:
                self._retried += request not in unsent
                self._queue.again.append(request)
                continue
            del self._unfinished[request.request_id]
            slot.starts = 0
            self._ready.append(given_up(request, cause))
        if slot.starts <= self._queue.max_retries:
            slot.start(self._launch)
        elif all(other.actor is None for other in self._slots):
            starts = f"{slot.starts} starts in a row failed"
            raise ReplicaError(
                f"no replica can be kept running: {starts}; the last error: {_one_line(cause)}"
            ) from cause


def _priority(request: RayRequest) -> int:
    """Return a request's priority; 0 if it is not an integer, which a replica refuses."""
    value = request.params.priority
    return int(value) if is_scalar(value) else 0


def _on_host(weights: PyTree) -> PyTree:
    """Return a tree with its arrays in host memory, as other processes can read them."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, weights)


def check_counts(**counts: tuple[int | None, int]) -> None:
    """Raise ConfigError for a count below its minimum. counts: name=(value, minimum)."""
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least}")


def rows_of(engine_config: Mapping[str, Any]) -> int:
    """Return how many sequences an engine with these settings runs at once."""
    rows = engine_config.get("max_num_seqs", ROWS) or ROWS
    return rows * (engine_config.get("data_parallel_size") or 1)


def none_up(seconds: float, launch: Launch) -> str:
    """Return the message for the case that no replica has started: what each asks for, and what Ray
    has.
    """
    asked = ", ".join(f"{name}={count:g}" for name, count in launch.resources.items())
    asked += f" on each of {launch.hosts} hosts" if launch.hosts > 1 else ""
    resources = sorted(ray.cluster_resources().items())
    there = ", ".join(f"{k}={v:g}" for k, v in resources if ":" not in k)
    return f"no replica had started after {seconds:g} s: each asks for {asked}; Ray has {there}"


def ask_of(request_id: str, prompt: Any) -> Ask:
    """Return a request as a router sees it: the leading parts of its token ids or its text, which
    stand for what a replica holds once it has run one that begins with them. A function that makes
    the prompt shows none.
    """
    salt, name, content = "", "", prompt
    if isinstance(prompt, Mapping):
        salt, name = str(prompt.get("cache_salt")), str(prompt.get("adapter"))
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))
    elif isinstance(prompt, Chat):
        name, content = str(prompt.adapter), repr(prompt.messages)
    if isinstance(content, str):
        parts = [
            content[i : i + CHARACTERS].encode("utf-8", "replace")
            for i in range(0, len(content), CHARACTERS)
        ]
        size, tokens = PIECE, max(len(content) * PIECE // CHARACTERS, 1)
    elif isinstance(content, Sequence | np.ndarray):
        ids = np.asarray(content)
        parts = [ids[i : i + PIECE].tobytes() for i in range(0, len(ids), PIECE)]
        size, tokens = PIECE, len(ids)
    else:
        return Ask(call=request_id, tokens=1)
    key, keys = digest(None, f"{salt} {name} ".encode()), list[int]()
    for part in parts[: tokens // size]:
        key = digest(key, part)
        keys.append(key)
    return Ask(
        call=request_id, tokens=tokens, keys=keys, ends=range(size, size * len(keys) + 1, size)
    )


def given_up(request: RayRequest, cause: BaseException) -> RequestOutput:
    """Return the output of a request that is not tried again."""
    said = f"its replica died each of the {request.losses} times that it ran; the last time: "
    return failed(request.request_id, ReplicaError(said + _one_line(cause)), request.prompt)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text if len(text) <= 300 else f'{text[:200]} ... {text[-95:]}'}"
    )
