"""Best of n on the embedded model: samples of a prompt share its KV, a verifier picks: `python
examples/best_of_n.py`.

The verifier is Python's own parser; of the samples that pass, the one that the model finds
likeliest is taken. A table shows how often the best of 1, 2, 4, ... samples passes, and what n
samples cost beside n prompts.
"""

import argparse

import numpy as np
from grpo import PROMPTS, reward

import jpaged
from jpaged.demo import MODEL_PATH


def sample(llm: jpaged.LLM, n: int, max_tokens: int) -> list[jpaged.RequestOutput]:
    """n completions of one line of every prompt."""
    sampling = jpaged.SamplingParams(
        n=n, max_tokens=max_tokens, stop="\n", include_stop_str_in_output=True
    )
    return llm.generate(list(PROMPTS), sampling, use_tqdm=False)


def best(prompt: str, completions: list[jpaged.CompletionOutput]) -> jpaged.CompletionOutput:
    """The highest reward; among equals the highest mean log-probability of a token."""
    return max(completions, key=lambda c: (reward(prompt, c.text or ""), c.token_logprobs.mean()))


def main(argv: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=32, help="samples of each prompt (default: 32)")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args(argv)
    llm = jpaged.LLM(MODEL_PATH, max_model_len=128, max_num_seqs=128, seq_buckets=(32, 128))
    outs = sample(llm, args.n, args.max_tokens)
    stats = llm.stats()
    passed = {}
    print("best of    passed")
    for k in (1 << i for i in range(args.n.bit_length())):
        picked = [
            reward(p, best(p, out.outputs[:k]).text or "") == 1
            for p, out in zip(PROMPTS, outs, strict=True)
        ]
        passed[k] = float(np.mean(picked))
        print(f"{k:7d}    {passed[k]:6.1%}")
    prompts = sum(len(out.prompt_token_ids) for out in outs)
    print(
        f"prompt tokens computed: {stats['prefill_tokens']}, by one request a sample: "
        f"{prompts * args.n}\n"
    )
    for prompt, out in list(zip(PROMPTS, outs, strict=True))[:4]:
        print(f"{prompt}\033[1m{(best(prompt, out.outputs).text or '').rstrip()}\033[0m\n")
    return passed


if __name__ == "__main__":
    main()
