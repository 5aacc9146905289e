"""Checkpoints on disk (Hugging Face, Orbax) to Params and back, their tokenizers, and the trees of
other projects' models.
"""

from jpaged.checkpoint.load import load_params
from jpaged.checkpoint.lora_maps import lora_from
from jpaged.checkpoint.name_maps import params_from
from jpaged.checkpoint.orbax import save_params
from jpaged.checkpoint.tokenizer import load_generation_config, load_tokenizer

__all__ = [
    "load_generation_config",
    "load_params",
    "load_tokenizer",
    "lora_from",
    "params_from",
    "save_params",
]
