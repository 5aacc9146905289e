"""Preparation of images: pixel for pixel as transformers' processors, and in the order that the
towers take.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jpaged.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from jpaged.images.prepare import ImagePreparer
from jpaged.images.resize import resized
from jpaged.images.spans import packed, positions
from jpaged.models.config import ModelConfig
from jpaged.models.vision.tower import Grid, VisionConfig
from tests.golden import towers

RNG = np.random.default_rng(3)
# What preprocessor_config.json says, for the towers of tests/golden/towers.py.
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 40},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 24, "width": 24},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": None,
    },
    "gemma4_clipped": {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    "gemma4_standardized": {"patch_size": 3, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    "gemma4_unified": {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70},
}
CLASSES = {"qwen": Qwen2VLImageProcessorPil, "gemma3": Gemma3ImageProcessorPil}
LARGE = {"size": {"shortest_edge": 16 * 16, "longest_edge": 300 * 200}}
SIZES = [(37, 90), (64, 64), (201, 33), (8, 17), (300, 400)]


def settings_of(name: str) -> dict[str, Any]:
    return SETTINGS["qwen" if name.startswith("qwen") else name]


def write_settings(name: str, folder: Path, **changes: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings_of(name) | changes))
    return folder


def vision_of(name: str) -> VisionConfig:
    vision = ModelConfig.from_hf(towers.CONFIGS[name], images=True).vision
    assert vision is not None
    return vision


def image_of(height: int, width: int) -> np.ndarray:
    """Smooth, so that resizing matters everywhere, with some noise."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(y / 7 + i) * np.cos(x / 5 - i) for i in range(3)], axis=-1)
    return (127 + 90 * waves + RNG.integers(-30, 30, waves.shape)).astype(np.uint8)


@pytest.mark.parametrize("name", towers.CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_transformers(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """To the bit, given one of Pillow's images as its processors are. Gemma 4 12B's patches are
    those of an image that was resized before (tests/images/test_resize.py).
    """
    folder, vision, pixels = write_settings(name, tmp_path), vision_of(name), image_of(*size)
    prepared = ImagePreparer(folder, vision).prepare(pixels)
    kind = CLASSES.get("qwen" if name.startswith("qwen") else name, Gemma4ImageProcessorPil)
    options = {"do_pan_and_scan": False} if name == "gemma3" else {}
    if name == "gemma4_unified":
        _, rows, columns = prepared.grid
        pixels, options = resized(pixels, 6 * rows, 6 * columns), {"do_resize": False}
    theirs = kind.from_pretrained(folder)(
        images=[Image.fromarray(pixels)], return_tensors="np", **options
    )
    assert prepared.patches.dtype == np.float32
    assert prepared.grid.size == len(prepared.patches)
    values = theirs["pixel_values"]
    if name.startswith("qwen"):
        assert np.array_equal(prepared.patches, values)
        assert prepared.grid == tuple(theirs["image_grid_thw"][0])
    elif name == "gemma3":
        assert np.array_equal(whole(prepared.patches, prepared.grid, vision), values[0])
    else:
        at = theirs["image_position_ids"][0]
        count = (at[:, 0] >= 0).sum()
        rows = theirs["num_soft_tokens_per_image"][0]
        if name != "gemma4_unified":
            assert np.array_equal(prepared.patches, values[0, :count])
            assert np.array_equal(positions(prepared.grid, vision)[:, ::-1], at[:count])
        small = settings_of(name)["patch_size"]
        width, height = at[:count].max(axis=0) + 1
        x = values[0, :count].reshape(height, width, small, small, 3).transpose(4, 0, 2, 1, 3)
        x = x.reshape(3, height * small, width * small)
        assert np.array_equal(whole(prepared.patches, prepared.grid, vision), x)
        assert prepared.rows(vision).size == rows


def whole(patches: np.ndarray, grid: Grid, vision: VisionConfig) -> np.ndarray:
    """The image [3, height, width] that patches are of, put together by their positions."""
    frames = 2 if vision.in_blocks else 1
    side = round((vision.num_features // 3 // frames) ** 0.5)
    image = np.zeros((3, grid.h * side, grid.w * side), np.float32)
    channels_first = vision.in_blocks or type(vision).__name__.startswith("Siglip")
    for patch, (row, column) in zip(patches, positions(grid, vision), strict=True):
        if vision.in_blocks:
            patch = patch.reshape(3, 2, side, side)
            assert np.array_equal(patch[:, 0], patch[:, 1])
            patch = patch[:, 0]
        elif channels_first:
            patch = patch.reshape(3, side, side)
        else:
            patch = patch.reshape(side, side, 3).transpose(2, 0, 1)
        y, x = row * side, column * side
        image[:, y : y + side, x : x + side] = patch
    return image


@pytest.mark.parametrize("name", towers.CONFIGS)
def test_patches_are_of_the_resized_image(name: str, tmp_path: Path) -> None:
    """Put together by their positions, they are what the image is resized to, rescaled."""
    vision, pixels = vision_of(name), image_of(70, 45)
    prepared = ImagePreparer(write_settings(name, tmp_path), vision).prepare(pixels)
    image = whole(prepared.patches, prepared.grid, vision)
    size = (image.shape[2], image.shape[1])
    resample = Image.Resampling.BILINEAR if name == "gemma3" else Image.Resampling.BICUBIC
    small = np.asarray(Image.fromarray(pixels).resize(size, resample))
    if name == "gemma4_unified":
        small = resized(pixels, *size[::-1])
    expected = small.transpose(2, 0, 1) / 255
    if "image_mean" in (settings := settings_of(name)):
        mean, std = (np.array(settings[x])[:, None, None] for x in ("image_mean", "image_std"))
        expected = (expected - mean) / std
    assert np.abs(image - expected).max() < 1e-6


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_clipped", "gemma4_unified"])
def test_aspects_are_kept(name: str, tmp_path: Path) -> None:
    vision = vision_of(name)
    preparer = ImagePreparer(write_settings(name, tmp_path), vision)
    for height, width in ((120, 40), (40, 120), (100, 100)):
        grid = preparer.prepare(image_of(height, width)).grid
        assert (grid.h > grid.w, grid.h < grid.w) == (height > width, height < width)


def test_digests(tmp_path: Path) -> None:
    vision, pixels = vision_of("qwen3_vl"), image_of(20, 30)
    preparer = ImagePreparer(write_settings("qwen3_vl", tmp_path), vision)
    first = preparer.digest(pixels)
    assert len(first) == 32 and first == preparer.prepare(pixels.copy()).digest
    assert first == preparer.digest(np.asfortranarray(pixels))
    others = [
        pixels.reshape(30, 20, 3),
        pixels[::-1],
        np.where(np.indices(pixels.shape).sum(0) == 5, pixels ^ 1, pixels),
    ]
    assert len({first, *(preparer.digest(x) for x in others)}) == 4
    other = ImagePreparer(write_settings("qwen3_vl", tmp_path, image_mean=[0.5, 0.5, 0.5]), vision)
    assert other.digest(pixels) != first
    assert ImagePreparer(tmp_path, vision, max_rows=9).digest(pixels) != other.digest(pixels)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_clipped"])
def test_fewer_rows(name: str, tmp_path: Path) -> None:
    vision, pixels = vision_of(name), image_of(300, 400)
    folder = write_settings(
        name, tmp_path, **({"max_soft_tokens": 280} if name.startswith("gemma") else LARGE)
    )
    rows = [
        ImagePreparer(folder, vision, max_rows=most).prepare(pixels).rows(vision).size
        for most in (None, 10**6, 140, 100, 71)
    ]
    assert rows == sorted(rows, reverse=True)
    assert all(n <= most for n, most in zip(rows[2:], (140, 100, 71), strict=True))
    assert rows[0] == rows[1] > 140


def test_several_images_are_packed(tmp_path: Path) -> None:
    vision = vision_of("qwen3_vl")
    preparer = ImagePreparer(write_settings("qwen3_vl", tmp_path), vision)
    images = [preparer.prepare(image_of(*size)) for size in ((16, 24), (24, 16))]
    batch = packed(images, vision, 20)
    count = sum(image.grid.size for image in images)
    row, image = np.asarray(batch.row_N), np.asarray(batch.image_N)
    assert len(row) == 80 and (image[count:] == -1).all() and (row[count:] == 20).all()
    assert (np.bincount(row[:count]) == 4).all()
    assert (np.diff(row[:count]) >= 0).all(), "squares of patches follow each other"
    assert image[:count].tolist() == [0] * images[0].grid.size + [1] * images[1].grid.size


class TestWhatIsRefused:
    def test_folders(self, tmp_path: Path) -> None:
        vision = vision_of("qwen3_vl")
        with pytest.raises(CheckpointError, match=r"no preprocessor_config.json"):
            ImagePreparer(tmp_path, vision)
        with pytest.raises(ConfigError, match="patch_size=16 is not the vision tower's 4"):
            ImagePreparer(write_settings("qwen3_vl", tmp_path, patch_size=16), vision)
        for name, value in {"size": {"height": 8, "width": 24}}.items():
            with pytest.raises(ConfigError, match="size="):
                ImagePreparer(
                    write_settings("gemma3", tmp_path, **{name: value}), vision_of("gemma3")
                )
        with pytest.raises(UnsupportedError, match="do_pan_and_scan"):
            ImagePreparer(
                write_settings("gemma3", tmp_path, do_pan_and_scan=True), vision_of("gemma3")
            )

    def test_rows(self, tmp_path: Path) -> None:
        for name, most in {"gemma3": 8, "gemma4_clipped": 69, "qwen3_vl": 0}.items():
            with pytest.raises(ConfigError, match=f"max_rows={most}"):
                ImagePreparer(write_settings(name, tmp_path), vision_of(name), max_rows=most)
        ImagePreparer(write_settings("gemma3", tmp_path), vision_of("gemma3"), max_rows=9)

    @pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_clipped", "gemma4_unified"])
    def test_shapes(self, name: str, tmp_path: Path) -> None:
        preparer = ImagePreparer(write_settings(name, tmp_path), vision_of(name))
        for pixels in (
            np.zeros((2, 2), np.uint8),
            np.zeros((2, 2, 3), np.float32),
            np.zeros((2, 2, 4), np.uint8),
        ):
            with pytest.raises(RequestError, match="must be uint8"):
                preparer.prepare(pixels)
        if name == "qwen3_vl":
            with pytest.raises(RequestError, match=r"image of 2 x 900 pixels.*aspect ratio"):
                preparer.prepare(np.zeros((900, 2, 3), np.uint8))
        for shape in ((1, 1, 3), (1, 150, 3), (150, 1, 3)):  # as small as they may be
            assert preparer.prepare(np.zeros(shape, np.uint8)).grid.size
