"""Where a card's memory goes and how many requests fit, for a checkpoint and a card that may not be
here.

    jpaged plan CHECKPOINT                           # the device at hand
    jpaged plan --random 0.6b --card h200            # a card that is not there
    jpaged plan --random 0.6b --card v5e --max-model-len 4096 --length 2048 4096
    jpaged plan --random Qwen3-32B --card h100 --tensor-parallel-size 8

It prints the account in bytes (weights, temporaries and code of the steps, state, pool, unused
memory), the blocks and tokens that the pool holds, and how many requests of each --length it holds
at once. No weight is loaded. What the steps need is measured by compiling them for the card, which
takes CUDA's plugin or libtpu but no device; without those an upper bound is used, and the output
says so. A GPU has what jax takes of it, as XLA_CLIENT_MEM_FRACTION says: 0.75 where it is not set,
and 0.95 in programs that only serve. With --tensor-parallel-size it is the account of each of that
many cards that share the model (of TPUs: on a slice).
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax

import jpaged
from jpaged import gpu_share
from jpaged.cli import absent, models
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, JpagedError
from jpaged.flags import Parser, add_engine_groups, engine_settings
from jpaged.models.config import ModelConfig
from jpaged.models.kv_groups import kv_groups
from jpaged.runtime.footprint import stored_dtype
from jpaged.runtime.memory import Limits, MemoryPlan
from jpaged.runtime.mesh import asked_shape
from kernels_pallas.implementation import TPU

GIB = 1 << 30
COMMON = (
    *("checkpoint", "--random", "--card", "--length", "--bound", "--max-model-len"),
    *("--max-num-seqs", "--memory-utilization", "--dtype", "--quantization", "--kv-cache-dtype"),
    "--tensor-parallel-size",
)


@dataclasses.dataclass(frozen=True)
class Card:
    """A card: its bytes of memory, and the chip that its steps are compiled for, which is the same
    or the most similar one.
    """

    platform: str
    chip: str
    memory: int

    def slice(self, count: int) -> str:
        """Return the chip, or the smallest slice with this many chips."""
        if self.platform == "cuda" or count <= 4:
            return self.chip
        sizes = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
        if count not in sizes:
            raise ConfigError(f"{count} chips: a slice has {list(sizes)} of them")
        return f"{self.chip.split(':')[0]}:{sizes[count]}"

    @property
    def limit(self) -> int:
        """Return the bytes that jax can allocate: `memory_stats()["bytes_limit"]` on the card."""
        return int(self.memory * (gpu_share.share() if self.platform == "cuda" else 1))

    def limits(self, utilization: float) -> Limits:
        """Return the limits of an engine that has this share of what jax takes of the card."""
        is_gpu, whole = self.platform == "cuda", self.limit
        return Limits(total=int(whole * utilization), whole=whole, is_gpu=is_gpu)


CARDS = {  # GPUs: all that nvidia-smi shows. TPUs: what is left to programs.
    "h200": Card("cuda", "sm_90a", 143771 << 20),
    "h100": Card("cuda", "sm_90a", 81559 << 20),
    "a100": Card("cuda", "sm_90a", 81920 << 20),
    "l40s": Card("cuda", "sm_90a", 46068 << 20),
    "l4": Card("cuda", "sm_90a", 23034 << 20),
    "v5e": Card(TPU, "v5e:2x2", int(15.75 * GIB)),
    "v6e": Card(TPU, "v6e:2x2", int(31.25 * GIB)),
}


def make_parser(prog: str = "jpaged plan") -> Parser:
    """Return the parser of `jpaged plan`."""
    parser = Parser(prog=prog, description=__doc__, common=COMMON)
    add = parser.add_argument
    add("--card", choices=(*CARDS, "cpu"), help="card to plan for (default: the device at hand)")
    tokens = "tokens of a request, of both kinds (default: 2048)"
    add("--length", type=int, nargs="+", default=[2048], help=tokens)
    add("--bound", action="store_true", help="compile nothing: take the upper bound")
    models.add_model_flags(parser)
    add_engine_groups(parser)
    return parser


def parse_args(argv: list[str] | None = None, prog: str = "jpaged plan") -> argparse.Namespace:
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    models.check_model_flags(parser, args)
    models.check_positive(parser, args, "length")
    return args


@contextlib.contextmanager
def devices_of(card: Card | None, config: EngineConfig, reason: str | None) -> Iterator[Any]:
    """Yield the devices to compile for; a CPU if there is a reason why nothing can be compiled for
    the card.
    """
    if card is None:
        yield jax.devices()
    elif reason is not None:
        yield jax.devices("cpu")[:1]
    else:
        chips = card.slice(count_of(config))
        with absent.absent_mesh(card.platform, chips, asked_shape(config)) as devices:
            yield devices


def make_plan(
    args: argparse.Namespace, config: EngineConfig, model: ModelConfig | str
) -> tuple[MemoryPlan, str]:
    """Return the plan, and the source of what it says about the steps."""
    card = CARDS.get(args.card)
    reason = None if card is None else absent.cannot_compile(card.platform)
    limits = card and card.limits(config.memory_utilization)
    compiled = reason is None and not args.bound
    if reason is not None and config.token_buckets is None:  # steps of the card, not of a CPU
        config = dataclasses.replace(config, token_buckets=(config.max_num_batched_tokens,))
    with devices_of(card, config, reason) as devices:
        plan = jpaged.plan_memory(model, config, device=devices, limits=limits, compiled=compiled)
    if compiled:
        return plan, plan.needs.source
    return plan, f"{plan.needs.source}, proved for CPUs only ({reason or 'as asked'})"


def count_of(config: EngineConfig) -> int:
    """Return how many devices a config asks for."""
    return (config.data_parallel_size or 1) * (config.tensor_parallel_size or 1)


def table(plan: MemoryPlan) -> str:
    """Return the account of a MemoryPlan in bytes, GiB and shares of the limit, then its blocks."""
    parts = {**plan.account, "unused": plan.waste, "limit": plan.limit}
    share = 100 / max(plan.limit, 1)
    rows = [
        f"{k:<12}{n:>20,} bytes {n / GIB:>9.3f} GiB {n * share:>6.1f}%" for k, n in parts.items()
    ]
    block_bytes = plan.block_bytes - (plan.pool.states.nbytes if plan.pool.states else 0)
    blocks = f"{plan.num_blocks:,} blocks of {block_bytes:,} bytes"
    tokens = f"{plan.num_blocks * plan.block_size:,} tokens (decided by {plan.decided_by})"
    rows.append(f"{blocks}, {plan.block_size} tokens each: {tokens}")
    if plan.pool.states is not None:
        states = f"{plan.num_states:,} states of {plan.pool.states.nbytes:,} bytes"
        rows.append(f"{states}: {plan.num_seqs:,} sequences run at once")
    return "\n".join(rows)


def print_groups(plan: MemoryPlan, model: ModelConfig) -> None:
    """Print the blocks of each group of layers, if there are several that keep keys and values."""
    groups = [group for group in kv_groups(model) if group.record.per == "token"]
    if len(groups) < 2:
        return
    for group, cost in zip(groups, plan.pool.groups, strict=True):
        window = "no window" if group.window is None else f"a window of {group.window:,}"
        heads = f"{group.num_kv_heads} x {group.head_dim}"
        kind = f"{len(group.layers)} layers of {heads} with {window}"
        print(f"{kind}: {cost.count(plan.num_blocks):,} blocks of {cost.nbytes:,} bytes")


def report(args: argparse.Namespace) -> None:
    model = args.checkpoint or models.model_config(args)
    config = EngineConfig(**engine_settings(args))
    plan, source = make_plan(args, config, model)
    dtype = engine_settings(args).get("dtype") or stored_dtype(model)
    count = count_of(config)
    card = args.card or "the device at hand"
    card = card if count == 1 else f"each of {count} of {card}"
    print(f"{args.checkpoint or args.random} in {dtype} on {card}; steps: {source}")
    print(table(plan))
    described = ModelConfig.coerce(model)
    print_groups(plan, described)
    longest = config.max_model_len or described.max_position_embeddings
    for length in args.length:
        if length > longest:
            print(f"requests of {length:,} tokens: none, longer than max_model_len={longest:,}")
            continue
        held = plan.num_blocks // -(-length // plan.block_size)
        at_once = f"{held:,} in the pool, {plan.num_seqs} run at once"
        print(f"requests of {length:,} tokens: {at_once}")
    print(f"waste: {plan.waste:,} bytes of the limit that nothing uses")


def main(argv: list[str] | None = None, prog: str = "jpaged plan") -> int:
    """Print the plan. Return the exit status: 1 after one sentence on stderr."""
    args = parse_args(argv, prog)
    if args.card is not None:
        absent.stay_on_cpu()
    try:
        report(args)
    except JpagedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    return 0
