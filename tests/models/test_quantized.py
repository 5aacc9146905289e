"""Weights in 8 and 4 bits against their definition, written apart."""

import dataclasses
import functools
import pickle
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpaged.models.quantized as quantized_module
import kernels_cpu.quantized
from jpaged.config import Quantization
from jpaged.errors import ConfigError
from jpaged.models.params import param_table
from jpaged.models.quantized import (
    FORMS,
    INT4,
    QuantizedWeight,
    WeightForm,
    dequantized,
    fp8_product,
    in_stored_order,
    partition,
    quantized,
)
from jpaged.models.served import served_form
from kernels_pallas.experts import triton
from tests.tiny import CONFIG

NAMES = ("int8", "int4", "fp8")


def weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random, with what is awkward: a row of zeros, one of -0, one huge and one tiny channel."""
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    flat = w.reshape(shape[0], -1)
    flat[0], flat[1, ::2], flat[2] = 0.0, -0.0, flat[2] * 1e30
    flat[3] *= 1e-30
    return w


def meant(q: QuantizedWeight) -> np.ndarray:
    """What a quantised weight stands for, number by number."""
    values, scales = np.asarray(q.values), np.asarray(q.scales)
    out = np.zeros(q.shape, np.float64)
    for at in np.ndindex(*q.shape):
        if q.form == INT4:
            group, i = divmod(at[-1], 32)
            byte = int(values[(*at[:-1], 16 * group + i % 16)])
            value, scale = (byte >> (4 * (i // 16)) & 15) - 8, scales[(*at[:-1], group)]
        else:
            value = float(values[at])
            scale = scales[(*at[: q.num_outputs], *[0] * (len(at) - q.num_outputs))]
        out[at] = value * scale
    return out


@pytest.mark.parametrize("form", NAMES)
def test_the_nearest_values(form: str) -> None:
    w = weight((6, 2, 64))
    q = quantized(jnp.asarray(w), form, 1)
    ours, size = meant(q), np.abs(w).reshape(6, -1).max(1)
    error = np.abs(ours - w).reshape(6, -1).max(1)
    # Half a step; in fp8 steps grow with the values, to 32 of 448.
    assert (
        error <= size * {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 16 / 448}[form] * 1.001
    ).all()
    assert not ours[0].any() and np.isfinite(ours).all()
    assert error[4] > 0, "it is no copy"
    again = quantized(jnp.asarray(ours, jnp.float32), form, 1)
    assert np.array_equal(again.values, q.values), "what it stands for is kept as it is"


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize(("shape", "num_outputs"), [((6, 2, 64), 1), ((4, 3, 32), 2)])
def test_a_product_is_of_what_it_stands_for(
    form: str, shape: tuple[int, ...], num_outputs: int
) -> None:
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = quantized(jnp.asarray(w), form, num_outputs)
    assert (q.shape, q.ndim, q.dtype) == (shape, len(shape), jnp.float32)
    matrix = q.matrix()
    x = np.random.default_rng(1).standard_normal((3, matrix.shape[1])).astype(np.float32)
    exact = x.astype(np.float64) @ meant(q).reshape(matrix.shape).T
    assert np.abs(matrix.linear(jnp.asarray(x)) - exact).max() < 1e-4


@pytest.mark.parametrize("form", NAMES)
def test_rows_of_an_embedding(form: str) -> None:
    q = quantized(jnp.asarray(weight((6, 64)) * 0.1, jnp.bfloat16), form, 1)
    rows = q.take(jnp.asarray([[5, 0], [3, 9]]))  # past the end is the last
    assert rows.dtype == jnp.bfloat16 and rows.shape == (2, 2, 64)
    assert np.array_equal(rows, meant(q)[[[5, 0], [3, 5]]].astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_leaves_scales_that_are_not(form: str, bad: float) -> None:
    w = np.ones((2, 64), np.float32)
    w[1, 5] = bad
    scales = np.asarray(quantized(jnp.asarray(w), form, 1).scales)
    assert np.isfinite(scales[0]).all() and not np.isfinite(scales[1]).all()


def test_how_it_lies() -> None:
    shape = jax.ShapeDtypeStruct((64, 4, 2, 32), jnp.bfloat16)
    for form in NAMES:
        q = jax.eval_shape(functools.partial(quantized, form=form, num_outputs=1), shape)
        split = partition(q, PartitionSpec(None, "tp"))
        expected = PartitionSpec(None, "tp" if form == "int4" else None, None, None)
        assert (split.values, split.scales) == (PartitionSpec(None, "tp"), expected)


def test_the_setting_names_the_forms_of_plain_weights() -> None:
    assert set(get_args(Quantization)) == {f.name for f in FORMS.values() if f.encode is not None}
    assert all(name == form.name for name, form in FORMS.items())
    assert set(kernels_cpu.quantized.FORMS) <= FORMS.keys() >= triton.DECODERS.keys()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numpy_and_jax_decode_alike(form: WeightForm) -> None:
    """What a loader reads as plain values is what a product takes; and a form survives a pickle,
    which carries weights between processes.
    """
    numbers = np.arange(2**form.bits, dtype=np.uint8).repeat(4).view(form.dtype).reshape(2, -1)
    values = form.pack(numbers)
    assert values.shape == form.value_shape(numbers.shape)
    packed = np.asarray(form.pack(jnp.asarray(numbers)))
    np.testing.assert_array_equal(packed.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(form.unpack(values).view(np.uint8), numbers.view(np.uint8))
    scales = np.random.default_rng(0).uniform(1, 2, (2, 1)).astype(np.float32)
    held = dequantized(values, scales, form)
    assert isinstance(held, np.ndarray) and held.dtype == np.float32
    np.testing.assert_array_equal(dequantized(jnp.asarray(values), scales, form), held)
    assert pickle.loads(pickle.dumps(form)) == form
    assert hash(form.unpacked) == hash(pickle.loads(pickle.dumps(form.unpacked)))


WIDE = dataclasses.replace(CONFIG, head_dim=32, intermediate_size=64)


def forms(form: str | None, devices: int = 1, **changes: Any) -> dict[str, Any]:
    model = dataclasses.replace(WIDE, **changes)
    table = param_table(model)
    found = {name: served_form(spec, model, form, devices) for name, spec in table.items()}
    return {name: form.name for name, form in found.items() if form and ".1." not in name}


def test_what_is_quantised() -> None:
    layer = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    in_layers = {f"layers.0.{name}" for name in layer}
    assert forms(None) == {}
    assert forms("int4") == dict.fromkeys(in_layers, "int4") | {"lm_head.weight": "int8"}
    tied = forms("fp8", tie_word_embeddings=True)
    assert tied == dict.fromkeys({*in_layers, "embed.weight"}, "fp8")


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"'int4': layers.{i}.mlp.down has 48 inputs .* of 32"):
        forms("int4", intermediate_size=48)
    with pytest.raises(ConfigError, match=r"attention.out has 16 inputs"):
        forms("int4", head_dim=16)
    with pytest.raises(ConfigError, match=r"mlp.down has 16 inputs on a device"):
        forms("int4", devices=4)
    assert forms("int8", intermediate_size=48, head_dim=16)
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_size": 32}
    found = forms("int8", **mixture)
    assert {name for name in found if "mlp" in name} == {
        f"layers.0.mlp.experts.{name}" for name in ("gate_up", "down")
    }, "but for the router"
    with pytest.raises(ConfigError, match=r"experts.down has 16 inputs on a device"):
        forms("int4", 2, **mixture)


@pytest.mark.parametrize(("form", "zeros"), [("int8", False), ("int4", False), ("int4", True)])
def test_parts_that_products_are_made_of(form: str, zeros: bool) -> None:
    """Scales of 64 inputs; what GPUs and TPUs multiply adds up to the definition."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 192)), quantized(jnp.asarray(rng.normal(size=(5, 192))), form, 1)
    scales = jnp.asarray(rng.uniform(0.5, 2, (5, 3)), jnp.float32)
    off = jnp.asarray(rng.integers(-7, 8, (5, 3)), jnp.float32) if zeros else None
    w = dataclasses.replace(w, scales=scales, zeros=off)
    parts = in_stored_order(jnp.asarray(x, jnp.float32), w)
    assert len(parts) == (2 if form == "int4" else 1)
    found = sum(np.asarray(own, np.float64) @ np.asarray(part).T for own, part in parts)
    exact = x.astype(np.float32) @ np.asarray(w.whole(), np.float64).T
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_a_product_of_fp8_by_fp8() -> None:
    """Rows of x are rounded, each with its own scale; what they stand for is multiplied exactly."""
    w = quantized(jnp.asarray(weight((12, 64)) * 0.1, jnp.bfloat16), "fp8", 1)
    x = np.random.default_rng(2).standard_normal((7, 64)).astype(np.float32)
    x[1], x[2], x[3], x[4, 5] = 0.0, x[2] * 1e5, x[3] * 1e-20, 1e4
    x[6, 0] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    wide = np.asarray(x, np.float64)[:6]
    tops = np.abs(wide).max(1, keepdims=True)
    scales = np.where(tops == 0, 1, tops / 448)
    seen = np.asarray((wide / scales).astype(np.float32).astype(jnp.float8_e4m3fn), np.float64)
    seen *= scales
    # Half a step of 3 bits; below 2**-6 steps are all of 2**-9.
    assert (np.abs(seen - wide) <= np.maximum(np.abs(wide) / 16, scales * 2.0**-10)).all()
    found, expected = np.asarray(fp8_product(x, w)), seen @ meant(w).T
    assert np.isnan(found[6]).all(), "and no other row"
    size = np.abs(seen) @ np.abs(meant(w)).T
    assert (np.abs(found[:6] - expected) <= 1e-5 * size + 1e-37).all()


def test_which_products_are_of_fp8_by_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = jnp.asarray(weight((8, 256))[4:] * 0.1, jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((3, 256)), jnp.bfloat16)
    monkeypatch.setattr(quantized_module, "ROUNDED_FROM", 3 * 4 * 256)

    def rounds(x: jax.Array, w: QuantizedWeight, *, in_fp8: bool = True) -> bool:
        plain = w.linear(x)
        return not np.array_equal(w.linear(x, in_fp8=in_fp8), plain)

    fp8 = quantized(wide, "fp8", 1)
    assert rounds(x, fp8) and np.array_equal(fp8.linear(x, in_fp8=True), fp8_product(x, fp8))
    assert not rounds(x, fp8, in_fp8=False) and not rounds(x[:2], fp8), "too small"
    assert not rounds(x.astype(jnp.float32), fp8) and not rounds(x, quantized(wide, "int8", 1))
    blocks = dataclasses.replace(fp8, scales=jnp.repeat(fp8.scales, 2, axis=1))
    assert not rounds(x, blocks)
