"""Images and videos of a request's body: which sources may be named, and what is said of one that
is wrong.
"""

import re
from typing import NoReturn

from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.images.limits import IMAGE, VIDEO, ImageLimits, Kind
from jpaged.images.videos import why_no_videos
from jpaged.models.config import ModelConfig
from jpaged.openai.protocol import INVALID_IMAGE, INVALID_VIDEO, BodyError, GenerationRequest

URL = re.compile(r"https?://", re.IGNORECASE)
DATA = "data:"


def is_data(source: str) -> bool:
    """Return whether a source has the image itself."""
    return source[: len(DATA)].lower() == DATA


def is_url(source: str) -> bool:
    """Return whether an image or a video is to be fetched."""
    return URL.match(source) is not None


def sources_of(body: GenerationRequest) -> list[tuple[Kind, int, str]]:
    """Return the images and the videos of a body: what a source is, its place, and the source."""
    kinds = ((IMAGE, body.image_sources), (VIDEO, body.video_sources))
    return [(kind, i, source) for kind, sources in kinds for i, source in enumerate(sources)]


def check_sources(body: GenerationRequest, limits: ImageLimits) -> None:
    """Raise BodyError for more images and videos than a request may have, and for a source of
    another kind than data: URLs, URLs and, where limits allow them, paths.
    """
    sources, most = sources_of(body), limits.max_images
    if len(sources) > most:
        kinds, code = ("images and videos" if body.video_sources else "images"), INVALID_IMAGE
        said = f"{len(sources)} {kinds} in a prompt: the limit is max_images={most}"
        raise BodyError(said, param="messages", code=code)
    for kind, place, source in sources:
        if not (limits.local_paths or is_data(source) or is_url(source)):
            said = "a URL must begin with data:, http:// or https://"
            refuse_source(kind, place, RequestError(said))


def refuse_source(kind: Kind, place: int, error: RequestError) -> NoReturn:
    """Raise the error of one of the images or videos of a request, the first being 0."""
    code = INVALID_IMAGE if kind is IMAGE else INVALID_VIDEO
    raise BodyError(f"{kind.name}s[{place}]: {error}", param="messages", code=code) from error


def why_no_images(model: ModelConfig, config: EngineConfig) -> str | None:
    """Return why prompts of a model cannot have images, and what would help; None where they
    can.
    """
    if config.images:
        return None
    return (
        f"images: this model ({model.family}) was loaded without a vision tower; --images "
        "(images=True of EngineConfig) reads one where the files of the model have it"
    )


def check_takes_sources(model: ModelConfig, config: EngineConfig, body: GenerationRequest) -> None:
    """Raise BodyError where prompts of a model cannot have the images or the videos of a body."""
    why = why_no_images(model, config)
    if why is None and body.video_sources:
        assert model.vision is not None
        why = why_no_videos(model.vision)
        why = None if why is None else f"{model.family}: {why}"
    if why is not None:
        raise BodyError(why, param="messages", code="unsupported_field")
