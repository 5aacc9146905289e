"""Names for the types that callers pass in several forms."""

from collections.abc import Sequence
from typing import Any, Protocol

# A jax pytree: nested dicts, an nnx Module or State, whatever jax.tree flattens.
type PyTree = Any
# JSON as Python reads it: a Hugging Face config, a schema, a grammar's description.
type Json = Any


class Tokenizer(Protocol):
    """A tokenizer of transformers, or another object with these two methods.

    Asked for where they are there: `eos_token_id`, `chat_template` and `apply_chat_template`,
    `backend_tokenizer`.
    """

    def encode(self, text: str, /) -> Sequence[int]: ...

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool = ...) -> str: ...
