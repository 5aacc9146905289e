"""Tiny models of every family against transformers: logits of the dense forward, greedy tokens of
the paged engine.

`pytest -s tests/models/test_golden.py` prints the table of differences.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpaged
from jpaged import EngineConfig, Params, SamplingParams
from jpaged.models.forward import bind
from jpaged.models.layers.attention import AttentionConfig
from jpaged.models.params import nest, param_table
from jpaged.models.rope_scaling import RopeScaling
from tests.golden.configs import CONFIGS
from tests.golden.make_golden_seeds import STORED
from tests.golden.reference import Golden, Model, load, load_seeds

# Blocks of 8 and chunks of 32 tokens: the prompts of 5, 40 and 90 tokens share steps and span
# several.
ENGINE = EngineConfig(
    block_size=8,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    token_buckets=(32,),
    seq_buckets=(8,),
    num_blocks=48,
)


# Three compiled steps each: these four go through every family and kind of attention and rope, with
# the other two through every GQA ratio and head_dim.
QUICK = {
    "qwen3_g7_d80",
    "qwen2_g2_d64_window_mix",
    "llama_g4_d64_llama3",
    "mistral_g7_d32_window_yarn",
    "gemma3_g2_d32_linear",
}
MIDDLE = {
    "qwen3_g2_d32_tied",
    "llama_g1_d128_bias",
    "gemma2_g2_d64_capped",
    "phi3_g2_d64_longrope_tied",
    "smollm3_g4_d64_nope_tied",
    "granite_g2_d32_tied",
    "olmo3_g2_d64_window_yarn",
    "qwen3_moe_g2_d32_normed",
    "qwen2_moe_g2_d32_shared",
    "mixtral_g4_d32_window_tied",
    "gpt_oss_g2_d32_yarn",
    "qwen3_5_h2x3_c16_y24",
    "olmo_hybrid_h3x1_c16_y40",
    "lfm2_c64_w4_bias_tied",
    "nemotron_h_latent_experts",
    "ministral3_g4_d64_mscale_tied",
    "hunyuan_g2_d32_alpha",
    "glm4_moe_g4_d32_groups",
    "deepseek_v3_h4_l32_groups",
    "gemma4_shared_keys",
    "mimo_d48_v32",
    "kimi_linear_h3_c16",
    "ling_h4_c16",
}
# Other weights whose tokens are compared in CI.
QUICK_SEEDS = {"qwen3_g2_d32_tied/1", "gemma2_g2_d64_capped/1", "qwen3_5_h2x3_c16_y24/1"}
# Whatever a family does to heads that a mesh splits; the others do nothing that these do not.
SPLIT = [
    "deepseek_v3_h4_l32_groups",
    "gemma2_g2_d64_capped",
    "gemma3_g2_d32_linear",
    "gpt_oss_g2_d32_yarn",
    "granite_g2_d32_tied",
    "glm4_moe_g4_d32_groups",
    "falcon_h1_g2_norm_before",
    "granite_hybrid_h6_p24_n16",
    "granite_hybrid_experts_g2_tied",
    "kimi_linear_h4_c24_groups",
    "lfm2_c96_w3",
    "ling_h4_c16",
    "llama_g2_d64_mlp_bias",
    "nemotron_h_experts_g2",
    "minimax_m2_g2_d32",
    "olmo2_g4_d32_bias",
    "mixtral_g2_d64",
    "olmo3_g2_d64_window_yarn",
    "phi3_g2_d64_longrope_tied",
    "qwen2_moe_g2_d32_shared",
    "qwen3_moe_g2_d32_normed",
    "qwen3_next_h4x2_c24_y16",
    "smollm3_g2_d32_bias_window",
]


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, object]]]:
    rows: dict[str, dict[str, object]] = {}
    yield rows
    heads = ("max |logit diff|", "of max |logit|", "bf16 rms / transformers")
    print(f"\n{'config':28s} {heads[0]:>16s} {heads[1]:>14s} {heads[2]:>24s}  tokens equal")
    for name, row in sorted(rows.items()):
        cells = [str(row.get(key, "-")) for key in ("diff", "scale", "bf16", "tokens")]
        print(f"{name:28s} {cells[0]:>16s} {cells[1]:>14s} {cells[2]:>24s}  {cells[3]}")


@functools.cache
def golden(name: str) -> Golden:
    return load(name)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def params(name: str, tmp_path_factory: pytest.TempPathFactory) -> Params:
    return jpaged.load_params(golden(name).write(tmp_path_factory.mktemp(name)))


def logits(params: Params, prompts: list[list[int]]) -> list[np.ndarray]:
    """f32 logits [T, V] of each prompt, in one padded batch: what comes after a token cannot change
    its logits.
    """
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        model = bind(params.config, dict(params))
        hidden, _ = model(tokens)
        return model.logits(hidden)

    out = np.asarray(forward(params, tokens))
    assert out.dtype == np.float32
    return [out[i, : len(prompt)] for i, prompt in enumerate(prompts)]


def longrope(params: Params) -> RopeScaling | None:
    """The scaling of the first layer that rotates, if the length of a sequence counts in it."""
    mixers = [layer.mixer for layer in params.config.layers]
    ropes = [m.rope for m in mixers if isinstance(m, AttentionConfig) and m.rope is not None]
    scaling = ropes[0].scaling if ropes else None
    return scaling if scaling is not None and scaling.kind == "longrope" else None


def stored_positions(params: Params, golden: Model) -> tuple[np.ndarray, np.ndarray]:
    """(ours, transformers') f32 logits [R, V] of every stored position."""
    prompts = [prompt.token_ids for prompt in golden.prompts]
    if longrope(params):  # the length of the whole input counts
        ours = [logits(params, [prompt])[0] for prompt in prompts]
    else:
        ours = logits(params, prompts)
    picked = [z[prompt.positions] for z, prompt in zip(ours, golden.prompts, strict=True)]
    return np.concatenate(picked), np.concatenate([prompt.logits for prompt in golden.prompts])


def test_logits_f32(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    ours, theirs = stored_positions(params, golden(name))
    difference, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    table.setdefault(name, {}).update(diff=f"{difference:.1e}", scale=f"{difference / scale:.1e}")
    assert difference <= 1e-5 * scale
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))


def check_greedy(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    """Twice: the second time over the blocks that the first has left in the prefix cache."""
    prompts = golden(name).prompts
    groups = [(ENGINE, prompts)]
    if scaling := longrope(params):
        original = scaling.original_max_position
        short = dataclasses.replace(ENGINE, max_model_len=original)
        groups = [(short, prompts[:2]), (ENGINE, prompts[2:])]
    sampling = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy))
    equal = []
    for engine, mine in groups:
        for run in range(2):
            asked = [prompt.token_ids for prompt in mine]
            outputs = jpaged.generate(params, asked, sampling, engine_config=engine)
            tokens = [output.outputs[0].token_ids for output in outputs]
            equal += [a == prompt.greedy for a, prompt in zip(tokens, mine, strict=True)]
            assert (outputs[-1].num_cached_tokens >= 8) == (run == 1)
    table.setdefault(name, {})["tokens"] = "yes" if all(equal) else equal
    assert all(equal)


@pytest.mark.parametrize(
    "name",
    [*sorted(QUICK), *(pytest.param(name, marks=pytest.mark.middle) for name in sorted(MIDDLE))],
    indirect=True,
)
def test_greedy_tokens(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    check_greedy(name, params, table)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - QUICK - MIDDLE), indirect=True)
def test_more_greedy_tokens(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    check_greedy(name, params, table)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n.startswith("olmo2") else pytest.mark.middle) for n in SPLIT],
    indirect=True,
)
def test_greedy_tokens_of_two_devices(name: str, params: Params) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    prompts = golden(name).prompts[2:]  # the longest: chunks, windows, the long rope
    sampling = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy))
    asked = [prompt.token_ids for prompt in prompts]
    outputs = jpaged.generate(params, asked, sampling, engine_config=ENGINE, mesh=mesh)
    assert [out.outputs[0].token_ids for out in outputs] == [prompt.greedy for prompt in prompts]


def test_logits_bf16(name: str, tmp_path: Path, table: dict[str, dict[str, object]]) -> None:
    """As far from the f32 reference as transformers' own bfloat16 model is, and no further.

    Of mixtures in the median: where rounding turns a choice of experts, all of a token's logits
    change, in either.
    """
    reference = golden(name)
    params = jpaged.load_params(reference.write(tmp_path, "bfloat16"))
    specs = jax.tree.leaves(nest(param_table(params.config)))
    dtypes = ["float32" if spec.in_f32 else "bfloat16" for spec in specs]
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(params)] == dtypes
    ours, theirs = stored_positions(params, reference)
    difference = ours - theirs
    if params.config.num_experts:
        rounded = np.concatenate([prompt.logits_bf16 for prompt in reference.prompts])
        medians = [float(np.median(np.abs(d))) for d in (difference, rounded - theirs)]
        table.setdefault(name, {})["bf16"] = f"{medians[0]:.4f} / {medians[1]:.4f}"
        assert 0 < medians[0] <= 1.1 * medians[1]
        return
    rms = float(np.sqrt(np.mean(difference**2)))
    table.setdefault(name, {})["bf16"] = f"{rms:.4f} / {reference.bf16_rms_diff:.4f}"
    assert 0 < rms <= 1.1 * reference.bf16_rms_diff
    assert np.abs(difference).max() <= 1.5 * reference.bf16_max_diff


# Of the odd ones those that no other test is like: wider values, windows under a block, groups of
# equal scores, layers that read others' keys, one key head for three value heads.
EVERY_TIME = {
    "mimo_k3_d32_v48",
    "exaone4_k3_window5",
    "solar_open_tied_groups",
    "gemma4_shared_most",
    "qwen3_5_h1x3_c8_y40",
}


def check_stored(key: str, folder: Path) -> Params:
    """Hold logits at some positions to transformers' and return the params."""
    (reference,) = load_seeds(key)
    params = jpaged.load_params(reference.write(folder))
    ours, theirs = stored_positions(params, reference)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))
    return params


@pytest.mark.parametrize("key", [key for key in STORED if key in EVERY_TIME])
def test_odd_configs(key: str, tmp_path: Path) -> None:
    check_stored(key, tmp_path)


@pytest.mark.middle
@pytest.mark.parametrize("key", [key for key in STORED if key in QUICK_SEEDS])
def test_other_weights(key: str, tmp_path: Path) -> None:
    """Logits at some positions, and greedy tokens after a long prompt."""
    check_stored_tokens(key, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in STORED if key not in QUICK_SEEDS])
def test_more_weights(key: str, tmp_path: Path) -> None:
    check_stored_tokens(key, tmp_path)


def check_stored_tokens(key: str, folder: Path) -> None:
    """Hold logits and greedy tokens to transformers', twice: then over the prefix cache."""
    params, (reference,) = check_stored(key, folder), load_seeds(key)
    (prompt,) = reference.prompts
    sampling = SamplingParams(temperature=0, max_tokens=len(prompt.greedy))
    for run in range(2):
        (out,) = jpaged.generate(params, [prompt.token_ids], sampling, engine_config=ENGINE)
        assert out.outputs[0].token_ids == prompt.greedy
        assert (out.num_cached_tokens >= 8) == (run == 1)


def test_live_transformers(name: str, params: Params) -> None:
    """The same against transformers itself, on tokens that no file knows, where torch can be
    imported.
    """
    pytest.importorskip(
        "torch", reason="torch is not installed: the stored references stand in for it"
    )
    import torch  # pyright: ignore[reportMissingImports]

    from tests.golden.make_golden import build, forward, tokens

    ids = tokens(f"{name}/live", 70, params.config.vocab_size)
    theirs = forward(build(golden(name).config, golden(name).tensors(), torch.float32), ids).numpy()
    (ours,) = logits(params, [ids])
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
