"""Routes in the form of MaxText's decoder, and what its router does with them, written after its
source: RoutedMoE.get_topk and permute, and the loop over layers of nnx_decoders.py in
AI-Hypercomputer/maxtext#4826 (with the repair of a sum of zeros, which is the caller's to avoid).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged
from jpaged import LLM, ModelConfig, RequestError, SamplingParams
from jpaged.integrations.maxtext import forced_routed_experts
from jpaged.models.params import random_params
from tests.tiny import ENGINE

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "eos_token_id": 96,
    "max_position_embeddings": 64,
}
LAYERS, EXPERTS, TOP = 2, 8, 2


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {**vars(ENGINE), "routed_experts": True}
    llm = LLM(random_params(ModelConfig.from_hf(MIXTURE), seed=1), **settings)
    asked = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (4, 9, 1)]
    outs = llm.generate([[5, 6, 7], [8, 9, 10, 11, 12], [3]], asked, use_tqdm=False)
    llm.close()
    return jpaged.to_arrays(outs, max_prompt_len=6, max_completion_len=12)


def get_topk(logits: jax.Array, forced: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """MaxText's get_topk of Qwen3: weights and indices [B, S, A] of softmaxed logits [B, S, X]."""
    if forced is None:
        weights, indices = jax.lax.top_k(logits, TOP)
    else:
        indices = forced
        weights = jnp.take_along_axis(logits, indices, axis=-1)
        weights = weights * (indices[:, :, 0] != -1)[:, :, None].astype(weights.dtype)
    return weights / weights.sum(axis=-1, keepdims=True), indices


def test_shape_and_meaning(arrays: dict[str, np.ndarray]) -> None:
    """[batch, sequence, layers with experts, experts a token]: MaxText's loop takes the next index
    of the third axis at each layer with experts, and token t's routes lie where token t does.
    """
    forced = forced_routed_experts(arrays)
    assert forced.dtype == np.int32 and forced.shape == (3, 6 + 12, LAYERS, TOP)
    ids = np.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1)
    assert forced.shape[:2] == ids.shape
    there = np.concatenate([arrays["prompt_mask"], arrays["completion_mask"]], axis=1)
    known = (forced >= 0).all(axis=(2, 3))
    last = [np.flatnonzero(row)[-1] for row in there]
    assert (known.sum(1) == there.sum(1) - 1).all() and not known[range(3), last].any()
    assert not known[~there].any() and forced.max() < EXPERTS
    assert all(len(set(route)) == TOP for route in forced[known].reshape(-1, TOP))


def test_maxtexts_router_takes_them(arrays: dict[str, np.ndarray]) -> None:
    """It chooses what was forced, weighs it by its own logits, and its weights have a gradient;
    with num_experts nothing is divided by zero, and padding loads all experts alike.
    """
    forced = jnp.asarray(forced_routed_experts(arrays, num_experts=EXPERTS))
    assert forced.min() >= 0 and forced.max() < EXPERTS
    logits = jax.nn.softmax(jax.random.normal(jax.random.key(0), (*forced.shape[:2], EXPERTS)))
    for layer in range(LAYERS):
        of_layer = forced[:, :, layer, :]
        weights, indices = get_topk(logits, of_layer)
        assert (indices == of_layer).all() and bool(jnp.isfinite(weights).all())
        np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
        gradient = jax.grad(lambda x, of_layer=of_layer: get_topk(x, of_layer)[0][..., 0].sum())
        assert bool(jnp.isfinite(gradient(logits)).all()) and bool(gradient(logits).any())
        sizes = np.bincount(np.asarray(of_layer).ravel(), minlength=EXPERTS)
        assert sizes.sum() == of_layer.size
    raw = forced_routed_experts(arrays)
    assert not bool(jnp.isfinite(get_topk(logits, jnp.asarray(raw[:, :, 0]))[0]).all())
    unset = ~(raw >= 0).all(axis=(2, 3))
    sizes = np.bincount(np.asarray(forced)[unset][:, 0].ravel(), minlength=EXPERTS)
    assert sizes.max() - sizes.min() <= 1
    assert (np.asarray(forced)[~unset] == raw[~unset]).all()


def test_routes_of_dialogs_lie_at_their_tokens() -> None:
    routes = np.full((1, 6, LAYERS, TOP), -1, np.int16)
    routes[0, :3] = 1
    mask = np.arange(6)[None] < 4
    forced = forced_routed_experts({"tokens": mask, "mask": mask, "routed_experts": routes})
    np.testing.assert_array_equal(forced, routes)


def test_what_cannot_be_replayed_is_refused(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(RequestError, match="routed_experts=True"):
        forced_routed_experts({k: v for k, v in arrays.items() if k != "routed_experts"})
    with pytest.raises(RequestError, match="num_experts=1"):
        forced_routed_experts(arrays, num_experts=1)
    lost = dict(arrays, routed_experts=arrays["routed_experts"].copy())
    lost["routed_experts"][1, 7] = -1
    with pytest.raises(RequestError, match="row 1: the token at place 7 has no routes"):
        forced_routed_experts(lost)
