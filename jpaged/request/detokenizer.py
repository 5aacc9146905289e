"""Incremental detokenizing and stop strings."""

import copy
from collections.abc import Sequence

from jpaged.types import Decoder


# Not tokenizers' DecodeStream: it raises "Invalid prefix" on valid output of byte-fallback
# (sentencepiece) tokenizers.
class TextStream:
    """The text of one completion as its tokens arrive, watched for stop strings.

    tokenizer: a transformers tokenizer, or anything with decode(ids, skip_special_tokens). stop:
    strings that end the text at their first occurrence. lengths: of the texts of single tokens, in
    characters, as far as they are known; streams with the same tokenizer and skip_special_tokens
    may share them. Once `push` has returned a stop string the text is final.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        lengths: dict[int, int] | None = None,
    ):
        self._lengths: dict[int, int] = {} if lengths is None else lengths
        # The fast one beneath, where there is one.
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._reach = max(map(len, self._stop), default=1) - 1
        self._sent = 0
        self._clear()

    def __deepcopy__(self, memo: dict[int, object]) -> "TextStream":
        twin = memo[id(self)] = copy.copy(self)  # the tokenizer is shared
        twin._token_ids = list(self._token_ids)
        return twin

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        # Tokens [_context, _shown) are the last ones whose text is shown, as _shown_length
        # characters when decoded alone: what comes next is decoded after them, since a decoder may
        # treat the first token in its own way.
        self._context = self._shown = self._shown_length = 0
        # A stop string may have begun in earlier text, but not where stopping was forbidden.
        self._allowed_from = 0
        self.text = ""
        self.is_final = False

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completed, or None."""
        before = len(self.text)
        self._token_ids.append(token)
        self.text += self._show()
        if not may_stop:
            self._allowed_from = len(self.text)
            return None
        if not self._stop:
            return None
        start = max(before - self._reach, self._allowed_from)
        hits = [(at, stop) for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: hit[0])
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self.is_final = True
        return stop

    def finish(self) -> str:
        """Return the final text: what was held back for want of a complete character comes as plain
        decoding shows it.
        """
        if not self.is_final:
            self.text += self._show(is_last=True)
            self.is_final = True
        return self.text

    def take_delta(self) -> str:
        """Return the text that has become certain since the last call. A tail that may grow into a
        stop string is held back.
        """
        end = len(self.text)
        if not self._stop:
            delta, self._sent = self.text[self._sent :], max(self._sent, end)
            return delta
        tails = () if self.is_final else range(max(end - self._reach, self._sent), end)
        end = next(
            (at for at in tails if any(stop.startswith(self.text[at:]) for stop in self._stop)), end
        )
        delta, self._sent = self.text[self._sent : end], max(self._sent, end)
        return delta

    def rewind(self, token_ids: Sequence[int], min_tokens: int) -> None:
        """Go back to the state after exactly these of its tokens, none of which ended it; deltas
        already taken stay taken.
        """
        self._clear()
        for i, token in enumerate(token_ids):
            self.push(token, may_stop=i >= min_tokens)

    def _show(self, *, is_last: bool = False) -> str:
        """Return what is new in the text; all but the last character of it, while the tokens end
        within that.
        """
        text = decode(self._tokenizer, self._token_ids[self._context :], self._skip_special_tokens)
        whole = text if is_last else text.rstrip("\ufffd")
        added = whole[self._shown_length :]
        self._shown_length += len(added)
        if added and whole == text:
            self._context, self._shown = self._shown, len(self._token_ids)
            self._shown_length = self._length(self._token_ids[self._context :])
        return added

    def _length(self, token_ids: list[int]) -> int:
        """Return the characters of tokens that are decoded alone. It is asked at each token, and of
        one nearly always.
        """
        length = self._lengths.get(token_ids[0]) if len(token_ids) == 1 else None
        if length is None:
            length = len(decode(self._tokenizer, token_ids, self._skip_special_tokens))
            if len(token_ids) == 1:
                self._lengths[token_ids[0]] = length
        return length


def decode(tokenizer: Decoder, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of tokens, with the spaces that were generated (no clean-up)."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
