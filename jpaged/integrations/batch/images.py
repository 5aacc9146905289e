"""LineImages: which images and videos the lines of a run may name, and how they are read when a
line is admitted.
"""

import dataclasses
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged.errors import RequestError
from jpaged.images.limits import DEFAULT_LIMITS, IMAGE, ImageLimits, Kind
from jpaged.images.sources import shortened
from jpaged.openai.images import (
    check_sources,
    check_takes_sources,
    is_data,
    is_url,
    refuse_source,
    sources_of,
)
from jpaged.openai.protocol import GenerationRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineImages:
    """Where the images and videos of lines may be. limits: of each. folder: the one that paths are
    below; None: no path is read.
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

    def put_into(self, body: GenerationRequest, llm: Any) -> None:
        """Have a body take its images and videos from their sources, within these limits, which are
        those of the engine's prompts from now on. Raises BodyError.
        """
        check_takes_sources(llm.model_config, llm.engine_config, body)
        llm.session.inputs.images.limits = self.limits
        check_sources(body, self.limits)
        images, videos = list[str | Path](), list[str | Path]()
        for kind, place, source in sources_of(body):
            taken = images if kind is IMAGE else videos
            try:
                is_path = not (is_data(source) or is_url(source))
                taken.append(self._path(kind, source) if is_path else source)
            except RequestError as e:
                refuse_source(kind, place, e)
        body.put_sources(images, videos)

    def _path(self, kind: Kind, source: str) -> Path:
        """Return a file below the folder. RequestError for what is elsewhere, or no file."""
        assert self.folder is not None  # else check_sources has refused it
        label = f"{kind.name} {shortened(source)!r}"
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
