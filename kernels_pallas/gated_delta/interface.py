"""The shapes by which an implementation of the gated delta rule is chosen."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The heads of a layer on one device: num_key_heads Hk of key_dim Dk, num_value_heads Hv of
    value_dim Dv; Hv is a multiple of Hk.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
