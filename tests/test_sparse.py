"""A model of sparse latent attention whose queries choose 6 tokens of contexts of up to 52, with
indexers and layers that take another's choice, beside a layer of plain attention: whatever happens
to a sequence, its tokens are the dense model's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import ModelConfig, SamplingParams
from jpaged.errors import ConfigError
from jpaged.models.forward import bind
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.indexer import IndexerConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.params import param_specs
from tests.tiny import EOS, Compared, assert_idle, dense_logprobs, make_prompts
from tests.tiny import engine as engine_config

CHOSEN = 6
FULL = LatentConfig(
    num_heads=4,
    latent_dim=24,
    rope_dim=8,
    content_dim=12,
    value_dim=16,
    query_latent_dim=20,
    rope=RopeConfig(dim=8, interleaved=True),
    chosen=CHOSEN,
    indexer=IndexerConfig(num_heads=12, key_dim=16),
)
SHARED = dataclasses.replace(FULL, indexer=None)
PLAIN = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(dim=16))
MLP = MLPConfig(intermediate_size=24)
LAYERS = tuple(LayerConfig(mixer=mixer, ffn=MLP) for mixer in (FULL, SHARED, PLAIN, FULL))
MODEL = ModelConfig(
    family="glm_moe_dsa",
    vocab_size=97,
    hidden_size=32,
    layers=LAYERS,
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)
CROWDED = engine_config(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)
COMPARED = Compared(MODEL, CROWDED)
SHORT = make_prompts(3, 2, 4, 3, 1, 2)
PROMPTS = make_prompts(5, 21, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def without_indexers(chosen: int | None) -> ModelConfig:
    """The same with another number of chosen tokens, or none."""
    layers = []
    for layer in MODEL.layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentConfig):
            indexer = None if chosen is None else mixer.indexer
            mixer = dataclasses.replace(mixer, chosen=chosen, indexer=indexer)
        layers.append(dataclasses.replace(layer, mixer=mixer))
    return dataclasses.replace(MODEL, layers=tuple(layers))


def test_index_keys_are_kept_beside_latents() -> None:
    """By layers with an indexer alone, whole on every device."""
    groups = kv_groups(MODEL)
    assert [group.layers for group in groups] == [(0, 3), (1,), (2,)]
    names = [[field.name for field in group.record.fields] for group in groups[:2]]
    assert names == [["latent", "rotated_key", "index_key"], ["latent", "rotated_key"]]
    assert groups[0].record["index_key"].shape == (16,)
    split = param_specs(MODEL, "tp", 2)["layers"]["0"]["latent"]["index"]
    assert all(len(spec) == 0 for spec in jax.tree.leaves(split, is_leaf=lambda x: len(x) == 0))


def test_a_choice_matters_beyond_it_and_not_before() -> None:
    """Up to as many tokens as are chosen the dense forward is that of all. Its derivative is that
    of what is chosen, and indexers have none.
    """
    tokens = jnp.asarray(PROMPTS[2])[None]

    def logits(model: ModelConfig, tree: Any) -> jax.Array:
        forward = bind(model, tree)
        return forward.logits(forward(tokens)[0])[0]

    tree = dict(COMPARED.params)
    sparse, wide, dense = (
        np.asarray(logits(model, tree))
        for model in (MODEL, without_indexers(64), without_indexers(None))
    )
    np.testing.assert_allclose(wide, dense, atol=1e-5)
    np.testing.assert_allclose(sparse[:CHOSEN], dense[:CHOSEN], atol=1e-5)
    assert np.abs(sparse[CHOSEN:] - dense[CHOSEN:]).max(axis=-1).min() > 1e-3
    gradients = jax.grad(lambda tree: jnp.sum(logits(MODEL, tree)[-1] ** 2))(tree)
    latent = gradients["layers"]["0"]["latent"]
    of_index = [np.abs(x).max() for x in jax.tree.leaves(latent.pop("index"))]
    assert max(of_index) == 0 and min(np.abs(x).max() for x in jax.tree.leaves(latent)) > 0


@pytest.mark.parametrize("is_swapped", [False, True], ids=["recomputed", "in host memory"])
def test_the_dense_models_tokens(is_swapped: bool) -> None:
    """Chunks of 16 tokens, preemptions, prefix hits, samples that share a prompt, scores."""
    store: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}
    llm = COMPARED.llm(**store if is_swapped else {})
    prompts = [*SHORT, *PROMPTS]
    COMPARED.check(prompts, llm.generate(prompts, GREEDY, use_tqdm=False))
    kind = "preemptions_swapped" if is_swapped else "preemptions_recomputed"
    assert llm.stats()[kind] > 0
    (again,) = llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens > CHOSEN
    COMPARED.check(PROMPTS[2:3], [again])
    four = llm.generate(PROMPTS[1:2], dataclasses.replace(GREEDY, n=4), use_tqdm=False)
    assert len(four[0].outputs) == 4
    COMPARED.check(PROMPTS[1:2], four)
    for prompt, scores in zip(PROMPTS[:3], llm.score(PROMPTS[:3]), strict=True):
        expected = dense_logprobs(COMPARED.params, prompt)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert_idle(llm)
    llm.close()


def test_a_hit_at_every_block() -> None:
    """Prompts that part from the first one after 1 to 9 of its blocks of 4 tokens."""
    llm = COMPARED.llm(num_blocks=96)
    first = PROMPTS[2]
    COMPARED.check([first], llm.generate([first], GREEDY, use_tqdm=False))
    for blocks in range(1, 10):
        prompt = list(first)
        prompt[4 * blocks] = (prompt[4 * blocks] + 1) % EOS
        (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert out.num_cached_tokens == 4 * blocks
        COMPARED.check([prompt], [out])
    llm.close()


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["tp2", "dp2"])
def test_on_several_devices(shape: tuple[int, int]) -> None:
    """Heads are split; index keys and choices are those of every device."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(shape), ("dp", "tp"))
    sizes: dict[str, Any] = {"data_parallel_size": shape[0], "tensor_parallel_size": shape[1]}
    llm = COMPARED.llm(mesh, **sizes, num_blocks=16, swap_space_gib=0.01, swap_min_tokens=0)
    COMPARED.check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    COMPARED.check(PROMPTS[2:3], llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False))
    assert_idle(llm)
    llm.close()


def test_guesses() -> None:
    """Rows with several tokens in a step, some of which are taken back."""
    often = dataclasses.replace(GREEDY, max_tokens=36, logit_bias={7: 12.0})
    tokens = []
    for method in (None, {"method": "ngram", "num_tokens": 3, "adaptive": False}):
        llm = COMPARED.llm(speculative=method, num_blocks=96)
        outputs = llm.generate(PROMPTS[:2], often, use_tqdm=False)
        tokens.append([out.outputs[0].token_ids for out in outputs])
        stats = llm.stats()
        llm.close()
    assert tokens[0] == tokens[1] and stats["accepted_tokens"] > 0


def test_contexts_no_longer_than_a_choice() -> None:
    """They are served by the kernel that attends to all latents."""
    wide = Compared(without_indexers(64), CROWDED)
    llm = wide.llm(num_blocks=96, max_model_len=64)
    wide.check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    llm.close()


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="needs chosen= and query_latent_dim="):
        dataclasses.replace(FULL, chosen=None)
    with pytest.raises(ConfigError, match="index_head_dim=4: below qk_rope_head_dim=8"):
        dataclasses.replace(FULL, indexer=IndexerConfig(num_heads=2, key_dim=4))
    with pytest.raises(ConfigError, match="layer 0 attends to 6 tokens that a layer before it"):
        dataclasses.replace(MODEL, layers=LAYERS[1:])
