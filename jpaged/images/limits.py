"""ImageLimits: what an image may be, and where it may come from."""

import dataclasses
import re
from typing import Self

from jpaged.checks import parsed_settings, positive, settings_of
from jpaged.errors import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MIB = 2**20
# A name or an IPv4 address, perhaps with a port; or an IPv6 address, without brackets.
HOST = re.compile(
    r"(\*\.)?[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?(:[0-9]{1,5})?|[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """The bounds that a caller sets for images; what is beyond one is that request's error.

    max_bytes: of a file, or of what a data: URL holds. max_pixels: width times height, which is
    looked at before anything is decoded. max_side: of width and height. max_frames: of an animated
    file, whose first frame is taken. formats: that are read at all, by Pillow's names. local_paths:
    whether a source may be a path of this machine. hosts: that images may be fetched from: names,
    with :PORT where it is not the usual one; "*.example.com" is any host below it. None are
    fetched from by default. private_addresses: whether these hosts may have addresses that are not
    public. timeout_s: of all of a fetch. max_redirects: to hosts that are listed, too. max_images:
    of one prompt.
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

    def __post_init__(self) -> None:
        for name in ("formats", "hosts"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(x, str) for x in value):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be several str")
            object.__setattr__(self, name, tuple(value))
        for name in ("local_paths", "private_addresses"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be True or False")
        for name in ("max_bytes", "max_pixels", "max_side", "max_frames", "max_images"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"ImageLimits: {name}={value!r}: must be an integer of at least 1"
                )
        positive(timeout_s=self.timeout_s)
        redirects = self.max_redirects
        if isinstance(redirects, bool) or not isinstance(redirects, int) or redirects < 0:
            raise ConfigError(
                f"ImageLimits: max_redirects={redirects!r}: must be an integer of 0 or more"
            )
        for name in ("formats", "hosts"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(x, str) for x in value):
                raise ConfigError(f"ImageLimits: {name}={value!r}: must be a tuple of strings")
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise ConfigError(
                    f"ImageLimits: hosts has {host!r}: must be names in lower case such as "
                    "'images.example.com', 'example.com:8080' or '*.example.com'"
                )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a flag: a dict of the fields as JSON, or "none"."""
        return parsed_settings(cls, "image_limits", text)

    @classmethod
    def of(cls, value: object) -> Self:
        """Make one of a dict of its fields."""
        return settings_of(cls, "image_limits", value)


DEFAULT_LIMITS = ImageLimits()
