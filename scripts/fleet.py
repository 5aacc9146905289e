"""Simulate a fleet of replicas behind a router, with synthetic traffic like public traces'.

    python scripts/fleet.py --replicas 10000 --sample 200 --kind tools --rate 0.6 --out fleet/
    python scripts/fleet.py --check --replicas 4 --kind chat --rate 3       # against real engines
    python scripts/fleet.py --find --kind tools --rate 0.6 --slo-s 2        # replicas for an SLO
    python scripts/fleet.py --apart --replicas 8 --prompt-tokens 8000 --link-gb-s 12.5

--apart compares replicas that do all with some that compute prompts and others that go on from
them (docs/prefix_store.md): the most requests a second at which nine of ten have their first token
within --slo-s and the others within --tpot-s of each other, for the best division of --replicas.
Blocks pass through a store: a replica sends them at --link-gb-s while it computes the next ones,
and another receives them at that rate, from when all were sent.

scripts/fleet_check.py holds the simulation to real replicas.

What is real: the router, which is the one that ships (jpaged/fleet/router.py), told what a server
would tell it: of requests when they are sent, draw and end, and with each end what the replica has
and has no more. With --check every replica is this project's engine too (scheduler, block manager,
prefix cache and host store) over a device that only takes time (_fleet_device.py), and what it
reports is its real prefix cache. What is a model: otherwise a replica is a queue of prompts at the
step times that the scheduler's rule leaves them (prefills give way to decode as engine/policy.py
says), rows whose tokens take the step time of that many rows, and a cache that forgets the least
recently used session or system prompt first, in the pool, in host memory and in files. A step is
not simulated by itself, so requests cost microseconds; --check prints what that leaves out.

Routers: the policies of RouterSettings. Replicas report pool and host memory, not files.

A day is compressed: its 24 hours take --seconds, with rates that swing by --swing; sessions think
as long as ever. --sample N simulates N of --replicas with as much of the traffic: what a replica
sees is the same as long as sessions are many more than replicas, but nothing that ties the whole
fleet together (a router's own speed, one shared disk) is. --mtbf-s kills replicas at random: what
ran there starts again elsewhere, and the replica comes back after --cold-start-s with an empty pool
and host memory; files stay. Plots (SVG and PNG) need matplotlib.
"""

import argparse
import dataclasses
import heapq
import itertools
import json
import math
import random
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _common as common
from _fleet_device import EngineReplica, StepTimes
from _fleet_traffic import KINDS, Asked, Kind, token_ids, traffic, unshared

from jpaged.engine.policy import MOST_IN_A_ROW
from jpaged.fleet.holdings import Report
from jpaged.fleet.router import Ask, Policy, Router, RouterSettings

ROUTERS: tuple[Policy, ...] = ("round_robin", "two", "sticky", "prefix")
TIERS = ("pool", "host", "files", "link")
Key = tuple[str, int]  # ("system", its number) or ("session", its number)


@dataclasses.dataclass
class Served:
    """What became of a request. first_s, whole_s: seconds from its arrival to the first token and
    to the end. cached: tokens found, by tier.
    """

    at: float
    replica: int
    first_s: float
    whole_s: float
    prompt: int
    cached: dict[str, int]
    answer: int = 1

    @property
    def token_s(self) -> float:
        """Seconds between its tokens, in the mean."""
        return (self.whole_s - self.first_s) / max(self.answer - 1, 1)


class Tier:
    """What a replica keeps of prompts in one place, by tokens; least recently used first."""

    def __init__(self, most: int):
        self.most, self.used = most, 0
        self.held: OrderedDict[Key, int] = OrderedDict()

    def get(self, key: Key) -> int:
        """Return the tokens under a key; a look is no use."""
        return self.held.get(key, 0)

    def put(self, key: Key, tokens: int) -> list[tuple[Key, int]]:
        """Hold so many tokens under a key; return what had to go."""
        gone = list[tuple[Key, int]]()
        self.used += tokens - self.held.pop(key, 0)
        self.held[key] = tokens
        while self.used > self.most and self.held:
            old, size = self.held.popitem(last=False)
            self.used -= size
            gone.append((old, size))
        return gone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a replica: tokens that its pool, host memory and files hold; of a block; rows that
    run at once; tokens of a prefill step at most.
    """

    pool: int
    host: int
    files: int
    block: int = 64
    rows: int = 256
    batched: int = 8192


class ModelReplica:
    """A replica as a queue; see the module. files: shared by a fleet, or its own."""

    def __init__(self, index: int, times: StepTimes, sizes: Sizes, files: Tier):
        self.index, self.times, self.sizes, self.files = index, times, sizes, files
        self.comes_back = -math.inf  # until when it is down
        self.lives = 0
        self.restart()

    def restart(self) -> None:
        """Hold nothing but files."""
        self.lives += 1
        self.version = 0
        self.parts: dict[Key, list[int]] = {}  # the router's keys of what is held
        self.added, self.dropped = set[int](), set[int]()  # since the last report
        self.pool, self.host = Tier(self.sizes.pool), Tier(self.sizes.host)
        self.free_at = -math.inf  # when the prompts that it has are computed
        # The last prompt, when its last step begins, and the tokens that the step has room for.
        self.last: tuple[Served, float, int] | None = None
        self.ends: list[tuple[float, int, Asked]] = []  # of rows
        self.context = 0  # tokens of them
        self.busy, self.busy_at = 0.0, 0.0  # share of late that prompts took, and as of when

    def settle(self, now: float) -> None:
        """Forget what has ended by now."""
        while self.ends and self.ends[0][0] <= now:
            asked = heapq.heappop(self.ends)[2]
            self.context -= asked.prompt + asked.answer // 2

    def held(self, asked: Asked) -> dict[str, int]:
        """Return how many tokens of a prompt each tier gives; what is dearer to fetch than to
        compute is not fetched.
        """
        hits, most = dict[str, int](), 0
        times, limit = self.times, asked.prompt - 1
        rates = {"pool": math.inf, "host": times.host_rate, "files": times.disk_rate}
        for tier, rate in rates.items():
            kept: Tier = getattr(self, tier)
            session = min(kept.get(("session", asked.session)), limit)
            known = max(session, min(kept.get(("system", asked.which)), limit))
            known -= known % self.sizes.block
            fetch = times.kv_bytes / rate
            if known > most and fetch < times.prefill_token:
                hits[tier], most = known - most, known
        return hits

    def submit(self, asked: Asked, now: float, received: int = 0) -> Served:
        """Take a request now. received: tokens of its prompt that it has from another replica."""
        self.settle(now)
        hits, times, rows = self.held(asked), self.times, len(self.ends)
        if received > sum(hits.values()):
            hits["link"] = received - sum(hits.values())
        cached = sum(hits.values())
        if cached and self.files.most:  # what is used twice is written
            self.files.put(("system", asked.which), asked.system)
            self.files.put(("session", asked.session), asked.before)
        system, *others = parts_of(asked, with_answer=True)
        for key, tokens, parts in (
            (("system", asked.which), asked.system, [system]),
            # The last token of an answer is not fed.
            (("session", asked.session), asked.prompt + asked.answer - 1, others),
        ):
            self._keep(key, tokens, [part for part, _ in parts])
        fetch = times.kv_bytes * (
            hits.get("host", 0) / times.host_rate + hits.get("files", 0) / times.disk_rate
        )
        left = asked.prompt - cached
        step = times.decode(rows + 1, self.context + asked.prompt)
        chunks = math.ceil(left / self.sizes.batched)
        compute = times.prefill_token * left + times.prefill_step * chunks
        ready = now + hits.get("files", 0) * times.kv_bytes / times.disk_rate
        start = max(self.free_at, ready)
        if len(self.ends) >= self.sizes.rows:  # a row must end first
            start = max(
                start, heapq.nsmallest(len(self.ends) - self.sizes.rows + 1, self.ends)[-1][0]
            )
        # Rows that decode take turns with the chunks of prompts. A prompt that no other is before
        # comes amid a step of theirs, and the next one is dispatched already.
        turns = chunks * MOST_IN_A_ROW["decode"] / MOST_IN_A_ROW["prefill"] if rows else 0.0
        if rows and start <= now:
            turns = 1.5 + (turns if chunks > 1 else 0.0)
        host = times.host_step if not rows and start <= now else 0.0
        prompt_s = compute + turns * step + host
        first = start + prompt_s + fetch
        self.free_at = start + prompt_s
        self._note(now, compute)
        whole = first + asked.answer * step / (1 - min(self.busy, 0.8))
        heapq.heappush(self.ends, (whole, next(ORDER), asked))
        self.context += asked.prompt + asked.answer // 2
        if self.last is not None and now < self.last[1]:
            # It shares the last step of the prompt before, whose first token that holds up.
            shared = min(left, self.last[2]) * times.prefill_token
            self.last[0].first_s += shared
            self.last[0].whole_s += shared
        tail = left % self.sizes.batched
        served = Served(
            asked.at,
            self.index,
            first - asked.at,
            whole - asked.at,
            asked.prompt,
            hits,
            asked.answer,
        )
        begins = first - times.prefill(tail)
        self.last = served, begins, self.sizes.batched - tail
        return served

    def _keep(self, key: Key, tokens: int, parts: list[int]) -> None:
        gone = self.pool.put(key, tokens)
        self.parts[key] = parts
        self.added.update(parts)
        self.dropped.difference_update(parts)
        for old, size in gone:
            evicted = self.host.put(old, size) if self.host.most else [(old, size)]
            for lost, its in evicted:
                if self.files.most:
                    self.files.put(lost, its)
                if not self.pool.get(lost) and lost in self.parts:
                    lost_parts = self.parts.pop(lost)
                    self.dropped.update(lost_parts)
                    self.added.difference_update(lost_parts)
            if self.files.most:
                self.files.put(old, size)

    def report(self) -> Report:
        """Return what has changed in pool and host memory since the last report."""
        self.version += 1
        report = Report(
            life=self.lives,
            version=self.version,
            since=self.version - 1 if self.version > 1 else None,
            added=frozenset(self.added),
            dropped=frozenset(self.dropped),
        )
        self.added, self.dropped = set(), set()
        return report

    def _note(self, now: float, seconds: float) -> None:
        """Count prompts' time into the share of late: of the last ten seconds or so."""
        decay = math.exp(-(now - self.busy_at) / 10)
        self.busy, self.busy_at = self.busy * decay + seconds / 10, now


ORDER = itertools.count()


def parts_of(asked: Asked, *, with_answer: bool = False) -> list[tuple[int, int]]:
    """Return the leading parts of a prompt that others may share, as a router's key and the tokens
    that it ends at: the system prompt, and each message and answer of its session. A server has a
    key for each block of them. with_answer: with that of this request's answer.
    """
    parts = [(hash(("system", asked.which)), asked.system)]
    ends = [end for span in asked.answers for end in span] + [asked.prompt]
    if with_answer:
        ends.append(asked.prompt + asked.answer)
    return parts + [(hash((asked.session, i)), end) for i, end in enumerate(ends)]


class Front:
    """The router that ships before some replicas, and what a server would tell it. Names are of a
    replica's life.
    """

    def __init__(self, fleet: "Fleet", replicas: Sequence[ModelReplica] = (), seed: int = 0):
        settings = RouterSettings(policy=fleet.router, max_imbalance=fleet.max_imbalance)
        self.router = Router(settings, seed=fleet.seed + seed)
        self.by_session = fleet.by_session
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._replicas = {replica.index: replica for replica in replicas}
        for replica in replicas:
            self.router.add(name_of(replica))

    def at(self, when: float, event: Callable[[], object]) -> None:
        """Have something told when its time comes."""
        heapq.heappush(self._events, (when, next(ORDER), event))

    def settle(self, now: float) -> None:
        """Tell the router all that has happened by now."""
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()

    def choose(self, asked: Asked, now: float) -> tuple[str, ModelReplica]:
        """Return a name for a request and the replica that is to take it."""
        self.settle(now)
        call = str(next(ORDER))
        keys, ends = zip(*parts_of(asked), strict=True)
        ask = Ask(call=call, tokens=asked.prompt, keys=keys, ends=ends, session=str(asked.session))
        among = divided(asked, self.router.replicas) if self.by_session else None
        return call, self._replicas[int(self.router.choose(ask, among).partition(".")[0])]

    def took(self, call: str, replica: ModelReplica, served: Served) -> None:
        """Have the router told what becomes of a request that a replica has taken."""
        router, name = self.router, name_of(replica)

        def end() -> None:
            router.ended(call)
            if name_of(replica) == name:
                router.report(name, replica.report())

        self.at(served.at + served.first_s, lambda: router.begun(call))
        self.at(served.at + served.whole_s, end)

    def send(self, asked: Asked, now: float) -> Served:
        """Have a replica take a request that the router chooses."""
        call, replica = self.choose(asked, now)
        served = replica.submit(asked, now)
        self.took(call, replica, served)
        return served


def name_of(replica: ModelReplica) -> str:
    return f"{replica.index}.{replica.lives}"


def divided(asked: Asked, names: list[str]) -> list[str]:
    """Return the replica of a session by its number, whatever was measured."""
    return [names[asked.session % len(names)]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated. rate: requests a second of a replica in the mean. shares_files: one set of
    files for all replicas, in place of one each. mtbf_s: mean seconds between deaths of a replica,
    0 is never. max_imbalance: see RouterSettings. by_session: the router has one replica to choose
    from, by the number of the session alone; replicas must not die then.
    """

    replicas: int
    kind: str | Kind
    router: Policy
    rate: float
    seconds: float
    swing: float
    times: StepTimes
    sizes: Sizes
    max_imbalance: int = RouterSettings.max_imbalance
    shares_files: bool = False
    mtbf_s: float = 0.0
    cold_start_s: float = 60.0
    by_session: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by_session and self.mtbf_s:
            raise ValueError(f"mtbf_s={self.mtbf_s}: by_session takes replicas that do not die")

    def traffic(self) -> Iterator[Asked]:
        """Return its requests in the order of their arrival."""
        kind = KINDS[self.kind] if isinstance(self.kind, str) else self.kind
        rate = self.rate * self.replicas
        return traffic(kind, rate=rate, seconds=self.seconds, swing=self.swing, seed=self.seed)


def simulate(fleet: Fleet, asks: Iterable[Asked] | None = None) -> dict[str, Any]:
    """Run a fleet of ModelReplicas; return its figures. asks: in place of the traffic that it
    describes.
    """
    began, sizes = time.perf_counter(), fleet.sizes
    shared = Tier(sizes.files * fleet.replicas)
    replicas = [
        ModelReplica(i, fleet.times, sizes, shared if fleet.shares_files else Tier(sizes.files))
        for i in range(fleet.replicas)
    ]
    front, rng = Front(fleet, replicas), random.Random(fleet.seed + 1)
    served, counts = dict[tuple[int, int], Served](), Counter[str]()
    dies = math.inf
    if fleet.mtbf_s:
        dies = rng.expovariate(fleet.replicas / fleet.mtbf_s)
    for asked in fleet.traffic() if asks is None else asks:
        while dies <= asked.at:
            _die(rng.randrange(fleet.replicas), replicas, dies, fleet, front, served, counts)
            dies += rng.expovariate(fleet.replicas / fleet.mtbf_s)
        served[asked.session, len(asked.answers)] = front.send(asked, asked.at)
    report = figures(list(served.values()), fleet)
    report |= {"deaths": counts["deaths"], "restarted": counts["restarted"]}
    return report | {"simulated_in_s": time.perf_counter() - began}


def _die(
    index: int,
    replicas: list[ModelReplica],
    now: float,
    fleet: Fleet,
    front: Front,
    served: dict[tuple[int, int], Served],
    counts: Counter[str],
) -> None:
    """End a replica; what ran there begins again elsewhere, and counts once, from its arrival."""
    replica = replicas[index]
    if replica.comes_back > now or len(front.router.replicas) == 1:
        return
    front.settle(now)
    replica.settle(now)
    lost = [asked for _, _, asked in replica.ends]
    front.router.remove(name_of(replica))
    replica.restart()
    replica.comes_back = replica.free_at = now + fleet.cold_start_s
    front.at(replica.comes_back, lambda: front.router.add(name_of(replica)))
    counts["deaths"] += 1
    counts["restarted"] += len(lost)
    for asked in lost:
        served[asked.session, len(asked.answers)] = front.send(asked, now)


def figures(served: list[Served], fleet: Fleet) -> dict[str, Any]:
    """Sum up what became of the day's requests."""
    served = [x for x in served if x.at >= 0]
    firsts = sorted(x.first_s for x in served)
    tokens = sum(x.prompt for x in served)
    hits = Counter[str]()
    for x in served:
        hits.update(x.cached)
    hours = [list[float]() for _ in range(24)]
    for x in served:
        hours[min(int(x.at / fleet.seconds * 24), 23)].append(x.first_s)
    per_replica = Counter(x.replica for x in served)
    mean = len(served) / fleet.replicas
    return {
        "requests": len(served),
        "prompt_mean": tokens / max(len(served), 1),
        "hit_rate": sum(hits.values()) / max(tokens, 1),
        "hits": {tier: hits[tier] / max(tokens, 1) for tier in TIERS},
        "cached_tokens": sum(hits.values()),
        "first_p50_s": quantile(firsts, 0.5),
        "first_p90_s": quantile(firsts, 0.9),
        "first_p99_s": quantile(firsts, 0.99),
        "whole_p50_s": quantile(sorted(x.whole_s for x in served), 0.5),
        "whole_p90_s": quantile(sorted(x.whole_s for x in served), 0.9),
        "token_p90_s": quantile(sorted(x.token_s for x in served), 0.9),
        "answer_tokens": sum(x.answer for x in served),
        "makespan_s": max((x.at + x.whole_s for x in served), default=0.0)
        - min((x.at for x in served), default=0.0),
        "hours_p99_s": [quantile(sorted(hour), 0.99) for hour in hours],
        "busiest_over_mean": max(per_replica.values(), default=0) / max(mean, 1e-9),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values; nan of none."""
    return values[min(int(len(values) * share), len(values) - 1)] if values else math.nan


def run_engines(fleet: Fleet, asks: Iterable[Asked] | None = None) -> dict[str, Any]:
    """Run the fleet's traffic, or these requests, on real engines over modelled devices; return
    their figures.
    """
    began, sizes = time.perf_counter(), fleet.sizes
    engines = [
        EngineReplica(
            fleet.times,
            pool_tokens=sizes.pool,
            host_tokens=sizes.host,
            block_size=sizes.block,
            rows=sizes.rows,
            batched=sizes.batched,
        )
        for _ in range(fleet.replicas)
    ]
    router = Front(fleet).router
    for index in range(fleet.replicas):
        router.add(str(index))
    placed = dict[str, tuple[Asked, int]]()
    turns = dict[int, tuple[str, int]]()  # a session's last request, and where it runs
    held = list[tuple[float, int, Asked]]()  # turns that come before the one before has ended
    coming = enumerate(fleet.traffic() if asks is None else asks)
    following = next(coming, None)
    while held or following is not None:
        if held and (following is None or held[0][0] <= following[1].at):
            _, order, asked = heapq.heappop(held)
        else:
            assert following is not None
            order, asked = following
            following = next(coming, None)
        for index, engine in enumerate(engines):
            begun, ended = engine.news(asked.at)
            for call in begun:
                router.begun(call)
            for call in ended:
                router.ended(call)
            if ended and (report := engine.report()) is not None:
                router.report(str(index), report)
        if asked.session in turns:
            call, index = turns[asked.session]
            if call not in engines[index].ends:  # its client has no answer yet
                later = math.nextafter(max(asked.at, engines[index].device.now), math.inf)
                heapq.heappush(held, (later, order, asked._replace(at=later)))
                continue
        call, ids = str(order), token_ids(asked)
        keys, ends = engines[0].keys(ids)
        ask = Ask(call=call, tokens=asked.prompt, keys=keys, ends=ends, session=str(asked.session))
        among = divided(asked, router.replicas) if fleet.by_session else None
        chosen = int(router.choose(ask, among))
        engines[chosen].submit(call, ids, asked.answer, asked.at)
        placed[call], turns[asked.session] = (asked, chosen), (call, chosen)
    served = list[Served]()
    for engine in engines:
        engine.run()
    for name, (asked, replica) in placed.items():
        engine = engines[replica]
        cached = {"pool": engine.cached[name]}
        served.append(
            Served(
                asked.at,
                replica,
                engine.firsts[name],
                engine.ends[name],
                asked.prompt,
                cached,
                asked.answer,
            )
        )
    return figures(served, fleet) | {"simulated_in_s": time.perf_counter() - began}


def simulate_apart(fleet: Fleet, prefill: int, link_rate: float) -> dict[str, Any]:
    """Run a fleet of which so many replicas compute prompts and all others go on from them; return
    its figures. link_rate: bytes a second, from each replica to the store and back.
    """
    began, sizes, times = time.perf_counter(), fleet.sizes, fleet.times
    replicas = [ModelReplica(i, times, sizes, Tier(sizes.files)) for i in range(fleet.replicas)]
    firsts = Front(fleet, replicas[:prefill])
    seconds = Front(fleet, replicas[prefill:], seed=1)
    sent, received = [-math.inf] * fleet.replicas, [-math.inf] * fleet.replicas  # links are free
    arrivals, ready = fleet.traffic(), list[tuple[float, int, Asked]]()
    went_on = list[tuple[float, Asked, Served]]()
    asked = next(arrivals, None)
    while asked is not None or ready:
        if asked is not None and (not ready or asked.at <= ready[0][0]):
            one = firsts.send(asked._replace(answer=1), asked.at)
            at = one.replica
            left = asked.prompt - sum(one.cached.values())
            done = asked.at + one.first_s
            last = left % sizes.batched or min(left, sizes.batched)
            sent[at] = max(
                done + last * times.kv_bytes / link_rate,
                sent[at] + left * times.kv_bytes / link_rate,
            )
            heapq.heappush(ready, (sent[at], next(ORDER), asked))
            asked = next(arrivals, None)
            continue
        now, _, going = heapq.heappop(ready)
        call, replica = seconds.choose(going, now)
        at = replica.index
        whole = (going.prompt - 1) // sizes.block * sizes.block
        here = sum(replica.held(going).values())
        fetched = max(whole - here, 0) * times.kv_bytes
        received[at] = max(received[at], now) + fetched / min(link_rate, times.host_rate)
        served = replica.submit(going._replace(at=now), received[at], max(whole, here))
        seconds.took(call, replica, served)
        went_on.append((now, going, served))
    for now, going, served in went_on:
        served.at = going.at
        served.first_s += now - going.at
        served.whole_s += now - going.at
    report = figures([served for _, _, served in went_on], fleet)
    return report | {"simulated_in_s": time.perf_counter() - began}


def most_requests(
    fleet: Fleet, prefill: int | None, link_rate: float, slo_s: float, token_s: float
) -> float:
    """Return the most requests a second of the whole fleet, to a twentieth, at which nine of ten
    have their first token within slo_s, and nine of ten the others within token_s of each other.
    prefill: replicas that compute prompts alone; None where all do all.
    """

    def holds(rate: float) -> bool:
        asked = dataclasses.replace(fleet, rate=rate / fleet.replicas)
        report = simulate(asked) if prefill is None else simulate_apart(asked, prefill, link_rate)
        return report["first_p90_s"] <= slo_s and report["token_p90_s"] <= token_s

    low, high = 0.0, 0.25
    while holds(high):
        low, high = high, high * 2
    while high - low > high / 20 and high > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def compare_apart(fleet: Fleet, link_rate: float, slo_s: float, token_s: float) -> dict[str, Any]:
    """Return the most requests a second of a fleet whose replicas do all, and of the best division
    of it into the two kinds, with that division.
    """
    together = most_requests(fleet, None, link_rate, slo_s, token_s)
    apart = {
        count: most_requests(fleet, count, link_rate, slo_s, token_s)
        for count in range(1, fleet.replicas)
    }
    best = max(apart, key=lambda count: apart[count])
    return {"together": together, "apart": apart[best], "prefill": best, "by_division": apart}


def find_replicas(
    fleet: Fleet, total_rate: float, slo_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """Return the fewest replicas, to within a twentieth, whose 99th percentile of the time to the
    first token is below slo_s in every hour, for so many requests a second in all; and what was
    tried.
    """
    tried = list[dict[str, Any]]()

    def holds(count: int) -> bool:
        report = simulate(dataclasses.replace(fleet, replicas=count, rate=total_rate / count))
        worst = max((x for x in report["hours_p99_s"] if not math.isnan(x)), default=math.nan)
        tried.append({"replicas": count, "worst_hour_p99_s": worst} | report)
        return worst <= slo_s

    low, high = 0, 1
    while not holds(high):
        low, high = high, high * 2
        if high > 1 << 16:
            break
    while high - low > max(high // 20, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high, tried


def draw(reports: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the time to the first token by hour, and hits by tier, of each run."""
    from matplotlib.figure import Figure  # by itself it needs no display, and leaves no state

    paths = list[Path]()
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, report in reports.items():
        axes.plot(range(24), report["hours_p99_s"], marker="o", label=name)
    axes.set(xlabel="hour of the day", ylabel="time to first token, 99th percentile (s)")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    paths += _saved(figure, folder / "first_token")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    below = [0.0] * len(reports)
    for tier in TIERS:
        shares = [report["hits"][tier] for report in reports.values()]
        axes.bar(list(reports), shares, bottom=below, label=tier)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.set(ylabel="share of prompt tokens found", ylim=(0, 1))
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return paths + _saved(figure, folder / "hits")


def _saved(figure: Any, path: Path) -> list[Path]:
    paths = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
    for one in paths:
        figure.savefig(one)
    return paths


def make_parser() -> argparse.ArgumentParser:
    parser = common.make_parser("fleet", __doc__)
    add = parser.add_argument
    add("--replicas", type=int, default=10000)
    add("--sample", type=int, help="simulate so many of them; default: all")
    add("--kind", choices=list(KINDS), default="tools", help="of the traffic")
    add("--rate", type=float, default=0.6, help="requests a second of a replica, in the mean")
    add("--seconds", type=float, default=120.0, help="that a day takes")
    add("--swing", type=float, default=0.5, help="by how much hours differ from the mean")
    add("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    bound = "tokens by which a replica may be busier than others and get a prefix that it has"
    add("--max-imbalance", type=int, default=RouterSettings.max_imbalance, help=bound)
    add("--step-times", type=Path, help="JSON of StepTimes (_fleet_device.py), measured")
    add("--billions", type=float, default=8.0, help="parameters, where step times are planned")
    add("--tflops", type=float, default=400.0, help="of products, as they are reached")
    add("--memory-gb-s", type=float, default=2500.0, help="of the device's memory, likewise")
    add("--kv-kib", type=float, default=128.0, help="KV of a token")
    add("--host-gb-s", type=float, default=20.0, help="from host memory to the device")
    add("--disk-gb-s", type=float, default=2.0, help="from files to the device")
    add("--pool-tokens", type=int, default=400_000, help="that a replica's pool holds")
    add("--host-tokens", type=int, default=0, help="that its host memory holds")
    add(
        "--file-tokens", type=int, default=0, help="that its files hold, or its part of shared ones"
    )
    add("--apart", action="store_true", help="compare with two kinds of replicas")
    add("--link-gb-s", type=float, default=12.5, help="of --apart: between a replica and the store")
    add("--tpot-s", type=float, default=0.05, help="of --apart: time between tokens at most")
    add(
        "--prompt-tokens", type=int, help="prompts of this mean, nothing shared, in place of --kind"
    )
    add("--answer-tokens", type=int, default=250, help="with --prompt-tokens: mean of answers")
    add("--shared-files", action="store_true", help="one set of files for all replicas")
    add("--mtbf-s", type=float, default=0.0, help="mean seconds between deaths of a replica")
    add("--cold-start-s", type=float, default=60.0, help="until a dead replica is back")
    add("--check", action="store_true", help="run real engines too, and compare")
    add(
        "--find",
        action="store_true",
        help="find the replicas that --slo-s takes, of --sample's rate",
    )
    add("--slo-s", type=float, default=2.0, help="time to first token, 99th percentile")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for results.json and plots")
    return parser


COLUMNS = {
    "requests": "requests",
    "hit %": "hit_rate",
    "TTFT p50 s": "first_p50_s",
    "p90": "first_p90_s",
    "p99": "first_p99_s",
    "whole p50 s": "whole_p50_s",
    "busiest/mean": "busiest_over_mean",
    "took s": "simulated_in_s",
}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    common.check_positive(
        parser, args, "replicas", "pool_tokens", *(["sample"] if args.sample else [])
    )
    for name in ("rate", "seconds", "slo_s", "tpot_s", "link_gb_s"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    if not 0 <= args.swing < 1:
        parser.error(f"--swing {args.swing}: must be in [0, 1)")
    if args.step_times is not None:
        times = StepTimes.read(args.step_times)
    else:
        times = StepTimes.planned(
            billions=args.billions,
            tflops=args.tflops,
            memory_gb_s=args.memory_gb_s,
            kv_kib=args.kv_kib,
        )
        rates = {"host_rate": args.host_gb_s * 1e9, "disk_rate": args.disk_gb_s * 1e9}
        times = dataclasses.replace(times, **rates)
    count = min(args.sample or args.replicas, args.replicas)
    kind: str | Kind = args.kind
    if args.prompt_tokens is not None:
        common.check_positive(parser, args, "prompt_tokens", "answer_tokens")
        kind = unshared(args.prompt_tokens, args.answer_tokens)
    routers: Sequence[Policy] = args.routers or (("two",) if args.apart else ROUTERS)
    fleet = Fleet(
        replicas=count,
        kind=kind,
        router=routers[0],
        rate=args.rate,
        seconds=args.seconds,
        swing=args.swing,
        times=times,
        sizes=Sizes(pool=args.pool_tokens, host=args.host_tokens, files=args.file_tokens),
        max_imbalance=args.max_imbalance,
        shares_files=args.shared_files,
        mtbf_s=args.mtbf_s,
        cold_start_s=args.cold_start_s,
        seed=args.seed,
    )
    results: dict[str, Any] = {"replicas": args.replicas, "simulated": count}
    results["step_times"] = dataclasses.asdict(times)
    if args.apart:
        if count < 2:
            parser.error(f"--replicas {count}: two kinds take at least 2")
        rates = compare_apart(fleet, args.link_gb_s * 1e9, args.slo_s, args.tpot_s)
        of = f"{rates['prefill']} of {count} compute prompts"
        print(f"together {rates['together']:.3g}, apart {rates['apart']:.3g} requests/s ({of})")
        _save(args.out, results | {"apart": rates})
        return 0
    reports: dict[str, dict[str, Any]] = {}
    for router in routers:
        routed = dataclasses.replace(fleet, router=router)
        if args.find:
            fewest, tried = find_replicas(routed, args.rate * count, args.slo_s)
            print(f"{router}: {fewest} replicas for {args.rate * count:g} requests a second")
            results[f"{router} fewest"] = fewest
            reports[router] = next(x for x in tried if x["replicas"] == fewest)
            continue
        reports[router] = simulate(routed)
        if args.check:
            reports[f"{router}, engines"] = run_engines(routed)
    rows = []
    for name, report in reports.items():
        shown = {k: report[v] * (100 if "%" in k else 1) for k, v in COLUMNS.items()}
        rows.append(
            [name, *(f"{x:.3g}" if isinstance(x, float) else str(x) for x in shown.values())]
        )
    print("\n".join(common.aligned(["router", *COLUMNS], rows, left=1)))
    results["reports"] = reports
    _save(args.out, results)
    if args.out is not None:
        for path in draw(reports, args.out):
            print(path)
    return 0


def _save(folder: Path | None, results: dict[str, Any]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
