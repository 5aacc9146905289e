"""Every field of EngineConfig is a flag in a group; usage is short; near misses are named."""

import argparse
import dataclasses
import typing

import pytest

from jpaged import EngineConfig
from jpaged.config import Group, Speculative
from jpaged.flags import Parser, add_engine_flags, add_engine_groups, engine_settings
from jpaged.images.limits import ImageLimits
from jpaged.integrations.batch import command as serve_batch
from jpaged.openai.server.run import make_parser as serve_parser

# Also None, where jpaged chooses.
SWITCHES = ("deterministic", "separate_draw", "expert_parallel")


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
        "image_cache_gib": 1.5,
        "compilation_cache_dir": "x",
        "prefix_store": "y",
        "prefix_store_gib": 2.5,
        "prefix_store_policy": "write_through",
    }
    flags, wanted = [], {}
    for field in dataclasses.fields(EngineConfig):
        flag = f"--{field.name.removeprefix('enable_').replace('_', '-')}"
        if isinstance(field.default, bool) or field.name in SWITCHES:
            wanted[field.name] = not field.default
            flags.append(flag if wanted[field.name] else flag.replace("--", "--no-", 1))
        elif field.name.endswith("_buckets"):
            wanted[field.name] = [64, 512, 9000]
            flags += [flag, "64", "512", "9000"]
        elif field.name == "lora_extra":
            wanted[field.name] = ["head", "embedding"]
            flags += [flag, "head", "embedding"]
        elif field.name == "image_limits":
            wanted[field.name] = ImageLimits(max_side=9)
            flags += [flag, '{"max_side": 9}']
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


def test_every_field_is_in_one_group() -> None:
    titles = typing.get_args(Group)
    groups = [field.metadata["group"] for field in dataclasses.fields(EngineConfig)]
    assert set(groups) == set(titles)
    parser = argparse.ArgumentParser()
    add_engine_groups(parser)
    shown = {group.title: group._group_actions for group in parser._action_groups}
    for title in titles:
        assert len(shown[f"engine: {title}"]) == groups.count(title) > 0


@pytest.mark.parametrize(
    ("parser", "status"),
    [(serve_parser(), 2), (serve_batch.make_parser(), 1)],
    ids=["serve", "serve_batch"],
)
def test_help_of_long_command_lines(
    parser: Parser, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines of usage, titled groups, a default with each flag, and the flag that was meant."""
    usage = parser.format_usage()
    assert usage.count("\n") == 2 and usage.endswith(f"{parser.prog} --help lists the flags\n")
    text = parser.format_help()
    assert text.startswith(usage)
    assert all(f"\nengine: {title}:\n" in text for title in typing.get_args(Group))
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "allowed_host"):
            assert action.help is not None and "(default: " in action.help, action.dest
    for wrong in (["--max-num-seq=3"], ["--zzzzzzzzz"], ["--max-num-seqs", "many"]):
        with pytest.raises(SystemExit) as refused:
            parser.parse_args(["x", *wrong])
        assert refused.value.code == status
    near, far, value = capsys.readouterr().err.splitlines()
    assert "unknown argument --max-num-seq: did you mean --max-num-seqs?" in near
    assert "unknown argument --zzzzzzzzz (--help" in far
    assert "argument --max-num-seqs: invalid int value: 'many'" in value
