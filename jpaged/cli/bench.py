"""Time the engine on nano-vllm's workload: random ids, random lengths, no stopping. It prints a
table, then one JSON line.

    jpaged bench CHECKPOINT                       # 32 requests of 50-200 + 50-200 tokens
    jpaged bench --random 0.6b --workload nano    # 256 of 100-1024 + 100-1024
    jpaged bench --random path/to/config.json --requests 8 --output 10 20
    jpaged bench --random 60m --mode batch        # a batch file beside `generate`
    jpaged bench --random 60m --requests 4 --n 8  # what samples of a prompt share

Random numbers are drawn in the order of nano-vllm's bench.py, so the prompts are the same. Runs
after the first find their steps compiled; the best run counts. The prefix cache is off (the runs
repeat their prompts) unless --prefix-caching is given. Every field of EngineConfig is a flag; what
the store saves, for example, shows with --num-blocks and --swap-space-gib.

--mode batch alternates between `LLM.generate` and a batch run of the same requests, which reads a
JSONL file, parses, seeds, formats and writes each line, and flushes when answers finish.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jpaged
from jpaged import SamplingParams, gpu_share
from jpaged.cli import models, timing
from jpaged.errors import ConfigError, JpagedError
from jpaged.flags import Parser, add_engine_groups, engine_settings
from jpaged.integrations.batch.formats import open_source
from jpaged.integrations.batch.lines import Settings
from jpaged.integrations.batch.manifest import make_manifest
from jpaged.integrations.batch.run import OK, RunOptions, run_batch
from jpaged.models.config import ModelConfig
from jpaged.models.forward import bind
from jpaged.models.params import nest, param_table, random_params
from jpaged.models.quantized import is_quantized

COMMON = (
    *("checkpoint", "--random", "--workload", "--requests", "--input", "--output", "--n"),
    *("--mode", "--repeat", "--temperature", "--max-model-len", "--max-num-seqs"),
    *("--max-num-batched-tokens", "--dtype", "--quantization"),
)
# Totals of the engine that are copied to the record.
COUNTS = ("preemptions", "copied_blocks", "swap_out_bytes", "swap_in_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A random workload. Ranges are inclusive. ids: the range of the random prompt tokens. max_len:
    the engine's max_model_len. n: samples a prompt.
    """

    requests: int
    input: tuple[int, int]
    output: tuple[int, int]
    ids: tuple[int, int]
    temperature: float
    max_len: int
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0

    def requests_of(self, seed: int = 0) -> tuple[list[list[int]], list[int]]:
        """Return prompts, and how many tokens to generate for each. Random numbers are drawn in
        nano-vllm's order.
        """
        r = random.Random(seed)
        prompts = [
            [r.randint(*self.ids) for _ in range(r.randint(*self.input))]
            for _ in range(self.requests)
        ]
        return prompts, [r.randint(*self.output) for _ in range(self.requests)]

    def sampling_params(self, outputs: list[int]) -> list[SamplingParams]:
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "n": self.n,
            "ignore_eos": True,
        }
        return [SamplingParams(max_tokens=length, **settings) for length in outputs]


WORKLOADS = {
    "peers": Workload(
        requests=32,
        input=(50, 200),
        output=(50, 200),
        ids=(10, 1900),
        temperature=1.0,
        max_len=1024,
    ),
    "nano": Workload(
        requests=256,
        input=(100, 1024),
        output=(100, 1024),
        ids=(0, 10000),
        temperature=0.6,
        max_len=4096,
    ),
}


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add(
        "--workload",
        choices=WORKLOADS,
        default="peers",
        help="the workload; the flags below change it",
    )
    add("--requests", type=int, help="how many")
    add("--input", type=int, nargs=2, metavar=("FROM", "TO"), help="prompt tokens")
    add("--output", type=int, nargs=2, metavar=("FROM", "TO"), help="generated tokens")


def workload(args: argparse.Namespace) -> Workload:
    """Return the named workload with the changes of the flags."""
    flags = {"requests": args.requests, "input": args.input, "output": args.output}
    named = WORKLOADS[args.workload]
    return dataclasses.replace(named, **{k: v for k, v in flags.items() if v is not None})


def make_parser(prog: str = "jpaged bench") -> Parser:
    """Return the parser of `jpaged bench`."""
    parser = Parser(prog=prog, description=__doc__, common=COMMON)
    add = parser.add_argument
    add("--mode", choices=("generate", "batch"), default="generate", help="what to time")
    add("--repeat", type=int, default=2, help="runs; the best counts (default: 2)")
    add("--max-id", type=int, help="largest prompt token id (never past the vocabulary)")
    add("--temperature", type=float, help="0 is greedy")
    add("--n", type=int, default=1, help="samples a prompt (default: 1)")
    models.add_model_flags(parser)
    add_workload_flags(parser)
    add_engine_groups(parser, dtype="bfloat16", enable_prefix_caching=False)
    return parser


def parse_args(argv: list[str] | None = None, prog: str = "jpaged bench") -> argparse.Namespace:
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    models.check_model_flags(parser, args)
    models.check_positive(parser, args, "repeat", "requests", "n", "input", "output")
    for name in ("input", "output"):
        low, high = getattr(args, name) or (1, 1)
        if low > high:
            parser.error(f"--{name} {low} {high}: FROM must be at most TO")
    return args


def full_workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    """Return `workload` with ids of the vocabulary and the other properties of the model.
    ConfigError where its longest request does not fit the context, or there are no such ids.
    """
    work = workload(args)
    top = min(work.ids[1] if args.max_id is None else args.max_id, vocab_size - 1)
    flags = {
        "temperature": args.temperature,
        "max_len": engine_settings(args).get("max_model_len"),
        "n": args.n,
    }
    overrides = {name: value for name, value in flags.items() if value is not None}
    if top < 0:
        raise ConfigError(f"--max-id {top}: must be at least 0")
    work = dataclasses.replace(work, ids=(min(work.ids[0], top), top), **overrides)
    longest = work.input[1] + work.output[1]
    if longest > work.max_len:
        raise ConfigError(
            f"requests of up to {longest} tokens (--input and --output) do not fit "
            f"--max-model-len {work.max_len}"
        )
    return work


def make_llm(args: argparse.Namespace, config: ModelConfig, work: Workload) -> Any:
    """Return the engine, ready to run (steps compile when they are first needed)."""
    engine: dict[str, Any] = engine_settings(args) | {"max_model_len": work.max_len}
    is_random = args.checkpoint is None
    model = random_params(config, dtype=args.dtype) if is_random else args.checkpoint
    return jpaged.LLM(model, **engine)


def timed(llm: Any, prompts: list[list[int]], work: Workload, outputs: list[int]) -> dict[str, Any]:
    """Run once. Return seconds, generated tokens, and the growth of each of the engine's
    counters.
    """
    before, began = llm.stats(), time.perf_counter()
    outs = llm.generate(prompts, work.sampling_params(outputs), use_tqdm=False)
    seconds = time.perf_counter() - began
    after = llm.stats()
    run = {k: v - before[k] for k, v in after.items() if isinstance(v, int | float)}
    generated = sum(len(c.token_ids) for out in outs for c in out.outputs)
    if generated != work.n * sum(outputs):
        raise RuntimeError(f"the engine returned {generated} tokens, not {work.n * sum(outputs)}")
    return run | {"seconds": seconds, "output_tokens": generated}


def figures(
    runs: list[dict[str, Any]], prompt_tokens: int, weight_bytes: int, bandwidth: float
) -> dict[str, Any]:
    """Return the figures of the runs. Rates are those of the best run; compile figures are of all
    runs.
    """
    best = min(runs, key=lambda run: run["seconds"])
    steps = best["prefill_steps"] + best["decode_steps"]
    host, device = best["host_time_s"], best["device_time_s"]
    computed = best["prefill_tokens"] + best["decode_tokens"]
    decode_gb_s = weight_bytes * best["decode_steps"] / max(best["decode_time_s"], 1e-9) / 1e9
    return {
        "compile_s": sum(run["compile_time_s"] for run in runs),
        "compiles": sum(run["num_compiles"] for run in runs),
        "first_s": runs[0]["seconds"],
        "best_s": best["seconds"],
        "prompt_tokens": prompt_tokens,
        "prefill_tokens": best["prefill_tokens"],
        "output_tokens": best["output_tokens"],
        "prefill_tok_s": best["prefill_tokens"] / max(best["prefill_time_s"], 1e-9),
        "decode_tok_s": best["decode_tokens"] / max(best["decode_time_s"], 1e-9),
        "output_tok_s": best["output_tokens"] / best["seconds"],
        "total_tok_s": (best["output_tokens"] + prompt_tokens) / best["seconds"],
        "padding_waste": 1 - computed / max(best["padded_tokens"], 1),
        "steps": steps,
        "host_ms_per_step": 1e3 * host / max(steps, 1),
        "device_ms_per_step": 1e3 * device / max(steps, 1),
        "host_share": host / max(host + device, 1e-9),
        "outside_steps_s": best["seconds"] - host - device,
        "decode_weights_gb_s": decode_gb_s,
        "decode_fraction_of_read_bandwidth": decode_gb_s / bandwidth,
        **{name: best[name] for name in COUNTS},
    }


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Start, run and measure. Return the record for the JSON line."""
    config = models.model_config(args)
    work = full_workload(args, config.vocab_size)
    prompts, outputs = work.requests_of()
    began = time.perf_counter()
    llm = make_llm(args, config, work)
    record: dict[str, Any] = {"engine": "jpaged", "model": models.model_name(args)}
    record |= {"dtype": args.dtype, "workload": args.workload, "requests": work.requests}
    record |= timing.environment() | {"startup_s": time.perf_counter() - began}
    if args.mode == "batch":
        return record | in_batch(llm, prompts, work, outputs, args.repeat)
    runs = [timed(llm, prompts, work, outputs) for _ in range(args.repeat)]
    weights = read_bytes(llm, config)
    bandwidth = timing.read_bandwidth()
    record |= figures(runs, sum(map(len, prompts)), weights, bandwidth)
    names = ("peak_blocks_in_use", "buckets", "step_sizes")
    return record | {name: value for name, value in llm.stats().items() if name in names}


def read_bytes(llm: Any, config: ModelConfig) -> int:
    """Return the bytes of weights that a decode step of one row reads, as they are served."""
    plain = param_table(config)
    names = jax.tree.leaves(bind(config, nest({name: name for name in plain})))
    weights = jax.tree.leaves(llm.session.runner.params, is_leaf=is_quantized)
    leaves = list(zip(names, weights, strict=True))
    total = sum(leaf.nbytes for name, leaf in leaves if plain[name].sides[1])
    unread = sum(
        leaf.nbytes
        for name, leaf in leaves
        if name == "embed.weight" and not config.tie_word_embeddings
    )
    experts = sum(leaf.nbytes for name, leaf in leaves if ".experts." in name)
    idle = experts - experts * config.experts_per_token // max(config.num_experts, 1)
    return total - unread - idle


def in_batch(
    llm: Any, prompts: list[list[int]], work: Workload, outputs: list[int], repeat: int
) -> dict[str, Any]:
    """Return wall and CPU seconds of `generate` and of a batch file in turn, and the ratios of
    both.
    """
    record: dict[str, Any] = {"output_tokens": work.n * sum(outputs)}
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_lines(source, prompts, work, outputs)
        ways = {
            "generate": lambda: timed(llm, prompts, work, outputs),
            "batch": lambda: run_file(llm, source, output),
        }
        timers = {name: functools.partial(clocks, way) for name, way in ways.items()}
        timings = timing.in_turn(timers, repeat)
    for i, clock in enumerate(("wall", "cpu")):
        times = {name: [run[i] for run in runs] for name, runs in timings.items()}
        record |= {f"{name}_{clock}_s": sorted(times[name]) for name in ways}
        for title, pick in (("best", min), ("median", statistics.median)):
            record[f"{clock}_ratio_of_{title}"] = pick(times["generate"]) / pick(times["batch"])
    return record


def clocks(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def write_lines(path: Path, prompts: list[list[int]], work: Workload, outputs: list[int]) -> None:
    common_settings = {"temperature": work.temperature, "n": work.n, "ignore_eos": True}
    with path.open("w") as file:
        for prompt, length in zip(prompts, outputs, strict=True):
            line = {"prompt_token_ids": prompt, "max_tokens": length} | common_settings
            file.write(json.dumps(line) + "\n")


def run_file(llm: Any, source: Path, output: Path) -> None:
    """Run a batch file, from opening the input to the last byte of the output on disk."""
    opened = open_source(str(source))
    options = RunOptions(
        output=str(output), existing="overwrite", window=4 * llm.engine_config.num_rows
    )
    manifest = make_manifest(model={}, settings={}, source=opened.identity(), shard=None)
    settings = Settings(defaults=SamplingParams())
    with contextlib.closing(opened), contextlib.redirect_stdout(io.StringIO()):
        nowhere = io.BytesIO()  # answers go to the file
        makers = (lambda: llm, lambda llm: settings)
        status = run_batch(options, opened, manifest, *makers, stdout=nowhere)
    assert status == OK, f"exit status {status}"


def table(record: dict[str, Any]) -> str:
    """Return the record for a person: one figure a line; a list takes several lines."""
    rows = []
    for name, value in record.items():
        if isinstance(value, list):
            rows += [f"{name if i == 0 else '':<36}{item}" for i, item in enumerate(value)]
        else:
            rows.append(f"{name:<36}{f'{value:,.3f}' if isinstance(value, float) else value}")
    return "\n".join(rows)


def main(argv: list[str] | None = None, prog: str = "jpaged bench") -> int:
    """Print the record. Return the exit status: 1 after one sentence on stderr."""
    args = parse_args(argv, prog)
    gpu_share.take_most()
    try:
        record = bench(args)
    except JpagedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    print(table(record))
    print(timing.json_line(record))
    return 0
