"""Images of a request's body: which sources may be named, and what is said of one that is wrong."""

import re
from collections.abc import Sequence
from typing import NoReturn

from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.images.limits import ImageLimits
from jpaged.models.config import ModelConfig
from jpaged.openai.protocol import BodyError

CODE = "invalid_image"
URL = re.compile(r"https?://", re.IGNORECASE)
DATA = "data:"
ALL_PIXELS = 4  # times the pixels that one image may have, in all images of a request


def is_data(source: str) -> bool:
    """Return whether a source has the image itself."""
    return source[: len(DATA)].lower() == DATA


def is_url(source: str) -> bool:
    """Return whether an image is to be fetched."""
    return URL.match(source) is not None


def check_sources(sources: Sequence[str], limits: ImageLimits) -> None:
    """Raise BodyError for more images than a request may have, and for a source of another kind
    than data: URLs, URLs and, where limits allow them, paths.
    """
    if len(sources) > limits.max_images:
        raise BodyError(
            f"{len(sources)} images: a request may have max_images={limits.max_images}",
            param="messages",
            code=CODE,
        )
    for place, source in enumerate(sources):
        if not (limits.local_paths or is_data(source) or is_url(source)):
            said = "a URL must begin with data:, http:// or https://"
            refuse_image(place, len(sources), RequestError(said))


def check_pixels(count: int, limits: ImageLimits) -> None:
    """Raise BodyError where the images of a request have too many pixels together."""
    if count > (most := ALL_PIXELS * limits.max_pixels):
        said = f"images of {count:,} pixels together: the limit is 4 * max_pixels={most:,}"
        raise BodyError(said, param="messages", code=CODE)


def refuse_image(place: int, count: int, error: RequestError) -> NoReturn:
    """Raise the error of one of so many images of a request, the first being 0."""
    which = f"image {place + 1} of {count}: " if count > 1 else ""
    raise BodyError(f"{which}{error}", param="messages", code=CODE) from error


def check_takes_images(model: ModelConfig, config: EngineConfig) -> None:
    """Raise BodyError where prompts of a model cannot have images, which says what would help."""
    if (why := why_no_images(model, config)) is not None:
        raise BodyError(why, param="messages", code="unsupported_field")


def why_no_images(model: ModelConfig, config: EngineConfig) -> str | None:
    """Return why prompts of a model cannot have images; None where they can."""
    if config.images:
        return None
    return (
        f"images: this model ({model.family}) was loaded without a vision tower; --images "
        "(EngineConfig: images=True) reads one where the files of the model have it"
    )
