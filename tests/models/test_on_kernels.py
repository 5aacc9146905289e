"""Whatever families do in attention, on every implementation that takes it: XLA's logprobs, in
bfloat16.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, ModelConfig, SamplingParams
from jpaged.models.layers.attention import AttentionConfig
from kernels_cpu.library import unavailable
from tests.golden.configs import CONFIGS
from tests.tiny import make_params, make_prompts

# Of those that are interpreted, what differs in attention: capped scores and a scale of their own,
# sinks. The other families do nothing there that these do not.
DISTINCT = ("gemma2", "gpt_oss")
# What differs before it, where CUDA has one kernel for that: queries scaled by position, norms
# after the rotation.
PREPARED = ("ministral3", "hunyuan_v1_dense")
# Of whatever alike layers do one each.
NAMES = (
    "ernie4_5_moe_g4_d32",
    "gemma2_g2_d64_capped",
    "gemma3_g2_d32_linear",
    "glm4_moe_g4_d32_groups",
    "gpt_oss_g4_d64",
    "granite_g2_d32_tied",
    "hunyuan_g2_d32_alpha",
    "llama_g2_d32_llama3_tied",
    "mistral_g7_d32_window_yarn",
    "mixtral_g4_d32_window_tied",
    "olmo2_g4_d32_bias",
    "olmo3_g2_d64_window_yarn",
    "phi3_g2_d64_longrope_tied",
    "qwen2_g2_d64_window_mix",
    "qwen2_moe_g2_d32_shared",
    "qwen3_g2_d32_tied",
    "qwen3_moe_g4_d64_window",
    "smollm3_g4_d64_nope_tied",
    "ministral3_g4_d64_mscale_tied",
)
FAMILY_CONFIGS = {c.family: c for c in (ModelConfig.from_hf(CONFIGS[name]) for name in NAMES)}
KERNELS = ("native", "triton", "tpu", "mosaic_gpu")
# Two chunks of a prompt longer than every window, then a decode.
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "seq_buckets": (8,),
}


@functools.cache
def logprobs(attention: Any, family: str) -> np.ndarray:
    """Of a prompt and of the two tokens after it."""
    # A width that all of them take.
    return logprobs_of(dataclasses.replace(FAMILY_CONFIGS[family], head_dim=64), attention)


def logprobs_of(model: ModelConfig, attention: Any) -> np.ndarray:
    """The same of any model."""
    llm = LLM(make_params(3, model), attention=attention, **SETTINGS)
    assert llm.stats()["attention"] == attention
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    (out,) = llm.generate(make_prompts(90), sampling, use_tqdm=False)
    llm.close()
    scored = (out.prompt_logprobs or [])[1:]
    prompt = [next(iter(found.values())).logprob for found in scored if found]
    assert len(prompt) == 89
    return np.array([*prompt, *out.outputs[0].token_logprobs])


@pytest.mark.middle
@pytest.mark.parametrize("name", ["gemma4_k3_d64_bias", "mimo_d64_v32_bias"])
def test_unlike_layers_on_cpus(name: str) -> None:
    """Heads of several widths, values narrower than keys, keys that others read: of a model whose
    layers no switches describe, by the kernel that takes these widths.
    """
    if reason := unavailable():
        pytest.skip(reason)
    model = ModelConfig.from_hf(CONFIGS[name])
    expected, found = logprobs_of(model, "xla"), logprobs_of(model, "native")
    assert np.median(np.abs(found - expected)) < 0.03 * np.std(expected)


def attended(config: ModelConfig) -> set[tuple[str, Any]]:
    """What the layers of a model do in attention and before it, apart from sizes."""
    mixers = [x.mixer for x in config.layers if isinstance(x.mixer, AttentionConfig)]
    return {
        pair
        for mixer in mixers
        for pair in (
            ("norm of queries and keys", mixer.qk_norm),
            ("norm after rope", mixer.qk_norm_after_rope),
            ("sinks", mixer.sinks),
            ("capped", mixer.soft_cap is not None),
            ("window", mixer.window is not None),
            ("rope", mixer.rope is not None),
            ("queries scaled", mixer.rope is not None and mixer.rope.query_scaling is not None),
            ("part of a head", mixer.rope is not None and mixer.rope.dim < mixer.head_dim),
        )
    }


def test_whatever_families_do_is_here() -> None:
    here = set().union(*map(attended, FAMILY_CONFIGS.values()))
    for raw in CONFIGS.values():
        assert attended(ModelConfig.from_hf(raw)) <= here, raw["model_type"]


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(
            *(family, attention),
            marks=pytest.mark.middle
            if family in DISTINCT or (attention == "native" and family not in PREPARED)
            else pytest.mark.slow,
        )
        for family in FAMILY_CONFIGS
        for attention in KERNELS
    ],
)
def test_a_family_on_a_kernel(family: str, attention: str) -> None:
    """In the median: where rounding turns a choice of experts, all of a token's logits change."""
    if attention == "native" and (reason := unavailable()):
        pytest.skip(reason)
    expected, found = logprobs("xla", family), logprobs(attention, family)
    error, spread = np.median(np.abs(found - expected)), np.std(expected)
    print(f"{family} {attention}: {error:.4f} of {spread:.2f}")
    assert error < 0.03 * spread
