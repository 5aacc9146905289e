"""Grammars: forms compiled for one tokenizer; Matcher: where one completion stands in its form.

The parsing is llguidance's, which the extra `structured` brings.
"""

import dataclasses
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jpaged.checks import check_whole
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.structured import spec
from jpaged.structured.trial import Trial, Verdict
from jpaged.types import Structured, Tokenizer

# Of one request; what is above them is its error, before it is its neighbours' time and memory.
LIMITS = {
    "max_items_in_row": 2000,
    "max_lexer_states": 50_000,
    # Expressions that a pattern unfolds into: 200 bytes each were measured, so 40 MB at most. Half
    # as many refuse an enum of 20,000 names.
    "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
KEPT = 32  # compiled forms
KEPT_BYTES = 512 << 20  # of them all
# Estimated: what a mask adds to a form, whose lexer keeps the states that it came through. Measured
# were 1 to 4 KB with schemas, and 20 KB with patterns that are made to be large.
BYTES_A_MASK = 20 << 10
JUDGED = 1024  # verdicts of trials
PATIENCE_S = 2e-3  # for masks made one after the other
# Tokens of words: where a form takes whatever they are made of, llguidance takes them all at once.
# It knows the like of strings in JSON by itself; a pattern of letters had each token looked at.
# They come after its own: before those, a mask of a long string takes a fifth more or a third.
WORDS = [f"{of}{{1,{most}}}" for of in ("[a-z ]", "[a-zA-Z0-9 ]") for most in (10, 30)]


class Grammars:
    """The forms that requests of one model ask for, compiled; the latest ones are kept.

    tokenizer: of transformers, fast. vocab_size: V, as wide as the logits. eos_ids: end a text
    where it is complete. Raises ConfigError where llguidance is missing, RequestError where the
    tokenizer is none that it can read.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]):
        try:
            import llguidance.hf  # pyright: ignore[reportMissingImports]
        except ImportError as e:
            raise ConfigError("structured output needs `pip install 'jpaged[structured]'`") from e
        if not eos_ids:
            raise RequestError("structured output needs a tokenizer or a config that names an EOS")
        try:
            slices = [*llguidance.LLTokenizer.general_slices(), *WORDS]
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids), slices=slices
            )
        except (ValueError, TypeError) as e:
            kind = type(tokenizer).__name__
            raise RequestError(f"structured output with a tokenizer of type {kind}: {e}") from e
        self._lib = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)  # pyright: ignore[reportArgumentType]
        self._threads = llguidance.LLExecutor(os.cpu_count() or 1)
        named = getattr(tokenizer, "added_tokens_decoder", {})
        special = {i: token.content for i, token in named.items() if token.special}
        self._trial = Trial(LIMITS, vocab_size=vocab_size, special=special, eos_id=min(eos_ids))
        # By digest, least recently used first: compiled forms; and what trials said, None or why a
        # form is refused, with its bytes.
        self._kept: OrderedDict[bytes, Form] = OrderedDict()
        self._judged: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._trying = threading.Lock()
        self.words = -(-vocab_size // 32)
        self.eos_ids = eos_ids

    def matcher(self, structured: Structured) -> "Matcher":
        """At the beginning of a form. RequestError, with llguidance's words, where it is none, or
        needs more time or memory than a form may.
        """
        text = spec.grammar_of(structured)
        kind, key = spec.kind_of(structured), hashlib.blake2b(text.encode()).digest()
        form = self._take(key)
        if form is None:
            verdict = self._verdict(key, kind, text)
            if verdict.refusal is not None:
                raise spec.error(kind, verdict.refusal)
            with self._compiling:  # requests are made in several threads: who waited may find it
                form = self._take(key)
                if form is None:
                    form = self._compiled(kind, key, text, verdict.num_bytes)
                    with self._lock:
                        self._kept[key] = form
                        self._trim()
        with self._lock:
            return Matcher(self, form, form.compiled.deep_copy())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the forms that are kept: measured as they were tried, and estimated for the
        masks since.
        """
        with self._lock:
            return sum(form.num_bytes for form in self._kept.values())

    def _take(self, key: bytes) -> "Form | None":
        """Return the form that is kept, and count it as used last; None if there is none."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _verdict(self, key: bytes, kind: str, text: str) -> Verdict:
        """Return what the trial says of a form; verdicts are kept longer than forms."""
        if (known := self._judgement(key)) is not None:
            return known
        with self._trying:  # many requests of one form at a time: one of them has it tried
            if (known := self._judgement(key)) is not None:
                return known
            verdict = self._trial.judge(kind, text)
            with self._lock:
                self._judged[key] = verdict
                if len(self._judged) > JUDGED:
                    self._judged.popitem(last=False)
        return verdict

    def _judgement(self, key: bytes) -> Verdict | None:
        """Return the verdict that is kept, and count it as used last; None if there is none."""
        with self._lock:
            if key in self._judged:
                self._judged.move_to_end(key)
            return self._judged.get(key)

    def _compiled(self, kind: str, key: bytes, text: str, num_bytes: int) -> "Form":
        """A form that nobody has used; RequestError for what llguidance refuses."""
        fresh = self._lib.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if fresh.is_error():
            raise spec.error(kind, fresh.get_error())
        return Form(kind=kind, key=key, text=text, compiled=fresh, tried_bytes=num_bytes)

    def _trim(self) -> None:
        """Drop the forms that are used least while there are too many, and the largest while they
        hold too much. Rows that are in one keep it until they end. The caller holds the lock.
        """
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        while sum(form.num_bytes for form in self._kept.values()) > KEPT_BYTES:
            del self._kept[max(self._kept.values(), key=lambda form: form.num_bytes).key]

    def count(self, matchers: Sequence["Matcher"], masks: int) -> None:
        """Count masks that were made for each of these matchers."""
        with self._lock:
            for matcher in matchers:
                matcher.form.num_masks += masks
            self._trim()

    def renewed(self, form: "Form") -> "Form | None":
        """Return the form compiled anew, for one row whose form failed after others had used it; it
        is kept no longer for those that come. None where it cannot be compiled any more.
        """
        with self._lock:
            if self._kept.get(form.key) is form:
                del self._kept[form.key]
        with self._compiling:
            try:
                return self._compiled(form.kind, form.key, form.text, form.tried_bytes)
            except RequestError:
                return None

    def fill(self, matchers: Sequence[tuple["Matcher", int]], masks_SW: np.ndarray) -> None:
        """Set the rows of these matchers to what may come next: a bit a token. The quick ones are
        made here and now, the rest in threads: waking those takes longer than many a mask.
        """
        self.count([matcher for matcher, _ in matchers], 1)
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
    check_combination(Facts(config=config, draws_masked=True))


def form_begins(
    structured: Structured | None, prompt_lens: object, count: int, config: EngineConfig
) -> list[int]:
    """Return where the form of each of so many texts begins that are scored; checked."""
    if (structured is None) != (prompt_lens is None):
        raise RequestError("structured and prompt_lens: pass both, or neither")
    if structured is None:
        return [0] * count
    spec.check(structured)
    check_combination(Facts(config=config, scores_masked=True))
    if not isinstance(prompt_lens, Sequence) or len(prompt_lens) != count:
        raise RequestError(
            f"prompt_lens={prompt_lens!r}: must be a list of {count}, one a sequence"
        )
    for length in prompt_lens:
        check_whole("prompt_lens", length, 1)
    return [int(length) for length in prompt_lens]


@dataclasses.dataclass(eq=False, kw_only=True)
class Form:
    """A compiled form. Its lexer, which grows with each mask, is shared by all rows that are in it.

    compiled: llguidance's matcher before the first token; never changed. tried_bytes: what it held
    when it was tried. num_masks: that were made since.
    """

    kind: str
    key: bytes
    text: str
    compiled: Any
    tried_bytes: int
    num_masks: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds: measured in its trial, and estimated for the masks since."""
        return len(self.text) + self.tried_bytes + BYTES_A_MASK * self.num_masks


@dataclasses.dataclass(eq=False)
class Matcher:
    """A completion in its form. It is state: whoever restarts, forks or snapshots a sequence
    rewinds or copies it.

    state: llguidance's. begins: of a text that is scored, the position at which its form begins.
    is_renewed: whether its form was compiled anew for it.
    """

    grammars: Grammars
    form: Form
    state: Any
    begins: int = 0
    is_renewed: bool = False
    name = "structured"

    def copy(self) -> Self:
        return dataclasses.replace(self, state=self.state.deep_copy())

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def renew(self, token_ids: Sequence[int]) -> bool:
        """Go on after these tokens in a lexer that is this row's alone, where a limit of the shared
        one was met, which other rows helped to fill. False where the lexer already was this row's,
        or nothing failed.
        """
        if not self.state.is_error() or not self._change_form():
            return False
        self.rewind(token_ids)
        return True

    def _change_form(self) -> bool:
        form = None if self.is_renewed else self.grammars.renewed(self.form)
        if form is None:
            return False
        self.form, self.is_renewed = form, True
        return True

    def push(self, token: int) -> None:
        """Go on by a token; one that may not come is an `error`."""
        self.state.consume_token(token)

    def rewind(self, token_ids: Sequence[int]) -> None:
        """Go to where these tokens lead from the beginning."""
        self.state = self.form.compiled.deep_copy()
        self.state.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Return the tokens that must come from here on, none where there is a choice."""
        return self.state.compute_ff_tokens()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that are certain, and not yet drawn."""
        if token_ids:
            self.state.consume_tokens(list(token_ids))

    def go_back(self, count: int) -> None:
        """Go back by so many tokens."""
        if count:
            self.state.rollback(count)

    def scoring(self, index: int, token_ids: Sequence[int], begins: int) -> Self:
        """Return what masks a text that is scored, whose form begins at a position; RequestError
        where it is not of that form. index: the text's place, for the message.
        """
        answer = list(token_ids[begins:])
        valid = begins + self.state.validate_tokens(answer)
        # A lexer that others have filled refuses what is of the form: a new one knows better.
        if valid < len(token_ids) and self._change_form():
            self.rewind([])
            valid = begins + self.state.validate_tokens(answer)
        if valid < len(token_ids):
            said = f"sequence {index}: token {token_ids[valid]} at position {valid} is not of it"
            raise RequestError(f"structured: {said}")
        return dataclasses.replace(self, begins=begins)

    def fill_run(self, before: Sequence[int], run: Sequence[int], masks_TW: np.ndarray) -> None:
        """Write what might have come in the place of each token of a run, after those before it."""
        self.grammars.count([self], len(run))
        size = masks_TW.shape[1] * masks_TW.itemsize
        state = self.form.compiled.deep_copy()
        state.consume_tokens(list(before))
        for token, mask_W in zip(run, masks_TW, strict=True):
            state.unsafe_compute_mask_ptr(mask_W.ctypes.data, size)
            state.consume_token(token)
        if state.is_error() and self._change_form():
            self.fill_run(before, run, masks_TW)

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a limit that was met, most of all."""
        return self.state.get_error() if self.state.is_error() else None
