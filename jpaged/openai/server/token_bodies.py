"""The body of POST /inference/v1/generate, vLLM's form of tokens in and tokens out, and its
translation to a completion.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, FailFast, Field, PrivateAttr

from jpaged.openai import protocol
from jpaged.openai.fields import Integer
from jpaged.openai.forms import FormFields
from jpaged.openai.protocol import Body, BodyError, SamplingFields
from jpaged.openai.server.bodies import ROUTES, OfRoute, ServedCompletion, StreamOptions
from jpaged.sampling_params import SamplingParams

MOST_OF_AN_ID = 256  # characters
PATH = "/inference/v1/generate"
# The field here to blame for an error in a field of the completion.
BLAMED = {"prompt": "token_ids"}


class TokenSampling(SamplingFields, FormFields):
    """vLLM's SamplingParams, as far as they are SamplingParams here; `structured_outputs` and the
    other fields of forms too.

    The harmless ones say how vLLM makes an answer, and this answer has tokens whatever they say.
    """

    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "detokenize",
            "output_kind",
            "flat_logprobs",
            "skip_clone",
            "spaces_between_special_tokens",
        }
    )
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = protocol.NOT_BUILT | {
        "truncate_prompt_tokens": (),
        "extra_args": ({},),
        "prompt_logprob_token_ids": ([],),
        "skip_reading_prefix_cache": (False,),
    }

    logprobs: Integer | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, as a completion's body has them."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _short_id(value: str) -> str:
    if len(value) > MOST_OF_AN_ID:
        raise ValueError(f"is longer than {MOST_OF_AN_ID} characters")
    return value


class TokensBody(OfRoute):
    """The body of POST /inference/v1/generate.

    sampling_params: SamplingParams, whose defaults are LLM's own and not those of the model's
    generation_config; max_tokens is then up to the end of the context. request_id: any text, which
    the answer repeats. The harmless fields are what vLLM's render route returns beside the tokens.
    """

    harmless: ClassVar[frozenset[str]] = frozenset({"assistant_tokens_mask", "token_offsets"})
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": (),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    within: ClassVar[Mapping[str, type[Body]]] = {
        "sampling_params": TokenSampling,
        "stream_options": StreamOptions,
    }

    token_ids: Annotated[list[Integer], FailFast(), Field(min_length=1)]
    sampling_params: TokenSampling
    request_id: Annotated[str, AfterValidator(_short_id)] | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Integer | None = None


ROUTES[PATH] = TokensBody


class ServedTokens(ServedCompletion):
    """A completion that was made from a body of /inference/v1/generate. request_id: of that body,
    None where it had none.
    """

    longest: ClassVar[int | None] = None

    _request_id: str | None = PrivateAttr(default=None)

    @property
    def request_id(self) -> str | None:
        return self._request_id

    @classmethod
    def known(cls, data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        return TokensBody.known(data)

    @classmethod
    def read(cls, data: Any) -> Self:
        asked = TokensBody.read(data)
        sampling = asked.sampling_params.fields
        priority = asked.priority
        if priority is not None and sampling.setdefault("priority", priority) != priority:
            said = f"priority={priority}: sampling_params has another one"
            raise BodyError(said, param="priority")
        passed = {"stream": asked.stream, "cache_salt": asked.cache_salt, "model": asked.model}
        if asked.stream_options is not None:
            passed["stream_options"] = asked.stream_options.model_dump()
        try:
            body = super().read({"prompt": [asked.token_ids]} | _plain(sampling) | passed)
        except BodyError as e:
            param = BLAMED.get(e.param or "", e.param)
            raise BodyError(str(e), param=param, code=e.code) from None
        body._request_id = asked.request_id
        return body

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Return the SamplingParams of the request; a trainer's request says all that it wants, so
        `defaults`, the model's, are left out.
        """
        return super().params(SamplingParams(), **more)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON has them: forms are models until here."""
    dumped = {}
    for name, value in fields.items():
        is_model = hasattr(value, "model_dump")
        dumped[name] = value.model_dump(by_alias=True, exclude_none=True) if is_model else value
    return dumped
