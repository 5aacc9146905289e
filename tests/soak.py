"""Soak the engine: a long random stream of requests through a pool a tenth of what they need, with
checks all along.

    python -m tests.soak                          # 5 minutes on the embedded model, in float32
    python -m tests.soak --requests 2000 --seed 7 --num-blocks 60
    python -m tests.soak --steps 250000

Prompts of mixed lengths, some with a common prefix, n of 1-4, sampled in every way; between them
beam searches, aborts, resets of the prefix cache, and snapshots that are gone back to. Pool and
swap space are small, so that sequences are swapped and recomputed all the time. Checked: results
are legal; some of those that can be repeated equal the same request run alone; what ended after a
snapshot ends the same again; nothing is held at the end; memory does not grow. Prints a line an
interval and a summary. Exit status: 0, or 1 after the reason on stderr.
"""

import argparse
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import jpaged
from jpaged import SamplingParams
from jpaged.demo import MODEL_PATH

CONTEXT, BLOCK, WINDOW = (
    256,
    8,
    24,
)  # max_model_len; tokens a block; unfinished requests that are kept up
SWAP_GIB = 48 * 2**14 / 2**30  # 48 blocks: too few for all that is preempted
STUCK = 5000  # steps without a request ending
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.0, "seed": 5},
    {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    {"temperature": 0.7, "stop": ["\n", "self"], "min_tokens": 3},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
)
RATES = {
    "abort": 0.05,
    "reset": 0.01,
    "snapshot": 0.01,
    "beam": 0.02,
}  # chance of each with every request added
ALONE = 0.1  # share of the requests that can be repeated which are run alone too


def check(holds: bool, reason: str) -> None:
    if not holds:
        raise AssertionError(reason)


def rss_mib() -> float:
    """Resident memory of this process now."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def growth(samples: list[float]) -> float:
    """From the first third of the samples to the last, by their medians; 0 for fewer than three."""
    third = len(samples) // 3
    return (
        statistics.median(samples[-third:]) - statistics.median(samples[:third]) if third else 0.0
    )


class Soak:
    def __init__(self, args: argparse.Namespace):
        self.args, self.rng = args, random.Random(args.seed)
        params = jpaged.load_params(MODEL_PATH, dtype="float32")
        common: dict[str, Any] = {"seed": args.seed, "max_model_len": CONTEXT, "block_size": BLOCK}
        chunks = {
            "max_num_batched_tokens": 64,
            "token_buckets": (64,),
            "max_num_seqs": 16,
            "seq_buckets": (16,),
        }
        self.llm = jpaged.LLM(
            params, num_blocks=args.num_blocks, swap_space_gib=SWAP_GIB, **common, **chunks
        )
        whole = {"max_num_batched_tokens": CONTEXT, "token_buckets": (CONTEXT,), "max_num_seqs": 8}
        self.alone = jpaged.LLM(
            params, num_blocks=8 * CONTEXT // BLOCK, enable_prefix_caching=False, **common, **whole
        )
        self.vocab_size = params.config.vocab_size
        self.text = self.llm.tokenizer.encode(
            Path(__file__).read_text()
        )  # Python, as the model knows it
        self.live: dict[str, tuple[list[int], SamplingParams]] = {}
        self.expected: dict[
            str, list[list[int]]
        ] = {}  # what ended between a snapshot and going back to it
        self.added = self.done = self.compared = self.ties = self.quiet_steps = self.generated = 0
        self.steps = 0  # that this run asked for; a beam search's are not among them
        self.counts, self.memory = dict.fromkeys(RATES, 0), list[float]()
        self.began = self.printed = time.perf_counter()

    def run(self) -> None:
        need = WINDOW * 2.2 * (75 + 50) / BLOCK  # of mean n, prompt and completion
        print(
            f"seed {self.args.seed}; {WINDOW} requests need about {need:.0f} blocks of "
            f"{self.args.num_blocks}"
        )
        print(
            "minutes requests   tok/s  swapped recomputed  copied  hit rate   RSS MiB", flush=True
        )
        while not self.is_over() or self.llm.has_unfinished():
            while len(self.live) < WINDOW and not self.is_over():
                self.add()
            for out in self.step():
                self.take(out, *self.live.pop(out.request_id))
            self.quiet_steps += 1
            check(
                self.quiet_steps < STUCK,
                f"nothing ended in {STUCK} steps, {len(self.live)} requests are unfinished",
            )
            if time.perf_counter() - self.printed >= self.args.interval:
                self.print_line()
        self.print_line()
        self.check_end()

    def is_over(self) -> bool:
        """Whether no more requests are added."""
        if self.args.steps is not None:
            return self.steps >= self.args.steps
        if self.args.requests is not None:
            return self.added >= self.args.requests
        return time.perf_counter() - self.began > self.args.minutes * 60

    def step(self) -> list[jpaged.RequestOutput]:
        """Run a step, and return what it ended."""
        self.steps += 1
        return self.llm.step()

    def request(self) -> tuple[list[int], SamplingParams]:
        """Half of the prompts start at one of four places, and some of those are equal."""
        shared = self.rng.random() < 0.5
        start = 100 * self.rng.randrange(4) if shared else self.rng.randrange(len(self.text) - 160)
        length = (
            self.rng.choice((16, 40, 100))
            if shared and self.rng.random() < 0.5
            else self.rng.randint(1, 160)
        )
        n, max_tokens, ignore_eos = (
            self.rng.choice((1, 1, 2, 3, 4)),
            self.rng.randint(4, 96),
            self.rng.random() < 0.5,
        )
        params = SamplingParams(
            n=n, max_tokens=max_tokens, ignore_eos=ignore_eos, **self.rng.choice(KINDS)
        )
        return self.text[start : start + length], params

    def add(self) -> None:
        request = self.request()
        self.live[self.llm.add_request(*request)] = request
        self.added += 1
        for name, rate in RATES.items():
            if self.rng.random() < rate:
                self.counts[name] += 1
                getattr(self, name)()

    def take(self, out: jpaged.RequestOutput, prompt: list[int], params: SamplingParams) -> None:
        """Check a finished request."""
        self.done, self.quiet_steps = self.done + 1, 0
        self.check_legal(out, prompt, params)
        tokens = [c.token_ids for c in out.outputs]
        expected = self.expected.pop(out.request_id, tokens)
        check(
            tokens == expected, f"{params} of {prompt} gave {tokens}, before the restore {expected}"
        )
        if (params.temperature == 0.0 or params.seed is not None) and self.rng.random() < ALONE:
            self.compare(out, prompt, params)
        if self.done > self.args.warmup and self.done % self.args.memory_every == 0:
            self.memory.append(rss_mib())

    def check_legal(
        self, out: jpaged.RequestOutput, prompt: list[int], params: SamplingParams, *more: str
    ) -> None:
        """more: finish reasons that are legal beside stop and length."""
        longest = min(params.max_tokens or CONTEXT, CONTEXT - len(prompt))
        legal = out.error is None and out.prompt_token_ids == prompt
        legal &= [c.index for c in out.outputs] == list(range(params.n))
        legal &= (
            params.prompt_logprobs is None
            or bool(more)
            or len(out.prompt_logprobs or ()) == len(prompt)
        )
        for c in out.outputs:
            size = len(c.token_ids)
            least = {"length": longest, "stop": params.min_tokens + 1}.get(str(c.finish_reason), 0)
            legal &= c.finish_reason in ("stop", "length", *more) and least <= size <= longest
            legal &= all(0 <= token < self.vocab_size for token in c.token_ids)
            legal &= c.token_logprobs.shape == (size,) and bool(np.isfinite(c.token_logprobs).all())
            legal &= params.logprobs is None or len(c.logprobs or ()) == size
        check(legal, f"not a legal result of {params} of {prompt}: {out}")

    def compare(self, out: jpaged.RequestOutput, prompt: list[int], params: SamplingParams) -> None:
        """Against the same request in an LLM that nothing disturbs."""
        [alone] = self.alone.generate([prompt], params, use_tqdm=False)
        self.compared += 1
        for a, b in zip(out.outputs, alone.outputs, strict=True):
            i = next(
                (
                    i
                    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False))
                    if x != y
                ),
                None,
            )
            greedy = params.temperature == 0.0 and not params.has_penalties
            if i is not None and greedy and abs(a.token_logprobs[i] - b.token_logprobs[i]) < 1e-5:
                self.ties += 1  # logits agree up to rounding, which can turn a near tie
            else:
                same = (a.token_ids, a.text, a.finish_reason) == (
                    b.token_ids,
                    b.text,
                    b.finish_reason,
                )
                check(same, f"{params} of {prompt} gave {a}, alone {b}: from token {i} on")

    def abort(self) -> None:
        request_id = self.rng.choice(list(self.live))
        if (
            out := self.llm.abort(request_id)
        ) is not None:  # else it has ended, and the next step returns it
            self.check_legal(out, *self.live.pop(request_id), "abort")
            self.expected.pop(request_id, None)

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def snapshot(self) -> None:
        """Run on for some steps, then go back: what ended meanwhile is to end the same again."""
        snapshot = self.llm.snapshot()
        for _ in range(self.rng.randint(1, 40)):
            for out in self.step():
                self.expected[out.request_id] = [c.token_ids for c in out.outputs]
        self.llm.restore(snapshot)

    def beam(self) -> None:
        """A beam search amid the other requests, which it steps too."""
        prompt, tokens = self.request()[0][:60], self.rng.randint(2, 16)
        got, alone = (
            llm.beam_search([prompt], 4, tokens, use_tqdm=False)[0]
            for llm in (self.llm, self.alone)
        )
        check(
            got.error is None and all(0 < len(c.token_ids) <= tokens for c in got.outputs),
            f"beam search: {got}",
        )
        scores, wanted = (np.array([c.score for c in out.outputs], float) for out in (got, alone))
        same = scores.shape == wanted.shape and np.allclose(scores, wanted, atol=1e-4)
        check(same, f"beam search of {prompt}: scores {scores}, alone {wanted}")

    def print_line(self) -> None:
        now, s = time.perf_counter(), self.llm.stats()
        rate = (s["generated_tokens"] - self.generated) / (now - self.printed)
        line = (
            f"{(now - self.began) / 60:7.2f} {self.done:8d} {rate:7.0f} "
            f"{s['preemptions_swapped']:8d} "
        )
        line += (
            f"{s['preemptions_recomputed']:10d} {s['copied_blocks']:7d} "
            f"{s['prefix_hit_rate']:9.3f} "
        )
        print(f"{line}{rss_mib():9.1f}", flush=True)
        self.printed, self.generated = now, s["generated_tokens"]

    def check_end(self) -> None:
        self.llm.reset_prefix_cache()
        check(self.llm.step() == [] and not self.live, f"{len(self.live)} requests never ended")
        stats, grown, limit = self.llm.stats(), growth(self.memory), self.args.memory_limit
        for name in ("blocks_in_use", "host_blocks_in_use"):
            check(stats[name] == 0, f"at the end {name} is {stats[name]}")
        check(
            grown <= limit, f"resident memory grew by {grown:.1f} MiB, above the limit of {limit:g}"
        )
        events = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        alone = f"{self.compared} equal to themselves alone, {self.ties} near ties"
        print(
            f"ok: {self.done} requests in {self.steps} steps, {alone}; {events}; "
            f"memory {grown:+.1f} MiB in {len(self.memory)} samples"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long requests are added (default: 5)")
    add("--requests", type=int, help="add so many instead")
    add("--steps", type=int, help="add them until so many steps have run instead")
    add("--seed", type=int, default=0)
    add(
        "--num-blocks",
        type=int,
        default=80,
        help=f"the pool, in blocks of {BLOCK} tokens (default: 80)",
    )
    add(
        "--interval",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="between two lines (default: 15)",
    )
    add(
        "--warmup",
        type=int,
        default=200,
        metavar="REQUESTS",
        help="before memory is sampled (default: 200)",
    )
    add(
        "--memory-every",
        type=int,
        default=10,
        metavar="REQUESTS",
        help="between two samples (default: 10)",
    )
    add(
        "--memory-limit",
        type=float,
        default=32.0,
        metavar="MIB",
        help="growth that is allowed (default: 32)",
    )
    soak = Soak(parser.parse_args(argv))
    try:
        soak.run()
    except Exception as e:
        traceback.print_exc()
        print(
            f"soak: seed {soak.args.seed}, after {soak.done} requests: {e or type(e).__name__}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
