"""A model of latent attention, some layers with experts, beside a layer of plain attention:
whatever happens to a sequence, its tokens are the dense model's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import ModelConfig, SamplingParams, initial_lora, merged
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.runtime.choices import choose
from jpaged.runtime.kv_cache import pool_specs
from jpaged.runtime.mesh import Placement
from tests.tiny import EOS, Compared, assert_idle, dense_logprobs, dense_tokens, make_prompts
from tests.tiny import engine as engine_config

LATENT = LatentConfig(
    num_heads=4,
    latent_dim=24,
    rope_dim=8,
    content_dim=12,
    value_dim=16,
    query_latent_dim=20,
    rope=RopeConfig(dim=8, interleaved=True),
)
DIRECT = dataclasses.replace(LATENT, query_latent_dim=None, bias=True)
PLAIN = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(dim=16))
EXPERTS = ExpertsConfig(
    num_experts=8,
    experts_per_token=3,
    expert_size=12,
    shared_expert_size=24,
    shared_gate=False,
    router=RouterConfig(
        score="sigmoid", has_bias=True, num_groups=4, chosen_groups=2, normalized=True, scale=2.5
    ),
)
MLP = MLPConfig(intermediate_size=24)
LAYERS = (
    LayerConfig(mixer=LATENT, ffn=MLP),
    LayerConfig(mixer=LATENT, ffn=EXPERTS),
    LayerConfig(mixer=PLAIN, ffn=MLP),
    LayerConfig(mixer=DIRECT, ffn=EXPERTS),
)
MODEL = ModelConfig(
    family="deepseek_v3",
    vocab_size=97,
    hidden_size=32,
    layers=LAYERS,
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)
CROWDED = engine_config(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)
COMPARED = Compared(MODEL, CROWDED)
PARAMS, llm_of, check = COMPARED.params, COMPARED.llm, COMPARED.check
SHORT = make_prompts(3, 2, 4, 3, 1, 2)
PROMPTS = make_prompts(5, 21, 40, 33)
PARTS = tuple(f"latent.{x}" for x in ("q_a", "q", "kv", "out", "up"))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_pool_holds_one_latent_a_token() -> None:
    """Whole on every device, with a scale for the latent and one for its key in 8 bits."""
    groups = kv_groups(MODEL)
    assert [(g.layers, g.vectors, g.window) for g in groups] == [
        ((0, 1, 3), (24, 8), None),
        ((2,), (16, 16), None),
    ]
    settings = CROWDED.resolve(MODEL)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    places = (None, None), (mesh, "tp")
    for kv_dtype, token in ((None, 32 * 4), ("int8", 32 + 2 * 4)):
        config = dataclasses.replace(settings, kv_cache_dtype=kv_dtype)
        for where, axis in places:
            place = Placement(mesh=where, axis=axis, device=jax.devices()[0])
            kernels = choose(MODEL, config, place, jnp.float32).attention
            latents, keys = pool_specs(MODEL, config, place, kernels, 24, jnp.float32)
            block = 3 * settings.block_size * token
            assert latents.block_bytes == latents.device_block_bytes == block
            assert keys.device_block_bytes == keys.block_bytes // place.axis_size


@pytest.mark.parametrize("is_swapped", [False, True], ids=["recomputed", "in host memory"])
def test_the_dense_models_tokens(is_swapped: bool) -> None:
    """Chunks of 16 tokens, preemptions, prefix hits, samples that share a prompt."""
    store: dict[str, Any] = {"swap_space_gib": 0.01, "swap_min_tokens": 0}
    llm = llm_of(**store if is_swapped else {})
    prompts = [*SHORT, *PROMPTS]
    check(prompts, llm.generate(prompts, GREEDY, use_tqdm=False))
    kind = "preemptions_swapped" if is_swapped else "preemptions_recomputed"
    assert llm.stats()[kind] > 0
    four = llm.generate(PROMPTS[1:2], dataclasses.replace(GREEDY, n=4), use_tqdm=False)
    assert len(four[0].outputs) == 4
    check(PROMPTS[1:2], four)
    for prompt, scores in zip(PROMPTS[:3], llm.score(PROMPTS[:3]), strict=True):
        expected = dense_logprobs(PARAMS, prompt)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert_idle(llm)
    llm.close()


def test_a_hit_at_every_block() -> None:
    """Prompts that part from the first one after 1 to 9 of its blocks of 4 tokens."""
    llm = llm_of(num_blocks=96)
    first = PROMPTS[2]
    check([first], llm.generate([first], GREEDY, use_tqdm=False))
    for blocks in range(1, 10):
        prompt = list(first)
        prompt[4 * blocks] = (prompt[4 * blocks] + 1) % EOS
        (out,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert out.num_cached_tokens == 4 * blocks
        check([prompt], [out])
    llm.close()


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=["tp2", "dp2", "dp2_tp2"])
def test_on_several_devices(shape: tuple[int, int]) -> None:
    """Heads are split and latents are not; host memory keeps them once more."""
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("dp", "tp"))
    sizes: dict[str, Any] = {"data_parallel_size": shape[0], "tensor_parallel_size": shape[1]}
    llm = llm_of(mesh, **sizes, num_blocks=16, swap_space_gib=0.01, swap_min_tokens=0)
    check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    check(PROMPTS[2:3], llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False))
    assert_idle(llm)
    llm.close()


def test_guesses_beams_and_snapshots() -> None:
    """Guesses that come true and others; beams as an engine without guesses has them."""
    often = dataclasses.replace(GREEDY, max_tokens=36, logit_bias={7: 12.0})
    found = []
    for how in (None, {"method": "ngram", "num_tokens": 3, "adaptive": False}):
        llm = llm_of(speculative=how, deterministic=True)
        outputs = llm.generate(PROMPTS[:2], often, use_tqdm=False)
        beams = llm.beam_search(PROMPTS[:2], beam_width=3, max_tokens=6)
        ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:2]]
        ended = {out.request_id: out for _ in range(4) for out in llm.step()}
        llm.restore(llm.snapshot())
        while llm.has_unfinished():
            ended |= {out.request_id: out for out in llm.step()}
        check(PROMPTS[:2], [ended[i] for i in ids])
        completions = [c for out in (*outputs, *beams) for c in out.outputs]
        found.append([c.token_ids for c in completions])
        stats = llm.stats()
        llm.close()
    assert found[0] == found[1] and stats["accepted_tokens"] > 0


def a_lora(seed: int, parts: tuple[str, ...] = PARTS, rank: int = 3) -> dict[str, Any]:
    """Pairs of these parts of latent attention, both sides of which change something."""
    lora = initial_lora(MODEL, rank, jax.random.key(seed), parts=parts)
    keys = jax.random.key(seed + 100)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(keys, x.shape), lora)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("parts", [PARTS, PARTS[-1:]], ids=["every product", "what is absorbed"])
def test_adapters(parts: tuple[str, ...], devices: int) -> None:
    """Two adapters and rows without one in the same steps, more slots than that, prompts in chunks
    and prefixes that are found: the tokens of merged weights.
    """
    loras = [a_lora(0, parts), a_lora(1, parts, rank=2), None]
    llm = llm_of(max_loras=3, max_lora_rank=3, num_blocks=96, tensor_parallel_size=devices)
    for name, lora in zip("ab", loras, strict=False):
        llm.add_adapter(name, lora)
    prompts = [PROMPTS[i] for i in (1, 1, 1, 2, 2, 2)]
    asked: list[Any] = [
        {"prompt_token_ids": prompt, "adapter": name} if name else prompt
        for prompt, name in zip(prompts, ["a", "b", None] * 2, strict=True)
    ]
    weights = [PARAMS if lora is None else merged(PARAMS, lora) for lora in loras] * 2
    for _ in range(2):
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        found = [output.outputs[0].token_ids for output in outputs]
        for prompt, tokens, params in zip(prompts, found, weights, strict=True):
            assert tokens == dense_tokens(params, prompt, len(tokens))
        assert found[0] != found[2] != found[1], "they change nothing"
    assert llm.stats()["cached_tokens"] > 0
    assert_idle(llm)
    llm.close()


def test_bits_do_not_depend_on_a_slot() -> None:
    """Nor on what adapters other rows have, in steps of one size."""
    llm = llm_of(max_loras=3, max_lora_rank=3, deterministic=True)
    for name, seed in zip("abc", (0, 1, 2), strict=True):
        llm.add_adapter(name, a_lora(seed))
    found = []
    for others in (["b", None], [None, None], ["c", "b"]):
        rows: list[Any] = [{"prompt_token_ids": PROMPTS[1], "adapter": name} for name in others]
        rows.append({"prompt_token_ids": PROMPTS[1], "adapter": "a"})
        if len(found) == 1:  # from now on in another slot
            llm.remove_adapter("a")
            llm.generate(rows[:1], GREEDY, use_tqdm=False)
            llm.generate([rows[0] | {"adapter": "c"}], GREEDY, use_tqdm=False)
            llm.add_adapter("a", a_lora(0))
        (output,) = llm.generate(rows, GREEDY, use_tqdm=False)[-1:]
        completion = output.outputs[0]
        found.append((completion.token_ids, completion.token_logprobs.tobytes()))
    assert found[0] == found[1] == found[2]
    llm.close()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_latents_in_8_bits(kv_dtype: Any) -> None:
    """Where rounding turns a choice of experts, a token is far off: hence the median."""
    llm = llm_of(kv_cache_dtype=kv_dtype)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
        expected = expected[range(len(tokens)), tokens]
        difference = np.abs(output.outputs[0].token_logprobs - expected)
        assert 0 < np.median(difference) < (0.05 if kv_dtype == "int8" else 0.3)
    llm.close()
