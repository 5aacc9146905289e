"""scripts/_common.py: flags of EngineConfig, models, turns, tables; and what scripts may import."""

import ast
import dataclasses
from pathlib import Path

import _common as common
import jax
import numpy as np
import pytest

from jpaged import EngineConfig
from tests.tiny import CONFIG, config

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_field_of_engine_config_is_a_flag() -> None:
    parser = common.make_parser("test", "doc")
    common.add_engine_flags(parser, block_size=8)
    assert common.engine_settings(parser.parse_args([])) == {"block_size": 8}
    values = {"dtype": "float16", "attention": "xla", "tensor_axis": "tp", "decode_steps": 1}
    values |= {"memory_utilization": 0.5, "swap_space_gib": 1.5, "compilation_cache_dir": "x"}
    flags, wanted = [], {}
    for field in dataclasses.fields(EngineConfig):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            wanted[field.name] = not field.default
            flags.append(flag if wanted[field.name] else flag.replace("--", "--no-", 1))
        elif field.name.endswith("_buckets"):
            wanted[field.name] = [64, 512, 9000]
            flags += [flag, "64", "512", "9000"]
        else:
            wanted[field.name] = values.get(field.name, 7)
            flags += [flag, str(wanted[field.name])]
    found = common.engine_settings(parser.parse_args(flags))
    assert found == wanted
    assert EngineConfig(**found).token_buckets == (64, 512, 9000)


def test_some_fields_alone(capsys: pytest.CaptureFixture[str]) -> None:
    parser = common.make_parser("test", "doc")
    common.add_engine_flags(parser, "num_blocks")
    assert common.engine_settings(parser.parse_args(["--num-blocks", "3"])) == {"num_blocks": 3}
    with pytest.raises(SystemExit):
        parser.parse_args(["--block-size", "3"])


def test_random_params() -> None:
    model = config(qkv_bias=True, num_layers=2)
    params = common.random_params(model, "float32")
    layer = params["layers"]["0"]
    assert np.all(layer["input_norm"]["scale"] == 1) and not np.any(layer["attention"]["qkv_bias"])
    assert float(np.std(layer["attention"]["qkv"])) == pytest.approx(0.02, rel=0.1)
    assert not np.array_equal(layer["mlp"]["down"], params["layers"]["1"]["mlp"]["down"])
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), dict(params))
    abstract = common.abstract_params(model, "float32")
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_random_ids() -> None:
    found = common.random_ids(3, 50, CONFIG.vocab_size)
    assert [len(ids) for ids in found] == [50] * 3 and found == common.random_ids(3, 50, 97)
    assert min(map(min, found)) >= 3 and max(map(max, found)) < 97
    assert common.random_ids(1, 2, 1) == [[0, 0]]


def test_the_first_round_is_left_out_and_calls_take_turns() -> None:
    order: list[str] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    found = common.in_turn({name: lambda name=name: call(name) for name in "ab"}, 3)
    assert "".join(order) == "abbaabba" and found == {"a": [4, 5, 8], "b": [3, 6, 7]}


def test_tables() -> None:
    lines = common.aligned(["name", "two\nlines"], [["x", "1"], ["long name", "22"]], left=1)
    assert lines == ["name        two", "          lines", "x             1", "long name    22"]
    shown = [common.number(n) for n in (None, 1234.5, 99.4, 9.5, 0.123, float("nan"))]
    assert shown == ["-", "1,234", "99.4", "9.50", "0.12", "-"]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_no_script_imports_tests(path: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    assert "tests" not in found
