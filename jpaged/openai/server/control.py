"""What a trainer may do with a server that draws its rollouts: pause it, resume it and give it new
weights, under requests that run.
"""

import asyncio
import logging
import time
import urllib.parse
from contextlib import closing
from typing import Annotated, Any, get_args

from pydantic import Field

from jpaged.async_llm import AsyncLLM
from jpaged.errors import CheckpointError, ConfigError, RequestError
from jpaged.fleet.face import FleetLLM
from jpaged.openai.fields import short
from jpaged.openai.json_text import json_object
from jpaged.openai.protocol import Body, BodyError
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import ApiError, Exchange, Room, encode
from jpaged.session import OnPause, OnUpdate

log = logging.getLogger("jpaged")


class UpdateWeights(Body):
    """The body of POST /update_weights. folder: a checkpoint's, as the server's machine sees it, of
    the model that is served. mode: what becomes of requests that run, as in LLM.update_params.
    """

    folder: Annotated[str, Field(min_length=1)]
    mode: OnUpdate = "keep"


class Control:
    """The routes that change the server, which only `--control` opens, and those that say in which
    state it is. llm: the model.
    """

    def __init__(self, llm: AsyncLLM | FleetLLM, settings: ServerSettings, room: Room):
        self._llm, self._settings, self._room = llm, settings, room
        self._in_turn = asyncio.Lock()  # of what changes the server

    async def pause(self, exchange: Exchange) -> None:
        """Have no step run until /resume; answered once none is in flight."""
        self._check(exchange)
        mode = _query(exchange, mode=get_args(OnPause)).get("mode", "keep")
        async with self._in_turn:
            await self._llm.pause(mode=mode)
        log.info("paused, mode=%s", mode)
        await exchange.answer(encode({"status": "paused", "mode": mode}))

    async def resume(self, exchange: Exchange) -> None:
        """Go on; nothing where there was no pause."""
        self._check(exchange)
        _query(exchange)
        await self._llm.resume()
        log.info("resumed")
        await exchange.answer(encode({"status": "resumed"}))

    async def update_weights(self, exchange: Exchange) -> None:
        """Serve the weights of a folder from the next step on; answered once they are there. Where
        they cannot be, the server goes on with those that it has.
        """
        self._check(exchange)
        _query(exchange)
        with closing(self._room.hold()) as held:
            await exchange.read(held)
            raw = json_object(exchange.text, max_depth=self._settings.max_json_depth)
        asked, began = UpdateWeights.read(raw), time.monotonic()
        async with self._in_turn:
            try:
                more = await self._llm.update_params(asked.folder, mode=asked.mode) or {}
            except (CheckpointError, ConfigError) as e:
                said = f"folder={short(asked.folder)}: {e}"
                raise ApiError(400, said, code="invalid_weights", param="folder") from e
            except RequestError as e:
                raise ApiError(409, str(e), code="conflict", param="mode") from e
            version = self._llm.weight_version
        seconds = time.monotonic() - began
        log.info("weights of %s are version %d, after %.1f s", asked.folder, version, seconds)
        told = {"weight_version": version, "seconds": round(seconds, 3)}
        await exchange.answer(encode(more | told))

    async def weight_info(self, exchange: Exchange) -> None:
        """Say which version of the weights is served: how many there have been."""
        await exchange.answer(encode({"weight_version": self._llm.weight_version}))

    async def is_paused(self, exchange: Exchange) -> None:
        """Say whether it is between /pause and /resume."""
        await exchange.answer(encode({"is_paused": self._llm.is_paused}))

    def _check(self, exchange: Exchange) -> None:
        """Raise ApiError unless the server may be changed, and the request is no page's.

        A browser sends what has no body without asking this server, and tells whose page it is of.
        """
        if not self._settings.enable_control:
            said = "this server may not be changed: start it with --control"
            raise ApiError(403, said, code="control_not_allowed")
        if exchange.header(b"origin") or exchange.header(b"sec-fetch-site"):
            raise ApiError(403, "no page may change this server", code="control_not_allowed")


def _query(exchange: Exchange, **allowed: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of the URL. Raises BodyError for one that is not known, or whose value
    is not among the allowed ones.
    """
    asked: dict[str, str] = {}
    text = exchange.scope["query_string"].decode("latin-1")
    for name, value in urllib.parse.parse_qsl(text, keep_blank_values=True):
        if name not in allowed:
            said = f"unknown parameter {short(name)} of {exchange.scope['path']}"
            raise BodyError(said, param=name[:60], code="unknown_field")
        if value not in allowed[name] or name in asked:
            said = f"{name}={short(value)}: must be one of {', '.join(allowed[name])}, once"
            raise BodyError(said, param=name)
        asked[name] = value
    return asked
