"""Replicas that step together: each request as if alone, one phase a step, few of them idle."""

import itertools
import random
from typing import Any

import pytest

from jpaged.engine.policy import MOST_IN_A_ROW, SLACK
from jpaged.engine.sequence import Request, Sequence, Status
from jpaged.errors import RequestError
from tests.engine.host import CheckedEngine, Host
from tests.engine.mock import ROOTS, MockReplicas, expected, generated
from tests.engine.test_interrupts import interrupted

GUESSING: dict[str, Any] = {"num_tokens": 3, "adaptive": False}


class Team(Host):
    """A Host of replicas."""

    def __init__(self, count: int, depth: int = 1, *, shares_blocks: bool = True, **settings: Any):
        super().__init__(depth, **settings)
        self.device = MockReplicas(
            self.config, count, shares_blocks=shares_blocks, windows=self.windows
        )
        self.engine = CheckedEngine(self.config, self.device, num_replicas=count, depth=depth)

    @property
    def loads(self) -> list[int]:
        return self.engine._router.loads

    def check(self) -> None:
        for replica, runner in zip(self.engine.replicas, self.device.runners, strict=True):
            self.check_replica(replica, runner)
        requests = self.engine.requests
        assert set(self.engine._router._placed) == set(requests)
        assert sum(self.loads) == sum(
            r.max_sequences * r.sequences[0].end for r in requests.values()
        )

    def run(self) -> list[Sequence]:
        ended = super().run()
        assert all(replica.blocks.num_used == 0 for replica in self.engine.replicas)
        assert not any(self.loads)
        return ended

    def where(self, seq: Sequence) -> int:
        return self.engine._router.replica_of(seq.request)


def check_phases(team: Team) -> None:
    """In every step there is one phase, and somebody has work in it."""
    assert all(any(busy) for _, busy in team.device.phases)
    idle = sum(not own for phase, busy in team.device.phases if phase != "draft" for own in busy)
    assert team.engine.stats.idle_replica_steps == idle


def traffic(team: Team, seed: int, count: int = 24) -> list[Sequence]:
    """Requests of every kind, some of them while others run."""
    rng, seqs = random.Random(seed), list[Sequence]()
    for _ in range(count):
        prompt = rng.choice([[], *ROOTS]) + rng.choices(range(1, 90), k=rng.randint(1, 20))
        kind = rng.random()
        if kind < 0.15:
            team.add_beams(prompt, rng.randint(1, 3), max_tokens=rng.randint(1, 6))
        elif kind < 0.35:
            seqs += team.add_samples(prompt, rng.randint(2, 3), rng.randint(1, 9))
        else:
            wanted = 1 if rng.random() < 0.2 else None
            seqs.append(team.add(prompt, rng.randint(1, 12), prompt_logprobs=wanted))
        for _ in range(rng.choice((0, 0, 1, 4))):
            team.step()
    return seqs


KINDS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "crowded": {"num_blocks": 16},
    "swapping": {"num_blocks": 16, "swap_space_gib": 0.05, "swap_min_tokens": 0},
    "mixed": {"mixed": True},
    "several steps": {"decode_steps": 3},
    "pinned": {"deterministic": True},
    "windows": {"windows": (None, 7)},
    "guessing": {"speculative": GUESSING},
    "guessing, crowded": {"speculative": GUESSING, "num_blocks": 16, "mixed": True},
    "guessing, pinned": {"speculative": GUESSING, "deterministic": True},
    "guessing by a model": {"speculative": {**GUESSING, "method": "draft"}},
    "guessing by a model, crowded": {
        "speculative": {**GUESSING, "method": "draft"},
        "num_blocks": 16,
    },
    "guessing, several steps": {"speculative": GUESSING, "decode_steps": 3},
}


def kinds_by_count() -> list[Any]:
    """Return all kinds with 2, 3 and 4 replicas: a few of two are quick, and of three and four the
    middle set has one a kind, by turns.
    """
    pairs = list[Any]()
    for (turn, kind), count in itertools.product(enumerate(KINDS), (2, 3, 4)):
        is_quick = count == 2 and kind in ("crowded", "swapping", "mixed")
        mark = pytest.mark.middle if count in (2, 3 + turn % 2) else pytest.mark.slow
        pairs.append(pytest.param(count, kind, marks=() if is_quick else mark))
    return pairs


@pytest.mark.parametrize(("count", "kind"), kinds_by_count())
def test_each_request_is_as_if_alone(count: int, kind: str, depth: int) -> None:
    """Host and check_ended compare every one with what the mock model gives alone."""
    team = Team(count, depth, **KINDS[kind])
    for seed in range(3):
        seqs = traffic(team, seed)
        team.run()
        for seq in seqs:
            assert seq.error is not None or generated(seq) == expected(seq, team.windows)
    check_phases(team)
    assert len(team.engine.replicas) == count
    assert all(runner.dispatched for runner in team.device.runners), "all of them work"
    if "speculative" in KINDS[kind]:
        report = team.engine.report()
        assert 0 < report["accepted_tokens"] < report["drafted_tokens"]


def test_replicas_guess_together(depth: int) -> None:
    """In steps that are fewer; one whose rows have no draft goes on by a token beside it."""
    plain, team = Team(2, depth), Team(2, depth, speculative=GUESSING)
    found: list[Any] = []
    for each in (plain, team):
        seqs = [each.add([1, 2, 3, i], 30) for i in range(3)]
        each.run()
        found.append([seq.token_ids for seq in seqs])
    assert found[0] == found[1]
    report = team.engine.report()
    assert 0 < report["accepted_tokens"] < report["drafted_tokens"]
    assert len(team.device.phases) < len(plain.device.phases) * 3 // 4
    assert report["verify_steps"] > 0


def run_prototype(count: int) -> float:
    """The idle share of what the prototype ran: 8 requests a replica of uneven lengths."""
    team = Team(count, 2, max_num_seqs=8, num_blocks=97)
    rng = random.Random(0)
    for i in range(8 * count):
        team.add(rng.choices(range(1, 90), k=3 + (7 * i) % 29), 8 + 5 * (i % 5), ignore_eos=True)
    team.run()
    check_phases(team)
    return team.engine.stats.idle_replica_steps / (count * len(team.device.phases))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_few_are_idle(count: int) -> None:
    share = run_prototype(count)
    print(f"{count} replicas: {share:.1%} of their steps idle")
    assert share <= 0.15


@pytest.mark.parametrize("longest", [12, 60])
def test_few_are_idle_while_requests_keep_coming(longest: int) -> None:
    """Rows that become free at other times in each replica: a prefill waits for company. (22% and
    30% are idle where it does not.)
    """
    team, rng = Team(4, 2, max_num_seqs=8, num_blocks=200), random.Random(1)
    for _ in range(80):
        prompt = rng.choices(range(1, 90), k=rng.randint(3, longest))
        team.add(prompt, rng.randint(6, 40), ignore_eos=True)
    team.run()
    share = team.engine.stats.idle_replica_steps / (4 * len(team.device.phases))
    print(f"prompts of up to {longest} tokens: {share:.1%} of the steps idle")
    assert share <= 0.15


@pytest.mark.parametrize("prompts", [1, 3])
def test_no_phase_waits_long(prompts: int) -> None:
    """Long prompts beside rows that decode, fewer or more than those: none has all the steps."""
    team = Team(4, max_num_batched_tokens=16)
    for _ in range(4 - prompts):
        team.add(range(1, 5), 80, ignore_eos=True)
    for i in range(prompts):
        team.add(range(1 + i, 100), 2)
    team.run()
    phases = "".join(phase[0] for phase, _ in team.device.phases)
    within = phases[1 : phases.rindex("p")]  # in the first step all have a prompt
    longest = MOST_IN_A_ROW["decode" if prompts == 1 else "prefill"]
    waits = within.replace("p" if prompts == 1 else "d", " ").split()
    assert max(map(len, waits)) == longest, phases


# Who goes where


def test_samples_stay_together_and_loads_are_even() -> None:
    team = Team(4, max_num_seqs=8)
    rng = random.Random(2)
    for _ in range(40):
        seqs = team.add_samples(rng.choices(range(1, 90), k=3), 2, rng.randint(4, 12))
        assert len({team.where(seq) for seq in seqs}) == 1
    assert max(team.loads) - min(team.loads) <= 2 * 15, "the largest request"
    team.run()


def test_equal_prefixes_go_to_one_replica() -> None:
    """Groups of equal prompts that come in any order: what one engine finds in its cache, these
    find nearly as often, and the loads stay even.
    """
    rng = random.Random(3)
    roots = [rng.choices(range(1, 90), k=40) for _ in range(12)]
    wanted = [(root, rng.choices(range(1, 90), k=2)) for root in roots for _ in range(8)]
    rng.shuffle(wanted)
    found = {}
    for count in (1, 4):
        team = Team(count, max_num_seqs=32, num_blocks=700, max_num_batched_tokens=64)
        for root, own in wanted:
            team.add(root + own, 4, ignore_eos=True)
        assert max(team.loads) <= 1.3 * sum(team.loads) / count
        team.run()
        found[count] = team.engine.stats.cached_tokens
    assert found[1] == (len(wanted) - len(roots)) * 40
    assert found[4] >= 0.8 * found[1]


def test_one_prefix_of_all_does_not_crowd_one_replica() -> None:
    team = Team(4, max_num_seqs=8, num_blocks=200)
    for i in range(64):
        team.add([*ROOTS[0], i + 1], 8)
    whole, own = sum(team.loads), len(ROOTS[0]) + 1 + 8
    assert whole == 64 * own and max(team.loads) <= SLACK * whole / 4 + len(ROOTS[0]) + own
    assert min(team.loads) > whole / 4 / 2
    team.run()


def test_places_are_remembered_as_long_as_blocks_may_be() -> None:
    team = Team(2, num_blocks=4, max_num_seqs=4)
    for i in range(1, 30):
        team.add([i] * 9, 1)
        team.run()
    assert len(team.engine._router._holders) == 2 * 4


# One engine's promises


def test_ids_aborts_and_what_is_unfinished() -> None:
    team = Team(3)
    seqs = [team.add([1, 2, i], 6, request_id=f"r{i}") for i in range(6)]
    assert sorted(team.engine.requests) == [f"r{i}" for i in range(6)]
    assert {team.where(seq) for seq in seqs} == {0, 1, 2}
    with pytest.raises(RequestError, match="'r4' is in use"):
        team.add([5], request_id="r4")
    team.step()
    aborted = team.engine.abort("r4")
    assert aborted is not None and aborted.sequences == [seqs[4]]
    assert team.engine.abort("r4") is None and "r4" not in team.engine.requests
    team.check()
    team.run()
    assert [seq.finish_reason for seq in seqs] == ["length"] * 4 + ["abort", "length"]


@pytest.mark.parametrize(
    "method", ["dispatch", "fetch", "read_blocks", "fetch_blocks", "write_blocks"]
)
def test_a_failed_step_is_computed_again(method: str, depth: int) -> None:
    team = Team(2, depth, **KINDS["swapping"])
    failures = 0
    seqs = [team.add(range(1, 14 + i), 16, ignore_eos=True) for i in range(8)]
    team.device.runners[1].fail = {(method, 0)}
    while team.engine.has_unfinished():
        try:
            team.step()
        except RuntimeError as e:
            assert str(e) == f"{method} fails"
            failures += 1
            team.check()
    assert failures == 1
    assert all(generated(seq) == expected(seq, team.windows) for seq in seqs)


@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(997, id="few", marks=pytest.mark.middle),
        pytest.param(37, id="some", marks=pytest.mark.slow),
    ],
)
def test_interrupted_on_any_line(depth: int, stride: int) -> None:
    """Whoever goes on gets every stream; whoever aborts instead leaves nothing behind."""
    for line in itertools.count(0, stride):
        hit = False
        for goes_on in (True, False):
            team = Team(2, depth, num_blocks=6, max_num_batched_tokens=8)
            seqs, hit = interrupted(team, line)
            for seq in seqs:
                if not goes_on:
                    team.engine.abort(seq.request_id)
                elif seq.request_id not in team.engine.requests and not seq.finish_reason:
                    team.engine.add(Request([seq]))
            assert goes_on or (not team.engine.has_unfinished() and team.engine.step() == []), line
            team.run()
            for seq in seqs if goes_on else ():
                assert seq.status is Status.FINISHED and generated(seq) == expected(seq), line
        if not hit:
            assert line > 1000
            return


def test_a_snapshot_is_of_all(depth: int) -> None:
    team = Team(2, depth, **KINDS["swapping"])
    for i in range(8):
        team.add(range(1, 14 + i), 16, ignore_eos=True, request_id=f"r{i}")
    for _ in range(9):
        team.step()
    state, results = team.engine.snapshot(), []
    for _ in range(2):
        ended = {seq.request_id: generated(seq) for seq in team.run()}
        results.append(ended)
        team.engine.restore(state)
        team.check()
    team.run()
    assert results[0] == results[1] and len(results[0]) == 8


def test_blocks_add_up() -> None:
    team = Team(2, swap_space_gib=0.5)
    team.add(range(1, 10), 4)
    team.step()
    report = team.engine.report()
    assert report["num_blocks"] == 64 and report["host_blocks"] == 512
    assert report["blocks_in_use"] == report["kv_groups"][0]["in_use"] == 3
    assert report["dispatches"] == 1 and report["idle_replica_steps"] == 1
    team.engine.abort("0")
    assert not team.engine.requests


def test_a_request_of_another_replica_is_found() -> None:
    """`requests` is what streams look into: by identity."""
    team = Team(2)
    seqs = [team.add([1, i], 3) for i in range(4)]
    found = team.engine.requests
    assert all(found[seq.request_id] is seq.request for seq in seqs)
    assert isinstance(found["0"], Request)
    team.run()
