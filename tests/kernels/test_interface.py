"""What all implementations share: their functions, and that nobody else knows their names."""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import ATTENTION, EngineConfig
from jpaged.errors import UnsupportedError
from jpaged.models.kv_view import DenseKV, Place
from kernels_pallas.paged_attention import IMPLEMENTATIONS, reference
from kernels_pallas.paged_attention.interface import AttentionOptions
from kernels_pallas.paged_attention.pool_layout import PoolLayout, plain_pool_layout
from scripts._attention_cases import Case
from tests.kernels.suite import build

ROOT = Path(__file__).parents[2]
_ROWS = ["pool", "layer", "block_table_SM", "context_lens_S"]
FUNCTIONS = {
    "unsupported": ["shapes", "attention", "device"],
    "pool_layout": ["num_kv_heads", "head_dim", "value_dim"],
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
    own = ["ends_T", "exact"]  # and an operand that few have
    assert parameters(reference.prefill) == [*(p for p in prefill if p != "prepared"), *own]
    assert parameters(reference.decode) == [*decode, "exact"]


def test_config_offers_the_list() -> None:
    annotation = typing.get_type_hints(EngineConfig)["attention"]
    assert typing.get_args(annotation) == ATTENTION == ("auto", *IMPLEMENTATIONS)


def test_one_of_them_runs_everything_everywhere() -> None:
    last = [*IMPLEMENTATIONS.values()][-1]
    assert last.is_compiled_for("whatever comes")
    odd = Case(name="odd", contexts=(3,), H=3, K=3, D=17, V=5, P=5, dtype="float16", sinks=True)
    device = SimpleNamespace(platform="whatever comes")
    assert last.module().unsupported(odd.shapes, odd.options.attention, device) is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithSlopes(AttentionOptions):
    """Options of which no implementation has one: a slope for each head (arXiv:2108.12409)."""

    slopes: tuple[float, ...] = ()


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "reference", "dense"])
def test_an_option_that_nobody_has_is_refused_by_name(name: str) -> None:
    """It is not left out in silence. At its default it asks for nothing."""
    case = Case(name="slopes", contexts=(64,), D=64, P=64, dtype="bfloat16")
    inputs = build(case)
    asked, none = WithSlopes(scale=0.5, slopes=(0.5, 0.25)), WithSlopes(scale=0.5)
    if name == "dense":
        place, x = Place(0, 0), jnp.zeros((3, 2, 8))
        view = DenseKV(newest=((x, x),))
        assert view.attend(place, x, none).shape == x.shape
        with pytest.raises(UnsupportedError, match="slopes"):
            view.attend(place, x, asked)
    elif name == "reference":
        options = dataclasses.replace(case.options, attention=asked)
        with pytest.raises(NotImplementedError, match="slopes"):
            reference.decode(*inputs.args, options=options)
    else:
        module = IMPLEMENTATIONS[name].module()
        assert "slopes=(0.5, 0.25)" in module.unsupported(case.shapes, asked, None)
        assert "slopes" not in (module.unsupported(case.shapes, none, None) or "")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_images_that_see_themselves_are_computed_or_refused_by_name(name: str) -> None:
    """What has the option `ends` takes its operand, and nothing else is called with one."""
    case = Case(
        name="images",
        contexts=(64,),
        queries=(64,),
        images=((0, 3, 9),),
        D=64,
        P=64,
        dtype="bfloat16",
    )
    module = IMPLEMENTATIONS[name].module()
    has_ends = "ends" in module.OPTIONS
    assert ("ends_T" in parameters(module.prefill)) == has_ends
    reason = module.unsupported(case.shapes, case.options.attention, None) or ""
    assert ("ends=True" in reason) != has_ends


def test_options_are_known_to_somebody() -> None:
    """Each field of AttentionOptions is an option of the reference, and each option a field."""
    fields = {field.name for field in dataclasses.fields(AttentionOptions)}
    assert set(reference.OPTIONS) == fields
    for implementation in IMPLEMENTATIONS.values():
        module = implementation.module()
        assert "scale" in module.OPTIONS and set(module.OPTIONS) <= fields


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


def test_values_of_another_width_follow_their_keys() -> None:
    k, v = np.ones((2, 3, 4), np.float32), np.full((2, 3, 2), 7.0, np.float32)  # T = 2, K = 3
    plain = plain_pool_layout(3, 4, 2)
    assert (plain.rows, plain.width, plain.scales(8)) == (3, 6, (8, 6))
    token = np.concatenate([k, v], axis=-1)
    assert np.array_equal(plain.token(jnp.asarray(k), jnp.asarray(v)), token)
    wide = PoolLayout(rows=4, width=8, head_width=8, key_width=4)
    padded = np.zeros((2, 4, 8), np.float32)
    padded[:, :3, :6] = token
    assert np.array_equal(wide.token(jnp.asarray(k), jnp.asarray(v)), padded)
    equal = plain_pool_layout(3, 4).token(jnp.asarray(k), jnp.asarray(7 * k))
    assert np.array_equal(equal, np.stack([k, 7 * k], axis=2).reshape(2, 6, 4))
