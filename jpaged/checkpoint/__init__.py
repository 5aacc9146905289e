"""Checkpoints on disk: Hugging Face and Orbax folders to Params, Params to Orbax folders, the tokenizer beside them."""

from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.orbax import save_params
from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer

__all__ = ["load_generation_config", "load_params", "load_tokenizer", "save_params"]
