"""Processor: a caller's prompts in, Requests out; ended Requests in, RequestOutputs out. Owns the
tokenizer.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer
from jpaged.checks import check_real, check_whole
from jpaged.config import EngineConfig
from jpaged.engine.keys import Key, key_from_seed
from jpaged.engine.sequence import Request, Sequence
from jpaged.errors import CapacityError, RequestError
from jpaged.models.config import ModelConfig
from jpaged.request.detokenizer import TextStream, decode
from jpaged.request.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.request.prompts import cache_salt, tokenize
from jpaged.request.sampling_params import SamplingParams
from jpaged.search.beam import BeamSearch, EarlyStopping, Hypothesis, num_candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation as a prompt: a list of {"role", "content"}, and how the chat template is to
    render it.
    """

    messages: Any
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Processor:
    """Checks and tokenizes requests for one model, and turns what the engine made of them into
    outputs.

    config: resolved. tokenizer: None takes the source folder's, loaded when first needed.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, tokenizer: Any, source: Path | None
    ):
        assert config.max_model_len is not None
        self.model, self.config = model, config
        self.max_model_len = config.max_model_len
        self.source = source
        self._given_tokenizer = tokenizer
        self._generation_config = load_generation_config(source) if source is not None else {}
        self._warned_of_eos = False
        self._ids = itertools.count()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        if self._given_tokenizer is not None or self.source is None:
            return self._given_tokenizer
        return load_tokenizer(self.source)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a completion: the union of config, generation_config and tokenizer."""
        named = self._generation_config.get("eos_token_id")
        named = named if isinstance(named, list) else [named]
        ids = {*self.model.eos_token_ids, *named, getattr(self.tokenizer, "eos_token_id", None)} - {
            None
        }
        return frozenset(i for i in ids if 0 <= i < self.model.vocab_size)

    def need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            remedy = "pass tokenizer=, or load the params from a folder that has one"
            raise RequestError(f"{what} needs a tokenizer: {remedy}")
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {
            name: self._generation_config[name]
            for name in names
            if self._generation_config.get(name) is not None
        }
        if self._generation_config.get("do_sample") is False:
            given["temperature"] = 0.0
        return SamplingParams(**given)

    def render(self, chat: Chat) -> list[int]:
        """Token ids of one conversation; RequestError when there is no chat template or it refuses
        the messages.
        """
        tokenizer = self.need_tokenizer("chat")
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                "chat: the tokenizer has no chat template; render the prompt yourself "
                "and call generate"
            )
        try:
            rendered = tokenizer.apply_chat_template(
                chat.messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=chat.add_generation_prompt
                and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **(chat.template_kwargs or {}),
            )
        # jinja and transformers raise many types for messages that a template does not take
        except Exception as e:
            raise RequestError(f"chat: the template refused the messages: {e}") from e
        return [int(t) for t in rendered]

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        key: Key,
        request_id: str | None = None,
        *,
        streaming: bool = False,
    ) -> Request:
        """Check one request in full and make its Sequences, one a sample."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params of type {type(params).__name__}: pass SamplingParams"
            )
        params.validate(self.config, self.model.vocab_size)
        count = len(self.eos_ids | set(params.stop_token_ids or ()))
        if params.min_tokens and count > (most := self.config.max_stop_ids):
            raise RequestError(
                f"min_tokens with {count} EOS and stop ids is above max_stop_ids={most} "
                "of EngineConfig"
            )
        text, ids = self._prompt(prompt)
        if params.stop_strings:
            self.need_tokenizer("stop strings")
        if not params.ignore_eos:
            self._warn_of_eos()
        key = key if params.seed is None else key_from_seed(int(params.seed))
        request_id = self.new_id() if request_id is None else request_id
        watched = bool(params.stop_strings) or (streaming and self.tokenizer is not None)
        keep, special = params.include_stop_str_in_output, params.skip_special_tokens
        stops = {"stop": params.stop_strings, "include_stop": keep, "skip_special_tokens": special}
        others = dataclasses.replace(params, prompt_logprobs=None) if params.n > 1 else params
        samples = []
        for index in range(params.n):
            how = {"request_id": request_id, "key": key, "index": index, "salt": cache_salt(prompt)}
            stream = TextStream(self.tokenizer, **stops) if watched else None
            # One sample scores the prompt for all.
            samples.append(self.sequence(ids, params if index == 0 else others, text=stream, **how))
        return Request(samples, prompt=text)

    def beam_search(
        self,
        prompt: Any,
        beam_width: int,
        max_tokens: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
    ) -> BeamSearch:
        """Check one beam search in full and make its request."""
        check_whole("beam_width", beam_width, 1)
        check_real("length_penalty", length_penalty, -20.0, 20.0)
        if beam_width > self.config.max_num_seqs:
            raise RequestError(
                f"beam_width={beam_width} is above max_num_seqs={self.config.max_num_seqs}"
            )
        wanted = num_candidates(int(beam_width), len(self.eos_ids))
        if wanted > self.config.max_logprobs:
            raise RequestError(
                f"beam_width={beam_width} with {len(self.eos_ids)} EOS ids looks at "
                f"{wanted} candidates a beam: "
                f"raise max_logprobs={self.config.max_logprobs} of EngineConfig (at most "
                "the vocabulary)"
            )
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError(f"early_stopping={early_stopping!r}: must be True, False or 'never'")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=wanted)
        params.validate(self.config, self.model.vocab_size)
        text, ids = self._prompt(prompt)
        self._warn_of_eos()
        root = self.sequence(ids, params, salt=cache_salt(prompt))
        how = {"early_stopping": early_stopping, "prompt": text}
        return BeamSearch(root, int(beam_width), length_penalty=float(length_penalty), **how)

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form, which leaves room for a token."""
        text, ids = self.tokens(self.render(prompt) if isinstance(prompt, Chat) else prompt)
        if len(ids) >= (most := self.max_model_len):
            said = f"prompt of {len(ids)} tokens leaves no room in max_model_len={most}"
            raise CapacityError(f"{said}: shorten it or raise max_model_len")
        return text, ids

    def _warn_of_eos(self) -> None:
        if not self.eos_ids and not self._warned_of_eos:
            self._warned_of_eos = True
            warnings.warn("no EOS token is known: generation ends at max_tokens only", stacklevel=5)

    def tokens(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form but Chat, checked against the vocabulary."""
        return tokenize(prompt, self.need_tokenizer, self.model.vocab_size)

    def sequence(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> Sequence:
        """A Sequence with this model's limits; fields are Sequence's own."""
        request_id = self.new_id() if request_id is None else request_id
        return Sequence(
            request_id,
            ids,
            params,
            max_model_len=self.max_model_len,
            eos_ids=self.eos_ids,
            **fields,
        )

    def new_id(self) -> str:
        return str(next(self._ids))

    def output(self, request: Request) -> RequestOutput:
        """What became of a request that has ended; its sequences are let go of."""
        first = request.sequences[0]
        if isinstance(request, BeamSearch):
            ended = [self._hypothesis(i, found) for i, found in enumerate(request.results())]
        else:
            ended = [self._sample(seq) for seq in request.sequences]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            outputs=ended,
            prompt_token_ids=first.token_ids[: first.prompt_len],
            prompt_logprobs=None
            if first.params.prompt_logprobs is None
            else self._logprobs(first.prompt_logprobs),
            num_cached_tokens=first.num_cached,
            error=request.error,
            weight_version=request.weight_version,
        )
        # each knows its request: without the cycle they are freed now, not by a collection
        request.sequences = []
        return output

    def failed(self, error: RequestError, prompt: Any, token_ids: list[int]) -> RequestOutput:
        """The output of a request that never ran."""
        text, ended = (
            prompt if isinstance(prompt, str) else None,
            [completion(0, [], [], "error", text=None)],
        )
        new_id = self.new_id()
        return RequestOutput(
            request_id=new_id, prompt=text, prompt_token_ids=token_ids, outputs=ended, error=error
        )

    def _sample(self, seq: Sequence) -> CompletionOutput:
        tokens = seq.token_ids[seq.prompt_len :]
        if seq.text is not None:
            text = seq.text.finish()
        else:  # "stop" is by an id then: a stop string would have had a TextStream
            text = self._decode(tokens, seq.finish_reason, seq.params.skip_special_tokens)
        more = {"text": text, "stop_reason": seq.stop_reason}
        if seq.params.logprobs is not None:
            more["logprobs"] = self._logprobs(seq.top_logprobs)
        return completion(seq.index, tokens, seq.logprobs, seq.finish_reason, **more)

    def _hypothesis(self, index: int, found: Hypothesis) -> CompletionOutput:
        more = {"text": self._decode(found.token_ids, found.finish_reason), "score": found.score}
        return completion(index, found.token_ids, found.logprobs, found.finish_reason, **more)

    def _decode(
        self, tokens: list[int], finish_reason: str | None, skip_special_tokens: bool = True
    ) -> str | None:
        tokens = tokens[:-1] if finish_reason == "stop" else tokens
        return (
            None if self.tokenizer is None else decode(self.tokenizer, tokens, skip_special_tokens)
        )

    def _logprobs(self, tops: Any) -> list[Any]:
        """{token: Logprob} of each list of (token, logprob, rank), in its order; None stays
        None.
        """

        def named(top: list[tuple[int, float, int]]) -> dict[int, Logprob]:
            texts = [
                None if self.tokenizer is None else decode(self.tokenizer, [token], False)
                for token, *_ in top
            ]
            return {
                t: Logprob(lp, rank, text) for (t, lp, rank), text in zip(top, texts, strict=True)
            }

        return [None if top is None else named(top) for top in tops]


def completion(
    index: int, tokens: list[int], logprobs: list[float], reason: Any, /, **more: Any
) -> CompletionOutput:
    """A CompletionOutput; more: its other fields."""
    found, total = np.array(logprobs, np.float32), float(np.sum(logprobs))
    more |= {"token_logprobs": found, "cumulative_logprob": total, "finish_reason": reason}
    return CompletionOutput(index=index, token_ids=tokens, **more)
