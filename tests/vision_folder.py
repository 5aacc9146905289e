"""A checkpoint folder of a tiny model that sees images (Qwen3-VL's), with a tokenizer that has one
token a character and a chat template with parts.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import jpaged
from jpaged.models.config import ModelConfig
from jpaged.models.hf_defaults import import_transformers
from jpaged.models.params import random_params
from tests.golden import towers

EOS, IMAGE, BEGIN, END, VIDEO = 95, 97, 98, 99, 100
NAMES = {"<eos>": EOS, "<end>": 96, "<image>": IMAGE, "<vis>": BEGIN, "</vis>": END, "<vid>": VIDEO}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<vis><image></vis>"
    "{% elif part.type == 'video' %}<vis><vid></vis>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PATCH, MERGE = 4, 2
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
ENGINE: dict[str, Any] = {
    "images": True,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "seq_buckets": (8,),
    "num_blocks": 128,
    "max_model_len": 256,
    "dtype": "float32",
}
SIDE = 16  # of `picture`
ROWS = (SIDE // PATCH // MERGE) ** 2  # tokens that it takes


def config() -> dict[str, Any]:
    """The config.json, of a tower of one layer."""
    tiny = json.loads(json.dumps(towers.CONFIGS["qwen3_vl"]))
    ids = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    text = {"vocab_size": 128, "max_position_embeddings": 512, "eos_token_id": EOS}
    tiny |= ids | {"video_token_id": VIDEO, "eos_token_id": EOS}
    tiny["text_config"] |= text
    tiny["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
    return tiny


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token a printable ASCII character, then special ones."""
    vocabulary = {chr(32 + i): i for i in range(95)} | NAMES
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    special = [name for name in NAMES if name != "<eos>"]
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=special
    )
    fast.chat_template = template
    return fast


def write_vision_folder(folder: Path) -> Path:
    """Write config.json, random weights, the tokenizer, and how images are prepared."""
    model = ModelConfig.coerce(config(), images=True)
    jpaged.save_params(random_params(model, 3), folder)
    (folder / "config.json").write_text(json.dumps(config()))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    make_tokenizer().save_pretrained(folder)
    return folder


def picture(shade: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    """An image of its own for each shade, uint8 [height, width, 3]."""
    y, x, c = np.indices((*size, 3))
    return ((7 * y + 3 * x + 60 * c + 40 * shade) % 256).astype(np.uint8)


def png(pixels: np.ndarray | None = None, format: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    out = io.BytesIO()
    Image.fromarray(picture() if pixels is None else pixels).save(out, format, **options)
    return out.getvalue()


def data_url(file: bytes | None = None, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(png() if file is None else file).decode()}"


def part(url: str | None = None) -> dict[str, Any]:
    """The part of a message for an image."""
    return {"type": "image_url", "image_url": {"url": data_url() if url is None else url}}


def seen(*urls: str, text: str = "what?") -> list[dict[str, Any]]:
    """A conversation of one message: images, then a text."""
    parts = [part(url) for url in urls or (data_url(),)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
