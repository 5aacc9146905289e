"""The embedded default model: a small Qwen3 that writes Python, trained by examples/train_tiny.py.

`MODEL_PATH` is its Hugging Face folder: weights in bf16, byte-level BPE tokenizer, chat template,
generation defaults. It shows that the engine works; it knows the look of the standard library, not
what a function ought to do.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
