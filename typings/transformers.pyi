# To bind the package itself takes pyright 16 seconds, and its types say little.
from typing import Any

def __getattr__(name: str) -> Any: ...
