"""The feed-forward part in one C++ call: against the definition in float64, to the bit that of its
three parts, and taken for what it can compute alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers.linear import Linear, StepContext
from jpaged.models.layers.low_rank import AdapterTable, LowRank
from jpaged.models.layers.mlp import MLP, gated
from jpaged.models.quantized import quantized
from kernels_cpu.library import level, unavailable
from kernels_cpu.linear import NativeProducts
from kernels_cpu.mlp import KINDS, activated
from kernels_cpu.panels import PanelProducts

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"the CPU kernels: {unavailable()}"
)
E, F, N = 64, 96, 48
FORMS = ("bf16", "int8", "int4", "fp8", "int8 interleaved", "int4 interleaved")
best = level()
ACTIVATIONS = "plain" if best is None else best.activations


class Counted(NativeProducts):
    """Products that count their calls of `mlp` and `activated`."""

    def mlp(self, *args: Any, **kwargs: Any) -> jax.Array:
        calls.append("mlp")
        return super().mlp(*args, **kwargs)

    def activated(self, *args: Any, **kwargs: Any) -> jax.Array:
        calls.append("activated")
        return super().activated(*args, **kwargs)


calls: list[str] = []
PRODUCTS = Counted(most_rows=None, activations="int16")
STEP = StepContext(products=PRODUCTS)


def weight(rng: np.random.Generator, form: str, *shape: int) -> Any:
    plain = jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.bfloat16)
    if form == "bf16":
        return plain
    w = quantized(plain, form.split()[0], len(shape) - 1)
    return w.interleaved() if "interleaved" in form else w


def mlp_of(form: str, activation: Any = "silu") -> MLP:
    rng = np.random.default_rng(0)
    gate_up = Linear(weight=weight(rng, form, 2, F, E), num_outputs=2, name="gate_up")
    return MLP(gate_up=gate_up, down=Linear(weight=weight(rng, form, N, F)), activation=activation)


def rows(T: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(T).standard_normal((T, E)), jnp.bfloat16)


def in_parts(mlp: MLP, x: jax.Array, dtype: Any = None) -> jax.Array:
    h = activated(mlp.gate_up(x, STEP, jnp.float32), mlp.activation, x.shape[0])
    return mlp.down(h, STEP, dtype)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("activation", KINDS)
def test_activations_are_as_defined(activation: Any) -> None:
    rng = np.random.default_rng(1)
    gate_up = jnp.asarray(rng.uniform(-12, 12, (5, 2, 401)), jnp.float32)
    gate, up = (np.asarray(gate_up[:, i], np.float64) for i in (0, 1))
    u = gate if activation == "silu" else (8 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    exact = gate / (1 + np.exp(-u)) * up
    found = bits(activated(gate_up, activation, 5))
    np.testing.assert_allclose(found, exact, rtol=2**-8 + 1e-5, atol=1e-30)
    by_xla = bits(gated(activation, gate_up[:, 0], gate_up[:, 1]))
    np.testing.assert_allclose(found, by_xla, rtol=2**-8 + 1e-5, atol=2e-5)


def test_ends_of_activations() -> None:
    gates = [np.nan, np.inf, -200.0, -0.0, 0.0, 200.0]
    gate_up = jnp.asarray([[gates, [1.0] * 6]], jnp.float32)
    for kind in KINDS:
        found = bits(activated(gate_up, kind, 1))[0]
        np.testing.assert_allclose(found, [np.nan, np.inf, 0, 0, 0, 200], atol=1e-30)


@pytest.mark.parametrize(("form", "count"), [*((form, 33) for form in FORMS), ("bf16", 301)])
@pytest.mark.parametrize("activation", KINDS)
def test_it_has_the_bits_of_its_parts(form: str, count: int, activation: Any) -> None:
    """And each row those that it has alone, as in prefill and in decode."""
    mlp, x = mlp_of(form, activation), rows(count)
    calls.clear()
    for dtype in (None, jnp.float32):
        whole = mlp(x, STEP, dtype)
        assert whole.dtype == (dtype or x.dtype) and whole.shape == (count, N)
        assert np.array_equal(bits(whole), bits(in_parts(mlp, x, dtype)))
        for part in (slice(0, 1), slice(7, 12)):
            assert np.array_equal(bits(mlp(x[part], STEP, dtype)), bits(whole[part]))
    assert calls == ["mlp"] * 6
    by_xla = mlp(x, StepContext())
    assert np.abs(bits(mlp(x, STEP)) - bits(by_xla)).max() < 0.03 * np.abs(bits(by_xla)).max()


def test_padding_is_zero() -> None:
    mlp, x = mlp_of("bf16"), rows(9)
    whole = bits(mlp(x, STEP))
    for count in (0, 1, 4):
        step = dataclasses.replace(STEP, num_rows=jnp.int32(count))
        found = bits(mlp(x.at[count:].set(jnp.nan), step))
        assert np.array_equal(found[:count], whole[:count]) and not found[count:].any()


def test_a_nan_shows() -> None:
    mlp, x = mlp_of("bf16"), rows(3)
    found = bits(mlp(x.at[1, 5].set(jnp.nan), STEP))
    assert np.isnan(found[1]).all() and not np.isnan(found[[0, 2]]).any()


def changed(**changes: Any) -> MLP:
    return dataclasses.replace(mlp_of("bf16"), **changes)


def with_bias(of: str) -> MLP:
    mlp = mlp_of("bf16")
    shape = (2, F) if of == "gate_up" else (N,)
    linear = dataclasses.replace(getattr(mlp, of), bias=jnp.ones(shape, jnp.bfloat16))
    return dataclasses.replace(mlp, **{of: linear})


def few(most_rows: int) -> StepContext:
    return StepContext(products=dataclasses.replace(PRODUCTS, most_rows=most_rows))


@pytest.mark.parametrize(
    ("mlp", "step", "called"),
    [
        (mlp_of("bf16"), STEP, ["mlp"]),
        (changed(multiplier=0.5), STEP, ["mlp"]),
        (with_bias("down"), STEP, ["activated"]),
        (mlp_of("bf16"), few(4), ["activated"]),
        (with_bias("gate_up"), STEP, []),
        (changed(gate_multiplier=0.5), STEP, []),
        (changed(limit=2.0), STEP, []),
        (changed(activation="clamped"), STEP, []),
        (mlp_of("bf16"), StepContext(), []),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_goes_in_one_call(mlp: MLP, step: StepContext, called: list[str]) -> None:
    calls.clear()
    mlp(rows(5), step)
    assert calls == called
    calls.clear()
    mlp(rows(5).astype(jnp.float32), step)
    mlp(rows(5)[None], step)
    assert not calls


def test_a_share_is_summed_between_devices() -> None:
    """Where a mesh splits `down`, and the caller does not sum, its product is one by itself."""
    mlp = mlp_of("bf16")
    mlp = dataclasses.replace(mlp, down=dataclasses.replace(mlp.down, split=F))
    step = dataclasses.replace(STEP, tensor_axis="tensor", axis_size=2)
    between = jax.ShapeDtypeStruct((5, F), jnp.bfloat16)
    assert mlp.down.alone(between, step) is None
    assert mlp.down.alone(between, step, is_partial=True) is not None


def test_a_row_has_its_bits_beside_rows_with_adapters() -> None:
    """A step with adapters goes in parts."""
    mlp, x = mlp_of("bf16"), rows(6)
    calls.clear()
    without = bits(mlp(x, STEP))
    rng = np.random.default_rng(5)
    a = jnp.asarray(rng.standard_normal((2, 2, 8, E)), jnp.bfloat16)
    b = tuple(jnp.asarray(rng.standard_normal((2, 8, 1, F)), jnp.bfloat16) for _ in range(2))
    table = AdapterTable(a=a, b=b, joined=0)
    slots = jnp.asarray([2, 0, 2, 1, 2, 2], jnp.int32)
    step = dataclasses.replace(STEP, slot_T=slots, adapters={"gate_up": table})
    assert isinstance(step.low_rank("gate_up"), LowRank)
    found = bits(mlp(x, step))
    assert calls == ["mlp", "activated"]
    same = np.asarray(slots) == 2
    assert np.array_equal(found[same], without[same])
    assert not (found[~same] == without[~same]).all(axis=1).any()


def test_towers_activate_by_xla() -> None:
    towers = PanelProducts(most_rows=None, dtypes=("float32", "bfloat16"))
    assert not any(map(towers.activates, KINDS)) and not PRODUCTS.activates("clamped")


def test_names_that_are_not_known() -> None:
    with pytest.raises(Exception, match="activation 'relu' is not known"):
        activated(jnp.zeros((1, 2, 8), jnp.float32), "relu", 1)
