"""One kernel for norms, rotation and the write to the pool, interpreted, against the layers' own
definitions; and lowered for CUDA.
"""

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers.heads import Heads
from jpaged.models.layers.norm import NormConfig, RMSNorm
from jpaged.models.layers.rope import Rotary
from kernels_pallas.paged_attention.head_write import HeadNorm, mosaic_gpu, triton
from kernels_pallas.paged_attention.head_write.triton import write_heads
from kernels_pallas.paged_attention.interface import Shapes
from kernels_pallas.paged_attention.pool_layout import plain_pool_layout
from kernels_pallas.paged_attention.tpu import pool_layout as padded
from tests.kernels import aot_cuda
from tests.kernels.bounds import again, watch
from tests.kernels.test_kv_write import L, N, P, written_one_by_one

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """norm: of a head, (has_offset, in_f32) or None. R: rotated dimensions, 0 is no rotation."""

    name: str
    T: int = 11
    K: int = 2
    G: int = 2
    D: int = 16
    R: int = 16
    norm: tuple[bool, bool] | None = None

    def __str__(self) -> str:
        return self.name


PLAIN = (False, False)
CASES = (
    Case("qwen3", norm=PLAIN),
    Case("gemma3", D=32, R=32, norm=(True, True)),
    Case("llama", T=37, G=4),
    Case("phi3", G=3, D=32, R=24),
    Case("qwen2", T=5, K=1, G=7, D=64, R=64),
    Case("smollm3 without rope", T=3, R=0),
    Case("odd heads", K=1, G=5, D=24, R=12, norm=PLAIN),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    qkv: jax.Array
    pool: np.ndarray
    slots: np.ndarray
    heads: Heads
    how: dict[str, Any]


def build(case: Case, dtype: str) -> Inputs:
    """Some tokens are padding, by any of the indices that are out of a layer's range."""
    rng = np.random.default_rng(0)
    T, K, D = case.T, case.K, case.D
    slots = rng.permutation(N * P)[:T].astype(np.int32)
    slots[0], slots[1] = N * P - 1, -1
    for i, token in enumerate(range(2, T, 5)):
        slots[token] = (L * N * P, N * P, 2 * N * P)[i % 3]
    how: dict[str, Any] = {"num_layers": L, "interpret": True}
    q_norm = k_norm = rotary = None
    if case.norm is not None:
        scales = [jnp.asarray(1 + 0.3 * rng.standard_normal(D), dtype) for _ in range(2)]
        q_norm, k_norm = (
            RMSNorm(
                scale=scale,
                config=NormConfig(eps=EPS, has_offset=case.norm[0], in_f32=case.norm[1]),
            )
            for scale in scales
        )
        how |= {"norm": HeadNorm(EPS, *case.norm), "scales": tuple(scales)}
    if case.R:
        angles = (9 * rng.standard_normal((T, case.R // 2))).astype(np.float32)
        rotary = Rotary(cos=1.1 * jnp.cos(angles), sin=1.1 * jnp.sin(angles))
        how["rotation"] = rotary.cos, rotary.sin
    return Inputs(
        qkv=jnp.asarray(rng.standard_normal((T, K, case.G + 2, D)), dtype),
        pool=rng.standard_normal((L * N, P, 2 * K, D)).astype(dtype),
        slots=slots,
        heads=Heads(q_norm=q_norm, k_norm=k_norm, rotary=rotary),
        how=how,
    )


def check(module: Any, case: Case, dtype: str, layer: int = 1, *, interpret: bool = True) -> None:
    """Queries and the whole pool to two units in the last place, whatever the kernel does not
    compute to the bit.
    """
    given = build(case, dtype)
    pool, slots = jnp.asarray(given.pool), jnp.asarray(given.slots)
    how = given.how | {"norm": module.HeadNorm(EPS, *case.norm) if case.norm else None}
    how |= {"interpret": interpret}
    q, written = module.write_heads(given.qkv, pool, jnp.int32(layer), slots, **how)
    q_THD, k_TKD, v_TKD = given.heads(given.qkv)
    kv_T2KD = np.stack([k_TKD, v_TKD], axis=2).reshape(case.T, 2 * case.K, case.D)
    expected = written_one_by_one(given.pool, layer, kv_T2KD, given.slots)
    keys = np.zeros(expected.shape, bool)
    keys[layer * N : (layer + 1) * N, :, ::2] = True
    assert q.dtype == q_THD.dtype and q.shape == q_THD.shape
    np.testing.assert_array_equal(np.asarray(written)[~keys], expected[~keys])
    for found, meant in ((q, q_THD), (np.asarray(written)[keys], expected[keys])):
        units = {"float32": 2**-22, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
        found, meant = np.asarray(found, np.float64), np.asarray(meant, np.float64)
        np.testing.assert_allclose(found, meant, rtol=units, atol=4 * units)
        assert np.mean(found != meant) < 0.5, "rounding turns few"


QUICK = ("phi3", "float32")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            *(case, dtype), marks=() if (case.name, dtype) == QUICK else pytest.mark.middle
        )
        for case in CASES
        for dtype in ("bfloat16", "float32")
    ],
    ids=str,
)
def test_it_is_what_the_layers_do(case: Case, dtype: str) -> None:
    check(triton, case, dtype)


@pytest.mark.middle
@pytest.mark.parametrize("layer", [0, L - 1])
def test_each_layer(layer: int) -> None:
    check(triton, CASES[0], "float16", layer)


ON_HOPPER = (
    Case("qwen3", T=70, D=128, R=128, norm=PLAIN),
    Case("gemma3", T=11, D=256, R=256, norm=(True, True)),
    Case("an offset in 16 bits", T=5, D=128, R=128, norm=(True, False)),
    Case("half of a head", T=130, K=1, G=3, D=256, R=128),
    Case("smollm3 without rope", T=3, D=64, R=0, norm=PLAIN),
    Case("pairs that are Triton's", T=5, D=64, R=64),
)


@pytest.mark.middle
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ON_HOPPER, ids=str)
def test_it_is_what_the_layers_do_on_hopper(case: Case, dtype: str) -> None:
    check(mosaic_gpu, case, dtype)


BROKEN_ON_HOPPER = {
    "the value's place": ("2 * head + nth - G", "2 * head"),
    "the layer": ("layer_ref[0] * slots", "2 * slots"),
    "slots of the next layer": ("& (slot < slots)", "& (slot < 2 * slots)"),
    "the turn's sign": ("a * cos - b * sin", "a * cos + b * sin"),
    "the mean": ("total / D", "total / (D - 1)"),
    "the offset": ("1 + scale if norm.has_offset", "scale if norm.has_offset"),
    "keys' scale": ("lambda: of_keys", "lambda: of_queries"),
    "the last tokens": ("jnp.minimum(block * ROWS, T - B)", "block * (T - B - 1)"),
}


@pytest.mark.middle
@pytest.mark.parametrize("name", BROKEN_ON_HOPPER)
def test_a_broken_kernel_of_hopper_is_noticed(name: str) -> None:
    case = ON_HOPPER[2] if name == "the offset" else ON_HOPPER[0]
    with pytest.raises(AssertionError):
        check(again(mosaic_gpu, *BROKEN_ON_HOPPER[name]), case, "bfloat16")


MUTATIONS = {
    "the value's place": ("2 * head + 1)", "2 * head)"),
    "the layer": ("layer_ref[0] * slots", "2 * slots"),
    "slots of the next layer": ("& (slot_B < slots)", "& (slot_B < 2 * slots)"),
    "the turn's sign": ("a * cos - b * sin", "a * cos + b * sin"),
    "the mean": ("total_R / D", "total_R / (D - 1)"),
    "the offset": ("1 + scale if norm.has_offset", "scale if norm.has_offset"),
    "keys' scale": ("real_B, scale_refs[1]", "real_B, scale_refs[0]"),
}


@pytest.mark.middle
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str) -> None:
    case = CASES[1] if name == "the offset" else CASES[0]
    with pytest.raises(AssertionError):
        check(again(triton, *MUTATIONS[name]), case, "float32")


EDGES = Case("edges", T=3, K=1, G=3, D=24, R=12, norm=PLAIN)
MASKS = {
    "none": ("", ""),
    "tokens": ("(token_R < T) & (nth_R < G)", "(nth_R < G)"),
    "heads": ("(token_R < T) & (nth_R < G)", "(token_R < T)"),
    "slots": ("(slot_B >= 0) & (slot_B < slots)", "(slot_B >= 0)"),
    "tokens of slots": ("mask=token_B < T", "mask=token_B >= 0"),
    "dimensions": ("start + lane, lane < size", "start + lane, lane >= 0"),
}


@pytest.mark.middle
@pytest.mark.parametrize("name", MASKS)
def test_it_touches_nothing_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a mask is left out."""
    module, given = again(triton, *MASKS[name]), build(EDGES, "float32")
    if name == "heads":  # past a group's own lie its key and value, past these nothing
        given = build(dataclasses.replace(EDGES, G=5), "float32")
    seen = watch(monkeypatch, module)
    how = given.how | {"norm": module.HeadNorm(EPS)}
    slots = jnp.where(jnp.asarray(given.slots) < 0, -1, jnp.asarray(given.slots))
    module.write_heads(given.qkv, jnp.asarray(given.pool), L - 1, slots, **how)
    jax.effects_barrier()
    assert seen and any(seen) == (name != "none")


@pytest.mark.parametrize(
    ("own", "layout", "reason"),
    [
        ({}, plain_pool_layout, None),
        ({"dtype": jnp.float32}, plain_pool_layout, None),
        ({"kv_dtype": jnp.int8}, plain_pool_layout, "with scales"),
        ({"dtype": jnp.int8}, plain_pool_layout, "dtype int8"),
        ({"head_dim": 80}, padded, "padding"),
    ],
)
def test_unsupported(own: dict[str, Any], layout: Any, reason: str | None) -> None:
    given = {"dtype": jnp.bfloat16, "head_dim": 64, "block_size": 16} | own
    shapes = Shapes(num_heads=4, num_kv_heads=2, **given)
    asked = shapes, layout(2, given["head_dim"])
    found = triton.unsupported(*asked, None)
    assert found is None if reason is None else found is not None and reason in found
    on_hopper = mosaic_gpu.unsupported(*asked, SimpleNamespace(compute_capability="9.0"))
    assert (on_hopper is None) == (reason is None and shapes.dtype == jnp.bfloat16)
    blackwell = SimpleNamespace(compute_capability="12.0")
    assert "only 9.0" in str(mosaic_gpu.unsupported(*asked, blackwell))


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_lowers_for_cuda(case: Case) -> None:
    """With the pool in place of its result."""
    given = build(case, "bfloat16")

    def write(qkv: jax.Array, pool: jax.Array, slots: jax.Array) -> Any:
        return write_heads(qkv, pool, 1, slots, **given.how | {"interpret": False})

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        args = given.qkv, jnp.asarray(given.pool), jnp.asarray(given.slots)
        text = aot_cuda.lower(write, *args)
    assert "write_heads" in text
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 0" in text
