"""The embedded models: small ones that write Python, trained by examples/train_tiny.py.

`MODEL_PATH` is the Hugging Face folder of the default, a Qwen3: weights in bf16, byte-level BPE
tokenizer, chat template, generation defaults. `HYBRID_PATH` is that of a Qwen3.5, three of four
layers of which have the gated delta rule, with weights in int8. MODELS has both by the names that
stand for them in place of a folder. They show that the engine works; they know the look of the
standard library, not what a function ought to do.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
HYBRID_PATH: Path = Path(__file__).parent / "hybrid"
MODELS: dict[str, Path] = {"jpaged-demo": MODEL_PATH, "jpaged-demo-hybrid": HYBRID_PATH}
