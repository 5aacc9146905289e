"""Builder: Prompts and SamplingParams in, Requests out, each checked in full."""

import dataclasses
import itertools
import os
import threading
import warnings

from jpaged.checkpoint.kept_tokenizer import whole
from jpaged.checks import check_real, check_whole
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.engine.keys import Key, key_from_seed
from jpaged.engine.origin import Origin
from jpaged.engine.scoring import Scoring
from jpaged.engine.sequence import Request, Sequence
from jpaged.engine.spans import Spans
from jpaged.errors import CapacityError, RequestError
from jpaged.request.detokenizer import TextStream
from jpaged.request.inputs import Inputs, Prompt
from jpaged.request.resume import resume
from jpaged.request.scores import Experts, ScoreOptions
from jpaged.sampling_params import SamplingParams
from jpaged.search.beam import BeamSearch, EarlyStopping, num_candidates
from jpaged.structured.grammars import Grammars, Matcher, check_served, form_begins
from jpaged.structured.token_rules import RuledTokens, TokenRules, word_tokens
from jpaged.types import Structured

HERE = os.path.dirname(os.path.dirname(__file__))


class Builder:
    """Makes the requests of one model. Any thread may call.

    inputs: of the same model; the tokenizer and the EOS ids are its. config: resolved.
    """

    def __init__(self, inputs: Inputs, config: EngineConfig):
        self.inputs, self.config = inputs, config
        self._grammars: Grammars | None = None
        self._making_grammars = threading.RLock()  # re-entrant: a tokenizer may call jpaged
        self._warned_of_eos = False
        self._ids = itertools.count()
        # Characters of tokens' texts, with special tokens (False) and without them (True).
        self._lengths: dict[bool, dict[int, int]] = {False: {}, True: {}}

    def completion(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        key: Key,
        *,
        streaming: bool = False,
        origin: Origin | None = None,
    ) -> Request:
        """Return the request of a prompt, with one Sequence for each of its `n` samples.

        key: what it draws from, unless sampling_params has a seed or the prompt has begun: that one
        goes on with its own. streaming: its text is wanted as its tokens come. origin: who shares
        the engine with others. Raises RequestError.
        """
        if (reason := self.inputs.no_tokens) is not None:
            raise RequestError(f"generate: {reason}")
        asked, inputs = sampling_params, self.inputs
        if not isinstance(asked, SamplingParams):
            kind = type(asked).__name__
            raise RequestError(f"sampling_params of type {kind}: pass SamplingParams")
        asked.validate(self.config, inputs.model.vocab_size)
        if asked.min_tokens:
            count = len(inputs.eos_ids | set(map(int, asked.stop_token_ids or ())))
            if count > (most := self.config.max_stop_ids):
                raise RequestError(
                    f"min_tokens with {count} EOS and stop ids is above max_stop_ids={most} "
                    "of EngineConfig"
                )
        if asked.stop_strings:
            inputs.need_tokenizer("stop strings")
        watched = bool(asked.stop_strings) or streaming
        # Asked in place, since nearly every request answers no.
        is_limited = asked.structured is not None or asked.bad_words
        is_limited = is_limited or asked.allowed_token_ids is not None
        matcher = self._constraint(asked) if is_limited else None
        if not asked.ignore_eos:
            self._warn_of_eos()
        # One sample scores the prompt for all.
        others = dataclasses.replace(asked, prompt_logprobs=None) if asked.n > 1 else asked
        request_id, begun = self.new_id(), prompt.begun
        spans = None if prompt.spans is None else self._served(prompt.spans)
        if begun is not None and begun.unfinished is not None:
            key = begun.unfinished.key
        request = Request(
            [
                Sequence(
                    request_id,
                    prompt.ids,
                    asked if index == 0 else others,
                    index=index,
                    key=key if asked.seed is None else key_from_seed(int(asked.seed)),
                    origin=origin,
                    salt=prompt.salt,
                    adapter=prompt.adapter,
                    spans=spans,
                    text=self._text_stream(asked) if watched else None,
                    structured=None if matcher is None else matcher.copy(),
                    max_model_len=inputs.max_model_len,
                    eos_ids=inputs.eos_ids,
                )
                for index in range(asked.n)
            ],
            prompt=prompt.text,
            salt=prompt.salt,
            is_streamed=streaming,
        )
        if begun is not None:
            resume(request, begun)
        return request

    def _constraint(self, asked: SamplingParams) -> Matcher | RuledTokens | None:
        """Return what limits the tokens of a request: its form, its rules, or both."""
        matcher = None if asked.structured is None else self.matcher(asked.structured)
        if not asked.bad_words and asked.allowed_token_ids is None:
            return matcher
        check_served(self.config)
        banned: list[tuple[int, ...]] = []
        if asked.bad_words:
            tokenizer = whole(self.inputs.need_tokenizer("bad_words"))
            with self.inputs.first_use():
                banned = word_tokens(tokenizer, asked.bad_words)
        eos_ids = frozenset() if asked.ignore_eos else self.inputs.eos_ids
        if matcher is not None:  # a form ends by these, whatever is ignored
            eos_ids = matcher.grammars.eos_ids
        size = self.inputs.model.vocab_size
        return RuledTokens(TokenRules(size, asked.allowed_token_ids, banned, eos_ids), matcher)

    def beam_search(
        self,
        prompt: Prompt,
        beam_width: int,
        max_tokens: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
        structured: Structured | None = None,
    ) -> BeamSearch:
        """Return the request of a beam search: see jpaged.beam_search. Raises RequestError."""
        if (reason := self.inputs.no_tokens) is not None:
            raise RequestError(f"beam_search: {reason}")
        _refuse_begun(prompt, "beam_search takes")
        wanted = _num_candidates(beam_width, len(self.inputs.eos_ids), self.config)
        check_real("length_penalty", length_penalty, -20.0, 20.0)
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError(f"early_stopping={early_stopping!r}: must be True, False or 'never'")
        asked = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=wanted,
            logprobs_mode="raw" if structured is None else "processed",
            structured=structured,
        )
        asked.validate(self.config, self.inputs.model.vocab_size)
        self._warn_of_eos()
        root = Sequence(
            self.new_id(),
            prompt.ids,
            asked,
            salt=prompt.salt,
            adapter=prompt.adapter,
            spans=None if prompt.spans is None else self._served(prompt.spans),
            structured=None if structured is None else self.matcher(structured),
            max_model_len=self.inputs.max_model_len,
            eos_ids=self.inputs.eos_ids,
        )
        return BeamSearch(
            root,
            int(beam_width),
            length_penalty=float(length_penalty),
            early_stopping=early_stopping,
            prompt=prompt.text,
        )

    def scores(self, prompts: list[Prompt], options: ScoreOptions) -> list[Request]:
        """Return a request for each sequence whose tokens are to be scored. See jpaged.score.
        Raises RequestError.
        """
        if (reason := self.inputs.no_tokens) is not None:
            raise RequestError(f"score: {reason}")
        lengths, vocab_size = [len(prompt.ids) for prompt in prompts], self.inputs.model.vocab_size
        scorings = options.scorings(lengths, vocab_size, self._experts())
        if options.wants_scores or options.routed is not None:
            check_combination(Facts(config=self.config, scores_more=True))
        asked = SamplingParams(
            temperature=options.temperature, prompt_logprobs=0, logprobs_mode="tempered"
        )
        asked.validate(self.config, vocab_size)
        form = options.structured
        begins = form_begins(form, options.prompt_lens, len(prompts), self.config)
        self._check_lengths(lengths)
        matchers: list[Matcher | None] = [None] * len(prompts)
        if form is not None:
            for i, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
                matchers[i] = self.matcher(form).scoring(i, list(prompt.ids), begin)
        return [
            self._reading(prompt, asked, scoring, matcher)
            for prompt, scoring, matcher in zip(prompts, scorings, matchers, strict=True)
        ]

    def _experts(self) -> Experts | None:
        """Return the experts of the model, where the cache keeps which of them tokens took."""
        if not self.config.routed_experts:
            return None
        mixtures = self.inputs.model.mixtures
        return Experts(len(mixtures), mixtures[0].experts_per_token, mixtures[0].num_experts)

    def hidden(self, prompts: list[Prompt], *, last: bool = False) -> list[Request]:
        """Return a request for each sequence whose hidden states are wanted, or the last of them
        alone: see jpaged.hidden. Raises RequestError.
        """
        check_combination(Facts(config=self.config, scores_more=True))
        lengths = [len(prompt.ids) for prompt in prompts]
        self._check_lengths(lengths)
        at_once, most = not self.inputs.model.is_causal, self.config.max_num_batched_tokens
        if at_once and (longest := max(lengths, default=0)) > most:
            raise CapacityError(
                f"sequence {lengths.index(longest)} of {longest} tokens is longer than "
                f"max_num_batched_tokens={most}: one step computes a whole sequence of a model "
                "that is not causal"
            )
        last = last and not at_once  # what comes before is part of every state
        scorings = [
            Scoring(hidden=True, first=length - 1 if last else 0, at_once=at_once)
            for length in lengths
        ]
        return [
            self._reading(prompt, SamplingParams(), scoring)
            for prompt, scoring in zip(prompts, scorings, strict=True)
        ]

    def _check_lengths(self, lengths: list[int]) -> None:
        for i, length in enumerate(lengths):
            if length > (most := self.inputs.max_model_len):
                raise CapacityError(
                    f"sequence {i} of {length} tokens is longer than max_model_len={most}"
                )

    def _reading(
        self,
        prompt: Prompt,
        asked: SamplingParams,
        scoring: Scoring,
        matcher: Matcher | None = None,
    ) -> Request:
        """Return a request of a sequence that draws nothing."""
        _refuse_begun(prompt, "score and hidden take")
        sequence = Sequence(
            self.new_id(),
            prompt.ids,
            asked,
            salt=prompt.salt,
            adapter=prompt.adapter,
            spans=None if prompt.spans is None else self._served(prompt.spans),
            structured=matcher,
            scoring=scoring,
            max_model_len=self.inputs.max_model_len,
            eos_ids=self.inputs.eos_ids,
        )
        return Request([sequence])

    def _served(self, spans: Spans) -> Spans:
        """Return the embeddings of a prompt, which this engine can serve: RequestError where it has
        no pool for them, CapacityError for an image that the tower takes in no call, or that no
        step can take whole and must.
        """
        config = self.config
        num_images = sum(span.image is not None for span in spans)
        facts = Facts(config=config, num_embedded=sum(map(len, spans)), num_images=num_images)
        check_combination(facts)
        if not self.inputs.model.is_causal:
            raise RequestError("embeddings: this model, whose tokens see each other, takes tokens")
        images = self.inputs.images
        for span in spans:
            # As no image is that a prompt names.
            if images is not None and span.image is not None and len(span) > images.most:
                raise CapacityError(
                    f"an image or a video of {len(span)} tokens at {span.start}: the limit is "
                    f"{images.most}; send fewer pixels or frames, or raise max_image_tokens= of "
                    "EngineConfig"
                )
        most = config.max_num_batched_tokens - (config.num_rows if config.mixed else 0)
        for span in spans if spans.are_whole else ():
            if span.grid is not None and len(span) > min(most, config.max_embeddings):
                raise CapacityError(
                    f"an image of {len(span)} tokens, which see each other, does not fit a step: "
                    f"raise max_embeddings={config.max_embeddings} or "
                    f"max_num_batched_tokens={config.max_num_batched_tokens}"
                )
        return spans

    def matcher(self, structured: Structured) -> Matcher:
        """Return a Matcher at the beginning of a form; RequestError where it cannot be served."""
        check_served(self.config)
        if self._grammars is None:
            with self._making_grammars, self.inputs.first_use():
                if self._grammars is None:  # another thread may have made it meanwhile
                    tokenizer = whole(self.inputs.need_tokenizer("structured output"))
                    vocab_size, eos_ids = self.inputs.model.vocab_size, self.inputs.eos_ids
                    self._grammars = Grammars(tokenizer, vocab_size, eos_ids)
        return self._grammars.matcher(structured)

    def new_id(self) -> str:
        """Return a request_id that this object has not given yet, and that no caller gives by
        accident.
        """
        return f"jpaged-{next(self._ids)}"

    def _text_stream(self, asked: SamplingParams) -> TextStream | None:
        """Return what watches the text of one sample; None without a tokenizer."""
        if self.inputs.tokenizer is None:
            return None
        return TextStream(
            self.inputs.tokenizer,
            stop=asked.stop_strings,
            include_stop=asked.include_stop_str_in_output,
            skip_special_tokens=asked.skip_special_tokens,
            lengths=self._lengths[asked.skip_special_tokens],
        )

    def _warn_of_eos(self) -> None:
        if self._warned_of_eos or self.inputs.eos_ids:
            return
        self._warned_of_eos = True
        text = "no EOS token is known: generation ends at max_tokens only"
        warnings.warn(text, skip_file_prefixes=(HERE,))  # the line that called jpaged


def _refuse_begun(prompt: Prompt, what: str) -> None:
    if prompt.begun is not None:
        raise RequestError(f"{what} prompts, not outputs: pass its token ids")


def _num_candidates(beam_width: int, num_eos: int, config: EngineConfig) -> int:
    """Return how many continuations of each beam a search looks at; RequestError where there may
    not be as many.
    """
    check_whole("beam_width", beam_width, 1)
    if beam_width > config.num_rows:
        raise RequestError(f"beam_width={beam_width} is above max_num_seqs={config.num_rows}")
    wanted = num_candidates(int(beam_width), num_eos)
    if wanted > config.max_logprobs:
        raise RequestError(
            f"beam_width={beam_width} with {num_eos} EOS ids looks at {wanted} candidates a beam: "
            f"raise max_logprobs={config.max_logprobs} of EngineConfig (at most the vocabulary)"
        )
    return wanted
