"""Where a card's memory goes and how many requests fit, for a checkpoint and a card that may not be
here.

    python scripts/plan_memory.py CHECKPOINT                           # the device at hand
    python scripts/plan_memory.py --random 0.6b --card h200            # a card that is not there
    python scripts/plan_memory.py --random 0.6b --card v5e --max-model-len 4096 --length 2048 4096

Prints the account in bytes (weights, temporaries and code of the steps, state, pool, what nothing
uses), the blocks and tokens that the pool holds, and how many requests of each --length it holds at
once. No weight is loaded. What the steps need is read from compiling them for the card, which takes
CUDA's plugin or libtpu but no device; without those an upper bound stands in, and the output says
so. One card, without its neighbours: no mesh.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
# of a GPU that jax takes; the rest is CUDA's and other programs'
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
ENGINE = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks")


@dataclasses.dataclass(frozen=True)
class Card:
    """A card by its bytes of memory, and the target that its steps are compiled for: the same or
    its nearest kin.
    """

    platform: str
    target: str
    memory: int

    @property
    def limit(self) -> int:
        """Bytes that jax can allocate: what `memory_stats()["bytes_limit"]` says on the card."""
        return (
            int(self.memory * float(os.environ.get(MEMORY_FRACTION, 0.75)))
            if self.platform == "cuda"
            else self.memory
        )


CARDS = {  # GPUs: all that nvidia-smi shows. TPUs: what is left to programs.
    "h200": Card("cuda", "sm_90a", 143771 << 20),
    "h100": Card("cuda", "sm_90a", 81559 << 20),
    "a100": Card("cuda", "sm_90a", 81920 << 20),
    "v5e": Card("tpu", "v5e:2x2", int(15.75 * GIB)),
    "v6e": Card("tpu", "v6e:2x2", int(31.25 * GIB)),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", help="a checkpoint folder, of which only config.json is read")
    add("--random", metavar="SIZE", help="one of bench.py's models, or a config.json, instead")
    add("--card", choices=(*CARDS, "cpu"), help="default: the device at hand")
    add(
        "--length",
        type=int,
        nargs="+",
        default=[2048],
        help="tokens of a request, prompt and completion together",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: the checkpoint's, else bfloat16",
    )
    add("--bound", action="store_true", help="compile nothing: take the upper bound")
    add("--memory-utilization", type=float)
    for name in ENGINE:
        add(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.random is None):
        parser.error("give a checkpoint folder or --random, one of the two")
    if min(args.length) < 1:
        parser.error(f"--length {min(args.length)}: must be at least 1")
    return args


@contextlib.contextmanager
def device_of(card: Card | None) -> Iterator[tuple[Any, str | None]]:
    """The device to compile for and None; or, where nothing can compile for the card, a CPU and the
    reason.
    """
    import jax
    import kernel_report

    from tests.kernels import aot_cuda, aot_tpu

    if card is None:
        yield jax.devices()[0], None
    elif reason := aot_cuda.missing() if card.platform == "cuda" else aot_tpu.without_libtpu():
        yield jax.devices("cpu")[0], reason
    else:
        with kernel_report.target(card.platform, card.target) as device:
            yield device, None


def make_plan(args: argparse.Namespace, config: Any) -> tuple[Any, str]:
    """The plan, and where what it says of the steps comes from."""
    import bench
    import jax

    from jpaged import Limits, plan_memory

    card = CARDS.get(args.card)
    with device_of(card) as (device, reason):
        if args.card == "cpu":
            device = jax.devices("cpu")[0]
        found = plan_memory(
            bench.model_config(args) if args.checkpoint is None else args.checkpoint,
            config,
            device=device,
            limits=card and Limits(total=int(card.limit * config.memory_utilization)),
            compiled=reason is None and not args.bound,
        )
    if reason is None and not args.bound:
        return found, found.needs.source
    return found, f"{found.needs.source}, proved for CPUs only ({reason or 'as asked'})"


def table(found: Any) -> str:
    """The account of a MemoryPlan in bytes, GiB and shares of the limit, then its blocks."""
    parts, share = (
        {**found.account, "unused": found.waste, "limit": found.limit},
        100 / max(found.limit, 1),
    )
    rows = [
        f"{k:<12}{n:>20,} bytes {n / GIB:>9.3f} GiB {n * share:>6.1f}%" for k, n in parts.items()
    ]
    blocks = (
        f"{found.num_blocks:,} blocks of {found.block_bytes:,} bytes, "
        f"{found.block_size} tokens each"
    )
    tokens = found.num_blocks * found.block_size
    return "\n".join([*rows, f"{blocks}: {tokens:,} tokens (decided by {found.decided_by})"])


def report(args: argparse.Namespace) -> None:
    from jpaged.config import EngineConfig
    from jpaged.runtime.footprint import stored_dtype

    names = (*ENGINE, "memory_utilization", "dtype")
    config = EngineConfig(**{k: v for k in names if (v := getattr(args, k)) is not None})
    found, source = make_plan(args, config)
    dtype = args.dtype or stored_dtype(args.checkpoint or {})
    print(
        f"{args.checkpoint or args.random} in {dtype} on "
        f"{args.card or 'the device at hand'}; steps: {source}"
    )
    print(table(found))
    for length in args.length:
        held = found.num_blocks // -(-length // found.block_size)
        print(
            f"requests of {length:,} tokens: {held:,} in the pool, {config.max_num_seqs} "
            "run at once"
        )
    print(f"waste: {found.waste:,} bytes of the limit that nothing uses")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    if args.card is not None:
        import kernel_report

        os.environ |= kernel_report.QUIET  # before jax is imported
    from jpaged.errors import JpagedError

    try:
        report(args)
    except JpagedError as e:
        print(f"plan_memory: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
