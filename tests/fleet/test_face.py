"""FleetLLM over replicas that die at any moment: every request is answered once, with the tokens
that one engine draws, or has a typed error; updates reach all replicas or none.
"""

import asyncio
import collections
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jpaged import CheckpointError, RequestError, SamplingParams
from jpaged.engine.cache.prefix_cache import digest
from jpaged.engine.origin import Origin
from jpaged.errors import ReplicaError
from jpaged.fleet.face import FleetLLM
from jpaged.fleet.holdings import Holdings, Report
from jpaged.fleet.passed_on import PassedOn
from jpaged.fleet.replica import Changed, Description, Job, Piece, Served
from jpaged.fleet.router import Ask, Router
from jpaged.request.inputs import Prompt
from jpaged.request.outputs import CompletionChunk, RequestOutput, WeightSpan, completion
from tests.fleet.local import Killer, LocalReplicas
from tests.tiny import ENGINE, config

MODEL = config(max_position_embeddings=256)
SIZE = 4
FACTS = Description(
    model=MODEL,
    engine=dataclasses.replace(ENGINE, block_size=SIZE, max_model_len=256).resolve(MODEL),
    fixed={},
)


def drawn(ids: tuple[int, ...], index: int, at: int) -> int:
    """The token that a request draws at a place, on any replica."""
    return hash((ids, index, at)) % 100


class EchoReplica:
    """Draws `drawn`, two tokens a piece, and goes on where an earlier replica was cut. It counts
    what it runs, and tells of the prompts that it has seen. broken: a folder that cannot be read.
    """

    def __init__(self, name: str, broken: str = ""):
        self.name, self.served, self.broken, self.is_paused = name, Served(), broken, False
        self.held, self.holdings = set[int](), Holdings()
        self.ran, self.begun = list[tuple[int, ...]](), 0

    async def answer(self, job: Job) -> AsyncIterator[Piece]:
        yield Piece(self.name, [])
        await self.serve(job.served)
        ids, params = job.prompt.ids, job.params
        self.ran.append(ids)
        self.begun += job.prompt.begun is not None
        if ids[0] == 66:
            yield Piece(self.name, [RequestError("66 is refused")])
            return
        known = job.prompt.begun
        had = [list(o.token_ids) for o in known.outputs] if known else [[] for _ in range(params.n)]
        tokens, most = [list(x) for x in had], params.max_tokens or 1
        for at in range(0, most, 2):
            items: list[Any] = []
            for index in range(params.n):
                if at + 2 <= len(had[index]):
                    continue
                end, start = min(at + 2, most), len(tokens[index])
                tokens[index] += [drawn(ids, index, i) for i in range(start, end)]
                fresh = tokens[index][0 if at <= len(had[index]) < at + 2 else start :]
                items.append(chunk(index, fresh, len(tokens[index]), end == most))
            if items:
                await asyncio.sleep(0.001)
            if items and job.streaming:
                yield Piece(self.name, items)
        await asyncio.sleep(0.001)
        outputs = [completion(i, x, [0.0] * most, "length", text="") for i, x in enumerate(tokens)]
        done = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[*ids], outputs=outputs)
        yield Piece(self.name, [done])
        key = None
        for i in range((len(ids) - 1) // SIZE):
            part = b"".join(t.to_bytes(4, "little") for t in ids[SIZE * i : SIZE * (i + 1)])
            key = digest(key, part)
            self.held.add(key)
        self.holdings.update(self.held)
        report = self.holdings.report(job.router, whole=self.name in job.unsure)
        if report is not None:
            yield Piece(self.name, [], report)

    async def serve(self, served: Served, mode: str = "keep") -> Changed:
        if served.serial > self.served.serial:
            if served.weights is not None and served.weights == self.broken:
                raise CheckpointError(f"{served.weights}: damaged")
            self.served = served
            return Changed(seconds=0.5, num_bytes=1000)
        return Changed(seconds=0.0, num_bytes=0)

    async def embed(self, served: Served, prompts: list[Any], options: Any) -> str:
        await asyncio.sleep(0.002)
        return f"{prompts} {options['dimensions']}"

    async def pause(self, mode: str) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def stats(self) -> dict[str, Any]:
        return {"decode_tokens": len(self.ran), "num_blocks": 7, "weight_version": 1}

    async def close(self) -> None:
        """Nothing is left."""


def chunk(index: int, ids: list[int], end: int, is_last: bool) -> CompletionChunk:
    return CompletionChunk(
        request_index=0,
        index=index,
        text_delta="".join(map(chr, ids)),
        token_ids_delta=ids,
        finish_reason="length" if is_last else None,
        token_logprobs_delta=[0.0] * len(ids),
        weight_versions_delta=[WeightSpan(1, end - len(ids), end)],
    )


def fleet(
    count: int = 3,
    dies_after: Callable[[Job], int | None] = lambda job: None,
    make: Callable[[str], Any] = EchoReplica,
    **settings: Any,
) -> tuple[FleetLLM, LocalReplicas]:
    replicas = LocalReplicas(make, count, dies_after=dies_after)
    return FleetLLM(replicas, FACTS, None, **settings), replicas


async def ask(
    llm: FleetLLM, ids: list[int], params: SamplingParams, *, streaming: bool, **origin: Any
) -> tuple[list[list[int]], Any]:
    """The tokens of the pieces, by completion, and what it comes to."""
    pieces = [list[int]() for _ in range(params.n)]
    asked = Origin(**origin)
    async with llm.run([ids], params, streaming=streaming, origin=asked) as inbox:
        while True:
            for _, item in await inbox.take():
                if not isinstance(item, CompletionChunk):
                    return pieces, item
                assert item.text_delta == "".join(map(chr, item.token_ids_delta))
                spans = item.weight_versions_delta
                assert [s.end - s.start for s in spans] == [len(item.token_ids_delta)] * len(spans)
                pieces[item.index] += item.token_ids_delta


def expected(ids: list[int], params: SamplingParams) -> list[list[int]]:
    most = params.max_tokens or 1
    return [[drawn(tuple(ids), i, at) for at in range(most)] for i in range(params.n)]


def test_every_request_is_answered_once_whoever_dies() -> None:
    """Replicas are killed every few milliseconds, and once the router forgets all that it knew."""

    async def run() -> None:
        llm, replicas = fleet(max_retries=50)
        killer = Killer(replicas, 0.01)
        killing = asyncio.create_task(killer.run())

        async def one(i: int) -> None:
            params = SamplingParams(max_tokens=5 + i % 7, n=1 + i % 3)
            ids = [1, 2, 3, 4, 5, 6, 7, 8, i % 5, i]
            await asyncio.sleep(i % 20 * 0.003)
            if i == 40:
                replicas.router = llm.router = Router(seed=1)
            pieces, output = await ask(llm, ids, params, streaming=bool(i % 2))
            assert isinstance(output, RequestOutput), output
            assert [o.token_ids for o in output.outputs] == expected(ids, params)
            assert not i % 2 or pieces == expected(ids, params)

        await asyncio.gather(*map(one, range(80)))
        killing.cancel()
        assert killer.count > 3 and llm.stats()["requests_retried"] > 3
        await asyncio.sleep(0.02)
        llm.router.check()
        assert llm.router.stats()["router_load_max"] == 0 and not llm._running
        await llm.close()

    asyncio.run(run())


def test_a_stream_goes_on_after_what_was_sent() -> None:
    async def run() -> None:
        deaths = collections.deque([2, 1, None])
        llm, replicas = fleet(2, lambda job: deaths.popleft())
        params = SamplingParams(max_tokens=9, n=2)
        pieces, output = await ask(llm, [1, 2, 3], params, streaming=True)
        assert pieces == expected([1, 2, 3], params)
        assert [o.token_ids for o in output.outputs] == pieces
        ran = [r for r in (*replicas.dead, *replicas.alive.values()) if r.ran]
        assert [len(r.ran) for r in ran] == [1, 1, 1] and sum(r.begun for r in ran) == 2
        await llm.close()

    asyncio.run(run())


def test_a_request_that_kills_replicas_ends_with_a_typed_error() -> None:
    async def run() -> None:
        llm, replicas = fleet(2, lambda job: 0 if job.prompt.ids == (13,) else None, max_retries=2)
        params = SamplingParams(max_tokens=4)
        poison = ask(llm, [13], params, streaming=False)
        (_, bad), (_, good), (_, refused) = await asyncio.gather(
            poison,
            ask(llm, [1, 2], params, streaming=False),
            ask(llm, [66, 2], params, streaming=False),
        )
        assert isinstance(bad, ReplicaError) and "each of the 3 times" in str(bad)
        assert good.outputs[0].token_ids == expected([1, 2], params)[0]
        assert isinstance(refused, RequestError) and len(replicas.dead) == 3
        assert await llm.embed(["a"], dimensions=3) == "['a'] 3"
        await llm.close()

    asyncio.run(run())


def test_requests_go_where_their_prefix_is() -> None:
    async def run() -> None:
        llm, replicas = fleet(4)
        params, homes = SamplingParams(max_tokens=2), dict[int, str]()
        for turn in range(6):
            for talk in range(5):
                ids = [talk, *range(20 + 4 * turn)]
                await ask(llm, ids, params, streaming=False)
                await asyncio.sleep(0.01)
                home = replicas.homes[-1]
                assert homes.setdefault(talk, home) == home
                known = Ask(
                    call="x",
                    tokens=len(ids),
                    keys=llm._job(ids, params, (0, 0), False, None)[1].keys,
                    ends=range(4, 4 * ((len(ids) - 1) // 4) + 1, 4),
                )
                assert llm.router.held(known, home) == (len(ids) - 1) // 4 * 4
        assert not llm.router.unsure
        assert len(set(homes.values())) > 1
        keys = [
            llm._job(p, params, (0, 0), False, None)[1].keys
            for p in ([1] * 9, {"prompt_token_ids": [1] * 9, "cache_salt": "a"})
        ]
        assert len(keys[0]) == 2 and not set(keys[0]) & set(keys[1]), "a salt is part of the keys"
        await llm.close()

    asyncio.run(run())


def test_weights_reach_all_replicas_or_none() -> None:
    async def run() -> None:
        makes = iter(["", "/broken", "", ""])
        llm, replicas = fleet(3, make=lambda name: EchoReplica(name, next(makes)))
        told = await llm.update_params("/new")
        assert told == {"replicas": 3, "seconds": 0.5, "bytes": 3000} and llm.weight_version == 2
        with pytest.raises(CheckpointError, match="damaged"):
            await llm.update_params("/broken")
        served = [r.served for r in replicas.alive.values()]
        assert [(s.weights, s.version) for s in served] == [("/new", 2)] * 3
        assert llm.weight_version == 2
        await llm.add_adapter("sql", "/sql")
        replicas.kill(sorted(replicas.alive)[0])
        for i in range(12):  # also who has started since
            await ask(llm, [i, i], SamplingParams(max_tokens=1), streaming=False)
        ran = [r for r in replicas.alive.values() if r.ran]
        assert len(ran) == 3
        assert {r.served.weights for r in ran} == {"/new"}
        assert all("sql" in r.served.adapters for r in ran) and llm.adapters == {"sql"}
        with pytest.raises(RequestError, match="'none' is unknown"):
            await llm.remove_adapter("none")
        await llm.close()

    asyncio.run(run())


def test_a_pause_holds_what_comes_and_a_refusal_names_what_runs() -> None:
    async def run() -> None:
        llm, replicas = fleet(2)
        await llm.pause()
        assert all(r.is_paused for r in replicas.alive.values())
        waiting = asyncio.create_task(
            ask(llm, [1, 2], SamplingParams(max_tokens=3), streaming=True)
        )
        await asyncio.sleep(0.02)
        assert not waiting.done() and not replicas.homes
        with pytest.raises(RequestError, match="1 requests are unfinished"):
            await llm.update_params("/new")
        with pytest.raises(RequestError, match="paused"):
            await llm.update_params("/new", mode="wait")
        await llm.update_params("/new", mode="keep")
        await llm.resume()
        pieces, _ = await waiting
        assert pieces == expected([1, 2], SamplingParams(max_tokens=3))
        await llm.gather()
        replicas.kill(replicas.homes[0])
        await llm.gather()
        stats = llm.stats()
        assert (stats["decode_tokens"], stats["num_blocks"], stats["replicas"]) == (1, 14, 2)
        await llm.close()

    asyncio.run(run())


def test_other_tokens_than_those_that_were_sent_are_no_answer() -> None:
    """What cannot go on is run again, and compared."""
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    passed, prompt = PassedOn(params), Prompt(None, (1, 2))
    assert passed.fresh(chunk(0, [5, 6], 2, False)) is not None
    passed.restart()
    assert passed.continued(prompt) is prompt
    assert passed.fresh(chunk(0, [5], 1, False)) is None
    fresh = passed.fresh(chunk(0, [6, 7], 3, False))
    assert fresh is not None and fresh.token_ids_delta == [7] and fresh.text_delta == "\7"
    assert fresh.weight_versions_delta == [WeightSpan(1, 2, 3)]
    passed.restart()
    with pytest.raises(ReplicaError, match="other tokens than the 3"):
        passed.fresh(chunk(0, [5, 9], 2, False))


def test_a_report_of_a_dead_replica_changes_nothing() -> None:
    router = Router(seed=0)
    report = Report(life=1, version=1, since=None, added=frozenset([5]))
    assert router.report("gone", report) and router.stats()["router_keys"] == 0


def test_flags_of_a_fleet_need_one_and_a_fleet_needs_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jpaged.openai.server.run import FLEET_FLAGS, main

    for flag in FLEET_FLAGS:
        value = {"--router": "two", "--replica-resources": "GPU=1"}.get(flag, "1")
        assert main(["--port", "0", flag, value]) == 1
        assert f"{flag} needs --replicas" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("jpaged.fleet.on_ray", "jpaged.fleet.cluster"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["--port", "0", "--replicas", "2"]) == 1
    assert "pip install 'jpaged[ray]'" in capsys.readouterr().err
