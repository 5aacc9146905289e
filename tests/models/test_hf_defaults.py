"""A config is filled in by transformers once, and read without it from then on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jpaged import ConfigError, ModelConfig
from jpaged.models import hf_defaults
from tests.golden.configs import CONFIGS

RAW = CONFIGS["gemma3_g2_d32_linear"]
START = """
import json, sys
from jpaged.models.config import ModelConfig
print(ModelConfig.from_hf(json.loads(sys.argv[1])), "transformers" in sys.modules)
"""


def test_transformers_is_imported_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, json.dumps(RAW)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.endswith("True\n") and second.endswith("False\n")
    assert first.split()[:-1] == second.split()[:-1]
    assert len(list((tmp_path / "jpaged" / "configs").iterdir())) == 1


def test_the_environment_is_written_at_the_first_import_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, written = hf_defaults.import_transformers(), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "putenv", lambda name, _: written.append(name))
        patch.setattr(os, "unsetenv", written.append)
        os.environ["JPAGED_TEST"] = "x"  # the control
        del os.environ["JPAGED_TEST"]
        assert hf_defaults.import_transformers() is first
    assert len(written) == 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often transformers was asked, over an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, ask = [], hf_defaults.import_transformers

    def counted() -> Any:
        calls.append(1)
        return ask()

    monkeypatch.setattr(hf_defaults, "import_transformers", counted)
    return calls


def test_another_config_is_another_file(asked: list[int], tmp_path: Path) -> None:
    first = ModelConfig.from_hf(RAW)
    other = ModelConfig.from_hf(RAW | {"rms_norm_eps": 1e-3})
    assert (len(asked), other.rms_norm_eps) == (2, 1e-3)
    assert ModelConfig.from_hf(RAW) == first and len(asked) == 2
    for file in (tmp_path / "jpaged" / "configs").iterdir():
        file.write_text('{"cut off')
    assert ModelConfig.from_hf(RAW) == first and len(asked) == 3
    assert ModelConfig.from_hf(RAW) == first and len(asked) == 3


def test_no_place_to_write_to(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ModelConfig.from_hf(RAW) == ModelConfig.from_hf(RAW) and len(asked) == 2


def test_what_transformers_refuses_is_kept_nowhere(asked: list[int], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"config\.json of Gemma3ForCausalLM"):
            ModelConfig.from_hf(RAW | {"hidden_size": "wide"})
    assert len(asked) == 2 and not list(tmp_path.rglob("*.json"))
