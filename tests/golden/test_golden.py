"""The stored references are whole, belong to the weights that the tests make, and cover what they
are said to cover.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from jpaged.models.config import ModelConfig
from jpaged.models.families import FAMILIES
from jpaged.models.layers.attention import AttentionConfig
from tests.golden.configs import CONFIGS
from tests.golden.reference import BeamCase, load, load_beams


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_is_whole(name: str) -> None:
    golden = load(name)
    config = ModelConfig.from_hf(golden.config)
    for tensor in golden.tensors().values():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, tensor.astype(np.float16).astype(np.float32))
    assert golden.min_gap > 0.01
    for prompt in golden.prompts:
        assert (
            prompt.logits.shape
            == prompt.logits_bf16.shape
            == (len(prompt.positions), config.vocab_size)
        )
        assert prompt.positions[-1] == len(prompt.token_ids) - 1
        assert prompt.logits[-1].argmax() == prompt.greedy[0]
        assert len(prompt.greedy) == 24 and not set(prompt.greedy) & set(config.eos_token_ids)
        assert np.abs(prompt.logits - prompt.logits_bf16).max() <= golden.bf16_max_diff


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_that_is_written_reads_back_equal(name: str) -> None:
    config = ModelConfig.from_hf(CONFIGS[name])
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_layers_with_numbers_of_two_digits() -> None:
    """transformers pads the numbers of layers in per_layer_config with zeros."""
    raw = CONFIGS["gemma4_k2_d32_k1_d64"] | {"num_hidden_layers": 12, "layer_types": None}
    config = ModelConfig.from_hf(raw)
    mixers = [x.mixer for x in config.layers if isinstance(x.mixer, AttentionConfig)]
    full = [i for i, mixer in enumerate(mixers) if mixer.window is None]
    assert full == [5, 11] == [i for i, mixer in enumerate(mixers) if mixer.head_dim == 64]
    assert full == [i for i, mixer in enumerate(mixers) if mixer.value_is_key]
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_configs_cover_the_families() -> None:
    configs = [ModelConfig.from_hf(raw) for raw in CONFIGS.values()]
    for family in ("qwen3", "qwen2", "llama", "mistral"):
        assert sum(c.family == family for c in configs) >= 3
    assert {c.family for c in configs} == set(FAMILIES)
    layers = [layer for c in configs for layer in c.layers]
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
    assert {m.group_size for m in mixers} == {1, 2, 3, 4, 7}
    assert {m.head_dim for m in mixers} == {16, 18, 32, 48, 64, 80, 128}
    assert {m.value_width for m in mixers} == {16, 18, 32, 64, 80, 128}
    scalings = {m.rope.scaling for m in mixers if m.rope is not None}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert {scaling.kind if scaling else None for scaling in scalings} == {
        None,
        "proportional",
        "linear",
        "llama3",
        "yarn",
        "longrope",
    }
    assert any(None in c.sliding_windows and any(c.sliding_windows) for c in configs)
    longest = max(len(prompt.token_ids) for prompt in load("qwen3_g2_d32_tied").prompts)
    windows = {window for c in configs for window in c.sliding_windows if window}
    assert all(window < longest for window in windows - {4096})


def test_beams_are_whole() -> None:
    for case in load_beams():
        golden = load(case.config)
        assert case.prompt in [prompt.token_ids for prompt in golden.prompts]
        assert case.gap >= 0.003
        assert len(case.beams) == len(case.scores) == case.beam_width
        assert case.scores == sorted(case.scores, reverse=True)
        assert len(set(map(tuple, case.beams))) == case.beam_width
        for beam, score in zip(case.beams, case.scores, strict=True):
            ends = [i for i, token in enumerate(beam) if token in case.eos_token_ids]
            assert (
                ends == [len(beam) - 1]
                if len(beam) < case.max_tokens
                else len(beam) == case.max_tokens
            )
            assert not ends or ends == [len(beam) - 1]
            assert score < 0 and all(0 <= token < golden.config["vocab_size"] for token in beam)


def test_beams_cover_the_settings() -> None:
    cases = load_beams()
    assert {case.beam_width for case in cases} == {1, 2, 3, 5}
    assert {case.length_penalty for case in cases} == {-0.5, 0.0, 1.0, 2.0}
    assert {str(case.early_stopping) for case in cases} == {"True", "False", "never"}
    assert {len(case.prompt) for case in cases} == {5, 40}
    assert {len(case.eos_token_ids) for case in cases} == {1, 2}
    assert (
        min(case.max_tokens for case in cases) == 8 and max(case.max_tokens for case in cases) == 24
    )
    assert any(any(ModelConfig.from_hf(CONFIGS[case.config]).sliding_windows) for case in cases)
    for case in cases:
        assert len({len(beam) for beam in case.beams}) > 1 or case.beam_width == 1
    # Beams that the limit ended, next to beams that an eos did.
    assert any({case.max_tokens} < {len(beam) for beam in case.beams} for case in cases)


def test_beams_tell_the_kinds_of_early_stopping_apart() -> None:
    """In each model there is a search that gives other beams under True, under False and under
    "never".
    """
    searches: dict[str, list[BeamCase]] = {}
    for case in load_beams():
        key = (
            case.config,
            case.prompt,
            case.beam_width,
            case.max_tokens,
            case.length_penalty,
            case.eos_token_ids,
        )
        searches.setdefault(json.dumps(key), []).append(case)
    apart = set()
    for same in searches.values():
        if (
            len({json.dumps(case.beams) for case in same})
            == len({str(case.early_stopping) for case in same})
            == 3
        ):
            apart.add(same[0].config)
    assert apart == {case.config for case in load_beams()}


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("bfloat16", 3), ("float16", 2)])
def test_written_folder_holds_every_tensor(tmp_path: Path, dtype: str, shards: int) -> None:
    golden = load("qwen3_g2_d32_tied")
    folder = golden.write(tmp_path / "model", dtype, shards)
    if shards > 1:
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    else:
        weight_map = dict.fromkeys(golden.tensors(), "model.safetensors")
    assert len(set(weight_map.values())) == shards and set(weight_map) == set(golden.tensors())
    for name, expected in golden.tensors().items():
        with safe_open(folder / weight_map[name], "numpy") as file:
            assert np.array_equal(np.asarray(file.get_tensor(name), np.float32), expected)
