"""A tokenizer of bytes for the tiny model: any text, and some tokens of several characters."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.models.hf_defaults import import_transformers
from tests.tiny import config, make_params

MERGES = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ('"', ","), ("{", '"'), ("1", "0")]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, *(a + b for a, b in MERGES), "<eos>", "<end>"]
EOS, END = len(TOKENS) - 2, len(TOKENS) - 1
CONFIG = config(vocab_size=len(TOKENS), max_position_embeddings=160, eos_token_ids=(EOS,))


def make_tokenizer() -> Any:
    """As wide as CONFIG's vocabulary; "<eos>" and "<end>" are special."""
    vocabulary = {token: i for i, token in enumerate(TOKENS[:EOS])}
    backend = Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<end>"]
    )
    assert fast.convert_tokens_to_ids(["<eos>", "<end>"]) == [EOS, END]
    return fast


def params(seed: int = 0) -> Any:
    """The tiny model over this vocabulary."""
    return make_params(seed, CONFIG)
