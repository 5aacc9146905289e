"""A random model of a few kilobytes, engine settings that compile quickly, and a count of what XLA
compiles.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import jpaged
from jpaged import EngineConfig, ModelConfig, Params
from jpaged.engine.engine import Engine
from jpaged.models.forward import bind
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.params import nest, param_shapes, param_table
from jpaged.models.quantized import is_quantized
from jpaged.session import Session

EOS = 96
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    qk_norm=True,
    eos_token_ids=(EOS,),
)
# One prefill and one decode shape; small blocks, so that every prompt crosses some, and chunks of
# 16 tokens.
ENGINE = EngineConfig(
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    token_buckets=(16,),
    seq_buckets=(8,),
    num_blocks=128,
    max_logprobs=5,
    max_logit_bias=4,
    max_stop_ids=4,
)
# Rows for many samples of a prompt and candidates for 4 beams; CROWDED is a pool in which they
# preempt each other.
ROOMY = dataclasses.replace(ENGINE, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)
CROWDED = dataclasses.replace(ROOMY, num_blocks=20, swap_min_tokens=0)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def config(**changes: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, **changes)


def routed(model: ModelConfig, shared_expert_size: int = 16) -> ModelConfig:
    """The same with another router: sigmoids, a choosing bias, groups where experts can be halved,
    a scale, and an expert that every token takes without a gate.
    """
    layers = []
    for layer in model.layers:
        ffn = layer.ffn
        if isinstance(ffn, ExpertsConfig):
            groups = 2 if ffn.num_experts % 2 == 0 else 1
            router = RouterConfig(
                score="sigmoid", has_bias=True, num_groups=groups, normalized=True, scale=1.5
            )
            ffn = dataclasses.replace(
                ffn, router=router, shared_gate=False, shared_expert_size=shared_expert_size
            )
        layers.append(dataclasses.replace(layer, ffn=ffn))
    return dataclasses.replace(model, family="glm4_moe", layers=tuple(layers))


def make_params(seed: int = 0, config: ModelConfig = CONFIG, dtype: Any = np.float32) -> Params:
    """Params of random numbers, scaled so that attention is sharp and greedy streams vary."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: tuple[int, ...]) -> jax.Array:
        name = jax.tree_util.keystr(path)
        x = rng.standard_normal(shape)
        if "norm" in name:
            x = 1 + 0.25 * x
        elif "bias" in name:
            x *= 0.3
        elif "embed" not in name or config.tie_word_embeddings:
            fan_in = shape[-1] if "'out'" not in name else int(np.prod(shape[1:]))
            x *= (3.0 if "lm_head" in name or "embed" in name else 1.4) / np.sqrt(fan_in)
        return jax.device_put(x.astype(dtype))  # jnp.asarray compiles a conversion a shape

    tree = jax.tree_util.tree_map_with_path(
        leaf, param_shapes(config), is_leaf=lambda node: isinstance(node, tuple)
    )
    return Params(tree, config)


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts without EOS."""
    rng = np.random.default_rng([seed, *lengths])
    return [rng.integers(0, EOS, n).tolist() for n in lengths]


# Steps as XLA names them, and the arrays that an engine begins with, made on the device.
STEPS = ("jit(prefill)", "jit(sample)", "jit(decode)")
ZEROS = "jit(zeros)"


def engine(**changes: Any) -> EngineConfig:
    return dataclasses.replace(ENGINE, **changes)


_forward = jax.jit(lambda params, tokens: _logits(params, tokens))


def _logits(params: Params, tokens: jax.Array) -> jax.Array:
    model = bind(params.config, dict(params))
    hidden, _ = model(tokens)
    return model.logits(hidden)


def by_name(config: ModelConfig, modules: Any) -> dict[str, Any]:
    """The arrays of a model's modules, by the names of its parameters."""
    names = jax.tree.leaves(bind(config, nest({name: name for name in param_table(config)})))
    leaves = jax.tree.leaves(modules, is_leaf=is_quantized)
    return dict(zip(names, leaves, strict=True))


def dense_logits(params: Params, tokens: Sequence[int]) -> np.ndarray:
    """f32 logits [len(tokens), V] of the dense forward, padded to the longest context so that it
    compiles once.
    """
    padded = np.zeros((1, params.config.max_position_embeddings), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward(params, padded))[0, : len(tokens)]


def dense_logprobs(params: Params, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """float64 log_softmax(logits / temperature) [len(tokens), V]."""
    z = dense_logits(params, tokens).astype(np.float64) / temperature
    z -= z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def dense_greedy(params: Params, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by running the whole sequence again for each; EOS ends them."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(int(dense_logits(params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def dense_tokens(params: Params, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of the dense model; none of them ends a text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


class Compared:
    """A model whose served tokens are held to its dense forward. config: of its engines."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.params, self.config = make_params(0, model), config
        self._dense: dict[tuple[int, ...], list[int]] = {}

    def llm(self, mesh: Mesh | None = None, **changes: Any) -> jpaged.LLM:
        return jpaged.LLM(
            self.params, mesh=mesh, **vars(dataclasses.replace(self.config, **changes))
        )

    def dense(self, prompt: Sequence[int], count: int) -> list[int]:
        """The dense model's greedy tokens, each computed once."""
        known = self._dense.setdefault(tuple(prompt), [])
        known += dense_tokens(self.params, [*prompt, *known], count - len(known))
        return known[:count]

    def check(
        self,
        prompts: Sequence[list[int]],
        outputs: Sequence[jpaged.RequestOutput],
        atol: float = 1e-4,
    ) -> None:
        """Tokens and logprobs of every completion are the dense model's."""
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.outputs:
                tokens = completion.token_ids
                assert tokens == self.dense(prompt, len(tokens))
                expected = dense_logprobs(self.params, prompt + tokens)[len(prompt) - 1 : -1]
                expected = expected[range(len(tokens)), tokens]
                np.testing.assert_allclose(completion.token_logprobs, expected, atol=atol)


def tokens_of(outputs: Sequence[jpaged.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_same(
    outputs: Sequence[jpaged.RequestOutput], expected: Sequence[jpaged.RequestOutput]
) -> None:
    """Every completion: tokens, text and what ended it; logprobs and scores to rounding."""
    assert len(outputs) == len(expected)
    for out, other in zip(outputs, expected, strict=True):
        assert out.prompt_token_ids == other.prompt_token_ids and (out.error is None) == (
            other.error is None
        )
        assert [c.index for c in out.outputs] == [c.index for c in other.outputs]
        for a, b in zip(out.outputs, other.outputs, strict=True):
            assert_same_completion(a, b)


def assert_same_completion(a: jpaged.CompletionOutput, b: jpaged.CompletionOutput) -> None:
    assert a.token_ids == b.token_ids
    assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
    assert len(a.token_logprobs) == len(a.token_ids)
    np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
    np.testing.assert_allclose(a.cumulative_logprob, b.cumulative_logprob, atol=1e-3)
    assert (a.score is None) == (b.score is None)
    if a.score is not None and b.score is not None:
        np.testing.assert_allclose(a.score, b.score, atol=1e-4)
    assert (a.logprobs is None) == (b.logprobs is None)
    for top, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
        assert list(top) == list(other) and [x.rank for x in top.values()] == [
            x.rank for x in other.values()
        ]
        np.testing.assert_allclose(
            [x.logprob for x in top.values()], [x.logprob for x in other.values()], atol=1e-4
        )


def assert_idle(llm: jpaged.LLM) -> None:
    """Nothing unfinished, no block or device row held, and the maps are true, those of what the
    host keeps too.
    """
    assert not llm.has_unfinished() and llm.session.engine.requests == {}
    stats = llm.stats()
    assert stats["blocks_in_use"] == 0 and stats["host_blocks_in_use"] <= stats["host_blocks"]
    for replica in llm.session.engine.replicas:
        replica.check_integrity()  # that no row of the device leaked too


def engine_of(session: Session) -> Engine:
    """The only one."""
    assert isinstance(session.engine, Engine)
    return session.engine


@contextlib.contextmanager
def compile_cache(folder: Path) -> Iterator[None]:
    """Steps whose like was compiled inside such a block before are loaded from `folder`: ten times
    as fast.
    """
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """Names of the functions that XLA compiles inside the block."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILE_EVENT:
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
