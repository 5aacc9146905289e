"""Keeps responses in memory for a while, for requests that go on by previous_response_id."""

import dataclasses
import threading
import time
from collections import OrderedDict
from typing import Any

from jpaged.openai.fields import short
from jpaged.openai.protocol import BodyError
from jpaged.openai.server.wire import encode

MOST_BYTES = 256 << 20  # of the JSON of all that is kept; the oldest are dropped above it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """One response. items: what its request had as input, then its output. party: who may name it.
    until: by the monotonic clock.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    party: str
    until: float
    size: int


class KeptResponses:
    """The responses of the last so many seconds, the oldest first. Any thread may call. A party
    sees those of its own alone.
    """

    def __init__(self, seconds: float, most: int):
        self._seconds, self._most = seconds, most
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def put(self, party: str, items: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep a response that has ended; items: the input of its request."""
        whole = [*items, *response["output"]]
        size = len(encode(whole)) + len(encode(response))
        until = time.monotonic() + self._seconds
        kept = Kept(response=response, items=whole, party=party, until=until, size=size)
        with self._lock:
            self._kept[response["id"]] = kept
            self._size += size
            self._trim()

    def get(self, party: str, name: str) -> Kept | None:
        """Return a response of this party, or None."""
        with self._lock:
            self._trim()
            kept = self._kept.get(name)
        return kept if kept is not None and kept.party == party else None

    def delete(self, party: str, name: str) -> bool:
        """Forget a response of this party; return whether there was one."""
        if self.get(party, name) is None:
            return False
        with self._lock:
            self._drop(name)
        return True

    def continued(self, raw: dict[str, Any], party: str) -> dict[str, Any]:
        """Return a body whose input begins with what the response that it names has. Raises
        BodyError if there is no such response.
        """
        name = raw.get("previous_response_id")
        if name is None:
            return raw
        kept = self.get(party, name) if isinstance(name, str) else None
        if kept is None:
            raise BodyError(
                f"previous_response_id={short(name)}: no such response is kept here",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        more = raw.get("input")
        if isinstance(more, str):
            more = [{"role": "user", "content": more}]
        return raw | {"input": [*kept.items, *more]} if isinstance(more, list) else raw

    def _trim(self) -> None:
        """Drop what is old, and the oldest while there is too much. The caller holds the lock."""
        now = time.monotonic()
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            is_full = len(self._kept) > self._most or self._size > MOST_BYTES
            if oldest.until > now and not is_full:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self._size -= kept.size
