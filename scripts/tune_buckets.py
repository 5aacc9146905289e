"""Choose the padded sizes for which steps are compiled, from the sizes that steps really have.

    python scripts/tune_buckets.py --record record.json      # llm.stats(), or what bench.py printed
    python scripts/tune_buckets.py --lengths lengths.jsonl   # [prompt, output] tokens a line
    python scripts/tune_buckets.py --workload nano --out config.json   # bench.py's workloads

The engine's own scheduler runs the lengths, without a device, to find out which steps they make. A
step padded to a bucket of n tokens (rows, in decode) is assumed to take a + b*n seconds, and each
bucket that a step uses must be compiled once. Dynamic programming finds the buckets of least cost
for --runs-per-compile runs of these steps. --out writes settings for `EngineConfig(**json)`:
token_buckets and seq_buckets, and the settings that they bound. The other flags give the engine's
current settings; settings that nobody gives are those of this device.

Without --step-seconds and the like, a and b are those of bench.py's 60M model on two CPU cores in
bf16. A record with a rate in tokens a second scales them to that speed, and says how long a step
takes to compile.
"""

import argparse
import bisect
import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common
import jax
import numpy as np

from jpaged.cli import bench
from jpaged.config import EngineConfig
from jpaged.engine.cache.block_manager import BlockManager
from jpaged.engine.cache.kinds import GroupSize
from jpaged.engine.commit import commit
from jpaged.engine.plan import StepResult
from jpaged.engine.scheduler import Scheduler, schedule
from jpaged.engine.sequence import Request
from jpaged.engine.sequence import Sequence as Row
from jpaged.errors import ConfigError, JpagedError
from jpaged.flags import add_engine_flags, engine_settings
from jpaged.sampling_params import SamplingParams

# For each phase, the setting that pads its steps, and the setting that bounds them.
PHASES = {"prefill": "token_buckets", "decode": "seq_buckets"}
LIMITS = {"prefill": "max_num_batched_tokens", "decode": "max_num_seqs"}
VOCABULARY = 1 << 20  # of the simulation's random prompts, of which no two share a block

Sizes = dict[int, int]  # tokens (rows) of a step: how many such steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step (`step` + `unit` for each padded token or row), and of compiling one
    bucket.
    """

    step: float
    unit: float
    compile: float


# Fitted to steps of 128 to 1024 tokens and of 8 to 64 rows.
DEFAULTS = {
    "prefill": Cost(step=0.02, unit=3e-4, compile=3.0),
    "decode": Cost(step=0.01, unit=6e-4, compile=3.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """The cost of steps with a table of buckets. used: buckets that any step takes. seconds: of
    running all steps once.
    """

    tokens: int
    padded: int
    steps: int
    used: int
    seconds: float


def waste(accounts: Sequence[Account]) -> float:
    """Return the share of computed tokens that is padding, in the sense of
    `llm.stats()["padding_waste"]`.
    """
    return 1 - sum(a.tokens for a in accounts) / max(sum(a.padded for a in accounts), 1)


def account(sizes: Sizes, buckets: Sequence[int], cost: Cost) -> Account:
    taken = {size: buckets[bisect.bisect_left(buckets, size)] for size in sizes}
    padded, steps = sum(taken[size] * count for size, count in sizes.items()), sum(sizes.values())
    return Account(
        tokens=sum(size * count for size, count in sizes.items()),
        padded=padded,
        steps=steps,
        used=len(set(taken.values())),
        seconds=cost.step * steps + cost.unit * padded,
    )


def best_buckets(
    sizes: Mapping[int, float], unit: float, compile_cost: float, most: int | None = None
) -> list[int]:
    """Return the buckets, chosen from the sizes and including the largest, that minimise unit *
    padded + compile_cost * buckets.

    sizes: how often each occurs. most: the number of buckets at most. The result is exact, in
    O(n^2) for each number of buckets: the best table of k buckets that ends at size j is the best
    table of k - 1 that ends at some i < j, with one bucket more.
    """
    n = len(sizes)
    at, counts = (np.array(x, np.float64) for x in zip(*sorted(sizes.items()), strict=True))
    before = np.concatenate([[0.0], np.cumsum(counts)])
    # span[i, j]: one bucket for the sizes i..j-1, which it pads to size j-1.
    padded = (before[None, :] - before[:, None]) * np.concatenate([[0.0], at])[None, :]
    span = unit * padded + compile_cost
    span[np.tril_indices(n + 1)] = np.inf
    unpadded, cost, choices = unit * float(counts @ at), np.array([0.0] + [np.inf] * n), []
    best_cost, best_k = np.inf, 0
    for k in range(1, min(n, most or n) + 1):
        total = cost[:, None] + span
        choices.append(total.argmin(axis=0))
        cost = total.min(axis=0)
        if cost[n] < best_cost:
            best_cost, best_k = cost[n], k
        # More buckets would cost more even if there were no padding at all.
        if unpadded + compile_cost * (k + 1) >= best_cost:
            break
    ends = [n]
    for choice in reversed(choices[1:best_k]):
        ends.insert(0, int(choice[ends[0]]))
    return [int(at[end - 1]) for end in ends]


def tune(
    sizes: Sizes,
    cost: Cost,
    *,
    limit: int,
    runs: float,
    most: int | None,
    multiple: int,
    strict: bool,
) -> list[int]:
    """Return the best table for these steps. limit: a size that its last bucket must hold.
    multiple: a number of which every bucket is a multiple.
    """
    rounded, top = Counter(), -(-limit // multiple) * multiple
    for size, count in sizes.items():
        rounded[-(-size // multiple) * multiple] += count
    if strict or not rounded:  # the last bucket is compiled whether a step reaches it or not
        rounded[top] += 0
    buckets = best_buckets(rounded, cost.unit * runs, cost.compile, most)
    return buckets if buckets[-1] == top else [*buckets, top]


def simulate(config: EngineConfig, lengths: Sequence[tuple[int, int]]) -> dict[str, Sizes]:
    """Return the sizes of the steps in which the engine runs requests of (prompt, output) tokens
    that all arrive at once.

    config: resolved, with num_blocks. All prompts differ, so the prefix cache has no effect.
    """
    assert config.num_blocks is not None and config.max_model_len is not None
    scheduler = Scheduler(
        BlockManager([GroupSize(config.num_blocks)], config.block_size),
        max_num_seqs=config.num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_steps=config.decode_steps or 1,
    )
    rng = np.random.default_rng(0)
    for i, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        ids = rng.integers(0, VOCABULARY, prompt).tolist()
        row = Row(str(i), ids, params, max_model_len=config.max_model_len)
        scheduler.queues.waiting.add(Request([row]).sequences[0])
    sizes: dict[str, Counter[int]] = {phase: Counter() for phase in PHASES}
    while plans := schedule((scheduler,)):
        plan = plans[0]
        draws = [entry.draws for entry in plan.entries if entry.draws]
        if plan.phase == "decode":
            sizes["decode"][len(draws)] += max(draws)
        else:
            sizes["prefill"][plan.num_tokens] += 1
        # The tokens do not matter: only lengths end a request.
        tokens, logprobs = [[0] * n for n in draws], [[0.0] * n for n in draws]
        result = StepResult(weight_version=0, num_drawn=draws, tokens=tokens, logprobs=logprobs)
        commit(scheduler.queues, plan, result)
    if failed := [seq for seq in scheduler.queues.finished if seq.error is not None]:
        raise ConfigError(f"{len(failed)} of {len(lengths)} requests cannot run: {failed[0].error}")
    return {phase: dict(counter) for phase, counter in sizes.items()}


def read_record(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file: all of it, or its last line, as bench.py prints it."""
    text = path.read_text(encoding="utf-8").strip()
    for part in (text, text.rpartition("\n")[2]):
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(part), dict):
                return record
    raise ConfigError(f"{path}: holds no JSON object")


def record_sizes(record: dict[str, Any], source: Any) -> dict[str, Sizes]:
    """Return the record's "step_sizes", or the record itself if it has none."""
    counts, sizes = record.get("step_sizes", record), dict[str, Sizes]()
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        for phase in PHASES:
            sizes[phase] = {int(k): int(v) for k, v in counts.get(phase, {}).items()}
    steps = [step for phase in sizes.values() for step in phase.items()]
    if len(sizes) < len(PHASES) or not steps or any(n < 1 or count < 0 for n, count in steps):
        form = '{"prefill": {tokens: count}, "decode": {rows: count}}'
        raise ConfigError(f'{source}: wanted "step_sizes": {form}')
    return sizes


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Return (prompt, output) tokens from a JSON list of pairs, or from one pair a line."""
    text = path.read_text(encoding="utf-8").strip()
    lines = [text] if text.startswith("[[") else [f"[{line}]" for line in text.splitlines() if line]
    try:
        pairs = [pair for line in lines for pair in json.loads(line)]
        lengths = [(int(prompt), int(output)) for prompt, output in pairs]
    except (ValueError, TypeError) as e:
        wanted = "wanted [prompt tokens, output tokens] pairs as JSON"
        raise ConfigError(f"{path}: {wanted} ({e})") from e
    if bad := [pair for pair in lengths if min(pair) < 1]:
        wanted = "a prompt and an output of at least one token each"
        raise ConfigError(f"{path}: {bad[0]} is not {wanted}")
    return lengths


def costs_of(
    args: argparse.Namespace, record: dict[str, Any], sizes: dict[str, Sizes], now: EngineConfig
) -> dict[str, Cost]:
    """Return the costs that the flags give, else the defaults scaled to the record's speed."""
    costs = {}
    for phase, cost in DEFAULTS.items():
        if record.get("compiles"):
            cost = dataclasses.replace(cost, compile=record["compile_s"] / record["compiles"])
        if rate := record.get(f"{phase}_tok_s"):
            held = account(sizes[phase], getattr(now, PHASES[phase]), cost)
            factor = held.tokens / rate / held.seconds if held.seconds else 1.0
            cost = dataclasses.replace(cost, step=cost.step * factor, unit=cost.unit * factor)
        flags = {"step": args.step_seconds, "compile": args.compile_seconds}
        flags["unit"] = getattr(args, f"{phase}_seconds")
        overrides = {name: value for name, value in flags.items() if value is not None}
        costs[phase] = dataclasses.replace(cost, **overrides)
    return costs


def engine_config(args: argparse.Namespace, longest: int) -> EngineConfig:
    """Return the current settings, resolved; without num_blocks, the pool is so large that nothing
    is ever preempted.
    """
    settings = read_record(args.config) if args.config is not None else {}
    try:
        config = EngineConfig(**settings | engine_settings(args))
    except TypeError as e:
        raise ConfigError(f"{args.config}: {e}") from e
    # Only the longest context of the model matters here.
    length = max(longest, config.max_model_len or 1)
    model = dataclasses.replace(common.MODELS["tiny"], max_position_embeddings=length)
    config = config.resolve(model, on_cpu=jax.default_backend() == "cpu")
    enough = config.num_rows * config.max_blocks_per_seq
    return dataclasses.replace(config, num_blocks=config.num_blocks or enough)


def table(rows: list[tuple[str, Account, int, float]], runs: float) -> str:
    """rows: title, account, buckets in the table, seconds that one takes to compile."""
    heads = ["", "buckets", "used", "waste", "steps", "steps s", "compile s", "total s"]
    cells = []
    for title, a, held, seconds in rows:
        times = (a.seconds * runs, a.used * seconds, a.seconds * runs + a.used * seconds)
        counts = [str(held), str(a.used), f"{waste([a]):.1%}", str(a.steps)]
        cells.append([title, *counts, *(f"{value:.2f}" for value in times)])
    return "\n".join(common.aligned(heads, cells, left=1))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("tune_buckets", __doc__)
    source, add = parser.add_mutually_exclusive_group(), parser.add_argument
    what = "what to tune for, instead of a workload"
    source.add_argument("--record", type=Path, help=f"JSON with step_sizes: {what}")
    source.add_argument("--lengths", type=Path, help=f"JSON of (prompt, output) tokens: {what}")
    add("--out", type=Path, help="write the tuned token_buckets and seq_buckets here")
    add("--buckets", type=int, help="buckets that steps use in each table, at most")
    add(
        "--runs-per-compile",
        type=float,
        default=1.0,
        help="how many such runs a compiled step lasts",
    )
    add("--multiple", type=int, default=8, help="every bucket is a multiple of this (default: 8)")
    add("--step-seconds", type=float, help="a, of either phase")
    add("--prefill-seconds", type=float, help="b of a padded token")
    add("--decode-seconds", type=float, help="b of a padded row")
    add("--compile-seconds", type=float, help="of one bucket")
    add("--config", type=Path, help="JSON of EngineConfig's fields, as they are now")
    bench.add_workload_flags(parser)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "buckets", "multiple", "requests")
    return args


def run(args: argparse.Namespace) -> None:
    record, lengths = {}, list[tuple[int, int]]()
    if args.record is not None:
        record = read_record(args.record)
    elif args.lengths is not None:
        lengths = read_lengths(args.lengths)
    else:
        drawn = zip(*bench.workload(args).requests_of(), strict=True)
        lengths = [(len(prompt), output) for prompt, output in drawn]
    config = engine_config(args, max((sum(pair) for pair in lengths), default=1))
    sizes = record_sizes(record, args.record) if args.record else simulate(config, lengths)
    costs, rows, tuned = costs_of(args, record, sizes, config), [], {}
    for phase, name in PHASES.items():
        knob, largest = LIMITS[phase], max(sizes[phase], default=0)
        if largest > (limit := getattr(config, knob)):
            more = f"is more than {knob}={limit}: pass the engine's settings"
            raise ConfigError(f"a {phase} step of {largest} {more}")
        tuned[name] = tune(
            sizes[phase],
            costs[phase],
            limit=limit,
            runs=args.runs_per_compile,
            most=args.buckets,
            multiple=args.multiple,
            strict=config.strict,
        )
        for title, buckets in (("now", getattr(config, name)), ("tuned", tuned[name])):
            held = account(sizes[phase], buckets, costs[phase])
            rows.append((f"{phase}, {title}", held, len(buckets), costs[phase].compile))
    print(table(rows, args.runs_per_compile))
    for title, both in (("now", rows[::2]), ("tuned", rows[1::2])):
        print(f"padding waste, {title}: {waste([row[1] for row in both]):.4f}")
    for name, buckets in tuned.items():
        print(f"{name}: {buckets}")
    if args.out is not None:
        limits = {knob: getattr(config, knob) for knob in LIMITS.values()}
        args.out.write_text(json.dumps(tuned | limits) + "\n")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        run(args)
    except (JpagedError, OSError) as e:
        print(f"tune_buckets: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
