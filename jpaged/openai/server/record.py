"""RequestRecord: what is known of an HTTP request when it has ended, for logs and traces."""

import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from jpaged.request.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

# What a client may choose as the id of its request; anything else gets one of this server.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# As the conventions of OpenTelemetry name them, which have no name for labels.
Operation = Literal["chat", "text_completion", "embeddings", "classify"]


@dataclasses.dataclass(kw_only=True)
class RequestRecord:
    """An HTTP request and its answer, without any text of either.

    began: the monotonic clock's time; began_at_ns: the time of day. status: of the answer, None if
    the client left before it. error: the code of the error. operation: None for requests that
    run nothing. answer_id: the id in the answer. first_token_s: seconds until the first piece
    of a stream. headers: of the request.
    """

    request_id: str
    method: str
    path: str
    client: str | None
    headers: Iterable[tuple[bytes, bytes]]
    began: float = dataclasses.field(default_factory=time.monotonic)
    began_at_ns: int = dataclasses.field(default_factory=time.time_ns)
    seconds: float = 0.0
    status: int | None = None
    error: str | None = None
    operation: Operation | None = None
    model: str | None = None
    answer_id: str | None = None
    params: SamplingParams | None = None
    streams: bool = False
    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, scope: Any) -> "RequestRecord":
        """Return the record of a request that has just begun. scope: ASGI's."""
        headers, client = scope["headers"], scope.get("client")
        sent = next((value for key, value in headers if key == b"x-request-id"), b"")
        return cls(
            request_id=sent.decode() if REQUEST_ID.fullmatch(sent) else secrets.token_hex(16),
            method=scope["method"],
            # As it was sent: decoded it may have line breaks.
            path=scope.get("raw_path", scope["path"].encode()).decode("latin-1"),
            client=client[0] if client else None,
            headers=headers,
        )

    def pools(self, operation: Operation, model: str, lists: Sequence[Sequence[int]]) -> None:
        """Note what is made of the hidden states of these prompts."""
        self.operation, self.model = operation, model
        self.prompt_tokens = sum(map(len, lists))

    def first_token(self) -> None:
        """Note that the first piece of a stream has arrived."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.began

    def close(self, status: int | None, error: str | None) -> None:
        """Note what the request came to, now that it has ended."""
        self.status, self.error = status, error
        self.seconds = time.monotonic() - self.began

    def ended(self, output: RequestOutput) -> None:
        """Add what a prompt's completions used."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += sum(len(done.token_ids) for done in output.outputs)
        self.finish_reasons += [str(done.finish_reason) for done in output.outputs]


Observer = Callable[[RequestRecord], None]  # called with the record of each request that has ended
