"""MTP heads of models of latent attention, of layers that choose what they attend to, and of plain
attention with experts: tokens are those without a head, and guesses those of the dense head.
"""

import dataclasses
from typing import Any

import pytest

from jpaged import LLM, ModelConfig, Params, SamplingParams
from jpaged.errors import UnsupportedError
from jpaged.models.families import FAMILIES
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.latent import LatentConfig
from jpaged.models.mtp import mtp_config
from tests import test_latents, test_sparse
from tests.heads import counting_mtp, dense_mtp_guesses, guesses_of
from tests.tiny import assert_idle, config, make_params, make_prompts, routed
from tests.tiny import engine as engine_config

PLAIN = routed(config(num_experts=8, experts_per_token=3, expert_size=12))
MODELS = {"latents": test_latents.MODEL, "chosen": test_sparse.MODEL, "experts": PLAIN}
# Chunks of 32 tokens; rows of a draw for three guesses of each row.
SETTINGS = engine_config(max_num_batched_tokens=32, token_buckets=(32,))
SETTINGS = dataclasses.replace(SETTINGS, max_num_seqs=24, seq_buckets=(24,), max_logprobs=2)
PROMPTS = make_prompts(5, 21, 40, 33)
PROMPTS.append([*PROMPTS[2][:22], 3, 4])  # it parts from another within a block
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1, "n": 2},
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0},
]
ASKED = [SamplingParams(max_tokens=20, ignore_eos=True, **way) for way in WAYS]
FEW: dict[str, Any] = {"num_blocks": 36, "swap_min_tokens": 0}


def served(params: Params, head: Params | None = None, **changes: Any) -> LLM:
    if head is not None:
        asked = {"method": "mtp", "num_tokens": 3, "model": head, "adaptive": False}
        changes["speculative"] = asked
    return LLM(params, **(vars(SETTINGS) | changes))


def completions(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_it_keeps_what_its_layer_keeps() -> None:
    """Beside a hidden state a token: latents, index keys where the model has some anywhere."""
    (group,) = kv_groups(mtp_config(MODELS["latents"]))
    assert [field.name for field in group.record.fields] == [
        *("latent", "rotated_key", "target_hidden")
    ]
    shared = dataclasses.replace(MODELS["chosen"], layers=MODELS["chosen"].layers[:2])
    head = mtp_config(shared)
    last, own = shared.layers[-1].mixer, head.layers[0].mixer
    assert isinstance(last, LatentConfig) and isinstance(own, LatentConfig)
    assert last.indexer is None and own.indexer is not None and own.chosen == last.chosen
    (group,) = kv_groups(head)
    assert [field.name for field in group.record.fields] == [
        *("latent", "rotated_key", "index_key", "target_hidden")
    ]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Greedy and drawn, in chunks of 32 tokens, twice, so that the second time prefixes are found;
    guesses are the dense head's, right ones and wrong ones.
    """
    params, head = counting_mtp(make_params(0, MODELS[name]))
    alone = served(params)
    wanted = completions(alone)
    alone.close()
    seen = guesses_of(monkeypatch)
    llm = served(params, head)
    assert completions(llm) == wanted and completions(llm) == wanted
    stats = llm.stats()
    assert stats["cached_tokens"] > 40 and stats["drafted_tokens"] > 60
    assert 0.3 < stats["acceptance_rate"] < 1, stats["acceptance_rate"]
    assert_idle(llm)
    llm.close()
    greedy = [p for p, how in zip(PROMPTS, ASKED, strict=True) if how.temperature == 0]
    compared = [x for x in seen if any(x[0][: len(p)] == p for p in greedy)]
    assert len(compared) > 10 and max(len(guesses) for _, guesses in compared) > 1
    for tokens, guesses in compared:
        assert guesses == dense_mtp_guesses(params, head, tokens, len(guesses)), tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_swapped", [False, True], ids=["recomputed", "in host memory"])
def test_rows_that_leave_and_come_back(name: str, *, is_swapped: bool) -> None:
    params, head = counting_mtp(make_params(0, MODELS[name]))
    alone = served(params)
    wanted = completions(alone)
    alone.close()
    llm = served(params, head, **FEW, **({"swap_space_gib": 0.01} if is_swapped else {}))
    assert completions(llm) == wanted
    stats = llm.stats()
    kind = "preemptions_swapped" if is_swapped else "preemptions_recomputed"
    assert stats[kind] > 0 and stats["accepted_tokens"] > 10
    assert_idle(llm)
    llm.close()


@pytest.mark.parametrize("name", MODELS)
def test_two_devices_share_it(name: str) -> None:
    """Heads and experts are split, latents and index keys are not, hidden states are. It is right
    as often as on one device.
    """
    params, head = counting_mtp(make_params(0, MODELS[name]))
    tokens, rates = [], []
    for devices in (1, 2):
        llm = served(params, head, tensor_parallel_size=devices)
        tokens.append(completions(llm))
        rates.append(llm.stats()["acceptance_rate"])
        assert_idle(llm)
        llm.close()
    assert tokens[0] == tokens[1] and rates[0] == rates[1] > 0.3


def test_other_families_are_refused() -> None:
    """By name, with those whose heads are read."""
    read = {family.model_type for family in FAMILIES.values() if family.mtp is not None}
    assert read == {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "glm4_moe_lite"),
        *("glm_moe_dsa", "deepseek_v3", "deepseek_v32"),
    }
    with_layer = {family.model_type for family in FAMILIES.values() if family.unread is not None}
    assert with_layer - read == {"bailing_hybrid", "ernie4_5_moe", "mimo_v2_flash", "nemotron_h"}
    for family in sorted(FAMILIES.keys() - read):
        model: ModelConfig = config(family=family)
        with pytest.raises(UnsupportedError, match=rf"no MTP head of {family} is read \(those of "):
            mtp_config(model)
