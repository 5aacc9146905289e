"""Time the engine on nano-vllm's workload: random ids, random lengths, no stopping; a table, then
one JSON line.

    python scripts/bench.py CHECKPOINT                       # 32 requests of 50-200 + 50-200 tokens
    python scripts/bench.py --random 0.6b --workload nano    # nano-vllm's: 256 requests of 100-1024
    + 100-1024 tokens python scripts/bench.py --random path/to/config.json --requests 8 --output 10
    20

The draws come in the order of nano-vllm's bench.py, so the prompts are the same. Runs after the
first find their steps compiled; the best run counts. The prefix cache is off (the runs repeat their
prompts) unless --prefix-caching.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from jpaged.checks import read_json
from jpaged.errors import JpagedError
from jpaged.models.config import ModelConfig


def qwen3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelConfig:
    """A dense Qwen3 of the given sizes, embeddings tied."""
    return ModelConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        qk_norm=True,
    )


MODELS = {
    "tiny": qwen3(128, 384, 4, 4, 2, 32, 2048),
    "60m": qwen3(512, 1536, 8, 8, 4, 64, 32000),
    "0.6b": qwen3(1024, 3072, 28, 16, 8, 128, 151936),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Ranges are inclusive. ids: of the random prompt tokens. max_len: the engine's
    max_model_len.
    """

    requests: int
    input: tuple[int, int]
    output: tuple[int, int]
    ids: tuple[int, int]
    temperature: float
    max_len: int

    def requests_of(self, seed: int = 0) -> tuple[list[list[int]], list[int]]:
        """Prompts, and how many tokens each is to generate. The order of the draws is
        nano-vllm's.
        """
        r = random.Random(seed)
        prompts = [
            [r.randint(*self.ids) for _ in range(r.randint(*self.input))]
            for _ in range(self.requests)
        ]
        return prompts, [r.randint(*self.output) for _ in range(self.requests)]


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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", help="a checkpoint folder")
    add(
        "--random",
        metavar="SIZE",
        help=f"a random model instead: {', '.join(MODELS)} or a config.json",
    )
    add("--workload", choices=WORKLOADS, default="peers")
    add(
        "--requests",
        type=int,
        help="number of requests (default: the workload's, as with the next four)",
    )
    add("--input", type=int, nargs=2, metavar=("FROM", "TO"), help="prompt tokens")
    add("--output", type=int, nargs=2, metavar=("FROM", "TO"), help="generated tokens")
    add("--max-id", type=int, help="largest prompt token id (never past the vocabulary)")
    add("--temperature", type=float)
    add("--repeat", type=int, default=2, help="runs; the best counts (default: 2)")
    add = parser.add_argument_group("engine").add_argument
    add(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16",
    )
    add("--max-model-len", type=int, help="default: the workload's")
    add("--max-num-seqs", type=int)
    add("--max-num-batched-tokens", type=int)
    add("--block-size", type=int)
    add("--num-blocks", type=int)
    add("--decode-steps", type=int)
    add("--attention")
    add("--deterministic", action="store_true")
    add("--prefix-caching", dest="enable_prefix_caching", action="store_true")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give a checkpoint folder or --random, one of the two")
    if args.repeat < 1:
        parser.error(f"--repeat {args.repeat}: must be at least 1")
    return args


def workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    """The named workload with what the flags change of it."""
    base = WORKLOADS[args.workload]
    flags = {
        "requests": args.requests,
        "temperature": args.temperature,
        "max_len": args.max_model_len,
    }
    flags |= {
        name: value and tuple(value)
        for name, value in (("input", args.input), ("output", args.output))
    }
    top = min(base.ids[1] if args.max_id is None else args.max_id, vocab_size - 1)
    return dataclasses.replace(
        base, ids=(base.ids[0], top), **{k: v for k, v in flags.items() if v is not None}
    )


def model_config(args: argparse.Namespace) -> ModelConfig:
    if args.checkpoint is not None:
        return ModelConfig.coerce(args.checkpoint)
    if args.random in MODELS:
        return MODELS[args.random]
    path = Path(args.random)
    return ModelConfig.from_hf(read_json(path / "config.json" if path.is_dir() else path))


def random_params(config: ModelConfig, dtype: str) -> Any:
    """Params drawn straight onto the default device: normal(0, 0.02), norms one, biases zero."""
    import jax
    import jax.numpy as jnp

    from jpaged.models.params import Params, param_shapes

    draw = jax.jit(
        lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(dtype), static_argnums=1
    )
    keys = iter(jax.random.split(jax.random.key(0), 16 * (config.num_layers + 1)))

    def build(tree: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, shape in tree.items():
            if isinstance(shape, dict):
                made[name] = build(shape)
            elif len(shape) == 1 or name == "qkv_bias":
                made[name] = jnp.full(shape, float(name == "scale"), dtype)
            else:
                made[name] = draw(next(keys), shape)
        return made

    return Params(build(param_shapes(config)), config=config)


def make_llm(args: argparse.Namespace, config: ModelConfig, work: Workload) -> Any:
    """The engine, from nothing to ready (its steps are compiled when they are first met)."""
    import jpaged

    names = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "num_blocks",
        "decode_steps",
        "attention",
        "dtype",
    )
    engine = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    engine |= {"enable_prefix_caching": args.enable_prefix_caching, "max_model_len": work.max_len}
    engine |= {"deterministic": args.deterministic}
    model = args.checkpoint if args.checkpoint is not None else random_params(config, args.dtype)
    return jpaged.LLM(model, **engine)


def timed(
    llm: Any, prompts: list[list[int]], outputs: list[int], temperature: float
) -> dict[str, float]:
    """One run: seconds, generated tokens, and how far each of the engine's counters went."""
    from jpaged import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs
    ]
    before, began = llm.stats(), time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    after = llm.stats()
    run = {k: v - before[k] for k, v in after.items() if isinstance(v, int | float)}
    generated = sum(len(out.outputs[0].token_ids) for out in outs)
    if generated != sum(outputs):
        raise RuntimeError(f"{generated} tokens came back, {sum(outputs)} were asked for")
    return run | {"seconds": seconds, "output_tokens": generated}


def read_bandwidth() -> float:
    """GB/s at which a reduction reads 256 MB on the default device, best of five: a bound for
    decode's weight reads.
    """
    import jax
    import jax.numpy as jnp

    x = jnp.ones((8, 1 << 23), jnp.float32)
    largest = jax.jit(lambda x: x.max(axis=1))
    times = []
    for _ in range(6):
        began = time.perf_counter()
        largest(x).block_until_ready()
        times.append(time.perf_counter() - began)
    return x.nbytes / min(times[1:]) / 1e9


def figures(
    runs: list[dict[str, float]], prompt_tokens: int, weight_bytes: int, bandwidth: float
) -> dict[str, Any]:
    """What the runs say. Rates are of the best run; compile figures are of them all."""
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
        "preemptions": best["preemptions"],
        "decode_weights_gb_s": decode_gb_s,
        "decode_fraction_of_read_bandwidth": decode_gb_s / bandwidth,
    }


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Start, run, measure. Returns the record that the JSON line holds."""
    import jax

    config = model_config(args)
    work = workload(args, config.vocab_size)
    prompts, outputs = work.requests_of()
    began = time.perf_counter()
    llm = make_llm(args, config, work)
    startup = time.perf_counter() - began
    runs = [timed(llm, prompts, outputs, work.temperature) for _ in range(args.repeat)]
    weights = num_weights(config) * {"float32": 4}.get(args.dtype, 2)
    stats = llm.stats()
    name = args.checkpoint if args.checkpoint is not None else f"random {args.random}"
    record: dict[str, Any] = {
        "engine": "jpaged",
        "model": str(name),
        "dtype": args.dtype,
        "workload": args.workload,
    }
    record |= {
        "requests": work.requests,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    record |= {"startup_s": startup} | figures(
        runs, sum(map(len, prompts)), weights, read_bandwidth()
    )
    return record | {name: stats[name] for name in ("buckets", "step_sizes") if name in stats}


def num_weights(config: ModelConfig) -> int:
    """Weights that one decode step reads: all but the rows of an embedding that is not also the
    head.
    """
    e, f, d, k = config.hidden_size, config.intermediate_size, config.head_dim, config.num_kv_heads
    attention = k * (2 * config.group_size + 2) * d * e
    return config.num_layers * (attention + 3 * e * f) + config.vocab_size * e


def table(record: dict[str, Any]) -> str:
    """The record for a person: three significant digits at most behind the point, one figure a
    line.
    """
    rows = []
    for name, value in record.items():
        if isinstance(value, list):
            rows += [f"{name if i == 0 else '':<36}{item}" for i, item in enumerate(value)]
        else:
            rows.append(f"{name:<36}{f'{value:,.3f}' if isinstance(value, float) else value}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = bench(args)
    except JpagedError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 1
    print(table(record))
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
