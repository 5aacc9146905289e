"""What adapters cost: tokens a second of a decode by how many there are and their rank.

    python scripts/bench_lora.py [CHECKPOINT | --random SIZE] [--counts 1 4 16] [--ranks 8 16 64]

Engines take turns, after one to warm up; the best of --repeat turns counts. `none`: tables are
there and no row has an adapter, which is to cost nothing. `adapters`: rows take as many as there
are slots, in turn. `swapped`: twice as many.
"""

import time
from typing import Any

import _common as common
import jax
import numpy as np

import jpaged
from jpaged.models.lora import targets


def adapter(config: jpaged.ModelConfig, rank: int, seed: int) -> dict[str, Any]:
    """A pair for every weight that can have one."""
    rng, found = np.random.default_rng(seed), {}
    for name, target in targets(config).items():
        outputs, inputs = target.sides(config)
        shapes = {"a": (rank, *inputs), "b": (*outputs, rank)}
        found[name] = {k: rng.standard_normal(s, np.float32) * 0.01 for k, s in shapes.items()}
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = common.make_parser("bench_lora.py", __doc__)
    common.add_model_flags(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "rows", "counts", "ranks", "tokens", "repeat")
    params = common.load_model(args, args.dtype)
    prompts = np.random.default_rng(0).integers(1, 1000, (args.rows, 32)).tolist()
    asked = jpaged.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def made(count: int, rank: int) -> jpaged.LLM:
        sizes: Any = {"max_num_seqs": args.rows, "max_num_batched_tokens": 1024}
        tables: Any = {"max_loras": count, "max_lora_rank": rank} if count else {}
        sizes |= {"max_model_len": 512, "enable_prefix_caching": False}
        llm = jpaged.LLM(params, **sizes, **tables)
        for i in range(2 * count):
            llm.add_adapter(str(i), adapter(params.config, rank, i))
        return llm

    def seconds(llm: jpaged.LLM, names: list[Any]) -> float:
        each: list[Any] = [
            {"prompt_token_ids": prompt, "adapter": names[i % len(names)]}
            for i, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        llm.generate(each, asked, use_tqdm=False)
        return time.perf_counter() - began

    cases: list[tuple[str, int, int, jpaged.LLM, list[Any]]] = []
    cases.append(("base", 0, 0, made(0, 0), [None]))
    for rank in args.ranks:
        for count in args.counts:
            llm, names = made(count, rank), [str(i) for i in range(2 * count)]
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
        record = {"kind": kind, "slots": count, "rank": rank, "tok_s": rate}
        records.append(record | {"of_base": best[0] / best[i]})
        print(
            f"{kind:9} {count:3} slots of rank {rank:3}: {rate:8.1f} tok/s, "
            f"{best[0] / best[i]:.2f} of the base's",
            flush=True,
        )
    jax.clear_caches()
    return records


if __name__ == "__main__":
    main()
