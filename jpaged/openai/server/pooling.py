"""Pooling: answers requests for embeddings, scores of pairs, ranks and labels."""

import asyncio
from contextlib import closing
from typing import Any

import numpy as np

from jpaged.async_llm import AsyncLLM
from jpaged.fleet.face import FleetLLM
from jpaged.openai.json_text import json_object
from jpaged.openai.pooled import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledRequest,
    RerankRequest,
    ScoreRequest,
    Task,
)
from jpaged.openai.server.generation import Generation
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import Exchange, Held, encode
from jpaged.request.inputs import with_salt

ROUTES: dict[str, type[PooledRequest]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/classify": ClassifyRequest,
}


class Pooling:
    """Answers them beside what is generated, in one batch with it. generation: of the same
    server, whose room and places they share.
    """

    def __init__(self, llm: AsyncLLM | FleetLLM, settings: ServerSettings, generation: Generation):
        self._llm, self._settings, self._generation = llm, settings, generation

    async def serve(self, exchange: Exchange, kind: type[PooledRequest]) -> None:
        """Read, run and answer one request. Raises the request's error, or Gone."""
        with closing(self._generation.room.hold()) as held:
            await exchange.read(held)
            await exchange.while_connected(self._serve(exchange, kind, held))

    async def _serve(self, exchange: Exchange, kind: type[PooledRequest], held: Held) -> None:
        generation = self._generation
        async with asyncio.timeout(self._settings.request_timeout_s):
            length = len(exchange.text)
            body = await generation.prepare(length, self._read, kind, exchange.text)
            generation.report_ignored(exchange, body.ignored)
            model = generation.check_model(body.model)
            party = generation.party_of(exchange)
            with generation.admitted(1, party):
                task, lists = await generation.prepare(length, _understood, body)
                exchange.text = ""
                held.close()
                exchange.record.pools("embeddings" if task == "embed" else task, model, lists)
                adapter = model if model in self._llm.adapters else None
                prompts = body.prompts(lists, adapter)
                if party.salt is not None:
                    prompts = [with_salt(party.salt, prompt) for prompt in prompts]
                made = await self._made(task, body, prompts)
                answer = await generation.prepare(0, _answered, body, task, made, lists, model)
        await exchange.answer(answer)

    async def _made(self, task: Task, body: PooledRequest, prompts: list[Any]) -> np.ndarray:
        if task == "classify":
            return await self._llm.classify(prompts)
        asked = body.asked
        return await self._llm.embed(
            prompts, dimensions=asked.dimensions, normalize=asked.normalize
        )

    def _read(self, llm: Any, kind: type[PooledRequest], text: str) -> PooledRequest:
        return kind.read_known(json_object(text, max_depth=self._settings.max_json_depth))


def _understood(llm: Any, body: PooledRequest) -> tuple[Task, list[list[int]]]:
    return body.task(llm.model_config), body.token_lists(llm.session.inputs)


def _answered(
    llm: Any,
    body: PooledRequest,
    task: Task,
    made: np.ndarray,
    lists: list[list[int]],
    model: str,
) -> bytes:
    return encode(body.answer(task, made, lists, model))
