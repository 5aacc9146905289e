"""Which tokens a request may draw whatever their probability: allowed_token_ids and bad_words. They
are a mask for each draw, as a form of the answer is, and stand beside one.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import numpy as np


class Encoder(Protocol):
    """What makes tokens of a text: a tokenizer of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def word_tokens(tokenizer: Encoder, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the sequences of tokens that these words are, at the beginning of a text and after a
    space, as vLLM takes them.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                sequences[tuple(int(t) for t in ids)] = None
    return list(sequences)


class TokenRules:
    """The rules of one request, and what masks are made by.

    allowed: the ids that may be drawn; None allows all. banned: sequences whose last token must not
    follow the ones before it. eos_ids: those that end the text. words: of a mask, a bit a token.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Sequence[int] | None,
        banned: Iterable[tuple[int, ...]],
        eos_ids: frozenset[int],
    ):
        self.words, self.eos_ids = -(-vocab_size // 32), eos_ids
        ids = np.arange(vocab_size) if allowed is None else np.asarray(allowed, np.int64)
        bits = np.zeros(self.words * 32, np.uint8)
        bits[ids] = 1
        self._longer: list[tuple[tuple[int, ...], int]] = []  # (the tokens before, the last one)
        for *before, last in banned:
            if before:
                self._longer.append((tuple(before), last))
            else:
                bits[last] = 0
        self._mask_W = np.packbits(bits, bitorder="little").view(np.uint32)

    def fill(self, pairs: Sequence[tuple["RuledTokens", int]], masks_SW: np.ndarray) -> None:
        """Set the rows of these completions to what may come next."""
        for ruled, row in pairs:
            mask_W = masks_SW[row].view(np.uint32)
            if ruled.inner is None:
                mask_W[:] = self._mask_W
            else:
                ruled.inner.grammars.fill([(ruled.inner, 0)], masks_SW[row][None])
                mask_W &= self._mask_W
            for before, last in self._longer:
                if tuple(ruled.token_ids[-len(before) :]) == before:
                    mask_W[last >> 5] &= ~np.uint32(1 << (last & 31))
            ruled.is_stuck = not mask_W.any()


@dataclasses.dataclass(eq=False)
class RuledTokens:
    """A completion under rules: the Constraint of a sequence. grammars: its rules. inner: where it
    stands in its form, if it has one. token_ids: drawn so far. is_stuck: whether nothing may come.
    """

    grammars: TokenRules
    inner: Any = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    is_stuck: bool = False
    name = "allowed_token_ids or bad_words"

    def copy(self) -> Self:
        inner = None if self.inner is None else self.inner.copy()
        return dataclasses.replace(self, inner=inner, token_ids=list(self.token_ids))

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    def push(self, token: int) -> None:
        """Go on by a token."""
        self.token_ids.append(token)
        if self.inner is not None:
            self.inner.push(token)

    def rewind(self, token_ids: Sequence[int]) -> None:
        """Go to where these tokens lead from the beginning."""
        self.token_ids, self.is_stuck = list(token_ids), False
        if self.inner is not None:
            self.inner.rewind(token_ids)

    def forced(self) -> list[int]:
        """Return no token: what a form makes certain, a rule may forbid."""
        return []

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that are certain, and not yet drawn."""
        self.token_ids += token_ids
        if self.inner is not None:
            self.inner.advance(token_ids)

    def go_back(self, count: int) -> None:
        """Go back by so many tokens."""
        if count:
            del self.token_ids[-count:]
            if self.inner is not None:
                self.inner.go_back(count)

    def renew(self, token_ids: Sequence[int]) -> bool:
        """Have the form go on in a lexer that is this row's alone: see Matcher.renew."""
        return self.inner is not None and self.inner.renew(token_ids)

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        if self.inner is not None and self.inner.error is not None:
            return self.inner.error
        return "no token is left that may be drawn" if self.is_stuck else None
