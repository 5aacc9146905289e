"""Scratch: what XLA:CPU allocates at most for a layer of a step, beside weights and cache."""

import dataclasses

from jpaged.models.layers.linear import DeltaRule, Scan


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes of a step that scratch depends on.

    tokens: of the largest step. short: tokens of the last query tile of each row and of the last
    tiles of a group, which may not be full. itemsize: bytes of an activation. hidden_size: E.
    expert_adapter_rank: the ranks of all adapters of experts together, for up to three parts of a
    weight; 0 where experts have none. adapter_rank: of one adapter; 0 without. sequences: rows of
    the step, of which each draws a token. delta, scan: as of StepContext.
    """

    tokens: int
    short: int
    itemsize: int
    hidden_size: int
    expert_adapter_rank: int = 0
    adapter_rank: int = 0
    sequences: int = 0
    delta: DeltaRule | None = None
    scan: Scan | None = None

    @property
    def rows(self) -> int:
        """Rows of activations, twice: XLA holds a product's argument beside its result."""
        return 2 * (self.tokens + self.short)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """Bytes. shared: the next layer takes the same memory again. kept: each layer has its own."""

    shared: int = 0
    kept: int = 0

    def __add__(self, other: "Scratch") -> "Scratch":
        return Scratch(shared=self.shared + other.shared, kept=self.kept + other.kept)
