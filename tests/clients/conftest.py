"""Clients run as they would in their own programs: standard promotion in every thread, and their warnings are theirs.

`make test-clients` has the packages; where one is missing, the tests of it are not collected.
"""

import importlib.util
import warnings
from collections.abc import Iterator

import jax
import pytest

PACKAGES = {"test_tunix.py": "tunix", "test_lm_eval.py": "lm_eval"}
collect_ignore = [file for file, package in PACKAGES.items() if importlib.util.find_spec(package) is None]
SETTINGS = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these say when they are imported
    for file, package in PACKAGES.items():
        if file not in collect_ignore:
            importlib.import_module(f"jpaged.integrations.{package}")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """The clients have threads of their own, which a context manager's settings would not reach."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
