"""`describe` returns what tunix's models are in jpaged's terms: a name map and a ModelConfig.

The ModelConfig says what tunix's module computes, also where that differs from the published model:
rollouts must be samples of the policy that is trained.
"""

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from flax import nnx

from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig

# tunix's Qwen 3 and Llama 3 rotate by this base whatever their config says (tunix 0.1.8, apply_rope
# in models/qwen3/model.py and models/llama3/model.py), and Llama 3 without Llama 3.1's scaling.
ROPE_THETA = 1_000_000
WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA_EPS = 1e-6  # what its Gemmas add to the mean square


def describe(actor: nnx.Module, max_len: int) -> tuple[str, ModelConfig]:
    """Return the name of the map of a tunix model's weights (see params_from), and its config for
    contexts of up to max_len tokens.

    Raises ConfigError for other modules, and for options that jpaged does not compute. Warns where
    tunix computes another function than its config says.
    """
    config: Any = getattr(actor, "config", None)
    package = type(config).__module__.removeprefix("tunix.models.").partition(".")[0]
    if not type(config).__module__.startswith("tunix.models.") or package not in MODELS:
        built = ", ".join(MODELS)
        raise ConfigError(
            f"rollout_actor is a {type(actor).__name__}, none of tunix's models {built}: "
            "pass config= and family="
        )
    return f"tunix_{package}", MODELS[package](config, max_len)


def _qwen2(c: Any, max_len: int) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        rope_theta=float(c.rope_theta),
        tie_word_embeddings=c.use_tied_embedding,
        qkv_bias=True,
        **_sizes(c, max_len),
    )


def _qwen3(c: Any, max_len: int) -> ModelConfig:
    experts: dict[str, Any] = {}
    if c.num_experts is not None:
        experts = {
            "num_experts": c.num_experts,
            "experts_per_token": c.num_experts_per_tok,
            "expert_size": c.hidden_dim,
            "norm_topk_prob": True,
        }
    return ModelConfig(
        family="qwen3_moe" if experts else "qwen3",
        rope_theta=_computed_theta("Qwen3", c),
        tie_word_embeddings=c.use_tied_embedding,
        qk_norm=True,
        **_sizes(c, max_len),
        **experts,
    )


def _llama3(c: Any, max_len: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        rope_theta=_computed_theta("Llama3", c),
        tie_word_embeddings=c.weight_tying,
        **_sizes(c, max_len),
    )


def _sizes(c: Any, max_len: int) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.hidden_dim,
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": c.norm_eps,
    }


def _computed_theta(model: str, c: Any) -> float:
    """Return the base of the rotation that tunix computes; warn if its config names another."""
    if c.rope_theta != ROPE_THETA:
        warnings.warn(
            f"rope_theta={c.rope_theta}: tunix's {model} computes with {ROPE_THETA} whatever its "
            "config says, and rollouts do as it does; pass config= to choose another",
            stacklevel=2,
        )
    return float(ROPE_THETA)


def _gemma(c: Any, max_len: int, pattern: tuple[Any, ...]) -> dict[str, Any]:
    """Return what the config.json of a Gemma 3 or 4 says of what both have."""
    if c.local_scale_factor != 1.0:
        raise ConfigError(f"local_scale_factor={c.local_scale_factor}: only 1.0 is supported")
    kinds = {"LOCAL_SLIDING": WINDOW, "GLOBAL": FULL}
    layers = itertools.islice(itertools.cycle(pattern), c.num_layers)
    return {
        "vocab_size": c.num_embed,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": GEMMA_EPS,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "sliding_window": c.sliding_window_size,
        "layer_types": [kinds[kind.name] for kind in layers],
    }


# Around the rows of an image, and in their place, where a config does not say it: Gemma's ids.
GEMMA3_TOKENS = {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000}
GEMMA4_TOKENS = {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882}


def with_tower(
    text: dict[str, Any], model_type: str, architecture: str, vision: dict[str, Any], **more: Any
) -> ModelConfig:
    """Return the config of a text part and its vision tower."""
    whole = {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": True,
        **more,
        "text_config": text,
        "vision_config": vision,
    }
    return ModelConfig.from_hf(whole, images=True)


def siglip_tower(c: Any) -> tuple[dict[str, Any], int]:
    """Return what a config.json says of tunix's SigLIP tower, and the rows of an image."""
    if c.image_height != c.image_width or c.patch_size[0] != c.patch_size[1]:
        raise ConfigError(
            f"vision_config: images of {c.image_height} x {c.image_width} pixels in patches of "
            f"{c.patch_size}: only squares are supported"
        )
    vision = {
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
        "image_size": c.image_height,
        "patch_size": c.patch_size[0],
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp_dim or 4 * c.width,
    }
    return vision, c.num_mm_tokens_per_image


def gemma4_tower(c: Any) -> dict[str, Any]:
    """Return what a config.json says of the tower of tunix's Gemma 4, whose rope has base 100."""
    return {
        "model_type": "gemma4_vision",
        "patch_size": c.patch_size,
        "pooling_kernel_size": c.pooling_kernel_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "head_dim": c.d_model // c.num_heads,
        "intermediate_size": c.ffw_hidden,
        "position_embedding_size": c.pos_emb_shape_yx[0],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "rms_norm_eps": GEMMA_EPS,
        "use_clipped_linears": c.use_clipped_linears,
        "standardize": c.standardize_embeddings,
    }


def _gemma3(c: Any, max_len: int) -> ModelConfig:
    from tunix.models.gemma3 import model  # pyright: ignore[reportMissingImports]

    is_by_head = c.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    rope = {"rope_type": "default", "rope_theta": float(c.global_base_frequency)}
    if c.global_scale_factor != 1.0:
        rope |= {"rope_type": "linear", "factor": float(c.global_scale_factor)}
    local = {"rope_type": "default", "rope_theta": float(c.local_base_frequency)}
    text = _gemma(c, max_len, model.GEMMA3_ATTENTION_PATTERN) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": c.head_dim if is_by_head else c.embed_dim // c.num_heads,
        "final_logit_softcapping": None,
        "rope_parameters": {FULL: rope, WINDOW: local},
    }
    if (tower := getattr(c, "vision_config", None)) is None:
        return ModelConfig.from_hf(text)
    vision, rows = siglip_tower(tower)
    tokens = GEMMA3_TOKENS | {"mm_tokens_per_image": rows}
    return with_tower(text, "gemma3", "Gemma3ForConditionalGeneration", vision, **tokens)


def _gemma4(c: Any, max_len: int) -> ModelConfig:
    from tunix.models.gemma4 import model, moe  # pyright: ignore[reportMissingImports]

    known = _gemma(c, max_len, c.attention_pattern or model.GEMMA4_ATTENTION_PATTERN)
    if c.global_scale_factor != 1.0:
        raise ConfigError(f"global_scale_factor={c.global_scale_factor}: only 1.0 is supported")
    if c.local_rope_proportion != 1.0:
        raise ConfigError(f"local_rope_proportion={c.local_rope_proportion}: only 1.0 is supported")
    if known["layer_types"][-1] != FULL:  # transformers would make it one
        raise ConfigError(f"num_layers={c.num_layers}: the last layer of Gemma 4 must be global")
    shared = c.num_layers - int(c.num_layers - c.frac_shared_layers * c.num_layers)
    wide = c.override_kv_shared_ffw_hidden
    if wide not in (None, 2 * c.hidden_dim):
        raise ConfigError(
            f"override_kv_shared_ffw_hidden={wide}: only twice hidden_dim={c.hidden_dim} is "
            "supported"
        )
    if shared and known["layer_types"][: c.num_layers - shared][-2:] != [WINDOW, FULL]:
        raise ConfigError(
            f"frac_shared_layers={c.frac_shared_layers}: tunix shares the keys of the last two "
            "layers before the shared ones, which must be a local and a global one"
        )
    full = {
        "rope_type": "proportional",
        "rope_theta": float(c.global_base_frequency),
        "partial_rotary_factor": c.global_rope_proportion,
    }
    local = {"rope_type": "default", "rope_theta": float(c.local_base_frequency)}
    experts = {"enable_moe_block": False}
    if c.enable_moe:
        if "router_input" not in inspect.signature(moe.MoERagged.__call__).parameters:
            raise ConfigError(
                "enable_moe=True: before 0.1.8 tunix's Gemma 4 shows its router other numbers than "
                "the published model does; update google-tunix"
            )
        experts = {
            "enable_moe_block": True,
            "num_experts": c.num_experts,
            "top_k_experts": c.num_experts_per_tok,
            "moe_intermediate_size": c.expert_dim,
        }
    text = {
        **known,
        **experts,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "per_layer_config": {
            str(i): {
                "head_dim": c.global_key_size or c.head_dim,
                "num_key_value_heads": c.num_global_kv_heads or c.num_kv_heads,
            }
            for i, kind in enumerate(known["layer_types"])
            if kind == FULL
        },
        "attention_k_eq_v": c.k_eq_v_global,
        "final_logit_softcapping": c.final_logit_softcap,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide is not None,
        "hidden_size_per_layer_input": c.per_layer_input_dim,
        "vocab_size_per_layer_input": c.num_embed,
        "rope_parameters": {FULL: full, WINDOW: local},
    }
    if (tower := getattr(c, "vision_encoder", None)) is None:
        return ModelConfig.from_hf(text)
    text["use_bidirectional_attention"] = getattr(c, "use_bidirectional_attention", None)
    vision = gemma4_tower(tower)
    return with_tower(text, "gemma4", "Gemma4ForConditionalGeneration", vision, **GEMMA4_TOKENS)


MODELS: dict[str, Callable[[Any, int], ModelConfig]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "llama3": _llama3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
