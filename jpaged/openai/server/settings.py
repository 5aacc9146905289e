"""ServerSettings: whom a server serves, and how much of itself it gives to anybody."""

import dataclasses
import math
from typing import Literal

from jpaged.checks import at_least
from jpaged.errors import ConfigError


def _knob[T](default: T, help: str) -> T:
    """Return a field: its default and what it is, which the command line shows as well."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, keys and limits of a server; sizes in bytes, times in seconds.

    models: names that it answers to, the first of them in answers. api_keys: of which a request
    must carry one; none: whoever reaches the port is served. hosts: names that a request's Host may
    have where there is no key, beside this machine's own; "*" is any, and an address that stands
    for all of a machine's ("0.0.0.0", "::") is any address, but no other name.
    """

    models: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    share_prefix_cache: bool = _knob(
        False, "whether several keys find each other's prompts in the prefix cache"
    )
    max_waiting: int = _knob(
        256, "completions that may wait beside those that run; more are answered 429"
    )
    max_choices: int = _knob(128, "completions that one request may ask for: prompts times n")
    max_output_tokens: int | None = _knob(
        None, "tokens that a completion may ask for; one that does not say gets as many at most"
    )
    max_body_bytes: int = _knob(4 << 20, "size of a request's body")
    max_json_depth: int = _knob(64, "lists and objects of a body within each other")
    max_connections: int = _knob(
        512, "connections; one more closes the one that has been idle for longest"
    )
    head_timeout_s: float = _knob(10.0, "for a client to send the head of a request")
    body_timeout_s: float = _knob(30.0, "for a client to send the body")
    stall_timeout_s: float = _knob(30.0, "that a client may leave what is sent to it unread")
    request_timeout_s: float = _knob(3600.0, "from a request's body to the end of its answer")
    tool_style: Literal["hermes", "llama", "harmony", "none"] | None = _knob(
        None, "how the model writes calls of tools; None: by its chat template"
    )
    enable_reasoning: bool = _knob(
        True, "tell <think>reasoning</think> apart from content, where the template knows it"
    )
    drain_s: float = _knob(30.0, "after SIGTERM for running requests to finish")

    def __post_init__(self) -> None:
        at_least(1, self, "max_choices", "max_body_bytes", "max_json_depth", "max_connections")
        at_least(0, self, "max_waiting")
        if self.max_output_tokens is not None:
            at_least(1, self, "max_output_tokens")
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 < seconds < math.inf:
                raise ConfigError(f"{field.name}={seconds!r}: must be a number of seconds above 0")
        if not self.models or not all(self.models):
            raise ConfigError(f"models={self.models!r}: a server needs a name for its model")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("api_keys: a key must be of printable ASCII without spaces")

    @property
    def max_bodies_bytes(self) -> int:
        """The most bytes that all bodies being read may take together."""
        return 16 * self.max_body_bytes
