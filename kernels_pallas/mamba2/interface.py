"""The shapes by which an implementation of Mamba-2's scan is chosen."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The heads of a layer on one device: num_heads H of head_dim P, whose states have state_dim N
    columns; keys and queries of num_groups G serve as many heads each.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
