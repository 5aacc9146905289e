"""Incremental detokenizing and stop strings."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one completion as its tokens arrive, watched for stop strings.

    tokenizer: a transformers tokenizer, or anything with decode(ids). stop: strings that end the text at their first
    occurrence. Once `push` has returned a stop string the text is final.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens) if self._backend is not None else None
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        # A stop string may have begun in text that was already there, but not in text where stopping was forbidden.
        self._reach = max(map(len, self._stop), default=1) - 1
        self._allowed_from = 0
        self._token_ids: list[int] = []
        self._sent = 0
        self.text = ""
        self.is_final = False

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completed, or None."""
        before = len(self.text)
        self._token_ids.append(token)
        self.text += self._decode(token)
        if not may_stop:
            self._allowed_from = len(self.text)
            return None
        start = max(before - self._reach, self._allowed_from)
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda hit: hit[0])
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self.is_final = True
        return stop

    def finish(self) -> str:
        """The final text: what was held back for want of a complete character is flushed, as plain decoding shows it."""
        if not self.is_final:
            whole = decode(self._tokenizer, self._token_ids, self._skip_special_tokens)
            self.text = whole if whole.startswith(self.text) else self.text
            self.is_final = True
        return self.text

    def take_delta(self) -> str:
        """Text that has become certain since the last call; a tail that may grow into a stop string is held back."""
        end = len(self.text)
        if not self.is_final:
            for length in range(min(self._reach, end - self._sent), 0, -1):
                if any(stop.startswith(self.text[end - length :]) for stop in self._stop):
                    end -= length
                    break
        delta, self._sent = self.text[self._sent : end], max(self._sent, end)
        return delta

    def _decode(self, token: int) -> str:
        if self._stream is not None:
            return self._stream.step(self._backend, token) or ""
        whole = decode(self._tokenizer, self._token_ids, self._skip_special_tokens)
        return "" if whole.endswith("\ufffd") else whole[len(self.text) :]


def decode(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Plain decoding, with the spaces that were generated (no clean-up)."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
