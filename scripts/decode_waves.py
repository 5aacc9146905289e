"""A model of the Mosaic decode kernel's thread blocks on a Hopper card: what splits and turns cost.

    python scripts/decode_waves.py [--card H100]

Memory is one flow that the streaming thread blocks share; none streams faster than it computes, and
none streams while it starts or ends. In 8 bits another warpgroup widens the next tiles beside that.
`blocks`: a thread block for each item, as many splits as fill the card twice and at most 16.
`splits`: the kernel's own number. `turns`: as the kernel is, one thread block for each place on the
card, that takes its items in turn. Shares are of the card's copy bandwidth. It knows no caches and
no order of addresses, and its seconds are estimates.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterable

import _common as common

from kernels_pallas.paged_attention.mosaic_gpu.decode_kernel import resident, split_count
from kernels_pallas.paged_attention.mosaic_gpu.pieces import work_item

TILE = 64  # slots
SMS = 132
START, END = 2.0e-6, 1.2e-6  # of a thread block: before its first bytes, after its last ones
TURN = 0.3e-6  # between two items of a thread block, whose copies go on
WAITING = {64: 470, 128: 603, 256: 443}  # clocks of a tile, by head dim
EXCHANGING = 100  # clocks: weights go to the other warps by shared memory, and one barrier
READING = 250  # clocks: whoever widens a tile waits for it, for its place, and for what it loads
SHARED = 128  # bytes that an SM's shared memory moves in a clock
SLOTS = TILE * 2  # bytes of a tile's column of 16 bits
GROUP = 8  # query heads of a KV head, if nothing is said
SCALES = 8  # bytes of a slot and head


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a thread block does with a tile, read from machine code (docs/kernels.md): instructions
    of a warp that computes, clocks of its products, and in 8 bits instructions of a warp that
    copies and widens. places: of widened tiles.
    """

    instructions: int
    products: int
    widening: int = 0
    places: int = 2


# By head dim, query heads of a KV head in whole 8s, and whether keys and values are in 8 bits.
TILES = {
    (64, 8, False): Tile(128, 128),
    (128, 8, False): Tile(128, 256),
    (256, 8, False): Tile(255, 512),
    (64, 8, True): Tile(113, 128, widening=263),
    (64, 16, True): Tile(146, 128, widening=257),
    (64, 24, True): Tile(180, 128, widening=264),
    (64, 32, True): Tile(210, 128, widening=251),
    (128, 8, True): Tile(130, 256, widening=424),
    (128, 16, True): Tile(155, 256, widening=424, places=1),
    (128, 24, True): Tile(196, 256, widening=433, places=1),
    (128, 32, True): Tile(226, 256, widening=419),
    (256, 8, True): Tile(231, 512, widening=758),
}


@dataclasses.dataclass(frozen=True)
class Card:
    bandwidth: float
    clock: float


CARDS = {"H200": Card(4.3e12, 1.9e9), "H100": Card(3.0e12, 1.8e9)}

_lengths = random.Random(0)
# Contexts, KV heads, head dim, and in 8 bits the query heads of a KV head, else None.
CASES: dict[str, tuple[list[int], int, int, int | None]] = {
    "256 x 100": ([100] * 256, 8, 128, None),
    "256 x 512": ([512] * 256, 8, 128, None),
    "256 x 1024": ([1024] * 256, 8, 128, None),
    "256 x 1024, D 64": ([1024] * 256, 8, 64, None),
    "256 x 200-2048": (
        [sum(_lengths.choices(range(100, 1024), k=2)) for _ in range(256)],
        8,
        128,
        None,
    ),
    "128 x 2048": ([2048] * 128, 8, 128, None),
    "128 x 2048, 8 bits": ([2048] * 128, 8, 128, GROUP),
    "128 x 2048, G 16, 8 bits": ([2048] * 128, 8, 128, 16),
    "128 x 2048, D 64": ([2048] * 128, 8, 64, None),
    "128 x 2048, D 64, 8 bits": ([2048] * 128, 8, 64, GROUP),
    "128 x 2048, D 64, G 16, 8 bits": ([2048] * 128, 8, 64, 16),
    "128 x 2048, D 64, G 32, 8 bits": ([2048] * 128, 8, 64, 32),
    "128 x 2048, D 256": ([2048] * 128, 8, 256, None),
    "128 x 2048, D 256, 8 bits": ([2048] * 128, 8, 256, GROUP),
    "32 x 1024": ([1024] * 32, 8, 128, None),
    "20 x 8192": ([8192] * 20, 8, 128, None),
    "8 x 8192": ([8192] * 8, 8, 128, None),
    "1 x 32768": ([32768], 8, 128, None),
    "1 x 32768, 1 KV head": ([32768], 1, 128, None),
}


def seconds(queue: Iterable[list[float]], places: int, card: Card, fastest: float) -> float:
    """Return the seconds until all thread blocks are done. Each has the bytes of its items, and
    starts in the place of one that has ended. fastest: the bytes a second that one can read.
    """
    waiting = [
        [("time", START), *(p for n in items for p in (("bytes", n), ("time", TURN)))]
        for items in queue
    ]
    waiting = [[*phases[:-1], ("time", END)][::-1] for phases in waiting][::-1]
    running: list[list[tuple[str, float]]] = []
    now = 0.0
    while waiting or running:
        while waiting and len(running) < places:
            running.append(waiting.pop())
        streaming = sum(phases[-1][0] == "bytes" for phases in running)
        rate = {"time": 1.0, "bytes": min(fastest, card.bandwidth / max(streaming, 1))}
        step = min(left / rate[kind] for kind, left in (phases[-1] for phases in running))
        now += step
        for phases in running:
            kind, left = phases.pop()
            if (left := left - step * rate[kind]) > 1e-9 * rate[kind]:
                phases.append((kind, left))
        running = [phases for phases in running if phases]
    return now


def bytes_of_a_slot(head_dim: int, in_8_bits: bool) -> float:
    """Return the bytes of a slot's key and value of one head."""
    return 2.0 * head_dim + SCALES if in_8_bits else 4.0 * head_dim


def items_of(
    contexts: list[int], kv_heads: int, head_dim: int, splits: int, in_8_bits: bool = False
) -> list[float]:
    """Return the bytes of each item, the longest context first, heads fastest."""
    items, slot = [], bytes_of_a_slot(head_dim, in_8_bits)
    for context in sorted(contexts, reverse=True):
        tiles = -(-context // TILE)
        share = -(-tiles // splits)
        for split in range(splits):
            count = min(max(tiles - split * share, 0), share)
            items += [count * TILE * slot] * kv_heads
    return items


def clocks(head_dim: int, group: int, in_8_bits: bool) -> float:
    """Return the clocks in which a thread block goes through a tile, if memory does not bound it.

    Widening is beside computing where the next tile has a place. All thread blocks of an SM share
    its shared memory, and each of its four schedulers, which issues an instruction a clock, has a
    warp of each warpgroup.
    """
    rows = -(-group // 8) * 8
    tile = TILES[head_dim, rows, in_8_bits]
    computing = tile.instructions + tile.products + WAITING[head_dim] + EXCHANGING
    if not in_8_bits:
        return computing
    widening = tile.widening + READING
    alone = max(computing, widening) if tile.places > 1 else computing + widening
    blocks = resident(head_dim, group, in_8_bits=True)
    issued = blocks * (tile.instructions + tile.widening)
    # What is copied and read, what is widened and read, queries, and weights twice.
    copied, queries = TILE * bytes_of_a_slot(head_dim, True), 2 * rows * head_dim
    weights = rows * SLOTS * (1 + head_dim // 64)
    moved = 2 * copied + 2 * 2 * head_dim * SLOTS + queries + weights
    return max(alone, issued, blocks * moved / SHARED)


def shares(
    contexts: list[int], kv_heads: int, head_dim: int, group: int | None = None, *, card: Card
) -> dict[str, float]:
    """Return the share of the bandwidth, by what the module's docstring names. group: query heads
    of a KV head, in 8 bits; None is in 16 bits, with GROUP.
    """
    in_8_bits, group = group is not None, group or GROUP
    places = SMS * resident(head_dim, group, in_8_bits=in_8_bits)
    tiles, slot = -(-max(contexts) // TILE), bytes_of_a_slot(head_dim, in_8_bits)
    fastest = TILE * slot * card.clock / clocks(head_dim, group, in_8_bits)
    old = min(max(-(-264 // (len(contexts) * kv_heads)), 1), 16, tiles)
    new = split_count(len(contexts) * kv_heads, tiles, places)
    items = items_of(contexts, kv_heads, head_dim, new, in_8_bits)
    blocks = min(places, len(items))
    turns: list[list[float]] = [[] for _ in range(blocks)]
    for turn in range(-(-len(items) // blocks)):
        for block in range(blocks):
            if (item := work_item(turn, block, blocks)) < len(items):
                turns[block].append(items[item])
    queues = {
        "blocks": [[n] for n in items_of(contexts, kv_heads, head_dim, old, in_8_bits)],
        "splits": [[n] for n in items],
        "turns": turns,
    }
    least = sum(contexts) * kv_heads * slot / card.bandwidth
    rates = {name: least / seconds(q, places, card, fastest) for name, q in queues.items()}
    return {"was": old, "splits now": new} | rates


def main(argv: list[str] | None = None) -> int:
    parser = common.make_parser("decode_waves", __doc__)
    parser.add_argument("--card", choices=CARDS, nargs="+", default=[*CARDS])
    args: argparse.Namespace = parser.parse_args(argv)
    heads = ["card", "rows x context", "splits\nwas", "splits\nis", "blocks", "splits", "turns"]
    rows = []
    for card in args.card:
        for name, case in CASES.items():
            old, new, *others = shares(*case, card=CARDS[card]).values()
            rows.append([card, name, str(old), str(new), *(f"{x:.0%}" for x in others)])
    print(*common.aligned(heads, rows, left=2), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
