"""tunix's models and jpaged's config and weights of them compute one function."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3  # pyright: ignore[reportMissingImports]
from tunix.models.gemma4 import model as gemma4  # pyright: ignore[reportMissingImports]
from tunix.models.gemma4 import moe  # pyright: ignore[reportMissingImports]
from tunix.models.gemma4 import vision as gemma4_vision  # pyright: ignore[reportMissingImports]
from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]

import jpaged
from jpaged import ConfigError
from jpaged.images.encode import bind_tower
from jpaged.images.spans import Prepared, packed
from jpaged.integrations.tunix.models import describe
from jpaged.models.layers.linear import StepContext
from jpaged.models.vision.tower import Grid
from tests import tiny
from tests.clients.test_tunix import DEPRECATED

pytestmark = [
    pytest.mark.clients,
    *(pytest.mark.filterwarnings(f"ignore:{x}:DeprecationWarning") for x in DEPRECATED),
]
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 97,
    "embed_dim": 64,
    "hidden_dim": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
GEMMA = {("num_embed" if name == "vocab_size" else name): n for name, n in SIZES.items()}
GEMMA |= {"sliding_window_size": 8}
LOCAL, GLOBAL = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL
FULL = {"global_key_size": 32, "attention_pattern": (LOCAL, GLOBAL)}
ALIKE = FULL | {"num_global_kv_heads": 1, "k_eq_v_global": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
BY_WIDTH = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS


def qwen(module: Any, **changes: Any) -> Any:
    return module.ModelConfig(**SIZES | {"rope_theta": 1_000_000, "norm_eps": 1e-6} | changes)


def gemma(module: Any, num_layers: int, **changes: Any) -> Any:
    changes = {"global_base_frequency": 1_000_000, "param_dtype": jnp.float32} | changes
    return module.ModelConfig(**GEMMA | {"num_layers": num_layers} | changes)


def experts_of_gemma4() -> dict[str, Any]:
    return ALIKE | EXPERTS | {"enable_moe": True, "expert_dim": 24}


CASES: dict[str, tuple[Any, Any, str]] = {
    "qwen2": (qwen2.Qwen2, qwen(qwen2, rope_theta=10_000), "qwen2"),
    "qwen3": (qwen3.Qwen3, qwen(qwen3, use_tied_embedding=True), "qwen3"),
    "qwen3_experts": (qwen3.Qwen3, qwen(qwen3, **EXPERTS), "qwen3_moe"),
    "llama3": (llama3.Llama3, qwen(llama3, norm_eps=1e-5, weight_tying=True), "llama"),
    "gemma3": (gemma3.Gemma3, gemma(gemma3, 7, global_scale_factor=8.0), "gemma3_text"),
    "gemma3_heads": (
        gemma3.Gemma3,
        gemma(gemma3, 6, num_kv_heads=4, query_pre_attn_norm=BY_WIDTH),
        "gemma3_text",
    ),
    "gemma4": (gemma4.Gemma4, gemma(gemma4, 4, **ALIKE), "gemma4_text"),
    "gemma4_shared": (  # as E2B: keys of other layers, per-layer embeddings
        gemma4.Gemma4,
        gemma(
            gemma4,
            8,
            **FULL,
            num_kv_heads=1,
            per_layer_input_dim=16,
            frac_shared_layers=0.5,
            override_kv_shared_ffw_hidden=192,
        ),
        "gemma4_text",
    ),
    "gemma4_experts": (gemma4.Gemma4, gemma(gemma4, 2, **experts_of_gemma4()), "gemma4_text"),
}


def make(cls: Any, config: Any) -> Any:
    """The module with weights that matter in every part."""
    model, rng = cls(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)

    def draw(x: jax.Array) -> jax.Array:
        scale, mean = (0.3, 1.0) if x.ndim == 1 else (1 / math.sqrt(x.shape[0]), 0.0)
        return jnp.asarray(rng.standard_normal(x.shape) * scale + mean, x.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


@pytest.mark.parametrize("name", CASES)
def test_scores_are_the_modules(name: str) -> None:
    cls, config, family = CASES[name]
    model = make(cls, config)
    if name == "gemma4_experts" and not hasattr(moe.MoERagged, "block"):  # tunix 0.1.7
        with pytest.raises(ConfigError, match="enable_moe=True: before 0"):
            describe(model, 64)
        return
    family_of_map, ours = describe(model, 64)
    assert ours.family == family
    params = jpaged.params_from(model, family_of_map, config=ours)
    ids = np.random.default_rng(1).integers(1, 97, 24)
    mask = jnp.tril(jnp.ones((24, 24), bool))[None]
    logits, _ = model(jnp.asarray(ids[None]), jnp.arange(24)[None], None, mask)
    wanted = jax.nn.log_softmax(logits[0].astype(jnp.float32))[np.arange(23), ids[1:]]
    scores = jpaged.score(params, [ids.tolist()], engine_config=tiny.engine(max_model_len=64))
    np.testing.assert_allclose(scores[0], wanted, atol=1e-4)
    jpaged.release(compiled=True)


def test_towers_are_the_modules() -> None:
    """Rows of embeddings of one image by tunix's Gemma 4, and by ours with its weights."""
    tower = gemma4_vision.VisionEncoderConfig(
        d_model=24,
        num_layers=2,
        num_heads=2,
        ffw_hidden=32,
        patch_size=2,
        output_length=4,
        pos_emb_shape_yx=(8, 2),
        use_clipped_linears=True,
        standardize_embeddings=True,
    )
    config = gemma(gemma4, 2, **ALIKE, vision_encoder=tower)
    model = gemma4.Gemma4(config, rngs=nnx.Rngs(0), text_only=False)
    family, ours = describe(model, 64)
    assert ours.vision is not None and ours.vision.hidden_size == 64
    params = jpaged.params_from(model, family, config=ours)
    patches = np.random.default_rng(1).random((36, 12), np.float32)
    image = Prepared(patches=patches, grid=Grid(1, 6, 6), digest=b"image")
    rows = bind_tower(params)(packed([image], ours.vision, 4), StepContext()).rows_RE
    at = np.stack(np.divmod(np.arange(36), 6)[::-1], axis=-1)
    ((made, _),) = model.vision_encoder(jnp.asarray(patches)[None], jnp.asarray(at)[None])
    wanted = model.embedder.encode_vision(made)[0]
    np.testing.assert_allclose(rows, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_another_theta_is_told(name: str) -> None:
    """tunix computes with 1,000,000: rollouts are of the policy that it trains."""
    cls, config, _ = CASES[name]
    model = cls(dataclasses.replace(config, rope_theta=500_000), rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="rope_theta=500000: tunix's .* computes with 1000000"):
        _, ours = describe(model, 64)
    assert ours.rope_theta == 1_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_scale_factor": 2.0}, "local_scale_factor=2.0: only 1.0"),
        ({"global_scale_factor": 2.0}, "global_scale_factor=2.0: only 1.0"),
        ({"local_rope_proportion": 0.5}, "local_rope_proportion=0.5: only 1.0"),
        ({"num_layers": 3}, "num_layers=3: the last layer of Gemma 4 must be global"),
        ({"override_kv_shared_ffw_hidden": 100}, "override_kv_shared_ffw_hidden=100: only twice"),
        ({"frac_shared_layers": 0.25}, "frac_shared_layers=0.25: tunix shares"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    cls, config, _ = CASES["gemma4"]
    model = cls(config, rngs=nnx.Rngs(0))
    model.config = dataclasses.replace(config, **changes)
    with pytest.raises(ConfigError, match=message):
        describe(model, 64)
    with pytest.raises(ConfigError, match="is a Linear, none of tunix's models qwen2, qwen3"):
        describe(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 64)
