"""Whole experts over all devices of a mesh: the tokens, numbers and bits of one device; what passes
between devices; and what is refused.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import LLM, ConfigError, EngineConfig, SamplingParams
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.layers.router import RouterConfig
from jpaged.models.params import Params
from jpaged.runtime.footprint import plan_memory
from kernels_cpu.library import unavailable
from tests.features import PROMPTS, SETTINGS, assert_as_on_one_device, everything, settings_of
from tests.tiny import assert_same, config, make_params

# The width of an expert divides by no number of devices; four of them choose each token's two.
UNEVEN = config(
    num_heads=8,
    num_kv_heads=2,
    vocab_size=300,
    num_layers=2,
    num_experts=8,
    experts_per_token=2,
    expert_size=15,
    shared_expert_size=12,
    norm_topk_prob=True,
    family="qwen2_moe",
)
EVEN = dataclasses.replace(UNEVEN, expert_size=64, hidden_size=64)
DEVICES = np.array(jax.devices())
MESHES: dict[str, Any] = {
    "data 2": Mesh(DEVICES[:2], ("data",)),
    "tp 2": Mesh(DEVICES[:2], ("tp",)),
    "data 2, tp 2": Mesh(DEVICES[:4].reshape(2, 2), ("data", "tp")),
    "data 4, tp 2": Mesh(DEVICES.reshape(4, 2), ("data", "tp")),
}


def split_of(llm: LLM) -> set[tuple[str, int]]:
    layers = llm.session.runner.compiled.setting.model.layers
    ffns = [ffn for layer in layers for ffn in layer.ffns]
    return {(ffn.split, ffn.replicas) for ffn in ffns if isinstance(ffn, ExpertsConfig)}


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params(5, UNEVEN)


@pytest.fixture(scope="module")
def wanted(params: Params) -> dict[str, Any]:
    llm = LLM(params, **vars(SETTINGS))
    found = everything(llm)
    llm.close()
    return found


@pytest.mark.parametrize("name", ["data 2", "data 2, tp 2", "data 4, tp 2"])
def test_everything_is_as_on_one_device(name: str, params: Params, wanted: dict[str, Any]) -> None:
    """Prefix hits, samples, preemption, beams, scores, snapshots and more."""
    mesh = MESHES[name]
    settings = dataclasses.replace(settings_of(mesh.shape["data"]), expert_parallel=True)
    llm = LLM(params, mesh=mesh, **vars(settings))
    assert split_of(llm) == {("expert", mesh.shape["data"])}
    assert_as_on_one_device(everything(llm), wanted)
    llm.close()


def test_replicas_end_at_different_steps(params: Params) -> None:
    """Eight steps a dispatch, of which one replica's rows need one: it goes on computing for the
    other's tokens.
    """
    lengths = [1, 19, 2, 7]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outs: list[Any] = []
    for chosen in ({}, {"mesh": MESHES["data 4, tp 2"], "expert_parallel": True}):
        llm = LLM(params, max_num_seqs=8, num_blocks=64, decode_steps=8, **chosen)
        outs.append(llm.generate(PROMPTS, sampling, use_tqdm=False))
        llm.close()
    assert_same(*outs)
    assert [len(out.outputs[0].token_ids) for out in outs[1]] == lengths


@pytest.mark.skipif(unavailable() is not None, reason="the C++ kernels cannot be compiled here")
@pytest.mark.parametrize("name", ["data 2", "data 4, tp 2"])
def test_the_bits_of_shares_of_whole_experts(name: str) -> None:
    """With deterministic=True a row's experts are added up in their order, whoever has them: the
    numbers of replicas that share experts are those of replicas that do not.
    """
    made = make_params(5, EVEN, dtype=jnp.bfloat16)
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    found: list[Any] = []
    for whole in (False, True):
        settings: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 64, "deterministic": True}
        llm = LLM(made, mesh=MESHES[name], expert_parallel=whole, **settings)
        assert llm.stats()["experts"] == "native"
        found.append(llm.generate(PROMPTS, sampling, use_tqdm=False))
        llm.close()
    tp = MESHES[name].shape.get("tp", 1)
    assert_same(*found)
    for a, b in zip(*found, strict=True):
        x, y = (np.asarray(out.outputs[0].token_logprobs) for out in (a, b))
        if tp == 1:
            np.testing.assert_array_equal(x, y)
        else:  # shares of widths are added up in another order
            np.testing.assert_allclose(x, y, atol=0.05)


def test_a_row_has_its_bits_in_any_batch() -> None:
    made = make_params(5, EVEN, dtype=jnp.bfloat16)
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 64, "deterministic": True}
    llm = LLM(made, mesh=MESHES["data 4, tp 2"], expert_parallel=True, **settings)
    together = llm.generate(PROMPTS, sampling, use_tqdm=False)
    alone = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in PROMPTS]
    llm.close()
    for a, b in zip(together, alone, strict=True):
        x, y = (out.outputs[0].token_logprobs for out in (a, b))
        np.testing.assert_array_equal(x, y)


def test_experts_of_latents_and_of_no_gates() -> None:
    """What experts give is summed over devices before it is taken back from latents; the shared
    expert, whose width divides, is not summed with it.
    """
    mixture = ExpertsConfig(
        num_experts=8,
        experts_per_token=2,
        expert_size=15,
        shared_expert_size=12,
        shared_gate=False,
        router=RouterConfig(score="sigmoid", has_bias=True, normalized=True),
        activation="relu2",
        latent_size=10,
    )
    layers = tuple(dataclasses.replace(layer, ffn=mixture) for layer in UNEVEN.layers)
    made = make_params(5, dataclasses.replace(UNEVEN, family="nemotron_h", layers=layers))
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outs = []
    for chosen in ({}, {"mesh": MESHES["data 4, tp 2"], "expert_parallel": True}):
        llm = LLM(made, max_num_seqs=8, num_blocks=64, **chosen)
        outs.append(llm.generate(PROMPTS, sampling, use_tqdm=False))
        llm.close()
    assert_same(*outs)
    for a, b in zip(*outs, strict=True):
        x, y = (out.outputs[0].token_logprobs for out in (a, b))
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_experts_in_8_and_4_bits(form: Any) -> None:
    """Scales lie with their experts."""
    made = make_params(5, dataclasses.replace(EVEN, shared_expert_size=64, head_dim=32))
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outs = []
    for chosen in ({}, {"mesh": MESHES["data 2"], "expert_parallel": True}):
        llm = LLM(made, max_num_seqs=8, num_blocks=64, quantization=form, **chosen)
        outs.append(llm.generate(PROMPTS, sampling, use_tqdm=False))
        llm.close()
    assert_same(*outs)
    for a, b in zip(*outs, strict=True):
        x, y = (out.outputs[0].token_logprobs for out in (a, b))
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_what_is_chosen_by_shape(params: Params) -> None:
    """Widths that do not divide: whole experts for each replica, unless that is forbidden."""
    tp, both = MESHES["tp 2"], MESHES["data 2, tp 2"]
    even = make_params(5, EVEN)
    cases: list[tuple[Any, Any, Any, tuple[str, int]]] = [
        (params, tp, None, ("expert", 1)),
        (params, tp, False, ("width", 1)),
        (params, both, None, ("expert", 1)),
        (even, tp, None, ("width", 1)),
        (even, tp, True, ("expert", 1)),
        (even, both, True, ("expert", 2)),
    ]
    for weights, mesh, asked, expected in cases:
        llm = LLM(weights, mesh=mesh, expert_parallel=asked, num_blocks=16, max_num_seqs=2)
        assert split_of(llm) == {expected}, (asked, expected)
        llm.close()


def test_a_device_has_its_share_of_the_weights(params: Params) -> None:
    """And new weights go where the old ones were."""
    mesh = MESHES["data 4, tp 2"]
    llm = LLM(params, mesh=mesh, expert_parallel=True, num_blocks=16, max_num_seqs=2)
    for weights in (params, make_params(6, UNEVEN)):
        llm.update_params(weights)
        served: Any = llm.session.runner.params
        ffn = served.layers[0].ffn
        shapes = [x.sharding.shard_shape(x.shape) for x in (ffn.gate_up, ffn.down)]
        assert [shape[0] for shape in shapes] == [1, 1], "eight experts on eight devices"
        devices = {s.device: s.index[0] for s in ffn.down.addressable_shards}
        assert len({str(part) for part in devices.values()}) == 8
    llm.close()


@pytest.mark.parametrize("devices", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_what_passes_between_devices(devices: int) -> None:
    """See tests/expert_facts.py: in each layer three gathers over the replicas (tokens, choices and
    weights), and one sum that leaves each replica its own; a device's experts shrink with their
    number, and nothing else grows.
    """
    flags = f"--xla_force_host_platform_device_count={devices}"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.expert_facts", str(devices // 4), "4"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[1],
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    layers = found["layers"]
    assert found["over_replicas"] == {"all-gather": 3 * layers, "reduce-scatter": layers}
    assert found["weights_of_experts"] * devices == found["weights_of_all_experts"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_parallel": True}, "there is one device"),
        (
            {"expert_parallel": True, "mesh": Mesh(DEVICES[:3], ("data",))},
            "8 experts do not divide",
        ),
        (
            {
                "expert_parallel": True,
                "mesh": MESHES["data 2"],
                "max_loras": 2,
                "lora_extra": ("experts",),
            },
            "whose adapters no other replica has",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str, params: Params) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(params, num_blocks=16, **settings)


def test_a_model_without_experts_is_refused() -> None:
    dense = make_params(1, config())
    with pytest.raises(ConfigError, match="the model has no mixture of experts"):
        LLM(dense, mesh=MESHES["data 2"], expert_parallel=True, num_blocks=16)


def test_a_plan_counts_the_share_of_experts() -> None:
    def weights(**chosen: Any) -> int:
        sizes = EngineConfig(max_num_seqs=4, num_blocks=64, data_parallel_size=4, **chosen)
        return plan_memory(EVEN, sizes, compiled=False).weights

    experts = 2 * 2 * 8 * 3 * 64 * 64  # bf16: layers, experts, matrices
    assert weights() - weights(expert_parallel=True) == experts * 3 // 4


@pytest.mark.parametrize(
    ("model", "replicas", "message"),
    [(EVEN, 1, "there is one device"), (config(), 4, "no mixture"), (EVEN, 3, "do not divide")],
)
def test_a_plan_is_refused_as_an_engine_is(model: Any, replicas: int, message: str) -> None:
    sizes = EngineConfig(num_blocks=64, data_parallel_size=replicas, expert_parallel=True)
    with pytest.raises(ConfigError, match=f"expert_parallel=True: .*{message}"):
        plan_memory(model, sizes, compiled=False)
