"""MTP heads that checkpoints have: read, and held to what transformers' own layer gives of them."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jpaged
from jpaged.models.forward import bind
from jpaged.models.head_modules import bind_any
from jpaged.models.kv_groups import dense_view
from jpaged.models.layers.linear import StepContext
from jpaged.models.mtp import MTPHead
from tests.golden.configs import CONFIGS
from tests.golden.make_golden_mtp import POSITIONS
from tests.golden.mtp import GUESSED, HEADS, file_tensors
from tests.golden.weights import state_dict

STORED = Path(__file__).parents[1] / "golden" / "mtp.npz"


@functools.cache
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED, allow_pickle=False) as arrays:
        config = json.loads(str(arrays["meta"]))
        assert config == {name: CONFIGS[name] for name in HEADS}, "run make_golden.py mtp"
        return {name: arrays[name] for name in arrays if name != "meta"}


def write(folder: Path, name: str) -> Path:
    """The model's files, its head's tensors among them."""
    tensors = state_dict(name, CONFIGS[name]) | file_tensors(name, CONFIGS[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | {"torch_dtype": "float32"}))
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_transformers_numbers(name: str, tmp_path: Path) -> None:
    """Logits of entries after the model's hidden states, and tokens guessed one after the other, by
    the head of a folder that is read without a tensor left over; so is the model without its head.
    """
    folder = write(tmp_path, name)
    params, guessing = jpaged.load_params(folder), jpaged.load_params(folder, mtp=True)
    assert guessing.config.is_head and not params.config.is_head
    tokens, context = stored()[f"{name}/token_ids"].tolist(), StepContext()

    model, head = bind(params.config, dict(params)), bind_any(guessing.config, dict(guessing))
    assert isinstance(head, MTPHead)

    @jax.jit
    def entries(hidden_TE: jax.Array, after_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions_T = jnp.arange(after_T.shape[0])
        view = dense_view(guessing.config, hidden_TE)
        x_TE, _ = head(model, after_T, positions_T, hidden_TE, view, context)
        return x_TE, head.logits(model, x_TE, context)

    longest = len(tokens) + GUESSED  # one compile: attention is causal
    padded = np.zeros(longest, np.int32)
    hidden_TE = jnp.zeros((longest, params.config.hidden_size))
    hidden_TE = hidden_TE.at[: len(tokens) - 1].set(stored()[f"{name}/hidden"])
    after, guesses = tokens[1:], list[int]()
    for turn in range(GUESSED):
        padded[: len(after)] = after
        x_TE, logits_TV = entries(hidden_TE, jnp.asarray(padded))
        last = len(after) - 1
        if not turn:
            expected = stored()[f"{name}/logits"]
            off = np.abs(np.asarray(logits_TV)[list(POSITIONS)] - expected).max()
            assert off < 1e-4 * np.abs(expected).max(), off
        guesses.append(int(logits_TV[last].argmax()))
        after = [*after, guesses[-1]]
        hidden_TE = hidden_TE.at[last + 1].set(x_TE[last])
    assert guesses == stored()[f"{name}/guesses"].tolist()


EQUATIONS = "deepseek_v3_h6_tied_groups"


def test_published_equations(tmp_path: Path) -> None:
    """The head of DeepSeek V3 as its papers write it (arXiv:2412.19437, 2405.04434), in float64: a
    key and a value of each head, and no product absorbed.
    """
    raw, folder = CONFIGS[EQUATIONS], write(tmp_path, EQUATIONS)
    params, guessing = jpaged.load_params(folder), jpaged.load_params(folder, mtp=True)
    rng, size = np.random.default_rng(0), raw["hidden_size"]
    after = rng.integers(0, raw["vocab_size"], 30)
    hidden = rng.standard_normal((30, size)).astype(np.float32)
    tensors = state_dict(EQUATIONS, raw) | file_tensors(EQUATIONS, raw)
    expected = published(raw, {k: x.astype(np.float64) for k, x in tensors.items()}, hidden, after)
    model, head = bind(params.config, dict(params)), bind_any(guessing.config, dict(guessing))
    assert isinstance(head, MTPHead)
    view, context = dense_view(guessing.config, jnp.asarray(hidden)), StepContext()
    at = (jnp.asarray(after, jnp.int32), jnp.arange(30), jnp.asarray(hidden))
    x_TE, _ = head(model, *at, view, context)
    logits = np.asarray(head.logits(model, x_TE, context))
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


def published(
    raw: dict[str, Any], tensors: dict[str, np.ndarray], hidden: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """Logits of entries with these hidden states, and the token after each."""
    layer = f"model.layers.{raw['num_hidden_layers']}."
    last = {k.removeprefix(layer): x for k, x in tensors.items() if k.startswith(layer)}
    T, H, C = len(after), raw["num_attention_heads"], raw["qk_nope_head_dim"]
    R, L, V = raw["qk_rope_head_dim"], raw["kv_lora_rank"], raw["v_head_dim"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ last[f"{name}.weight"].T + last.get(f"{name}.bias", 0)

    def norm(x: np.ndarray, name: str, eps: float = 1e-6) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * last[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:  # [T, heads, R]
        theta = raw["rope_parameters"]["rope_theta"]
        angles = np.arange(T)[:, None] / theta ** (np.arange(0, R, 2) / R)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return linear(silu(gate) * up, f"{name}.down_proj")

    embedded = norm(tensors["model.embed_tokens.weight"][after], "enorm")
    x = linear(np.concatenate([embedded, norm(hidden, "hnorm")], axis=-1), "eh_proj")
    taken = norm(x, "input_layernorm")
    q = linear(norm(linear(taken, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"), Q_B)
    q = q.reshape(T, H, C + R)
    latent, key = np.split(linear(taken, "self_attn.kv_a_proj_with_mqa"), [L], axis=-1)
    kv = linear(norm(latent, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
    kv = kv.reshape(T, H, C + V)
    q = np.concatenate([q[..., :C], turned(q[..., C:])], axis=-1)
    rotated = np.broadcast_to(turned(key[:, None]), (T, H, R))
    k = np.concatenate([kv[..., :C], rotated], axis=-1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(C + R)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    o = np.einsum("hts,shv->thv", weights, kv[..., C:]).reshape(T, -1)
    x = x + linear(o, "self_attn.o_proj")
    taken = norm(x, "post_attention_layernorm")
    scores = 1 / (1 + np.exp(-linear(taken, "mlp.gate")))
    biased = scores + last["mlp.gate.e_score_correction_bias"]
    by_group = biased.reshape(T, raw["n_group"], -1)
    best = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
    y = mlp(taken, "mlp.shared_experts")
    for t in range(T):
        groups = np.argsort(best[t])[-raw["topk_group"] :]
        allowed = np.full_like(by_group[t], -np.inf)
        allowed[groups] = by_group[t][groups]
        chosen = np.argsort(allowed.reshape(-1))[-raw["num_experts_per_tok"] :]
        share = scores[t, chosen] / scores[t, chosen].sum() * raw["routed_scaling_factor"]
        for expert, weight in zip(chosen, share, strict=True):
            y[t] += weight * mlp(taken[t], f"mlp.experts.{expert}")
    return norm(x + y, "shared_head.norm") @ tensors["lm_head.weight"].T


Q_B = "self_attn.q_b_proj"
