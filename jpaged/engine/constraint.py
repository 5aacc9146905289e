"""What a completion carries for its caller and the engine calls by method alone: the form that the
answer is held to, and the text that its tokens make.
"""

from typing import Any, Protocol, Self


class Constraint(Protocol):
    """Where a completion stands in its form (jpaged.structured.grammars.Matcher), or by what its
    tokens are limited (jpaged.structured.token_rules.RuledTokens). grammars: what makes its masks.
    name: the fields of SamplingParams to blame where it cannot go on.
    """

    grammars: Any
    name: str

    def push(self, token: int) -> None: ...

    def rewind(self, token_ids: list[int]) -> None: ...

    def copy(self) -> Self: ...

    def forced(self) -> list[int]: ...

    def advance(self, token_ids: list[int]) -> None: ...

    def go_back(self, count: int) -> None: ...

    def renew(self, token_ids: list[int]) -> bool: ...

    @property
    def error(self) -> str | None: ...


class Text(Protocol):
    """The text of a completion, watched for stop strings: jpaged.request.detokenizer.TextStream.
    is_final: whether a stop string has ended it, or `finish`.
    """

    is_final: bool

    def push(self, token: int, *, may_stop: bool = True) -> str | None: ...

    def rewind(self, token_ids: list[int], min_tokens: int) -> None: ...

    def finish(self) -> str: ...

    def take_delta(self) -> str: ...
