"""What transformers' text models make of embeddings in place of tokens: positions on three axes,
what is added after the first layers, logits and greedy tokens. See make_golden.py, which runs it as
`spans`.
"""

import copy
import json
from pathlib import Path
from typing import Any

from tests.golden.configs import CONFIGS

Grid = tuple[int, int, int]

# By a place in the prompt, the frames, rows and columns of an image. The last one's end is the
# prompt's; the first prompt has none.
PROMPTS: dict[str, tuple[int, dict[int, Grid]]] = {
    "text": (23, {}),
    "one": (37, {5: (1, 3, 4)}),
    "three": (61, {0: (1, 4, 2), 17: (1, 2, 5), 29: (1, 3, 3)}),
    "last": (30, {9: (1, 3, 7)}),
}
# A video of three frames of 2 x 3: its grids by their places, and how long a frame is in seconds.
# Qwen2.5-VL has it as one grid; Qwen3-VL has text between its frames.
VIDEOS: dict[str, dict[int, Grid]] = {
    "qwen2_5_vl_g2_d32": {5: (3, 2, 3)},
    "qwen3_vl_g4_d32_tied": {5: (1, 2, 3), 14: (1, 2, 3), 24: (1, 2, 3)},
}
VIDEO_TOKENS, SECONDS = 37, 0.65
TOWER = {"deepstack_visual_indexes": [0, 1, 2], "depth": 3}


def _deeper(name: str, **vision: Any) -> dict[str, Any]:
    """A config of CONFIGS with four layers of text."""
    config = copy.deepcopy(CONFIGS[name])
    config["text_config"]["num_hidden_layers"] = 4
    config["vision_config"] |= vision
    return config


SPANNED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_g2_d32": CONFIGS["qwen2_5_vl_g2_d32"],
    "qwen3_vl_g4_d32_tied": _deeper("qwen3_vl_g4_d32_tied", **TOWER),
    "qwen3_vl_moe_g2_d32": CONFIGS["qwen3_vl_moe_g2_d32"],
    "qwen3_5_moe_h2x2_c16_y32": CONFIGS["qwen3_5_moe_h2x2_c16_y32"],
    "gemma3_g2_d32_linear": CONFIGS["gemma3_g2_d32_linear"],
    "gemma4_k2_d32_k1_d64": {
        **CONFIGS["gemma4_k2_d32_k1_d64"],
        "use_bidirectional_attention": "vision",
    },
    "gemma4_shared_keys": CONFIGS["gemma4_shared_keys"],  # with per-layer embeddings, causal
}
NEW_TOKENS = 12
ROWS = 12  # places in a prompt whose logits are kept


def rows_of(name: str, prompt: str, start: int, grid: Grid, config: dict[str, Any]) -> Any:
    """Embeddings [n, E] of an image and what is added after the first layers [D, n, E], float32."""
    import numpy as np

    from tests.golden.weights import noise, text_part

    count, width = grid[0] * grid[1] * grid[2], text_part(config)["hidden_size"]
    layers = len(config.get("vision_config", {}).get("deepstack_visual_indexes", ()))
    key = f"{name}/{prompt}/{start}"
    rows = noise(f"{key}/rows", (count, width)).astype(np.float32)
    return rows, noise(f"{key}/deepstack", (layers, count, width)).astype(np.float32)


def make_spans(out: Path) -> str:
    """Computes and stores them all; gives a line that sums them up."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import build
    from tests.golden.weights import state_dict

    torch.set_num_threads(1)
    arrays, least = dict[str, Any](), float("inf")
    for name, config in SPANNED.items():
        model = build(config, state_dict(name, config), torch.float32)
        for prompt, (length, grids) in PROMPTS.items():
            made = _run(model, name, config, prompt, length, grids)
            least = min(least, made.pop("gap"))
            arrays |= {f"{name}/{prompt}/{key}": value for key, value in made.items()}
    meta = np.asarray(json.dumps(SPANNED))
    np.savez_compressed(out / "spans.npz", allow_pickle=False, meta=meta, **arrays)
    make_videos(out)
    return f"spans of {len(SPANNED)} models, least gap {least:.3f}"


def make_videos(out: Path) -> None:
    """Computes and stores positions and logits of prompts with videos, and the patches and times of
    a small one.
    """
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
        Qwen3VLVideoProcessor,
        smart_resize,
    )

    from tests.golden.make_golden import build, tokens
    from tests.golden.weights import noise, state_dict, text_part

    arrays = dict[str, Any]()
    for name, grids in VIDEOS.items():
        config = SPANNED[name]
        model = build(config, state_dict(name, config), torch.float32)
        usable = text_part(config)["vocab_size"] - 4
        ids, length = tokens(f"{name}/video", VIDEO_TOKENS, usable), VIDEO_TOKENS
        logits, positions = _logits(model, name, config, "video", ids, length, grids, SECONDS)
        arrays |= {
            f"{name}/token_ids": np.asarray(ids, np.int32),
            f"{name}/positions": positions.numpy().astype(np.int32),
            f"{name}/logits": logits.numpy()[-6:],
        }
    frames = np.uint8(np.clip(127 + 60 * noise("video/frames", (5, 16, 24, 3)), 0, 255))
    whole = torch.from_numpy(frames).permute(0, 3, 1, 2)[None].contiguous()
    nobody: Any = None  # neither reads what it is a method of
    patches, *grid = Qwen3VLVideoProcessor.patchify(nobody, whole, 4, 2, 2)
    times = Qwen3VLProcessor._calculate_timestamps(nobody, list(range(5)), 2.0, 2)
    arrays |= {"frames": frames, "patches": patches.numpy()[0]}
    arrays |= {"grid": np.asarray(grid), "times": np.asarray(times)}
    sizes = [(n, h, w) for n in (2, 5, 16) for h in (9, 64, 333) for w in (20, 100, 1081)]
    limits = {"temporal_factor": 2, "factor": 32, "min_pixels": 4096, "max_pixels": 196608}
    resized = [smart_resize(*size, **limits) for size in sizes]
    arrays |= {"sizes": np.asarray(sizes), "resized": np.asarray(resized)}
    np.savez_compressed(out / "videos.npz", allow_pickle=False, **arrays)


def _run(
    model: Any, name: str, config: dict[str, Any], prompt: str, length: int, grids: dict[int, Grid]
) -> dict[str, Any]:
    import numpy as np

    from tests.golden.make_golden import ENOUGH_GAP, TRIES, tokens
    from tests.golden.weights import text_part

    eos = config["eos_token_id"]
    stop = set(eos) if isinstance(eos, list) else {eos}
    usable = text_part(config)["vocab_size"] - 4
    for attempt in range(TRIES):
        ids, gap = tokens(f"{name}/{prompt}/{attempt}", length, usable), float("inf")
        logits, positions = _logits(model, name, config, prompt, ids, length, grids)
        whole = list(ids)
        while len(whole) < length + NEW_TOKENS:
            if len(whole) > length:
                logits, _ = _logits(model, name, config, prompt, whole, length, grids)
            best = logits[-1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            whole.append(int(best.indices[0]))
        if gap >= ENOUGH_GAP and not stop & set(whole[length:]):
            logits, _ = _logits(model, name, config, prompt, ids, length, grids)
            at = np.unique(np.linspace(0, length - 1, ROWS).astype(np.int32))
            return {
                "token_ids": np.asarray(ids, np.int32),
                "positions": positions.numpy().astype(np.int32),
                "places": at,
                "logits": logits.numpy()[at],
                "greedy": np.asarray(whole[length:], np.int32),
                "gap": gap,
            }
    raise SystemExit(f"{name}/{prompt}: no prompt is decided at every greedy step")


def _logits(
    model: Any,
    name: str,
    config: dict[str, Any],
    prompt: str,
    ids: list[int],
    length: int,
    grids: dict[int, Grid],
    seconds: float | None = None,
) -> tuple[Any, Any]:
    """Logits of all tokens, and positions [3, T] of those of the prompt. seconds: the grids are of
    a video, whose frames are so long.
    """
    import torch  # pyright: ignore[reportMissingImports]

    is_image = torch.zeros(1, len(ids), dtype=torch.bool)
    rows, extra = [], []
    for start, grid in grids.items():
        of_image, deepstack = rows_of(name, prompt, start, grid, config)
        is_image[0, start : start + len(of_image)] = True
        rows.append(torch.from_numpy(of_image))
        extra.append(torch.from_numpy(deepstack))
    input_ids = torch.tensor([ids])
    if "text_config" not in config:
        return _gemma_logits(model, input_ids, is_image, torch.cat(rows) if rows else None, length)
    text, merge = model.model.language_model, model.config.vision_config.spatial_merge_size
    thw = torch.tensor([[t, h * merge, w * merge] for t, h, w in grids.values()])
    with torch.no_grad():
        kinds, known = is_image[:, :length].int(), {"image_grid_thw": thw if grids else None}
        if seconds is not None:
            whole = torch.tensor([[len(thw), *thw[0, 1:]]]) if len(thw) > 1 else thw
            known = {"video_grid_thw": whole, "second_per_grid_ts": torch.tensor([seconds])}
            kinds = 2 * kinds
        positions, delta = model.model.get_rope_index(input_ids[:, :length], kinds, **known)
        behind = torch.arange(length, len(ids)).expand(3, 1, -1) + delta
        x = text.embed_tokens(input_ids)
        more: dict[str, Any] = {}
        if grids:
            x[is_image] = torch.cat(rows)
        if grids and len(extra[0]):
            more["visual_pos_masks"] = is_image
            more["deepstack_visual_embeds"] = list(torch.cat(extra, 1))
        hidden = text(
            inputs_embeds=x,
            position_ids=torch.cat([positions, behind], -1),
            use_cache=False,
            **more,
        ).last_hidden_state
        return model.lm_head(hidden)[0], positions[:, 0]


def _gemma_logits(
    model: Any, input_ids: Any, is_image: Any, rows: Any, length: int
) -> tuple[Any, Any]:
    """Logits of all tokens, whose images see each other as the config says; and their indices."""
    import importlib

    import torch  # pyright: ignore[reportMissingImports]

    text, config = model.model, model.config
    of_model = importlib.import_module(type(model).__module__)
    with torch.no_grad():
        # Per-layer embeddings are those of padding in the place of images.
        plain = torch.where(is_image, 0, input_ids)
        x = text.embed_tokens(plain)
        more: dict[str, Any] = {}
        if getattr(config, "hidden_size_per_layer_input", None):
            more["per_layer_inputs"] = text.get_per_layer_inputs(plain, None)
        if rows is not None:
            x[is_image] = rows
        if getattr(config, "use_bidirectional_attention", None) == "vision" or (
            config.model_type == "gemma3_text"
        ):
            blocks = of_model.get_block_sequence_ids_for_mask(is_image.int(), x.device)
            more["attention_mask"] = of_model.create_masks_for_vision_model(
                config, x, None, None, None, blocks
            )
        hidden = text(inputs_embeds=x, use_cache=False, **more).last_hidden_state
        logits = model.lm_head(hidden)[0]
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits, torch.arange(length).expand(3, -1)
