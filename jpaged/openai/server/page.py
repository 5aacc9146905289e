"""The page of a server: one file that loads nothing from elsewhere, and in which only its own
script may run.
"""

import base64
import hashlib
import re
from pathlib import Path


class Page:
    """The page, and the header that restricts a browser to its content."""

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
    """Return the policy's value that allows the only element of this tag, and no other."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
