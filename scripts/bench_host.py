"""Time the host side alone: schedule, pack and commit of decode steps, with a device that answers
at once.

    python scripts/bench_host.py [--rows 16 64 256 1024 4096] [--steps 200]

It prints a line for each number of running sequences: the medians over the steps in microseconds,
and schedule + commit per sequence. The time of a step must grow with the rows, and not with the
size of the pool or of the queues.
"""

import dataclasses
import random
import statistics
import sys
import time

import _common as common
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import GroupSize
from jpaged.engine.commit import commit
from jpaged.engine.layout import output_sections
from jpaged.engine.packing import pack, unpack
from jpaged.engine.scheduler import Scheduler, schedule
from jpaged.engine.sequence import Request, Sequence
from jpaged.sampling_params import SamplingParams

MODEL = dataclasses.replace(common.MODELS["tiny"], max_position_embeddings=4096)
PROMPT = 120


def measure(rows: int, steps: int, block_size: int) -> dict[str, float]:
    """Return the median microseconds of a decode step's parts while `rows` sequences run."""
    per_seq = -(-(PROMPT + 3 * steps) // block_size)
    config = EngineConfig(
        max_model_len=4096,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        block_size=block_size,
        num_blocks=rows * per_seq + 64,
    ).resolve(MODEL)
    assert config.num_blocks is not None
    blocks = BlockManager([GroupSize(config.num_blocks)], block_size)
    scheduler = Scheduler(blocks, max_num_seqs=rows, max_num_batched_tokens=8192)
    rng = random.Random(0)
    for i in range(rows):
        params = SamplingParams(max_tokens=3 * steps, ignore_eos=True)
        prompt = [rng.randrange(MODEL.vocab_size) for _ in range(PROMPT)]
        scheduler.queues.waiting.add(
            Request([Sequence(str(i), prompt, params, max_model_len=4096)]).sequences[0]
        )
    times: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    while len(times["commit"]) < steps:
        began = time.perf_counter()
        (plan,) = schedule((scheduler,))
        scheduled = time.perf_counter()
        batch = pack(plan, config)
        packed = time.perf_counter()
        assert batch.drawing is not None
        out = np.full(output_sections(batch.drawing, config)[1], 7, np.int32)
        out[: batch.drawing.rows] = 1  # num_drawn
        result = unpack(batch, config, [out], weight_version=1)[0]
        answered = time.perf_counter()
        commit(scheduler.queues, plan, result)
        if plan.phase == "decode":
            times["commit"].append(time.perf_counter() - answered)
            times["schedule"].append(scheduled - began)
            times["pack"].append(packed - scheduled)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("bench_host", __doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    add("--steps", type=int, default=200, help="decode steps measured for each number of rows")
    add("--block-size", type=int, default=16)
    args = parser.parse_args(argv)
    print(f"{'rows':>6} {'schedule':>10} {'pack':>10} {'commit':>10}   schedule + commit")
    for rows in args.rows:
        us = measure(rows, args.steps, args.block_size)
        both = us["schedule"] + us["commit"]
        print(
            f"{rows:6d} {us['schedule']:7.0f} us {us['pack']:7.0f} us {us['commit']:7.0f} us"
            f"   {both / 1e3:7.3f} ms a step, {both / rows:5.2f} us a sequence"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
