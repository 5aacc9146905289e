"""scripts/tune_buckets.py: the best table is the one that trying all finds, and its waste is what
the engine has.
"""

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tune_buckets
from hypothesis import given
from hypothesis import strategies as st

import jpaged
from jpaged import EngineConfig, SamplingParams
from tests.tiny import CONFIG, config, make_params, make_prompts

COST = tune_buckets.Cost(step=1.0, unit=0.5, compile=10.0)


def price(
    sizes: dict[int, int], buckets: tuple[int, ...], unit: float, compile_cost: float
) -> float:
    padded = sum(next(b for b in buckets if b >= size) * count for size, count in sizes.items())
    return unit * padded + compile_cost * len(buckets)


@given(
    st.dictionaries(st.integers(1, 60), st.integers(0, 30), min_size=1, max_size=7),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([0.0, 1.0, 16.0, 500.0]),
    st.none() | st.integers(1, 8),
)
def test_no_table_is_better(
    sizes: dict[int, int], unit: float, compile_cost: float, most: int | None
) -> None:
    found = tuple(tune_buckets.best_buckets(sizes, unit, compile_cost, most))
    *smaller, largest = sorted(sizes)
    tables = [
        (*c, largest) for k in range(len(smaller) + 1) for c in itertools.combinations(smaller, k)
    ]
    allowed = [t for t in tables if most is None or len(t) <= most]
    assert found in allowed
    best = min(price(sizes, t, unit, compile_cost) for t in allowed)
    assert price(sizes, found, unit, compile_cost) == pytest.approx(best)


def tune(sizes: dict[int, int], cost: Any = COST, **changes: Any) -> list[int]:
    how = {"limit": 64, "runs": 1.0, "most": None, "multiple": 8, "strict": False} | changes
    return tune_buckets.tune(sizes, cost, **how)


def test_tables_end_at_the_limit_and_are_multiples() -> None:
    assert tune({}) == [64]
    assert tune({20: 1, 30: 1}) == [32, 64], (
        "one bucket is enough, and the limit's is never compiled"
    )
    assert tune({20: 1, 30: 1}, runs=100.0) == [24, 32, 64], "it pays if they run often"
    assert tune({3: 100, 30: 100, 50: 1}, most=1) == [56, 64]
    assert tune({50: 1}, strict=True) == [64], (
        "strict compiles the last one whether it is used or not"
    )
    assert tune({61: 5}, limit=61) == [64]
    assert tune({1: 9, 2: 9}, multiple=1, runs=100.0, limit=5) == [1, 2, 5]


def test_account() -> None:
    found = tune_buckets.account({3: 2, 8: 1, 20: 1}, [8, 16, 32], COST)
    assert (found.tokens, found.padded, found.steps, found.used) == (34, 56, 4, 2)
    assert found.seconds == 4 * 1.0 + 56 * 0.5 and tune_buckets.waste([found, found]) == 1 - 34 / 56


def test_simulation_is_the_scheduler() -> None:
    engine = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=16, block_size=4, num_blocks=32
    ).resolve(CONFIG)
    found = tune_buckets.simulate(engine, [(10, 3), (10, 1), (5, 2)])
    # 10 tokens and 6 of the next 10; its other 4 end it at once; then the 5; and a prefill draws
    # the first token.
    assert found == {"prefill": {16: 1, 4: 1, 5: 1}, "decode": {2: 1, 1: 1}}
    with pytest.raises(jpaged.ConfigError, match="1 of 2 requests cannot run"):
        small = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=2).resolve(CONFIG)
        tune_buckets.simulate(small, [(4, 1), (30, 1)])


def test_predicted_waste_is_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both tables through the real engine: the waste that it counts is, to the last digit, what was
    printed.
    """
    lengths = [
        (n, 4 if n > 5 else 2) for n in (5, 9, 6, 11, 8, 7, 10, 6, 9, 8)
    ]  # 79 tokens, then 10 rows, then 9
    (tmp_path / "lengths.jsonl").write_text("".join(f"[{n}, {m}]\n" for n, m in lengths))
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "block_size": 4,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    out = tmp_path / "config.json"
    files = ["--lengths", str(tmp_path / "lengths.jsonl"), "--out", str(out)]
    assert (
        tune_buckets.main([*files, *flags, "--compile-seconds=1e-4", "--multiple=2", "--buckets=1"])
        == 0
    )
    printed = dict(
        line.split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line
    )
    tuned = json.loads(out.read_text())
    assert printed["seq_buckets"] == str(tuned["seq_buckets"])
    limits = {name: settings[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    assert tuned == {"token_buckets": [80, 96], "seq_buckets": [10, 16]} | limits
    params = make_params(config=config(num_layers=1))
    prompts = make_prompts(*(n for n, _ in lengths))
    for title, tables in (("now", {}), ("tuned", tuned)):
        llm = jpaged.LLM(params, **settings | tables, enable_prefix_caching=False)
        wanted = [SamplingParams(max_tokens=m, ignore_eos=True) for _, m in lengths]
        llm.generate(prompts, wanted, use_tqdm=False)
        assert f"{llm.stats()['padding_waste']:.4f}" == printed[f"padding waste, {title}"]
        llm.close()
    assert float(printed["padding waste, tuned"]) < float(printed["padding waste, now"])


def test_a_record_sets_the_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record: dict[str, Any] = {
        "step_sizes": {"prefill": {"100": 2, "28": 1}, "decode": {"3": 10, "7": 4}}
    }
    record |= {"compile_s": 20.0, "compiles": 4, "prefill_tok_s": 57.0, "decode_tok_s": 29.0}
    path = tmp_path / "record.txt"
    path.write_text(f"a table for people\n{json.dumps(record)}\n")
    assert tune_buckets.main(["--record", str(path), "--runs-per-compile", "2"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[:5]
    assert head.split() == [
        "buckets",
        "used",
        "waste",
        "steps",
        *["steps", "s", "compile", "s", "total", "s"],
    ]
    now = rows[0].split()
    assert now[0] == "prefill," and now[-3:] == ["8.00", "10.00", "18.00"], (
        "228 tokens at 57 a second, two runs"
    )
    assert rows[2].split()[-3:] == ["4.00", "5.00", "9.00"], "58 rows at 29 a second"
    sizes = tune_buckets.record_sizes(record, path)
    args = argparse.Namespace(
        step_seconds=1.0, compile_seconds=2.0, prefill_seconds=3.0, decode_seconds=None
    )
    costs = tune_buckets.costs_of(args, {}, sizes, EngineConfig().resolve(CONFIG))
    assert costs["prefill"] == tune_buckets.Cost(step=1.0, unit=3.0, compile=2.0)
    assert costs["decode"].unit == tune_buckets.DEFAULTS["decode"].unit


def test_forms_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    for text in ("[[3, 4], [5, 6]]", "[3, 4]\n\n[5, 6]\n"):
        path.write_text(text)
        assert tune_buckets.read_lengths(path) == [(3, 4), (5, 6)]
    path.write_text("[3, 4]")
    assert tune_buckets.read_lengths(path) == [(3, 4)], "one line"


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    cases = [
        ("--lengths", "[3]", "wanted \\[prompt tokens"),
        ("--lengths", "[3, 0]", "at least one token"),
        ("--record", "nothing", "no JSON object"),
        ("--record", '{"prefill": {"a": 1}}', "step_sizes"),
        ("--record", '{"decode": {"9999": 1}}', "more than max_num_seqs=256"),
        ("--config", '{"max_rows": 1}', "max_rows"),
        ("--config", '{"max_num_seqs": 0}', "max_num_seqs=0"),
    ]
    for flag, text, message in cases:
        path.write_text(text)
        assert tune_buckets.main([flag, str(path)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("tune_buckets: ") and err.count("\n") == 1
        assert re.search(message, err), err
    assert tune_buckets.main(["--record", str(tmp_path / "none")]) == 1
    with pytest.raises(SystemExit):
        tune_buckets.main(["--buckets", "0"])
