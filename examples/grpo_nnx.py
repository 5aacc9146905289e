"""GRPO on a model of one's own, written in flax nnx: `python examples/grpo_nnx.py`.

jpaged serves the very arrays that are trained: a name map says which of the module's parameters is
which, and a config.json's fields say what the module computes, as Hugging Face names them. The
model begins with random numbers. A completion is worth the share of its tokens that are even, so
that no tokenizer and no data are needed to see it learn; token 0 ends it.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpaged

VOCAB, EMBED, FFN, HEADS, LAYERS = 32, 32, 64, 4, 2
GROUPS, SAMPLES, PROMPT_LEN, NEW_TOKENS = 8, 8, 4, 24

# What jpaged must know of the module below: its shape, as a Hugging Face config, and its names.
# What the config leaves out is Llama's default: norms' eps 1e-6, RoPE's theta 10,000, an own head.
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "eos_token_id": 0,
}
NAMES = {
    "embed.weight": ("embed.embedding", "V E"),
    "layers.{i}.input_norm.scale": ("layers.{i}.before.scale", "E"),
    "layers.{i}.attention.q": ("layers.{i}.q.kernel", "E (K G D)"),
    "layers.{i}.attention.k": ("layers.{i}.k.kernel", "E (K D)"),
    "layers.{i}.attention.v": ("layers.{i}.v.kernel", "E (K D)"),
    "layers.{i}.attention.out": ("layers.{i}.out.kernel", "(K G D) E"),
    "layers.{i}.post_norm.scale": ("layers.{i}.between.scale", "E"),
    "layers.{i}.mlp.gate": ("layers.{i}.gate.kernel", "E F"),
    "layers.{i}.mlp.up": ("layers.{i}.up.kernel", "E F"),
    "layers.{i}.mlp.down": ("layers.{i}.down.kernel", "F E"),
    "norm.scale": ("norm.scale", "E"),
    "lm_head.weight": ("head.kernel", "E V"),
}
ENGINE = jpaged.EngineConfig(
    max_model_len=32,
    max_num_seqs=64,
    seq_buckets=(64,),
    max_num_batched_tokens=256,
    token_buckets=(256,),
)
SAMPLING = jpaged.SamplingParams(n=SAMPLES, max_tokens=NEW_TOKENS)


Arrays = Mapping[str, Any]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def linear(inner: int, outer: int) -> nnx.Linear:
            return nnx.Linear(inner, outer, use_bias=False, rngs=rngs)

        self.before, self.between = (nnx.RMSNorm(EMBED, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.out = (linear(EMBED, EMBED) for _ in range(4))
        self.gate, self.up, self.down = linear(EMBED, FFN), linear(EMBED, FFN), linear(FFN, EMBED)

    def __call__(self, x: jax.Array) -> jax.Array:
        h, heads = self.before(x), (*x.shape[:2], HEADS, EMBED // HEADS)
        q, k, v = (project(h).reshape(heads) for project in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        h = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Model(nnx.Module):
    """tokens [B, L] -> logits [B, L, VOCAB]."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def rotated(x: jax.Array) -> jax.Array:
    """Rotate [B, L, H, D] by position: Llama's halves."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def served(model: Model) -> jpaged.Params:
    """Return the module's arrays as jpaged serves them."""
    return jpaged.params_from(model, NAMES, config=CONFIG)


def loss_of(model: Model, arrays: Arrays, gains: jax.Array) -> jax.Array:
    """GRPO's clipped loss; gains [B]: the advantage of each completion."""
    tokens = jnp.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1)
    logprobs = jax.nn.log_softmax(model(tokens)[:, PROMPT_LEN - 1 : -1])
    logprobs = jnp.take_along_axis(logprobs, arrays["completion_ids"][:, :, None], axis=2)
    ratio = jnp.exp(logprobs[:, :, 0] - arrays["logprobs"])
    gain = jnp.minimum(ratio * gains[:, None], jnp.clip(ratio, 0.8, 1.2) * gains[:, None])
    return -jnp.sum(gain * arrays["completion_mask"]) / jnp.sum(arrays["completion_mask"])


@nnx.jit
def update(model: Model, optimizer: nnx.Optimizer, arrays: Arrays, gains: np.ndarray) -> jax.Array:
    """Change the model by one step of the optimizer; return the loss."""
    loss, grads = nnx.value_and_grad(loss_of)(model, arrays, gains)
    optimizer.update(model, grads)
    return loss


def make(learning_rate: float = 3e-3, seed: int = 0) -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.Param)


def prompts_of(count: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(1, VOCAB, (count, PROMPT_LEN)).tolist()


def reward(completion: jpaged.CompletionOutput) -> float:
    """Return the share of its tokens, but for the one that ends it, that are even; 0 for none."""
    tokens = [token for token in completion.token_ids if token]
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def arrays_of(outs: Sequence[jpaged.RequestOutput]) -> Arrays:
    """Return the completions as arrays, of one shape in every update."""
    return jpaged.to_arrays(outs, max_prompt_len=PROMPT_LEN, max_completion_len=NEW_TOKENS)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Return those of [groups, samples], [groups * samples]."""
    gains = rewards - rewards.mean(axis=1, keepdims=True)
    return (gains / (rewards.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def train(updates: int) -> list[float]:
    """Return the mean reward of each update."""
    model, optimizer = make()
    history = list[float]()
    for step in range(updates):
        prompts = prompts_of(GROUPS, step)
        outs = jpaged.generate(served(model), prompts, SAMPLING, engine_config=ENGINE, seed=step)
        rewards = np.array([[reward(c) for c in out.outputs] for out in outs], np.float32)
        update(model, optimizer, arrays_of(outs), advantages(rewards))
        history.append(float(rewards.mean()))
    return history


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=30)
    history = train(parser.parse_args(argv).updates)
    for step in range(0, len(history), 5):
        print(f"update {step:3d}  even tokens {history[step]:.3f}")
    print(f"after {len(history)} updates {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    main()
