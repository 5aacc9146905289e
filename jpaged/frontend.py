"""Frontend: a caller's prompts in, Sequences out; ended Sequences in, RequestOutputs out. Owns the tokenizer."""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.keys import Key, key_from_seed
from jpaged.engine.sampling_params import SamplingParams
from jpaged.engine.sequence import Sequence
from jpaged.engine.text import TextStream, decode
from jpaged.errors import CapacityError, RequestError
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.prompts import tokenize


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
        self, prompt: Any, params: SamplingParams, key: Key, request_id: str | None, *, streaming: bool = False
    ) -> Sequence:
        """Check one request in full and make its Sequence."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__}: pass SamplingParams")
        params.validate(self.config, self.model.vocab_size)
        stops = len(self.eos_ids | set(params.stop_token_ids or ()))
        if params.min_tokens and stops > (limit := self.config.max_stop_ids):
            raise RequestError(
                f"min_tokens with {stops} EOS and stop ids is above max_stop_ids={limit} of EngineConfig"
            )
        text, ids = self.tokens(self.render(prompt) if isinstance(prompt, Chat) else prompt)
        if len(ids) >= self.max_model_len:
            limit = f"max_model_len={self.max_model_len}"
            raise CapacityError(
                f"prompt of {len(ids)} tokens leaves no room in {limit}: shorten it or raise max_model_len"
            )
        if params.stop_strings:
            self.need_tokenizer("stop strings")
        if not self.eos_ids and not params.ignore_eos and not self._warned_of_eos:
            self._warned_of_eos = True
            warnings.warn("no EOS token is known: generation ends at max_tokens only", stacklevel=4)
        if params.seed is not None:
            key = key_from_seed(int(params.seed))
        text_stream = None
        if params.stop_strings or (streaming and self.tokenizer is not None):
            text_stream = TextStream(
                self.tokenizer,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        return self.sequence(ids, params, prompt=text, key=key, request_id=request_id, text=text_stream)

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

    def output(self, seq: Sequence) -> RequestOutput:
        """What became of a sequence that has ended."""
        params, tokens = seq.params, seq.token_ids[seq.prompt_len :]
        completion = CompletionOutput(
            index=0,
            text=self._text(seq, tokens),
            token_ids=tokens,
            token_logprobs=np.array(seq.logprobs, np.float32),
            cumulative_logprob=float(np.sum(seq.logprobs)) if seq.logprobs else 0.0,
            logprobs=None if params.logprobs is None else [self._logprobs(top) for top in seq.top_logprobs],
            finish_reason=seq.finish_reason,  # pyright: ignore[reportArgumentType]
            stop_reason=seq.stop_reason,
        )
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None if top is None else self._logprobs(top) for top in seq.prompt_logprobs]
        return RequestOutput(
            request_id=seq.request_id,
            prompt=seq.prompt,
            prompt_token_ids=seq.token_ids[: seq.prompt_len],
            outputs=[completion],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=seq.num_cached,
            error=seq.error,
            weight_version=seq.weight_version,
        )

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
        if self.tokenizer is None:
            return None
        if seq.finish_reason == "stop":  # by an id: a stop string would have had a TextStream
            tokens = tokens[:-1]
        return decode(self.tokenizer, tokens, seq.params.skip_special_tokens)

    def _logprobs(self, top: list[tuple[int, float, int]]) -> dict[int, Logprob]:
        """{token: Logprob} of the actual token, then of the top ones in order."""
        tokenizer = self.tokenizer
        return {
            token: Logprob(logprob, rank, None if tokenizer is None else decode(tokenizer, [token], False))
            for token, logprob, rank in top
        }
