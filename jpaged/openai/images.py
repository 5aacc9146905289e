"""Images of a request's body: which sources may be named, and what is said of one that is wrong."""

import re
from collections.abc import Sequence
from typing import NoReturn

from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.images.limits import ImageLimits
from jpaged.models.config import ModelConfig
from jpaged.openai.protocol import INVALID_IMAGE, BodyError

URL = re.compile(r"https?://", re.IGNORECASE)
DATA = "data:"


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
            f"{len(sources)} images in a prompt: the limit is max_images={limits.max_images}",
            param="messages",
            code=INVALID_IMAGE,
        )
    for place, source in enumerate(sources):
        if not (limits.local_paths or is_data(source) or is_url(source)):
            said = "a URL must begin with data:, http:// or https://"
            refuse_image(place, RequestError(said))


def refuse_image(place: int, error: RequestError) -> NoReturn:
    """Raise the error of one of the images of a request, the first being 0."""
    raise BodyError(f"images[{place}]: {error}", param="messages", code=INVALID_IMAGE) from error


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


def check_takes_images(model: ModelConfig, config: EngineConfig) -> None:
    """Raise BodyError where prompts of a model cannot have images."""
    if (why := why_no_images(model, config)) is not None:
        raise BodyError(why, param="messages", code="unsupported_field")
