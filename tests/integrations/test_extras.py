"""Integrations whose packages are missing say which extra has them."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [
        ("tunix", "google-tunix", "tunix.generate.tokenizer_adapter"),
        ("lm_eval", "lm-eval", "lm_eval.api.model"),
    ],
)
def test_a_missing_package_is_named(
    name: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, f"jpaged.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'jpaged\[clients\]'"):
        importlib.import_module(f"jpaged.integrations.{name}")
