"""The page of a server: an HTML file, a stylesheet and ES modules beside this file, in page/. They
load nothing from elsewhere, and only they may run in it.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# What a browser lets the page do: run these files, and ask this server. No text becomes markup or
# code, since nothing may be assigned to innerHTML and its like (trusted types).
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",  # pictures of messages
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}


class Page:
    """The files of the page by name, each with its content type. index: the page itself."""

    def __init__(self) -> None:
        self.files = {
            file.name: (file.read_bytes(), KINDS[file.suffix])
            for file in sorted(FOLDER.iterdir())
            if file.suffix in KINDS
        }
        self.index, _ = self.files.pop("index.html")
        self.policy = "; ".join(f"{name} {value}" for name, value in POLICY.items()).encode()
