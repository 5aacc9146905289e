"""What transformers' vision towers give of the images of towers.py: see make_golden.py, which runs
it as `towers`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.towers import CONFIGS, FILE, GRIDS, patches, tensors


def make_towers(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        model, shapes = model_of(name, config)
        values = [torch.from_numpy(x) for x in patches(name)]
        with torch.no_grad():
            rows, deep = _features(model, config, values, GRIDS[name])
        meta = {"config": config, "shapes": shapes, "transformers": transformers.__version__}
        arrays[f"{name}/meta"] = np.asarray(json.dumps(meta))
        for i, of_image in enumerate(rows):
            arrays[f"{name}/rows_{i}"] = of_image.numpy()
        for i, of_image in enumerate(deep):
            arrays[f"{name}/deepstack_{i}"] = of_image.numpy()
    np.savez_compressed(out / FILE.name, allow_pickle=False, **arrays)
    return f"{FILE.name}: {len(CONFIGS)} towers, {len(arrays)} arrays"


def model_of(name: str, config: dict[str, Any]) -> tuple[Any, dict[str, list[int]]]:
    """transformers' model with our tensors, read from a file as it writes them, and the shapes of
    these tensors by their names in the file.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers
    from safetensors import safe_open
    from safetensors.numpy import save_file

    kind = getattr(transformers, config["architectures"][0])
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(
        json.loads(json.dumps(config))
    )
    with tempfile.TemporaryDirectory() as folder:
        kind(made).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        with safe_open(file, "numpy") as stored:
            shapes = {key: list(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
        ours = tensors(name, {key: tuple(shape) for key, shape in shapes.items()})
        save_file(ours, file, {"format": "pt"})
        model, info = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    lost = [key for key in info["missing_keys"] if key != "lm_head.weight"]
    assert not lost and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval(), shapes


def _features(
    model: Any, config: dict[str, Any], values: list[Any], grids: list[tuple[int, int, int]]
) -> tuple[list[Any], list[Any]]:
    """The rows of each image, and its rows for layers of the text model."""
    import torch  # pyright: ignore[reportMissingImports]

    kind = config["model_type"]
    if kind.startswith("qwen"):
        given = torch.tensor(grids)
        out = model.model.get_image_features(torch.cat(values), image_grid_thw=given)
        sizes = (given.prod(-1) // 4).tolist()
        deep = [
            x if isinstance(x, tuple) else torch.split(x, sizes)
            for x in getattr(out, "deepstack_features", None) or ()
        ]
        return list(out.pooler_output), [torch.stack(x) for x in zip(*deep, strict=True)]
    if kind == "gemma3":
        size, side = config["vision_config"]["patch_size"], grids[0][1]
        pixels = torch.stack(values).reshape(-1, side, side, 3, size, size)
        pixels = pixels.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * size, side * size)
        return list(model.model.get_image_features(pixels).pooler_output), []
    unit = (
        1
        if kind == "gemma4_unified"
        else config["vision_config"].get("pooling_kernel_size", 3) ** 2
    )
    longest = max(len(x) for x in values) + unit  # all of them padded
    pixels = torch.zeros(len(values), longest, values[0].shape[1])
    positions = torch.full((len(values), longest, 2), -1)
    for i, (x, (_, height, width)) in enumerate(zip(values, grids, strict=True)):
        pixels[i, : len(x)] = x
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        positions[i, : len(x)] = torch.stack([column, row], -1).reshape(-1, 2)
    return list(model.model.get_image_features(pixels, positions).pooler_output), []
