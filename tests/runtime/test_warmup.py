"""The compile contract: the table of shapes is known, and can be compiled ahead."""

import dataclasses
import random
from pathlib import Path

import jax
import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.shapes import shape_table
from jpaged.runtime import compiled_steps
from jpaged.runtime.compiled_steps import default_folder, use_compilation_cache
from tests.tiny import ZEROS, compiles, config, engine, make_params, make_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.mark.own_steps
def test_warmup_compiles_the_table_once_and_nothing_is_met_later() -> None:
    llm = LLM(make_params(), **vars(engine(decode_steps=2, swap_space_gib=0.001, max_model_len=16)))
    assert all(
        report.compile_seconds is None is report.executable_bytes for report in llm.buckets()
    )
    assert llm.warmup(use_tqdm=False) > 0
    reports = llm.buckets()
    table = sorted(shape_table(llm.session.runner.config), key=lambda shape: shape.order)
    assert [(r.phase, r.tokens, r.rows) for r in reports] == [
        (b.phase, b.tokens, b.rows) for b in table
    ]
    kinds = {(r.phase, r.features, r.steps, r.tables) for r in reports}
    assert kinds == {
        *(("prefill", features, 1, 1) for features in ("plain", "prompt")),
        *(("sample", features, 1, 0) for features in ("plain", "filtered", "full")),
        *(("decode", features, 2, 1) for features in ("plain", "filtered", "full")),
    }
    assert all(
        r.compile_seconds and r.temp_bytes and r.executable_bytes is not None and not r.hits
        for r in reports
    )
    with compiles() as names:
        llm.warmup(use_tqdm=False)
        full = SamplingParams(
            presence_penalty=1.0, prompt_logprobs=1, max_tokens=5, ignore_eos=True
        )
        llm.generate(make_prompts(3, 11, 9), [GREEDY, full, GREEDY], use_tqdm=False)
    assert set(names) <= {ZEROS}


# All that a request can ask for: what each needs of the steps, the counts, the moves and the host.
FEATURES: list[tuple[str, SamplingParams]] = [
    ("greedy", GREEDY),
    ("seeded", SamplingParams(seed=1, top_p=0.9, top_k=20, min_p=0.01, max_tokens=6)),
    ("penalties", SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, max_tokens=6)),
    ("frequency", SamplingParams(frequency_penalty=0.5, max_tokens=9, ignore_eos=True)),
    ("bias", SamplingParams(logit_bias={3: 2.0, 5: -100.0}, max_tokens=6)),
    ("min_tokens", SamplingParams(min_tokens=4, stop_token_ids=[1, 2, 3], max_tokens=8)),
    ("samples", SamplingParams(n=3, temperature=0.9, max_tokens=9, ignore_eos=True)),
    ("logprobs", SamplingParams(logprobs=3, logprobs_mode="processed", max_tokens=4)),
    ("prompt logprobs", SamplingParams(prompt_logprobs=2, max_tokens=4)),
    ("tempered", SamplingParams(temperature=0.7, logprobs_mode="tempered", max_tokens=9)),
    ("one token", SamplingParams(max_tokens=1)),
]


@pytest.mark.parametrize(
    ("windows", "mixed"), [((None, 7), True), pytest.param((), False, marks=pytest.mark.middle)]
)
def test_strict_compiles_nothing_after_the_start(
    windows: tuple[int | None, ...], mixed: bool
) -> None:
    """Not one function of jax's own either, from the first request on: every feature in turn, then
    shuffled and all at once, so that they are preempted, swapped and found in the cache; beams,
    scores and aborts.
    """
    sizes = {"max_model_len": 32, "num_blocks": 12, "swap_space_gib": 0.01, "swap_min_tokens": 8}
    model = config(sliding_windows=windows)
    settings = engine(strict=True, mixed=mixed, max_logprobs=6, **sizes)
    llm = LLM(make_params(0, model), **vars(settings))
    params = [sampling for _, sampling in FEATURES]
    prompts = make_prompts(3, 11, 9, 20, 5, 17, 2, 13, 8, 6, 22)
    with compiles() as names:
        for prompt, (feature, sampling) in zip(prompts, FEATURES, strict=True):
            llm.generate(prompt, sampling, use_tqdm=False)
            assert names == [], feature
        rng = random.Random(0)
        for _ in range(3):
            order = rng.sample(range(len(prompts)), len(prompts)) * 2
            longest = {"max_tokens": 10, "ignore_eos": True}
            chosen = [dataclasses.replace(params[i], **longest) for i in order]
            llm.generate([prompts[i] for i in order], chosen, use_tqdm=False)
        llm.beam_search(prompts[:2], beam_width=3, max_tokens=6, use_tqdm=False)
        llm.score(prompts[1:3], temperature=0.7)
        ids = [llm.add_request(*given) for given in zip(prompts, params, strict=True)]
        for _ in range(4):
            llm.step()
        llm.abort(ids[3])
        while llm.has_unfinished():
            llm.step()
    assert names == []
    stats = llm.stats()
    assert stats["preemptions_swapped"] and stats["preemptions_recomputed"]
    llm.close()


@pytest.mark.own_steps
def test_buckets_count_hits_and_padding() -> None:
    llm = LLM(make_params(), **vars(engine(decode_steps=4)))
    llm.generate(make_prompts(5, 7), GREEDY, use_tqdm=False)
    used = {(r.phase, r.features): r for r in llm.buckets() if r.hits}
    assert set(used) == {("prefill", "plain"), ("sample", "plain"), ("decode", "plain")}
    prefill, sample, decode = (used[phase, "plain"] for phase in ("prefill", "sample", "decode"))
    assert (prefill.hits, prefill.padding_waste) == (1, 1 - 12 / 16)
    assert (sample.hits, sample.padding_waste) == (1, 1 - 2 / 8)
    assert (decode.hits, decode.steps, decode.padding_waste) == (1, 4, 1 - 8 / 32)


@pytest.fixture
def cache_setting():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_compilation_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_setting: None
) -> None:
    """A folder of the user's cache, unless jax has one already; None changes nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = jax.config.jax_compilation_cache_dir
    use_compilation_cache("auto")
    use_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir == own
    jax.config.update("jax_compilation_cache_dir", None)
    use_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    use_compilation_cache("auto")
    assert jax.config.jax_compilation_cache_dir == str(default_folder())
    assert default_folder().is_relative_to(tmp_path / "jpaged" / "compiled")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == compiled_steps.LEAST_SECONDS
    use_compilation_cache(str(tmp_path / "mine"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
