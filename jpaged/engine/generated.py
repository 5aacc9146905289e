"""Generated: the tokens that a sequence has drawn, and what is known of each of them."""

import dataclasses

import numpy as np

Top = list[tuple[int, float, int]]  # (token, logprob, rank): the drawn one, then the likeliest ones
Kept = tuple[np.ndarray, float]  # ids that it was drawn from, int32 [top_k], -1 past the last; mass


@dataclasses.dataclass(slots=True)
class Generated:
    """A table with a row for each drawn token; each column is a list.

    logprobs: of the token, as the request's `logprobs_mode` has it. weight_versions: of the weights
    that drew it. top_logprobs: empty unless the request asks for `logprobs`. allowed_logprobs: what
    the model gave to all tokens that a grammar allowed; empty without a grammar. kept: of a request
    with `sampling_mask`.

    A new column is a field here, and an argument and a line of `append`.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    top_logprobs: list[Top] = dataclasses.field(default_factory=list)
    allowed_logprobs: list[float] = dataclasses.field(default_factory=list)
    kept: list[Kept] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(
        self,
        token_id: int,
        logprob: float,
        weight_version: int,
        top: Top | None = None,
        allowed: float | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Add a token. A request has `top` for all of its tokens or for none, and so `allowed` and
        `kept`.
        """
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if top is not None:
            self.top_logprobs.append(top)
        if allowed is not None:
            self.allowed_logprobs.append(allowed)
        if kept is not None:
            self.kept.append(kept)

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens."""
        for name in self.__slots__:
            del getattr(self, name)[count:]

    def slice(self, start: int = 0, stop: int | None = None) -> "Generated":
        """Return the tokens from `start` up to `stop` as a table of their own."""
        return Generated(*[getattr(self, name)[start:stop] for name in self.__slots__])

    def copy(self) -> "Generated":
        """Return a table that later changes of this one leave alone."""
        return Generated(*[getattr(self, name)[:] for name in self.__slots__])
