"""Rotary embeddings against their equations, written apart: complex numbers, one pair of dimensions
at a time.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig, RopeScaling
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.rope import RopeConfig, inverse_frequencies, rotate, rotation
from tests.golden.configs import CONFIGS
from tests.tiny import CONFIG
from tests.tiny import config as tiny_config


def config(dim: int = 64, base: float = 10000.0, **scaling: Any) -> RopeConfig:
    rope = RopeScaling(**scaling) if scaling else None
    return rope_of(tiny_config(head_dim=dim, rope_theta=base, rope_scaling=rope))


def rope_of(model: ModelConfig, layer: int = 0) -> RopeConfig:
    mixer = model.layers[layer].mixer
    assert mixer is not None and mixer.rope is not None
    return mixer.rope


LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 1024, "attention_factor": 1.25}


def test_plain_frequencies() -> None:
    inv, factor = inverse_frequencies(config(dim=8, base=100.0))
    assert inv.dtype == np.float32 and factor == 1.0
    np.testing.assert_allclose(inv, [1.0, 100**-0.25, 0.1, 100**-0.75], rtol=1e-7)


def test_linear_divides_every_frequency() -> None:
    plain, _ = inverse_frequencies(config())
    scaled, factor = inverse_frequencies(
        config(kind="linear", factor=4.0, original_max_position=64)
    )
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-7)
    assert factor == 1.0


def test_llama3_slows_long_wavelengths_only() -> None:
    plain, _ = inverse_frequencies(config())
    scaled, factor = inverse_frequencies(config(**LLAMA3, original_max_position=512))
    assert factor == 1.0
    kinds = set()
    for w, found in zip(plain.astype(float), scaled.astype(float), strict=True):
        wavelength = 2 * math.pi / w
        if wavelength < 512 / 4:
            kinds.add("kept")
            expected = w
        elif wavelength > 512 / 1:
            kinds.add("slowed")
            expected = w / 8
        else:
            kinds.add("between")
            smooth = (512 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * w / 8 + smooth * w
        assert found == pytest.approx(expected, rel=1e-6)
    assert kinds == {"kept", "slowed", "between"}


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_interpolates_by_rotations(truncate: bool) -> None:
    dim, base, length = 64, 10000.0, 1024
    plain, _ = inverse_frequencies(config(dim, base))
    scaled, factor = inverse_frequencies(config(dim, base, **YARN, truncate=truncate))
    assert factor == 1.25

    def at(turns: float) -> float:  # the dimension that turns so often within the original context
        return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = (math.floor(at(32)), math.ceil(at(1))) if truncate else (at(32), at(1))
    assert 0 < low < high < dim // 2, "the ramp lies inside: all three cases are seen"
    for i, w in enumerate(plain.astype(float)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        assert scaled[i] == pytest.approx(w / 4 * ramp + w * (1 - ramp), rel=1e-6)
    assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)


def test_yarn_ramp_stays_inside_the_head() -> None:
    """A tiny original context puts both ends of the ramp outside: clamped, never negative or
    inverted.
    """
    scaled, _ = inverse_frequencies(config(**YARN | {"original_max_position": 8}))
    plain, _ = inverse_frequencies(config())
    ratio = scaled.astype(float) / plain
    assert (
        (ratio <= 1.0 + 1e-6).all()
        and (ratio >= 0.25 - 1e-6).all()
        and (np.diff(ratio) <= 1e-6).all()
    )


def test_longrope_by_the_length() -> None:
    factors = {"short_factor": tuple(range(1, 33)), "long_factor": tuple(range(2, 34))}
    scaling: dict[str, Any] = {
        "kind": "longrope",
        "factor": 4.0,
        "attention_factor": 1.5,
        **factors,
    }
    c = config(**scaling, original_max_position=64)
    plain, _ = inverse_frequencies(config())
    for length, name in ((1, "short_factor"), (64, "short_factor"), (65, "long_factor")):
        scaled, factor = inverse_frequencies(c, length=length)
        np.testing.assert_allclose(scaled, plain / np.array(factors[name]), rtol=1e-6)
        assert factor == 1.5


def test_proportional_leaves_the_last_dimensions_of_a_half_as_they_are() -> None:
    scaling: dict[str, Any] = {"kind": "proportional", "factor": 2.0, "original_max_position": 64}
    plain, _ = inverse_frequencies(config(dim=24))
    scaled, factor = inverse_frequencies(config(dim=24, **scaling, partial_rotary_factor=0.3))
    assert factor == 1.0 and scaled.shape == (12,)
    np.testing.assert_allclose(scaled[:3], plain[:3] / 2, rtol=1e-7)  # of 24 * 0.3 = 7.2, 3 pairs
    assert not scaled[3:].any()
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=1\.5"):
        config(dim=24, **scaling, partial_rotary_factor=1.5)


def test_local_layers_have_a_base_of_their_own() -> None:
    scaling = RopeScaling(**LLAMA3, original_max_position=512)  # pyright: ignore[reportArgumentType]
    sizes = {"head_dim": 64, "rope_scaling": scaling, "sliding_windows": (None, 8)}
    model = tiny_config(**sizes, local_rope_theta=100.0)
    expected, _ = inverse_frequencies(config(base=100.0))
    found, factor = inverse_frequencies(rope_of(model, layer=1))
    np.testing.assert_array_equal(found, expected)
    assert factor == 1.0
    assert rope_of(model, layer=0) == config(**LLAMA3, original_max_position=512)


def test_part_of_a_head_is_rotated() -> None:
    part = rope_of(tiny_config(head_dim=16, partial_rotary_factor=0.5))
    cos, sin = rotation(part, jnp.arange(3))
    np.testing.assert_array_equal(cos, rotation(config(dim=8), jnp.arange(3))[0])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.float32)
    found = rotate(x, cos, sin)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(found[..., :8], rotate(x[..., :8], cos, sin))


def test_rotation_is_a_complex_product() -> None:
    c = config(dim=8, kind="yarn", factor=2.0, original_max_position=64, attention_factor=1.5)
    positions = np.array([0, 1, 7, 40], np.int32)
    x = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
    inv, _ = inverse_frequencies(c)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * positions[:, None, None] * inv.astype(float)
    )
    expected = 1.5 * np.concatenate([turned.real, turned.imag], -1)
    cos, sin = rotation(c, jnp.asarray(positions))
    assert cos.shape == sin.shape == (4, 4) and cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), expected, atol=2e-5)


def test_scores_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in range(2))

    def score(m: int, n: int) -> float:
        at_m, at_n = (rotation(rope_of(CONFIG), jnp.asarray([p], jnp.int32)) for p in (m, n))
        return float(jnp.sum(rotate(q, *at_m) * rotate(k, *at_n)))

    assert score(9, 4) == pytest.approx(score(35, 30), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_any_head_axes_and_batches() -> None:
    """[B, T, K, G, D] and [B, T, K, D] turn as each head alone does; the dtype is the input's, the
    arithmetic f32.
    """
    rng = np.random.default_rng(2)
    positions = jnp.asarray(rng.integers(0, 60, (2, 5)), jnp.int32)
    cos, sin = rotation(rope_of(CONFIG), positions)
    x = jnp.asarray(rng.standard_normal((2, 5, 3, 2, 16)), jnp.float32)
    whole = rotate(x, cos, sin)
    for b in range(2):
        for head in range(3):
            np.testing.assert_array_equal(whole[b, :, head], rotate(x[b, :, head], cos[b], sin[b]))
    half = rotate(x.astype(jnp.bfloat16), cos, sin)
    assert half.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.bfloat16).astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(half, exact.astype(jnp.bfloat16))


def test_large_positions() -> None:
    """Angles are f32: at 100,000 tokens they are right to a few thousandths of a radian."""
    positions = np.array([100_000], np.int32)
    cos, _ = jax.jit(lambda p: rotation(rope_of(CONFIG), p))(positions)
    inv, _ = inverse_frequencies(rope_of(CONFIG))
    np.testing.assert_allclose(cos[0], np.cos(100_000 * inv.astype(np.float64)), atol=8e-3)


def test_the_rope_of_a_model() -> None:
    """That of layers without a window, whatever other layers keep; an error where they differ."""
    ropes = {
        name: ModelConfig.from_hf(CONFIGS[name])
        for name in ("qwen3_5_h2x3_c16_y24", "gemma4_k2_d32_k1_d64", "lfm2_c64_w4_bias_tied")
    }
    assert ropes["qwen3_5_h2x3_c16_y24"].rope_theta == 1e7
    assert ropes["lfm2_c64_w4_bias_tied"].rope_theta == 10000.0
    scaling = ropes["gemma4_k2_d32_k1_d64"].rope_scaling
    assert scaling is not None and scaling.kind == "proportional"
    plain = ModelConfig.from_hf(CONFIGS["qwen3_g7_d80"])
    assert plain.rope_theta == 10000.0 and plain.rope_scaling is None
    first, second = plain.layers
    assert isinstance(second.mixer, AttentionConfig) and second.mixer.rope is not None
    other = dataclasses.replace(second.mixer.rope, theta=5.0)
    unlike = dataclasses.replace(second, mixer=dataclasses.replace(second.mixer, rope=other))
    with pytest.raises(AttributeError, match="rope is one of 2 by layer"):
        dataclasses.replace(plain, layers=(first, unlike)).rope_theta  # noqa: B018
    still = tuple(
        dataclasses.replace(x, mixer=dataclasses.replace(second.mixer, rope=None))
        for x in plain.layers
    )
    without = dataclasses.replace(plain, layers=still)
    with pytest.raises(AttributeError, match="rope is in no layer"):
        without.rope_scaling  # noqa: B018
