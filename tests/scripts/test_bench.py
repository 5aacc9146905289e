"""scripts/bench.py: the workloads' draws, the figures, and real runs on a random model."""

import json
import random
from pathlib import Path

import _common as common
import jax
import numpy as np
import pytest

from jpaged.cli import bench
from jpaged.models.config import ModelConfig
from jpaged.models.params import param_shapes

SMALL = "--requests 3 --input 4 9 --output 3 6 --max-model-len 16 --num-blocks 40 --dtype float32"
SMALL += " --max-num-seqs 8 --max-num-batched-tokens 64 --block-size 4"


def test_peers_draws():
    r = random.Random(0)  # the loop that every engine of the comparison runs
    prompts = [[r.randint(10, 1900) for _ in range(r.randint(50, 200))] for _ in range(32)]
    outputs = [r.randint(50, 200) for _ in range(32)]
    args = bench.parse_args(["--random", "60m"])
    work = bench.full_workload(args, vocab_size=32000)
    assert work.requests_of() == (prompts, outputs)
    assert (work.temperature, work.max_len) == (1.0, 1024)


def test_nano_draws_and_flags():
    args = bench.parse_args(["--random", "0.6b", "--workload", "nano"])
    work = bench.full_workload(args, vocab_size=151936)
    prompts, outputs = work.requests_of()
    assert len(prompts) == len(outputs) == 256
    assert (
        min(map(len, prompts)) >= 100
        and max(map(len, prompts)) <= 1024
        and max(map(max, prompts)) <= 10000
    )
    flags = ["--requests", "3", "--input", "2", "4", "--output", "5", "5"]
    flags += ["--max-model-len", "64", "--temperature", "0"]
    args = bench.parse_args(["--random", "tiny", "--workload", "nano", *flags])
    work = bench.full_workload(args, vocab_size=2048)
    prompts, outputs = work.requests_of()
    assert (
        len(prompts) == 3
        and all(2 <= len(p) <= 4 and max(p) < 2048 for p in prompts)
        and outputs == [5, 5, 5]
    )
    assert (work.temperature, work.max_len) == (0.0, 64)


def test_weights_that_decode_reads():
    for config in common.MODELS.values():
        shapes = jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
        matrices = sum(int(np.prod(shape)) for shape in shapes if len(shape) > 1)
        assert common.num_weights(config) == matrices  # tied: the embedding is the head


def test_models_are_those_of_the_comparison(tmp_path):
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 512,
    }
    raw |= {
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    raw |= {
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for path in (tmp_path, tmp_path / "config.json"):
        assert (
            common.model_config(bench.parse_args(["--random", str(path)])) == common.MODELS["60m"]
        )
    assert common.model_config(bench.parse_args([str(tmp_path)])) == ModelConfig.coerce(tmp_path)


def test_figures():
    slow = {
        "seconds": 9.0,
        "num_compiles": 3,
        "compile_time_s": 4.5,
        "prefill_steps": 1,
        "decode_steps": 1,
    }
    best = {
        "seconds": 4.0,
        "output_tokens": 80,
        "num_compiles": 0,
        "compile_time_s": 0.0,
        "preemptions": 2,
    }
    best |= {"copied_blocks": 4, "swap_out_bytes": 0, "swap_in_bytes": 0}
    best |= {"prefill_tokens": 100, "prefill_time_s": 0.5, "prefill_steps": 2}
    best |= {"decode_tokens": 60, "decode_time_s": 3.0, "decode_steps": 8, "padded_tokens": 200}
    best |= {"host_time_s": 0.5, "device_time_s": 2.5}
    found = bench.figures([slow, best], prompt_tokens=100, weight_bytes=10**9, bandwidth=10.0)
    wanted = {
        "compiles": 3,
        "compile_s": 4.5,
        "first_s": 9.0,
        "best_s": 4.0,
        "prefill_tok_s": 200.0,
        "decode_tok_s": 20.0,
        "output_tok_s": 20.0,
        "total_tok_s": 45.0,
        "padding_waste": 0.2,
        "host_ms_per_step": 50.0,
        "device_ms_per_step": 250.0,
        "host_share": 1 / 6,
        "outside_steps_s": 1.0,
        "preemptions": 2,
        "decode_weights_gb_s": 8 / 3,
        "decode_fraction_of_read_bandwidth": 8 / 30,
    }
    assert {k: found[k] for k in wanted} == pytest.approx(wanted)


def run(folder: Path, *flags: str) -> None:
    assert bench.main(["--random", str(folder), *SMALL.split(), *flags]) == 0


@pytest.mark.own_steps
@pytest.mark.usefixtures("few_shapes")
def test_a_run_on_a_random_model(random_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(random_folder)
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    _, outputs = bench.Workload(
        requests=3, input=(4, 9), output=(3, 6), ids=(10, 96), temperature=1.0, max_len=16
    ).requests_of()
    assert record["output_tokens"] == sum(outputs)
    assert record["compiles"] > 0 and record["compile_s"] > 0
    assert record["first_s"] >= record["best_s"] > 0
    assert 0 <= record["padding_waste"] < 1 and 0 < record["host_share"] < 1
    assert {line.split()[0] for line in lines[:-1] if not line.startswith(" ")} == set(record)


@pytest.mark.usefixtures("few_shapes")
def test_what_samples_share(random_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 full blocks of the prompt are held once, and each sample's own 2; the open one is copied
    for all but the last, which writes the original.
    """
    found = []
    one = ["--input", "10", "10", "--output", "6", "6"]
    for more in (["--requests", "1", "--n", "4"], ["--requests", "4"]):
        run(random_folder, *one, *more)
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    names = ("prefill_tokens", "output_tokens", "peak_blocks_in_use", "copied_blocks")
    assert [[record[name] for name in names] for record in found] == [
        [10, 24, 2 + 4 * 2, 3],
        [40, 24, 4 * 4, 0],
    ]


@pytest.mark.usefixtures("few_shapes")
def test_a_batch_file_beside_generate(
    random_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llms, make_llm = [], bench.make_llm
    monkeypatch.setattr(bench, "make_llm", lambda *args: llms.append(make_llm(*args)) or llms[0])
    run(random_folder, "--mode", "batch")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Both ways answer the same requests: one round that compiles, and two.
    assert llms[0].stats()["generated_tokens"] == 2 * 3 * record["output_tokens"]
    for clock in ("wall", "cpu"):
        ours, theirs = (record[f"{name}_{clock}_s"] for name in ("batch", "generate"))
        assert len(ours) == len(theirs) == 2 and 0 < ours[0] <= ours[1]
        assert record[f"{clock}_ratio_of_best"] == pytest.approx(theirs[0] / ours[0], rel=1e-4)
        medians = [sum(seconds) / 2 for seconds in (theirs, ours)]
        assert record[f"{clock}_ratio_of_median"] == pytest.approx(medians[0] / medians[1], 1e-4)


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main([str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("jpaged bench: ") and err.count("\n") == 1
    flags = (["--repeat", "0"], ["--n", "0"], ["--input", "9", "4"], ["--output", "0", "5"])
    for wrong in ([], *(["--random", "tiny", *more] for more in flags)):
        with pytest.raises(SystemExit):
            bench.main(wrong)
        assert not wrong or f"{wrong[2]} " in capsys.readouterr().err
    tries = {
        "up to 400 tokens": ["--max-model-len", "399"],
        "--max-model-len 1024": ["--output", "5", "1000"],
        "--max-id -1": ["--max-id", "-1"],
        "--random nosuch: no such file, and no size: those are tiny, 60m": ["--random", "nosuch"],
    }
    for reason, more in tries.items():
        assert bench.main(["--random", "tiny", *more]) == 1
        assert reason in capsys.readouterr().err


def test_a_vocabulary_below_the_workloads_ids() -> None:
    args = bench.parse_args(["--random", "tiny", "--max-id", "3"])
    prompts, _ = bench.full_workload(args, vocab_size=2048).requests_of()
    assert {token for prompt in prompts for token in prompt} == {3}
