"""How far a trainer's probabilities are from those with which a rollout drew, by what both know: a
line for each way, with the mean of the ratios p(trainer) / p(rollout) and the largest distance
from 1.

    python scripts/ratios.py jpaged/demo/model
    python scripts/ratios.py --random tiny --dtype float32 --prompts 32 --max-tokens 64

filter: the rollout keeps top_k and top_p of the vocabulary, and its logprobs are of what it kept
("processed"). mask: the trainer draws from what each token was drawn from, `sampling_mask`. exact:
the trainer's forward pass has the bits of serving. Weights are the same on both sides, so all that
differs from 1 is a mismatch. exact is left out, with the reason, where serving has no bits of its
own (docs/research.md).
"""

import argparse
import sys

import _common as common
import jax
import numpy as np

import jpaged
from jpaged import EngineConfig, SamplingParams
from jpaged.errors import UnsupportedError

WAYS = (  # filter, mask, exact
    (False, False, False),
    (False, False, True),
    (True, False, False),
    (True, True, False),
    (True, True, True),
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.make_parser("ratios", __doc__)
    common.add_model_flags(parser)
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--prompts", type=int, default=16)
    add("--prompt-length", type=int, default=32)
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=1.0)
    add("--top-k", type=int, default=64)
    add("--top-p", type=float, default=0.8)
    args = parser.parse_args(argv)
    common.check_model_flags(parser, args)
    common.check_positive(parser, args, "prompts", "prompt_length", "max_tokens", "top_k")
    return args


def ratios(
    params: jpaged.Params,
    args: argparse.Namespace,
    *,
    filters: bool,
    mask: bool,
    exact: bool,
) -> np.ndarray:
    """Return p(trainer) / p(rollout) of each token that was drawn."""
    prompts = common.random_ids(args.prompts, args.prompt_length, params.config.vocab_size)
    kept = {"top_k": args.top_k, "top_p": args.top_p} if filters else {}
    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        ignore_eos=True,
        logprobs_mode="processed",
        sampling_mask=mask,
        **kept,
    )
    engine_config = EngineConfig(
        max_sampling_mask=args.top_k,
        max_num_seqs=args.prompts,
        deterministic=True if exact else None,
    )
    outs = jpaged.generate(
        params, prompts, sampling, seed=1, engine_config=engine_config, use_tqdm=False
    )
    arrays = jpaged.to_arrays(outs)
    new = jax.jit(
        lambda params, arrays: jpaged.logprobs(
            params,
            arrays,
            temperature=args.temperature,
            sampling_mask=mask,
            exact=exact,
            engine_config=engine_config if exact else None,
        )
    )(params, arrays)
    return np.exp(np.asarray(new) - arrays["logprobs"])[arrays["completion_mask"]]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    common.stay_on_cpu()
    params = common.load_model(args, args.dtype)
    rows = []
    for filters, mask, exact in WAYS:
        way = [name for name, on in (("filter", filters), ("mask", mask), ("exact", exact)) if on]
        name = ", ".join(way) or "as drawn"
        try:
            measured = ratios(params, args, filters=filters, mask=mask, exact=exact)
        except UnsupportedError as e:
            rows.append((name, "-", "-", str(e)))
            continue
        rows.append((name, f"{measured.mean():.6f}", f"{np.abs(measured - 1).max():.2g}", ""))
    heads = ("rollout and trainer", "mean ratio", "largest\n|ratio - 1|", "")
    print("\n".join(common.aligned(heads, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
