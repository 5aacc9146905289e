"""A loop that checks the engine's invariants after every step, over the device of mock.py."""

import itertools
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.disk import Disk
from jpaged.engine.cache.prefix_cache import Contents
from jpaged.engine.cache.store import BlockStore, HostStore
from jpaged.engine.cache.tiers import TieredStore
from jpaged.engine.drafting import Drafter, can_draft
from jpaged.engine.engine import Engine
from jpaged.engine.plan import Phase, Plan, PlanEntry
from jpaged.engine.queues import Queues
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Request, Sequence
from jpaged.errors import CapacityError
from jpaged.request.outputs import collect
from jpaged.request.resume import resume
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import BeamSearch, EarlyStopping, num_candidates
from tests.engine.mock import (
    MODEL,
    Data,
    MockRunner,
    Window,
    adapted,
    expected,
    expected_beams,
    generated,
    next_kv,
    prompt_score,
    version_of,
)


def cases(every: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` takes the quick ones."""
    quick = list(quick)
    return [x if x in quick else pytest.param(x, marks=pytest.mark.middle) for x in every]


def check_ended(host: "Host", seq: Sequence) -> None:
    """An ended sequence has exactly what it would have alone, or failed for want of blocks and of
    nothing else.
    """
    want = expected(seq, host.windows)
    if seq.finish_reason == "abort":
        assert generated(seq) == want[: seq.num_generated]
        return
    assert (seq.error is None) == host.fits(seq.prompt_len, len(want)), (
        f"{seq!r} of {len(want)} to come: {seq.error}"
    )
    if seq.error is not None:
        assert isinstance(seq.error, CapacityError) and generated(seq) == want[: seq.num_generated]
        return
    assert generated(seq) == want and seq.generated.logprobs == [-t / 8 for t in want]
    assert seq.finish_reason == (
        "stop" if want and want[-1] in seq.eos_ids | seq.stop_ids else "length"
    )
    if seq.sampling_params.prompt_logprobs is not None:
        kv, scores = 0, list[float]()
        for token, target in zip(
            seq.token_ids[: seq.prompt_len], seq.token_ids[1 : seq.prompt_len], strict=False
        ):
            kv = next_kv(kv, *adapted([token], version_of(seq)))
            scores.append(prompt_score(kv, target))
        if seq.scored is not None and seq.scoring is not None:
            first = seq.scoring.first
            assert seq.scored.columns["prompt_logprobs"].tolist() == scores[first:]
            assert seq.scored.count == len(scores) - first and seq.num_cached <= first
            return
        assert [top and top[0][1] for top in seq.prompt_logprobs] == [None, *scores]
        assert seq.num_cached == 0 or seq.num_resumed


def check_search(host: "Host", search: BeamSearch) -> None:
    """An ended search has the naive one's hypotheses, or failed because one beam alone does not
    fit.
    """
    want, length = expected_beams(search, host.windows)
    if search.sequences[0].finish_reason != "abort":
        assert (search.error is None) == host.fits(search.prompt_len, length), (
            f"{length} steps: {search.error}"
        )
        assert search.error is None or isinstance(search.error, CapacityError)
        if search.error is None:
            found = search.results()
            assert [h.generated.token_ids for h in found] == [tokens for tokens, _ in want], (
                f"{search!r} has other beams"
            )
            assert [h.score for h in found] == pytest.approx([score for _, score in want])


def identity(era: int) -> bytes:
    """What stands in files for the weights of an era."""
    return bytes([era]) * 32


KV_OF: weakref.WeakKeyDictionary[Content, list[int]] = weakref.WeakKeyDictionary()


def kv_of(content: Content, size: int) -> list[int]:
    """The KV of a block of this content, as the mock's model computes it. size: tokens a block."""
    if content not in KV_OF:
        chain = []
        link: Content | None = content
        while link is not None and link.parent is not None:
            chain.insert(0, link.token_ids)
            link = link.parent
        salt = chain[0][: -4 * size]
        if salt[-9:-8] == b"\xff":  # of a request that shares nothing
            salt = salt[:-9]
        version = int.from_bytes(salt[-8:], "little") if salt[-9:-8] == b"\0" else 0
        tokens = array("i", b"".join(block[-4 * size :] for block in chain)).tolist()
        kv = list(itertools.accumulate(adapted(tokens, version), next_kv, initial=0))
        KV_OF[content] = kv[-size:]
    return KV_OF[content]


class Letters:
    """A tokenizer whose token t is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + t % 26) for t in ids)


class CountedBlocks(BlockManager):
    """Counts blocks that windows leave while their sequence runs."""

    given_back: ClassVar[int] = 0

    def trim(self, seq: Sequence) -> None:
        before = sum(seq.first_held)
        super().trim(seq)
        CountedBlocks.given_back += sum(seq.first_held) - before


class CountedQueues(Queues):
    """Counts forks: `joined` at a prompt, `split` of a beam."""

    forks: ClassVar[Counter[str]] = Counter()

    def join(self, seq: Sequence, leader: Sequence) -> None:
        self.forks["joined"] += 1
        super().join(seq, leader)

    def fork(self, parent: Sequence) -> Sequence:
        self.forks["split"] += 1
        return super().fork(parent)


class CheckedScheduler(Scheduler):
    """Asserts the invariants of every plan as it is made, and counts those of mixed rows."""

    mixed: ClassVar[int] = 0

    def plan(self, phase: Phase, entries: list[PlanEntry]) -> Plan:
        plan = super().plan(phase, entries)
        self.check_integrity(plan if plan.entries else None)
        CheckedScheduler.mixed += len({entry.decodes for entry in plan.entries}) > 1
        return plan


class Oracle(Drafter):
    """Guesses what a row will draw, some tokens of it wrong. windows: of the mock."""

    windows: tuple[Window, ...] = (None,)

    def _draft(self, seq: Sequence, row: Any, most: int) -> list[int]:
        if not can_draft(seq):
            return []
        most = min(most, self.asked.num_tokens, seq.end - len(seq) - seq.pending - 1)
        want = expected(seq, self.windows)[seq.num_generated :][: max(most, 0)]
        return [(t + (len(seq) * 7 + t) % 5 // 4) % 100 for t in want]


class CheckedEngine(Engine):
    def _new_replica(self, contents: Contents, store: BlockStore | None) -> Scheduler:
        scheduler = super()._new_replica(contents, store)
        if self.drafter is not None and not self.drafter.has_model:
            self.drafter.__class__ = Oracle
        scheduler.__class__ = CheckedScheduler
        scheduler.queues.__class__ = CountedQueues
        scheduler.blocks.__class__ = CountedBlocks
        return scheduler


OWN = ("eos_ids", "text", "structured", "scoring", "request_id", "index", "salt", "adapter")
OWN += ("origin",)


class Host:
    """An engine over a mock device: small blocks, every step checked, and no more steps than any
    test needs.
    """

    def __init__(
        self,
        depth: int = 1,
        windows: tuple[Window, ...] = (None,),
        windowed_blocks: int | None = None,
        disk: Disk | None = None,
        **settings: Any,
    ):
        """disk: of MockBytes. It outlives the engine."""
        self.windows = windows
        sizes: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
        }
        config = EngineConfig(**{**sizes, "max_model_len": 128, "max_logprobs": 3, **settings})
        self.config = config.resolve(MODEL)
        self.runner = MockRunner(self.config, windows, windowed_blocks)
        self.engine = CheckedEngine(
            self.config, self.runner, depth=depth, disk=disk, stored=identity(0) if disk else None
        )
        if isinstance(self.engine.drafter, Oracle):
            self.engine.drafter.windows = windows
        self.era = 0  # of the last reset: what was written before it must not be found
        self.oldest_kv = 0  # the era from which all KV of running rows is
        # Of sequences that were unfinished at new weights: their tokens then, and the era of these.
        self.drawn_before: dict[Sequence, list[tuple[int, int]]] = {}
        self._ids = itertools.count()
        self._steps_left = 5000

    @property
    def blocks(self):
        return self.engine.replicas[0].blocks

    @property
    def store(self) -> HostStore | None:
        """What keeps the blocks that the pools have given up."""
        traffic = self.blocks.traffic
        if traffic is None:
            return None
        if isinstance(traffic.store, TieredStore):
            return traffic.store.host
        assert isinstance(traffic.store, HostStore)
        return traffic.store

    def sequence(
        self, prompt: Iterable[int], max_tokens: int | None = 8, **options: Any
    ) -> Sequence:
        own = {k: options.pop(k) for k in OWN if k in options}
        request_id = own.pop("request_id", None) or str(next(self._ids))
        params = SamplingParams(max_tokens=max_tokens, **options)
        assert self.config.max_model_len is not None
        return Sequence(
            request_id, list(prompt), params, max_model_len=self.config.max_model_len, **own
        )

    def add(self, prompt: Iterable[int], max_tokens: int | None = 8, **options: Any) -> Sequence:
        seq = self.sequence(prompt, max_tokens, **options)
        self.engine.add(Request([seq]))
        return seq

    def add_samples(
        self, prompt: Iterable[int], n: int, max_tokens: int | None = 8, **options: Any
    ) -> list[Sequence]:
        """One request of n samples, of which the first alone scores the prompt."""
        request_id, prompt = str(next(self._ids)), list(prompt)
        seqs = []
        for i in range(n):
            own = (
                options if i == 0 else {k: v for k, v in options.items() if k != "prompt_logprobs"}
            )
            seqs.append(self.sequence(prompt, max_tokens, request_id=request_id, index=i, **own))
        self.engine.add(Request(seqs))
        return seqs

    def add_beams(
        self,
        prompt: Iterable[int],
        width: int,
        max_tokens: int = 8,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **options: Any,
    ) -> BeamSearch:
        wanted = num_candidates(width, len(options.get("eos_ids", ())))
        root = self.sequence(prompt, max_tokens, temperature=0.0, logprobs=wanted, **options)
        search = BeamSearch(
            root, width, length_penalty=length_penalty, early_stopping=early_stopping, prompt=None
        )
        self.engine.add(search)
        return search

    def go_on(self, cut: Request) -> Request:
        """Add the request of the same prompt and samples that goes on where one was cut."""
        request_id, seqs = str(next(self._ids)), []
        for old in cut.sequences:
            prompt = old.token_ids[: old.prompt_len]
            own = {"index": old.index, "adapter": old.adapter, "origin": old.origin}
            assert self.config.max_model_len is not None
            seq = Sequence(
                request_id,
                prompt,
                old.sampling_params,
                max_model_len=self.config.max_model_len,
                eos_ids=old.eos_ids,
                **own,
            )
            hidden = old.salt[-9:-8] == b"\xff"  # which is for one request alone
            seq.salt = old.salt[:-9] if hidden else old.salt
            seqs.append(seq)
            if old in self.drawn_before:
                self.drawn_before[seq] = list(self.drawn_before[old])
        request = Request(seqs)
        resume(request, collect(cut, None))
        self.engine.add(request)
        return request

    def step(self) -> list[Sequence]:
        self._steps_left -= 1
        assert self._steps_left, "the engine hangs"
        ended = self.engine.step()
        self.check()
        for search in (r for r in ended if isinstance(r, BeamSearch)):
            check_search(self, search)
        ended = [
            seq
            for request in ended
            if not isinstance(request, BeamSearch)
            for seq in request.sequences
        ]
        for seq in ended:
            if seq.error is None and seq.finish_reason != "abort":
                want = expected(seq, self.windows)
                want = want[: seq.num_generated] if isinstance(seq.stop_reason, str) else want
                assert generated(seq) == want, f"{seq!r} has another request's tokens"
        return ended

    def check(self) -> None:
        """The scheduler's invariants; whatever a search finds, in a pool or in the store, holds
        the KV of just its content, and none from before a reset.
        """
        self.check_replica(self.engine.replicas[0], self.runner)

    def check_replica(self, replica: Scheduler, runner: MockRunner) -> None:
        replica.check_integrity()
        traffic = replica.blocks.traffic
        self._check_recomputed(replica, runner)
        for at, group in enumerate(replica.blocks.groups):
            for content, block_id in group.cached.items():
                if block_id not in group.unwritten:
                    self._check_data(content, at, runner._get(at, block_id))
        if traffic is not None:
            store = traffic.store
            if isinstance(store, TieredStore):
                self._check_tiers(store)
                store = store.host
            assert isinstance(store, HostStore)
            for slot in store:
                if slot.data is not None:
                    self._check_data(slot.content, slot.group, slot.data)

    def _check_tiers(self, store: TieredStore) -> None:
        """What was read from files, and what is being written, is of its content."""
        for (content, group), reading in store._read.items():
            assert (reading.slot.content, reading.slot.group) == (content, group)
            if reading.slot.data is not None:
                self._check_data(content, group, reading.slot.data)
        for replica in self.engine.replicas:
            for move in (*replica.blocks.traffic.loads.values(),) if replica.blocks.traffic else ():
                self._check_data(move.slot.content, move.slot.group, store.get(move.slot))

    def _check_recomputed(self, replica: Scheduler, runner: MockRunner) -> None:
        """What running rows read of groups without a window is of the weights since which all KV is
        computed again.
        """
        if not self.oldest_kv:
            return
        for seq in replica.queues.running:
            written = min(seq.num_dispatched, len(seq) - 1)
            for at, size in enumerate(self.runner.kv_groups):
                if size.window is None and size.per == "token":
                    table = seq.block_tables[at][: -(-written // self.config.block_size)]
                    eras = [era for block in table for era in runner._get(at, block)[1]]
                    assert min(eras[:written], default=self.oldest_kv) >= self.oldest_kv

    def _check_data(self, content: Content, at: int, data: Data) -> None:
        values, eras = data
        want = kv_of(content, self.config.block_size)[-len(values) :]
        assert values == want, f"a block of group {at} holds another's KV"
        assert min(eras) >= self.era, "a block is found and is from before the reset"

    def reset(self) -> None:
        self.runner.era += 1
        self.era = self.runner.era
        self.engine.identify(identity(self.era))
        self.engine.reset_prefix_cache()

    def renew(self, *, recompute: bool) -> list[Request]:
        """New weights under what runs; returns the requests that the steps in flight have ended."""
        ended = self.engine.drain()
        self.reset()
        self.engine.renew(recompute=recompute)
        self.oldest_kv = self.era if recompute else self.oldest_kv
        for request in self.engine.requests.values():
            for seq in request.sequences:
                self.drawn_before.setdefault(seq, []).append((seq.num_generated, self.era))
        self.check()
        return ended

    def check_versions(self, seq: Sequence) -> None:
        """Each token was drawn by the weights of its time."""
        versions = seq.generated.weight_versions
        assert versions == sorted(versions)
        for count, era in self.drawn_before.get(seq, ()):
            assert all(version < era for version in versions[:count])
            assert all(version >= era for version in versions[count:])

    def found(self, seq: Sequence) -> list[int]:
        """The blocks of the first group that hold a sequence's longest cached prefix."""
        return self.blocks.cache.match(seq).tables[0]

    def fits(self, prompt_len: int, count: int) -> bool:
        """Whether so many tokens more fit the pool alone; the KV of the last one is never
        written.
        """
        return max(prompt_len, prompt_len + count - 1) <= self.blocks.most_tokens

    def run(self) -> list[Sequence]:
        """Step until nothing is unfinished."""
        ended = []
        while self.engine.has_unfinished():
            ended += self.step()
        assert self.blocks.num_used == 0, "blocks leaked"
        self.check()
        return ended

    def generate(
        self, *prompts: Iterable[int], max_tokens: int | None = 8, **options: Any
    ) -> list[Sequence]:
        """One call: all prompts admitted together, run to their end."""
        seqs = [self.add(prompt, max_tokens, **options) for prompt in prompts]
        self.run()
        return seqs
