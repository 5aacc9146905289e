"""Makes requests of the lines of a batch file.

There are three forms of line: OpenAI batch requests (`custom_id`, `method`, `url`, `body`), bare
objects (`prompt` | `prompt_token_ids` | `messages`, and any field of SamplingParams) and plain
text. Their fields are defined in jpaged.openai.protocol. Nothing here runs a model, so a line is
read in the same way whatever engine runs it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast
from pydantic_core import PydanticCustomError

from jpaged.integrations.batch.images import NO_PATHS, LineImages
from jpaged.integrations.batch.source import LineError
from jpaged.integrations.seeds import stable_seed
from jpaged.openai.json_text import json_object
from jpaged.openai.pooled import POOLED_URLS, PooledRequest
from jpaged.openai.protocol import (
    URLS,
    Body,
    BodyError,
    ChosenLogprobs,
    Conversation,
    GenerationRequest,
    Prompt,
    Tokens,
    placed,
    short,
    unknown_fields,
)
from jpaged.openai.responses import AnswerForm
from jpaged.request.inputs import with_adapter
from jpaged.sampling_params import SamplingParams

FORMS: dict[str, Literal["chat", "pooled"]] = {
    "/v1/chat/completions": "chat",
    **dict.fromkeys(POOLED_URLS, "pooled"),
}
PROMPTS = ("prompt", "prompt_token_ids", "messages")  # a bare line has one of these


def _served(url: Any) -> Any:
    if not isinstance(url, str) or url not in (*URLS, *POOLED_URLS):
        said = {"urls": ", ".join((*URLS, *POOLED_URLS))}
        raise PydanticCustomError("unsupported_url", "must be one of {urls}", said)
    return url


class BatchLine(Body):
    """A line of a batch file."""

    custom_id: str
    method: Literal["POST"]
    url: Annotated[str, BeforeValidator(_served)]
    body: dict[str, Any]


class BarePrompt(ChosenLogprobs):
    """A bare object with a prompt; one with messages is a Conversation."""

    longest: ClassVar[int | None] = 256

    prompt: Prompt | None = None
    prompt_token_ids: Tokens | None = None
    images: Annotated[list[str], FailFast()] | None = None
    videos: Annotated[list[str], FailFast()] | None = None

    @property
    def image_sources(self) -> list[str]:
        return self.images or []

    @property
    def video_sources(self) -> list[str]:
        return self.videos or []

    def forget_sources(self) -> None:
        self.images = [""] * len(self.images or ())
        self.videos = [""] * len(self.videos or ())

    def given_prompt(self, llm: Any = None) -> Any:
        if self._images or self._videos:
            name = "prompt" if self.prompt is not None else "prompt_token_ids"
            sources = {"images": self._images or None, "videos": self._videos or None}
            return placed(llm, {name: self._words, **sources})
        return self._words

    @property
    def _words(self) -> str | list[int]:
        return self.prompt if self.prompt is not None else self.prompt_token_ids or []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run sets for all of its lines. The fields of a line take precedence over `overrides`,
    and those over `defaults`.
    """

    defaults: SamplingParams  # the model's, from its generation_config
    model: str = ""  # the name in answers to lines without one
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the command line's
    seed: int = 0
    text: bool = False  # whether each line is a prompt, as plain text
    ignore_unknown: bool = False  # whether to run a line with unknown fields, without those fields
    adapters: frozenset[str] = frozenset()  # names of models that are adapters
    images: LineImages = NO_PATHS


@dataclasses.dataclass(kw_only=True)
class BatchRequest:
    """The request of one line. At first only `number` is known; `parse` fills in the rest as far as
    it gets, and error lines use that.

    number: of the line, from 1; blank lines count. id: custom_id, or a bare line's id. body: of a
    line that generates; pooled: that of one that asks for embeddings, scores or ranks. ignored:
    unknown fields that the run leaves out. images: what the run takes as images.
    """

    number: int
    form: Literal["chat", "completion", "pooled", "bare", "unknown"] = "unknown"
    id: str | int | None = None
    model: str = ""
    body: GenerationRequest | None = None
    pooled: PooledRequest | None = None
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    ignored: tuple[str, ...] = ()
    adapter: str | None = None
    images: LineImages = NO_PATHS

    def parse(self, raw: bytes, settings: Settings) -> None:
        """Read one line. Raises RequestError (BodyError if it is not a JSON object); what was read
        until then stays in the record.
        """
        self.model, self.images = settings.model, settings.images
        text = decode(raw, self.number)
        if settings.text:
            self.form, kind, fields = "bare", BarePrompt, {"prompt": text}
        else:
            kind, fields = self._read(json_object(text), settings)
        body = kind.read(self._known(kind, fields, settings))
        if body.model is not None:
            self.model = body.model
            self.adapter = body.model if body.model in settings.adapters else None
        if isinstance(body, PooledRequest):
            self.pooled = body
            return
        self.body = body
        more = {"seed": self._seed(settings.seed), **settings.overrides}
        self.params = body.params(settings.defaults, **more)

    def prompt_for(self, llm: Any) -> Any:
        """Return the prompt in the form that LLM.add_request takes, with its images and videos
        loaded, which the request itself does not keep. Raises RequestError.
        """
        assert self.body is not None
        if self.has_images:
            self.images.put_into(self.body, llm)
        try:
            prompt = self.body.prompt_for(llm, self.params)
        finally:
            self.body.put_sources(None, None)
        return prompt if self.adapter is None else with_adapter(self.adapter, prompt)

    @property
    def has_images(self) -> bool:
        return self.body is not None and self.body.has_sources

    @property
    def answer_form(self) -> AnswerForm:
        body = self.body
        assert body is not None
        # The answer to a bare line of token ids has token ids.
        ids = isinstance(body, BarePrompt) and not isinstance(body.given_prompt(), str)
        return AnswerForm(
            top=self.params.logprobs,
            token_ids=ids or bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )

    def _read(
        self, line: dict[str, Any], settings: Settings
    ) -> tuple[type[GenerationRequest] | type[PooledRequest], dict[str, Any]]:
        """Return the type of the request and its fields: the body of a batch request, or the bare
        object itself.
        """
        reason = id_of(line)
        if {"body", "url", "method"} & set(line):
            self.form = FORMS.get(str(line.get("url")), "completion")
            self.id = reason
            _, unknown = BatchLine.known(line)
            if unknown and not settings.ignore_unknown:
                raise unknown_fields([*unknown], " beside 'body'")
            batch = BatchLine.read(self._known(BatchLine, line, settings))
            return POOLED_URLS.get(batch.url) or URLS[batch.url], batch.body
        name = "custom_id" if "custom_id" in line else "id"
        if reason is None and line.get(name) is not None:
            raise LineError(f"{name}={short(line[name])}: must be a string", param=name)
        self.form, self.id = "bare", reason
        kinds = [kind for kind in PROMPTS if line.get(kind) is not None]
        if len(kinds) != 1:
            reason = f"has {' and '.join(kinds)}" if kinds else "has none"
            message = f"a request needs {' or '.join(PROMPTS)}; this one {reason}"
            raise LineError(message, param=PROMPTS[0])
        left_out = {"id", "custom_id", *PROMPTS} - {*kinds}
        fields = {k: v for k, v in line.items() if k not in left_out}
        return Conversation if kinds == ["messages"] else BarePrompt, fields

    def _known(
        self, kind: type[Body], fields: dict[str, Any], settings: Settings
    ) -> dict[str, Any]:
        """Return the fields without unknown ones, if the run may leave them out."""
        if not settings.ignore_unknown:
            return fields
        known, unknown = kind.known(fields)
        names = (name[:60] for name in unknown)
        # They are printed in the end.
        self.ignored += tuple(name if name.isprintable() else ascii(name) for name in names)
        return known

    def _seed(self, seed: int) -> int:
        """Return the line's own seed, which is the same in a whole run, a resumed run and a
        shard.
        """
        key = f"line {self.number}" if self.id is None else f"id {self.id}"
        return stable_seed(seed, key)


def id_of(line: Mapping[str, Any]) -> str | int | None:
    """Return the id that a line gives its request; None if it gives none."""
    value = line.get("custom_id") if "custom_id" in line else line.get("id")
    return value if type(value) in (str, int) else None


def identify(raw: bytes, number: int) -> str | int | None:
    """Return the id of a line that this run does not answer, as `parse` would read it."""
    if b'id"' not in raw and b"\\u" not in raw:
        return None
    try:
        return id_of(json_object(decode(raw, number)))
    except BodyError:
        return None


def decode(raw: bytes, number: int) -> str:
    """Return the text of a line without its ending. Raises LineError when it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        message = f"not UTF-8: {e.reason} at byte {e.start}"
        raise LineError(message, code="invalid_encoding") from None
