"""What adapters cost: tokens a second of a decode by how many there are and their rank.

    python scripts/bench_lora.py [CHECKPOINT | --random SIZE] [--counts 1 4 16] [--ranks 8 16 64]
    python scripts/bench_lora.py --random 60m --slots 64 --rows 64 --counts 1 8 64 --ranks 8 16 64

Engines take turns, after a warm-up turn; the best of --repeat turns counts. `none`: there are
tables, and no row has an adapter, which should cost nothing. `adapters`: rows take as many adapters
as there are slots, in turn. `swapped`: rows take twice as many. With --slots all tables have that
many slots, and rows take as many adapters as each count says; a table of milliseconds a step is
printed.
"""

import time
from typing import Any

import _common as common
import jax
import numpy as np

import jpaged
from jpaged.models.lora import targets


def adapter(config: jpaged.ModelConfig, rank: int, seed: int) -> dict[str, Any]:
    """Return an adapter with a pair for every weight that can have one."""
    rng, tree = np.random.default_rng(seed), {}
    for name, target in targets(config).items():
        outputs, inputs = target.sides
        shapes = {"a": (rank, *inputs), "b": (*outputs, rank)}
        tree[name] = {k: rng.standard_normal(s, np.float32) * 0.01 for k, s in shapes.items()}
    return tree


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = common.make_parser("bench_lora.py", __doc__)
    common.add_model_flags(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--slots", type=int, help="of all tables; the largest count at least")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "rows", "counts", "ranks", "tokens", "repeat")
    if args.slots is not None and not max(args.counts) <= min(args.slots, args.rows):
        parser.error("--counts are at most --slots and --rows")
    params = common.load_model(args, args.dtype)
    prompts = np.random.default_rng(0).integers(1, 1000, (args.rows, 32)).tolist()
    asked = jpaged.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def made(count: int, rank: int, adapters: int) -> jpaged.LLM:
        sizes: Any = {"max_num_seqs": args.rows, "max_num_batched_tokens": 1024}
        tables: Any = {"max_loras": count, "max_lora_rank": rank} if count else {}
        sizes |= {"max_model_len": 512, "enable_prefix_caching": False}
        llm = jpaged.LLM(params, **sizes, **tables)
        for i in range(adapters):
            llm.add_adapter(str(i), adapter(params.config, rank, i))
        return llm

    def seconds(llm: jpaged.LLM, names: list[Any]) -> float:
        sampling: list[Any] = [
            {"prompt_token_ids": prompt, "adapter": names[i % len(names)]}
            for i, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        llm.generate(sampling, asked, use_tqdm=False)
        return time.perf_counter() - began

    cases: list[tuple[str, int, int, jpaged.LLM, list[Any]]] = []
    cases.append(("base", 0, 0, made(0, 0, 0), [None]))
    for rank in args.ranks:
        if args.slots is not None:
            llm = made(args.slots, rank, max(args.counts))
            cases.append(("none", 0, rank, llm, [None]))
            for count in args.counts:
                cases.append(("adapters", count, rank, llm, [str(i) for i in range(count)]))
            continue
        for count in args.counts:
            llm, names = made(count, rank, 2 * count), [str(i) for i in range(2 * count)]
            cases.append(("none", count, rank, llm, [None]))
            cases.append(("adapters", count, rank, llm, names[:count]))
            cases.append(("swapped", count, rank, llm, names))
    best = dict.fromkeys(range(len(cases)), float("inf"))
    for turn in range(1 + args.repeat):
        for i, (*_, llm, names) in enumerate(cases):
            took = seconds(llm, names)
            best[i] = min(best[i], took) if turn else best[i]
    records = []
    for i, (kind, count, rank, _, _) in enumerate(cases):
        rate = args.rows * args.tokens / best[i]
        record = {"kind": kind, "slots": args.slots or count, "rank": rank, "tok_s": rate}
        record |= {"adapters": count, "ms": 1000 * best[i] / args.tokens}
        records.append(record | {"of_base": best[0] / best[i]})
        if args.slots is None:
            print(
                f"{kind:9} {count:3} slots of rank {rank:3}: {rate:8.1f} tok/s, "
                f"{best[0] / best[i]:.2f} of the base's",
                flush=True,
            )
    if args.slots is not None:
        print_table(records, [0, *args.counts])
    jax.clear_caches()
    return records


def print_table(records: list[dict[str, Any]], counts: list[int]) -> None:
    """Print milliseconds a step, and the ratio to an engine without tables."""
    heads = ["none" if count == 0 else str(count) for count in counts]
    print("| rank | " + " | ".join(heads) + " |\n|" + " --- |" * (1 + len(counts)))
    for rank in dict.fromkeys(record["rank"] for record in records if record["kind"] != "base"):
        of_rank = [record for record in records if record["rank"] == rank]
        cells = [f"{record['ms']:.1f} ({1 / record['of_base']:.2f})" for record in of_rank]
        print(f"| {rank} | " + " | ".join(cells) + " |")
    print(f"without tables: {records[0]['ms']:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
