"""FleetReplica: one engine of a fleet, as its front asks it; and what passes between the two."""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.keys import Key
from jpaged.engine.origin import Origin
from jpaged.engine.types import Report as Stats
from jpaged.errors import ConfigError, JpagedError, PeerError
from jpaged.fleet.holdings import MOST_KEYS, Holdings, Report
from jpaged.llm import LLM
from jpaged.models.config import ModelConfig
from jpaged.request.inputs import Prompt, PromptLike
from jpaged.request.outputs import CompletionChunk, RequestOutput, WeightSpan
from jpaged.sampling_params import SamplingParams
from jpaged.session import OnPause, OnUpdate

LOOK_SHARE = 0.02  # of the engine's time that looks at what is held may take
Item = CompletionChunk | RequestOutput | Exception


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What every replica of a fleet is to serve. serial: of this value; a later one is greater.
    weights: the folder of the weights; None: those that replicas begin with. version: of them.
    adapters: the folder of each, and a number that no other adapter of the fleet has had.
    """

    serial: int = 0
    weights: str | None = None
    version: int = 1
    adapters: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request for a replica. adapter: its name; `prompt` has none. key: what it draws from.
    served: what it is to run on, at least. router: who asks, and `unsure`, the replicas of which it
    wants to know all that they hold.
    """

    prompt: Prompt
    adapter: str | None
    params: SamplingParams
    key: Key
    streaming: bool
    origin: Origin | None
    served: Served
    router: str
    unsure: frozenset[str] = frozenset()


class Piece(NamedTuple):
    """What a replica answers, in parts. replica: its name. items: as of AsyncLLM's inbox; an output
    or an error is the last one. report: see holdings.py.
    """

    replica: str
    items: list[Item]
    report: Report | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a front must know of the engines of a fleet. fixed: of GET /status."""

    model: ModelConfig
    engine: EngineConfig
    fixed: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """What became of an update at one replica. seconds: that it took; num_bytes: that were read."""

    seconds: float
    num_bytes: int


class EngineDied(Exception):
    """The engine of a replica runs no more; the request can run elsewhere."""


def adapter_salt(name: str, number: int) -> bytes:
    """Return the shared salt of an adapter of a fleet: 8 bytes that every process derives alike."""
    return hashlib.blake2b(f"{number} {name}".encode(), digest_size=8).digest()


class FleetReplica:
    """name: that the router knows it by. llm: its engine, which is this object's alone. served:
    what it begins with beside its weights. max_keys: see Holdings. Raises what loading adapters
    raises.
    """

    def __init__(
        self, name: str, llm: LLM, served: Served | None = None, *, max_keys: int = MOST_KEYS
    ):
        self._served = served or Served()
        for adapter, (folder, number) in self._served.adapters.items():
            llm.session.served.add_adapter(adapter, folder, adapter_salt(adapter, number))
        self.name, self.llm = name, AsyncLLM(llm)
        self._changing = asyncio.Lock()
        # The fleet's number of each version of the weights that this engine has counted.
        self._versions = {llm.weight_version: 1}
        self._holdings = Holdings(max_keys)
        self._looks_at = 0.0  # when what is held may be looked at again

    async def answer(self, job: Job) -> AsyncIterator[Piece]:
        """Run a request, and yield its pieces as they come. An error of the request is the last
        item. Raises EngineDied.
        """
        yield Piece(self.name, [])
        try:
            await self.serve(job.served)
            prompt = await self.llm.prepare(self._with_adapter, job.prompt, job.adapter)
            run = self.llm.run(
                [prompt],
                job.params,
                streaming=job.streaming,
                origin=job.origin,
                keys=[job.key],
            )
            async with run as inbox:
                is_over = False
                while not is_over:
                    items: list[Item] = [self._for_front(x) for _, x in await inbox.take()]
                    is_over = not isinstance(items[-1], CompletionChunk)
                    if is_over:
                        self._check()
                    yield Piece(self.name, items)
        except (JpagedError, TypeError, ValueError) as e:
            self._check()
            if isinstance(e, PeerError):
                raise EngineDied(str(e)) from e
            yield Piece(self.name, [e])
        report = await self.report(job.router, whole=self.name in job.unsure)
        if report is not None:
            yield Piece(self.name, [], report)

    async def embed(
        self, served: Served, prompts: list[PromptLike], options: dict[str, Any]
    ) -> np.ndarray:
        """Return AsyncLLM.embed of these."""
        await self.serve(served)
        return await self.llm.embed(prompts, **options)

    async def classify(self, served: Served, prompts: list[PromptLike]) -> np.ndarray:
        """Return AsyncLLM.classify of these."""
        await self.serve(served)
        return await self.llm.classify(prompts)

    def _with_adapter(self, llm: LLM, prompt: Prompt, name: str | None) -> Prompt:
        if name is None:
            return prompt
        ready = llm.session.inputs.prompt({"prompt_token_ids": prompt.ids, "adapter": name})
        return dataclasses.replace(prompt, adapter=ready.adapter)

    # What all replicas do at once

    async def serve(self, served: Served, mode: OnUpdate = "keep") -> Changed:
        """Have what the fleet is to serve: weights and adapters. Raises what reading them raises;
        this replica then goes on as it was.
        """
        if served.serial <= self._served.serial:
            return Changed(seconds=0.0, num_bytes=0)
        async with self._changing:
            before, began = self._served, time.monotonic()
            if served.serial <= before.serial:
                return Changed(seconds=0.0, num_bytes=0)
            read = await self._weight_bytes()
            if served.weights != before.weights or served.version != before.version:
                if served.weights is None:
                    raise ConfigError("the weights that a fleet began with have no folder")
                await self.llm.update_params(served.weights, mode=mode)
                self._versions[self.llm.weight_version] = served.version
            for name in set(before.adapters) - set(served.adapters):
                await self.llm.remove_adapter(name)
            for name, (folder, number) in served.adapters.items():
                if before.adapters.get(name) != (folder, number):
                    await asyncio.to_thread(self._add_adapter, name, folder, number)
            self._served = served
            seconds = time.monotonic() - began
            return Changed(seconds=seconds, num_bytes=await self._weight_bytes() - read)

    async def _weight_bytes(self) -> int:
        """Return the bytes of weights that were read by now; AsyncLLM.stats is of a moment ago."""
        return int((await self.llm.call(LLM.stats)).get("weight_bytes_read", 0))

    def _add_adapter(self, name: str, folder: str, number: int) -> None:
        self.llm.session.served.add_adapter(name, folder, adapter_salt(name, number))

    async def pause(self, mode: OnPause) -> None:
        await self.llm.pause(mode=mode)

    async def resume(self) -> None:
        await self.llm.resume()

    async def stats(self) -> Stats:
        """Return LLM.stats() of now, with its versions of weights as the fleet counts them."""
        stats = dict(await self.llm.call(LLM.stats))
        stats["weight_version"] = self._versions[self.llm.weight_version]
        return stats

    def _check(self) -> None:
        """Raise EngineDied if it has."""
        if self.llm.error is not None:
            raise EngineDied(f"{type(self.llm.error).__name__}: {self.llm.error}")

    def check(self) -> None:
        """Raise EngineDied if the engine runs no more: this replica is to be replaced."""
        self._check()

    async def close(self) -> None:
        await self.llm.close()

    # What it holds

    async def report(self, router: str, *, whole: bool = False) -> Report | None:
        """Return what a router has not been told yet. A look at what is held takes the engine's
        thread a moment, so it is taken rarely where it takes long.
        """
        now = time.monotonic()
        if now >= self._looks_at or whole:
            self._looks_at = now  # others wait for the next one
            keys, seconds = await self.llm.call(_keys)
            self._holdings.update(keys)
            self._looks_at = time.monotonic() + seconds / LOOK_SHARE
        return self._holdings.report(router, whole=whole)

    # Versions

    def _for_front(self, item: Any) -> Item:
        """Return an item for the front, with versions of weights as the fleet counts them."""
        if isinstance(item, CompletionChunk):
            item.weight_versions_delta = self._spans(item.weight_versions_delta)
        elif isinstance(item, RequestOutput):
            item.embeddings = None  # which the front has: images are megabytes
            item.weight_version = self._versions.get(item.weight_version, item.weight_version)
            for done in item.outputs:
                done.weight_versions = self._spans(done.weight_versions)
        elif not isinstance(item, Exception):  # a thread that was interrupted
            return EngineDied(f"{type(item).__name__}: {item}")
        return item

    def _spans(self, spans: list[WeightSpan]) -> list[WeightSpan]:
        numbers = self._versions
        return [span._replace(version=numbers.get(span.version, span.version)) for span in spans]


def _keys(llm: LLM) -> tuple[set[int], float]:
    """Return the keys of all that an engine holds, and the seconds that it took."""
    began, keys = time.monotonic(), set[int]()
    try:
        engine: Engine = llm.session.engine
    except ConfigError:  # it sleeps
        return keys, 0.0
    for replica in engine.replicas:
        keys |= replica.blocks.cache.keys()
    return keys, time.monotonic() - began
