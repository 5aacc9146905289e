"""Each family on every implementation of attention that takes it: XLA's logprobs, in bfloat16."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, ModelConfig, SamplingParams
from jpaged.models.families import FAMILIES
from kernels_cpu.library import unavailable
from tests.golden.configs import CONFIGS, SEEDED
from tests.tiny import make_params, make_prompts

FAMILY_CONFIGS = {c.family: c for c in (ModelConfig.from_hf(CONFIGS[name]) for name in SEEDED)}
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
    model = dataclasses.replace(FAMILY_CONFIGS[family], head_dim=64)  # what all of them take
    llm = LLM(make_params(3, model), attention=attention, **SETTINGS)
    assert llm.stats()["attention"] == attention
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    (out,) = llm.generate(make_prompts(90), sampling, use_tqdm=False)
    llm.close()
    scored = (out.prompt_logprobs or [])[1:]
    prompt = [next(iter(found.values())).logprob for found in scored if found]
    assert len(prompt) == 89
    return np.array([*prompt, *out.outputs[0].token_logprobs])


def test_all_families_are_here() -> None:
    assert FAMILY_CONFIGS.keys() == FAMILIES.keys()


# Of those that are interpreted, what differs in attention: capped scores and a scale of their own,
# sinks. The other families do nothing there that these do not.
DISTINCT = ("gemma2", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(
            *(family, attention),
            marks=pytest.mark.middle
            if attention == "native" or family in DISTINCT
            else pytest.mark.slow,
        )
        for family in FAMILIES
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
