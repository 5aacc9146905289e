"""ServerSettings: whom a server serves, and how many resources a client may use."""

import dataclasses
import math
import re
from typing import Literal, Self

from jpaged.checks import at_least
from jpaged.errors import ConfigError
from jpaged.images.limits import ImageLimits

BODY_OF_TEXT, BODY_WITH_IMAGES = 4 << 20, 32 << 20  # bytes
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


def _knob[T](default: T, help: str) -> T:
    """Return a field with a default and a description, which the command line shows too."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, keys and limits of a server; sizes are in bytes, times in seconds.

    models: the names that it answers to; answers carry the first. api_keys: the keys, one of which
    a request must carry; if there are none, anybody who can reach the port is served. hosts: the
    names that a request's Host header may have if there are no keys, beside this machine's own; "*"
    allows any name. An address that stands for all of a machine's addresses ("0.0.0.0", "::")
    allows any address, but no other name. origins: of pages that may use this server from a browser
    (CORS); "*" is any.
    """

    models: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    share_prefix_cache: bool = _knob(
        False, "whether requests of different keys share the prefix cache"
    )
    max_waiting: int = _knob(
        256, "completions that may wait while others run; further ones are answered with 429"
    )
    max_choices: int = _knob(128, "completions per request: prompts times n")
    max_output_tokens: int | None = _knob(
        None, "limit of max_tokens, and its value where a request sets none"
    )
    max_body_bytes: int | None = _knob(
        None, "bytes of a request's body; None: 4 MiB, and 32 MiB with --images"
    )
    image_hosts: tuple[str, ...] = _knob(
        (), "hosts whose image URLs are fetched: NAME, NAME:PORT or *.NAME"
    )
    max_images: int = _knob(16, "images of a request, where the model takes any: see --images")
    max_json_depth: int = _knob(64, "depth of nested lists and objects in a body")
    max_connections: int = _knob(
        512, "connections; a further one closes the one that has been idle longest"
    )
    head_timeout_s: float = _knob(10.0, "time for a client to send the head of a request")
    body_timeout_s: float = _knob(30.0, "time for a client to send the body")
    stall_timeout_s: float = _knob(30.0, "time for which a client may not read what is sent to it")
    request_timeout_s: float = _knob(3600.0, "time from a request's body to the end of its answer")
    tool_style: Literal["hermes", "llama", "harmony", "none"] | None = _knob(
        None, "how the model writes tool calls; None: as its chat template says"
    )
    enable_reasoning: bool = _knob(
        True, "separate <think>reasoning</think> from content, if the template has it"
    )
    enable_control: bool = _knob(
        False, "whether clients may pause and resume the server and change its weights"
    )
    keep_responses_s: float | None = _knob(
        None, "seconds for which a response can be named by previous_response_id; None keeps none"
    )
    max_kept_responses: int = _knob(1024, "responses that are kept; the oldest are dropped")
    headers_after_s: float = _knob(
        1.0, "time after which a stream begins though its first token has not come"
    )
    ping_s: float | None = _knob(
        15.0, "a comment is sent to a stream that has been quiet for this long; none: never"
    )
    drain_s: float = _knob(30.0, "time after SIGTERM for running requests to finish")

    def __post_init__(self) -> None:
        at_least(1, self, "max_choices", "max_json_depth", "max_connections", "max_images")
        ImageLimits(hosts=self.image_hosts)  # raises ConfigError
        if self.max_body_bytes is not None:
            at_least(1, self, "max_body_bytes")
        at_least(0, self, "max_waiting")
        at_least(1, self, "max_kept_responses")
        if self.max_output_tokens is not None:
            at_least(1, self, "max_output_tokens")
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if field.name.endswith("_s") and seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{field.name}={seconds!r}: must be a number of seconds above 0")
        if not self.models or not all(self.models):
            raise ConfigError(f"models={self.models!r}: a server needs a name for its model")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("api_keys: a key must be of printable ASCII without spaces")

        for origin in self.origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"origins: {origin!r} is no origin: it must be SCHEME://HOST, with a port or "
                    "without, and no path; or *"
                )

    def with_images(self, takes_images: bool) -> Self:
        """Return the settings of a server whose model takes images, or does not: max_body_bytes is
        known then.
        """
        if self.max_body_bytes is not None:
            return self
        most = BODY_WITH_IMAGES if takes_images else BODY_OF_TEXT
        return dataclasses.replace(self, max_body_bytes=most)

    @property
    def body_bytes(self) -> int:
        """The bytes that a body may have."""
        return BODY_OF_TEXT if self.max_body_bytes is None else self.max_body_bytes

    @property
    def max_bodies_bytes(self) -> int:
        """The bytes that all bodies may take together while they are read."""
        return 16 * self.body_bytes
