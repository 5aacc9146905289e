"""Which frames of a video transformers' processors take, and the patches that they make of them.
It needs torchvision beside torch: python -m tests.golden.make_golden_clips
"""

from pathlib import Path
from typing import Any

import numpy as np

SETTINGS: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"shortest_edge": 64, "longest_edge": 3_000},
}
NAMES = ("qwen3_vl", "qwen2_5_vl")
# Frames of a video and how many it has a second; fps and num_frames that are asked for.
SAMPLED = [
    (10, 24.0, None, None),
    (100, 25.0, None, None),
    (100, 25.0, 3.0, None),
    (101, 29.97, 0.5, None),
    (7, 1.0, None, 4),
    (37, 12.5, None, 6),
    (50_000, 30.0, 2.0, None),
]
CLIP, CLIP_FPS = (11, 20, 30), 4.0  # frames, height, width


def clip() -> np.ndarray:
    """The frames of a video."""
    n, y, x, c = np.indices((*CLIP, 3))
    return ((7 * y + 3 * x + 60 * c + 40 * n + x * y // 5) % 256).astype(np.uint8)


def main() -> None:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    arrays = dict[str, Any]()
    for name, kind in zip(NAMES, (Qwen3VLVideoProcessor, Qwen2VLVideoProcessor), strict=True):
        processor = kind(**SETTINGS, do_sample_frames=True)
        for i, (total, fps, rate, count) in enumerate(SAMPLED):
            metadata = VideoMetadata(total_num_frames=total, fps=fps)
            if name == "qwen2_5_vl" and rate is None and count is None:
                rate = 2.0
            taken = processor.sample_frames(metadata, fps=rate, num_frames=count)
            arrays[f"{name}/{i}"] = np.asarray(taken, np.int32)
        for cap in (False, True):
            whole = {"total_num_frames": CLIP[0], "fps": CLIP_FPS}
            made = processor(
                [clip()],
                video_metadata=[whole],
                fps=2.0,
                cap_pixels_per_frame=cap,
                return_metadata=True,
                return_tensors="pt",
            )
            key = f"{name}/capped" if cap else name
            arrays[f"{key}/patches"] = made["pixel_values_videos"].numpy()
            arrays[f"{key}/grid"] = made["video_grid_thw"].numpy()[0]
            (told,) = made["video_metadata"]
            arrays[f"{key}/taken"] = np.asarray(told.frames_indices, np.int32)
            arrays[f"{key}/sampled_fps"] = np.asarray(told.sampled_fps)
    np.savez_compressed(Path(__file__).parent / "clips.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
