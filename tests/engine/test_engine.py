"""The engine over a mock device: a mixed load equals undisturbed streams, broken rules are noticed;
snapshots.
"""

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from jpaged.engine import engine, integrity
from jpaged.engine.cache import prefix_cache
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.content import Content
from jpaged.engine.cache.kinds import CacheKind
from jpaged.engine.cache.prefix_cache import Contents, Match, PrefixCache, chain_hash
from jpaged.engine.commit import Committed
from jpaged.engine.engine import EngineState
from jpaged.engine.plan import Plan, StepResult
from jpaged.engine.queues import Queues
from jpaged.engine.scheduler import PrefillPlanner
from jpaged.engine.sequence import Sequence, Status
from jpaged.errors import NotFiniteError
from jpaged.request.detokenizer import TextStream
from jpaged.search.beam import BeamSearch
from tests.engine.host import Host, Letters, check_ended
from tests.engine.mock import ROOTS, generated


def workload(depth: int, seed: int, **settings: Any) -> None:
    """A fixed mixed load over a pool that is too small: what the mutations below must not
    survive.
    """
    rng = random.Random(seed)
    sizes = {"block_size": rng.choice([1, 2, 4]), "num_blocks": rng.choice([10, 16, 24])}
    host = Host(depth, max_num_batched_tokens=rng.choice([3, 12]), **sizes, **settings)
    ended: list[Sequence] = []
    for _ in range(40):
        root = rng.choice(ROOTS)
        shift = rng.choice([0, 0, 4])
        prompt = root[shift : shift + rng.randrange(1, 14)]
        if ended and rng.random() < 0.4:  # the next turn of a conversation
            prompt = ended[-1].token_ids[:30]
        prompt = [*prompt, *rng.choices(range(1, 4), k=rng.randrange(1, 3))]
        host.add(prompt, rng.randrange(1, 8), eos_ids=frozenset(rng.sample(range(100), 6)))
        for _ in range(rng.randrange(4)):
            ended += host.step()
        prefilling = [seq for seq in host.engine.replicas[0].queues.running if seq.is_prefilling]
        if prefilling and rng.random() < 0.3:  # given up half-way, and asked again
            host.engine.abort(prefilling[0].request_id)
            host.add(prefilling[0].token_ids[: prefilling[0].prompt_len], 3)
    ended += host.run()
    for seq in ended:
        check_ended(host, seq)


SEEDS = range(8)
FEW = [
    pytest.param(SEEDS[:1], id="few"),
    pytest.param(SEEDS[1:], id="many", marks=pytest.mark.middle),
]


def weak_hash(patch: pytest.MonkeyPatch) -> None:
    """Equal tokens hash alike, whatever comes before them."""
    real = prefix_cache.digest
    for module in (prefix_cache, integrity):
        patch.setattr(module, "digest", lambda previous, token_ids: real(None, token_ids))


def constant_hash(patch: pytest.MonkeyPatch) -> None:
    for module in (prefix_cache, integrity):
        patch.setattr(module, "digest", lambda previous, token_ids: 7)


def share_without_counting(patch: pytest.MonkeyPatch) -> None:
    share = CacheKind.share

    def mutated(self: CacheKind, block_id: int) -> None:
        share(self, block_id)
        self.blocks[block_id].ref_count -= self.blocks[block_id].ref_count > 1

    patch.setattr(CacheKind, "share", mutated)


def no_parent_check(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        self: Contents, seq: Sequence, i: int, size: int, parent: Content
    ) -> Content | None:
        content = self._known.get(chain_hash(seq, i, size))
        is_same = content is not None and content.token_ids == seq.block_bytes(i, size)
        return content if is_same else None

    weak_hash(patch)
    patch.setattr(Contents, "find", mutated)


def no_token_check(patch: pytest.MonkeyPatch) -> None:
    def mutated(
        self: Contents, seq: Sequence, i: int, size: int, parent: Content
    ) -> Content | None:
        content = self._known.get(chain_hash(seq, i, size))
        return content if content is not None and content.parent is parent else None

    constant_hash(patch)
    patch.setattr(Contents, "find", mutated)


def stale_hash_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheKind, "forget", lambda self, block: None)


def half_stale_hash_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheKind, "forget", lambda self, block: setattr(block, "content", None))


def surplus_hashed(patch: pytest.MonkeyPatch) -> None:
    """The last token of an ended sequence is hashed, though nothing has written its KV."""
    release = Queues._release

    def mutated(self: Queues, seq: Sequence) -> None:
        reach = len(seq.block_tables[0]) * self.blocks.block_size
        self.blocks.cache.close(seq, min(len(seq), reach))
        release(self, seq)

    patch.setattr(Queues, "_release", mutated)


def surplus_emitted(patch: pytest.MonkeyPatch) -> None:
    commit = engine.commit

    def mutated(queues: Queues, plan: Plan, result: Any) -> Committed:
        drawing = [entry for entry in plan.entries if entry.draws]
        for entry, tokens in zip(drawing, result.tokens, strict=True):
            if entry.seq.status is Status.FINISHED:
                entry.seq.token_ids.append(tokens[0])
        return commit(queues, plan, result)

    patch.setattr(engine, "commit", mutated)


def hashed_before_written(patch: pytest.MonkeyPatch) -> None:
    """A chunk hashes the whole prompt."""
    close = PrefixCache.close
    patch.setattr(
        PrefixCache,
        "close",
        lambda self, seq, written, _=None: close(self, seq, max(written, seq.fill)),
    )


def whole_prompt_cached(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: PrefixCache, seq: Sequence, most: int | None = None) -> Match:
        seq.token_ids.append(1)
        try:
            return match(self, seq, most)
        finally:
            seq.token_ids.pop()

    match = PrefixCache.match
    patch.setattr(PrefixCache, "match", mutated)


def epochs_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Sequence, "epoch", property(lambda self: 0, lambda self, value: None), raising=False
    )


def row_kept(patch: pytest.MonkeyPatch) -> None:
    preempt = Queues.preempt

    def mutated(self: Queues, seq: Sequence) -> None:
        preempt(self, seq)
        self.free_rows.pop()

    patch.setattr(Queues, "preempt", mutated)


def blocks_kept(patch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free

    def mutated(self: BlockManager, seq: Sequence) -> None:
        for table in seq.block_tables:
            del table[-1:]
        free(self, seq)

    patch.setattr(BlockManager, "free", mutated)


def generated_tokens_lost(patch: pytest.MonkeyPatch) -> None:
    """A re-admission prefills the prompt alone."""
    add_chunk = PrefillPlanner._add_chunk

    def mutated(self: PrefillPlanner, seq: Sequence, parting: int = 0) -> None:
        if seq.is_new:
            seq.fill = max(seq.prompt_len, seq.num_dispatched + 1)
        add_chunk(self, seq, parting)

    patch.setattr(PrefillPlanner, "_add_chunk", mutated)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    share_without_counting,
    no_parent_check,
    no_token_check,
    stale_hash_entry,
    half_stale_hash_entry,
    surplus_hashed,
    surplus_emitted,
    hashed_before_written,
    whole_prompt_cached,
    epochs_ignored,
    row_kept,
    blocks_kept,
    generated_tokens_lost,
]
NEED_DEPTH_2 = (surplus_emitted, epochs_ignored)  # else nothing is in flight when it matters


@pytest.mark.parametrize("seeds", FEW)
@pytest.mark.parametrize(
    "setting", [lambda patch: None, weak_hash, constant_hash], ids=["plain", "weak", "constant"]
)
def test_the_workload_passes(
    depth: int, setting: Callable, seeds: range, monkeypatch: pytest.MonkeyPatch
):
    """Collisions cost hits, never a wrong token."""
    setting(monkeypatch)
    for seed in seeds:
        workload(depth, seed)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_broken_rule_is_noticed(depth: int, mutate: Callable, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in SEEDS:
            workload(2 if mutate in NEED_DEPTH_2 else depth, seed)


NAMED = {
    share_without_counting: "owners",
    stale_hash_entry: "closed|stale",
    half_stale_hash_entry: "stale entry",
    row_kept: "rows leaked",
    blocks_kept: "owners",
}


@pytest.mark.parametrize("mutate", NAMED, ids=lambda f: f.__name__)
def test_check_integrity_names_the_broken_rule(
    depth: int, mutate: Callable, monkeypatch: pytest.MonkeyPatch
):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=NAMED[mutate]):
        for seed in SEEDS:
            workload(depth, seed)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 90), k=length)


def busy(depth: int, **settings: Any) -> Host:
    """Samples, beams, text and logprobs, some running, some swapped, some waiting."""
    host = Host(
        depth, **{"swap_space_gib": 4 / 1024, "swap_min_tokens": 0, "num_blocks": 20, **settings}
    )
    host.add_samples(prompt(10), 3, max_tokens=9)
    host.add_beams(prompt(7, 1), 1, 9)
    host.add([*prompt(10), 5], 12, text=TextStream(Letters(), stop=["never"]), salt="a")
    host.add(prompt(9, 3), 8, prompt_logprobs=0)
    for _ in range(5):
        host.step()
    host.engine.replicas[0].queues.preempt(list(host.engine.replicas[0].queues.running)[-1])
    return host


def outcome(host: Host) -> dict[str, list]:
    """What the unfinished requests come to."""
    requests = dict(host.engine.requests)
    host.run()
    return {
        name: request.results()
        if isinstance(request, BeamSearch)
        else [seq.token_ids for seq in request.sequences]
        for name, request in requests.items()
    }


def tokens_of(state: EngineState) -> list[list[int]]:
    return [list(seq.token_ids) for request in state.requests.values() for seq in request.sequences]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_probability_that_is_nan_ends_its_sequence_alone(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(depth)
    bad, good = host.add(prompt(5), 6), host.add(prompt(6, 1), 6)
    commit = engine.commit

    def spoiled(queues: Queues, plan: Plan, result: StepResult) -> Committed:
        drawing = [entry.seq for entry in plan.entries if entry.draws]
        for seq, logprobs in zip(drawing, result.logprobs, strict=True):
            if seq is bad and seq.num_generated == 2:
                logprobs[0] = math.nan
        return commit(queues, plan, result)

    monkeypatch.setattr(engine, "commit", spoiled)
    host.run()
    assert isinstance(bad.error, NotFiniteError) and len(generated(bad)) == 2
    check_ended(host, good)


@pytest.mark.parametrize("steps", [1, 7, 30])
def test_restored_and_run_on(depth: int, steps: int):
    """The same tokens as without a restore, whatever was in flight then; a snapshot is a value and
    serves twice.
    """
    want, host = outcome(busy(depth)), busy(depth)
    state = host.engine.snapshot()
    before = tokens_of(state)
    for seed in (11, 12):
        late = host.add(prompt(13, seed), 4)
        for _ in range(steps):
            host.step()
        assert steps > 1 or len(host.engine.in_flight) == depth - 1
        host.engine.restore(state)
        host.check()
        assert list(host.engine.requests) == list(state.requests) and not host.engine.in_flight
        assert host.engine.abort(late.request_id) is None and tokens_of(state) == before
    assert outcome(host) == want
    host.engine.restore(state)
    assert outcome(host) == want and tokens_of(state) == before


def test_what_was_merely_cached_is_not_restored(depth: int):
    """A snapshot keeps the content of blocks in use: those that were free are not found, whatever
    is in them now.
    """
    host = Host(depth)
    host.generate(prompt(12))
    running = host.add(prompt(9, 1))
    host.step()
    state = host.engine.snapshot()
    assert len(host.found(host.sequence(prompt(12)))) == 2  # taking one does not change the engine
    host.engine.restore(state)
    assert host.found(host.sequence(prompt(12))) == []
    assert host.found(host.sequence(prompt(9, 1))) == list(running.block_tables[0][:2])
    assert host.generate(prompt(12))[0].num_cached == 0


def test_a_restore_that_fails_has_gone_back_all_the_same(depth: int):
    host = busy(depth)
    state, want = host.engine.snapshot(), outcome(busy(depth))
    for _ in range(4):
        host.step()
    host.runner.fail = {("write_blocks", host.runner.calls["write_blocks"])}
    with pytest.raises(RuntimeError, match="write_blocks fails"):
        host.engine.restore(state)
    assert host.blocks.num_used == 0 and list(host.engine.requests) == list(want)
    assert outcome(host) == want


def test_an_idle_engine_holds_no_sequence() -> None:
    """Also where windows have blocks of the last plan given back."""
    host = Host(depth=2, windows=(None, 8))
    held = [weakref.ref(host.add(range(1, 20))) for _ in range(3)]
    host.run()
    host.step()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
