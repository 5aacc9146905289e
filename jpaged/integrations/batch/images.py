"""LineImages: which images the lines of a run may name, and how they are read when a line is
admitted.
"""

import dataclasses
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jpaged.errors import RequestError
from jpaged.images.limits import DEFAULT_LIMITS, ImageLimits
from jpaged.images.sources import load_image, shortened
from jpaged.openai.images import check_pixels, check_sources, is_data, is_url, refuse_image


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineImages:
    """Where the images of lines may be. limits: of each. folder: the one that paths are below;
    None: no path is read.
    """

    limits: ImageLimits
    folder: str | None = None

    @classmethod
    def of(
        cls, limits: ImageLimits | None, *, hosts: Sequence[str] = (), folder: str | None = None
    ) -> "LineImages":
        """Return those of a run. limits: the engine's, where it has any. hosts: the run's own.
        Raises ConfigError for hosts that are none.
        """
        limits = limits or DEFAULT_LIMITS
        hosts = (*limits.hosts, *hosts)
        local = folder is not None
        return cls(
            limits=dataclasses.replace(limits, hosts=hosts, local_paths=local), folder=folder
        )

    def load(self, sources: Sequence[str]) -> list[np.ndarray]:
        """Return the pixels of a line's images, in order. Raises BodyError."""
        check_sources(sources, self.limits)
        pixels: dict[str, np.ndarray] = {}
        total = 0
        for place, source in enumerate(sources):
            if source in pixels:
                continue
            try:
                is_path = not (is_data(source) or is_url(source))
                pixels[source] = load_image(self._path(source) if is_path else source, self.limits)
            except RequestError as e:
                refuse_image(place, len(sources), e)
            total += pixels[source].shape[0] * pixels[source].shape[1]
            check_pixels(total, self.limits)
        return [pixels[source] for source in sources]

    def _path(self, source: str) -> Path:
        """Return a file below the folder. RequestError for what is elsewhere, or no file."""
        assert self.folder is not None  # else check_sources has refused it
        label = f"image {shortened(source)!r}"
        try:
            folder = os.path.realpath(self.folder)
            path = os.path.realpath(os.path.join(folder, source))
            if os.path.isabs(source) or os.path.commonpath((folder, path)) != folder:
                raise RequestError(f"{label}: a path must lead to a file below the input's folder")
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise RequestError(f"{label}: is no file")
        except (OSError, ValueError) as e:
            if isinstance(e, RequestError):
                raise
            raise RequestError(f"{label}: {getattr(e, 'strerror', None) or e}") from e
        return Path(path)


NO_PATHS = LineImages.of(None)
