"""Every setting of a batch run is judged when an output is resumed, or a list says why it need not
be.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.cli import merge as merge_shards
from jpaged.config import EngineConfig
from jpaged.integrations.batch import command as serve_batch
from jpaged.integrations.batch import judged
from jpaged.integrations.batch.manifest import check_same, model_identity
from jpaged.integrations.batch.source import BatchError
from tests.batch_engine import FakeLLM, serve

# Words that set each judged setting to another value than its default.
OTHER: dict[str, list[str]] = {
    "attention": ["--attention", "xla"],
    "deterministic": ["--deterministic"],
    "dtype": ["--dtype", "float32"],
    "error_style": ["--error-style", "vllm"],
    "format": ["--format", "text"],
    "ignore_unknown": ["--ignore-unknown"],
    "images": ["--images"],
    "kv_cache_dtype": ["--kv-cache-dtype", "int8"],
    "max_image_tokens": ["--max-image-tokens", "64"],
    "max_line_bytes": ["--max-line-bytes", "1000"],
    "max_logit_bias": ["--max-logit-bias", "3"],
    "max_logprobs": ["--max-logprobs", "3"],
    "max_model_len": ["--max-model-len", "50"],
    "max_n": ["--max-n", "3"],
    "max_sampling_mask": ["--max-sampling-mask", "3"],
    "max_embeddings": ["--max-embeddings", "64"],
    "max_stop_ids": ["--max-stop-ids", "3"],
    "max_tokens": ["--max-tokens", "3"],
    "quantization": ["--quantization", "int8"],
    "quantized_activations": ["--quantized-activations", "int16"],
    "seed": ["--seed", "3"],
    "strict": ["--strict"],
    "structured_output": ["--structured-output"],
    "temperature": ["--temperature", "0.5"],
    "top_p": ["--top-p", "0.5"],
}


def actions() -> dict[str, argparse.Action]:
    return {action.dest: action for action in serve_batch.make_parser()._actions}


def test_a_field_of_the_engine_is_judged_unless_it_has_a_reason() -> None:
    said = "is it judged? Give it words in OTHER, or the reason `same_answers` in config.py"
    for field in dataclasses.fields(EngineConfig):
        assert (field.name in OTHER) is (field.metadata["same_answers"] is None), (field.name, said)
    assert set(judged.judged_engine({})) == judged.JUDGED_ENGINE == set(OTHER) - judged.JUDGED_FLAGS


def test_every_flag_is_in_one_list() -> None:
    flags = set(serve_batch.flag_names())
    lists = [judged.JUDGED_FLAGS, {*judged.JUDGED_BY_CONTENT}, {*judged.NOT_JUDGED_FLAGS}]
    listed = set[str]().union(*lists)
    said = "put it in JUDGED_FLAGS, JUDGED_BY_CONTENT or NOT_JUDGED_FLAGS"
    assert flags == listed and sum(map(len, lists)) == len(listed), f"{flags ^ listed}: {said}"
    assert set(judged.judged_flags(flags)) == judged.JUDGED_FLAGS
    assert set(actions()) >= listed | judged.JUDGED_ENGINE
    reasons = [*judged.NOT_JUDGED_ENGINE.values(), *judged.NOT_JUDGED_FLAGS.values()]
    assert all(len(reason.split()) > 1 for reason in reasons)


def test_every_judged_setting_refuses_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(OTHER) == judged.JUDGED_ENGINE | judged.JUDGED_FLAGS
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert serve(source, "--output", output) == 0
    done = output.read_bytes()
    for name, flags in OTHER.items():
        llm = FakeLLM()
        assert serve(source, "--output", output, "--resume", *flags, llm=llm) == 1, name
        assert f"run.{name} is " in capsys.readouterr().err, name
        assert output.read_bytes() == done and not llm.added


def test_what_cannot_change_an_answer_does_not_refuse_a_resume(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert serve(source, "--output", output) == 0
    flags = "--max-num-seqs 3 --num-blocks 9 --no-prefix-caching --mixed --window 2 --ordered"
    assert serve(source, "--output", output, "--resume", *flags.split()) == 0


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


class TestFiles:
    """Adapters and the model are known by what their files hold."""

    def test_adapters(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text('{"prompt": "a"}\n')
        one = make_model(tmp_path / "one", adapter_config__json=b'{"r": 8}', w__bin=bytes(99))
        two = make_model(tmp_path / "two", adapter_config__json=b'{"r": 8}', w__bin=b"1" * 99)
        base = [source, "--output", output, "--max-loras", "1"]
        assert serve(*base, "--adapter", f"style={one}") == 0
        for flags in ([f"style={two}"], [f"other={one}"], [f"style={one}", f"more={two}"]):
            assert serve(*base, "--resume", "--adapter", *flags) == 1
            assert "adapters." in capsys.readouterr().err
        assert serve(*base, "--resume") == 1
        assert "adapters.style.adapter_config.json is " in capsys.readouterr().err
        moved = one.rename(tmp_path / "three")
        assert serve(*base, "--resume", "--adapter", f"style={moved}") == 0

    def test_shards_of_other_adapters_are_not_merged(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        for i, data in enumerate((bytes(99), b"1" * 99)):
            folder = make_model(tmp_path / str(i), w__bin=data)
            flags = ["--shard", f"{i}/2", "--adapter", f"style={folder}", "--max-loras", "1"]
            assert serve(source, "--output", output, *flags) == 0
        assert merge_shards.main([str(output)]) == 1
        assert "adapters.style.w.bin is " in capsys.readouterr().err

    def test_a_tokenizer_that_differs_between_the_samples(self, tmp_path: Path) -> None:
        """A tokenizer.json of 10 MB is not known by samples alone."""
        data = bytearray(b"a" * (10 << 20))
        old = make_model(tmp_path / "old", tokenizer__json=bytes(data), x__bin=bytes(data))
        data[100_000] = ord("b")
        new = make_model(tmp_path / "new", tokenizer__json=bytes(data), x__bin=bytes(data))
        was, now = model_identity(old), model_identity(new)
        assert was["tokenizer.json"] != now["tokenizer.json"]
        assert was["x.bin"] == now["x.bin"], "the change is between two samples of a weight file"

    def test_a_header_of_safetensors_is_read_whole(self, tmp_path: Path) -> None:
        folders = []
        for name in (b"a", b"b"):
            header = b" " * 100_000 + name + b" " * 500_000
            data = len(header).to_bytes(8, "little") + header + bytes(10 << 20)
            folders.append(make_model(tmp_path / name.decode(), model__safetensors=data))
        assert model_identity(folders[0]) != model_identity(folders[1])

    def test_folders_behind_links(self, tmp_path: Path) -> None:
        """Weights often lie elsewhere; a link that leads in a circle ends nothing."""
        model, weights = tmp_path / "model", tmp_path / "weights"
        weights.mkdir()
        (weights / "d0").write_bytes(b"1")
        model.mkdir()
        (model / "params").symlink_to(weights)
        (weights / "back").symlink_to(model)
        was = model_identity(model)
        assert "params/d0" in was
        (weights / "d0").write_bytes(b"2")
        assert model_identity(model) != was


class TestOlderManifests:
    """An output of an earlier jpaged is resumed only where its manifest says all that counts."""

    def made(self, folder: Path) -> tuple[list[Any], Path, dict[str, Any]]:
        source, output = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text('{"prompt": "a"}\n')
        assert serve(source, "--output", output) == 0
        path = folder / "out.jsonl.manifest.json"
        return [source, "--output", output, "--resume"], path, json.loads(path.read_text())

    def test_of_the_first_version(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command, path, manifest = self.made(tmp_path)
        for name in ("quantization", "kv_cache_dtype"):
            del manifest["run"][name]
        path.write_text(json.dumps({**manifest, "version": 1}))
        assert serve(*command) == 1
        assert "does not say with which quantization" in capsys.readouterr().err

    def test_of_before_a_setting_was_judged(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A setting that was left out of it on purpose may have had any value."""
        command, path, manifest = self.made(tmp_path)
        del manifest["run"]["quantization"]
        manifest["not_judged"].append("quantization")
        path.write_text(json.dumps(manifest))
        assert serve(*command) == 1
        assert "whose manifest does not say quantization" in capsys.readouterr().err

    def test_of_before_there_was_a_setting(self, tmp_path: Path) -> None:
        """It is as good as at its default, which is null."""
        command, path, manifest = self.made(tmp_path)
        assert manifest["run"].pop("quantization") is None
        path.write_text(json.dumps(manifest))
        assert serve(*command) == 0
        new = {**manifest, "run": {**manifest["run"], "quantization": "int8"}}
        with pytest.raises(BatchError, match=r"run\.quantization is null there"):
            check_same(manifest, new, "out.jsonl", None)
