"""Where the memory of cards goes under models whose layers differ: a line a model and a card.

    python scripts/memory_table.py
    python scripts/memory_table.py --models Gemma-4-31B --cards h200 v6e --max-model-len 131072

Each model lies on the fewest cards of a kind that hold it (1, 2, 4 or 8, sharing it by tensor
parallelism). The line has GiB of one card: weights, what steps need, the pool; then the blocks of
each group of layers, what a state takes, how many sequences run at once (--max-num-seqs, or as many
as there are states for; by default of a model with states as many of 1024 as memory holds, of
others 256), and how many of --length and of max_model_len tokens the pool holds. What
steps need is the upper bound of `plan_memory`, and pools are laid out as CPUs have them, since
nothing is compiled. No weight is loaded.
"""

import argparse
import sys

import _common as common
import jax

import jpaged
from jpaged.cli.plan import CARDS, GIB
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import kv_groups
from jpaged.runtime.memory import MemoryPlan

COUNTS = (1, 2, 4, 8)
DEFAULT_CARDS = ("h100", "h200", "v5e", "v6e")
COLUMNS = ("model", "cards", "weights", "steps", "pool", "state MiB", "blocks", "rows", "held")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("memory_table", __doc__)
    add, known = parser.add_argument, [*common.LARGE, *common.LARGE_FILES]
    add("--models", nargs="+", choices=known, default=list(common.LARGE_FILES))
    add("--cards", nargs="+", choices=tuple(CARDS), default=list(DEFAULT_CARDS))
    add("--length", type=int, default=4096, help="tokens of a shorter request")
    add("--max-model-len", type=int, default=32768)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--max-num-seqs", type=int, help="default: planned")
    args = parser.parse_args(argv)
    common.check_positive(parser, args, "length", "max_model_len", "max_num_batched_tokens")
    if args.max_num_seqs is not None:
        common.check_positive(parser, args, "max_num_seqs")
    return args


def plan_of(model: ModelConfig, card: str, config: EngineConfig) -> MemoryPlan | None:
    """Return the plan of a card under a model that so many share; None: no block fits."""
    limits = CARDS[card].limits(config.memory_utilization)
    devices = jax.devices("cpu")[: config.tensor_parallel_size]
    try:
        return jpaged.plan_memory(model, config, device=devices, limits=limits, compiled=False)
    except ConfigError:
        return None


def held(plan: MemoryPlan, model: ModelConfig, length: int) -> int:
    """Return how many sequences of so many tokens the pool holds, rows among them."""
    size, rows = plan.block_size, plan.num_seqs
    whole = -(-length // size)
    windows = [group.window for group in kv_groups(model) if group.record.per == "token"]
    for window, cost in zip(windows, plan.pool.groups, strict=True):
        needed = whole if window is None else min(whole, -(-window // size) + 1)
        rows = min(rows, cost.count(plan.num_blocks) // needed)
    return rows


def line(name: str, card: str, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the columns of a model on the fewest cards of a kind that hold it."""
    model = common.LARGE.get(name) or ModelConfig.from_hf(common.LARGE_FILES[name])
    for count in COUNTS:
        config = EngineConfig(
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            # else those that are best for this machine, whatever the card
            token_buckets=(args.max_num_batched_tokens,),
            tensor_parallel_size=count,
        )
        plan = plan_of(model, card, config)
        if plan is None or not held(plan, model, args.max_model_len):
            continue
        account, states = plan.account, plan.pool.states
        blocks = "/".join(f"{x.count(plan.num_blocks):,}" for x in plan.pool.groups)
        return (
            name,
            f"{count} x {card}",
            *(f"{account[part] / GIB:.1f}" for part in ("weights", "temporaries", "pool")),
            "-" if states is None else f"{states.nbytes / (1 << 20):.1f}",
            blocks,
            str(plan.num_seqs),
            f"{held(plan, model, args.length)} / {held(plan, model, args.max_model_len)}",
        )
    return (name, f"{COUNTS[-1]} x {card}", *["-"] * (len(COLUMNS) - 3), "does not fit")


def table(args: argparse.Namespace) -> list[str]:
    """Return the lines of the table; jax has as many CPU devices as models are shared by."""
    rows = [COLUMNS, *(line(name, card, args) for name in args.models for card in args.cards)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pairs = [zip(row, widths, strict=True) for row in rows]
    return ["  ".join(cell.ljust(width) for cell, width in pair).rstrip() for pair in pairs]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    common.stay_on_cpu()
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    print(*table(args), sep="\n")
    print(
        f"held: sequences of {args.length:,} / {args.max_model_len:,} tokens in the pool at once; "
        "weights, steps and pool in GiB of one card, steps by an upper bound"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
