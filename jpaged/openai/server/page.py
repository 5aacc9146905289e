"""The page of a server: one file, which loads nothing from elsewhere and may run only its own
script.
"""

import base64
import hashlib
import re
from pathlib import Path


class Page:
    """The page, and the header that holds a browser to what is in it."""

    def __init__(self) -> None:
        text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        self.body = text.encode()
        allowed = {
            "default-src": "'none'",
            "script-src": _hash_of("script", text),
            "style-src": _hash_of("style", text),
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self.policy = "; ".join(f"{name} {value}" for name, value in allowed.items()).encode()


def _hash_of(tag: str, text: str) -> str:
    """Return what allows the one element of this name and no other."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
