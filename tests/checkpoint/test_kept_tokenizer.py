"""A tokenizer that is kept from one start to the next does what transformers' does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jpaged.checkpoint import kept_tokenizer as module
from jpaged.checkpoint.kept_tokenizer import KeptTokenizer, kept_tokenizer, whole
from jpaged.checkpoint.tokenizer import load_tokenizer
from jpaged.demo import MODEL_PATH
from jpaged.errors import CheckpointError
from tests.checkpoint.test_tokenizer import write_tokenizer

REAL = load_tokenizer(MODEL_PATH)
ENV = dict(os.environ)
KEPT = KeptTokenizer(MODEL_PATH, REAL.backend_tokenizer.to_str(), REAL.eos_token_id)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The folders that transformers' tokenizer is made of from now on."""
    asked: list[Any] = []

    def load(folder: Any) -> Any:
        asked.append(folder)
        return load_tokenizer(folder)

    monkeypatch.setattr(module, "load_tokenizer", load)
    return asked


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_same_ids_and_texts(text: str) -> None:
    ids = REAL.encode(text)
    assert KEPT.encode(text) == ids
    for skip in (True, False):
        expected = REAL.decode(ids, skip_special_tokens=skip)
        assert KEPT.decode(ids, skip_special_tokens=skip) == expected


def test_special_tokens_are_known() -> None:
    text = "a<|im_end|>b" + (REAL.eos_token or "")
    ids = REAL.encode(text)
    assert KEPT.encode(text) == ids and KEPT.eos_token_id == REAL.eos_token_id is not None
    assert KEPT.decode(ids, skip_special_tokens=True) != KEPT.decode(ids)


def test_a_second_start_needs_no_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = loads(monkeypatch)
    first, second = kept_tokenizer(folder), kept_tokenizer(folder)
    assert asked == [folder] and not isinstance(first, KeptTokenizer)
    assert second.encode("hello") == first.encode("hello") and asked == [folder]
    assert second.eos_token_id == 257
    # What is not kept is asked of transformers' own.
    assert second.convert_ids_to_tokens([256]) == ["he"] and asked == [folder] * 2
    assert type(whole(second)) is type(first) and whole(first) is first


def test_files_that_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = loads(monkeypatch)
    kept_tokenizer(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "he"}))
    assert kept_tokenizer(folder).eos_token_id == 256 and asked == [folder] * 2
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        kept_tokenizer(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"backend": "{", "eos_token_id": 1}'])
def test_what_is_kept_is_broken(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    asked = loads(monkeypatch)
    kept_tokenizer(folder)
    (kept,) = module.cache_folder("tokenizers").iterdir()
    kept.write_text(text)
    assert kept_tokenizer(folder).encode("he") == [256] and asked == [folder] * 2


def test_one_that_cleans_texts_up_is_not_kept(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    cleans = {**json.loads(config.read_text()), "clean_up_tokenization_spaces": True}
    config.write_text(json.dumps(cleans))
    kept_tokenizer(folder)
    assert not isinstance(kept_tokenizer(folder), KeptTokenizer)


def test_a_file_that_cuts_and_pads(folder: Path) -> None:
    """transformers does neither unless asked."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token="<end>", pad_id=257)
    tokenizer.save(str(folder / "tokenizer.json"))
    first, second = kept_tokenizer(folder), kept_tokenizer(folder)
    assert isinstance(second, KeptTokenizer)
    for text in ("h", "hello, hello"):
        assert second.encode(text) == first.encode(text)
    assert len(second.encode("hello, hello")) > 8 and len(second.encode("h")) == 1


def test_none(tmp_path: Path) -> None:
    assert kept_tokenizer(tmp_path) is None


WARM = """
import sys, jpaged
settings = dict(num_blocks=16, max_model_len=64, block_size=16, seq_buckets=(4,), max_num_seqs=4)
llm = jpaged.LLM(sys.argv[1], **settings)
llm.add_request("def f(", jpaged.SamplingParams(max_tokens=2, stop=["x"]))  # compiles nothing
print(sorted({name.split(".")[0] for name in sys.modules} & {"flax", "transformers", "torch"}))
"""


@pytest.mark.middle
def test_a_warm_start_imports_neither_transformers_nor_flax() -> None:
    """The first, which may not be warm, leaves what the second finds, in the user's own cache:
    another would have the C++ kernels built.
    """
    run = [sys.executable, "-c", WARM, str(MODEL_PATH)]
    _, second = (subprocess.run(run, capture_output=True, text=True, env=ENV) for _ in range(2))
    assert second.stdout == "[]\n", second.stderr
