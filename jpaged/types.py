"""Names for the types of what callers pass and get in several forms."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jpaged.models.config import ModelConfig

# A jax pytree of arrays: Params, nested dicts, an nnx Module or State, whatever jax.tree flattens.
# A checkpoint folder or an Adapter may stand for one where the function says so.
type PyTree = Any

# A model's description: a ModelConfig, a Hugging Face config or the folder of one.
type ModelLike = ModelConfig | Mapping[str, Any] | str | os.PathLike[str]

# The form of an answer, as SamplingParams.structured has it.
type Structured = Mapping[str, Any]

# The messages of one conversation, each {"role", "content"} and what a chat template knows.
type Message = Mapping[str, Any]
type Messages = Sequence[Message]

# An array of integers for each sequence: numpy, jax, or nested lists.
type IntArrays = Sequence[Any]

# The fields of a dataclass of settings, by their names.
type Settings = dict[str, Any]


class Decoder(Protocol):
    """What makes text of token ids: a tokenizer, or the fast one beneath it."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any: ...


class Tokenizer(Decoder, Protocol):
    """A tokenizer of transformers, or another object with these two methods.

    Asked for where they are there: `eos_token_id`, `chat_template` and `apply_chat_template`,
    `backend_tokenizer`.
    """

    def encode(self, text: str, /) -> Sequence[int]: ...
