"""ImageLimits: what an image or a video may be, and where it may come from."""

import dataclasses
import re
from typing import NamedTuple, Self

from jpaged.checks import parsed_settings, positive, settings_of
from jpaged.errors import ConfigError


class Kind(NamedTuple):
    """What a source holds, for messages. bytes_limit: the field of ImageLimits that bounds it."""

    name: str
    bytes_limit: str


IMAGE, VIDEO = Kind("image", "max_bytes"), Kind("video", "max_video_bytes")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
VIDEO_FORMATS = ("mov", "matroska", "avi")
MIB = 2**20
# A name or an IPv4 address, perhaps with a port; or an IPv6 address, without brackets.
HOST = re.compile(
    r"(\*\.)?[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?(:[0-9]{1,5})?|[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """The bounds that a caller sets for images and videos; what is beyond one is that request's
    error.

    max_bytes: of a file, or of what a data: URL holds. max_pixels: width times height, which is
    looked at before anything is decoded. max_side: of width and height. max_frames: of an animated
    file, whose first frame is taken. formats: that are read at all, by Pillow's names. local_paths:
    whether a source may be a path of this machine. hosts: that images may be fetched from: names,
    with :PORT where it is not the usual one; "*.example.com" is any host below it. None are
    fetched from by default. private_addresses: whether these hosts may have addresses that are not
    public. timeout_s: of all of a fetch. max_redirects: to hosts that are listed, too. max_images:
    of one prompt, videos counted with them.

    Of a video: max_video_bytes: of its file. max_video_seconds: that it lasts. max_video_frames:
    that it has, before some are picked. max_video_pixels: of a frame, width times height.
    video_timeout_s: of all of its decoding. video_formats: containers that are read at all, by
    FFmpeg's names; "mov" is MP4 and its kin, "matroska" WebM too.
    """

    max_bytes: int = 32 * MIB
    max_pixels: int = 40_000_000
    max_side: int = 30_000
    max_frames: int = 1
    formats: tuple[str, ...] = FORMATS
    local_paths: bool = True
    hosts: tuple[str, ...] = ()
    private_addresses: bool = False
    timeout_s: float = 10.0
    max_redirects: int = 3
    max_images: int = 1024
    max_video_bytes: int = 128 * MIB
    max_video_seconds: float = 3600.0
    max_video_frames: int = 250_000
    max_video_pixels: int = 4096 * 2160
    video_timeout_s: float = 60.0
    video_formats: tuple[str, ...] = VIDEO_FORMATS

    def __post_init__(self) -> None:
        for name in ("formats", "hosts", "video_formats"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(x, str) for x in value):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be several str")
            object.__setattr__(self, name, tuple(value))
        for name in ("local_paths", "private_addresses"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be True or False")
        counts = ("max_bytes", "max_pixels", "max_side", "max_frames", "max_images")
        of_videos = ("max_video_bytes", "max_video_frames", "max_video_pixels")
        for name in (*counts, *of_videos):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"ImageLimits: {name}={value!r}: must be an integer of at least 1"
                )
        positive(timeout_s=self.timeout_s)
        positive(max_video_seconds=self.max_video_seconds, video_timeout_s=self.video_timeout_s)
        redirects = self.max_redirects
        if isinstance(redirects, bool) or not isinstance(redirects, int) or redirects < 0:
            raise ConfigError(
                f"ImageLimits: max_redirects={redirects!r}: must be an integer of 0 or more"
            )
        for name in ("formats", "hosts", "video_formats"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(x, str) for x in value):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be a tuple of strings")
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise ConfigError(
                    f"ImageLimits: hosts has {host!r}: must be names in lower case such as "
                    "'images.example.com', 'example.com:8080' or '*.example.com'"
                )

    def most_bytes(self, kind: Kind) -> int:
        """Return how many bytes a file may have."""
        return getattr(self, kind.bytes_limit)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a flag: a dict of the fields as JSON, or "none"."""
        return parsed_settings(cls, "image_limits", text)

    @classmethod
    def of(cls, value: object) -> Self:
        """Make one of a dict of its fields."""
        return settings_of(cls, "image_limits", value)


DEFAULT_LIMITS = ImageLimits()
