"""Prompts with images for the tiny models of towers.py, whose logprobs transformers computes from
the pixels on (make_golden_pictures.py).
"""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden import towers

FILE = Path(__file__).parent / "pictures.npz"
NAMES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "gemma4_clipped", "gemma4_unified")
# Height and width of the images of each prompt, whose placeholders stand between tokens of text.
PROMPTS: dict[str, list[tuple[int, int]]] = {
    "one": [(30, 21)],
    "two": [(12, 40), (50, 16)],
}
NEW_TOKENS = 4
LONGEST = 60  # patches of a side of an image of Gemma 4
# What preprocessor_config.json says.
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 24 * 32},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 24, "width": 24},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pan_and_scan": None,
}
UNIFIED = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
# Height and width of images before and after they are resized.
RESIZED = [
    ((9, 14), (31, 20)),
    ((40, 33), (12, 33)),
    ((23, 50), (23, 17)),
    ((64, 7), (9, 48)),
    ((1, 90), (6, 5)),
]
GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}


class Golden(NamedTuple):
    """What transformers gives of a prompt. token_ids: with those of images. logprobs: [T - 1], of
    each token after the first. greedy: the likeliest tokens that follow, and their logprobs.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    greedy: list[int]
    greedy_logprobs: np.ndarray


def config_of(name: str) -> dict[str, Any]:
    """The config of towers.py, with room for the images of Gemma 4, of 70 tokens each."""
    config = copy.deepcopy(towers.CONFIGS[name])
    if name.startswith("gemma4"):
        unified = name == "gemma4_unified"
        table = "mm_posemb_size" if unified else "position_embedding_size"
        config["vision_config"][table] = LONGEST
        config["text_config"]["max_position_embeddings"] = 256
    return config


def write(name: str, folder: Path) -> Path:
    """Write the files of a model, with its tensors under the names that transformers gives them."""
    from safetensors.numpy import save_file

    shapes = towers.load(name).shapes
    for key, shape in shapes.items():
        if key.endswith("position_embedding_table"):
            shapes[key] = (2, LONGEST, shape[-1])
        elif key.endswith(".pos_embedding"):
            shapes[key] = (LONGEST, 2, shape[-1])
    save_file(towers.tensors(name, shapes), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings(name)))
    return folder


def settings(name: str) -> dict[str, Any]:
    """What the folder of a model says of its images."""
    by_name = {"gemma3": GEMMA3, "gemma4_unified": UNIFIED, "gemma4_clipped": GEMMA4}
    return QWEN if name.startswith("qwen") else by_name[name]


def pictures(prompt: str) -> list[np.ndarray]:
    """The images of a prompt, uint8 [height, width, 3]."""
    made = []
    for i, (height, width) in enumerate(PROMPTS[prompt]):
        y, x, c = np.indices((height, width, 3))
        made.append(((7 * y + 3 * x + 60 * c + 90 * i + x * y // 8) % 256).astype(np.uint8))
    return made


def noisy(size: tuple[int, int]) -> np.ndarray:
    """An image of random black and white, at whose edges a resized one goes out of bounds."""
    rng = np.random.default_rng([*size])
    return np.where(rng.random((*size, 3)) < 0.5, 0, 255).astype(np.uint8)


def token_ids(name: str, prompt: str, seed: int) -> list[int]:
    """A prompt with the placeholders that a chat template writes."""
    rng = np.random.default_rng([seed, len(name), len(prompt)])
    placeholder = {"qwen": [18, 17, 19], "gemma3": [18]}.get(
        "gemma3" if name == "gemma3" else name[:4], [17]
    )
    ids = rng.integers(1, 16, 4).tolist()
    for _ in PROMPTS[prompt]:
        ids += placeholder + rng.integers(1, 16, 3).tolist()
    return ids


def load(name: str, prompt: str) -> tuple[list[int], Golden]:
    """Return the prompt as a caller passes it, and what is stored of it."""
    with np.load(FILE, allow_pickle=False) as stored:
        parts = {key: stored[f"{name}/{prompt}/{key}"] for key in ("prompt", *Golden._fields)}
    return parts["prompt"].tolist(), Golden(
        parts["token_ids"].tolist(),
        parts["logprobs"],
        parts["greedy"].tolist(),
        parts["greedy_logprobs"],
    )
