"""Which kernel serves, and the engine on each of them: interpreted, with the same tokens as
XLA's.
"""

import dataclasses
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, EngineConfig, SamplingParams, UnsupportedError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import attention_options, kv_groups
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.heads import Heads
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.layer import LayerConfig
from jpaged.models.layers.mlp import MLPConfig
from jpaged.models.layers.rope import QueryScaling, RopeConfig, Rotary
from jpaged.runtime.attention import Kernel, choose_kernel
from jpaged.runtime.choices import unfused
from kernels_cpu.library import unavailable
from kernels_pallas.paged_attention.head_write import IMPLEMENTATIONS
from kernels_pallas.paged_attention.interface import Shapes
from tests.tiny import EOS, config, make_params, make_prompts

MODEL = config(head_dim=64, num_heads=4, num_kv_heads=2, num_layers=2)
SETTINGS = {
    "dtype": "bfloat16",
    "max_model_len": 64,
    "block_size": 16,
    "num_blocks": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "seq_buckets": (8,),
}
LATENT = LatentConfig(
    num_heads=4,
    latent_dim=64,
    rope_dim=16,
    content_dim=16,
    value_dim=16,
    rope=RopeConfig(dim=16, interleaved=True),
)
LATENTS = ModelConfig(
    family="deepseek_v3",
    vocab_size=97,
    hidden_size=32,
    layers=(LayerConfig(mixer=LATENT, ffn=MLPConfig(intermediate_size=24)),) * 2,
    max_position_embeddings=128,
    eos_token_ids=(EOS,),
)
HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
BLACKWELL = [
    SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)
    for capability, kind in (("10.0", "NVIDIA B200"), ("12.0", "NVIDIA RTX PRO 6000"))
]
TURING = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="NVIDIA T4")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
ON_CPU = "xla" if unavailable() else "native"


def choose(
    device: Any, *, model: Any = MODEL, dtype: Any = jnp.bfloat16, shards: int = 1, **settings: Any
) -> Kernel:
    engine = EngineConfig(**{**SETTINGS, **settings}).resolve(model)
    (group,), (options,) = kv_groups(model), attention_options(model)
    return choose_kernel(
        group,
        options,
        engine,
        jnp.dtype(dtype),
        device,
        shards,
        unfused=unfused(model, group.layers),
    )


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_auto_takes_one_that_has_scales(kv: Any) -> None:
    assert choose(HOPPER, kv_cache_dtype=kv, block_size=64).name == "mosaic_gpu"
    assert choose(HOPPER, kv_cache_dtype=kv).name == "triton"
    assert choose(CPU, kv_cache_dtype=kv).name == ON_CPU
    assert choose(CPU, kv_cache_dtype=kv, dtype=jnp.float32).name == "xla"
    wide = dataclasses.replace(MODEL, num_kv_heads=4)
    assert choose(TPU, model=wide, kv_cache_dtype=kv).name == "tpu"
    with pytest.warns(UserWarning, match="keys and values in .* with scales, 2 KV heads of 64"):
        assert choose(TPU, model=wide, kv_cache_dtype=kv, shards=2).name == "xla"


def test_ampere_has_no_fp8() -> None:
    assert choose(AMPERE, kv_cache_dtype="int8").name == "triton"
    with pytest.warns(UserWarning, match=r"float8_e4m3fn with scales: compute capability 8\.0"):
        assert choose(AMPERE, kv_cache_dtype="fp8").name == "xla"


@pytest.mark.parametrize("sees_images", [False, True])
@pytest.mark.parametrize(
    ("device", "name"),
    [(HOPPER, "mosaic_gpu"), (AMPERE, "triton"), (TPU, "tpu"), (CPU, ON_CPU)],
    ids=str,
)
def test_auto_takes_the_best_for_the_device(device: Any, name: str, sees_images: bool) -> None:
    """Also where a token of an image sees the whole image."""
    (first,) = {layer.mixer for layer in MODEL.layers}
    assert isinstance(first, AttentionConfig)
    mixer = dataclasses.replace(first, sees_images=sees_images)
    layers = tuple(dataclasses.replace(layer, mixer=mixer) for layer in MODEL.layers)
    kernel = choose(device, model=dataclasses.replace(MODEL, layers=layers), max_embeddings=8)
    assert (kernel.name, kernel.interpret) == (name, False)
    assert kernel.sees_images == sees_images
    shapes = kernel.shapes
    assert (shapes.num_heads, shapes.num_kv_heads, shapes.head_dim) == (4, 2, 64)
    assert (shapes.block_size, shapes.num_rows, shapes.blocks_per_row) == (16, 8, 4)
    assert choose(device, shards=2).shapes.num_kv_heads == 1


def test_one_kernel_prepares_attention_on_cuda_and_cpus() -> None:
    """Where it can; elsewhere XLA does so, to the bits that it had."""
    assert choose(AMPERE).head_writer == IMPLEMENTATIONS["triton"]
    assert choose(HOPPER).head_writer == IMPLEMENTATIONS["mosaic_gpu"]
    assert choose(CPU, attention="triton").head_writer == IMPLEMENTATIONS["triton"]
    assert choose(HOPPER, attention="xla").writes_heads, "it is no matter of attention's kernel"
    assert choose(CPU, attention="triton").writes_heads, "interpreted, as that is"
    native = IMPLEMENTATIONS["native"] if ON_CPU == "native" else None
    assert choose(CPU).head_writer == native and not choose(TPU).writes_heads
    assert not choose(CPU, attention="xla").writes_heads
    assert not choose(CPU, dtype=jnp.float32).writes_heads
    assert not choose(CPU, kv_cache_dtype="int8").writes_heads
    assert not choose(HOPPER, kv_cache_dtype="int8").writes_heads
    whole = dataclasses.replace(MODEL, qk_norm=False, qk_norm_whole=True)
    assert not choose(HOPPER, model=whole).writes_heads


def test_auto_falls_to_the_next_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    told = (
        r"'xla' on NVIDIA H200.*mosaic_gpu: dtype float32.*triton: dtype float32.*attention='xla'"
    )
    with caplog.at_level(logging.INFO, "jpaged"), pytest.warns(UserWarning, match=told):
        assert choose(HOPPER, dtype=jnp.float32).name == "xla"
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == [
        "attention='auto': not mosaic_gpu",
        "attention='auto': not triton",
        "attention is not prepared by mosaic_gpu",
    ]
    assert choose(HOPPER, block_size=20).name == "triton"
    with pytest.warns(UserWarning, match="head_dim 80"):
        assert choose(HOPPER, model=config(head_dim=80)).name == "xla"
    choose(CPU, dtype=jnp.float32)  # what takes nobody by surprise is no warning
    choose(HOPPER, dtype=jnp.float32, attention="xla")


def test_the_warning_is_shown_once() -> None:
    """As the engine asks: for its memory plan, then for itself."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            choose(HOPPER, dtype=jnp.float32)
    assert len(shown) == 1


@pytest.mark.parametrize("card", BLACKWELL, ids=lambda card: card.compute_capability)
def test_blackwell_is_served_by_triton_with_a_warning(card: Any) -> None:
    """Shown once, and not where it is named."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        kernel, *again = [choose(card) for _ in range(3)]
    (said,) = shown
    assert again == [kernel, kernel]
    asked = f"'triton' on {card.device_kind}, of compute capability {card.compute_capability}"
    assert kernel.name == "triton" and kernel.writes_heads and asked in str(said.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(card, attention="triton") == kernel
        assert choose(card, attention="triton", kv_cache_dtype="fp8").name == "triton"


def test_latents_are_tritons_on_every_card() -> None:
    """On Hopper too, where nobody can do better: no warning. XLA prepares them."""
    for card in (HOPPER, AMPERE):
        for shards in (1, 2):
            kernel = choose(card, model=LATENTS, shards=shards, kv_cache_dtype="int8")
            assert (kernel.name, kernel.writes_heads) == ("triton", False)
    assert choose(HOPPER, model=LATENTS, kv_cache_dtype="fp8").name == "triton"
    narrow = dataclasses.replace(LATENT, latent_dim=24)
    layers = (dataclasses.replace(LATENTS.layers[0], mixer=narrow),)
    with pytest.warns(UserWarning, match="latents of 24 and rotated keys of 16: only 64 to 512"):
        kernel = choose(HOPPER, model=dataclasses.replace(LATENTS, layers=layers))
    assert kernel.name == "xla"


def test_latents_on_tpus_are_the_kernels() -> None:
    """Every device has the latents whole. In f32 XLA serves, and the warning says why."""
    for shards in (1, 2):
        kernel = choose(TPU, model=LATENTS, shards=shards)
        assert (kernel.name, kernel.writes_heads) == ("tpu", False)
        assert kernel.pool_layout.rows == 1 and kernel.shapes.num_heads == 4 // shards
    with pytest.warns(UserWarning, match=r"'xla' on TPU v5 lite.*one row a token, in float32"):
        assert choose(TPU, model=LATENTS, dtype=jnp.float32).name == "xla"


def test_no_triton_before_ampere() -> None:
    """Whose tensor cores have no bf16: neither attention nor what prepares it."""
    with pytest.warns(UserWarning, match=r"triton: compute capability 7\.5: only from 8\.0"):
        kernel = choose(TURING)
    assert kernel.name == "xla" and not kernel.writes_heads


def test_long_contexts_fit_a_tpu() -> None:
    """256 rows of 128k tokens in blocks of 16: a table of 8 MiB, of which two rows are at hand."""
    long = dataclasses.replace(MODEL, max_position_embeddings=1 << 17)
    sizes: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 1 << 17, "seq_buckets": (256,)}
    kernel = choose(TPU, model=long, **sizes)
    assert (kernel.name, kernel.shapes.blocks_per_row) == ("tpu", 8192)


@pytest.mark.parametrize(
    ("device", "name", "options", "reason"),
    [
        (AMPERE, "mosaic_gpu", {}, "compute capability 8.0"),
        (HOPPER, "triton", {"dtype": jnp.float32}, "dtype float32"),
        (CPU, "triton", {"model": config(head_dim=80)}, "head_dim 80"),
        (HOPPER, "tpu", {}, "not on gpu"),
        (HOPPER, "native", {}, "not on gpu"),
        (CPU, "native", {"dtype": jnp.float32}, "dtype float32"),
        (CPU, "native", {"model": config(head_dim=80)}, "head_dim 80"),
        (TPU, "mosaic_gpu", {}, "not on tpu"),
        (
            SimpleNamespace(platform="tpu", device_kind="TPU v4"),
            "tpu",
            {},
            "TPU v4: only TPU v5 and newer",
        ),
    ],
)
def test_a_named_one_does_not_fall(
    device: Any, name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"attention='{name}' cannot run: .*{reason}"):
        choose(device, attention=name, **options)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return serve("xla")


def serve(attention: Any) -> list[Any]:
    """A chunked prompt, a prefix hit, forks and ordinary rows, through prefill and decode."""
    llm = LLM(
        make_params(5, MODEL), attention=attention, **SETTINGS
    )  # no greedy token within 0.13 of another
    assert llm.stats()["attention"] == attention
    prompts = [*make_prompts(9, 3, 40), [7] * 20]
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    samples = SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=4, ignore_eos=True)
    outs = llm.generate(
        [*prompts, prompts[2]], [greedy, greedy, greedy, samples, greedy], use_tqdm=False
    )
    again = llm.generate(prompts[2], greedy, use_tqdm=False)
    assert again[0].num_cached_tokens == 32
    llm.close()
    return [[c.token_ids for c in out.outputs] for out in [*outs, *again]]


@pytest.mark.parametrize(
    "attention",
    [
        "triton",
        pytest.param("tpu", marks=pytest.mark.middle),
        pytest.param("mosaic_gpu", marks=pytest.mark.middle),
        "native",
    ],
)
def test_the_engine_on_each_kernel(attention: str, expected: list[Any]) -> None:
    if attention == "native" and (reason := unavailable()):
        pytest.skip(reason)
    assert serve(attention) == expected


def served_in_8_bits(model: ModelConfig, **settings: Any) -> list[Any]:
    """Tokens and logprobs of rows that are prefilled in chunks, forked and decoded."""
    sizes = SETTINGS | {"max_model_len": 128, "kv_cache_dtype": "int8"} | settings
    llm = LLM(make_params(5, model), **sizes)
    how = SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=5, ignore_eos=True)
    outs = llm.generate(make_prompts(9, 40), how, use_tqdm=False)
    llm.close()
    return [(c.token_ids, c.token_logprobs) for out in outs for c in out.outputs]


@pytest.mark.parametrize(
    ("attention", "settings", "apart"),
    [
        ("triton", {"dtype": "float16"}, 0.02),
        ("triton", {"dtype": "float16", "tensor_parallel_size": 2}, 0.02),
        ("tpu", {"dtype": "float32"}, 1e-4),
        ("mosaic_gpu", {"dtype": "float16", "block_size": 64}, 0.02),
    ],
    ids=["triton", "triton, two devices", "tpu", "mosaic_gpu"],
)
def test_the_engine_in_8_bits(attention: str, settings: dict[str, Any], apart: float) -> None:
    """The same tokens as XLA's; each kernel has its own places for scales. In the finest dtype that
    it takes: in bf16 this model's logprobs are up to 0.08 from those in f32, whatever the pool.
    """
    model = dataclasses.replace(MODEL, num_kv_heads=4, max_position_embeddings=128)
    ours = served_in_8_bits(model, attention=attention, **settings)
    for (tokens, found), (same, expected) in zip(
        ours, served_in_8_bits(model, attention="xla", dtype=settings["dtype"]), strict=True
    ):
        assert tokens == same
        assert np.abs(found - expected).max() < apart


SCALED = dataclasses.replace(MODEL, query_pre_attn_scalar=5.0)
CAPPED = dataclasses.replace(SCALED, attn_logit_softcapping=0.5, sliding_windows=(None, 20))
SINKS = dataclasses.replace(MODEL, attention_sinks=True, sliding_windows=(None, 20))
MODELS = {"plain": MODEL, "scaled": SCALED, "capped": CAPPED, "sinks": SINKS}


def logprobs(attention: Any, model: ModelConfig, **settings: Any) -> np.ndarray:
    """Of a prompt in two chunks, and of the token after it."""
    llm = LLM(make_params(5, model), attention=attention, **SETTINGS | settings)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    (out,) = llm.generate(make_prompts(40), sampling, use_tqdm=False)
    llm.close()
    scored = out.prompt_logprobs or []
    prompt = [next(iter(found.values())).logprob for found in scored[1:] if found]
    assert len(prompt) == 39
    return np.array([*prompt, *out.outputs[0].token_logprobs])


@pytest.fixture(scope="module")
def scaled() -> dict[ModelConfig, np.ndarray]:
    return {model: logprobs("xla", model) for model in MODELS.values()}


@pytest.mark.parametrize("model", [SCALED, CAPPED, SINKS], ids=["scaled", "capped", "sinks"])
@pytest.mark.parametrize("attention", ["triton", "tpu", "mosaic_gpu", "native"])
def test_scales_caps_and_sinks_reach_each_kernel(
    attention: str, model: ModelConfig, scaled: dict[ModelConfig, np.ndarray]
) -> None:
    """The same logprobs as XLA's up to bf16, which are far from those of the other models."""
    if attention == "native" and (reason := unavailable()):
        pytest.skip(reason)
    found = logprobs(attention, model)
    error = np.abs(found - scaled[model]).mean()
    for other in {*MODELS.values()} - {model}:
        assert error < 0.2 * np.abs(scaled[other] - scaled[model]).mean()


@pytest.mark.parametrize(("kernel", "kv"), [("triton", None), ("triton", "int8"), ("tpu", None)])
def test_latents_reach_a_kernel(kernel: Any, kv: Any) -> None:
    """The same logprobs as XLA's up to bf16, which are far from those of keys that nothing
    rotates.
    """
    ours, expected = (logprobs(name, LATENTS, kv_cache_dtype=kv) for name in (kernel, "xla"))
    still = LayerConfig(mixer=dataclasses.replace(LATENT, rope=None), ffn=LATENTS.layers[0].ffn)
    others = logprobs("xla", dataclasses.replace(LATENTS, layers=(still, still)))
    assert np.abs(ours - expected).mean() < 0.2 * np.abs(others - expected).mean()


def test_f32_on_the_tpu_kernel() -> None:
    """The one other than XLA's that takes it; head_dim 16 is packed and padded."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    settings = SETTINGS | {"dtype": "float32", "block_size": 8}
    prompts = make_prompts(5, 17)
    tokens = [
        [
            out.outputs[0].token_ids
            for out in LLM(make_params(0), attention=a, **settings).generate(prompts, greedy)
        ]
        for a in ("xla", "tpu")
    ]
    assert tokens[0] == tokens[1]


def test_queries_are_scaled_where_one_kernel_prepares_attention() -> None:
    """As where XLA does; keys are not."""
    T, K, G, D, P = 6, 2, 2, 32, 8
    shapes = Shapes(dtype=jnp.float32, head_dim=D, block_size=P, num_heads=K * G, num_kv_heads=K)
    scaling = QueryScaling(beta=0.7, length=3)
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((T, K, G + 2, D)), jnp.float32)
    pool, slots = jnp.zeros((2, P, 2 * K, D)), jnp.arange(T, dtype=jnp.int32)
    wrote: list[list[np.ndarray]] = []
    for query_scaling, writes_heads in ((scaling, True), (scaling, False), (None, False)):
        rope = RopeConfig(dim=D, query_scaling=query_scaling)
        heads = Heads(q_norm=None, k_norm=None, rotary=Rotary.at(rope, jnp.arange(T), 64))
        kernel = Kernel(
            name="triton",
            shapes=shapes,
            vectors=(shapes.head_dim, None),
            interpret=True,
            head_writer=IMPLEMENTATIONS["triton"] if writes_heads else None,
        )
        written = kernel.write(qkv, heads, pool, 0, slots, num_layers=1)
        wrote.append([np.asarray(x) for x in written])
    (fused_q, fused_kv), (q, kv), (plain_q, plain_kv) = wrote
    np.testing.assert_allclose(fused_q, q, atol=1e-6)
    np.testing.assert_allclose(fused_kv, kv, atol=1e-6)
    np.testing.assert_array_equal(kv, plain_kv)
    factors = 1 + 0.7 * np.log1p(np.arange(T) // 3)
    np.testing.assert_allclose(q, plain_q * factors[:, None, None], rtol=1e-5)


def test_a_group_is_asked_about_the_norms_of_its_layers_alone() -> None:
    """A layer that norms all its heads together keeps no other group from the fused write."""
    first, second = dataclasses.replace(MODEL, num_layers=2).layers
    assert second.mixer is not None
    whole = dataclasses.replace(second.mixer, window=8, qk_norm="whole")
    model = dataclasses.replace(MODEL, layers=(first, dataclasses.replace(second, mixer=whole)))
    engine = EngineConfig(**SETTINGS).resolve(model)
    kernels = [
        choose_kernel(
            group,
            options,
            engine,
            jnp.dtype(jnp.bfloat16),
            HOPPER,
            1,
            unfused=unfused(model, group.layers),
        )
        for group, options in zip(kv_groups(model), attention_options(model), strict=True)
    ]
    assert [kernel.writes_heads for kernel in kernels] == [True, False]
