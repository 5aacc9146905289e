"""local_ray: Ray on this machine alone, as long as a block lasts."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STARTS = 3  # Ray gives its own start 30 seconds, which a busy machine takes


@contextmanager
def local_ray(**settings: Any) -> Iterator[None]:
    """Run Ray without a dashboard inside the block. settings: more for ray.init."""
    ray: Any = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    # Threads that Ray Serve leaves behind would start a Ray of their own, between two blocks.
    starting: Any = importlib.import_module("ray._private.auto_init_hook")
    starting.enable_auto_connect = False
    ray.shutdown()
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, **settings)
            break
        except Exception as e:
            ray.shutdown()
            if not left or "timed out during startup" not in str(e):
                raise
    try:
        yield
    finally:
        ray.shutdown()
