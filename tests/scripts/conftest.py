"""The scripts as modules (pyproject.toml has their folder on the path), on a small machine."""

import json
from pathlib import Path

import pytest

import jpaged.config
from tests.tiny import CONFIG


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of the tests' tiny model, for --random."""
    folder = tmp_path_factory.mktemp("random")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return folder


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prefill and one decode step to compile, and no measuring of the memory."""
    monkeypatch.setattr(jpaged.config, "TOKEN_BUCKETS", (64,))
    monkeypatch.setattr(jpaged.config, "SEQ_BUCKETS", (8,))
    monkeypatch.setattr("jpaged.cli.timing.read_bandwidth", lambda: 10.0)
