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
from jpaged.fleet.face import FleetLLM
from jpaged.fleet.facts import version
from jpaged.openai.json_text import json_object
from jpaged.openai.pooled import PooledRequest
from jpaged.openai.server.answers import json_pieces
from jpaged.openai.server.bodies import (
    Detokenize,
    Served,
    ServedChat,
    ServedCompletion,
    Tokenize,
    TokenizeChat,
)
from jpaged.openai.server.control import Control
from jpaged.openai.server.generation import Generation
from jpaged.openai.server.message_bodies import CountedMessage, ServedMessage
from jpaged.openai.server.message_events import error_body, error_event
from jpaged.openai.server.metrics import Metrics
from jpaged.openai.server.openapi import describe
from jpaged.openai.server.page import Page
from jpaged.openai.server.pooling import ROUTES as POOLED
from jpaged.openai.server.pooling import Pooling
from jpaged.openai.server.record import Observer
from jpaged.openai.server.response_bodies import ServedKeptResponse, ServedResponse
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.token_bodies import ServedTokens
from jpaged.openai.server.wire import ApiError, Exchange, Gone, encode
from jpaged.request.detokenizer import decode

log = logging.getLogger("jpaged")

HTML = b"text/html; charset=utf-8"
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
NO_PATH = "this server has no such path"
PROBES = ("/health", "/ready")  # answered where all connections are busy
EXPOSED = ("X-Request-Id", "X-Jpaged-Ignored-Fields", "Retry-After")  # to pages of other sites
LEFT = 499  # status in metrics: the client disconnected before there was an answer
Handler = Callable[[Exchange], Awaitable[None]]
ReadBody = Callable[[dict[str, Any]], Any]  # of a route that counts or tokenizes
Prepared = Callable[[Any, Any], bytes]  # the answer to such a body. The first is the LLM


class Server:
    """All that a server needs; `app` is the ASGI application, which closes the model when it ends.

    llm: the model, which belongs to this server from now on. A route's `handle` may raise any
    error; ApiError.of decides what the client reads of it. observers: called with the record of
    each request that has ended.
    """

    def __init__(
        self,
        llm: AsyncLLM | FleetLLM,
        settings: ServerSettings,
        observers: Sequence[Observer] = (),
    ):
        settings = settings.with_images(llm.engine_config.images)
        self.llm, self.settings, self.metrics = llm, settings, Metrics()
        self.observers = tuple(observers)
        self._generation = Generation(llm, settings, self.metrics)
        self._pooling = Pooling(llm, settings, self._generation)
        control = Control(llm, settings, self._generation.room)
        self.is_stopping = False  # set by who listens, once it takes no new connections
        posts: dict[str, Handler] = {
            "/v1/chat/completions": lambda e: self._generation.serve(e, ServedChat),
            "/v1/completions": lambda e: self._generation.serve(e, ServedCompletion),
            "/v1/responses": self._response,
            "/v1/responses/input_tokens": self._count_response,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_message,
            **{url: self._pooled(kind) for url, kind in POOLED.items()},
            "/inference/v1/generate": lambda e: self._generation.serve(e, ServedTokens),
            "/pause": control.pause,
            "/resume": control.resume,
            "/update_weights": control.update_weights,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._one_model,
            "/metrics": self._metrics,
            "/is_paused": control.is_paused,
            "/weight_info": control.weight_info,
            "/status": self._status,
            "/version": self._version,
            "/openapi.json": self._describe,
        }
        routes = [
            Route(path, self._endpoint(h, path), methods=["POST"]) for path, h in posts.items()
        ]
        routes += [
            Route(path, self._endpoint(h, path), methods=["GET"]) for path, h in gets.items()
        ]
        one = "/v1/responses/{name}"
        shown = self._endpoint(self._kept_response, one)
        routes.append(Route(one, shown, methods=["GET", "DELETE"]))
        self._page = Page()
        open_paths: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/": self._show,
            "/page/{name}": self._show_file,
        }
        for path, handle in open_paths.items():
            routes.append(Route(path, self._endpoint(handle, path, is_open=True), methods=["GET"]))
        missing: Any = {
            404: self._told(404, NO_PATH),
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
            self._generation.images.close()
            await self.llm.close()

    def _endpoint(self, handle: Handler, path: str, *, is_open: bool = False) -> Any:
        """Return an ASGI application for one path. is_open: whether it needs no API key."""
        return Endpoint(self, handle, path, is_open)

    def _pooled(self, kind: type[PooledRequest]) -> Handler:
        return lambda exchange: self._pooling.serve(exchange, kind)

    def _told(self, status: int, message: str) -> Any:
        async def handler(request: Any, error: Any) -> Any:
            headers = dict(error.headers or {})  # 405 says in Allow what the path supports
            return _Answer(ApiError(status, message, headers=headers), self)

        return handler

    async def _health(self, exchange: Exchange) -> None:
        if self.llm.error is not None:
            raise ApiError(503, "the engine has died", kind="server_error", code="engine_died")
        await exchange.answer(b'{"status":"ok"}')

    async def _show(self, exchange: Exchange) -> None:
        policy = [(b"content-security-policy", self._page.policy)]
        await exchange.answer(self._page.index, kind=HTML, headers=policy)

    async def _show_file(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        if name not in self._page.files:
            raise ApiError(404, NO_PATH)
        body, kind = self._page.files[name]
        await exchange.answer(body, kind=kind)

    async def _status(self, exchange: Exchange) -> None:
        """Show what is served; a key sees its requests alone, where there are several keys."""
        generation, party = self._generation, self._generation.party_of(exchange)
        report = await generation.status.report(party.name if party.is_known else None)
        await exchange.answer(encode(report))

    async def _describe(self, exchange: Exchange) -> None:
        document = describe(self.settings, self._generation.models)
        await exchange.answer(encode(document))

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(encode({"version": version()}))

    async def _metrics(self, exchange: Exchange) -> None:
        replicas = await self.llm.gather() if isinstance(self.llm, FleetLLM) else {}
        text = self.metrics.text(self.llm.stats(), replicas)
        await exchange.answer(text.encode(), kind=PLAIN)

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

    async def _ready(self, exchange: Exchange) -> None:
        """Answer 200 if a request that came now would be taken, for who sends requests here."""
        if self.is_stopping:
            raise ApiError(503, "the server is stopping", kind="server_error", code="stopping")
        if self._generation.is_full:
            said = "as many completions are running or waiting as may"
            raise ApiError(503, said, kind="server_error", code="overloaded")
        if isinstance(self.llm, FleetLLM) and not self.llm.is_ready:
            raise ApiError(503, "no replica runs", kind="server_error", code="no_replica")
        await self._health(exchange)

    async def _response(self, exchange: Exchange) -> None:
        keeps = self._generation.kept is not None
        kind = ServedKeptResponse if keeps else ServedResponse
        await self._generation.serve(exchange, kind)

    async def _count_response(self, exchange: Exchange) -> None:
        await exchange.answer(
            await self._prepared(exchange, ServedResponse.read_known, _counted_response)
        )

    async def _kept_response(self, exchange: Exchange) -> None:
        """Show a response that is kept, or forget it."""
        kept, name = self._generation.kept, exchange.scope["path_params"]["name"]
        party = self._generation.party_of(exchange).shared
        response = None if kept is None else kept.get(party, name)
        if kept is None or response is None:
            said = f"no response {name[:80]!r} is kept here"
            raise ApiError(404, said, code="response_not_found")
        if exchange.scope["method"] == "DELETE":
            kept.delete(party, name)
            deleted = {"id": name, "object": "response", "deleted": True}
            await exchange.answer(encode(deleted))
        else:
            await exchange.answer(encode(response.response))

    async def _message(self, exchange: Exchange) -> None:
        await self._generation.serve(exchange, ServedMessage)

    async def _count_message(self, exchange: Exchange) -> None:
        await exchange.answer(await self._prepared(exchange, CountedMessage.read_known, _counted))

    async def _tokenize(self, exchange: Exchange) -> None:
        await exchange.answer(await self._prepared(exchange, _to_tokenize, _tokenized))

    async def _detokenize(self, exchange: Exchange) -> None:
        await exchange.answer(await self._prepared(exchange, Detokenize.read_known, _detokenized))

    async def _prepared(self, exchange: Exchange, read: ReadBody, function: Prepared) -> bytes:
        """Return what a function makes of the body, which is read and answered in threads."""
        with contextlib.closing(self._generation.room.hold()) as held:
            await exchange.read(held)
            length = len(exchange.text)

            async def work() -> tuple[bytes, tuple[str, ...]]:
                prepare = self._generation.prepare
                raw = await prepare(length, self._json, exchange.text)
                name = raw.get("model")
                self._generation.check_model(name if isinstance(name, str) else None)
                body = await prepare(length, lambda _: read(raw))
                if not isinstance(body, Served):
                    return await prepare(length, function, body), body.ignored
                async with self._generation.images.loaded(body, held):
                    return await prepare(length, function, body), body.ignored

            answer, ignored = await exchange.while_connected(work())
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
        if self._path.startswith("/v1/messages"):
            exchange.error_body, exchange.error_event = error_body, error_event
        try:
            if not self._is_open:
                exchange.check_host()
                exchange.check_key()
            if self._path not in PROBES:
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


def _to_tokenize(raw: dict[str, Any]) -> Tokenize | TokenizeChat:
    is_chat = raw.get("messages") is not None
    return TokenizeChat.read_known(raw) if is_chat else Tokenize.read_known(raw)


def _ids(llm: Any, body: Served) -> list[int]:
    """Return the tokens of a body's prompt, those in the places of its images too."""
    return list(llm.session.inputs.prompt(body.given_prompt(llm), must_fit=False).ids)


def _tokenized(llm: Any, body: Tokenize | TokenizeChat) -> bytes:
    if isinstance(body, TokenizeChat):
        ids = [*_ids(llm, body), *(body.answer_token_ids or ())]
    else:
        ids = list(llm.session.inputs.prompt(body.prompt, must_fit=False).ids)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": llm.engine_config.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = llm.tokenizer.convert_ids_to_tokens(ids)
    return b"".join(json_pieces(answer))


def _counted_response(llm: Any, body: ServedResponse) -> bytes:
    """Return the tokens of a response's prompt."""
    return encode({"object": "response.input_tokens", "input_tokens": len(_ids(llm, body))})


def _counted(llm: Any, body: CountedMessage) -> bytes:
    """Return the tokens of a message's prompt."""
    return encode({"input_tokens": len(_ids(llm, body))})


def _detokenized(llm: Any, body: Detokenize) -> bytes:
    ids, size = body.tokens, llm.model_config.vocab_size
    if llm.tokenizer is None:
        raise RequestError("tokens: this model has no tokenizer")
    if ids and max(ids) >= size:
        raise RequestError(f"tokens: {max(ids)} is outside the vocabulary of {size}")
    answer: dict[str, Any] = {"prompt": llm.tokenizer.decode(ids)}
    if body.return_token_strs:
        answer["token_strs"] = [decode(llm.tokenizer, [token], False) for token in ids]
    return b"".join(json_pieces(answer))
