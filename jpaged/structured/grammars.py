"""Grammars: forms compiled for one tokenizer; Matcher: where one completion stands in its form.

The parsing is llguidance's, which the extra `structured` brings.
"""

import dataclasses
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jpaged.checks import check_whole
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.structured import spec
from jpaged.structured.trial import MOST_BYTES, MOST_SECONDS, Trial

# Of one request; what is above them is its error, before it is its neighbours' time and memory.
LIMITS = {
    "max_items_in_row": 2000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
KEPT = 32  # compiled forms
PATIENCE_S = 1e-3  # for masks made one after the other
# Tokens of words: where a form takes whatever they are made of, llguidance takes them all at once.
# It knows the like of strings in JSON by itself; a pattern of letters had each token looked at.
WORDS = [f"{of}{{1,{most}}}" for of in ("[a-z ]", "[a-zA-Z0-9 ]") for most in (10, 30)]


class Grammars:
    """The forms that requests of one model ask for, compiled; the latest ones are kept.

    tokenizer: of transformers, fast. vocab_size: V, as wide as the logits. eos_ids: end a text
    where it is complete. Raises ConfigError where llguidance is missing, RequestError where the
    tokenizer is none that it can read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]):
        try:
            import llguidance.hf  # pyright: ignore[reportMissingImports]
        except ImportError as e:
            raise ConfigError("structured output needs `pip install 'jpaged[structured]'`") from e
        if not eos_ids:
            raise RequestError("structured output needs a tokenizer or a config that names an EOS")
        try:
            slices = [*WORDS, *llguidance.LLTokenizer.general_slices()]
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids), slices=slices
            )
        except (ValueError, TypeError) as e:
            kind = type(tokenizer).__name__
            raise RequestError(f"structured output with a tokenizer of type {kind}: {e}") from e
        self._lib = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)  # pyright: ignore[reportArgumentType]
        self._threads = llguidance.LLExecutor(os.cpu_count() or 1)
        self._trial = Trial(LIMITS)
        # Compiled, or refused; least recently used first.
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self.words = -(-vocab_size // 32)
        self.eos_ids = eos_ids

    def matcher(self, structured: Mapping[str, Any]) -> "Matcher":
        """At the beginning of a form. RequestError, with llguidance's words, where it is none."""
        text = spec.grammar_of(structured)
        found = self._take(text)
        if found is None:
            with self._compiling:  # requests are made in several threads: who waited may find it
                found = self._take(text) or self._compiled(spec.kind_of(structured), text)
                with self._lock:
                    self._kept[text] = found
                    if len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
        with self._lock:
            if not isinstance(found, RequestError):
                return Matcher(self, found, found.deep_copy())
        raise RequestError(str(found))

    def _take(self, text: str) -> Any:
        """What is kept of a form, as the one that was used last; None where there is nothing."""
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
            return self._kept.get(text)

    def _compiled(self, kind: str, text: str) -> Any:
        """llguidance's, or the error of what it refuses or cannot compile in time."""
        if not self._trial.ends(kind, text):
            most = f"{MOST_SECONDS} s of a processor, {MOST_BYTES >> 30} GiB or a thread's stack"
            return spec.error(kind, f"takes more than {most} to compile")
        fresh = self._lib.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        return spec.error(kind, fresh.get_error()) if fresh.is_error() else fresh

    def fill(self, matchers: Sequence[tuple["Matcher", int]], masks_SW: np.ndarray) -> None:
        """Set the rows of these matchers to what may come next: a bit a token. The quick ones are
        made here and now, the rest in threads: waking those takes longer than many a mask.
        """
        pairs = [(matcher.state, row) for matcher, row in matchers]
        at, size = masks_SW.ctypes.data, masks_SW.shape[1] * masks_SW.itemsize
        began = time.perf_counter()
        for done, (state, row) in enumerate(pairs):
            if done and time.perf_counter() - began > PATIENCE_S:
                rest = pairs[done:]
                self._threads.unsafe_compute_mask_ptr(rest, at, size, masks_SW.shape[0])
                return
            state.unsafe_compute_mask_ptr(at + row * size, size)


def check_served(config: EngineConfig) -> None:
    """RequestError where an engine has no step that draws under masks. config: resolved."""
    if config.strict and not config.structured_output:
        said = "strict=True compiled no draws under masks: pass structured_output=True as well"
        raise RequestError(f"structured: {said}")


def form_begins(structured: Any, prompt_lens: Any, count: int, config: EngineConfig) -> list[int]:
    """Where the form of each of so many texts begins that are scored; checked."""
    if (structured is None) != (prompt_lens is None):
        raise RequestError("structured and prompt_lens: pass both, or neither")
    if structured is None:
        return [0] * count
    spec.check(structured)
    if config.strict:
        raise RequestError("structured: strict=True has no steps that score under masks")
    if not isinstance(prompt_lens, Sequence) or len(prompt_lens) != count:
        raise RequestError(
            f"prompt_lens={prompt_lens!r}: must be a list of {count}, one a sequence"
        )
    for length in prompt_lens:
        check_whole("prompt_lens", length, 1)
    return [int(length) for length in prompt_lens]


@dataclasses.dataclass(eq=False)
class Matcher:
    """A completion in its form. It is state: whoever restarts, forks or snapshots a sequence
    rewinds or copies it.

    fresh: llguidance's, before the first token; never changed. begins: of a text that is scored,
    the position at which its form begins.
    """

    grammars: Grammars
    fresh: Any
    state: Any
    begins: int = 0

    def copy(self) -> Self:
        return dataclasses.replace(self, state=self.state.deep_copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def push(self, token: int) -> None:
        """Go on by a token; one that may not come is an `error`."""
        self.state.consume_token(token)

    def rewind(self, token_ids: Sequence[int]) -> None:
        """To where these tokens lead from the beginning."""
        self.state = self.fresh.deep_copy()
        self.state.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """The tokens that must come from here on, none where there is a choice."""
        return self.state.compute_ff_tokens()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that are certain, and not yet drawn."""
        if token_ids:
            self.state.consume_tokens(list(token_ids))

    def go_back(self, count: int) -> None:
        """By so many tokens."""
        if count:
            self.state.rollback(count)

    def scoring(self, index: int, token_ids: Sequence[int], begins: int) -> Self:
        """Of a text whose form begins at a position; RequestError where it is not of that form.
        index: of the text, for the message.
        """
        valid = begins + self.state.validate_tokens(list(token_ids[begins:]))
        if valid < len(token_ids):
            said = f"sequence {index}: token {token_ids[valid]} at position {valid} is not of it"
            raise RequestError(f"structured: {said}")
        return dataclasses.replace(self, begins=begins)

    def fill_run(self, before: Sequence[int], run: Sequence[int], masks_TW: np.ndarray) -> None:
        """What might have come in the place of each token of a run, after those before it."""
        state = self.fresh.deep_copy()
        state.consume_tokens(list(before))
        size = masks_TW.shape[1] * masks_TW.itemsize
        for token, mask_W in zip(run, masks_TW, strict=True):
            state.unsafe_compute_mask_ptr(mask_W.ctypes.data, size)
            state.consume_token(token)

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a limit that was met, most of all."""
        return self.state.get_error() if self.state.is_error() else None
