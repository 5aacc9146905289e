"""scripts/_common.py: flags of EngineConfig, models, turns, tables; and what scripts may import."""

import ast
from pathlib import Path

import _common as common
import jax
import pytest

from jpaged.models.params import random_params
from tests.tiny import CONFIG, config

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_abstract_params_have_the_form_of_those_drawn() -> None:
    model = config(qkv_bias=True, num_layers=2)
    drawn = random_params(model, dtype="bfloat16")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), dict(drawn))
    abstract = common.abstract_params(model, "bfloat16")
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
