"""The gated delta rule in the engine, as files hold it, in 8 bits, and in training."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import jpaged
from examples import grpo
from jpaged import LLM, ConfigError, ModelConfig, Params, RequestOutput, SamplingParams
from jpaged.checkpoint.tensors import flat
from jpaged.engine.cache.content import Content
from jpaged.errors import CheckpointError, UnsupportedError
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.lora import merged, targets
from jpaged.models.quantized import is_quantized
from jpaged.models.served import served_config
from jpaged.runtime import choices
from kernels_pallas.gated_delta import IMPLEMENTATIONS
from kernels_pallas.implementation import Implementation
from tests.golden.reference import load
from tests.tiny import (
    CONFIG,
    assert_idle,
    by_name,
    dense_greedy,
    dense_logprobs,
    engine,
    engine_of,
    make_params,
    make_prompts,
)

PLAIN = dataclasses.replace(CONFIG, norm_offset=True, norm_in_f32=True)
# Of widths that the C++ kernels take.
WIDE = dataclasses.replace(PLAIN, head_dim=32, intermediate_size=64)


def hybrid(base: ModelConfig = PLAIN, **changes: Any) -> ModelConfig:
    """The tiny model with the gated delta rule in its first and last layers."""
    sizes: dict[str, Any] = {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_dim": 8,
        "value_dim": 32,
    }
    delta = DeltaConfig(**(sizes | changes))
    plain = base.layers[0]
    assert isinstance(plain.mixer, AttentionConfig)
    layer = dataclasses.replace(plain, mixer=delta)
    attention = dataclasses.replace(plain, mixer=dataclasses.replace(plain.mixer, gate=True))
    return dataclasses.replace(base, family="qwen3_5_text", layers=(layer, attention, layer))


MODEL = hybrid()
PARAMS = make_params(0, MODEL)
PROMPTS = make_prompts(5, 21, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Too few blocks for the prompts at once.
CROWDED = engine(num_blocks=24, max_num_seqs=12, seq_buckets=(12,), max_logprobs=12)


@functools.cache
def dense(prompt: tuple[int, ...]) -> list[int]:
    params = Params(PARAMS, dataclasses.replace(MODEL, eos_token_ids=()))
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        tokens += dense_greedy(params, tokens, 1)
    return tokens[len(prompt) :]


def check(outputs: list[RequestOutput], prompts: list[list[int]] = PROMPTS) -> None:
    """Tokens and logprobs of every completion are the dense model's."""
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = dense_logprobs(PARAMS, prompt + dense(tuple(prompt)))[len(prompt) - 1 : -1]
        for completion in output.outputs:
            tokens = completion.token_ids
            assert tokens == dense(tuple(prompt))
            wanted = expected[range(len(tokens)), tokens]
            np.testing.assert_allclose(completion.token_logprobs, wanted, atol=1e-4)


PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one device": ({}, {}),
    "tp 2": ({"tp": 2}, {}),
    "dp 2": ({"dp": 2}, {"data_parallel_size": 2, "num_blocks": 16}),
}


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_the_dense_models(place: str) -> None:
    """Chunks, preemptions, forks, and a second time over the blocks that the first has left."""
    axes, settings = PLACES[place]
    mesh = Mesh(np.array(jax.devices()[:2]), tuple(axes)) if axes else None
    llm = LLM(PARAMS, mesh=mesh, **vars(dataclasses.replace(CROWDED, **settings)))
    check(llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=2), use_tqdm=False))
    assert llm.stats()["preemptions_recomputed"] > 0
    outputs = [llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0] for _ in range(2)]
    check(outputs, [PROMPTS[2]] * 2)
    assert outputs[1].num_cached_tokens > 0
    assert_idle(llm)
    llm.close()


def test_adapters_on_two_devices() -> None:
    """Every weight that can have an adapter has one: the model with them merged is served."""
    rng = np.random.default_rng(4)
    pairs: dict[str, Any] = {}
    for name, target in targets(MODEL).items():
        outputs, inputs = target.sides
        pairs[name] = {
            "a": jnp.asarray(rng.standard_normal((3, *inputs)), jnp.float32) / 6,
            "b": jnp.asarray(rng.standard_normal((*outputs, 3)), jnp.float32) / 6,
        }
    assert {"layers.0.delta.q", "layers.0.delta.z", "layers.2.delta.out"} <= pairs.keys()
    adapter = jpaged.Adapter(pairs)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    llm = LLM(PARAMS, mesh=mesh, **vars(engine(max_loras=1, max_lora_rank=4)))
    llm.add_adapter("tuned", adapter)
    tuned = {"prompt_token_ids": PROMPTS[0], "adapter": "tuned"}
    answers = llm.generate([tuned, PROMPTS[1]], GREEDY, use_tqdm=False)
    whole = merged(PARAMS, adapter)
    for prompt, output, params in zip(PROMPTS, answers, (whole, PARAMS), strict=False):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(params, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(1).tolist()
        wanted = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(output.outputs[0].token_logprobs, wanted, atol=1e-4)
    llm.close()


def test_key_heads_have_to_divide() -> None:
    with pytest.raises(ConfigError, match="linear_num_key_heads=2 do not divide over 3 devices"):
        served_config(MODEL, 3)
    with pytest.raises(ConfigError, match="num_value_heads=5 is not a multiple of num_key_heads=2"):
        hybrid(num_value_heads=5)


def test_bits_do_not_depend_on_the_batch() -> None:
    """In bf16 by the C++ kernels: alone, together in chunks with preemptions, over warm blocks."""
    params = make_params(1, hybrid(WIDE), jnp.bfloat16)
    llm = LLM(params, **vars(dataclasses.replace(CROWDED, deterministic=True)))
    sampling = dataclasses.replace(GREEDY, temperature=1.0, seed=3)

    def bits(prompts: list[list[int]]) -> list[tuple[list[int], bytes]]:
        outs = [out.outputs[0] for out in llm.generate(prompts, sampling, use_tqdm=False)]
        return [(out.token_ids, out.token_logprobs.tobytes()) for out in outs]

    if llm.session.runner.config.pinned:
        pytest.skip("no C++ kernels here")
    before = llm.stats()["preemptions_recomputed"]
    together = bits(PROMPTS)
    assert llm.stats()["preemptions_recomputed"] > before
    assert bits(PROMPTS) == together
    llm.reset_prefix_cache()
    assert [bits([prompt])[0] for prompt in PROMPTS] == together
    llm.close()


def test_states_go_to_the_host_and_come_back() -> None:
    """Those of rows that were preempted, and those of prefixes that were evicted, bit by bit."""
    params = make_params(1, hybrid(WIDE), jnp.bfloat16)
    small = dataclasses.replace(CROWDED, deterministic=True, swap_space_gib=0.01, swap_min_tokens=0)
    llm = LLM(params, **vars(small))
    if llm.session.runner.config.pinned:
        pytest.skip("no C++ kernels here")

    def bits(prompts: list[list[int]]) -> list[bytes]:
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [out.outputs[0].token_logprobs.tobytes() for out in outs]

    def states() -> dict[Content, Any]:
        """What the pool has of every state that can be found, by its content."""
        (scheduler,) = engine_of(llm.session).replicas
        groups, runner = scheduler.blocks.groups, llm.session.runner
        kept = groups[0].cached
        assert [group.per for group in groups] == ["block", "token"]
        blocks, _ = runner.fetch_blocks(runner.read_blocks([list(kept.values()), []]))
        return dict(zip(kept, blocks, strict=True))

    alone = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += bits([prompt])
    llm.reset_prefix_cache()
    before = llm.stats()
    for _ in range(2):
        assert bits([*PROMPTS, *make_prompts(3, 2, 4, 3, 1, 2)])[: len(PROMPTS)] == alone
    after = llm.stats()
    assert after["preemptions_swapped"] > before["preemptions_swapped"]
    assert after["swap_out_bytes"] > 0 < after["loaded_blocks"]

    llm.reset_prefix_cache()
    assert bits(PROMPTS[2:3]) == alone[2:3]
    first, before = states(), llm.stats()
    bits(make_prompts(*[14] * 40, seed=8))
    assert not first.keys() & states().keys(), "all of them are evicted"
    assert bits(PROMPTS[2:3]) == alone[2:3]
    again, after = states(), llm.stats()
    assert after["loaded_blocks"] > before["loaded_blocks"]
    assert after["state_hits"] > before["state_hits"]
    both = first.keys() & again.keys()
    assert both
    for content in both:
        jax.tree.map(np.testing.assert_array_equal, first[content], again[content])
    llm.close()


def test_chunks_are_no_deterministic_form() -> None:
    """XLA's form serves widths that the C++ kernel does not take."""
    params = make_params(1, hybrid(value_dim=8))
    with pytest.raises(UnsupportedError, match=r"deterministic=True: the states of this model"):
        LLM(params, **vars(dataclasses.replace(CROWDED, deterministic=True)))


def test_what_stays_plain_and_in_f32() -> None:
    """quantization= takes the large products alone; A_log and dt_bias stay in f32."""
    params = make_params(2, hybrid(), jnp.bfloat16)
    llm = LLM(params, **vars(engine(quantization="int8")))
    (output,) = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
    leaves = by_name(params.config, llm.session.runner.params)
    of_delta = {name: leaf for name, leaf in leaves.items() if ".0.delta." in name}
    names = {name.rpartition(".")[2] for name, leaf in of_delta.items() if is_quantized(leaf)}
    assert names == {"qkvz", "out"}
    plain = {name: leaf for name, leaf in of_delta.items() if not is_quantized(leaf)}
    f32 = {name.rpartition(".")[2] for name, leaf in plain.items() if leaf.dtype == jnp.float32}
    assert f32 == {"log_decay", "dt_bias"}
    llm.close()


def rewritten(folder: Path, change: Any) -> Path:
    """A checkpoint folder whose tensors are changed, by name."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return folder


def one_by_one(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacked experts in a tensor each, as FP8 repacks have them."""
    made = {}
    for name, x in tensors.items():
        node, _, last = name.rpartition(".")
        for i in range(len(x) if last in ("gate_up_proj", "down_proj") else 0):
            half = len(x[i]) // 2
            parts = {"down_proj": x[i]}
            if last == "gate_up_proj":
                parts = {"gate_proj": x[i][:half], "up_proj": x[i][half:]}
            made |= {f"{node}.{i}.{p}.weight": np.ascontiguousarray(y) for p, y in parts.items()}
        if last not in ("gate_up_proj", "down_proj"):
            made[name] = x
    return made


def with_others(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With layers that guess further tokens, and the tower of images."""
    extra = np.zeros((2, 2), np.float32)
    names = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight")
    towers = [n for n in tensors if ".language_model." in n][:1]
    images = ("model.visual.patch_embed.proj.weight", "model.visual.blocks.0.attn.qkv.bias")
    return tensors | dict.fromkeys((*names, *(images if towers else ())), extra)


@pytest.mark.parametrize(
    "name", ["qwen3_5_h2x3_c16_y24", "qwen3_5_moe_h2x2_c16_y32", "qwen3_next_h4x2_c24_y16"]
)
def test_every_name_of_a_file_is_known(name: str, tmp_path: Path) -> None:
    """What checkpoints of a family hold beside the model is left out, and nothing else."""
    golden = load(name)
    plain = jpaged.load_params(golden.write(tmp_path / "plain"))
    for change in (with_others, lambda tensors: with_others(one_by_one(tensors))):
        folder = rewritten(golden.write(tmp_path / "changed"), change)
        params = jpaged.load_params(folder)
        jax.tree.map(np.testing.assert_array_equal, params, plain)
    unknown = {"model.layers.0.linear_attn.g.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"1 not in this architecture \(model.layers.0"):
        jpaged.load_params(rewritten(folder, lambda tensors: tensors | unknown))


# What Qwen's own fp8 files leave plain of the layers, beside norms and the convolution.
PLAIN_IN_FP8 = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate")
CHANNELS = {  # as llm-compressor writes it
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
}


def in_fp8(
    tensors: dict[str, np.ndarray], block: tuple[int, int], scale: str, plain: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A file's tensors with products in fp8, a scale a block of outputs and inputs, and what they
    stand for.
    """
    stored, meant = {}, {}
    for name, x in one_by_one(tensors).items():
        node = name.removesuffix(".weight")
        if ".layers." not in name or x.ndim != 2 or node.endswith(plain):
            stored[name] = meant[name] = x
            continue
        height, width = (min(size, n) for size, n in zip(block, x.shape, strict=True))
        starts = np.arange(0, x.shape[0], height), np.arange(0, x.shape[1], width)
        most = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), starts[0], 0), starts[1], 1)
        scales = (most / 448).astype(np.float32)
        of_each = np.repeat(np.repeat(scales, height, 0), width, 1)[: x.shape[0], : x.shape[1]]
        stored[name] = (x / of_each).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{node}.{scale}"] = scales
        meant[name] = stored[name].astype(np.float32) * of_each
    return stored, meant


def folders_in_fp8(name: str, way: str, tmp_path: Path) -> tuple[Path, Path]:
    """A folder in fp8 and one of what it stands for, in f32: blocks as Qwen publishes them (here of
    32 by 32, so that the parts of in_proj_qkv share some), or a scale for each output, of the
    strengths and decays too.
    """
    golden = load(name)
    block, scale, plain, config = {
        "blocks": (
            *((32, 32), "weight_scale_inv", PLAIN_IN_FP8),
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
        ),
        "channels": ((1, 1 << 20), "weight_scale", PLAIN_IN_FP8[3:], CHANNELS),
    }[way]
    stored, meant = in_fp8(golden.tensors(), block, scale, plain)
    folder = rewritten(golden.write(tmp_path / "fp8"), lambda tensors: with_others(stored))
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, rewritten(golden.write(tmp_path / "plain"), lambda tensors: meant)


@pytest.mark.parametrize("way", ["blocks", "channels"])
@pytest.mark.parametrize(
    "name", ["qwen3_5_h2x3_c16_y24", "qwen3_5_moe_h2x2_c16_y32", "qwen3_next_h4x2_c24_y16"]
)
def test_files_in_fp8(name: str, way: str, tmp_path: Path) -> None:
    folder, plain = folders_in_fp8(name, way, tmp_path)
    exact = jpaged.load_params(plain)
    kept = flat(jpaged.load_params(folder), is_quantized)
    names = {name.rpartition("layers.")[2][2:] for name, x in kept.items() if is_quantized(x)}
    of_delta = {"delta.qkvz", "delta.out"} | ({"delta.ba"} if way == "channels" else set())
    assert names >= of_delta | {"attention.qkv", "attention.out"}
    assert {name for name in names if name.startswith("delta.")} == of_delta
    for leaf, x in flat(exact).items():
        found = np.asarray(kept[leaf].whole() if is_quantized(kept[leaf]) else kept[leaf])
        np.testing.assert_allclose(found, x, rtol=1e-6, err_msg=leaf)
        assert kept[leaf].dtype == np.float32 or not leaf.endswith(("log_decay", "dt_bias"))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3_5_h2x3_c16_y24", "channels"),
        ("qwen3_5_moe_h2x2_c16_y32", "blocks"),
        ("qwen3_next_h4x2_c24_y16", "blocks"),
    ],
)
def test_files_in_fp8_are_served(name: str, way: str, tmp_path: Path) -> None:
    folder, plain = folders_in_fp8(name, way, tmp_path)
    llm, exact = LLM(folder, **vars(engine(dtype="float32"))), jpaged.load_params(plain)
    assert any(map(is_quantized, jax.tree.leaves(llm.session.served.params, is_leaf=is_quantized)))
    outs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outs, strict=False):
        tokens = output.outputs[0].token_ids
        expected = dense_logprobs(exact, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(1).tolist()
        wanted = expected[range(len(tokens)), tokens]
        np.testing.assert_allclose(output.outputs[0].token_logprobs, wanted, atol=1e-4)
    llm.close()


def test_a_config_that_is_not_supported() -> None:
    raw = json.loads(json.dumps(MODEL.to_hf()))
    assert ModelConfig.from_hf(raw) == MODEL
    with pytest.raises(ConfigError, match=r"layer_types \['sliding_attention'\] are not supported"):
        ModelConfig.from_hf(raw | {"layer_types": ["sliding_attention"] * 3})
    with pytest.raises(ConfigError, match="none is 'full_attention'"):
        ModelConfig.from_hf(raw | {"layer_types": ["linear_attention"] * 3})


@pytest.mark.train
def test_a_hybrid_learns_a_text() -> None:
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
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    losses = [float(first)]
    for _ in range(60):
        params, state, loss, _ = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 2 and losses[-1] < 0.1
    assert [int(t) for t in dense_greedy(params, tokens[0, :8].tolist(), 16)] == tokens[
        0, 8:
    ].tolist()


@pytest.mark.train
def test_grpo_on_a_hybrid() -> None:
    """The trainer's logprobs of what was drawn are the engine's after every update, and the reward
    rises: the share of tokens that are in the first half of the vocabulary.
    """
    settings = grpo.Settings(samples=8, max_tokens=8, learning_rate=1e-2, temperature=3.0)
    prompts = make_prompts(5, 9, 7, 4, seed=9)
    sampling = SamplingParams(
        n=settings.samples,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        ignore_eos=True,
        logprobs_mode="tempered",
    )
    rows = len(prompts) * settings.samples
    config = engine(max_num_seqs=rows, seq_buckets=(rows,), num_blocks=rows * 8)
    optimizer = optax.adam(settings.learning_rate)
    params, update = PARAMS, grpo.make_update(optimizer, settings)
    state = optimizer.init(params)  # pyright: ignore[reportArgumentType]
    logprobs_of = jax.jit(functools.partial(jpaged.logprobs, temperature=settings.temperature))
    rewards = []
    for step in range(16):
        outs = jpaged.generate(params, prompts, sampling, engine_config=config, seed=step)
        arrays = jpaged.to_arrays(outs, max_prompt_len=9, max_completion_len=8)
        np.testing.assert_allclose(logprobs_of(params, arrays), arrays["logprobs"], atol=3e-4)
        reward = (arrays["completion_ids"] < MODEL.vocab_size // 2).mean(1).reshape(4, -1)
        rewards.append(float(reward.mean()))
        advantages = reward - reward.mean(1, keepdims=True)
        advantages = (advantages / (reward.std(1, keepdims=True) + 1e-4)).astype(np.float32)
        params, state, _ = update(params, state, arrays, advantages.reshape(-1))
    jpaged.release(compiled=True)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


def test_the_choice_of_a_kernel() -> None:
    llm = LLM(PARAMS, **vars(engine()))
    module = llm.session.runner.compiled.setting.choices.delta
    mixer = MODEL.layers[0].mixer
    assert isinstance(mixer, DeltaConfig)
    reason = IMPLEMENTATIONS["native"].module().unsupported(mixer.shapes, None)
    name = "native" if reason is None else "xla"
    assert module is IMPLEMENTATIONS[name].module()
    stats = llm.stats()
    assert (stats["gated_delta"], stats["short_conv"]) == (name, "xla")
    assert stats["attention"] is not None and stats["experts"] is None
    llm.close()


def test_the_choice_on_other_devices() -> None:
    """One kernel a step on CUDA cards from Ampere on, for the widths that it takes."""

    def chosen(capability: str | None, key_dim: int = 16, value_dim: int = 32) -> str:
        platform = "tpu" if capability is None else "gpu"
        device = SimpleNamespace(platform=platform, compute_capability=capability or "")
        kernel, _ = choices._of_states(hybrid(key_dim=key_dim, value_dim=value_dim), device)
        assert kernel is not None
        return next(name for name, x in IMPLEMENTATIONS.items() if x is kernel)

    assert [chosen(x) for x in ("8.0", "8.9", "9.0", "12.0")] == ["triton"] * 4
    assert chosen("7.5") == chosen(None) == "xla"
    assert chosen("9.0", key_dim=24) == chosen("9.0", value_dim=8) == "xla"


def test_the_kernel_of_cuda_cards_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: through preemptions, forks and warm blocks the tokens are XLA's."""
    params = make_params(1, hybrid(key_dim=16))

    def served(name: str) -> list[tuple[list[int], np.ndarray]]:
        everywhere = {name: Implementation(f"kernels_pallas.gated_delta.{name}")}
        monkeypatch.setattr(choices.gated_delta, "IMPLEMENTATIONS", everywhere)
        llm = LLM(params, **vars(CROWDED))
        outs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, n=2), use_tqdm=False)
        outs += llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats["gated_delta"] == name and stats["preemptions_recomputed"] > 0
        llm.close()
        return [(c.token_ids, c.token_logprobs) for out in outs for c in out.outputs]

    for (tokens, found), (same, expected) in zip(served("triton"), served("xla"), strict=True):
        assert tokens == same
        np.testing.assert_allclose(found, expected, atol=1e-4)
