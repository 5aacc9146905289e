"""All pairs of settings: each serves the tokens of the plain engine, or one rule refuses it.

The pairs that are refused are found by building sessions, which compiles nothing. The others are
served in as few engines as hold every pair (a covering array), many settings in each.
"""

import dataclasses
import functools
import itertools
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, EngineConfig, JpagedError, Params, SamplingParams
from jpaged.combinations import RULES, Facts, as_markdown, check_combination
from jpaged.models.served import quantized_tree
from jpaged.session import Session
from tests.byte_tokenizer import EOS, TOKENS, make_tokenizer
from tests.heads import counting_head
from tests.test_lora import make_lora
from tests.tiny import config, make_params, make_prompts

pytest.importorskip("llguidance")

ROOT = Path(__file__).parents[1]
MODEL = config(
    head_dim=32,
    vocab_size=len(TOKENS),
    eos_token_ids=(EOS,),
    num_layers=1,
    intermediate_size=96,
)
PARAMS = make_params(0, MODEL)
DRAFT = make_params(1, dataclasses.replace(MODEL, hidden_size=32))
RANK = 4
# Sizes that all cases share: small ones, so that few shapes compile.
PLAIN: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "num_blocks": 96,
    "max_logprobs": 5,
}
FOLDER = tempfile.TemporaryDirectory(prefix="jpaged-test-")  # gone with the process
STORE = FOLDER.name  # served pairs share it
GUESSING = {"num_tokens": 3, "adaptive": False}
# Values of every field of EngineConfig that differ from PLAIN. Fields that no pair can change are
# in UNPAIRED.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "max_model_len": (60,),
    "max_num_seqs": (3, 12),
    "max_num_batched_tokens": (32,),
    "block_size": (8,),
    "num_blocks": (24,),
    "num_states": (9,),
    "enable_prefix_caching": (False,),
    "max_n": (2,),
    "swap_space_gib": (0.01,),
    "swap_min_tokens": (0,),
    "prefix_store": (STORE,),
    "prefix_store_gib": (0.01,),
    "prefix_store_policy": ("write_through",),
    "dtype": ("bfloat16", "float32"),
    "quantization": ("int8", "int4", "fp8"),
    "quantized_activations": ("plain", "int8"),
    "max_loras": (2,),
    "max_lora_rank": (2, 8),
    "lora_extra": (("head",), ("embedding",)),
    "kv_cache_dtype": ("int8", "fp8"),
    "attention": ("xla", "native", "triton"),
    "token_buckets": ((8, 16),),
    "seq_buckets": ((2, 6),),
    "decode_steps": (3,),
    "stream_steps": (1,),
    "separate_draw": (True, False),
    "max_logprobs": (2,),
    "max_logit_bias": (2,),
    "max_sampling_mask": (4,),
    "max_embeddings": (12,),
    "max_stop_ids": (3,),
    "strict": (True,),
    "structured_output": (True,),
    "deterministic": (True, False),
    "speculative": (
        {"method": "ngram", **GUESSING},
        {"method": "draft", "model": DRAFT, **GUESSING},
        {"method": "eagle", "model": counting_head(PARAMS), **GUESSING},
    ),
    "mixed": (True,),
    "tensor_parallel_size": (2,),
    "data_parallel_size": (2, 8),
    "tensor_axis": ("tp", "model"),
    # What callers pass beside the config.
    "weights": ("int8",),
    "lora": (True,),
    "structured": (True,),
}
UNPAIRED = {"memory_utilization", "peer_timeout_s", "compilation_cache_dir"}
# They take a mixture: tests/test_expert_parallel.py, tests/test_routed_experts.py.
UNPAIRED |= {"expert_parallel", "routed_experts"}
# They take a model with a vision tower: tests/test_image_prompts.py.
UNPAIRED |= {"images", "max_image_tokens", "image_cache_gib", "image_limits"}
BESIDE = ("weights", "lora", "structured")
# What changes the numbers, and so the tokens; a case is compared with the plain engine that has
# these settings alone.
NUMBERS = ("dtype", "quantization", "quantized_activations", "kv_cache_dtype", *BESIDE)
# What decides how weights are served.
WEIGHTS = ("dtype", "quantization", "tensor_parallel_size", "weights")
Option = tuple[str, int]
# What an option is refused without: C++ products and attention need bfloat16.
NEEDED: dict[Option, dict[str, Any]] = {
    ("quantized_activations", 1): {"dtype": "bfloat16"},
    ("attention", 1): {"dtype": "bfloat16"},
    ("lora", 0): {"max_loras": 2},
    ("prefix_store_policy", 0): {"prefix_store": STORE},
}
# What is built in pairs but not served here. Some compile for minutes (whole tables of shapes,
# eight replicas, a CUDA kernel interpreted); the others need bfloat16, in which near ties may turn.
NOT_SERVED: set[Option] = {
    ("strict", 0),
    ("structured_output", 0),
    ("data_parallel_size", 1),
    ("attention", 1),
    ("attention", 2),
    ("dtype", 0),
    ("quantized_activations", 1),
}
OPTIONS: list[Option] = [(name, i) for name, values in SETTINGS.items() for i in range(len(values))]
PROMPTS = [*make_prompts(5, 19, 30), [7, 8, 9, 10] * 5]


def case_of(options: tuple[Option, ...]) -> dict[str, Any]:
    """Settings by name; what an option cannot do without is added unless another option sets it."""
    case = {name: SETTINGS[name][i] for name, i in options}
    needed = [NEEDED[option] for option in options if option in NEEDED]
    return functools.reduce(lambda chosen, more: more | chosen, needed, case)


def weights_of(case: dict[str, Any]) -> Params:
    if (form := case.get("weights")) is None:
        return PARAMS
    return Params(quantized_tree(PARAMS, form), MODEL)


@functools.cache
def bind_weights(options: tuple[Option, ...]) -> None:
    """Make the serving weights of a case, which quantises them; options: of WEIGHTS."""
    case = case_of(options)
    weights = weights_of(case)
    config = EngineConfig(**PLAIN, **{k: v for k, v in case.items() if k not in BESIDE})
    served = Session(weights, config, None, grows=False).served
    served.bind(weights)
    served.weights.modules(weights)


@functools.cache
def refusal(options: tuple[Option, ...]) -> str | None:
    """The name of the rule that refuses a case; None for one that should be served."""
    case = case_of(options)
    settings = PLAIN | {name: value for name, value in case.items() if name not in BESIDE}
    guessing = dict(settings.get("speculative") or {})
    draft = guessing.pop("model", None)
    if guessing:
        settings["speculative"] = guessing
    try:
        session = Session(PARAMS, EngineConfig(**settings), None, grows=False, draft=draft)
        bind_weights(tuple(option for option in options if option[0] in WEIGHTS))
        served = session.engine_config
        if "lora" in case:
            check_combination(Facts(config=served, adapter_rank=RANK, adapter_changes=()))
        if "structured" in case:
            check_combination(Facts(config=served, draws_masked=True))
    except JpagedError as e:
        assert e.rule is not None, (case, e)
        return e.rule
    return None


def are_different(options: tuple[Option, ...]) -> bool:
    """Whether no setting has two values."""
    return len({name for name, _ in options}) == len(options)


def pair_of(one: Option, other: Option) -> tuple[Option, ...]:
    return tuple(sorted((one, other), key=OPTIONS.index))


@functools.cache
def served_pairs() -> list[tuple[Option, Option]]:
    quick = [option for option in OPTIONS if option not in NOT_SERVED]
    pairs = filter(are_different, itertools.combinations(quick, 2))
    return [pair for pair in pairs if refusal(pair) is None]


@functools.cache
def covering() -> list[tuple[Option, ...]]:
    """Cases that are not refused, which hold every pair that is not."""
    left, cases = set(served_pairs()), []
    rng = random.Random(0)
    while left:
        case: tuple[Option, ...] = min(left, key=lambda pair: list(map(OPTIONS.index, pair)))
        rest = [option for option in OPTIONS if option not in (*case, *NOT_SERVED)]
        rng.shuffle(rest)

        gains = {option: sum(pair_of(option, other) in left for other in case) for option in rest}
        for option in sorted(rest, key=gains.__getitem__, reverse=True):
            wider = tuple(sorted((*case, option), key=OPTIONS.index))
            if are_different(wider) and refusal(wider) is None:
                case = wider
        cases.append(case)
        left -= set(itertools.combinations(case, 2))
    return cases


def serve(case: dict[str, Any]) -> list[tuple[list[int], ...]]:
    """The token ids of every completion, of two calls; the second finds prefixes in the cache."""
    settings = PLAIN | {name: value for name, value in case.items() if name not in BESIDE}
    llm = LLM(weights_of(case), tokenizer=make_tokenizer(), **settings)
    prompts: list[Any] = list(PROMPTS)
    asked = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
        SamplingParams(
            temperature=0.8,
            top_k=4,
            seed=3,
            n=2,
            max_tokens=8,
            ignore_eos=True,
            sampling_mask="max_sampling_mask" in case,
        ),
        SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.2, logit_bias={7: 1.0}),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    ]
    if "lora" in case:
        llm.add_adapter("tuned", make_lora(1, RANK, MODEL))
        prompts.append({"prompt_token_ids": PROMPTS[0], "adapter": "tuned"})
        asked.append(asked[0])
    if "structured" in case:
        prompts.append(PROMPTS[1])
        form = {"regex": "[ab]{3}-[0-9]+x"}
        asked.append(SamplingParams(temperature=0.7, seed=1, max_tokens=8, structured=form))
    found = []
    for _ in range(2):
        outs = llm.generate(prompts, asked, use_tqdm=False)
        found += [tuple(done.token_ids for done in out.outputs) for out in outs]
    llm.close()
    return found


@functools.cache
def plain_tokens(options: tuple[Option, ...]) -> list[tuple[list[int], ...]]:
    case = case_of(options)
    if "lora" in case:
        case |= {"max_loras": 2}
    return serve(case)


def test_every_field_is_paired() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == (SETTINGS.keys() - set(BESIDE)) | UNPAIRED
    for name, values in SETTINGS.items():
        assert PLAIN.get(name) not in values


def test_pairs_are_served_or_break_one_rule() -> None:
    """Each pair whose parts are accepted alone: nothing but rules of the table refuses it."""
    alone = {option for option in OPTIONS if refusal((option,)) is None}
    broken = {
        pair: rule
        for pair in itertools.combinations(OPTIONS, 2)
        if are_different(pair) and (rule := refusal(pair)) and alone.issuperset(pair)
    }
    names = {rule.name for rule in RULES}
    assert set(broken.values()) <= names
    # A pair breaks the rule that names its settings.
    wanted = {
        "token_buckets_hold_a_step": {"token_buckets", "max_num_batched_tokens"},
        "seq_buckets_hold_all_rows": {"seq_buckets", "max_num_seqs"},
        "pinned_steps_draw_one_token": {"deterministic", "decode_steps"},
        "several_steps_draw_themselves": {"separate_draw", "decode_steps"},
        "strict_draws_under_masks": {"strict", "structured"},
        "weights_split_into_whole_groups": {"quantization", "tensor_parallel_size"},
        "quantized_weights_keep_their_form": {"weights", "quantization"},
        "devices_are_enough": {"tensor_parallel_size", "data_parallel_size"},
        "tensor_axis_is_of_the_mesh": {"tensor_axis", "tensor_parallel_size"},
        "guesses_of_models_read_tokens": {"max_embeddings", "speculative"},
    }
    for rule, settings in wanted.items():
        assert settings in [{a, b} for ((a, _), (b, _)), name in broken.items() if name == rule]


def test_refused_pairs_are_refused_by_the_faces() -> None:
    """What the sessions above refuse, LLM refuses with the same rule, or the first call does."""
    for pair in itertools.combinations(OPTIONS, 2):
        rule = refusal(pair) if are_different(pair) else None
        if rule is not None and not any(name == "strict" for name, _ in pair):
            with pytest.raises(JpagedError) as refused:
                serve(case_of(pair))
            assert refused.value.rule == rule, pair


def test_covering_holds_every_pair_that_is_served() -> None:
    covered = {pair for case in covering() for pair in itertools.combinations(case, 2)}
    assert covered >= set(served_pairs())
    assert len(covering()) < 40


@pytest.mark.parametrize("number", range(24))
def test_pairs_serve_the_tokens_of_the_plain_engine(number: int) -> None:
    assert len(covering()) <= 24, "raise the range of this test"
    if number >= len(covering()):
        return
    options = covering()[number]
    case = case_of(options)
    found = serve(case)
    numbers = tuple(option for option in options if option[0] in NUMBERS)
    wanted = plain_tokens(numbers)
    assert [[len(ids) for ids in out] for out in found] == [[len(i) for i in o] for o in wanted]
    assert found == wanted, case


def test_docs_print_the_table() -> None:
    page = (ROOT / "docs" / "combinations.md").read_text()
    assert page == as_markdown(), "run scripts/print_combinations.py > docs/combinations.md"


def test_rules_are_whole() -> None:
    """Each rule names settings and says what must hold; the fields that it names exist."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    facts = {field.name for field in dataclasses.fields(Facts)}
    beside = {"draft", "embeddings", "lora", "mesh", "model", "processes"}
    beside |= {"SamplingParams", "hidden", "load_params", "logprobs", "score", "update_params"}
    beside |= {"AsyncLLM", "as_completed", "rollout", "submit"}
    assert len({rule.name for rule in RULES}) == len(RULES) > 30
    for rule in RULES:
        assert rule.holds.endswith(".") and rule.settings and set(rule.facts) <= facts
        for setting in rule.settings:
            name = re.split(r"[.(]", setting)[0]
            assert name in fields | beside, setting
