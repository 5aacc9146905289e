"""What all implementations share: their functions, and that nobody else knows their names."""

import ast
import inspect
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import ATTENTION, EngineConfig
from kernels_pallas.paged_attention import IMPLEMENTATIONS, reference
from kernels_pallas.paged_attention.pool_layout import PoolLayout
from scripts._attention_cases import Case

ROOT = Path(__file__).parents[2]
_ROWS = ["pool", "layer", "block_table_SM", "context_lens_S"]
FUNCTIONS = {
    "unsupported": ["shapes", "device"],
    "pool_layout": ["num_kv_heads", "head_dim"],
    "prepare": [
        "query_start_loc_S1",
        "context_lens_S",
        "num_tokens",
        "shapes",
        "window",
    ],
    "prefill": ["q_THD", *_ROWS, "query_start_loc_S1", "prepared", "options", "sinks_H"],
    "decode": ["q_SHD", *_ROWS, "options", "sinks_H"],
}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_has_the_functions_of_the_interface(name: str) -> None:
    """With the same arguments; those of its own come last and have a default."""
    module = IMPLEMENTATIONS[name].module()
    for function, expected in FUNCTIONS.items():
        found = inspect.signature(getattr(module, function)).parameters
        assert list(found)[: len(expected)] == expected, function
        own = [found[key] for key in list(found)[len(expected) :]]
        assert all(p.default is not p.empty for p in own), function


def test_the_reference_defines_two_of_them() -> None:
    prefill, decode = FUNCTIONS["prefill"], FUNCTIONS["decode"]
    assert parameters(reference.prefill) == [*(p for p in prefill if p != "prepared"), "exact"]
    assert parameters(reference.decode) == [*decode, "exact"]


def test_config_offers_the_list() -> None:
    annotation = typing.get_type_hints(EngineConfig)["attention"]
    assert typing.get_args(annotation) == ATTENTION == ("auto", *IMPLEMENTATIONS)


def test_one_of_them_runs_everything_everywhere() -> None:
    last = [*IMPLEMENTATIONS.values()][-1]
    assert last.is_compiled_for("whatever comes")
    odd = Case(name="odd", contexts=(3,), H=3, K=3, D=17, P=5, dtype="float16").shapes
    assert last.module().unsupported(odd, SimpleNamespace(platform="whatever comes")) is None


def test_no_name_is_tested_outside() -> None:
    """No string of jpaged is a name of the list."""
    found = [
        (str(file.relative_to(ROOT)), node.value)
        for file in sorted((ROOT / "jpaged").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in IMPLEMENTATIONS
    ]
    assert not found


def test_packing_pads_each_head_and_then_the_rows() -> None:
    kv = np.arange(1.0, 1 + 2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)  # T = 2, K = 2, D = 3
    plain = PoolLayout(rows=4, width=3, head_width=3)
    assert np.array_equal(plain.pack(jnp.asarray(kv)), kv)
    packed = PoolLayout(rows=3, width=8, head_width=4).pack(jnp.asarray(kv))
    expected = np.zeros((2, 3, 2, 4), np.float32)
    expected[:, :2, :, :3] = kv.reshape(2, 2, 2, 3)
    assert np.array_equal(packed, expected.reshape(2, 3, 8))
