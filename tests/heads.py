"""Heads for tests: small EAGLE-3 ones, their files as they are published, and the guesses of one
written apart from the serving code, dense and in float64; MTP heads that are mostly right, and
their dense guesses.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged import ModelConfig, Params
from jpaged.engine.drafting import ModelDrafter
from jpaged.models.draft_head import HeadConfig
from jpaged.models.forward import bind
from jpaged.models.head_modules import bind_any
from jpaged.models.kv_groups import dense_view
from jpaged.models.layers.linear import StepContext
from jpaged.models.mtp import MTPHead, mtp_config
from tests.tiny import CONFIG, make_params


def head_config(
    target: ModelConfig = CONFIG, changes: Mapping[str, Any] | None = None, **head: Any
) -> ModelConfig:
    """A head of Llama's layer for a model, with as many tokens unless draft_tokens says which.

    changes: of its ModelConfig. head: of its HeadConfig.
    """
    fields: dict[str, Any] = {
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": target.vocab_size,
        "aux_layers": (0, target.num_layers // 2, target.num_layers),
    }
    switches: dict[str, Any] = {"num_layers": 1, "qk_norm": False, "sliding_windows": ()}
    switches |= {"family": "llama", "eos_token_ids": (), "tie_word_embeddings": False}
    draft_head = HeadConfig(**{**fields, **head})
    return dataclasses.replace(target, draft_head=draft_head, **{**switches, **(changes or {})})


def part_of(vocab: int, count: int, seed: int = 0) -> bytes:
    """Ids of some tokens of a vocabulary, ascending."""
    ids = np.random.default_rng([9, seed]).permutation(vocab)[:count]
    return np.sort(ids).astype(np.int32).tobytes()


def counting(
    target: ModelConfig, seed: int = 0, dtype: Any = np.float32, *, exact: bool = False
) -> Params:
    """A model whose likeliest token is the one after the last (exact), or mostly so."""
    share = 0.0 if exact else 0.2
    params = make_params(seed, target, dtype)
    embed = np.asarray(params["embed"]["weight"], np.float32)
    head = np.roll(embed, 1, axis=0) * 6 / target.hidden_size
    layers = {
        i: {
            **layer,
            "attention": {**layer["attention"], "out": share * layer["attention"]["out"]},
            "mlp": {**layer["mlp"], "down": share * layer["mlp"]["down"]},
        }
        for i, layer in params["layers"].items()
    }
    own = {"norm": {"scale": jnp.ones_like(params["norm"]["scale"])}, "layers": layers}
    own["lm_head"] = {"weight": jnp.asarray(head, dtype)}
    return Params(dict(params) | own, target)


def counting_head(params: Params, *, exact: bool = False) -> Params:
    """A head for that model which guesses the token after the next, by the embedding alone (exact)
    or nearly.
    """
    config = head_config(params.config, has_embed=False)
    dtype, E = params["embed"]["weight"].dtype, config.hidden_size
    head = make_params(5, config, dtype)
    share = 0.0 if exact else 0.2
    (layer,) = head["layers"].values()
    layer = {
        **layer,
        "attention": {**layer["attention"], "out": share * layer["attention"]["out"]},
        "mlp": {**layer["mlp"], "down": share * layer["mlp"]["down"]},
    }
    fc = np.zeros((E, 3 * E), np.float32)
    fc[:, :E] = np.eye(E)  # of what goes into the first layer
    lm_head = np.roll(np.asarray(params["lm_head"]["weight"], np.float32), 1, axis=0)
    own = {"fc": {"weight": jnp.asarray(fc, dtype)}, "layers": {"0": layer}}
    own["lm_head"] = {"weight": jnp.asarray(lm_head, dtype)}
    own["norm"] = {"scale": jnp.ones(E, dtype)}
    return Params(dict(head) | own, config)


def counting_mtp(params: Params, share: float = 0.2) -> tuple[Params, Params]:
    """A model, changed to go on with the token after the last mostly, and an MTP head that knows
    it. share: of what its layers add.
    """
    fainter = functools.partial(_fainter, share)
    size, dtype = params.config.hidden_size, params["norm"]["scale"].dtype
    embed = np.asarray(params["embed"]["weight"], np.float32)
    lm_head = jnp.asarray(np.roll(embed, 1, axis=0) * 6 / size, dtype)
    own = {"norm": {"scale": jnp.ones(size, dtype)}, "lm_head": {"weight": lm_head}}
    own["layers"] = jax.tree_util.tree_map_with_path(fainter, params["layers"])
    head = make_params(5, mtp_config(params.config), dtype)
    fc = jnp.concatenate([jnp.eye(size), jnp.zeros((size, size))], 1).astype(dtype)
    ones = dict.fromkeys(("embed_norm", "hidden_norm", "norm"), own["norm"])
    layers = jax.tree_util.tree_map_with_path(fainter, head["layers"])
    mtp = dict(head) | ones | {"fc": {"weight": fc}, "layers": layers}
    return Params(dict(params) | own, params.config), Params(mtp, head.config)


def _fainter(share: float, path: Any, x: jax.Array) -> jax.Array:
    """A layer's weights, of which those that add to the hidden states add less."""
    is_last = any(getattr(key, "key", None) in ("out", "down") for key in path)
    return share * x if is_last else x


def dense_mtp_guesses(params: Params, guessing: Params, tokens: list[int], count: int) -> list[int]:
    """What an MTP head guesses after these tokens, each the likeliest, by its dense forward."""
    longest = params.config.max_position_embeddings + count
    padded = np.zeros(longest, np.int32)
    padded[: len(tokens)] = tokens
    hidden = _hidden(params, padded)
    known = list(tokens)
    for _ in range(count):
        after = np.zeros(longest, np.int32)
        after[: len(known) - 1] = known[1:]
        x, logits = _entries(params, guessing, hidden, after)
        last = len(known) - 2
        known.append(int(logits[last].argmax()))
        hidden = hidden.at[last + 1].set(x[last])
    return known[len(tokens) :]


@jax.jit
def _hidden(params: Params, tokens: Any) -> jax.Array:
    return bind(params.config, dict(params))(tokens)[0]


@jax.jit
def _entries(params: Params, guessing: Params, hidden: Any, after: Any) -> Any:
    model = bind(params.config, dict(params))
    head, context = bind_any(guessing.config, dict(guessing)), StepContext()
    assert isinstance(head, MTPHead)
    view, positions = dense_view(guessing.config, hidden), jnp.arange(after.shape[0])
    x, _ = head(model, after, positions, hidden, view, context)
    return x, head.logits(model, x, context)


def write_head(folder: Path, params: Params, *, speculators: bool = False) -> Path:
    """Its files as the head's own project publishes them, or as speculators does."""
    config = params.config
    head = config.draft_head
    assert isinstance(head, HeadConfig)
    layer = params["layers"]["0"]
    qkv, G = np.asarray(layer["attention"]["qkv"]), config.group_size
    wide = qkv.shape[-1]
    own = {
        "self_attn.q_proj": qkv[:, :G].reshape(-1, wide),
        "self_attn.k_proj": qkv[:, G].reshape(-1, wide),
        "self_attn.v_proj": qkv[:, G + 1].reshape(-1, wide),
        "self_attn.o_proj": np.asarray(layer["attention"]["out"]).reshape(config.hidden_size, -1),
        "mlp.gate_proj": layer["mlp"]["gate_up"][0],
        "mlp.up_proj": layer["mlp"]["gate_up"][1],
        "mlp.down_proj": layer["mlp"]["down"],
        "input_layernorm": layer["input_norm"]["scale"],
        "hidden_norm": layer["hidden_norm"]["scale"],
        "post_attention_layernorm": layer["post_norm"]["scale"],
    }
    prefix = "layers.0" if speculators else "midlayer"
    tensors = {f"{prefix}.{name}.weight": value for name, value in own.items()}
    tensors |= {"fc.weight": params["fc"]["weight"], "norm.weight": params["norm"]["scale"]}
    if head.has_lm_head:
        tensors["lm_head.weight"] = params["lm_head"]["weight"]
    if head.has_embed:
        tensors["embed_tokens.weight"] = params["embed"]["weight"]
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if head.draft_tokens:
        ids = np.frombuffer(head.draft_tokens, np.int32)
        tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
    }
    more: dict[str, Any] = {"draft_vocab_size": head.draft_vocab_size}
    if head.aux_layers:
        more["eagle_aux_hidden_state_layer_ids"] = list(head.aux_layers)
    if speculators:
        more |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        more |= {"speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": raw}
        more["norm_before_residual"] = head.norm_before_residual
        raw = {}
    else:
        more["architectures"] = ["LlamaForCausalLMEagle3"]
    (folder / "config.json").write_text(json.dumps(raw | more))
    return folder


def dense_guesses(params: Params, guessing: Params, tokens: list[int], count: int) -> list[int]:
    """What a head guesses after these tokens, each the likeliest."""
    config, head = guessing.config, guessing.config.draft_head
    assert isinstance(head, HeadConfig)
    padded = np.zeros((1, params.config.max_position_embeddings), np.int32)
    padded[0, : len(tokens)] = tokens
    states = _states(params, padded, head.aux_layers)
    joined = np.concatenate([wide(x[0]) for x in states], axis=-1)
    hidden = list((joined @ wide(guessing["fc"]["weight"]).T)[: len(tokens) - 1])
    embed = wide((guessing if head.has_embed else params)["embed"]["weight"])
    own = guessing if head.has_lm_head else params
    lm_head = own["embed" if own.config.tie_word_embeddings else "lm_head"]["weight"]
    ids = np.frombuffer(head.draft_tokens, np.int32)
    after, made = tokens[1:], list[int]()
    for _ in range(count):
        x = _layer(config, guessing["layers"]["0"], embed[after], np.stack(hidden))[-1]
        normed = _norm(x, guessing["norm"]["scale"], config)
        logits = wide(lm_head) @ normed
        best = int(logits.argmax())
        made.append(int(ids[best]) if len(ids) else best)
        hidden, after = [*hidden, x], [*after, made[-1]]
    return made


def guesses_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row that a model or head guesses for from now on, and its guesses."""
    seen: list[tuple[list[int], list[int]]] = []
    take = ModelDrafter.take

    def spy(drafter: ModelDrafter, plans: Any, results: Any) -> None:
        for plan, result in zip(plans, results, strict=True):
            rows = zip(plan.entries, result.num_drawn, result.tokens, strict=True)
            seen.extend((list(e.seq.token_ids), tokens[:n]) for e, n, tokens in rows)
        take(drafter, plans, results)

    monkeypatch.setattr(ModelDrafter, "take", spy)
    return seen


@functools.partial(jax.jit, static_argnames="layers")
def _states(params: Params, tokens: Any, layers: tuple[int, ...]) -> list[Any]:
    """The hidden states that go into these layers, by the dense forward."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    model = bind(params.config, dict(params))
    return model.tapped(tokens, positions, None, layers)[-1]


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(x: np.ndarray, scale: Any, config: ModelConfig) -> np.ndarray:
    mean = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean + config.rms_norm_eps) * wide(scale)


def _layer(config: ModelConfig, layer: Any, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    T, D, G = len(hidden), config.head_dim, config.group_size
    normed = _norm(hidden, layer["hidden_norm"]["scale"], config)
    pair = np.concatenate([_norm(embedded, layer["input_norm"]["scale"], config), normed], -1)
    qkv = np.einsum("kgde,te->tkgd", wide(layer["attention"]["qkv"]), pair)
    angles = np.arange(T)[:, None] / config.switches.rope_theta ** (np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
    a, b = np.split(qkv[:, :, :-1], 2, axis=-1)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    q, k, v = turned[:, :, :G], turned[:, :, G], qkv[:, :, -1]
    scores = np.einsum("tkgd,skd->kgts", q, k) / np.sqrt(D)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    o = np.einsum("kgts,skd->tkgd", weights, v)
    assert isinstance(config.draft_head, HeadConfig)
    x = normed if config.draft_head.norm_before_residual else hidden
    x = x + np.einsum("ekgd,tkgd->te", wide(layer["attention"]["out"]), o)
    gate, up = np.einsum(
        "gfe,te->gtf", wide(layer["mlp"]["gate_up"]), _norm(x, layer["post_norm"]["scale"], config)
    )
    return x + (gate / (1 + np.exp(-gate)) * up) @ wide(layer["mlp"]["down"]).T
