"""Tiny models of every family against transformers: logits of the dense forward, greedy tokens of
the paged engine.

`pytest -s tests/models/test_golden.py` prints the table of differences.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import jpaged
from jpaged import EngineConfig, Params, SamplingParams
from jpaged.models.decoder import bind
from tests.golden.configs import CONFIGS
from tests.golden.reference import Golden, load

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
}
MIDDLE = {"qwen3_g2_d32_tied", "llama_g1_d128_bias"}


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


def stored_positions(params: Params, golden: Golden) -> tuple[np.ndarray, np.ndarray]:
    """(ours, transformers') f32 logits [R, V] of every stored position."""
    ours = logits(params, [prompt.token_ids for prompt in golden.prompts])
    picked = [z[prompt.positions] for z, prompt in zip(ours, golden.prompts, strict=True)]
    return np.concatenate(picked), np.concatenate([prompt.logits for prompt in golden.prompts])


def test_logits_f32(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    ours, theirs = stored_positions(params, golden(name))
    difference, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    table.setdefault(name, {}).update(diff=f"{difference:.1e}", scale=f"{difference / scale:.1e}")
    assert difference <= 1e-5 * scale
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))


def check_greedy(name: str, params: Params, table: dict[str, dict[str, object]]) -> None:
    prompts = golden(name).prompts
    sampling = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy))
    outputs = jpaged.generate(
        params, [prompt.token_ids for prompt in prompts], sampling, engine_config=ENGINE
    )
    equal = [
        out.outputs[0].token_ids == prompt.greedy
        for out, prompt in zip(outputs, prompts, strict=True)
    ]
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


def test_logits_bf16(name: str, tmp_path: Path, table: dict[str, dict[str, object]]) -> None:
    """As far from the f32 reference as transformers' own bfloat16 model is, and no further."""
    reference = golden(name)
    params = jpaged.load_params(reference.write(tmp_path, "bfloat16"))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    ours, theirs = stored_positions(params, reference)
    difference = ours - theirs
    rms = float(np.sqrt(np.mean(difference**2)))
    table.setdefault(name, {})["bf16"] = f"{rms:.4f} / {reference.bf16_rms_diff:.4f}"
    assert 0 < rms <= 1.1 * reference.bf16_rms_diff
    assert np.abs(difference).max() <= 1.5 * reference.bf16_max_diff


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
