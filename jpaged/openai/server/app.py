"""The routes of a server."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from jpaged.async_llm import AsyncLLM
from jpaged.errors import RequestError
from jpaged.openai.json_text import json_object
from jpaged.openai.pooled import PooledRequest
from jpaged.openai.server.answers import json_pieces
from jpaged.openai.server.bodies import (
    Detokenize,
    ServedChat,
    ServedCompletion,
    Tokenize,
    TokenizeChat,
)
from jpaged.openai.server.generation import Generation
from jpaged.openai.server.metrics import Metrics
from jpaged.openai.server.page import Page
from jpaged.openai.server.pooling import ROUTES as POOLED
from jpaged.openai.server.pooling import Pooling
from jpaged.openai.server.record import Observer
from jpaged.openai.server.response_bodies import ServedResponse
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import ApiError, Exchange, Gone, encode

log = logging.getLogger("jpaged")

HTML = b"text/html; charset=utf-8"
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
EXPOSED = ("X-Request-Id", "X-Jpaged-Ignored-Fields", "Retry-After")  # to pages of other sites
LEFT = 499  # status in metrics: the client disconnected before there was an answer
Handler = Callable[[Exchange], Awaitable[None]]
Prepared = tuple[bytes, tuple[str, ...]]  # an answer, and the names of the fields that were ignored


class Server:
    """All that a server needs; `app` is the ASGI application, which closes the model when it ends.

    llm: the model, which belongs to this server from now on. A route's `handle` may raise any
    error; ApiError.of decides what the client reads of it. observers: called with the record of
    each request that has ended.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, observers: Sequence[Observer] = ()):
        self.llm, self.settings, self.metrics = llm, settings, Metrics()
        self.observers = tuple(observers)
        self._generation = Generation(llm, settings, self.metrics)
        self._pooling = Pooling(llm, settings, self._generation)
        posts: dict[str, Handler] = {
            "/v1/chat/completions": lambda e: self._generation.serve(e, ServedChat),
            "/v1/completions": lambda e: self._generation.serve(e, ServedCompletion),
            "/v1/responses": lambda e: self._generation.serve(e, ServedResponse),
            **{url: self._pooled(kind) for url, kind in POOLED.items()},
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._one_model,
            "/metrics": self._metrics,
        }
        routes = [
            Route(path, self._endpoint(h, path), methods=["POST"]) for path, h in posts.items()
        ]
        routes += [
            Route(path, self._endpoint(h, path), methods=["GET"]) for path, h in gets.items()
        ]
        self._page = Page()
        for path, handle in (("/health", self._health), ("/", self._show)):
            routes.append(Route(path, self._endpoint(handle, path, is_open=True), methods=["GET"]))
        missing: Any = {
            404: self._told(404, "this server has no such path"),
            405: self._told(405, "this path does not support this method"),
        }
        self.app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers=missing,
            middleware=_cors(settings.origins),
        )

    def set_keys(self, keys: tuple[str, ...]) -> None:
        """Take other API keys from now on; requests that run go on. Raises ConfigError for a key
        that cannot be one, and then changes nothing.
        """
        self.settings = dataclasses.replace(self.settings, api_keys=keys)
        self._generation.set_keys(self.settings)

    def ended(self, exchange: Exchange, path: str) -> None:
        """Count a request that has ended, and tell the observers. path: its route."""
        record = exchange.record
        self.metrics.requests[path, exchange.status or LEFT] += 1
        if exchange.error_code is not None:
            self.metrics.errors[exchange.error_code] += 1
        record.close(exchange.status, exchange.error_code)
        for observe in self.observers:
            observe(record)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.llm.close()

    def _endpoint(self, handle: Handler, path: str, *, is_open: bool = False) -> Any:
        """Return an ASGI application for one path. is_open: whether it needs no API key."""
        return Endpoint(self, handle, path, is_open)

    def _pooled(self, kind: type[PooledRequest]) -> Handler:
        return lambda exchange: self._pooling.serve(exchange, kind)

    def _told(self, status: int, message: str) -> Any:
        async def handler(request: Any, error: Any) -> Any:
            return _Answer(ApiError(status, message), self)

        return handler

    async def _health(self, exchange: Exchange) -> None:
        if self.llm.error is not None:
            raise ApiError(503, "the engine has died", kind="server_error", code="engine_died")
        await exchange.answer(b'{"status":"ok"}')

    async def _show(self, exchange: Exchange) -> None:
        policy = [(b"content-security-policy", self._page.policy)]
        await exchange.answer(self._page.body, kind=HTML, headers=policy)

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(self.metrics.text(self.llm.stats()).encode(), kind=PLAIN)

    async def _models(self, exchange: Exchange) -> None:
        data = [self._model(name) for name in self._generation.models]
        await exchange.answer(encode({"object": "list", "data": data}))

    async def _one_model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        await exchange.answer(encode(self._model(self._generation.check_model(name))))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self.metrics.started_at),
            "owned_by": "jpaged",
            "root": self.settings.models[0],
            "max_model_len": self.llm.engine_config.max_model_len,
        }

    def _json(self, llm: Any, text: str) -> dict[str, Any]:
        return json_object(text, max_depth=self.settings.max_json_depth)

    async def _tokenize(self, exchange: Exchange) -> None:
        await exchange.answer(await self._prepared(exchange, _tokenized))

    async def _detokenize(self, exchange: Exchange) -> None:
        await exchange.answer(await self._prepared(exchange, _detokenized))

    async def _prepared(
        self, exchange: Exchange, function: Callable[[Any, dict[str, Any]], Prepared]
    ) -> bytes:
        """Return the result of a function of the body, which runs in a thread."""
        with contextlib.closing(self._generation.room.hold()) as held:
            await exchange.read(held)
            body = await self._generation.prepare(len(exchange.text), self._json, exchange.text)
            name = body.get("model")
            self._generation.check_model(name if isinstance(name, str) else None)
            work = self._generation.prepare(len(exchange.text), function, body)
            answer, ignored = await exchange.while_connected(work)
            self._generation.report_ignored(exchange, ignored)
            return answer


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Return what lets pages of these origins use the server, and nothing where there are none."""
    if not origins:
        return []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # OpenAI's clients in browsers send several of their own
        expose_headers=EXPOSED,
    )
    return [cors]


class Endpoint:
    """An ASGI application for one path: a handler, whose errors become answers."""

    def __init__(self, server: Server, handle: Handler, path: str, is_open: bool):
        self._server, self._handle, self._path, self._is_open = server, handle, path, is_open

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._server.settings)
        try:
            if not self._is_open:
                exchange.check_host()
                exchange.check_key()
            if self._path != "/health":
                exchange.check_room()
            await self._handle(exchange)
        except Gone:
            pass
        except asyncio.CancelledError:  # by the server, which is shutting down
            said = "this server is stopping"
            await _fail(exchange, ApiError(503, said, kind="server_error", code="stopping"))
        except Exception as e:  # an error of one request must not end the server
            error = ApiError.of(e)
            if error.status == 500:
                log.exception("request %s to %s failed", exchange.record.request_id, self._path)
            await _fail(exchange, error)
        finally:
            self._server.ended(exchange, self._path)


async def _fail(exchange: Exchange, error: ApiError) -> None:
    with contextlib.suppress(Gone):
        await exchange.fail(error)


class _Answer:
    """An error in the form in which Starlette takes a response from a handler."""

    def __init__(self, error: ApiError, server: Server):
        self._error, self._server = error, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, self._server.settings)
        await _fail(exchange, self._error)
        self._server.ended(exchange, "other")


def _tokenized(llm: Any, raw: dict[str, Any]) -> Prepared:
    if raw.get("messages") is not None:
        body = TokenizeChat.read_known(raw)
        ids = body.given_prompt(llm)
    else:
        body = Tokenize.read_known(raw)
        ids = list(llm.session.inputs.prompt(body.prompt, must_fit=False).ids)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": llm.engine_config.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = llm.tokenizer.convert_ids_to_tokens(ids)
    return b"".join(json_pieces(answer)), body.ignored


def _detokenized(llm: Any, raw: dict[str, Any]) -> Prepared:
    body = Detokenize.read_known(raw)
    ids, size = body.tokens, llm.model_config.vocab_size
    if llm.tokenizer is None:
        raise RequestError("tokens: this model has no tokenizer")
    if ids and max(ids) >= size:
        raise RequestError(f"tokens: {max(ids)} is outside the vocabulary of {size}")
    return encode({"prompt": llm.tokenizer.decode(ids)}), body.ignored
