"""Frontend: a caller's prompts in, Requests out; ended Requests in, RequestOutputs out. Owns the tokenizer."""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.beam import BeamSearch, EarlyStopping, num_candidates
from jpaged.engine.keys import Key, key_from_seed
from jpaged.engine.sampling_params import SamplingParams, check_real, check_whole
from jpaged.engine.sequence import Request, Sequence
from jpaged.engine.text import TextStream, decode
from jpaged.errors import CapacityError, RequestError
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.prompts import cache_salt, tokenize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation as a prompt: a list of {"role", "content"}, and how the chat template is to render it."""

    messages: Any
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Frontend:
    """Checks and tokenizes requests for one model, and turns what the engine made of them into outputs.

    config: resolved. tokenizer: None takes the source folder's, loaded when first needed.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, tokenizer: Any, source: Path | None):
        assert config.max_model_len is not None
        self.model, self.config = model, config
        self.max_model_len = config.max_model_len
        self.source = source
        self._tokenizer = tokenizer
        self._tokenizer_sought = tokenizer is not None
        self._generation_config = load_generation_config(source) if source is not None else {}
        self._eos_ids: frozenset[int] | None = None
        self._warned_of_eos = False
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        if not self._tokenizer_sought:
            self._tokenizer_sought = True
            self._tokenizer = load_tokenizer(self.source) if self.source is not None else None
        return self._tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a completion: the union of config, generation_config and tokenizer."""
        if self._eos_ids is None:
            ids = set(self.model.eos_token_ids)
            eos = self._generation_config.get("eos_token_id")
            ids |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
            own = getattr(self.tokenizer, "eos_token_id", None)
            ids |= set() if own is None else {own}
            self._eos_ids = frozenset(i for i in ids if 0 <= i < self.model.vocab_size)
        return self._eos_ids

    def need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer: pass tokenizer=, or load the params from a folder that has one"
            )
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: self._generation_config[name] for name in names if self._generation_config.get(name) is not None}
        if self._generation_config.get("do_sample") is False:
            given["temperature"] = 0.0
        return SamplingParams(**given)

    def render(self, chat: Chat) -> list[int]:
        """Token ids of one conversation; RequestError when there is no chat template or it refuses the messages."""
        tokenizer = self.need_tokenizer("chat")
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("chat: the tokenizer has no chat template; render the prompt yourself and call generate")
        try:
            rendered = tokenizer.apply_chat_template(
                chat.messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                **chat.template_kwargs,
            )
        except Exception as e:  # jinja and transformers raise many types for messages that a template does not take
            raise RequestError(f"chat: the template refused the messages: {e}") from e
        return [int(t) for t in rendered]

    def request(
        self, prompt: Any, params: SamplingParams, key: Key, request_id: str | None = None, *, streaming: bool = False
    ) -> Request:
        """Check one request in full and make its Sequences, one a sample."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__}: pass SamplingParams")
        params.validate(self.config, self.model.vocab_size)
        stops = len(self.eos_ids | set(params.stop_token_ids or ()))
        if params.min_tokens and stops > (limit := self.config.max_stop_ids):
            raise RequestError(
                f"min_tokens with {stops} EOS and stop ids is above max_stop_ids={limit} of EngineConfig"
            )
        text, ids = self._prompt(prompt)
        if params.stop_strings:
            self.need_tokenizer("stop strings")
        if not params.ignore_eos:
            self._warn_of_eos()
        key = key if params.seed is None else key_from_seed(int(params.seed))
        request_id = self.new_id() if request_id is None else request_id
        watched = bool(params.stop_strings) or (streaming and self.tokenizer is not None)
        samples = [
            self.sequence(
                ids,
                # One sample scores the prompt for all.
                params if index == 0 else dataclasses.replace(params, prompt_logprobs=None),
                request_id=request_id,
                key=key,
                index=index,
                salt=cache_salt(prompt),
                text=self._text_stream(params) if watched else None,
            )
            for index in range(params.n)
        ]
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
            raise RequestError(f"beam_width={beam_width} is above max_num_seqs={self.config.max_num_seqs}")
        wanted = num_candidates(int(beam_width), len(self.eos_ids))
        if wanted > self.config.max_logprobs:
            raise RequestError(
                f"beam_width={beam_width} with {len(self.eos_ids)} EOS ids looks at {wanted} candidates a beam: "
                f"raise max_logprobs={self.config.max_logprobs} of EngineConfig (at most the vocabulary)"
            )
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError(f"early_stopping={early_stopping!r}: must be True, False or 'never'")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=wanted)
        params.validate(self.config, self.model.vocab_size)
        text, ids = self._prompt(prompt)
        self._warn_of_eos()
        root = self.sequence(ids, params, salt=cache_salt(prompt))
        return BeamSearch(
            root, int(beam_width), length_penalty=float(length_penalty), early_stopping=early_stopping, prompt=text
        )

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form, which leaves room for a token."""
        text, ids = self.tokens(self.render(prompt) if isinstance(prompt, Chat) else prompt)
        if len(ids) >= self.max_model_len:
            limit = f"max_model_len={self.max_model_len}"
            raise CapacityError(
                f"prompt of {len(ids)} tokens leaves no room in {limit}: shorten it or raise max_model_len"
            )
        return text, ids

    def _warn_of_eos(self) -> None:
        if not self.eos_ids and not self._warned_of_eos:
            self._warned_of_eos = True
            warnings.warn("no EOS token is known: generation ends at max_tokens only", stacklevel=5)

    def _text_stream(self, params: SamplingParams) -> TextStream:
        return TextStream(
            self.tokenizer,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def tokens(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form but Chat, checked against the vocabulary."""
        return tokenize(prompt, self.need_tokenizer, self.model.vocab_size)

    def sequence(
        self, ids: list[int], params: SamplingParams, *, request_id: str | None = None, **fields: Any
    ) -> Sequence:
        """A Sequence with this model's limits; fields are Sequence's own."""
        return Sequence(
            self.new_id() if request_id is None else request_id,
            ids,
            params,
            max_model_len=self.max_model_len,
            eos_ids=self.eos_ids,
            **fields,
        )

    def output(self, request: Request) -> RequestOutput:
        """What became of a request that has ended."""
        first = request.sequences[0]
        if isinstance(request, BeamSearch):
            completions = self._beams(request)
        else:
            completions = [self._completion(seq) for seq in request.sequences]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [None if top is None else self._logprobs(top) for top in first.prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.prompt_len],
            outputs=completions,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached,
            error=request.error,
            weight_version=request.weight_version,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        tokens = seq.token_ids[seq.prompt_len :]
        return CompletionOutput(
            index=seq.index,
            text=self._text(seq, tokens),
            token_ids=tokens,
            token_logprobs=np.array(seq.logprobs, np.float32),
            cumulative_logprob=float(np.sum(seq.logprobs)) if seq.logprobs else 0.0,
            logprobs=None if seq.params.logprobs is None else [self._logprobs(top) for top in seq.top_logprobs],
            finish_reason=seq.finish_reason,  # pyright: ignore[reportArgumentType]
            stop_reason=seq.stop_reason,
        )

    def _beams(self, search: BeamSearch) -> list[CompletionOutput]:
        """The hypotheses of a search, best first."""
        return [
            CompletionOutput(
                index=i,
                text=self._decode(h.token_ids[:-1] if h.finish_reason == "stop" else h.token_ids),
                token_ids=h.token_ids,
                token_logprobs=np.array(h.logprobs, np.float32),
                cumulative_logprob=float(np.sum(h.logprobs)),
                finish_reason=h.finish_reason,
                score=h.score,
            )
            for i, h in enumerate(search.results())
        ]

    def failed(self, error: RequestError, prompt: Any, token_ids: list[int]) -> RequestOutput:
        """The output of a request that never ran."""
        empty = CompletionOutput(
            index=0,
            text=None,
            token_ids=[],
            token_logprobs=np.zeros(0, np.float32),
            cumulative_logprob=0.0,
            finish_reason="error",
        )
        return RequestOutput(
            request_id=self.new_id(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            outputs=[empty],
            error=error,
        )

    def new_id(self) -> str:
        return str(next(self._ids))

    def _text(self, seq: Sequence, tokens: list[int]) -> str | None:
        if seq.text is not None:
            return seq.text.finish()
        if seq.finish_reason == "stop":  # by an id: a stop string would have had a TextStream
            tokens = tokens[:-1]
        return self._decode(tokens, seq.params.skip_special_tokens)

    def _decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str | None:
        return None if self.tokenizer is None else decode(self.tokenizer, tokens, skip_special_tokens)

    def _logprobs(self, top: list[tuple[int, float, int]]) -> dict[int, Logprob]:
        """{token: Logprob} of the actual token, then of the top ones in order."""
        tokenizer = self.tokenizer
        return {
            token: Logprob(logprob, rank, None if tokenizer is None else decode(tokenizer, [token], False))
            for token, logprob, rank in top
        }
