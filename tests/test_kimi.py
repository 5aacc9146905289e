"""Kimi Delta Attention in its two forms beside latent attention that rotates nothing, with gates,
and experts whose activations have limits: whatever happens to a sequence, its tokens are the dense
model's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import LLM, ConfigError, ModelConfig, Params, RequestOutput, SamplingParams
from jpaged.checkpoint.tensors import flat
from jpaged.models.forward import bind
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig, gated
from jpaged.models.layers.router import RouterConfig
from jpaged.models.lora import merged, targets
from jpaged.models.quantized import is_quantized
from jpaged.models.served import served_config
from tests.golden.kimi import KIMI
from tests.tiny import (
    EOS,
    assert_idle,
    by_name,
    dense_greedy,
    dense_logprobs,
    engine,
    make_params,
    make_prompts,
)

DELTA = KimiDeltaConfig(
    num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=32, conv_width=3, gate_rank=6
)
BOUND = dataclasses.replace(DELTA, gate_rank=None, lowest_decay=-5.0, conv_width=4)
LATENT = LatentConfig(
    num_heads=4, latent_dim=24, rope_dim=8, content_dim=12, value_dim=16, gate=True
)
EXPERTS = ExpertsConfig(
    num_experts=8,
    experts_per_token=3,
    expert_size=12,
    shared_expert_size=24,
    shared_gate=False,
    router=RouterConfig(
        score="sigmoid", has_bias=True, num_groups=4, chosen_groups=2, normalized=True, scale=2.5
    ),
    limit=0.05,
    shared_limit=0.02,
)
LAYERS = (
    LayerConfig(mixer=DELTA, ffn=MLPConfig(intermediate_size=24)),
    LayerConfig(mixer=BOUND, ffn=EXPERTS),
    LayerConfig(mixer=LATENT, ffn=dataclasses.replace(EXPERTS, limit=None, shared_limit=None)),
)
MODEL = ModelConfig(
    family="kimi_linear",
    vocab_size=97,
    hidden_size=32,
    layers=LAYERS,
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)
PARAMS = make_params(0, MODEL)
# Too few blocks for the prompts at once.
CROWDED = engine(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)
SHORT = make_prompts(3, 2, 4, 3, 1, 2)
PROMPTS = make_prompts(5, 21, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def llm_of(mesh: Mesh | None = None, **changes: Any) -> LLM:
    return LLM(PARAMS, mesh=mesh, **vars(dataclasses.replace(CROWDED, **changes)))


@functools.cache
def dense(prompt: tuple[int, ...]) -> list[int]:
    return dense_tokens(PARAMS, list(prompt))


def dense_tokens(params: Params, prompt: list[int]) -> list[int]:
    """Greedy tokens of the dense model; none of them ends a text."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


def check(prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Tokens and logprobs of every completion are the dense model's."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            assert tokens == dense(tuple(prompt))
            expected = dense_logprobs(PARAMS, prompt + tokens)[len(prompt) - 1 : -1]
            expected = expected[range(len(tokens)), tokens]
            np.testing.assert_allclose(completion.token_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["recomputed", "in host memory"])
def test_the_dense_models_tokens(is_swapped: bool) -> None:
    """Chunks of 16 tokens, preemptions, prefix hits, samples that share a prompt, scores."""
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
    """A prompt is found again where another one parted from it, and at its last whole block."""
    llm, (first,) = llm_of(num_blocks=96), make_prompts(32, seed=1)
    hits = []
    for shared in (32, 24, 20, 12, 4):
        for other in (91, 92):  # the first leaves a state where it parts, the second finds it
            prompt = first[:shared] + [other] * (40 - shared)
            outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
            check([prompt], outputs)
            hits.append(outputs[0].num_cached_tokens)
    assert hits[0] == 0 and hits[1::2] == [32, 24, 20, 12, 4]
    llm.close()


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["tp2", "dp2"])
def test_on_two_devices(shape: tuple[int, int]) -> None:
    """Heads of both kinds and their states are split, latents are not."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(shape), ("dp", "tp"))
    sizes: dict[str, Any] = {"data_parallel_size": shape[0], "tensor_parallel_size": shape[1]}
    llm = llm_of(mesh, **sizes, num_blocks=16)
    check(PROMPTS, llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=2), use_tqdm=False))
    check(PROMPTS[2:3], llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False))
    assert_idle(llm)
    llm.close()


def test_guesses_that_come_true_and_others() -> None:
    """States after guesses are made again of the decays of all channels."""
    often = dataclasses.replace(GREEDY, max_tokens=24, logit_bias={7: 12.0})
    found = []
    for method in (None, {"method": "ngram", "num_tokens": 3, "adaptive": False}):
        llm = llm_of(speculative=method)
        outputs = llm.generate(PROMPTS[:2], often, use_tqdm=False)
        found.append([out.outputs[0].token_ids for out in outputs])
        stats = llm.stats()
        llm.close()
    assert found[0] == found[1] and stats["accepted_tokens"] > 0


def test_adapters() -> None:
    """The large products of Kimi Delta Attention take one."""
    rng, pairs = np.random.default_rng(4), dict[str, Any]()
    for name, target in targets(MODEL).items():
        if ".kda." not in name:
            continue
        outputs, inputs = target.sides
        pairs[name] = {
            "a": jnp.asarray(rng.standard_normal((3, *inputs)), jnp.float32) / 6,
            "b": jnp.asarray(rng.standard_normal((*outputs, 3)), jnp.float32) / 6,
        }
    parts = {f"layers.{i}.kda.{part}" for i in (0, 1) for part in ("q", "k", "v", "out")}
    assert pairs.keys() == parts | {"layers.1.kda.z"}
    adapter = jpaged.Adapter(pairs)
    llm = llm_of(max_loras=1, max_lora_rank=3)
    llm.add_adapter("tuned", adapter)
    tuned = {"prompt_token_ids": PROMPTS[1], "adapter": "tuned"}
    changed, plain = llm.generate([tuned, PROMPTS[1]], GREEDY, use_tqdm=False)
    check(PROMPTS[1:2], [plain])
    tokens = changed.outputs[0].token_ids
    assert tokens == dense_tokens(merged(PARAMS, adapter), PROMPTS[1])
    assert tokens != plain.outputs[0].token_ids
    llm.close()


def test_what_stays_plain_and_in_f32() -> None:
    """quantization= takes the large products alone; A_log and dt_bias stay in f32."""
    params = make_params(2, MODEL, jnp.bfloat16)
    llm = LLM(params, **vars(engine(quantization="int8")))
    (output,) = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    leaves = by_name(params.config, llm.session.runner.params)
    of_delta = {name.partition(".kda.")[2]: x for name, x in leaves.items() if ".kda." in name}
    assert {name for name, x in of_delta.items() if is_quantized(x)} == {"qkvz", "qkv", "out"}
    plain = {name: x for name, x in of_delta.items() if not is_quantized(x)}
    assert {n for n, x in plain.items() if x.dtype == jnp.float32} == {"log_decay", "dt_bias"}
    llm.close()


def test_the_cache_holds_a_state_and_a_latent() -> None:
    """And of guesses, a decay for each channel of a key."""
    groups = kv_groups(MODEL)
    kinds = sorted((group.record.per, group.layers) for group in groups)
    assert kinds == [("block", (0,)), ("block", (1,)), ("token", (2,))]
    (record,) = DELTA.keeps()
    shapes = {field.name: field.shape for field in record.replayed}
    assert shapes["decay"] == (2, 8) and record["state"].shape == (2, 8, 32)


def test_limits_of_what_is_activated() -> None:
    rng = np.random.default_rng(0)
    gate, up = (4 * rng.standard_normal((2, 5, 7)).astype(np.float32) for _ in range(2))
    activated = np.minimum(gate / (1 + np.exp(-gate)), 0.7) * np.clip(up, -0.7, 0.7)
    found = gated("silu", jnp.asarray(gate), jnp.asarray(up), limit=0.7)
    np.testing.assert_allclose(found, activated, rtol=1e-5, atol=1e-6)
    unlimited = dataclasses.replace(EXPERTS, limit=None, shared_limit=None)
    layers = (LAYERS[0], dataclasses.replace(LAYERS[1], ffn=unlimited), LAYERS[2])
    other = Params(PARAMS, dataclasses.replace(MODEL, layers=layers))
    tokens = PROMPTS[1]
    assert np.abs(dense_logprobs(other, tokens) - dense_logprobs(PARAMS, tokens)).max() > 1e-3


@pytest.mark.train
def test_it_learns_a_text() -> None:
    tokens = jnp.asarray(make_prompts(24, seed=5))
    optimizer = optax.adam(1e-2)

    def loss_of(params: Params) -> Any:
        model = bind(MODEL, dict(params))
        hidden, _ = model(tokens[:, :-1])
        logits = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    @jax.jit
    def step(params: Params, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads

    params, state = PARAMS, optimizer.init(PARAMS)
    params, state, first, grads = step(params, state)
    still = {name for name, g in flat(grads).items() if not float(jnp.abs(g).max())}
    assert {name.rpartition(".")[2] for name in still} == {"choosing_bias"}
    losses = [float(first)]
    for _ in range(60):
        params, state, loss, _ = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 2 and losses[-1] < 0.1


LING = KIMI["ling_h4_c16"]


def test_a_config_json_of_a_hub() -> None:
    """Another name of its class, numbers without a point, limits with those of a layer that is not
    read, and a share of heads that is of the other layers.
    """
    changes: dict[str, Any] = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "kda_lower_bound": -5,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "expert_swiglu_limit_list": [0, 0, 4, 0, 0, 9],
        "share_expert_swiglu_limit_list": [0.0, 0.0, 0.0, None, 7.0],
    }
    config = ModelConfig.from_hf(LING | changes)
    mixers = [layer.mixer for layer in config.layers]
    assert [isinstance(x, KimiDeltaConfig) and x.lowest_decay for x in mixers] == [
        *(-5.0, -5.0, False, -5.0, -5.0)
    ]
    assert isinstance(mixers[2], LatentConfig) and mixers[2].query_latent_dim == 24
    ffns = [layer.ffn for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)]
    assert [(x.limit, x.shared_limit) for x in ffns] == [(4, None), (None, None), (None, 7.0)]
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("ling_h4_c16", {"no_kda_lora": False}, "no_kda_lora=False is not supported"),
        ("ling_h4_c16", {"kda_lower_bound": 1}, "lowest_decay=1.0: must be a number below 0"),
        ("ling_h4_c16", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25: head_dim=16"),
        ("ling_h4_c16", {"expert_swiglu_limit_list": [0.0]}, "1 numbers in expert_swiglu_limit"),
        (
            "ling_h4_c16",
            {"moe_shared_expert_intermediate_size": 48},
            "moe_shared_expert_intermediate_size=48: must be moe_intermediate_size=40",
        ),
        ("ling_h4_c16", {"expert_swiglu_limit_list": [-1.0] * 5}, "limit=-1.0: must be a number"),
        ("kimi_linear_h3_c16", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        (
            "kimi_linear_h3_c16",
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func='softmax' is not supported",
        ),
        (
            "kimi_linear_h4_c24_groups",
            {"layer_types": ["linear_attention"] * 4},
            "none is 'full_attention'",
        ),
        ("kimi_linear_h4_c24_groups", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ],
)
def test_configs_that_are_not_supported(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_hf(KIMI[name] | changes)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="3 heads of Kimi Delta Attention do not divide over 2"):
        served_config(
            ModelConfig.from_hf(
                KIMI["kimi_linear_h3_c16"] | {"num_attention_heads": 4, "num_key_value_heads": 4}
            ),
            2,
        )
    with pytest.raises(ConfigError, match="num_value_heads=4, num_key_heads=2"):
        dataclasses.replace(DELTA, num_value_heads=4)
