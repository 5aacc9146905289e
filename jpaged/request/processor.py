"""Processor: a caller's prompts in, Requests out. Owns the tokenizer."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

from jpaged.checkpoint.kept_tokenizer import kept_tokenizer, whole
from jpaged.checkpoint.tokenizer import load_generation_config
from jpaged.checks import check_real, check_whole
from jpaged.config import EngineConfig
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.keys import Key, key_from_seed
from jpaged.engine.origin import Origin
from jpaged.engine.sequence import Request, Sequence
from jpaged.errors import CapacityError, RequestError
from jpaged.models.config import ModelConfig
from jpaged.request.chat import Chat, check_rendered_length, render
from jpaged.request.detokenizer import TextStream
from jpaged.request.length import too_long
from jpaged.request.prompts import Adapted, cached_under, tokenize
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import BeamSearch, EarlyStopping, num_candidates
from jpaged.structured.grammars import Grammars, Matcher, check_served, form_begins

# Held where a Processor uses its tokenizer for the first time: the first call of a tokenizer of
# transformers may change its settings, which must not happen while another thread encodes. One for
# all, since several models may have one tokenizer. Re-entrant: a tokenizer may call jpaged.
_FIRST_USE = threading.RLock()


class Processor:
    """Checks and tokenizes the requests of one model. Any thread may call.

    config: resolved. tokenizer: None takes the source folder's, loaded when first needed.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, tokenizer: Any, source: Path | None
    ):
        assert config.max_model_len is not None
        self.model, self.config = model, config
        self.max_model_len = config.max_model_len
        self._source = source
        self.adapters: dict[str, AdapterVersion] = {}  # that prompts can name
        self._given_tokenizer = tokenizer
        self._generation_config = {} if source is None else load_generation_config(source)
        self._warned_of_eos = False
        self._was_asked = self._was_used = False  # of the tokenizer
        self._grammars: Grammars | None = None
        self._ids = itertools.count()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the source folder's, else None."""
        if self._given_tokenizer is not None or self._source is None:
            return self._given_tokenizer
        return kept_tokenizer(self._source)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a completion: the union of config, generation_config and tokenizer."""
        named = self._generation_config.get("eos_token_id")
        ids = {*self.model.eos_token_ids, getattr(self.tokenizer, "eos_token_id", None)}
        ids.update(named if isinstance(named, list) else [named])
        return frozenset(i for i in ids if i is not None and 0 <= i < self.model.vocab_size)

    @property
    def grammars(self) -> Grammars:
        """What compiles the forms that requests ask for; made when the first one does."""
        if self._grammars is None:
            with _FIRST_USE:
                if self._grammars is None:  # another thread may have made it meanwhile
                    needed = whole(self._need_tokenizer("structured output"))
                    self._grammars = Grammars(needed, self.model.vocab_size, self.eos_ids)
        return self._grammars

    def matcher(self, structured: Mapping[str, Any]) -> Matcher:
        """At the beginning of a form; RequestError where there is none."""
        check_served(self.config)
        return self.grammars.matcher(structured)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the checkpoint's generation_config.json."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: self._generation_config.get(name) for name in names}
        if self._generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(
            **{name: value for name, value in values.items() if value is not None}
        )

    # Prompts to tokens

    def render(self, chat: Chat) -> list[int]:
        """Token ids of one conversation: see chat.render."""
        with self._first_use():
            return render(chat, self._need_tokenizer("chat"))

    def check_chat(self, chat: Chat) -> None:
        """Raise CapacityError for a long conversation that leaves no room in the context, before it
        is tokenized whole.
        """
        with self._first_use():
            check_rendered_length(chat, self._need_tokenizer("chat"), self.max_model_len)

    def tokens(self, prompt: Any, most: int | None = None) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form, checked against the vocabulary. most:
        CapacityError for as many tokens, before they are all made; None: any number.
        """
        prompt = prompt.prompt if isinstance(prompt, Adapted) else prompt
        if isinstance(prompt, Chat):
            if most is not None:
                self.check_chat(prompt)
            prompt = self.render(prompt)
        with self._first_use():
            return tokenize(prompt, self._need_tokenizer, self.model.vocab_size, most)

    # Prompts to requests

    def request(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        key: Key,
        *,
        streaming: bool = False,
        origin: Origin | None = None,
    ) -> Request:
        """Check one request in full and make its Sequences, one a sample. streaming: its text is
        wanted as its tokens come. origin: who shares the engine with others.
        """
        asked = sampling_params
        if not isinstance(asked, SamplingParams):
            kind = type(asked).__name__
            raise RequestError(f"sampling_params of type {kind}: pass SamplingParams")
        asked.validate(self.config, self.model.vocab_size)
        count = len(self.eos_ids | set(asked.stop_token_ids or ()))
        if asked.min_tokens and count > (most := self.config.max_stop_ids):
            raise RequestError(
                f"min_tokens with {count} EOS and stop ids is above max_stop_ids={most} "
                "of EngineConfig"
            )
        text, ids = self._prompt(prompt)
        if asked.stop_strings:
            self._need_tokenizer("stop strings")
        watched = bool(asked.stop_strings) or streaming
        matcher = None if asked.structured is None else self.matcher(asked.structured)
        if not asked.ignore_eos:
            self._warn_of_eos()
        # One sample scores the prompt for all.
        others = dataclasses.replace(asked, prompt_logprobs=None) if asked.n > 1 else asked
        how = {
            "request_id": self.new_id(),
            "key": key if asked.seed is None else key_from_seed(int(asked.seed)),
            "origin": origin,
            **cached_under(prompt, self.adapters),
        }
        samples = [
            self._sequence(
                ids,
                asked if index == 0 else others,
                index=index,
                text=_text_stream(self.tokenizer, asked) if watched else None,
                structured=None if matcher is None else matcher.copy(),
                **how,
            )
            for index in range(asked.n)
        ]
        return Request(samples, prompt=text)

    def beam_search(
        self,
        prompt: Any,
        beam_width: int,
        max_tokens: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
        structured: Mapping[str, Any] | None = None,
    ) -> BeamSearch:
        """Check one beam search in full and make its request."""
        wanted = _candidates(beam_width, len(self.eos_ids), self.config)
        _check_search(length_penalty, early_stopping)
        asked = _search_params(max_tokens, wanted, structured)
        asked.validate(self.config, self.model.vocab_size)
        text, ids = self._prompt(prompt)
        self._warn_of_eos()
        fields = cached_under(prompt, self.adapters)
        fields |= {} if structured is None else {"structured": self.matcher(structured)}
        root = self._sequence(ids, asked, request_id=self.new_id(), **fields)
        how = {"early_stopping": early_stopping, "prompt": text}
        return BeamSearch(root, int(beam_width), length_penalty=float(length_penalty), **how)

    def scores(
        self,
        token_lists: list[Any],
        temperature: float,
        structured: Mapping[str, Any] | None = None,
        prompt_lens: List[int] | None = None,
    ) -> list[Request]:
        """Check sequences whose tokens' logprobs are wanted, and make a request of each."""
        if temperature == 0:
            raise RequestError(
                "temperature=0: a greedy distribution has no log-probabilities; pass a positive one"
            )
        asked = SamplingParams(temperature=temperature, prompt_logprobs=0, logprobs_mode="tempered")
        asked.validate(self.config, self.model.vocab_size)
        begins = form_begins(structured, prompt_lens, len(token_lists), self.config)
        requests, most = [], self.max_model_len
        for i, token_list in enumerate(token_lists):
            _, ids = self.tokens(token_list)
            if len(ids) > most:
                raise CapacityError(
                    f"sequence {i} of {len(ids)} tokens is longer than max_model_len={most}"
                )
            fields = cached_under(token_list, self.adapters) | {"score_only": True}
            if structured is not None:
                fields["structured"] = self.matcher(structured).scoring(i, ids, begins[i])
            sequence = self._sequence(ids, asked, request_id=self.new_id(), **fields)
            requests.append(Request([sequence]))
        return requests

    def new_id(self) -> str:
        """Return a request_id that this object has not given yet, and that no caller gives by
        accident.
        """
        return f"jpaged-{next(self._ids)}"

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any form, which leaves room for a token."""
        text, ids = self.tokens(prompt, self.max_model_len)
        if len(ids) >= self.max_model_len:
            raise too_long(len(ids), self.max_model_len)
        return text, ids

    def _sequence(
        self, ids: list[int], sampling_params: SamplingParams, *, request_id: str, **fields: Any
    ) -> Sequence:
        """A Sequence with this model's limits; fields are Sequence's own."""
        limits = {"max_model_len": self.max_model_len, "eos_ids": self.eos_ids}
        return Sequence(request_id, ids, sampling_params, **limits, **fields)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            remedy = "pass tokenizer=, or load the params from a folder that has one"
            raise RequestError(f"{what} needs a tokenizer: {remedy}")
        self._was_asked = True
        return self.tokenizer

    @contextlib.contextmanager
    def _first_use(self) -> Iterator[None]:
        """Keep other threads from the tokenizer until it has been used once."""
        if self._was_used:
            yield
        else:
            with _FIRST_USE:
                yield
                self._was_used = self._was_asked

    def _warn_of_eos(self) -> None:
        if not self.eos_ids and not self._warned_of_eos:
            self._warned_of_eos = True
            warnings.warn("no EOS token is known: generation ends at max_tokens only", stacklevel=5)


def _check_search(length_penalty: Any, early_stopping: Any) -> None:
    check_real("length_penalty", length_penalty, -20.0, 20.0)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise RequestError(f"early_stopping={early_stopping!r}: must be True, False or 'never'")


def _search_params(max_tokens: int | None, wanted: int, structured: Any) -> SamplingParams:
    """Of a beam, so many of whose continuations are looked at: under the masks of a form."""
    how: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": wanted, "structured": structured}
    mode = "raw" if structured is None else "processed"
    return SamplingParams(temperature=0.0, logprobs_mode=mode, **how)


def _candidates(beam_width: int, num_eos: int, config: EngineConfig) -> int:
    """Continuations that a search looks at a beam; RequestError where there may not be as many."""
    check_whole("beam_width", beam_width, 1)
    if beam_width > config.max_num_seqs:
        raise RequestError(f"beam_width={beam_width} is above max_num_seqs={config.max_num_seqs}")
    wanted = num_candidates(int(beam_width), num_eos)
    if wanted > config.max_logprobs:
        raise RequestError(
            f"beam_width={beam_width} with {num_eos} EOS ids looks at {wanted} candidates a beam: "
            f"raise max_logprobs={config.max_logprobs} of EngineConfig (at most the vocabulary)"
        )
    return wanted


def _text_stream(tokenizer: Any, asked: SamplingParams) -> TextStream | None:
    """What watches the text of one sample; None without a tokenizer."""
    if tokenizer is None:
        return None
    return TextStream(
        tokenizer,
        stop=asked.stop_strings,
        include_stop=asked.include_stop_str_in_output,
        skip_special_tokens=asked.skip_special_tokens,
    )
