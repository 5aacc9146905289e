"""Run an engine on the device at hand, as a program that gpu_programs.py starts. It prints a line
of JSON at each stage.

    python scripts/gpu_engine.py start --cache FOLDER [--sleep]    # defaults; compiled steps kept
    python scripts/gpu_engine.py steps --steps 50                  # greedy decode steps

--dry: a tiny model, on any backend.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import _common as common
import jax
import jax.numpy as jnp

import jpaged
from jpaged import SamplingParams, gpu_share
from jpaged.models.params import random_params

LAYERS = 4  # compiles of 28 take longer than the first minute
PROMPT = list(range(1, 33))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def tell(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def allocator() -> dict[str, int]:
    return dict(jax.devices()[0].memory_stats() or {})


def model(dry: bool) -> Any:
    config = common.qwen3(64, 96, 2, 4, 2, 16, 512) if dry else common.MODELS["0.6b"]
    return config if dry else dataclasses.replace(config, num_layers=LAYERS)


def start(args: argparse.Namespace) -> None:
    """Start an engine with the defaults. Put it to sleep, and wake it beside other arrays."""
    gpu_share.take_most()
    tell(**common.environment(), share=gpu_share.share(), allocator_before=allocator())
    params = random_params(model(args.dry), dtype="float32" if args.dry else "bfloat16")
    jax.block_until_ready(jax.tree.leaves(params))
    tell(weights_s=time.time() - args.began, allocator_with_weights=allocator())
    settings = SMALL if args.dry else {}
    llm = jpaged.LLM(params, compilation_cache_dir=args.cache, **settings)
    size = llm.session.pool.size
    assert size is not None
    tell(engine_s=time.time() - args.began, blocks=size.num_blocks, allocator_with_pool=allocator())
    (out,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    first = out.outputs[0].token_ids
    report = llm.stats()
    tell(
        tokens_s=time.time() - args.began,
        attention=report["attention"],
        compiles=report["num_compiles"],
        compile_s=report["compile_time_s"],
        pool_bytes=llm.session.runner.pool_bytes,
    )
    if not args.sleep:
        return
    began = time.perf_counter()
    llm.sleep()
    tell(sleep_s=time.perf_counter() - began, allocator_asleep=allocator())
    # What a trainer leaves: every second of these stays.
    bytes_of_one = allocator().get("bytes_limit", 1 << 18) // 256
    held = [jnp.zeros((bytes_of_one,), jnp.int8) for _ in range(8)]
    del held[::2]
    tell(allocator_beside=allocator())
    began = time.perf_counter()
    llm.wake()
    awake = llm.session.pool.size
    assert awake is not None
    tell(wake_s=time.perf_counter() - began, blocks_awake=awake.num_blocks)
    (out,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    same = out.outputs[0].token_ids == first
    tell(allocator_awake=allocator(), same_tokens=same)
    if not same:
        raise SystemExit("the tokens after wake are not those before sleep")


def steps(args: argparse.Namespace) -> None:
    """Decode so many steps, two rows at once, two dispatches in flight."""
    params = random_params(model(args.dry), dtype="float32" if args.dry else "bfloat16")
    small: dict[str, Any] = SMALL | {"max_model_len": 256}
    llm = jpaged.LLM(params, num_blocks=64, **small)
    params_of = SamplingParams(temperature=0, max_tokens=args.steps, ignore_eos=True)
    llm.generate([PROMPT, PROMPT[1:]], params_of, use_tqdm=False)
    began = time.perf_counter()
    llm.generate([PROMPT, PROMPT[1:]], params_of, use_tqdm=False)
    tell(seconds=time.perf_counter() - began, steps=args.steps)


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("gpu_engine", __doc__)
    add = parser.add_argument
    add("what", choices=("start", "steps"))
    add("--cache", help="folder of compiled steps")
    add("--sleep", action="store_true", help="sleep and wake, too")
    add("--steps", type=int, default=50)
    add("--began", type=float, default=time.time(), help="when the program was started")
    add("--dry", action="store_true", help="a tiny model, on any backend")
    args = parser.parse_args(argv)
    {"start": start, "steps": steps}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
