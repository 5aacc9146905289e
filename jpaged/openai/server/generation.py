"""Generation: takes a request for completions from its body to its answer."""

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeGuard

from jpaged.async_llm import AsyncLLM
from jpaged.engine.origin import Origin
from jpaged.engine_thread import Coming, Inbox, News
from jpaged.errors import ConfigError, RequestError
from jpaged.fleet.face import FleetLLM
from jpaged.openai.json_text import json_object
from jpaged.openai.parts import Format, Plain, Reader
from jpaged.openai.protocol import BodyError
from jpaged.openai.responses import AnswerForm
from jpaged.openai.server.answers import WholeAnswer
from jpaged.openai.server.asked import Asked
from jpaged.openai.server.begun import begun
from jpaged.openai.server.bodies import Served, ServedChat, ServedCompletion, Translated
from jpaged.openai.server.echo import text_of
from jpaged.openai.server.events import Events
from jpaged.openai.server.images import Images
from jpaged.openai.server.kept_responses import KeptResponses
from jpaged.openai.server.message_bodies import ServedMessage
from jpaged.openai.server.message_events import MessageEvents
from jpaged.openai.server.metrics import Metrics, Watch
from jpaged.openai.server.parties import Parties, Party
from jpaged.openai.server.pulse import Pulse
from jpaged.openai.server.record import RequestRecord
from jpaged.openai.server.response_bodies import (
    ResponseBody,
    ServedKeptResponse,
    ServedResponse,
)
from jpaged.openai.server.response_items import ResponseEvents
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.status import Running, Status
from jpaged.openai.server.token_answers import TokenEvents, WholeTokens, request_id
from jpaged.openai.server.token_bodies import ServedTokens
from jpaged.openai.server.wire import (
    EVENTS,
    JSON,
    ApiError,
    Exchange,
    Held,
    Room,
    encode,
    listed,
    overloaded,
)
from jpaged.openai.tool_grammar import form_of_channels, tool_grammar
from jpaged.request.inputs import with_adapter, with_salt
from jpaged.request.outputs import CompletionChunk, RequestOutput
from jpaged.sampling_params import SamplingParams

log = logging.getLogger("jpaged")

IGNORED = b"x-jpaged-ignored-fields"
SESSION = b"x-session-id"  # requests that have one value here are of one session
MOST_OF_A_NAME = 256  # characters of a session's
MOST_LOGGED = 256  # names of unknown fields that are logged while the server runs
SHORT_BODY = 1 << 11  # characters; reading so few takes no longer than handing them to a thread
LONG_BODY = 1 << 17  # characters; a longer body is read and tokenized beside few others
MOST_LONG = 2  # long bodies that are read at once
MOST_A_TURN = 256  # tokens and alternatives of a stream that one turn of the event loop writes
MOST_COMPILING = 2  # forms compiled at once; the other threads prepare requests without a form
PLACES_A_RESERVED_ONE = 8  # with several keys, each key leaves one place in so many to the others
MOST_WORDS, MOST_WORD_CHARACTERS = 256, 8192  # a step looks at each of them
MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS, MOST_OF_A_SALT = 64, 4096, 1024, 256


class Generation:
    """Answers requests for completions, as many at once as the settings allow."""

    def __init__(self, llm: AsyncLLM | FleetLLM, settings: ServerSettings, metrics: Metrics):
        self._llm, self._settings, self._metrics = llm, settings, metrics
        self.images = Images(llm, settings)
        self._defaults = llm.default_sampling_params()
        self.room = Room(settings.max_bodies_bytes)
        self._format = Format.of(
            llm.tokenizer, settings.tool_style, thinks=settings.enable_reasoning
        )
        self.status = Status(llm, settings, self._format, metrics.started_at)
        seconds, most = settings.keep_responses_s, settings.max_kept_responses
        self.kept = None if seconds is None else KeptResponses(seconds, most)
        self._choices = 0  # completions that were admitted and have not ended
        self._ignored: set[str] = set()  # unknown fields that were logged
        self._choices_of: Counter[str] = Counter()  # those completions by party
        self._parties = Parties(settings)
        self._compiling = asyncio.Semaphore(MOST_COMPILING)
        self._reading_long = asyncio.Semaphore(MOST_LONG)
        self._writing = asyncio.Semaphore(1)

    async def serve(self, exchange: Exchange, kind: type[Served]) -> None:
        """Read, run and answer one request. Raises the request's error, or Gone."""
        with closing(self.room.hold()) as held:
            await exchange.read(held)
            with closing(self._llm.expect()) as coming:
                await exchange.while_connected(self._serve(exchange, kind, held, coming))

    async def _serve(
        self, exchange: Exchange, kind: type[Served], held: Held, coming: Coming
    ) -> None:
        arrived = time.monotonic()
        async with asyncio.timeout(self._settings.request_timeout_s):
            length = len(exchange.text)
            party = self.party_of(exchange)
            if length <= SHORT_BODY and kind is not ServedKeptResponse:
                body, session = self._read(self._llm, kind, exchange.text, party.shared)
            else:
                body, session = await self.prepare(
                    length, self._read, kind, exchange.text, party.shared
                )
            self.report_ignored(exchange, body.ignored)
            model = self.check_model(body.model)
            params = self._params(body)
            with self.admitted(_num_prompts(body) * params.n, party):
                adapter = model if model in self._llm.adapters else None
                told = (body, params, model, adapter, self._format, party.salt)
                async with (
                    self.images.loaded(body, held),
                    self._compiling if _has_form(body, params) else nullcontext(),
                ):
                    asked = await self.prepare(length, _understood, *told)
                if self.kept is not None and _is_to_be_kept(body):
                    keep = partial(self.kept.put, party.shared, body.asked.items)
                    asked = dataclasses.replace(asked, keep=keep)
                exchange.text = ""
                if body.has_sources:
                    body.forget_sources()
                held.close()
                _describe(exchange.record, asked)
                watch = Watch(self._metrics, arrived, exchange.record)
                session = exchange.header(SESSION).decode("latin-1")[:MOST_OF_A_NAME] or session
                origin = Origin(
                    party=party.name,
                    call=asked.name,
                    leaves_rows=party.is_known,
                    session=None if session is None else f"{party.shared} {session}",
                )
                run = self._llm.run(
                    asked.prompts,
                    asked.params,
                    streaming=body.stream,
                    coming=coming,
                    origin=origin,
                )
                async with self.images.kept(asked.prompts), run as inbox:
                    running = Running(
                        name=asked.name,
                        route=exchange.scope["path"],
                        model=model,
                        party=party.name,
                        streams=body.stream,
                        arrived=arrived,
                        requests=inbox.requests,
                    )
                    with self.status.running(running):
                        if body.stream:
                            with Pulse(exchange, self._settings.ping_s):
                                news = await self._first(exchange, inbox)
                                await self._stream(exchange, asked, inbox, news, watch)
                        else:
                            news = await inbox.take()
                            await self._answer(exchange, asked, inbox, news, watch)

    def set_keys(self, settings: ServerSettings) -> None:
        """Take other keys from now on; requests that run go on."""
        self._settings = settings
        self._parties.set_keys(settings)

    async def prepare[T, *Args](
        self, length: int, function: Callable[[Any, *Args], T], *args: *Args
    ) -> T:
        """Return function(LLM, *args), called in a thread; a fleet has a FrontModel in the LLM's
        place. length: of the request's body; only a few long bodies are processed at once, so that
        threads stay free for short ones.
        """
        async with self._reading_long if length > LONG_BODY else nullcontext():
            return await self._llm.prepare(function, *args)

    @property
    def is_full(self) -> bool:
        """Whether one more completion would be refused."""
        return self._choices >= self._llm.all_rows + self._settings.max_waiting

    @property
    def models(self) -> list[str]:
        """Return the names that are served: the model's own first, then those of its adapters."""
        return [*self._settings.models, *sorted(self._llm.adapters)]

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under, which may be an adapter's. Raises ApiError for a name
        that is not served.
        """
        names = self.models
        if name is not None and name not in names:
            said = f"model {name[:80]!r} is not served here; served are {', '.join(names)}"
            raise ApiError(404, said, code="model_not_found", param="model")
        return name or names[0]

    def _read(
        self, llm: Any, kind: type[Served], text: str, party: str
    ) -> tuple[Served, str | None]:
        """Return the body, and the name of the session that it is of, if it has one."""
        raw = json_object(text, max_depth=self._settings.max_json_depth)
        if self.kept is not None and kind is ServedKeptResponse:
            raw = self.kept.continued(raw, party)
        most, within = llm.engine_config.max_logit_bias, raw.get("sampling_params")
        for fields in (raw, within if isinstance(within, dict) else {}):
            biases = fields.get("logit_bias")
            if isinstance(biases, dict) and len(biases) > most:  # checked before they are parsed
                said = f"logit_bias has {len(biases)} entries, above max_logit_bias={most}"
                raise BodyError(said, param="logit_bias")
        return kind.read_known(raw), _session_of(raw)

    def report_ignored(self, exchange: Exchange, names: Sequence[str]) -> None:
        """Report unknown fields that a request was read without: to the client in a header of the
        answer, to the operator in a metric, and in a line of the log for every new name.
        """
        if not names:
            return
        self._metrics.ignored_fields += len(names)
        exchange.headers.append((IGNORED, listed(names).encode()))
        fresh = [n for n in names if n not in self._ignored][: MOST_LOGGED - len(self._ignored)]
        self._ignored.update(fresh)
        if fresh:
            log.warning("requests have fields that are unknown and ignored: %s", listed(fresh))

    def _params(self, body: Served) -> SamplingParams:
        params, most = body.params(self._defaults), self._settings.max_output_tokens
        if most is not None:
            if params.max_tokens is None:
                params = dataclasses.replace(params, max_tokens=most)
            elif params.max_tokens > most:
                said = f"max_tokens={params.max_tokens}: this server allows {most} at most"
                raise RequestError(said)
        _check_sizes(body, params)
        config = self._llm.engine_config
        if params.n > config.max_n or params.n < 1:  # checked before anything is made n times
            raise RequestError(f"n={params.n}: must be from 1 to {config.max_n}")
        return params

    def party_of(self, exchange: Exchange) -> Party:
        """Return whose request it is."""
        return self._parties.of(exchange.key, exchange.address)

    @contextmanager
    def admitted(self, count: int, party: Party) -> Iterator[None]:
        """Hold places for so many completions. Raises ApiError if they are not free. With several
        keys, each key leaves some places to the others.
        """
        if count > self._settings.max_choices:
            most = self._settings.max_choices
            raise RequestError(f"n: {count} completions (prompts times n) are more than {most}")
        most = self._llm.all_rows + self._settings.max_waiting
        most_of_party = most - (most // PLACES_A_RESERVED_ONE if party.is_known else 0)
        if self._choices_of[party.name] + count > most_of_party:
            self._metrics.rejected += 1
            raise overloaded(
                f"{self._choices_of[party.name]} completions of this key are running or waiting, "
                f"{most_of_party} at most",
                self._metrics.seconds_to_wait(count),
            )
        if self._choices + count > most:
            self._metrics.rejected += 1
            raise overloaded(
                f"{self._choices} completions are running or waiting, {most} at most",
                self._metrics.seconds_to_wait(self._choices + count - most),
            )
        self._choices += count
        self._choices_of[party.name] += count
        try:
            yield
        finally:
            self._choices -= count
            self._choices_of[party.name] -= count
            if not self._choices_of[party.name]:
                del self._choices_of[party.name]

    async def _answer(
        self, exchange: Exchange, asked: Asked, inbox: Inbox, news: list[News], watch: Watch
    ) -> None:
        outputs: dict[int, RequestOutput] = {}
        while True:
            for prompt, item in news:
                outputs[prompt] = watch.ended(_output(item, asked.body))
            if len(outputs) == len(asked.prompts):
                break
            news = await inbox.take()
        in_order = [outputs[i] for i in range(len(asked.prompts))]
        if isinstance(asked.body, Translated):
            await exchange.answer(await self._llm.prepare(_whole, asked, in_order[0]))
            return
        is_tokens = isinstance(asked.body, ServedTokens)
        answer = (WholeTokens if is_tokens else WholeAnswer)(asked, in_order)
        part = await self._llm.prepare(answer.next)
        if answer.is_ended:
            await exchange.answer(part)
            return
        await exchange.begin(200, [(b"content-type", JSON)])
        await exchange.write(part)
        while not answer.is_ended:
            async with self._writing:  # one long answer at a time, so that others get turns
                part = await self._llm.prepare(answer.next)
            await exchange.write(part, more=not answer.is_ended)

    async def _first(self, exchange: Exchange, inbox: Inbox) -> list[News]:
        """Return the first news of a stream. Where they take long, the answer begins before them:
        an error that comes later is then its last event, and has no HTTP status.
        """
        try:
            async with asyncio.timeout(self._settings.headers_after_s):
                return await inbox.take()
        except TimeoutError:
            await exchange.begin(200, [(b"content-type", EVENTS)])
            return await inbox.take()

    async def _stream(
        self, exchange: Exchange, asked: Asked, inbox: Inbox, news: list[News], watch: Watch
    ) -> None:
        events = _events(self._llm, asked)
        outputs: list[RequestOutput] = []
        weight = 1 + (asked.form.top or 0)

        def pass_on(news: list[News]) -> bool:
            """Write pieces where they come, unless they are many, the last, or must wait."""
            if not exchange.is_ready:
                return False
            worth = 0
            for _, item in news:
                if not isinstance(item, CompletionChunk):
                    return False
                worth += len(item.token_ids_delta) * weight
            if worth > MOST_A_TURN:
                return False
            written = b""
            for prompt, chunk in news:
                assert isinstance(chunk, CompletionChunk)
                watch.chunk(prompt, chunk)
                written += events.pieces(prompt, chunk)
            if written:
                exchange.write_now(written)
            return True

        while True:
            written: list[bytes] = []
            worth = 0
            for prompt, item in news:
                if isinstance(item, CompletionChunk):
                    watch.chunk(prompt, item)
                    written.append(events.pieces(prompt, item))
                    worth += len(item.token_ids_delta) * weight
                    if worth > MOST_A_TURN:  # let the event loop serve others
                        worth = 0
                        await asyncio.sleep(0)
                else:
                    outputs.append(watch.ended(_output(item, asked.body)))
            # The answer begins with the first piece where that comes soon: an error until then has
            # its own HTTP status.
            if exchange.status is None:
                await exchange.begin(200, [(b"content-type", EVENTS)])
            if len(outputs) == len(asked.prompts):
                break
            if any(written):
                await exchange.write_piece(b"".join(written))
            news = await inbox.pass_on(pass_on)
        await exchange.write(b"".join(written) + events.end(outputs), more=False)


def _describe(record: RequestRecord, asked: Asked) -> None:
    """Note what a request asks for, now that it is known."""
    body = asked.body
    is_text = isinstance(body, ServedCompletion | ServedTokens)
    record.operation = "text_completion" if is_text else "chat"
    if isinstance(body, ServedTokens):
        record.answer_id = request_id(asked)
    elif isinstance(body, ServedResponse):
        record.answer_id = f"resp_{asked.name}"
    elif isinstance(body, ServedMessage):
        record.answer_id = f"msg_{asked.name}"
    else:
        record.answer_id = f"{'cmpl' if is_text else 'chatcmpl'}-{asked.name}"
    record.model, record.params, record.streams = asked.model, asked.params, body.stream


def _events(llm: Any, asked: Asked) -> Events | ResponseEvents | MessageEvents | TokenEvents:
    """Return the object that makes events of the answer's pieces. llm: the LLM, whose tokenizer is
    needed.
    """
    if isinstance(asked.body, ServedTokens):
        return TokenEvents(asked)
    if isinstance(asked.body, ServedResponse):
        return _response(llm, asked, asked.body.asked)
    if isinstance(asked.body, ServedMessage):
        [size] = asked.prompt_sizes or [0]
        return MessageEvents(**asked.how, reader=asked.reader(), prompt_tokens=size)
    return Events(
        **asked.how,
        is_chat=asked.body.is_chat,
        form=asked.form,
        n=asked.params.n,
        with_usage=asked.body.wants_usage,
        prompt_sizes=asked.prompt_sizes,
        echo=asked.echo,
        reader=asked.reader,
        begun=asked.begun,
    )


def _response(llm: Any, asked: Asked, body: ResponseBody) -> ResponseEvents:
    def count(text: str) -> int:
        return len(llm.tokenizer.encode(text, add_special_tokens=False))

    options = {"reader": asked.reader(), "count": count, **asked.how}
    return ResponseEvents(asked=body, params=asked.params, keep=asked.keep, **options)


def _check_sizes(body: Served, params: SamplingParams) -> None:
    """Raise RequestError for values that would slow every step for all requests, or take memory for
    each completion.
    """
    stops = params.stop_strings
    if len(stops) > MOST_STOPS or sum(map(len, stops)) > MOST_STOP_CHARACTERS:
        most = f"{MOST_STOPS} of {MOST_STOP_CHARACTERS} characters in all"
        raise RequestError(f"stop: {len(stops)} strings; this server accepts {most}")
    words = params.bad_words or ()
    if len(words) > MOST_WORDS or sum(map(len, words)) > MOST_WORD_CHARACTERS:
        most = f"{MOST_WORDS} of {MOST_WORD_CHARACTERS} characters in all"
        raise RequestError(f"bad_words: {len(words)} texts; this server accepts {most}")
    if (count := len(params.stop_token_ids or ())) > MOST_STOP_IDS:
        raise RequestError(f"stop_token_ids: {count} ids; this server accepts {MOST_STOP_IDS}")
    if len(body.cache_salt or "") > MOST_OF_A_SALT:
        raise BodyError(f"cache_salt: longer than {MOST_OF_A_SALT} characters", param="cache_salt")


def _has_form(body: Served, params: SamplingParams) -> bool:
    """Return whether a form must be compiled, which may take seconds."""
    return params.structured is not None or (
        isinstance(body, ServedChat) and bool(body.callable_tools)
    )


def _is_to_be_kept(body: Served) -> TypeGuard[ServedKeptResponse]:
    return isinstance(body, ServedKeptResponse) and body.asked.store


def _session_of(raw: dict[str, Any]) -> str | None:
    """Return the name of the session that a request is of: OpenAI's and Anthropic's hints of what
    is likely to begin alike.
    """
    metadata = raw.get("metadata")
    of_anthropic = metadata.get("user_id") if isinstance(metadata, dict) else None
    for name in (raw.get("prompt_cache_key"), raw.get("user"), of_anthropic):
        if isinstance(name, str) and name:
            return name[:MOST_OF_A_NAME]
    return None


def _num_prompts(body: Served) -> int:
    return len(body.prompt) if isinstance(body, ServedCompletion) else 1


def _understood(
    llm: Any,
    body: Served,
    params: SamplingParams,
    model: str,
    adapter: str | None,
    format: Format,
    salt: str | None,
) -> Asked:
    """Return the request with its prompts tokenized, which takes time in proportion to them. salt:
    the party's, which keeps its cached prefixes from others.
    """
    form = AnswerForm(
        top=params.logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    prompts, echo = body.prompts_for(llm, params), None
    reader: Callable[[], Reader] = Plain
    if isinstance(body, ServedCompletion) and body.echo:
        echo = [text_of(llm, prompt) for prompt in prompts]
    if isinstance(body, ServedChat):
        end = text_of(llm, prompts[0], last=8)
        reader = partial(format.reader, end, tools=bool(body.callable_tools))
        if format.style == "harmony":  # special tokens separate its parts
            params = dataclasses.replace(params, skip_special_tokens=False)
            if params.structured is not None:
                told = form_of_channels(params.structured)
                params = dataclasses.replace(params, structured=told)
        params = _held_to_calls(llm, body, params, format, end)
    if params.structured is not None and find_spec("llguidance") is None:
        refused = "this server has no llguidance for structured output: jpaged[structured]"
        raise BodyError(refused, code="unsupported_field")
    if params.structured is not None:
        llm.session.builder.matcher(
            params.structured
        )  # compile it here, so that the request finds it compiled
    if adapter is not None:
        prompts = [with_adapter(adapter, prompt) for prompt in prompts]
    if salt is not None:
        prompts = [with_salt(salt, prompt) for prompt in prompts]
    begins = (body.answer_token_ids or []) if isinstance(body, ServedChat) else []
    if begins:
        most, size = llm.engine_config.max_model_len, llm.model_config.vocab_size
        ready = (llm.session.inputs.prompt(prompt) for prompt in prompts)
        prompts = [begun(prompt, begins, params, size, most) for prompt in ready]
    sizes = None
    # Tokenized once, here, since events report the prompt's tokens before it has run.
    if body.wants_continuous_usage or (isinstance(body, ServedMessage) and body.stream):
        tokenized = [llm.session.inputs.prompt(prompt) for prompt in prompts]
        prompts, sizes = tokenized, [len(prompt.ids) for prompt in tokenized]
    return Asked(
        body=body,
        params=params,
        prompts=prompts,
        form=form,
        model=model,
        name=secrets.token_hex(12),
        echo=echo,
        reader=reader,
        prompt_sizes=sizes,
        begun=len(begins),
    )


def _held_to_calls(
    llm: Any, body: ServedChat, params: SamplingParams, format: Format, end: str
) -> SamplingParams:
    """Return the SamplingParams with a grammar of the calls that the answer may contain, if there
    is one. Raises BodyError if the request needs it and there is none. end: the last text of the
    prompt.
    """
    tools, must = body.callable_tools, body.must_call
    if not tools:
        return params
    demanded = must or body.limits_tools or not body.parallel_tool_calls
    demanded |= any(tool["function"].get("strict") is True for tool in tools)
    grammar = tool_grammar(
        tools,
        style=format.style,
        needed=must,
        many=body.may_call_again,
        thinks=format.thinks,
        is_thinking=format.is_thinking(end),
    )
    if grammar is None:
        said = "tools: the chat template of this model does not support tool calls"
        raise BodyError(said, param="tools", code="unsupported_field")
    if params.structured is not None:
        return params
    held = dataclasses.replace(params, structured={"grammar": grammar})
    try:
        llm.session.builder.matcher(held.structured)
    except ConfigError:  # llguidance is missing
        return held if demanded else params
    except RequestError as e:
        if not demanded:
            return params
        raise BodyError(f"tools: {e}", param="tools") from e
    return held


def _whole(llm: Any, asked: Asked, output: RequestOutput) -> bytes:
    """Return the answer to a body of another form than a chat's."""
    events = _events(llm, asked)
    assert not isinstance(events, Events | TokenEvents)
    return encode(events.whole(output))


def _output(item: Any, body: Served) -> RequestOutput:
    """Return the output of a request, or raise its error. One that was cut is an error too, but for
    a trainer's tokens, which are of use as far as they go.
    """
    if isinstance(item, BaseException):
        raise item
    if item.error is not None:
        raise item.error
    if not isinstance(body, ServedTokens) and any(
        done.finish_reason == "abort" for done in item.outputs
    ):
        said = "the server's operator aborted this request"
        raise ApiError(503, said, kind="server_error", code="aborted")
    return item
