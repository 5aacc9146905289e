"""What steps need: XLA's own figures do not depend on the pool and stay below the bound; a plan of
them holds.
"""

import dataclasses
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import ConfigError, EngineConfig, ModelConfig, SamplingParams
from jpaged.engine.shapes import PrefillShape, shape_table
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.layers.conv import ConvConfig
from jpaged.models.layers.delta import DeltaConfig
from jpaged.models.layers.kda import KimiDeltaConfig
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.layers.mamba import MambaConfig
from jpaged.models.layers.parallel_mixer import ParallelMixerConfig
from jpaged.models.layers.rope import RopeConfig
from jpaged.models.params import param_shapes
from jpaged.models.served import served_config
from jpaged.runtime import footprint, memory
from jpaged.runtime.compiled_steps import compile_options
from jpaged.runtime.memory import Needs
from jpaged.runtime.mesh import Placement
from jpaged.runtime.runner import Runner
from jpaged.runtime.weights import ServingWeights, place_params
from jpaged.session import Session
from kernels_pallas.gated_delta import triton as delta_triton
from kernels_pallas.gated_delta import xla as delta_xla
from kernels_pallas.mamba2 import triton as mamba2_triton
from kernels_pallas.mamba2 import xla as mamba2_xla
from tests.tiny import CONFIG, config, make_params, make_prompts

HERE = Placement(mesh=None, axis=None, device=jax.devices()[0])
MIB = 1 << 20
WIDE = config(
    hidden_size=256,
    intermediate_size=768,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=16000,
)
MIXTURE = dataclasses.replace(
    WIDE, num_experts=16, experts_per_token=4, expert_size=384, intermediate_size=8
)
SHORT_CONVS = dataclasses.replace(
    WIDE, layers=[dataclasses.replace(WIDE.layers[0], mixer=ConvConfig(channels=256)), *WIDE.layers]
)


def engine(model: ModelConfig = CONFIG, **changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_logprobs": 5,
    }
    return EngineConfig(**(sizes | changes)).resolve(model)


def abstract(model: ModelConfig, dtype: str) -> Any:
    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=HERE.replicated)

    shapes = param_shapes(model)
    return bind(model, jax.tree.map(leaf, shapes, is_leaf=lambda node: isinstance(node, tuple)))


def test_largest_buckets() -> None:
    found = footprint.largest_buckets(shape_table(engine(max_num_batched_tokens=40)))
    sizes = {(b.phase, b.sampler, b.tokens, b.rows) for b in found}
    assert sizes == {
        ("prefill", None, 64, 8),
        ("sample", "full", 8, 8),
        ("decode", "full", 8, 8),
    }
    assert [b.scores for b in found if isinstance(b, PrefillShape)] == [True]


def probe(num_blocks: int | None = None) -> Runner:
    found = footprint.probe_runner(CONFIG, engine(), HERE, abstract(CONFIG, "float32"))
    assert found.config.num_blocks == 16, "as many as the widest block table names"
    if num_blocks is not None:
        config = dataclasses.replace(found.config, num_blocks=num_blocks)
        assert found.params is not None
        found = Runner(CONFIG, config, HERE, found.params)
    return found


def measured(runner: Runner) -> Needs:
    return footprint.measured(runner, sum(pool.block_bytes for pool in runner.pools))


@pytest.fixture(scope="module")
def needs() -> Needs:
    return measured(probe())


def test_they_do_not_depend_on_the_number_of_blocks(needs: Needs) -> None:
    assert measured(probe(500)).temporaries == needs.temporaries > 0


def test_the_bound_is_above_what_xla_says(needs: Needs) -> None:
    above = footprint.bound(CONFIG, engine(), "float32")
    assert needs.temporaries < above.temporaries and needs.code == 0
    assert needs.state == above.state == 4 * 8 * (2 + 97), "last token, length, counts"


def hybrid(value_dim: int) -> ModelConfig:
    """The gated delta rule in three layers: in C++, or in chunks for widths that no 32 divides."""
    delta = DeltaConfig(num_key_heads=4, num_value_heads=8, key_dim=64, value_dim=value_dim)
    attention = WIDE.layers[0]
    layers = (dataclasses.replace(attention, mixer=delta),) * 3 + (attention,)
    return dataclasses.replace(WIDE, family="qwen3_5_text", layers=layers)


def by_channel(gate_rank: int | None, value_dim: int) -> ModelConfig:
    """The same with a decay for each channel of a key."""
    delta = KimiDeltaConfig(
        num_key_heads=8, num_value_heads=8, key_dim=64, value_dim=value_dim, gate_rank=gate_rank
    )
    attention = WIDE.layers[0]
    layers = (dataclasses.replace(attention, mixer=delta),) * 3 + (attention,)
    return dataclasses.replace(WIDE, family="kimi_linear", layers=layers)


LATENT = LatentConfig(
    num_heads=16,
    latent_dim=128,
    rope_dim=32,
    content_dim=32,
    value_dim=32,
    query_latent_dim=96,
    rope=RopeConfig(dim=32),
)
LATENTS = dataclasses.replace(
    WIDE,
    family="deepseek_v3",
    layers=[dataclasses.replace(layer, mixer=LATENT) for layer in WIDE.layers],
)
MAMBA = MambaConfig(num_heads=16, head_dim=32, state_dim=64, num_groups=2)
ATTENTION = WIDE.layers[0].mixer
assert isinstance(ATTENTION, AttentionConfig)
BESIDE = ParallelMixerConfig(attention=ATTENTION, mamba=MAMBA)
MAMBAS = dataclasses.replace(
    WIDE,
    family="granitemoehybrid",
    layers=[dataclasses.replace(WIDE.layers[0], mixer=x) for x in (MAMBA, MAMBA, BESIDE, BESIDE)],
)
SHAPES = [
    (MAMBAS, "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (MAMBAS, "float32", {"max_num_batched_tokens": 2048}),
    (LATENTS, "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (LATENTS, "float32", {"max_num_seqs": 128}),
    (LATENTS, "bfloat16", {"max_num_seqs": 64, "max_loras": 4, "max_lora_rank": 16}),
    (hybrid(64), "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (hybrid(48), "float32", {"max_num_batched_tokens": 2048}),
    (by_channel(64, 64), "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (by_channel(None, 48), "float32", {"max_num_batched_tokens": 2048}),
    (WIDE, "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (WIDE, "float32", {"max_num_batched_tokens": 2048}),
    (WIDE, "float16", {"max_num_seqs": 128}),
    (dataclasses.replace(WIDE, num_layers=12), "bfloat16", {"block_size": 64}),
    (MIXTURE, "bfloat16", {"max_num_batched_tokens": 512}),
    (MIXTURE, "float32", {"max_num_seqs": 64}),
    (SHORT_CONVS, "bfloat16", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
    (SHORT_CONVS, "float32", {"max_num_batched_tokens": 2048}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype", "changes"), SHAPES)
def test_the_bound_of_larger_models(
    model: ModelConfig, dtype: str, changes: dict[str, Any]
) -> None:
    """With layers of states by the kernel that serves here."""
    sizes = engine(model, **changes)
    runner = footprint.probe_runner(model, sizes, HERE, abstract(model, dtype))
    choices = runner.compiled.setting.choices
    above = footprint.bound(model, sizes, dtype, choices=choices)
    assert 0 < measured(runner).temporaries < above.temporaries


@pytest.mark.parametrize("model", [hybrid(64), by_channel(64, 64), MAMBAS], ids=lambda x: x.family)
def test_a_plan_counts_what_the_kernel_of_states_takes(model: ModelConfig) -> None:
    """XLA's chunks and copies of the rows' states, of which kernels that change them in place have
    none; by default that of what serves here.
    """
    sizes, params = engine(model, max_num_seqs=64), abstract(model, "bfloat16")
    choices = footprint.probe_runner(model, sizes, HERE, params).compiled.setting.choices
    assert choices.delta is not None or choices.scan is not None

    def needed(**modules: Any) -> int:
        chosen = dataclasses.replace(choices, **modules)
        plan = footprint.plan_pool(model, sizes, HERE, params, choices=chosen, compiled=False)
        assert plan.needs.source == "an upper bound"
        return plan.needs.temporaries

    mixer = model.layers[0].mixer
    if isinstance(mixer, MambaConfig):
        by_xla, in_place = needed(scan=mamba2_xla), needed(scan=mamba2_triton)
        scratch = mamba2_xla.scratch_bytes(mixer.shapes, 64)
    else:
        assert isinstance(mixer, DeltaConfig | KimiDeltaConfig)
        by_xla, in_place = needed(delta=delta_xla), needed(delta=delta_triton)
        scratch = delta_xla.scratch_bytes(mixer.shapes, mixer.num_decays, 64)
    states = 4 * 64 * math.prod(mixer.keeps()[0].fields[0].shape)
    assert by_xla - in_place == scratch > states, "as many states as rows, and what chunks have"
    assert needed() in (by_xla, in_place)
    assert footprint.bound(model, sizes, "bfloat16").temporaries == by_xla
    elsewhere = footprint.plan_memory(
        model, sizes, limits=memory.Limits(total=1 << 40), compiled=False
    )
    assert elsewhere.needs.temporaries == by_xla, "nobody knows what serves there"


def test_of_a_mesh_it_is_a_share_of_everything() -> None:
    """Heads repeated, vocabulary padded: what each of four devices has, and the bound on it."""
    model, four = config(num_heads=8, vocab_size=3000), {"tensor_parallel_size": 4}
    plans = [
        jpaged.plan_memory(model, engine(model, **changes), device=jax.devices(), compiled=compiled)
        for changes, compiled in (({}, True), (four, True), (four, False))
    ]
    one, found, bounded = plans
    served = served_config(model, 4)
    assert (served.num_kv_heads, served.vocab_size) == (4, 3072)
    assert found.block_bytes == one.block_bytes // 2, "one of its four heads, not of two"
    assert found.needs.state == 4 * 8 * (2 + 3072 // 4)
    # As they were loaded, in bfloat16, before their padding and repetition: each a fourth.
    heads = 2 * 2 * (6 + 4) * 16 * model.hidden_size
    assert (found.other, one.other) == (2 * (2 * 3000 * model.hidden_size + heads) // 4, 0)
    assert one.weights / 4 < found.weights < one.weights / 3
    assert (bounded.weights, bounded.num_blocks) == (found.weights, found.num_blocks)
    where = Placement(
        mesh=Mesh(np.array(jax.devices()[:4]), ("tp",)), axis="tp", device=HERE.device
    )
    form = footprint.form_of(served, where, "float32")
    needs = footprint.measured(
        footprint.probe_runner(model, engine(model), where, form), found.block_bytes
    )
    assert 0 < needs.temporaries < bounded.needs.temporaries == found.needs.temporaries


def no_compile(probe: Any, block_bytes: int) -> Any:
    raise AssertionError("compiled")


def test_cpu_compiles_only_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    params = abstract(CONFIG, "float32")
    monkeypatch.setattr(footprint, "measured", no_compile)
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 34)
    found = footprint.plan_pool(CONFIG, engine(), HERE, params)
    assert (found.num_blocks, found.decided_by) == (8 * 16, "max_num_seqs * max_model_len")
    assert (
        found.weights == footprint.bytes_on_device(params)
        and found.limit == (1 << 34) + found.weights
    )
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * MIB)
    with pytest.raises(AssertionError, match="compiled"):
        footprint.plan_pool(CONFIG, engine(), HERE, params)


def test_the_largest_steps_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, as an engine compiles it, and none before all have begun: a step takes a minute on
    a GPU.
    """
    runner, together = probe(), threading.Barrier(3, timeout=10)
    account = SimpleNamespace(
        temp_size_in_bytes=7,
        output_size_in_bytes=3,
        alias_size_in_bytes=1,
        generated_code_size_in_bytes=0,
    )
    begun = []

    def lower(bucket: Any) -> Any:
        def compile(compiler_options: Any) -> Any:
            assert compiler_options == compile_options("cpu")
            begun.append(bucket.phase)
            together.wait()
            return SimpleNamespace(memory_analysis=lambda: account)

        return SimpleNamespace(compile=compile)

    monkeypatch.setattr(runner.compiled, "lower", lower)
    assert measured(runner).temporaries == 9
    assert sorted(begun) == ["decode", "prefill", "sample"]


def test_a_pool_that_grows_compiles_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Runner] = []
    needs = Needs(temporaries=2 * MIB, is_measured=True)
    monkeypatch.setattr(footprint, "measured", lambda probe, size: asked.append(probe) or needs)
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * MIB)
    params, settings = make_params(), EngineConfig(block_size=4, max_num_seqs=8)
    session = Session(params, settings, None, grows=True)
    session.served.bind(params)
    sizes = []
    for blocks in (3, 12, 30):
        session.pool.reserve([blocks])
        sizes.append(session.runner.config.num_blocks)
    assert sizes == [8, 16, 32] and len(asked) == 1


def test_what_is_freed_first_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_limit": 100 * MIB, "bytes_in_use": 60 * MIB}
    device = type(
        "Device",
        (),
        {"platform": "gpu", "memory_stats": lambda self: stats, "compute_capability": "9.0"},
    )()
    monkeypatch.setattr(footprint, "measured", lambda *how: memory.Needs(temporaries=5 * MIB))
    monkeypatch.setattr(footprint, "TRIAL_BYTES", 0)  # this device has less
    where = Placement(mesh=None, axis=None, device=device)
    sizes = engine(max_num_seqs=4096, attention="xla", memory_utilization=0.5)
    params = abstract(CONFIG, "float32")
    found = footprint.plan_pool(CONFIG, sizes, where, params, freed=50 * MIB)
    assert found.other == 10 * MIB - found.weights and found.decided_by == "memory"
    assert found.num_blocks == 35 * MIB // found.block_bytes
    with pytest.raises(jpaged.ConfigError, match="no KV block"):
        footprint.plan_pool(CONFIG, sizes, where, params)


def test_devices_of_a_mesh_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 34)
    params = make_params()
    whole = footprint.plan_pool(CONFIG, engine(), HERE, abstract(CONFIG, "float32"))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    where = place_params(params, engine(), mesh)
    weights = ServingWeights(where, None)
    weights.update(params)
    found = footprint.plan_pool(CONFIG, engine(), where, weights.modules(params))
    assert found.block_bytes == whole.block_bytes // 2 and found.num_blocks == whole.num_blocks
    assert whole.weights // 2 < found.weights < whole.weights, (
        "some are split, norms and embeddings are not"
    )
    assert found.limit == (1 << 33) + found.weights


def test_the_plan_holds_with_the_pool_full(monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    """Memory decides the pool; then every block of it is taken, with all features, and the arrays
    are as planned.
    """
    params = make_params()
    whole = probe().pools[0].block_bytes
    monkeypatch.setattr(memory, "free_memory", lambda: needs.total + 24 * whole + whole // 2)
    monkeypatch.setattr(footprint, "measured", lambda *how: needs)
    found = footprint.plan_pool(CONFIG, engine(), HERE, bind(CONFIG, params))
    assert (found.num_blocks, found.decided_by, found.waste) == (24, "memory", whole // 2)
    before = {id(x) for x in jax.live_arrays()}
    settings = {
        name: getattr(engine(), name)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")
    }
    llm = jpaged.LLM(params, **settings, max_logprobs=5, num_blocks=found.num_blocks)
    wanted = SamplingParams(
        max_tokens=8, ignore_eos=True, presence_penalty=0.5, logprobs=2, prompt_logprobs=1
    )
    llm.generate(make_prompts(*[16] * 9), wanted, use_tqdm=False)
    assert llm.stats()["peak_blocks_in_use"] == found.num_blocks, "to the last block"
    held = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
    assert held == found.account["pool"] + found.needs.state


def test_weights_count_before_the_default_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    device: Any = SimpleNamespace(platform="cpu")
    limits = footprint.limits_to_come(device, 0.9, weights=400)
    assert (limits.total, limits.pool) == (1000, 300)
    device = SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": 9, "bytes_in_use": 2}
    )
    limits = footprint.limits_to_come(device, 1.0, weights=4)
    assert (limits.total, limits.in_use, limits.pool) == (9, 6, None)


def test_a_plan_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModelConfig, its dict and its folder give one plan, that of an engine that has them."""
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    raw = CONFIG.to_hf() | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    sizes = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
    found = jpaged.plan_memory(tmp_path, sizes)
    assert found == jpaged.plan_memory(raw, sizes)
    named = dataclasses.replace(sizes, dtype="float32")
    assert found == jpaged.plan_memory(CONFIG, named)
    assert found.weights == 2 * jpaged.plan_memory(CONFIG, sizes).weights, "bfloat16, unless told"
    params = abstract(CONFIG, "float32")
    there = footprint.plan_pool(CONFIG, sizes.resolve(CONFIG), HERE, params)
    assert (found.num_blocks, found.needs) == (there.num_blocks, there.needs)
    limits = jpaged.Limits(total=256 << 20)
    card = jpaged.plan_memory(CONFIG, named, limits=limits, compiled=False)
    assert card.limit == 256 << 20 and card.needs.source == "an upper bound"
    with pytest.raises(ConfigError, match="no KV block of"):
        jpaged.plan_memory(CONFIG, named, limits=jpaged.Limits(total=1 << 20), compiled=False)


def test_windows_free_memory() -> None:
    """Gemma 3 12B at 128k: 40 of 48 layers see 1024 tokens, so that a sequence takes 9 GiB, not
    48.
    """
    raw = {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
    }
    model = ModelConfig.from_hf(raw)
    gib, settings = 1 << 30, EngineConfig(max_num_seqs=1, max_num_batched_tokens=2048)
    limits = memory.Limits(total=80 * gib)

    def plan(model: ModelConfig, **changes: Any) -> memory.MemoryPlan:
        config = dataclasses.replace(settings, **changes)
        return footprint.plan_memory(model, config, limits=limits, compiled=False)

    found = plan(model)
    assert found.weights == 23_532_068_352 and found.num_blocks == 2048
    local, whole = found.pool.groups
    assert (local.nbytes, whole.nbytes) == (40 * 64 * 8192, 8 * 64 * 8192) and whole.most is None
    assert local.most is not None
    assert local.most * 64 <= 1024 + 2048 + 3 * 64, "a window and a chunk"
    assert (
        found.pool.of(2048) == 2048 * whole.nbytes + local.count(2048) * local.nbytes < 9.01 * gib
    )
    full = dataclasses.replace(model, sliding_windows=(), local_rope_theta=None)
    assert plan(full).pool.of(2048) == 48 * gib
    # What a card of 80 GiB holds at once, of sequences of that length.
    wide: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 8192}
    wide["token_buckets"] = (2048, 8192)  # a CPU would take steps of 1024
    many, few = plan(model, **wide), plan(full, **wide)
    print(f"128k sequences: {many.num_blocks / 2048:.1f} with windows, {few.num_blocks / 2048:.1f}")
    assert few.num_blocks < 2048 < 4 * 2048 < many.num_blocks
