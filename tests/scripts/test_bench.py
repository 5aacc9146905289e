"""scripts/bench.py: the workloads' draws, the figures, and one real run on a random model."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.params import param_shapes


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "scripts" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_script("bench")


def test_peers_draws():
    r = random.Random(0)  # the loop that every engine of the comparison runs
    prompts = [[r.randint(10, 1900) for _ in range(r.randint(50, 200))] for _ in range(32)]
    outputs = [r.randint(50, 200) for _ in range(32)]
    args = bench.parse_args(["--random", "60m"])
    work = bench.workload(args, vocab_size=32000)
    assert work.requests_of() == (prompts, outputs)
    assert (work.temperature, work.max_len) == (1.0, 1024)


def test_nano_draws_and_flags():
    work = bench.workload(
        bench.parse_args(["--random", "0.6b", "--workload", "nano"]), vocab_size=151936
    )
    prompts, outputs = work.requests_of()
    assert len(prompts) == len(outputs) == 256
    assert (
        min(map(len, prompts)) >= 100
        and max(map(len, prompts)) <= 1024
        and max(map(max, prompts)) <= 10000
    )
    flags = [
        "--requests",
        "3",
        "--input",
        "2",
        "4",
        "--output",
        "5",
        "5",
        "--max-model-len",
        "64",
        "--temperature",
        "0",
    ]
    work = bench.workload(
        bench.parse_args(["--random", "tiny", "--workload", "nano", *flags]), vocab_size=2048
    )
    prompts, outputs = work.requests_of()
    assert (
        len(prompts) == 3
        and all(2 <= len(p) <= 4 and max(p) < 2048 for p in prompts)
        and outputs == [5, 5, 5]
    )
    assert (work.temperature, work.max_len) == (0.0, 64)


def test_weights_that_decode_reads():
    for config in bench.MODELS.values():
        shapes = jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
        matrices = sum(int(np.prod(shape)) for shape in shapes if len(shape) > 1)
        assert bench.num_weights(config) == matrices  # tied: the embedding is the head


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
        assert bench.model_config(bench.parse_args(["--random", str(path)])) == bench.MODELS["60m"]
    assert bench.model_config(bench.parse_args([str(tmp_path)])) == ModelConfig.coerce(tmp_path)


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


def test_a_run_on_a_random_model(capsys):
    flags = [
        "--requests",
        "3",
        "--input",
        "4",
        "9",
        "--output",
        "3",
        "6",
        "--max-model-len",
        "32",
        "--num-blocks",
        "8",
    ]
    assert (
        bench.main(["--random", "tiny", "--dtype", "float32", "--max-num-seqs", "8", *flags]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    _, outputs = bench.Workload(
        requests=3, input=(4, 9), output=(3, 6), ids=(10, 1900), temperature=1.0, max_len=32
    ).requests_of()
    assert record["output_tokens"] == sum(outputs)
    assert (
        record["compiles"] > 0
        and record["compile_s"] > 0
        and record["first_s"] >= record["best_s"] > 0
    )
    assert 0 <= record["padding_waste"] < 1 and 0 < record["host_share"] < 1
    assert {line.split()[0] for line in lines[:-1] if not line.startswith(" ")} == set(record)


def test_errors_are_one_sentence(capsys, tmp_path):
    assert bench.main([str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench: ") and err.count("\n") == 1
    with pytest.raises(SystemExit):
        bench.main([])
