"""Tokenizer and generation defaults of a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.checkpoint import load_generation_config, load_tokenizer
from jpaged.errors import CheckpointError


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer of 256 bytes, one merge and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "he", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"} | config)
    )
    return folder


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("hello, wörld")
    assert tokenizer.decode(ids) == "hello, wörld"
    assert ids[0] == 256 and tokenizer.eos_token_id == 257


def test_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_damaged(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_remote_code_never_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n"
    )
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    write_tokenizer(tmp_path, tokenizer_class="Evil", auto_map=auto_map)
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_generation_config(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps(
            {
                "_from_model_config": True,
                "transformers_version": "5",
                "top_k": 20,
                "temperature": 0.6,
            }
        )
    )
    assert load_generation_config(tmp_path) == {"top_k": 20, "temperature": 0.6}
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
            load_generation_config(tmp_path)


def test_transformers_is_imported_without_a_word() -> None:
    """No advice to install PyTorch, and the variable that silences it does not stay behind."""
    names = ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    code = "import os; from jpaged.models.hf_defaults import import_transformers as ask; ask()"
    code += f"; assert not set(os.environ) & {set(names)!r}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
