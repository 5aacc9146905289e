"""Random histories over the mock device: whatever happens, every stream and every beam search ends
as if alone.
"""

from collections import Counter
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.engine import EngineState
from jpaged.engine.origin import Origin
from jpaged.engine.scoring import Scoring
from jpaged.engine.sequence import Request, Status
from jpaged.search.beam import BeamSearch
from tests.engine.host import (
    CheckedScheduler,
    CountedBlocks,
    CountedQueues,
    Host,
    check_ended,
    check_search,
)
from tests.engine.mock import ROOTS, Window

ADAPTERS = st.sampled_from(
    [None] * 4 + [AdapterVersion(name=str(i), version=i, rank=1, data=None) for i in range(1, 6)]
)
SALTS = st.sampled_from([None, None, None, "a", "b"])
ORIGINS = st.sampled_from(
    [None, *(Origin(party=p, call=c, leaves_rows=p == "a") for p in "ab" for c in "xyz")]
)
PRIORITIES = st.sampled_from([0, 0, 0, -1, 5])


# Of the groups of layers. The mock's KV of a token follows from that of the one before it: windows
# are of 2 tokens at least.
WINDOWS: list[tuple[Window, ...]] = [
    *((None,), (None, 5), (None, 9), (6,), (3, None)),
    *((None, "state"), ("state",), ("state", None)),
]


class Saved(NamedTuple):
    """A snapshot, and what the machine knew when it was taken."""

    state: EngineState
    tokens: dict[str, list[list[int]]]
    ended: list[list[int]]
    used: int
    era: int
    oldest_kv: int


def tokens_of(requests: dict[str, Request]) -> dict[str, list[list[int]]]:
    return {
        name: [list(seq.token_ids) for seq in request.sequences]
        for name, request in requests.items()
    }


class HostMachine(RuleBasedStateMachine):
    """Any history of requests of all kinds, steps, aborts, preemptions, failures and returns, with
    too small a pool.
    """

    depth: int
    seen: Counter[str]

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(6, 16),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 24),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        host_blocks=st.sampled_from([0, 1, 2, 4, 8, 32]),
        swap_min_tokens=st.sampled_from([0, 0, 6]),
        decode_steps=st.sampled_from([1, 1, 2, 5]),
        mixed=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        windowed_blocks=st.sampled_from([None, 3, 6]),
        max_loras=st.integers(1, 3),
        num_drafts=st.sampled_from([0, 0, 1, 3, 6]),
        method=st.sampled_from(["ngram", "draft"]),
    )
    def start(self, host_blocks: int, num_drafts: int, method: str, **settings: Any) -> None:
        space: dict[str, Any] = {"swap_space_gib": host_blocks / 1024, "max_logprobs": 12}
        # The mock's draft model has the last group.
        if num_drafts and (method == "ngram" or settings["windows"][-1] != "state"):
            how = {"method": method, "num_tokens": num_drafts, "adaptive": False}
            space["speculative"] = how
        self.host = Host(self.depth, max_model_len=40, **space, **settings)
        self.given_back_before = CountedBlocks.given_back
        self.mixed_before = CheckedScheduler.mixed
        self.live: list[Request] = []
        self.ended: list[list[int]] = []  # tokens that a next turn may start with
        self.saved: Saved | None = None
        self.forks_before = Counter(CountedQueues.forks)

    def added(self, before: int) -> None:
        self.live += list(self.host.engine.requests.values())[before:]

    @rule(
        root=st.integers(0, 1),
        length=st.integers(0, 14),
        tails=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
        times=st.sampled_from([1, 1, 2, 3]),
        salt=SALTS,
        max_tokens=st.integers(1, 12),
        eos_every=st.sampled_from([100, 12, 6]),
        stop_ids=st.sampled_from([(), (), (7, 8, 9, 10)]),
        min_tokens=st.sampled_from([0, 0, 0, 2]),
        scored=st.sampled_from([False, False, False, True]),
        n=st.sampled_from([1, 1, 2, 3, 4]),
        adapter=ADAPTERS,
        origin=ORIGINS,
        priority=PRIORITIES,
    )
    def add(
        self,
        root,
        length,
        tails,
        times,
        salt,
        max_tokens,
        eos_every,
        stop_ids,
        min_tokens,
        scored,
        n,
        adapter,
        origin=None,
        priority=0,
    ) -> None:
        """Requests of n samples with a prefix in common, or the same one several times."""
        options: dict[str, Any] = {"prompt_logprobs": 0} if scored else {}
        options |= {
            "stop_token_ids": stop_ids,
            "min_tokens": min(min_tokens, max_tokens),
            "salt": salt,
            "adapter": adapter,
            "origin": origin,
            "priority": priority,
        }
        options["eos_ids"] = frozenset(
            range(3, 100, eos_every)[:12]
        )  # as many as can be banned with the stop ids
        before = len(self.live)
        for tail in tails if times == 1 else tails[:1] * times:
            self.host.add_samples([*ROOTS[root][:length], *tail], n, max_tokens, **options)
        self.added(before)

    @rule(
        root=st.integers(0, 1),
        length=st.integers(1, 14),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        early_stopping=st.sampled_from([True, False, "never"]),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
        num_eos=st.sampled_from([0, 1, 3]),
        salt=SALTS,
        adapter=ADAPTERS,
        origin=ORIGINS,
        priority=PRIORITIES,
    )
    def add_beams(
        self, root, length, width, max_tokens, early_stopping, length_penalty, num_eos, **how
    ) -> None:
        before = len(self.live)
        eos_ids = frozenset(range(3, 100, 8)[:num_eos])
        options = {
            "early_stopping": early_stopping,
            "length_penalty": length_penalty,
            "eos_ids": eos_ids,
        }
        self.host.add_beams(ROOTS[root][:length], width, max_tokens, **how, **options)
        self.added(before)

    @precondition(lambda self: self.ended)
    @rule(
        which=st.integers(0, 99),
        cut=st.integers(0, 2),
        tail=st.lists(st.integers(1, 3), max_size=2),
        salt=SALTS,
        adapter=ADAPTERS,
        origin=ORIGINS,
        priority=PRIORITIES,
    )
    def go_on(self, which: int, cut: int, tail: list[int], **how: Any) -> None:
        """A next turn: the prompt is what an earlier request ended with."""
        tokens = self.ended[which % len(self.ended)]
        tokens = [*tokens[: max(len(tokens) - cut, 1)], *tail]
        if len(tokens) < 39:
            self.live.append(self.host.add(tokens, 6, **how).request)

    @rule(
        length=st.integers(1, 20),
        first=st.integers(0, 19),
        root=st.integers(0, 1),
        adapter=ADAPTERS,
    )
    def score(self, length: int, first: int, root: int, adapter: AdapterVersion | None) -> None:
        scoring = Scoring(first=min(first, length - 1))
        how: dict[str, Any] = {"prompt_logprobs": 0, "scoring": scoring, "adapter": adapter}
        self.live.append(self.host.add(ROOTS[root][:length], 1, **how).request)

    def stepped(self, count: int) -> None:
        for _ in range(count):
            self.host.step()
            for request in [r for r in self.live if r.request_id not in self.host.engine.requests]:
                self.live.remove(request)
                self.settle(request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.stepped(count)

    @rule(count=st.integers(5, 12))
    def many_steps(self, count: int) -> None:
        self.stepped(count)

    def settle(self, request: Request) -> None:
        assert request.is_finished
        if isinstance(request, BeamSearch):
            check_search(self.host, request)
        else:
            for seq in request.sequences:
                check_ended(self.host, seq)
                self.host.check_versions(seq)
        self.ended.append(list(request.sequences[-1].token_ids))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        request = self.live.pop(which % len(self.live))
        had_ended = [
            seq for seq in request.sequences if seq.status is Status.FINISHED
        ]  # maybe in a step that failed
        assert self.host.engine.abort(request.request_id) is request
        assert all(
            seq.finish_reason == "abort" for seq in request.sequences if seq not in had_ended
        )
        self.settle(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def cut_and_go_on(self, which: int) -> None:
        """The request of an output that was cut: it ends as it would have."""
        request = self.live[which % len(self.live)]
        if isinstance(request, BeamSearch) or request.sequences[0].score_only:
            return
        self.live.remove(request)
        self.host.engine.abort(request.request_id)
        self.settle(request)
        if request.error is None:
            self.live.append(self.host.go_on(request))
            self.seen["cut and gone on"] += 1

    @precondition(lambda self: any(len(r.sequences) > 1 for r in self.live))
    @rule(which=st.integers(0, 99))
    def abort_one_sample(self, which: int) -> None:
        """One completion of several: the others go on."""
        seqs = [
            seq
            for r in self.live
            if len(r.sequences) > 1 and not isinstance(r, BeamSearch)
            for seq in r.sequences
        ]
        if seqs and (seq := seqs[which % len(seqs)]).status is not Status.FINISHED:
            self.host.engine.replicas[0].queues.finish(seq, "abort")
            self.seen["samples aborted"] += 1

    @precondition(
        lambda self: hasattr(self, "host") and self.host.engine.replicas[0].queues.running
    )
    @rule(which=st.integers(0, 99), count=st.integers(1, 3))
    def preempt(self, which: int, count: int) -> None:
        scheduler = self.host.engine.replicas[0]
        for _ in range(min(count, len(scheduler.queues.running))):
            scheduler.queues.preempt(
                list(scheduler.queues.running)[which % len(scheduler.queues.running)]
            )

    @rule()
    def reset(self) -> None:
        self.host.reset()
        seqs = [seq for request in self.live for seq in request.sequences]
        assert not any(self.host.blocks.cache.match(seq).contents for seq in seqs)
        assert self.host.store is None or self.host.store.used_bytes == 0

    @rule(recompute=st.booleans())
    def renew(self, recompute: bool) -> None:
        """New weights between two steps, wherever each request stands."""
        for request in self.host.renew(recompute=recompute):
            self.live.remove(request)
            self.settle(request)
        self.seen["new weights, recomputed" if recompute else "new weights, kept"] += 1

    @rule()
    def snapshot(self) -> None:
        engine = self.host.engine
        state = engine.snapshot()
        assert not engine.in_flight
        used, tokens = self.host.blocks.num_used, tokens_of(engine.requests)
        eras = self.host.era, self.host.oldest_kv
        self.saved = Saved(state, tokens, list(self.ended), used, *eras)

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self) -> None:
        """What was added since is gone, what ended since goes on; nothing has changed in the
        snapshot meanwhile.
        """
        assert self.saved is not None
        state, tokens, ended, used, *eras = self.saved
        assert tokens_of(state.requests) == tokens
        was_used = self.host.blocks.num_used
        try:
            self.host.engine.restore(state)
            was_used = used
        # a restore that fails has gone back all the same, to sequences that are computed again
        finally:
            self.live, self.ended = list(self.host.engine.requests.values()), list(ended)
            self.host.era, self.host.oldest_kv = eras
        assert (
            tokens_of(self.host.engine.requests) == tokens and self.host.blocks.num_used == was_used
        )
        for group in self.host.blocks.groups:
            assert all(group.blocks[b].content is None for b in group.free)
        self.seen["restores"] += 1

    @rule(
        method=st.sampled_from(
            ["dispatch", "fetch", "read_blocks", "fetch_blocks", "write_blocks"]
        ),
        during=st.integers(0, 3),
    )
    def fail(self, method: str, during: int) -> None:
        runner = self.host.runner
        runner.fail = {(method, runner.calls[method])}
        try:
            if during == 1:
                self.snapshot()
            elif during == 2 and self.saved is not None:
                self.restore()
            else:
                self.stepped(1)
        except RuntimeError:
            assert self.host.blocks.num_used == 0
            self.seen[f"{method} failed"] += 1
        runner.fail = set()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "host"):
            host = self.host
            host.check()
            assert list(host.engine.requests.values()) == self.live
            assert len(host.engine.in_flight) <= host.engine.in_flight.depth
            for phase, spans in host.runner.dispatched[-6:]:
                assert len(spans) <= host.config.num_rows
                if phase == "prefill":
                    assert sum(e - s for s, e in spans) <= host.config.max_num_batched_tokens
                elif phase == "decode":
                    assert all(e - s <= (host.config.decode_steps or 1) for s, e in spans)

    def teardown(self) -> None:
        if hasattr(self, "host"):
            while self.live:
                self.stepped(1)
            assert self.host.run() == [] and not self.host.engine.has_unfinished()
            stats = self.host.engine.stats
            self.seen += Counter(stats.preemptions) + (CountedQueues.forks - self.forks_before)
            self.seen += Counter(
                {"examples": 1, "engine steps": stats.prefill_steps + stats.decode_steps}
            )
            self.seen["blocks copied"] += stats.copied_blocks
            self.seen["adapters loaded"] += stats.adapter_loads
            if (drafter := self.host.engine.drafter) is not None:
                self.seen["drafted"] += drafter.drafted
                self.seen["accepted"] += drafter.accepted
            given_back = CountedBlocks.given_back - self.given_back_before
            self.seen["blocks given back"] += given_back
            self.seen["mixed steps"] += CheckedScheduler.mixed - self.mixed_before
            self.seen["blocks loaded"] += stats.loaded_blocks


# Both depths together: 300 examples, and, marked slow, 100,000 engine steps.
EXAMPLES = [
    pytest.param(12, 50, 0, id="few"),
    pytest.param(150, 50, 0, id="some", marks=pytest.mark.middle),
    pytest.param(700, 80, 50_000, id="many", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("examples", "steps", "at_least"), EXAMPLES)
def test_any_history(depth: int, examples: int, steps: int, at_least: int):
    machine = type(f"HostMachine{depth}", (HostMachine,), {"depth": depth, "seen": Counter()})
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.filter_too_much,
        ],
    )
    run_state_machine_as_test(machine, settings=settings)
    print(
        f"\ndepth {depth}:",
        ", ".join(f"{count} {name}" for name, count in sorted(machine.seen.items())),
    )
    assert machine.seen["engine steps"] >= at_least


def test_a_row_that_stopped_on_the_device_in_a_mixed_step():
    """It ends in the first of two steps of a decode; before the host knows, a mixed step takes it
    on, after KV that nothing has written. What it draws there counts for nobody.
    """
    machine = type("StoppedMachine", (HostMachine,), {"depth": 2, "seen": Counter()})()
    machine.start(
        block_size=1,
        num_blocks=7,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        enable_prefix_caching=True,
        host_blocks=0,
        swap_min_tokens=0,
        decode_steps=2,
        mixed=True,
        windows=(None,),
        windowed_blocks=None,
        max_loras=1,
        num_drafts=0,
        method="ngram",
    )
    machine.score(adapter=None, length=1, first=0, root=0)
    machine.add(
        adapter=None,
        eos_every=12,
        length=0,
        max_tokens=4,
        min_tokens=0,
        n=1,
        root=0,
        salt=None,
        scored=False,
        stop_ids=(),
        tails=[[1], [1], [1]],
        times=1,
    )
    machine.teardown()
    assert machine.seen["mixed steps"] > 0


def test_a_forked_beam_gives_back_what_its_window_has_left():
    """It was in no plan yet when it needs the block of its next token."""
    machine = type("ForkedMachine", (HostMachine,), {"depth": 2, "seen": Counter()})()
    machine.start(
        block_size=1,
        num_blocks=10,
        max_num_seqs=4,
        max_num_batched_tokens=5,
        enable_prefix_caching=True,
        host_blocks=0,
        swap_min_tokens=0,
        decode_steps=1,
        mixed=False,
        windows=(6,),
        windowed_blocks=6,
        max_loras=3,
        num_drafts=0,
        method="ngram",
    )
    beams: dict[str, Any] = {"adapter": None, "early_stopping": True, "root": 0, "salt": None}
    for length, max_tokens, width, penalty, num_eos in ((11, 5, 1, 1.0, 3), (14, 2, 2, 0.0, 0)):
        machine.add_beams(
            length=length,
            max_tokens=max_tokens,
            width=width,
            length_penalty=penalty,
            num_eos=num_eos,
            **beams,
        )
        if width == 1:
            machine.abort(which=96)
            machine.score(adapter=None, length=12, first=10, root=1)
    machine.many_steps(count=11)
    machine.renew(recompute=True)
    machine.many_steps(count=10)
    machine.renew(recompute=False)
    machine.preempt(count=1, which=46)
    machine.teardown()
