"""Everything that an engine does, for tests that want it the same elsewhere.

The model has 2 KV heads of 4 query heads each and 300 tokens, so 4 and 8 devices repeat its heads
and some hold nothing but padding of the vocabulary.
"""

import dataclasses
from typing import Any

import numpy as np

from jpaged import LLM, EngineConfig, SamplingParams
from tests.tiny import CROWDED, assert_idle, assert_same, config, make_params, make_prompts

MODEL = config(
    num_heads=8, num_kv_heads=2, vocab_size=300, num_layers=2, qkv_bias=True, intermediate_size=45
)
PARAMS = make_params(3, MODEL)
PROMPTS = make_prompts(3, 17, 30, 9)
# Some sequences swap, and short ones are computed again.
SETTINGS = dataclasses.replace(
    CROWDED, swap_space_gib=0.01, swap_min_tokens=28, max_sampling_mask=8
)
CONTROLS = {
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.01,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 2.0, 290: 3.0, 150: -4.0},
    "min_tokens": 3,
    "logprobs": 4,
}


def settings_of(replicas: int) -> EngineConfig:
    """SETTINGS with which so many replicas swap too. Each of four has one prompt, of which few
    blocks are gone from the device when it runs again.
    """
    return SETTINGS if replicas < 4 else dataclasses.replace(SETTINGS, swap_min_tokens=12)


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "temperature": 0, "ignore_eos": True} | changes))


def assert_as_on_one_device(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """What `everything` gives: equal tokens, and numbers that differ as other sums do."""
    assert found.keys() == wanted.keys()
    for name, outs in found.items():
        if name == "scores":
            for a, b in zip(outs, wanted[name], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=5e-6)
            continue
        assert_same(outs, wanted[name])
        for a, b in zip(outs, wanted[name], strict=True):
            for x, y in zip(a.outputs, b.outputs, strict=True):
                np.testing.assert_allclose(x.token_logprobs, y.token_logprobs, atol=1e-5, rtol=5e-6)
                if name == "sampling masks":
                    np.testing.assert_array_equal(x.sampling_mask, y.sampling_mask)
                    np.testing.assert_allclose(
                        x.kept_logprobs, y.kept_logprobs, atol=1e-5, rtol=5e-6
                    )


def everything(llm: LLM) -> dict[str, Any]:
    """By feature, what comes out."""
    found: dict[str, Any] = {}

    def run(name: str, how: Any, prompts: Any = PROMPTS) -> None:
        found[name] = llm.generate(prompts, how, use_tqdm=False)

    run("greedy", sampled(logprobs=3, prompt_logprobs=2))
    run("prefix hits", sampled(logprobs=1))
    assert sum(out.num_cached_tokens for out in found["prefix hits"]) > 0
    run("seeded", [sampled(temperature=t, seed=i) for i, t in enumerate((0.7, 1.0, 1.3, 2.0))])
    modes = ("raw", "tempered", "processed", "raw")
    run("controls", [sampled(seed=i, logprobs_mode=m, **CONTROLS) for i, m in enumerate(modes)])
    run("wide nucleus", sampled(temperature=3.0, top_p=0.99, top_k=200, seed=5))
    run("sampling masks", sampled(temperature=1.0, top_k=8, top_p=0.9, seed=7, sampling_mask=True))
    run("samples and preemption", sampled(temperature=1.0, n=3, seed=1, max_tokens=24))
    found["beams"] = llm.beam_search(PROMPTS[:2], 3, 8, use_tqdm=False)
    found["scores"] = [np.asarray(x) for x in llm.score(PROMPTS, temperature=0.8)]
    ids = [llm.add_request(prompt, sampled(temperature=1.0, seed=9)) for prompt in PROMPTS]
    for _ in range(4):
        llm.step()
    snapshot, outs = llm.snapshot(), []
    for _ in range(2):
        done = {}
        while llm.has_unfinished():
            done |= {out.request_id: out for out in llm.step()}
        outs.append([done[i] for i in ids])
        llm.restore(snapshot)
    while llm.has_unfinished():
        llm.step()
    assert_same(*outs)
    found["snapshot"] = outs[0]
    stats = llm.stats()
    assert stats["preemptions_swapped"] > 0 and stats["preemptions_recomputed"] > 0
    assert_idle(llm)
    return found
