"""From pixels to patches, as transformers' own image processor of the model does it, pixel for
pixel: with Pillow and numpy alone (its classes with `Pil` in their names). Gemma 4 12B's processor
has no such class; its images are resized here (`resized`), and cut by Gemma 4's.
"""

import functools
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from jpaged.images.resize import BICUBIC, resized
from jpaged.images.sources import pillow
from jpaged.images.spans import Prepared
from jpaged.models.hf_defaults import import_transformers
from jpaged.models.vision.gemma4 import Gemma4VisionConfig
from jpaged.models.vision.qwen import QwenVisionConfig
from jpaged.models.vision.siglip import SiglipVisionConfig
from jpaged.models.vision.tower import Grid, VisionConfig
from jpaged.models.vision.unified import SOFT_TOKENS, UnifiedVisionConfig

# Of a folder, one of which says how images are prepared: two versions of transformers.
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"
QWEN = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
GEMMA3 = "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil"
GEMMA4 = "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil"


class ImagePreparer:
    """Makes patches of pixels for one model.

    folder: with the settings of the model's image processor, in one of IMAGE_FILES. config: of the
    vision tower. max_rows: rows of embeddings that an image has at most, if that is fewer than what
    the folder says: larger ones are made smaller. CheckpointError where the folder has no such
    file, ConfigError where its settings are not the tower's.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: VisionConfig,
        *,
        max_rows: int | None = None,
    ):
        pillow()
        self.config, self.folder, self.max_rows = config, Path(folder), max_rows
        if not any((self.folder / name).is_file() for name in IMAGE_FILES):
            raise CheckpointError(
                f"{self.folder}: has no {' and no '.join(IMAGE_FILES)}, which say how images are "
                "prepared"
            )
        self.processor = _processor_class(config).from_pretrained(self.folder)
        self._check(max_rows)
        if max_rows is not None:
            self._limit(max_rows)
        settings = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        self._settings = f"{type(config).__name__} {config.merge} {settings}".encode()

    def digest(self, pixels: np.ndarray) -> bytes:
        """Return what tells an image from every other, prepared by these settings. pixels: uint8
        [height, width, 3].
        """
        content = hashlib.blake2b(self._settings, digest_size=32)
        content.update(f" {pixels.shape}".encode())
        content.update(np.ascontiguousarray(pixels).data)
        return content.digest()

    def prepare(self, pixels: np.ndarray, digest: bytes | None = None) -> Prepared:
        """Return the patches of an image. pixels: uint8 [height, width, 3]. digest: theirs, where
        it is known. RequestError for a shape that the model cannot take.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise RequestError(
                f"pixels of {pixels.dtype} {pixels.shape}: must be uint8 [height, width, 3]"
            )
        options: dict[str, Any] = {"input_data_format": "channels_last", "return_tensors": "np"}
        if isinstance(self.config, SiglipVisionConfig):
            options["do_pan_and_scan"] = False
        content = pixels
        try:
            if isinstance(self.config, UnifiedVisionConfig) and self.processor.do_resize:
                content = resized(pixels, *self._unified_size(pixels))
                options["do_resize"] = False
            made = self.processor(images=[content], **options)
        except (ValueError, ZeroDivisionError) as e:
            height, width = pixels.shape[:2]
            raise RequestError(f"image of {width} x {height} pixels: {e}") from e
        patches, grid = self._patches(made)
        if patches.shape != (grid.size, self.config.num_features):
            raise ConfigError(
                f"{self.folder}: its image processor makes patches {patches.shape} of a grid of "
                f"{grid}: the tower takes {self.config.num_features} numbers a patch"
            )
        digest = self.digest(pixels) if digest is None else digest
        return Prepared(patches=patches, grid=grid, digest=digest)

    def _unified_size(self, pixels: np.ndarray) -> tuple[int, int]:
        """Return the height and the width that an image of Gemma 4 12B is resized to."""
        processor = self.processor
        module = importlib.import_module(type(processor).__module__)
        return module.get_aspect_ratio_preserving_size(
            height=pixels.shape[0],
            width=pixels.shape[1],
            patch_size=processor.patch_size,
            max_patches=processor.max_soft_tokens * processor.pooling_kernel_size**2,
            pooling_kernel_size=processor.pooling_kernel_size,
        )

    def patches_of(self, pixels: np.ndarray) -> np.ndarray:
        """Return the patches of an image that has been resized already, for Qwen's towers."""
        options: dict[str, Any] = {"input_data_format": "channels_last", "return_tensors": "np"}
        made = self.processor(images=[pixels], do_resize=False, **options)
        return self._patches(made)[0]

    def _patches(self, made: Any) -> tuple[np.ndarray, Grid]:
        """Return the patches that a processor has made of one image, in the tower's order."""
        config, values = self.config, np.asarray(made["pixel_values"], np.float32)
        if isinstance(config, QwenVisionConfig):
            return values, Grid(*(int(n) for n in made["image_grid_thw"][0]))
        if isinstance(config, SiglipVisionConfig):
            side, size = config.side, config.patch_size
            x = values[0].reshape(3, side, size, side, size).transpose(1, 3, 0, 2, 4)
            return x.reshape(side * side, -1), Grid(1, side, side)
        at = made["image_position_ids"][0]
        count = int((at[:, 0] >= 0).sum())
        width, height = (int(n) + 1 for n in at[:count].max(axis=0))
        patches = values[0, :count]
        if isinstance(config, UnifiedVisionConfig):
            patches = joined(patches, height, width, config.pooling)
            height, width = height // config.pooling, width // config.pooling
        return patches, Grid(1, height, width)

    def _check(self, max_rows: int | None) -> None:
        """ConfigError where the processor's settings are not the tower's."""
        config, processor = self.config, self.processor
        if isinstance(config, QwenVisionConfig):
            wanted = {"patch_size": config.patch_size, "merge_size": config.merge}
            wanted["temporal_patch_size"] = config.frames
        elif isinstance(config, SiglipVisionConfig):
            side = config.side * config.patch_size
            wanted = {"size": {"height": side, "width": side}}
        elif isinstance(config, UnifiedVisionConfig):
            wanted = {"patch_size": config.patch_size // config.pooling}
            wanted["pooling_kernel_size"] = config.pooling
            wanted["resample"] = BICUBIC
        elif isinstance(config, Gemma4VisionConfig):
            wanted = {"patch_size": config.patch_size, "pooling_kernel_size": config.merge}
        else:
            raise UnsupportedError(f"no image processor for {type(config).__name__} is known")
        for name, value in wanted.items():
            held = getattr(processor, name)
            held = {key: held[key] for key in value} if isinstance(value, dict) else held
            if held != value:
                raise ConfigError(
                    f"{self.folder}: the image processor's {name}={held!r} is not the vision "
                    f"tower's {value!r}"
                )
        if getattr(processor, "do_pan_and_scan", None):
            raise UnsupportedError(
                f"{self.folder}: do_pan_and_scan (crops of an image) is not read"
            )
        if max_rows is not None and (isinstance(max_rows, bool) or max_rows < 1):
            raise ConfigError(f"max_rows={max_rows!r}: must be an integer of at least 1")

    def _limit(self, max_rows: int) -> None:
        """Have the processor make no more than so many rows of an image."""
        config, processor = self.config, self.processor
        if isinstance(config, QwenVisionConfig):
            most = max_rows * (config.patch_size * config.merge) ** 2
            most = min(most, processor.size["longest_edge"])
            least = min(processor.size["shortest_edge"], most)
            processor.size = type(processor.size)(shortest_edge=least, longest_edge=most)
        elif isinstance(config, SiglipVisionConfig):
            if max_rows < config.rows_of_an_image:
                raise ConfigError(
                    f"max_rows={max_rows}: every image of this model has {config.rows_of_an_image}"
                )
        elif (fitting := max([n for n in SOFT_TOKENS if n <= max_rows], default=0)) == 0:
            raise ConfigError(
                f"max_rows={max_rows}: the most of an image is one of {SOFT_TOKENS} in this model"
            )
        else:
            processor.max_soft_tokens = min(fitting, processor.max_soft_tokens)


def joined(patches: np.ndarray, height: int, width: int, pooling: int) -> np.ndarray:
    """Return squares of pooling x pooling patches as patches of their own.

    patches: [height * width, row * column * channel], in order of rows and columns.
    """
    size = round((patches.shape[1] // 3) ** 0.5)
    x = patches.reshape(height // pooling, pooling, width // pooling, pooling, size, size, 3)
    return x.transpose(0, 2, 1, 4, 3, 5, 6).reshape(-1, 3 * (pooling * size) ** 2)


@functools.cache
def _class_of(path: str) -> Any:
    import_transformers()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _processor_class(config: VisionConfig) -> Any:
    """Return the class of transformers' that prepares images for a tower with Pillow."""
    by_kind = {QwenVisionConfig: QWEN, SiglipVisionConfig: GEMMA3}
    path = next((path for kind, path in by_kind.items() if isinstance(config, kind)), GEMMA4)
    try:
        return _class_of(path)
    except (ImportError, AttributeError) as e:
        raise UnsupportedError(
            f"transformers has no {path.rpartition('.')[2]} here ({e}): images need "
            "pip install 'jpaged[images]'"
        ) from e
