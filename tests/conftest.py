"""Settings that every test runs under: 8 virtual CPU devices, strict promotion, no network
(warnings: pyproject).

What one test compiles, the next finds in jax's persistent cache, which lasts as long as the run.
"""

import atexit
import os
import shutil
import tempfile

# Read when jax and transformers are imported, so set before either is.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jpaged-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would say that there is no PyTorch

from collections.abc import Iterator

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles. In CI the examples are the same each time.
hypothesis.settings.register_profile(
    "jpaged", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("jpaged")


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Standard dtype promotion in tests marked `train`; optax does not hold to the strict kind."""
    if request.node.get_closest_marker("train") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield
