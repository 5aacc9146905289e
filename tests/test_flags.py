"""Every field of EngineConfig is a flag."""

import argparse
import dataclasses

import pytest

from jpaged import EngineConfig
from jpaged.config import Speculative
from jpaged.flags import add_engine_flags, engine_settings


def test_every_field_of_engine_config_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, block_size=8)
    assert engine_settings(parser.parse_args([])) == {"block_size": 8}
    values = {"dtype": "float16", "attention": "xla", "tensor_axis": "tp", "decode_steps": 1}
    values |= {
        "quantization": "int8",
        "quantized_activations": "int16",
        "kv_cache_dtype": "fp8",
        "memory_utilization": 0.5,
        "swap_space_gib": 1.5,
        "compilation_cache_dir": "x",
    }
    flags, wanted = [], {}
    for field in dataclasses.fields(EngineConfig):
        flag = f"--{field.name.removeprefix('enable_').replace('_', '-')}"
        if isinstance(field.default, bool) or field.name in ("deterministic", "separate_draw"):
            wanted[field.name] = not field.default
            flags.append(flag if wanted[field.name] else flag.replace("--", "--no-", 1))
        elif field.name.endswith("_buckets"):
            wanted[field.name] = [64, 512, 9000]
            flags += [flag, "64", "512", "9000"]
        elif field.name == "lora_extra":
            wanted[field.name] = ["head", "embedding"]
            flags += [flag, "head", "embedding"]
        elif field.name == "speculative":
            wanted[field.name] = Speculative(num_tokens=3)
            flags += [flag, '{"method": "ngram", "num_tokens": 3}']
        else:
            wanted[field.name] = values.get(field.name, 7)
            flags += [flag, str(wanted[field.name])]
    found = engine_settings(parser.parse_args(flags))
    assert found == wanted
    assert EngineConfig(**found).token_buckets == (64, 512, 9000)


def test_some_fields_alone(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, "num_blocks")
    assert engine_settings(parser.parse_args(["--num-blocks", "3"])) == {"num_blocks": 3}
    with pytest.raises(SystemExit):
        parser.parse_args(["--block-size", "3"])
