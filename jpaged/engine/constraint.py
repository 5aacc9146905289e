"""Constraint: what the engine needs of a form that an answer is held to."""

from collections.abc import Sequence as List
from typing import Any, Protocol


class Constraint(Protocol):
    """Where a completion stands in its form: jpaged.structured.grammars.Matcher."""

    grammars: Any

    def push(self, token: int) -> None: ...

    def rewind(self, token_ids: List[int]) -> None: ...

    def copy(self) -> Any: ...

    def forced(self) -> List[int]: ...

    def advance(self, token_ids: List[int]) -> None: ...

    def go_back(self, count: int) -> None: ...

    def renew(self, token_ids: List[int]) -> bool: ...

    @property
    def error(self) -> str | None: ...
