"""Records: what the cache holds for a layer, declared by the layer itself."""

import dataclasses
from typing import Any, Literal

# The names of fields that kernels of attention read and write, as a pair in one pool.
KEYS_AND_VALUES, LATENT = ("keys", "values"), ("latent", "rotated_key")
PAIRS = (KEYS_AND_VALUES, LATENT)
INDEX_KEY = "index_key"  # by which a query chooses the tokens that it attends to
CHOSEN_EXPERTS = "chosen_experts"


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a record.

    shape: of one place. split: which of these axes a tensor-parallel mesh axis splits; None: the
    field lies whole on every device. dtype: None is the model's.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    dtype: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What one place in the cache holds. per: a place is a token, or a whole block, which holds the
    state after the last of its tokens.

    replayed: of a state, what its rule takes of one token. A step over guesses keeps this in place
    of the state, which is made of it once it is known which guesses are right.
    """

    fields: tuple[Field, ...]
    per: Literal["token", "block"] = "token"
    replayed: tuple[Field, ...] = ()

    def __getitem__(self, name: str) -> Field:
        """Return the field of a name."""
        return next(field for field in self.fields if field.name == name)

    @property
    def has_keys(self) -> bool:
        """Whether a kernel of attention reads and writes it: it has one of PAIRS."""
        return any(field.name in (first for first, _ in PAIRS) for field in self.fields)

    @property
    def is_latent(self) -> bool:
        """Whether that is a latent and a rotated key, which all heads share."""
        return any(field.name == LATENT[0] for field in self.fields)
